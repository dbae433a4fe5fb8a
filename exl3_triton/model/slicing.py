"""`exl3-triton slice`: routed experts of a plain EXL3 checkpoint, cut into the slices of a rank-sliced one.

A cut on a multiple of 128 features lies between rotation blocks and between tiles: W = diag(suh) P W' P diag(svh) falls apart
into matrices of the same form, made of the same words. Nothing is decoded or quantized again. Where slices that were quantized
one by one have rotations of their own, these share the vector along the side that is not cut; it is stored for each rank.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from ..format import HADAMARD, Codebook, ExpertWeights, FormatError, canonical_name
from .checkpoint import INDEX_FILE, Checkpoint, TensorInfo, listing, paused_garbage_collection, read_json_object
from .config import ModelConfig
from .inspect import preflight, stores_mtp
from .loader import WeightSource
from .manifest import MANIFEST, hash_file
from .rank_sliced import FORMAT, PROJECTIONS, SECTION, SHARED_VECTOR, TENSOR_SCHEMA

PARTIAL = f"{MANIFEST}.partial"  # what is finished, while slicing goes on
_CHUNK = 16 << 20


class _Piece(NamedTuple):
    """A tensor to be written: a whole one, or part `rank` of `parts` along `axis`."""

    name: str
    shape: tuple[int, ...]
    info: TensorInfo
    axis: int = 0
    parts: int = 1
    rank: int = 0

    @property
    def nbytes(self) -> int:
        return self.info.nbytes // self.parts


@dataclass(frozen=True)
class SliceReport:
    """What `slice_checkpoint` did: first and last layer cut, files written now and kept from an earlier run, bytes written."""

    tp: int
    layers: tuple[int, int]
    written: int
    kept: int
    bytes: int


def slice_checkpoint(
    source: str | os.PathLike[str], destination: str | os.PathLike[str], tp: int, *, progress: bool = True
) -> SliceReport:
    """Write a rank-sliced copy of a plain EXL3 checkpoint, one file for each layer of experts, the rest as it is.

    Called again after an interruption it keeps the files that are finished, which `MANIFEST.sha256.partial` lists with
    their hashes; `config.json` is written last, so that an unfinished copy does not open. Ends with `MANIFEST.sha256`.
    Raises FormatError, before it writes, for experts that cannot be cut (not EXL3, widths off multiples of 128 x tp, more than
    one codebook or one without a marker), for a destination that holds anything else, and for too little space.
    """
    source, destination = Path(source), Path(destination)
    with paused_garbage_collection():
        checkpoint = Checkpoint.open(source)
        layers, section, tiers = _describe(checkpoint, tp)
        files = _files(checkpoint, layers, tp, section["codebook"])
    if destination.resolve() == source.resolve():
        raise FormatError(f"{destination}: found the source, required another directory")
    fingerprint = _fingerprint(checkpoint, tp)
    finished = _finished(destination, fingerprint)
    finished = {
        name: digest
        for name, digest in finished.items()
        if name in files and (destination / name).is_file() and (destination / name).stat().st_size == files[name].size
    }
    destination.mkdir(parents=True, exist_ok=True)
    todo = {name: file for name, file in files.items() if name not in finished}
    needed, free = sum(file.size for file in todo.values()), shutil.disk_usage(destination).free
    if needed > free:
        raise FormatError(f"{destination}: found {free / 1e9:.1f} GB free, required {needed / 1e9:.1f} GB")
    lines = [f"# {fingerprint}", *(f"{digest}  {name}" for name, digest in finished.items())]
    _replace(destination / PARTIAL, "".join(f"{line}\n" for line in lines).encode())
    with (
        (destination / PARTIAL).open("a", encoding="utf-8") as partial,
        tqdm(total=needed, unit="B", unit_scale=True, desc="slicing", disable=not progress) as bar,
    ):
        maps: dict[str, memoryview] = {}
        for name, file in todo.items():
            digest = _write(destination / name, file, source, maps, bar)
            finished[name] = digest
            partial.write(f"{digest}  {name}\n")
            partial.flush()
            os.fsync(partial.fileno())
    finished |= _write_rest(checkpoint, destination, files, section, tiers)
    _replace(destination / MANIFEST, "".join(f"{finished[name]}  {name}\n" for name in sorted(finished)).encode())
    (destination / PARTIAL).unlink()
    return SliceReport(tp, (layers[0], layers[-1]), len(todo), len(files) - len(todo), needed)


def _describe(checkpoint: Checkpoint, tp: int) -> tuple[list[int], dict[str, Any], dict[str, Any] | None]:
    """The layers whose experts are cut, the `hybrid_tr3_tail` of the result, and `tier_bitmap.json` where it needs one."""
    path = checkpoint.path
    if tp < 1:
        raise ValueError(f"tp: found {tp}, required at least 1")
    if checkpoint.rank_sliced:
        raise FormatError(f"{path}: found a rank-sliced checkpoint, required a plain EXL3 one (slices cannot be cut again)")
    config = ModelConfig.from_dir(path)
    preflight(checkpoint, config, mtp=stores_mtp(checkpoint, config))
    sparse = [layer for layer, kind in enumerate(config.layer_kinds) if kind == "sparse"]
    behind = [config.num_layers] if stores_mtp(checkpoint, config) else []
    experts: dict[int, ExpertWeights] = {}
    with WeightSource(checkpoint, "meta", torch.float16) as headers:
        sizes = config.num_experts, config.hidden_size, config.moe_intermediate_size
        for layer in (*sparse, *behind):
            name = f"layers.{layer}.mlp.experts"
            found = headers.experts(name, *sizes)
            if isinstance(found, ExpertWeights):
                experts[layer] = found
            elif layer in sparse:
                raise FormatError(f"{path}: {name}: found unquantized experts, required EXL3 (slices are EXL3 matrices)")
    layers = sorted(experts)
    if not layers:
        raise FormatError(f"{path}: found no routed experts, required some (they are what is sliced)")
    if layers != list(range(layers[0], layers[-1] + 1)):
        raise FormatError(f"{path}: found experts in layers {layers}, required a span without holes (moe_layers)")
    if tp > 1 and config.moe_intermediate_size % (HADAMARD * tp):
        raise FormatError(
            f"{path}: moe_intermediate_size: found {config.moe_intermediate_size}, which does not divide into {tp} parts of a "
            f"multiple of {HADAMARD} (128-wide rotation blocks); required: a multiple of {HADAMARD * tp}"
        )
    legacy = [name for name in checkpoint.tensors if ".mlp.experts." in name and name.endswith((".su", ".sv"))]
    if legacy:
        raise FormatError(f"{path}: found legacy packed signs, required .suh and .svh: {listing(legacy)}")
    return layers, *_metadata(path, experts, tp)


def _metadata(path: Path, experts: Mapping[int, ExpertWeights], tp: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
    rates = {
        layer: [tuple(projection.layout[expert][1] for projection in each.projections) for expert in range(each.num_experts)]
        for layer, each in experts.items()
    }
    codebooks = {entry[2] for each in experts.values() for projection in each.projections for entry in projection.layout}
    found = ", ".join(Codebook(codebook).label for codebook in sorted(codebooks))
    if len(codebooks) > 1 or Codebook(next(iter(codebooks))).marker is None:
        raise FormatError(
            f"{path}: found experts with codebook {found}, required mcg or mul1 throughout (slices carry a marker)"
        )
    count = next(iter(experts.values())).num_experts
    section: dict[str, Any] = {"format": FORMAT, "bits": 0, "codebook": found, "experts_per_layer": count}
    section |= {"tr3_tail_per_layer": count, "moe_layers": [min(experts), max(experts)], "tp": tp}
    section |= {"tensor_schema": TENSOR_SCHEMA % found, "rotation_layout": "per_expert_v1"}
    distinct = sorted({rate for layer in rates.values() for expert in layer for rate in expert})
    tiers = None
    if len(distinct) == 1:
        section["bits"] = distinct[0] / 2
    elif all(len(set(expert)) == 1 for layer in rates.values() for expert in layer):
        section |= {"bits": "mixed", "bits_per_expert": "tier_bitmap.json:k"}
        tiers = {str(layer): {"k": [_rate(expert[0]) for expert in each]} for layer, each in sorted(rates.items())}
    else:
        section["bits"] = "mixed_tensor"
    if len(distinct) > 1:
        section["k_values"] = [_rate(rate) for rate in distinct]
    return section, tiers


def _rate(twice_bits: int) -> int | float:
    return twice_bits // 2 if twice_bits % 2 == 0 else twice_bits / 2


class _File:
    """A safetensors file to be written: its pieces, header and size."""

    def __init__(self, pieces: list[_Piece]):
        # wide types first, so that every tensor is aligned; otherwise in the order in which a loader fills its slabs
        self.pieces = sorted(pieces, key=lambda piece: -_width(piece.info))
        header, offset = {}, 0
        for piece in self.pieces:
            header[piece.name] = {
                "dtype": piece.info.dtype,
                "shape": list(piece.shape),
                "data_offsets": [offset, offset + piece.nbytes],
            }
            offset += piece.nbytes
        encoded = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        self.header = struct.pack("<Q", len(encoded)) + encoded
        self.size = len(self.header) + offset


def _width(info: TensorInfo) -> int:
    return info.nbytes // max(math.prod(info.shape), 1)


def _files(checkpoint: Checkpoint, layers: list[int], tp: int, codebook: str) -> dict[str, _File]:
    """Every file of the result that holds weights, by name."""
    tensors = checkpoint.tensors
    taken: set[str] = set()
    files: dict[str, _File] = {}
    for layer in layers:
        pieces = []
        experts = f"layers.{layer}.mlp.experts"
        count = 1 + max(int(name.split(".")[4]) for name in tensors if name.startswith(f"{experts}."))
        for rank in range(tp):
            for projection in PROJECTIONS:
                for suffix in ("trellis", "suh", "svh", codebook):
                    for expert in range(count):
                        name = f"{experts}.{expert}.{projection}.{suffix}"
                        taken.add(name)
                        sliced = f"model.{experts}.{expert}.{projection}.rank{rank}.{suffix}"
                        pieces.append(_cut(sliced, tensors[name], projection, suffix, tp, rank))
        files[f"model-layer-{layer:03d}.safetensors"] = _File(pieces)
    rest: dict[str, list[_Piece]] = {}
    for name, info in tensors.items():
        if name not in taken:
            rest.setdefault(info.file, []).append(_Piece(info.name, info.shape, info))
    for index, shard in enumerate(sorted(rest), 1):
        files[f"model-{index:05d}-of-{len(rest):05d}.safetensors"] = _File(rest[shard])
    return files


def _cut(name: str, info: TensorInfo, projection: str, suffix: str, tp: int, rank: int) -> _Piece:
    """Gate and up are cut along the output, down along the input; the vector of the other side goes to every rank."""
    if suffix not in ("trellis", "suh", "svh"):
        return _Piece(name, (), info)
    if suffix == SHARED_VECTOR[projection]:
        return _Piece(name, info.shape, info)
    axis = 1 if suffix == "trellis" and projection != "down_proj" else 0
    shape = tuple(size // tp if index == axis else size for index, size in enumerate(info.shape))
    return _Piece(name, shape, info, axis, tp, rank)


def _view(maps: dict[str, memoryview], source: Path, info: TensorInfo) -> memoryview:
    """The tensor's bytes in its file, mapped; a map is closed when its last view goes."""
    if info.file not in maps:
        with (source / info.file).open("rb") as file:
            maps[info.file] = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return maps[info.file][info.offset : info.offset + info.nbytes]


def _blocks(view: memoryview, piece: _Piece) -> Iterator[memoryview | bytes]:
    """A piece's bytes: a run of the source, or one run in each row of the axes before the one that is cut."""
    rows = math.prod(piece.info.shape[: piece.axis])
    row = len(view) // max(rows, 1)
    width = row // piece.parts
    start = piece.rank * width
    if rows > 1:
        yield b"".join(view[index * row + start : index * row + start + width] for index in range(rows))
        return
    for begin in range(start, start + width, _CHUNK):
        yield view[begin : min(begin + _CHUNK, start + width)]


def _write(path: Path, file: _File, source: Path, maps: dict[str, memoryview], bar: Any) -> str:
    """Write one file under another name, move it into place; returns its SHA-256."""
    unfinished = path.with_name(path.name + ".tmp")
    digest = hashlib.sha256(file.header)
    with unfinished.open("wb") as out:
        out.write(file.header)
        bar.update(len(file.header))
        for piece in file.pieces:
            for block in _blocks(_view(maps, source, piece.info), piece):
                out.write(block)
                digest.update(block)
                bar.update(len(block))
        out.flush()
        os.fsync(out.fileno())
    os.replace(unfinished, path)
    return digest.hexdigest()


def _write_rest(
    checkpoint: Checkpoint,
    destination: Path,
    files: Mapping[str, _File],
    section: Mapping[str, Any],
    tiers: Mapping[str, Any] | None,
) -> dict[str, str]:
    """Everything that is not weights, `config.json` last; returns the hashes."""
    weight_map = {piece.name: name for name, file in files.items() for piece in file.pieces}
    total = sum(piece.nbytes for file in files.values() for piece in file.pieces)
    made: dict[str, Any] = {INDEX_FILE: {"metadata": {"total_size": total}, "weight_map": weight_map}}
    storage = checkpoint.path / "quantization_config.json"
    if storage.is_file():
        hints = read_json_object(storage)
        stored = hints.get("tensor_storage")
        if isinstance(stored, dict):
            span = range(section["moe_layers"][0], section["moe_layers"][1] + 1)
            gone = tuple(f"layers.{layer}.mlp.experts." for layer in span)
            kept = {name: entry for name, entry in stored.items() if not canonical_name(name).startswith(gone)}
            hints["tensor_storage"] = kept
        made[storage.name] = hints
    if tiers is not None:
        made["tier_bitmap.json"] = tiers
    hashes = {}
    for path in sorted(checkpoint.path.iterdir()):
        ours = path.name in made or path.name in ("config.json", INDEX_FILE, MANIFEST, PARTIAL)
        if path.is_file() and not ours and path.suffix != ".safetensors":
            shutil.copyfile(path, destination / path.name)
            hashes[path.name] = hash_file(destination / path.name)
    config = json.loads(json.dumps(checkpoint.config_dict))
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part[SECTION] = dict(section)
    made["config.json"] = config
    for name, content in made.items():
        _replace(destination / name, (json.dumps(content, indent=1) + "\n").encode())
        hashes[name] = hash_file(destination / name)
    return hashes


def _replace(path: Path, content: bytes) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def _fingerprint(checkpoint: Checkpoint, tp: int) -> str:
    """Tells one source and tp from another: headers, sizes and times of the files, the config."""
    digest = hashlib.sha256(json.dumps([tp, checkpoint.config_dict], sort_keys=True).encode())
    for file in sorted({info.file for info in checkpoint.tensors.values()}):
        status = (checkpoint.path / file).stat()
        digest.update(f"{file} {status.st_size} {status.st_mtime_ns}".encode())
    for info in sorted(checkpoint.tensors.values()):
        digest.update(repr(info).encode())
    return digest.hexdigest()


def _finished(destination: Path, fingerprint: str) -> dict[str, str]:
    """Name -> hash of the files that an interrupted run has finished; refuses a directory that holds anything else."""
    if not destination.exists():
        return {}
    if not destination.is_dir():
        raise FormatError(f"{destination}: found a file, required a directory that is new, empty or an unfinished copy")
    partial = destination / PARTIAL
    if not partial.is_file():
        if any(destination.iterdir()):
            what = "a finished copy" if (destination / MANIFEST).is_file() else "other files"
            raise FormatError(f"{destination}: found {what}, required a directory that is new, empty or an unfinished copy")
        return {}
    head, *lines = partial.read_text(encoding="utf-8").splitlines() or [""]
    if head != f"# {fingerprint}":
        raise FormatError(
            f"{destination}: found an unfinished copy of another checkpoint or another tp, required one of this source "
            "(remove it to begin anew)"
        )
    pairs = (line.split("  ", 1) for line in lines)
    return {pair[1]: pair[0] for pair in pairs if len(pair) == 2 and len(pair[0]) == 64}
