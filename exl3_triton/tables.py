"""Tables of launch parameters: `tuned/<op>/<DEVICE_NAME>.json`, shipped with the package or written by `python -m autotune`.

A table holds entries for one op and device: a problem (sizes, rate, codebook), the most rows of the range that shares the
configuration, the configuration, and the evidence for it. Entries of the user's tables, in $EXL3_TRITON_TUNED_DIR or the
user's cache directory, go before shipped ones. A device without a shipped table of its name takes that of the same compute
capability with the nearest number of multiprocessors. What no entry covers is left to the rules (`ops/tuning.py`, `plan.py`).

Files are read once per device and process. Any file that is not as it should be is refused by name: `TableError`.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
SHIPPED = Path(__file__).parent / "tuned"
VARIABLE = "EXL3_TRITON_TUNED_DIR"

Key = tuple[Any, ...]
"""The values of an op's `KEYS`, in their order."""

KEYS: dict[str, tuple[str, ...]] = {
    "linear": ("k", "n", "codebook", "bits", "rows"),
    "moe": ("num_experts", "hidden", "intermediate", "top_k", "codebook", "bits", "rows"),
    "attention": ("kind", "heads", "kv_heads", "width", "value", "kv", "rows"),
    "indexer": ("heads", "width", "kv", "rows"),
}
"""What names an entry. k, n, hidden, intermediate: as stored, padded to 128; width, value: of a head's query and value as the
kernel sees them (MLA decoding: latent and rope together, and latent); kv: how the cache is stored, a name of
`kv_format.KV_FORMATS`; rows: the most rows that it serves.
"""

RANGES: dict[str, tuple[int, ...]] = {
    "linear": (16, 32, 64, 255),
    "moe": (32, *(1 << i for i in range(6, 13))),
    "attention": (64, 8192),
    "indexer": (8192,),
}
"""The most rows of the ranges that share an entry. moe: the decode plan's, whatever its window is, then prefills. The last one
serves more rows as well, but for linear.
"""

KINDS = ("mla_decode", "mla_sparse_decode", "mla_prefill", "gqa_decode", "gqa_prefill")
"""Of attention."""
KV_FORMATS = ("bf16", "fp8", "nvfp4", "nvfp4-fp8rope")  # those of `kv_format`, which takes a second to import

_POWERS = tuple(1 << i for i in range(4, 9))
_REGISTERS = range(24, 256)
_CONFIGS: dict[str, dict[str, tuple[Any, ...] | range]] = {
    "linear": {
        "block_m": _POWERS, "block_k": _POWERS, "split": range(1, 1 << 16), "num_warps": (1, 2, 4, 8, 16),
        "registers": (None, *_REGISTERS), "prefetch": (False, True), "even": range(17), "stages": range(1, 9),
    },
    "moe": {
        "block_m": (8, 16, 32, 48, 64, 128), "split": range(1, 1 << 16), "down_split": range(1, 1 << 16), "block_k": _POWERS,
        "warps": (1, 2, 4, 8, 16), "registers": (0, *_REGISTERS), "small": (0, 8, 16, 32, 64), "prefetch": (0, 1),
    },
    "attention": {
        "rows": _POWERS[:4], "keys": _POWERS[:4], "warps": (1, 2, 4, 8, 16), "stages": range(1, 9), "parts": (1, 2),
        "words": (False, True), "most": range(1025),
    },
    "indexer": {
        "keys": _POWERS[:3], "span": tuple(1 << i for i in range(6, 14)), "warps": (1, 2, 4, 8, 16), "stages": range(1, 9),
    },
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {"linear": {"even": 0, "stages": 1}, "moe": {}, "attention": {}, "indexer": {}}
"""Parameters that an entry may leave out: tables written before they existed hold."""

_NAMES = {"codebook": ("3inst", "mcg", "mul1"), "kind": KINDS, "kv": KV_FORMATS}
_EVIDENCE = {"measured": ("us", "date", "torch", "triton", "driver"), "predicted": ("us", "predictor", "triton")}


class TableError(ValueError):
    """A table that cannot be read or written; the message names the file."""


@dataclass(frozen=True)
class Entry:
    """config: the op's launch parameters by name. evidence: `source` ("measured" or "predicted"), `us` (rows -> microseconds)
    and where they come from.
    """

    config: Mapping[str, Any]
    evidence: Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """One file. processors: multiprocessors of the device, which the split of k was chosen for."""

    op: str
    device: str
    capability: tuple[int, int]
    processors: int
    entries: Mapping[Key, Entry]


def file_name(device: str) -> str:
    """ "NVIDIA GeForce RTX 5090" -> "NVIDIA_GeForce_RTX_5090.json"."""
    return re.sub(r"[^0-9A-Za-z.-]+", "_", device).strip("_") + ".json"


def user_directory() -> Path:
    """Where the user's tables lie: $EXL3_TRITON_TUNED_DIR, else a folder in the user's cache directory."""
    if chosen := os.environ.get(VARIABLE, "").strip():
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "exl3_triton" / "tuned"


def _refuse(path: Path, what: str) -> TableError:
    return TableError(f"table {path}: {what}: delete the file, or write it again with `python -m autotune`")


def _check_attention(key: Key, config: Mapping[str, Any]) -> None:
    """Raises ValueError for a tile that the kernel of this kind does not take."""
    kind, kv, rows = key[0], key[-2], key[-1]
    decode, latent = kind.endswith("decode"), kind in ("mla_decode", "mla_sparse_decode")
    rules = {
        f"most={config['most']}": (config["most"] > 0) == decode,
        f"keys={config['keys']}": config["keys"] <= 64 or kind == "mla_prefill",
        f"parts={config['parts']}": config["parts"] == 1 or (latent and kv == "bf16"),
        f"words={config['words']}": not config["words"] or (latent and kv == "fp8"),
        f"kv={kv}": kv == "bf16" or latent or (kv == "fp8" and kind != "mla_prefill"),
        f"rows={rows}": decode or rows == RANGES["attention"][-1],
    }
    if wrong := [what for what, holds in rules.items() if not holds]:
        raise ValueError(f"entry {key}: {', '.join(wrong)}: not possible with {kind} of {kv}")


def _check_entry(op: str, entry: Any) -> tuple[Key, Entry]:
    """Raises ValueError, KeyError or TypeError for what is no entry."""
    key = tuple(entry[name] for name in KEYS[op])
    for name, value in zip(KEYS[op], key):
        if name in _NAMES and value not in _NAMES[name]:
            raise ValueError(f"entry {key}: {name}={value!r}: required one of {', '.join(_NAMES[name])}")
        if name not in _NAMES and name != "bits" and not (type(value) is int and value > 0):
            raise ValueError(f"entry {key}: {name}={value!r}: required a positive number")
    config, evidence = _DEFAULTS[op] | entry["config"], entry["evidence"]
    allowed = _CONFIGS[op]
    if set(config) != set(allowed):
        raise ValueError(f"entry {key}: config has {sorted(config)}: required {sorted(allowed)}")
    for name, values in allowed.items():
        if config[name] not in values or isinstance(config[name], bool) != isinstance(values[-1], bool):
            raise ValueError(f"entry {key}: {name}={config[name]!r} is not possible")
    if op == "linear" and (key[0] % config["block_k"] or config["split"] > key[0] // config["block_k"]):
        raise ValueError(f"entry {key}: k={key[0]} has no {config['split']} parts of blocks of {config['block_k']}")
    if op == "linear" and config["even"] and config["split"] != 1:
        raise ValueError(f"entry {key}: required a split of 1 with even={config['even']}")
    if key[-1] not in RANGES[op]:
        raise ValueError(f"entry {key}: required rows of {', '.join(map(str, RANGES[op]))}")
    if op == "moe" and key[-1] > RANGES[op][0] and (config["split"], config["down_split"]) != (1, 1):
        raise ValueError(f"entry {key}: required split and down_split of 1 above {RANGES[op][0]} rows")
    if op == "moe" and (config["small"] >= config["block_m"] or (config["block_m"] == 48 and config["prefetch"])):
        raise ValueError(
            f"entry {key}: small={config['small']}, prefetch={config['prefetch']}: not with block_m={config['block_m']}"
        )
    if op == "attention":
        _check_attention(key, config)
    if op == "indexer" and config["span"] % config["keys"]:
        raise ValueError(f"entry {key}: span={config['span']}: required a multiple of keys={config['keys']}")
    missing = [name for name in _EVIDENCE[evidence["source"]] if name not in evidence]
    if missing or not all(us > 0 for us in evidence["us"].values()):
        raise ValueError(f"entry {key}: evidence lacks {', '.join(missing) or 'positive times'}")
    return key, Entry(entry["config"], evidence)


def load(path: Path, op: str) -> Table:
    """Reads and checks one file. Raises TableError for an unreadable or damaged one, another op's, or another schema's."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _refuse(path, f"{type(error).__name__}: {error}") from error
    if not isinstance(content, dict) or "schema" not in content:
        raise _refuse(path, "required a JSON object with a schema number")
    if content["schema"] != SCHEMA:
        raise _refuse(path, f"schema {content['schema']!r}: this version reads schema {SCHEMA}")
    try:
        if content["op"] != op:
            raise ValueError(f"op {content['op']!r}: required {op!r}")
        major, minor = content["capability"]
        entries = dict(_check_entry(op, entry) for entry in content["entries"])
        if len(entries) != len(content["entries"]):
            raise ValueError("two entries for one problem")
        return Table(op, str(content["device"]), (int(major), int(minor)), int(content["processors"]), entries)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _refuse(path, f"{type(error).__name__}: {error}") from error


def _best_name(device: str, files: Iterable[Path]) -> Path | None:
    """The file of the device's name, else the longest that its name begins with (cards whose variants share a table)."""
    stem = file_name(device).removesuffix(".json")
    fits = [path for path in files if stem == path.stem or stem.startswith(path.stem + "_")]
    return max(fits, key=lambda path: len(path.stem), default=None)


@functools.cache
def entries_for(op: str, device: str, capability: tuple[int, int], processors: int) -> Mapping[Key, tuple[Entry, int]]:
    """All entries that hold for a device, each with the multiprocessors it was chosen for; the user's before the shipped ones.

    Reads files in the first call for a device, none later. Raises TableError for a damaged one.
    """
    shipped = sorted((SHIPPED / op).glob("*.json"))
    users = sorted((user_directory() / op).glob("*.json"))
    found: dict[Key, tuple[Entry, int]] = {}
    path = _best_name(device, shipped)
    if path is not None:
        table: Table | None = load(path, op)
    else:
        alike = [each for each in (load(path, op) for path in shipped) if each.capability == capability]
        table = min(alike, key=lambda each: (abs(each.processors - processors), each.device), default=None)
    own = _best_name(device, users)
    for each in (table, load(own, op) if own is not None else None):
        if each is not None:
            found |= {key: (entry, each.processors) for key, entry in each.entries.items()}
    return found


def dumps(table: Table) -> str:
    """The file's text: one entry a line, in the order of their keys."""
    head = {"schema": SCHEMA, "op": table.op, "device": table.device, "capability": list(table.capability)}
    head |= {"processors": table.processors}
    lines = [
        json.dumps(dict(zip(KEYS[table.op], key)) | {"config": dict(entry.config), "evidence": dict(entry.evidence)})
        for key, entry in sorted(table.entries.items())
    ]
    return json.dumps(head)[:-1] + ', "entries": [\n' + ",\n".join(lines) + "\n]}\n"


def save(directory: Path, table: Table) -> Path:
    """Merges a table into <directory>/<op>/<DEVICE_NAME>.json: new entries replace those of the same problem.

    Safe against other writers (a lock file beside it) and against being killed (a temporary file takes the old one's place).
    Returns the path. Raises TableError where the present file is damaged, or the place cannot be written.
    """
    from filelock import FileLock

    path = directory / table.op / file_name(table.device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            entries = dict(load(path, table.op).entries) if path.exists() else {}
            merged = Table(table.op, table.device, table.capability, table.processors, entries | dict(table.entries))
            text = dumps(merged)
            if path.exists() and path.read_text(encoding="utf-8") == text:
                return path
            with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
    except OSError as error:
        raise TableError(f"table {path}: cannot be written: {error}: choose another folder by ${VARIABLE}") from error
    return path
