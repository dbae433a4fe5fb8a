"""What can be tuned, from a model's config, a preset or by hand: matrices, experts, attention, and their ranges of rows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from exl3_triton.format import Codebook, padded_size
from exl3_triton.model.checkpoint import read_json_object
from exl3_triton.model.config import ModelConfig
from exl3_triton.tables import KINDS, KV_FORMATS, RANGES

from .audit import parse_format


@dataclass(frozen=True, order=True)
class Format:
    """A rate and a codebook, written as "mcg.3"."""

    codebook: str
    bits: float

    @classmethod
    def parse(cls, text: str) -> Format:
        """Raises ValueError for a pair that does not exist."""
        bits, codebook = parse_format(text)
        return cls(codebook.label, bits)

    @property
    def twice_bits(self) -> int:
        return round(2 * self.bits)

    @property
    def index(self) -> Codebook:
        return next(codebook for codebook in Codebook if codebook.label == self.codebook)

    def __str__(self) -> str:
        return f"{self.codebook}.{self.bits:g}"


@dataclass(frozen=True, order=True)
class LinearProblem:
    """One launch of `ops.linear`: all matrices of it together are k x n, as stored (multiples of 128)."""

    k: int
    n: int
    format: Format

    op: ClassVar[str] = "linear"
    SAMPLES: ClassVar[dict[int, tuple[int, ...]]] = {16: (1, 16), 32: (32,), 64: (64,), 255: (128, 255)}
    """Most rows of a range that shares a configuration -> row counts at which it is timed."""

    def __str__(self) -> str:
        return f"{self.k} x {self.n}, {self.format}"


@dataclass(frozen=True, order=True)
class MoeProblem:
    """The routed experts of a layer, sizes as stored; every token takes `top_k` of `num_experts`."""

    num_experts: int
    hidden: int
    intermediate: int
    top_k: int
    format: Format

    op: ClassVar[str] = "moe"
    SAMPLES: ClassVar[dict[int, tuple[int, ...]]] = {rows: (1, 8, 32) if rows == 32 else (rows,) for rows in RANGES["moe"]}
    """The first range is the decode plan's; see `LinearProblem.SAMPLES`."""

    def __str__(self) -> str:
        return f"{self.num_experts} experts {self.hidden} x {self.intermediate}, top {self.top_k}, {self.format}"


@dataclass(frozen=True, order=True)
class AttentionProblem:
    """A kind of attention (`tables.KINDS`) over a cache in the format `kv`; sizes as in `tables.KEYS`."""

    kind: str
    heads: int
    kv_heads: int
    width: int
    value: int
    kv: str

    op: ClassVar[str] = "attention"
    SELECTED: ClassVar[int] = 2048  # positions that sparse attention sees

    @property
    def SAMPLES(self) -> dict[int, tuple[int, ...]]:
        """See `LinearProblem.SAMPLES`: sequences of decoding; the tokens of one sequence where there are more than 64 of them
        and its positions were selected, and of a prefill.
        """
        few, many = RANGES["attention"]
        if self.kind.endswith("prefill"):
            return {many: (many,)}
        return {few: (1, 16), many: (1024,) if self.kind == "mla_sparse_decode" else (128,)}

    def context(self, m: int) -> int:
        """Positions of a sequence at m tokens: long ones with few sequences, and more than any cache holds of keys in all."""
        if self.kind.endswith("prefill") or (self.kind == "mla_sparse_decode" and m > RANGES["attention"][0]):
            return 8192
        return min(1 << 16, (1 << 18) // m)

    def __str__(self) -> str:
        return f"{self.kind} of {self.heads} heads, {self.kv_heads} stored, {self.width} and {self.value} wide, {self.kv}"


@dataclass(frozen=True, order=True)
class IndexerProblem:
    """The indexer's scores: `heads` queries and one key of `width`, stored as `kv`."""

    heads: int
    width: int
    kv: str

    op: ClassVar[str] = "indexer"
    SAMPLES: ClassVar[dict[int, tuple[int, ...]]] = {RANGES["indexer"][0]: (1, 16)}

    def context(self, m: int) -> int:
        """See `AttentionProblem.context`."""
        return min(1 << 17, (1 << 20) // m)

    def __str__(self) -> str:
        return f"index scores of {self.heads} heads, {self.width} wide, {self.kv}"


Problem = LinearProblem | MoeProblem | AttentionProblem | IndexerProblem
PROBLEMS: dict[str, Any] = {
    "linear": LinearProblem, "moe": MoeProblem, "attention": AttentionProblem, "indexer": IndexerProblem,
}  # fmt: skip
CACHED = ("attention", "indexer")
"""Ops that have the format of a cache where the others have that of weights."""


def parse_attention(text: str, kv: str) -> Problem:
    """ "mla_decode:16x1x576x512" (heads, key-value heads, width, value), or "indexer:32x128". Raises ValueError for others."""
    kind, _, sizes = text.partition(":")
    numbers = [int(part) if part.isdecimal() else 0 for part in sizes.split("x")]
    if not all(numbers) or len(numbers) != (2 if kind == "indexer" else 4) or kind not in ("indexer", *KINDS):
        raise ValueError(f"shape {text!r}: required {' | '.join(KINDS)}:HEADSxKV_HEADSxWIDTHxVALUE, or indexer:HEADSxWIDTH")
    problem: Any = PROBLEMS["indexer"](*numbers, kv) if kind == "indexer" else PROBLEMS["attention"](kind, *numbers, kv)
    if kv not in formats_of(problem):
        raise ValueError(f"shape {text!r}, kv {kv!r}: required one of {', '.join(formats_of(problem))}")
    if kind != "indexer" and numbers[0] % numbers[1]:
        raise ValueError(f"shape {text!r}: required heads that are a multiple of the {numbers[1]} key-value heads")
    return problem


def formats_of(problem: Problem) -> tuple[str, ...]:
    """Of a cache, that an attention problem's kernel reads."""
    if isinstance(problem, AttentionProblem) and problem.kind == "mla_prefill":
        return KV_FORMATS[:1]  # what it reads is unpacked before
    latent = isinstance(problem, AttentionProblem) and problem.kind.startswith("mla")
    return KV_FORMATS if latent else KV_FORMATS[:2]


def attention_problems(config: ModelConfig, ranks: int, kv: str) -> list[Problem]:
    """Attention and indexer of one rank of `ranks`, caches stored as `kv` where that is possible."""
    c, heads = config, config.num_heads // ranks
    width = c.qk_nope_head_dim + c.qk_rope_head_dim
    found: list[Problem]
    if not c.kv_lora_rank:
        sizes = (heads, max(1, c.num_kv_heads // ranks), c.head_dim, c.v_head_dim)
        found = [AttentionProblem(kind, *sizes, kv) for kind in ("gqa_decode", "gqa_prefill")]
    else:
        latents = (heads, 1, c.kv_lora_rank + c.qk_rope_head_dim, c.kv_lora_rank, kv)
        unfolded = (heads, heads, width, c.v_head_dim, kv)
        found = [AttentionProblem("mla_decode", *latents), AttentionProblem("mla_prefill", *unfolded)]
        if c.index_topk:
            found += [AttentionProblem("mla_sparse_decode", *latents), IndexerProblem(c.index_num_heads, c.index_head_dim, kv)]
    return [problem for problem in found if kv in formats_of(problem)]


def parse_shape(text: str, format: Format) -> Problem:
    """ "6144x12288" or "256x6144x512x8" (experts, hidden, intermediate, top k). Raises ValueError for anything else."""
    match [int(part) if part.isdecimal() else 0 for part in text.split("x")]:
        case [k, n] if k and n:
            return LinearProblem(padded_size(k), padded_size(n), format)
        case [experts, hidden, intermediate, top_k] if experts and hidden and intermediate and 1 <= top_k <= experts:
            return MoeProblem(experts, padded_size(hidden), padded_size(intermediate), top_k, format)
    raise ValueError(f"shape {text!r}: required KxN, or EXPERTSxHIDDENxINTERMEDIATExTOP_K")


def model_shapes(config: ModelConfig, ranks: int = 1) -> tuple[list[tuple[int, int]], tuple[int, int, int, int] | None]:
    """The launches (k, n) of one rank of `ranks`, and its experts (experts, hidden, intermediate, top k) where there are any.

    Sliced over ranks: heads, the widths of feed-forwards and experts, the vocabulary. Raises ValueError where they do not
    divide.
    """
    c = config
    for name in ("num_heads", "intermediate_size", "moe_intermediate_size", "vocab_size"):
        if getattr(c, name) % ranks:
            raise ValueError(f"{ranks} ranks: required a divisor of {name}={getattr(c, name)}")
    heads = c.num_heads // ranks
    width = c.qk_nope_head_dim + c.qk_rope_head_dim
    found: list[tuple[int, list[int]]] = []
    if c.kv_lora_rank:
        latent = c.kv_lora_rank + c.qk_rope_head_dim
        if c.q_lora_rank:
            found += [(c.hidden_size, [c.q_lora_rank, latent]), (c.q_lora_rank, [heads * width])]
        else:
            found += [(c.hidden_size, [heads * width]), (c.hidden_size, [latent])]
    else:
        kv_heads = max(1, c.num_kv_heads // ranks)
        found += [(c.hidden_size, [heads * width, kv_heads * width, kv_heads * c.v_head_dim])]
    found += [(heads * c.v_head_dim, [c.hidden_size])]
    if c.index_topk and c.q_lora_rank:
        found += [(c.q_lora_rank, [c.index_num_heads * c.index_head_dim]), (c.hidden_size, [c.index_head_dim])]
    widths = [c.intermediate_size] if "dense" in c.layer_kinds else []
    sparse = "sparse" in c.layer_kinds
    if sparse and c.num_shared_experts:
        widths.append(c.moe_intermediate_size * c.num_shared_experts)
    for inner in widths:
        found += [(c.hidden_size, [inner // ranks] * 2), (inner // ranks, [c.hidden_size])]
    found += [(c.hidden_size, [c.vocab_size // ranks])]
    launches = sorted({(padded_size(k), sum(padded_size(n) for n in parts)) for k, parts in found})
    experts = None
    if sparse:
        inner = padded_size(c.moe_intermediate_size // ranks)
        experts = (c.num_experts, padded_size(c.hidden_size), inner, c.experts_per_token)
    return launches, experts


def model_problems(
    name: str, formats: list[Format], ops: tuple[str, ...] = tuple(PROBLEMS), kv: tuple[str, ...] = ("bf16",)
) -> list[Problem]:
    """Problems of a preset ("glm-5.2-tp4": the preset glm-5.2, one rank of 4) or of a model's folder or config.json.

    The latter take the same "-tpN" at their end. Raises ValueError for an unknown preset or a width that does not divide.
    """
    base, ranks = name, 1
    if match := re.fullmatch(r"(.+)-tp(\d+)", name):
        base, ranks = match[1], int(match[2])
    path = Path(base)
    if path.exists():
        config = ModelConfig.from_dict(read_json_object(path / "config.json" if path.is_dir() else path))
    else:
        config = ModelConfig.preset(base)
    launches, experts = model_shapes(config, ranks)
    problems: list[Problem] = []
    for format in formats:
        if "linear" in ops:
            problems += [LinearProblem(k, n, format) for k, n in launches]
        if "moe" in ops and experts is not None:
            problems.append(MoeProblem(*experts, format))
    for stored in kv:
        problems += [problem for problem in attention_problems(config, ranks, stored) if problem.op in ops]
    return problems
