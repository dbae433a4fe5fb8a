"""Launch parameters of attention and of the indexer: the tile of a program, and how contexts are cut into ranges.

A pure function of the heads' sizes, the cache's format, the device and whether a call has more than `DECODE_ROWS` tokens,
never of anything else about the batch: a token's bits must not depend on its neighbours. An entry for the device in a table
(`exl3_triton/tables.py`) goes before the rules below, for 16-bit data. Evidence for sm_90 (NVIDIA H200, 2026-12-01, torch
2.11, Triton 3.6) is in `docs/notes/attention.md`. Settings of other architectures are those that compile within their shared
memory and without spills: nobody has timed them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from .. import tables
from .tuning import Device

DECODE_ROWS, MANY_ROWS = tables.RANGES["attention"]
"""Up to so many tokens a call of decoding splits contexts for parallelism; above, the tokens fill the device."""


class DecodeTile(NamedTuple):
    heads: int
    keys: int  # <= 64: a dense tile lies in one page
    warps: int
    stages: int
    parts: int = 1  # 2: two programs compute the scores of a block of heads, each sums half of the latents' columns
    words: bool = False  # fp8: rows are read as words of four latents; not timed yet, so no default


class PrefillTile(NamedTuple):
    queries: int
    keys: int
    warps: int
    stages: int


class GroupedTile(NamedTuple):
    rows: int  # decoding: query heads of one key-value head; prefill: tokens
    keys: int  # <= 64: a tile lies in one page
    warps: int
    stages: int


class ScoreTile(NamedTuple):
    keys: int  # <= 64: a tile lies in one page
    span: int  # keys that one program scores, a multiple of `keys`
    warps: int
    stages: int


class SplitPlan(NamedTuple):
    """A context of n keys is cut into min(ceil(n / least), most) ranges, rounded to whole key tiles."""

    least: int
    most: int
    grid: int  # ranges that the longest possible context needs

    @classmethod
    def of(cls, least: int, most: int, keys: int) -> SplitPlan:
        """keys: the longest possible context, or the number of selected positions."""
        return cls(least, most, min(-(-max(keys, 1) // least), most))


# Rules ----------------------------------------------------------------------------------------------------------------


def decode_tile(heads: int, dtype: torch.dtype, device: Device, kv: str = "bf16", *, sparse: bool = False) -> DecodeTile:
    """At C = 512, R = 64: within 227 KiB of shared memory on sm_90, 99 KiB on other NVIDIA GPUs, 64 KiB on AMD.

    On an H200, dense contexts of 64k tokens, one sequence: 16 heads 31.5 us (32 keys and 4 warps 44.3), 64 heads 55.9 (a
    program for all columns with 8 warps 64.0; 16 sequences 791 and 898).
    """
    if dtype == torch.float32:
        return DecodeTile(16, 16, 4, 1)
    if device.family == "hip":
        return DecodeTile(16, 32, 4, 2) if kv == "bf16" else DecodeTile(16, 16, 4, 1)
    if kv.startswith("nvfp4"):  # more heads: Triton 3.6 does not compile the unpacking for Hopper's matrix instructions
        return DecodeTile(16, 32, 8, 2)
    if kv == "fp8":
        if device.family == "sm_90":
            return DecodeTile(16, 32, 4, 3) if heads <= 16 else DecodeTile(64, 32, 8, 3)
        return DecodeTile(16, 32, 8, 3) if heads <= 16 else DecodeTile(32, 16, 8, 3)
    if device.family == "sm_90" and sparse:
        return DecodeTile(16, 32, 4, 3) if heads <= 16 else DecodeTile(64, 32, 8, 3)
    if device.family == "sm_90":
        return DecodeTile(16, 64, 8, 3) if heads <= 16 else DecodeTile(64, 32, 4, 3, parts=2)
    return DecodeTile(16, 32, 4, 3) if heads <= 16 else DecodeTile(32, 16, 8, 3)


def split_plan(tokens: int, head_blocks: int, keys: int, sparse: bool) -> SplitPlan:
    """head_blocks: programs a range. keys as in `SplitPlan.of`."""
    if tokens <= DECODE_ROWS:
        most = max(8, 128 // head_blocks)
    else:
        most = 1 if sparse else max(1, 16 // head_blocks)
    return SplitPlan.of(64 if sparse else 128, most, keys)


def prefill_tile(dtype: torch.dtype, width: int, device: Device) -> PrefillTile:
    """`width`: N + R + V. Up to 512: within 227 KiB of shared memory on sm_90, 99 KiB elsewhere."""
    if dtype == torch.float32:
        return PrefillTile(16, 16, 4, 1)
    if device.family == "sm_90" and width <= 384:
        return PrefillTile(128, 64, 8, 3)
    if device.family == "sm_90":  # spills a little; 8k of GLM's heads on an H200: 1469 us, against 3824 with the tile below
        return PrefillTile(128, 64, 8, 2)
    return PrefillTile(64, 32, 8, 2)


def grouped_decode_tile(dtype: torch.dtype, width: int) -> GroupedTile:
    """Fits 99 KiB of shared memory at widths of 256."""
    if dtype == torch.float32:
        return GroupedTile(16, 16, 4, 1)
    return GroupedTile(16, 64, 4, 3 if width <= 128 else 2)


def grouped_split_plan(tokens: int, kv_heads: int, context: int) -> SplitPlan:
    """How contexts are cut, `context` being the longest: enough programs for a large GPU with one token and with many."""
    most = max(8, min(128, 256 // kv_heads)) if tokens <= DECODE_ROWS else max(1, 32 // kv_heads)
    return SplitPlan.of(128, most, context)


def grouped_prefill_tile(dtype: torch.dtype, width: int, device: Device, fp8: bool = False) -> GroupedTile:
    """At widths of 256: within 227 KiB of shared memory on sm_90, 99 KiB elsewhere."""
    if dtype == torch.float32:
        return GroupedTile(16, 16, 4, 1)
    if device.family == "sm_90":
        return GroupedTile(128, 64, 8, 3 if width <= 128 else 2)
    return GroupedTile(128, 64, 8, 2) if width <= 128 and not fp8 else GroupedTile(64, 32, 4, 2)


def score_tile(dtype: torch.dtype) -> ScoreTile:
    """Fits 99 KiB of shared memory at 64 heads of 128."""
    return ScoreTile(32, 512, 4, 1) if dtype == torch.float32 else ScoreTile(64, 512, 4, 4)


# Tables, then rules ---------------------------------------------------------------------------------------------------


@cache
def _from_table(op: str, device: Device, key: tables.Key) -> dict[str, Any] | None:
    if not device.name:
        return None
    found = tables.entries_for(op, *device[2:], device.processors).get(key)
    return None if found is None else dict(found[0].config)


def _attention(
    kind: str, sizes: tuple[int, int, int, int], kv: str, rows: int, dtype: torch.dtype, device: Device
) -> dict[str, Any] | None:
    """sizes: heads, key-value heads, width of a query, width of a value."""
    if dtype == torch.float32:
        return None
    rows = DECODE_ROWS if kind.endswith("decode") and rows <= DECODE_ROWS else MANY_ROWS
    return _from_table("attention", device, (kind, *sizes, kv, rows))


def select_decode(
    heads: int, latent: int, rope: int, dtype: torch.dtype, device: Device, kv: str, tokens: int, keys: int, *, sparse: bool
) -> tuple[DecodeTile, SplitPlan]:
    """Of MLA, absorbed. dtype: that products are computed in. keys as in `SplitPlan.of`; sparse: these are selected ones."""
    kind = "mla_sparse_decode" if sparse else "mla_decode"
    entry = _attention(kind, (heads, 1, latent + rope, latent), kv, tokens, dtype, device)
    if entry is not None:
        tile = DecodeTile(*(entry[name] for name in ("rows", "keys", "warps", "stages", "parts", "words")))
        return tile, SplitPlan.of(64 if sparse else 128, entry["most"], keys)
    tile = decode_tile(heads, dtype, device, kv, sparse=sparse)
    return tile, split_plan(tokens, -(-heads // tile.heads) * tile.parts, keys, sparse)


def select_prefill(heads: int, width: int, value: int, dtype: torch.dtype, device: Device) -> PrefillTile:
    """Of MLA, expanded. width: N + R of a query."""
    entry = _attention("mla_prefill", (heads, heads, width, value), "bf16", MANY_ROWS, dtype, device)
    if entry is None:
        return prefill_tile(dtype, width + value, device)
    return PrefillTile(*(entry[name] for name in ("rows", "keys", "warps", "stages")))


def select_grouped_decode(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, device: Device, kv: str, tokens: int, context: int
) -> tuple[GroupedTile, SplitPlan]:
    """sizes: heads, key-value heads, width, width of a value."""
    entry = _attention("gqa_decode", sizes, kv, tokens, dtype, device)
    if entry is not None:
        tile = GroupedTile(*(entry[name] for name in ("rows", "keys", "warps", "stages")))
        return tile, SplitPlan.of(128, entry["most"], context)
    return grouped_decode_tile(dtype, max(sizes[2:])), grouped_split_plan(tokens, sizes[1], context)


def select_grouped_prefill(sizes: tuple[int, int, int, int], dtype: torch.dtype, device: Device, kv: str) -> GroupedTile:
    """sizes as in `select_grouped_decode`."""
    entry = _attention("gqa_prefill", sizes, kv, MANY_ROWS, dtype, device)
    if entry is None:
        return grouped_prefill_tile(dtype, max(sizes[2:]), device, kv == "fp8")
    return GroupedTile(*(entry[name] for name in ("rows", "keys", "warps", "stages")))


def select_scores(heads: int, width: int, dtype: torch.dtype, device: Device, kv: str) -> ScoreTile:
    """Of the indexer; `width` of a key."""
    key = (heads, width, kv, tables.RANGES["indexer"][0])
    entry = None if dtype == torch.float32 else _from_table("indexer", device, key)
    return score_tile(dtype) if entry is None else ScoreTile(**entry)
