"""Attention and the indexer in the tuner: launch parameters that may suit, their compiled code, and how long they may take."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from exl3_triton.kv_format import PAGE, latent_bytes
from exl3_triton.ops.attention_tuning import (
    DECODE_ROWS,
    DecodeTile,
    GroupedTile,
    PrefillTile,
    ScoreTile,
    SplitPlan,
    select_decode,
    select_grouped_decode,
    select_grouped_prefill,
    select_prefill,
    select_scores,
)
from exl3_triton.ops.tuning import Device

from .problems import AttentionProblem, IndexerProblem

# by name, because some ops have the names of their modules
attention, gqa, indexer, prefill = (
    importlib.import_module(f"exl3_triton.ops.{name}") for name in ("attention", "gqa", "indexer", "prefill")
)
MODULES = (attention, gqa, indexer, prefill)
LATENT, ROPE = 512, 64  # of the caches that prefills of MLA read


@dataclass(frozen=True)
class AttentionConfig:
    """An entry of `tables` for attention. rows: of a program's tile, query heads of decoding or tokens of prefill; most:
    ranges that a context is cut into, of decoding.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    parts: int = 1
    words: bool = False
    most: int = 0

    def tile(self, kind: str) -> Any:
        """As the launcher of this kind takes it."""
        first = (self.rows, self.keys, self.warps, self.stages)
        if kind == "mla_prefill":
            return PrefillTile(*first)
        return GroupedTile(*first) if kind.startswith("gqa") else DecodeTile(*first, self.parts, self.words)

    def plan(self, kind: str, keys: int) -> SplitPlan:
        """keys: of the context, or selected ones."""
        return SplitPlan.of(64 if kind == "mla_sparse_decode" else 128, self.most, keys)


# The search space -----------------------------------------------------------------------------------------------------

_LATENT_TILES: list[tuple[Any, ...]] = [
    (16, 32, 4, 3), (16, 64, 8, 3), (16, 32, 4, 2), (16, 64, 4, 2), (32, 16, 8, 3), (32, 32, 8, 2), (32, 32, 8, 3),
]  # fmt: skip
_TALL_TILES: list[tuple[Any, ...]] = [(64, 32, 4, 3, 2), (64, 64, 4, 2, 2), (64, 32, 8, 3), (64, 16, 8, 3)]
_FP8_TILES = [(16, 32, 4, 3), (16, 32, 8, 3), (16, 64, 8, 2), (32, 16, 8, 3), (32, 32, 8, 2)]
_WORD_TILES = [(16, 32, 4, 3), (16, 32, 8, 3), (16, 64, 8, 3), (32, 32, 8, 3), (32, 16, 8, 3)]
_NVFP4_TILES = [(16, 32, 8, 2), (16, 32, 4, 2), (16, 64, 8, 2)]
_GROUPED_TILES = [(16, 64, 4, 3), (16, 64, 4, 2), (16, 32, 4, 3), (16, 32, 4, 4), (16, 64, 8, 3)]
_PREFILL_TILES = [
    (128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 4, 3),
    (64, 32, 4, 2), (64, 32, 8, 2),
]  # fmt: skip
_SCORE_TILES = [(keys, span, warps, 4) for keys in (64, 32) for span in (256, 512, 1024) for warps in (4, 8)]


def rule_attention(problem: AttentionProblem, rows: int, device: Device) -> AttentionConfig:
    """What a launcher takes without a table."""
    p, device = problem, device._replace(name="")
    sizes = (p.heads, p.kv_heads, p.width, p.value)
    if p.kind == "mla_prefill":
        return AttentionConfig(*select_prefill(p.heads, p.width, p.value, torch.bfloat16, device))
    if p.kind == "gqa_prefill":
        return AttentionConfig(*select_grouped_prefill(sizes, torch.bfloat16, device, p.kv))
    tile: Any
    if p.kind == "gqa_decode":
        tile, plan = select_grouped_decode(sizes, torch.bfloat16, device, p.kv, rows, 1 << 30)
    else:
        widths, sparse = (p.value, p.width - p.value), p.kind == "mla_sparse_decode"
        tile, plan = select_decode(p.heads, *widths, torch.bfloat16, device, p.kv, rows, 1 << 30, sparse=sparse)
    return replace(AttentionConfig(*tile), most=plan.most)


def attention_space(problem: AttentionProblem, rows: int, device: Device) -> list[AttentionConfig]:
    """Candidates for a range of rows; the rules' own choice comes first."""
    kind, rule = problem.kind, rule_attention(problem, rows, device)
    found = [rule]
    if kind.endswith("prefill"):
        return list(dict.fromkeys([rule, *(AttentionConfig(*tile) for tile in _PREFILL_TILES)]))
    tiles: list[AttentionConfig]
    if kind == "gqa_decode":
        tiles = [AttentionConfig(*tile) for tile in _GROUPED_TILES]
    elif problem.kv == "fp8":
        tiles = [AttentionConfig(*tile) for tile in _FP8_TILES]
        if device.family == "sm_90":  # elsewhere nothing checks what is predicted, and the form has run on no GPU yet
            tiles += [AttentionConfig(*tile, words=True) for tile in _WORD_TILES]
    elif problem.kv != "bf16":
        tiles = [AttentionConfig(*tile) for tile in _NVFP4_TILES]
    else:
        tall = _TALL_TILES if problem.heads > 32 else []
        tiles = [AttentionConfig(*tile) for tile in (*_LATENT_TILES, *tall)]
    for tile in tiles:
        if tile.rows >= 2 * max(16, problem.heads):
            continue
        blocks = -(-problem.heads // tile.rows) * tile.parts
        wave = max(8, 128 // blocks) if rows <= DECODE_ROWS else max(1, 16 // blocks)
        wave = rule.most if kind == "gqa_decode" else wave
        if kind == "mla_sparse_decode":
            wave = min(wave, problem.SELECTED // 64)
        for most in (wave, 2 * wave, max(1, wave // 2)):
            found.append(replace(tile, most=most))
    return list(dict.fromkeys(found))


def score_space(problem: IndexerProblem, device: Device) -> list[ScoreTile]:
    """Candidates; the rules' own choice comes first."""
    rule = select_scores(problem.heads, problem.width, torch.bfloat16, device._replace(name=""), problem.kv)
    return list(dict.fromkeys([rule, *(ScoreTile(*tile) for tile in _SCORE_TILES), rule._replace(stages=3)]))


# Calls ----------------------------------------------------------------------------------------------------------------


def cache_shape(problem: AttentionProblem | IndexerProblem, pages: int) -> tuple[int, ...]:
    """Of the (first) cache of a problem."""
    p = problem
    if isinstance(p, IndexerProblem):
        return (pages, PAGE, p.width + 4 * (p.kv == "fp8"))
    if p.kind.startswith("gqa"):
        return (pages, PAGE, p.kv_heads, p.width + 4 * (p.kv == "fp8"))
    latent, rope = (LATENT, ROPE) if p.kind == "mla_prefill" else (p.value, p.width - p.value)
    return (pages, PAGE, latent + rope if p.kv == "bf16" else latent_bytes(p.kv, latent, rope))


def caller(problem: AttentionProblem, config: AttentionConfig, m: int) -> Callable[..., Any]:
    """A function of (queries .., cache .., block table, sequence, positions, selected) that launches the candidate."""
    kind, context, tile = problem.kind, problem.context(m), config.tile(problem.kind)
    if kind == "mla_prefill":
        return lambda *args: prefill._launch_mla_prefill(*args[:-1], SCALE, context, tile=tile)
    if kind == "gqa_prefill":
        return lambda *args: gqa._launch_gqa_prefill(*args[:-1], SCALE, tile=tile)[0]
    plan = config.plan(kind, problem.SELECTED if kind == "mla_sparse_decode" else context)
    if kind == "gqa_decode":
        return lambda *args: gqa._launch_gqa_decode(*args[:-1], SCALE, context, tile=tile, plan=plan)[0]
    return lambda *args: attention._launch_mla_decode(*args, SCALE, context, tile=tile, plan=plan)[0]


SCALE = 0.08  # of the logits of random data


def random_call(problem: AttentionProblem, m: int, device: str, make: Callable[..., torch.Tensor]) -> list[Any]:
    """Arguments of `caller`'s function but for the caches. make(*shape): a tensor of 16-bit floats."""
    p = problem
    if p.kind == "mla_prefill":
        return [make(m, p.heads, p.width), make(p.heads, p.width - ROPE, LATENT), make(p.heads, p.value, LATENT)]
    if p.kind.startswith("gqa"):
        return [make(m, p.heads, p.width)]
    return [make(m, p.heads, p.value), make(m, p.heads, p.width - p.value)]


def compile_attention(problem: AttentionProblem | IndexerProblem, config: Any, gpu: Any, device: Device) -> Any:
    """Triton's CompiledKernel of the kernel that a candidate's time is spent in, for `gpu`."""
    from .record import recording

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    p, m = problem, max(sample for samples in problem.SAMPLES.values() for sample in samples)
    integers = [meta(4, 1024, dtype=torch.int32), meta(m, dtype=torch.int32), meta(m, dtype=torch.int64)]
    stored = torch.bfloat16 if p.kv == "bf16" else torch.uint8
    if isinstance(p, IndexerProblem):
        args = (meta(m, p.heads, p.width), meta(m, p.heads, dtype=torch.float32), meta(*cache_shape(p, 4096), dtype=stored))
        with recording(MODULES, gpu, device, "_score_kernel") as found:
            indexer._launch_scores(*args, *integers, 0, meta(m, 1 << 16, dtype=torch.float32), config)
    else:
        caches = [meta(*cache_shape(p, 4096), dtype=stored)]
        if p.kind.startswith("gqa"):
            caches.append(meta(*caches[0].shape[:-1], p.value + 4 * (p.kv == "fp8"), dtype=stored))
        queries = random_call(p, m, "meta", meta)
        args = (queries[0], *caches, *queries[1:]) if p.kind == "mla_prefill" else (*queries, *caches)
        chosen = meta(m, p.SELECTED, dtype=torch.int32) if p.kind == "mla_sparse_decode" else None
        name = {"gqa_decode": "_gqa_decode_kernel", "gqa_prefill": "_gqa_prefill_kernel", "mla_prefill": "_mla_prefill_kernel"}
        wanted = name.get(p.kind, "_mla_decode_fp8_kernel" if config.words else "_mla_decode_kernel")
        with recording(MODULES, gpu, device, wanted) as found:
            caller(p, config, m)(*args, *integers, chosen)
    ((_, compiled),) = found.values()
    return compiled


# What a call needs ----------------------------------------------------------------------------------------------------


def row_bytes(problem: AttentionProblem | IndexerProblem) -> int:
    """Of one position in the cache or caches."""
    shape = cache_shape(problem, 1)[2:]
    size = functools.reduce(lambda a, b: a * b, shape) * (2 if problem.kv == "bf16" else 1)
    grouped = isinstance(problem, AttentionProblem) and problem.kind.startswith("gqa")
    return size * (problem.width + problem.value) // problem.width if grouped else size  # type: ignore[union-attr]


def attention_work(problem: AttentionProblem | IndexerProblem, m: int) -> tuple[float, float]:
    """(bytes of the cache that a call on m tokens has to read, floating-point operations)."""
    p, context = problem, problem.context(m)
    if isinstance(p, IndexerProblem):
        return m * context * row_bytes(p), 2 * m * context * p.heads * p.width
    if p.kind.endswith("prefill"):
        return context * row_bytes(p), m * context * p.heads * (p.width + p.value)
    keys = p.SELECTED if p.kind == "mla_sparse_decode" else context
    return m * keys * row_bytes(p), 2 * m * keys * p.heads * (p.width + p.value)
