"""What a checkpoint holds, what it needs, and whether it will run: from file headers, config and codebook markers alone."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..format import HADAMARD, TILE, FormatError
from .checkpoint import Checkpoint, TensorInfo, paused_garbage_collection
from .config import FAMILIES, ModelConfig, text_config
from .loader import FP32_NAMES, WeightSource, mtp_prefixes
from .mtp import FAMILIES as MTP_FAMILIES
from .mtp import copies_of_the_trunk
from .rank_sliced import RankSliced
from .transformer import Transformer

CLASSES = (
    "attention", "dense mlp", "routed experts", "shared experts", "indexer", "lm_head", "embedding", "mtp", "other",
)  # fmt: skip
CACHE_BYTES = 2  # an element of the latent and index-key caches (bf16 or fp16)
_OVERHEAD = frozenset(("suh", "svh", "su", "sv", "mcg", "mul1"))  # stored beside a trellis; not parameters of the model
_CUT_BY_OUTPUT = frozenset(("q_b_proj", "q_proj", "kv_b_proj", "gate_proj", "up_proj", "lm_head", "embed_tokens"))
_CUT_BY_INPUT = frozenset(("o_proj", "down_proj"))
_RANK = re.compile(r"\.rank(\d+)(?=\.)")


@dataclass
class _ModuleClass:
    """Running totals of one class of modules; parameters count stored weights, padding to 128 included."""

    parameters: int = 0
    bytes: int = 0
    quantized_matrices: int = 0
    plain_matrices: int = 0
    rates: Counter[str] = field(default_factory=Counter)
    codebooks: Counter[str] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)

    def report(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "bytes": self.bytes,
            "bits_per_weight": round(8 * self.bytes / self.parameters, 3) if self.parameters else None,
            "quantized_matrices": self.quantized_matrices,
            "plain_matrices": self.plain_matrices,
            "rates": dict(sorted(self.rates.items())),
            "codebooks": dict(sorted(self.codebooks.items())),
            "dtypes": dict(sorted(self.dtypes.items())),
        }


def inspect_checkpoint(path: str | os.PathLike[str], *, tp: int = 1) -> dict[str, Any]:
    """A JSON-serialisable report on a checkpoint directory at `tp` tensor-parallel ranks.

    Keys: family and config problems, sizes (bytes; parameters with padding), per class of modules the bits a weight, rates and
    codebooks, what is quantized, memory per rank (weights, and cache bytes a token in 2-byte elements), `runs` and, if it does
    not, `problems`, each naming tensor and rule. An unsupported family is reported, not an error. Raises FormatError for a
    directory that is no sound checkpoint, ValueError for tp < 1.
    """
    if tp < 1:
        raise ValueError(f"tp: found {tp}, required at least 1")
    with paused_garbage_collection():
        return _inspect(Checkpoint.open(path), tp)


def _inspect(checkpoint: Checkpoint, tp: int) -> dict[str, Any]:
    family = text_config(checkpoint.config_dict).get("model_type")
    problems: list[str] = []
    config = None
    try:
        config = ModelConfig.from_dir(checkpoint.path)
    except ValueError as error:
        problems.append(str(error))
    classes, cuts, memory = _survey(checkpoint, config, tp)
    sliced = _rank_sliced(checkpoint, problems)
    if config is not None:
        problems += _tp_problems(checkpoint, config, cuts, tp)
        try:
            preflight(checkpoint, config)
        except ValueError as error:
            if str(error) not in problems:
                problems.append(str(error))
    if tp > 1:
        problems.append(f"tp = {tp}: this version runs a model on one device")
    total = sum(each.bytes for each in classes.values())
    parameters = sum(each.parameters for each in classes.values())
    hints = checkpoint.quantization_config or {}
    return {
        "path": str(checkpoint.path),
        "family": family,
        "supported": isinstance(family, str) and family in FAMILIES,
        "files": len({info.file for info in checkpoint.tensors.values()}),
        "tensors": len(checkpoint.tensors),
        "bytes": total,
        "parameters": parameters,
        "bits_per_weight": round(8 * total / parameters, 3) if parameters else None,
        "classes": {name: each.report() for name, each in classes.items() if each.bytes},
        "codebooks": sorted({codebook for each in classes.values() for codebook in each.codebooks}),
        "quantized": [name for name, each in classes.items() if each.quantized_matrices],
        "unquantized": [name for name, each in classes.items() if each.bytes and not each.quantized_matrices],
        "rank_sliced": sliced,
        "declared": {key: hints[key] for key in ("quant_method", "bits", "head_bits", "codebook", "version") if key in hints},
        "tp": tp,
        "memory": memory | _cache_memory(config),
        "runs": not problems,
        "problems": problems,
    }


def _rank_sliced(checkpoint: Checkpoint, problems: list[str]) -> dict[str, Any] | None:
    """The set of rank-sliced experts: what it should be and whether it is there; None for other checkpoints."""
    if not checkpoint.rank_sliced:
        return None
    stored_tp = (checkpoint.rank_sliced_config or {}).get("tp", len(checkpoint.ranks))
    report: dict[str, Any] = {"tp": stored_tp, "ranks": list(checkpoint.ranks), "complete": False}
    try:
        described = RankSliced.describe(checkpoint)
        assert described is not None  # the checkpoint is rank-sliced
        rates = sorted(described.allowed)
        report |= {
            "layers": [described.layers[0], described.layers[-1]],
            "experts": described.num_experts,
            "codebook": described.codebook.label,
            "rates": [rate // 2 if rate % 2 == 0 else rate / 2 for rate in rates],
            "layout": described.layout,
            "tensors": sum(1 for layer in described.layers for _ in described.names(layer)),
            "missing": len(described.missing(checkpoint.tensors)),
        }
        RankSliced.of(checkpoint)
        report["complete"] = True
    except FormatError as error:
        problems.append(str(error))
    return report


def stores_mtp(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Whether the checkpoint brings a next-token layer that `load(..., mtp=True)` would take."""
    known = config.model_type in MTP_FAMILIES and config.num_mtp_layers == 1
    return known and any(name.startswith(f"layers.{config.num_layers}.") for name in checkpoint.tensors)


def preflight(checkpoint: Checkpoint, config: ModelConfig, *, mtp: bool = False) -> None:
    """Exactly the checks that `load` makes of headers before it reads weights; raises FormatError."""
    dtype = torch.float16
    with WeightSource(checkpoint, "meta", dtype) as headers:
        Transformer(config, headers, dtype=dtype, max_context=1, mtp=mtp)
        headers.finish(copies_of_the_trunk(config) if mtp else mtp_prefixes(config))


def _survey(
    checkpoint: Checkpoint, config: ModelConfig | None, tp: int
) -> tuple[dict[str, _ModuleClass], dict[tuple[str, str, int], str], dict[str, Any]]:
    """Totals per class; what tensor parallelism cuts, (class, leaf, size) -> one such tensor; weight bytes per rank."""
    classes = {name: _ModuleClass() for name in CLASSES}
    cuts: dict[tuple[str, str, int], str] = {}
    tensors = checkpoint.tensors
    layers = config.num_layers if config is not None else text_config(checkpoint.config_dict).get("num_hidden_layers")
    # bytes by "is the MTP layer's": held by every rank, divided over the ranks, stored in slices (by rank)
    whole: Counter[bool] = Counter()
    divided: Counter[bool] = Counter()
    sliced: Counter[tuple[bool, int]] = Counter()
    for name, info in tensors.items():
        prefix, _, suffix = name.rpartition(".")
        rank = None
        if ".rank" in prefix and (match := _RANK.search(name)):
            rank, prefix = int(match.group(1)), prefix[: match.start()]
        kind = _class_of(name, layers)
        each = classes[kind]
        each.bytes += info.nbytes
        leaf = prefix.rpartition(".")[2]
        resident = info.nbytes
        if suffix == "trellis" and len(info.shape) == 3:
            rows, columns, words = info.shape
            each.parameters += rows * columns * TILE * TILE
            each.quantized_matrices += 1
            each.rates[f"{words / 16:g}"] += 1
            markers = [marker for marker in ("mcg", "mul1") if f"{name[:-7]}{marker}" in tensors]
            each.codebooks["+".join(markers) or "3inst"] += 1
        elif suffix not in _OVERHEAD:
            size = math.prod(info.shape)
            each.parameters += size
            each.dtypes[info.dtype] += 1
            each.plain_matrices += len(info.shape) > 1
            resident = size * (4 if name.endswith(FP32_NAMES) else min(2, -(-info.nbytes // max(size, 1))))
        cut = _cut_size(leaf, suffix, info) if rank is None and ".indexer." not in name else None
        if cut is not None:
            cuts.setdefault((kind, leaf, cut), name)
        mtp = kind == "mtp"
        if rank is not None:
            sliced[mtp, rank] += resident
        elif cut is not None:
            divided[mtp] += resident
        else:
            whole[mtp] += resident

    def per_rank(mtp: bool) -> int:
        mine = [size for (is_mtp, _), size in sliced.items() if is_mtp == mtp]
        together = -(-len(mine) // tp)  # a rank takes several slices where there are fewer ranks than slices
        return whole[mtp] + -(-divided[mtp] // tp) + sum(sorted(mine)[-together:] if mine else [])

    return classes, cuts, {"weight_bytes_per_rank": per_rank(False), "mtp_weight_bytes_per_rank": per_rank(True)}


def _class_of(name: str, num_layers: Any) -> str:
    head, _, rest = name.partition(".")
    if head == "layers":
        layer, _, rest = rest.partition(".")
        if isinstance(num_layers, int) and layer.isdecimal() and int(layer) >= num_layers:
            return "mtp"
        if rest.startswith("mlp.experts."):
            return "routed experts"
        if rest.startswith("self_attn."):
            return "indexer" if rest.startswith("self_attn.indexer.") else "attention"
        if rest.startswith("mlp.shared_experts."):
            return "shared experts"
        return "dense mlp" if rest.startswith(("mlp.gate_proj.", "mlp.up_proj.", "mlp.down_proj.")) else "other"
    return {"lm_head": "lm_head", "embed_tokens": "embedding"}.get(head, "other")


def _cut_size(leaf: str, suffix: str, info: TensorInfo) -> int | None:
    """The size that tensor parallelism divides, in features; None for what every rank holds whole."""
    by_output = leaf in _CUT_BY_OUTPUT
    if not by_output and leaf not in _CUT_BY_INPUT:
        return None
    if suffix == "trellis" and len(info.shape) == 3:
        return info.shape[1 if by_output else 0] * TILE
    if suffix == "weight" and len(info.shape) == 2:
        return info.shape[0 if by_output else 1]
    return None


def _tp_problems(checkpoint: Checkpoint, config: ModelConfig, cuts: dict[tuple[str, str, int], str], tp: int) -> list[str]:
    problems = []
    if checkpoint.rank_sliced:
        stored = (checkpoint.rank_sliced_config or {}).get("tp", len(checkpoint.ranks))
        if not isinstance(stored, int) or stored < 1 or stored % tp:
            problems.append(f"experts are stored in slices for tp = {stored}, which tp = {tp} does not divide")
    if tp == 1:
        return problems
    if config.num_heads % tp:
        problems.append(f"num_attention_heads = {config.num_heads} is not divisible by tp = {tp}")
    for (_, _, size), name in cuts.items():
        if name.startswith(("lm_head.", "embed_tokens.")):
            continue  # whole blocks of the vocabulary may be divided unevenly
        quantized = name.endswith(".trellis")
        logical = _logical_cut(config, name, size)
        unit = HADAMARD if quantized else 1
        if logical % (unit * tp):
            rule = f"a rank's part must be a multiple of {HADAMARD}" if quantized else "ranks hold equal parts"
            problems.append(f"{name}: {logical} features cannot be divided over tp = {tp} ({rule})")
    return problems


def _logical_cut(config: ModelConfig, name: str, stored: int) -> int:
    """The features, before padding to 128, that the stored size of a matrix stands for."""
    leaf = name.rpartition(".")[0].rpartition(".")[2]
    if leaf in ("q_b_proj", "q_proj"):
        return config.num_heads * config.head_dim
    if leaf in ("k_proj", "v_proj"):
        return config.num_kv_heads * config.head_dim
    if leaf == "o_proj":
        return config.num_heads * config.v_head_dim
    if ".mlp.experts." in name:
        return config.moe_intermediate_size
    if ".mlp.shared_experts." in name:
        return config.moe_intermediate_size * config.num_shared_experts
    return config.intermediate_size if ".mlp." in name else stored


def _cache_memory(config: ModelConfig | None) -> dict[str, Any]:
    if config is None:
        return {"latent_bytes_per_token": None, "index_bytes_per_token": None, "kv_bytes_per_token": None}
    latent = config.num_layers * config.kv_width * CACHE_BYTES
    index = config.indexer_kinds.count("full") * config.index_head_dim * CACHE_BYTES
    return {"latent_bytes_per_token": latent, "index_bytes_per_token": index, "kv_bytes_per_token": latent + index}


def format_report(report: dict[str, Any]) -> str:
    """The report of `inspect_checkpoint` as text for a terminal."""
    return "\n".join(_lines(report))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield f"{report['path']}: {report['family']}{'' if report['supported'] else ' (not supported)'}"
    yield (
        f"{report['tensors']:,} tensors in {report['files']:,} files, {_bytes(report['bytes'])}, "
        f"{report['parameters']:,} stored weights, {report['bits_per_weight']} bits a weight"
    )
    if report["rank_sliced"]:
        sliced = report["rank_sliced"]
        if "layout" in sliced:
            first, last = sliced["layers"]
            state = "complete" if sliced["complete"] else f"NOT complete ({sliced['missing']:,} missing)"
            yield (
                f"rank-sliced for tp={sliced['tp']}, {sliced['layout']}: layers {first}..{last}, "
                f"{sliced['tensors']:,} tensors, {state}"
            )
        else:
            ranks = ", ".join(map(str, sliced["ranks"])) or "none"
            yield f"rank-sliced, tp={sliced['tp']} (ranks found: {ranks}), without a sound description"
    if report["declared"]:
        yield "declared: " + ", ".join(f"{key} {value}" for key, value in report["declared"].items())
    yield ""
    yield f"{'class':<16}{'bytes':>12}{'bits/weight':>13}  stored as"
    for name, each in report["classes"].items():
        stored = []
        if each["quantized_matrices"]:
            rates = ", ".join(f"{rate} bit x {count:,}" for rate, count in each["rates"].items())
            stored.append(f"EXL3 {'/'.join(each['codebooks'])} ({rates})")
        stored += [f"{dtype} x {count:,}" for dtype, count in each["dtypes"].items()]
        yield f"{name:<16}{_bytes(each['bytes']):>12}{each['bits_per_weight'] or '':>13}  {', '.join(stored)}"
    yield ""
    memory = report["memory"]
    line = f"memory per rank at tp={report['tp']}: weights {_bytes(memory['weight_bytes_per_rank'])}"
    if memory["mtp_weight_bytes_per_rank"]:
        line += f", MTP layer {_bytes(memory['mtp_weight_bytes_per_rank'])} more when used"
    if memory["kv_bytes_per_token"] is not None:
        line += f", cache {memory['kv_bytes_per_token']:,} bytes a token"
    yield line
    yield f"runs at tp={report['tp']}: {'yes' if report['runs'] else 'no'}"
    for problem in report["problems"]:
        yield f"  {problem}"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
