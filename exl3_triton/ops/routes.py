"""Route packing: which rows of a grouped GEMM belong to which expert, found on the device without a host synchronisation.

A route is one (token, slot) pair, numbered token * top_k + slot. The routes of an expert are laid out in ascending order in
blocks of `block_m`; a block never spans two experts and experts without routes have no block. One program per expert finds its
own blocks from a histogram of all ids, so the order is the same in every run and nothing is exchanged through memory.
"""

import torch
from torch import Tensor

from ._dispatch import device_guard
from ._triton import tl, triton


def max_blocks(routes: int, num_experts: int, block_m: int) -> int:
    """Upper bound of the number of blocks for any assignment: min(routes, (routes + E (block_m - 1)) // block_m)."""
    return min(routes, (routes + num_experts * (block_m - 1)) // block_m)


def id_chunk(routes: int) -> int:
    """Ids that the packing takes at a time; two values, so that the number of tokens compiles at most two kernels."""
    return 128 if routes <= 512 else 1024


def experts_padded(num_experts: int) -> int:
    """Histogram bins: one more than there are experts (for ids that are out of range), as a power of two."""
    return 1 << num_experts.bit_length()


@triton.jit
def valid_expert(ids, expert_map, at, mask, E: tl.constexpr, MAPPED: tl.constexpr):
    """int64 experts of the routes `at` (a scalar or a tensor): -1 where the mask is off and for ids outside of 0..E-1.

    MAPPED > 0: ids are global ones, outside of 0..MAPPED-1 illegal, and expert_map [MAPPED] holds the local ones.
    """
    e = tl.load(ids + at, mask=mask, other=-1).to(tl.int64)
    if MAPPED > 0:
        e = tl.load(expert_map + e, mask=(e >= 0) & (e < MAPPED), other=-1).to(tl.int64)
    return tl.where((e >= 0) & (e < E), e, -1)


@triton.jit
def load_ids(ids, expert_map, start, routes, E: tl.constexpr, MAPPED: tl.constexpr, CHUNK: tl.constexpr):
    """int32 [CHUNK] experts of routes start..; E for padding and where `valid_expert` finds none."""
    r = start + tl.arange(0, CHUNK)
    e = valid_expert(ids, expert_map, r, r < routes, E, MAPPED)
    return tl.where(e >= 0, e, E).to(tl.int32)


@triton.jit
def pack_expert(
    expert, ids, expert_map, routes, packed, block_expert, block_rows, num_blocks,
    E: tl.constexpr, MAPPED: tl.constexpr, E_PAD: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The part of `pack_routes` that concerns one expert."""
    bins = tl.arange(0, E_PAD)
    counts = tl.zeros((E_PAD,), tl.int32)
    for start in range(0, routes, CHUNK):
        counts += tl.histogram(load_ids(ids, expert_map, start, routes, E, MAPPED, CHUNK), E_PAD)
    blocks = tl.where(bins < E, (counts + (BLOCK_M - 1)) // BLOCK_M, 0)
    first = tl.sum(tl.where(bins < expert, blocks, 0), axis=0)
    mine = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    if expert == E - 1:
        tl.store(num_blocks, tl.sum(blocks, axis=0))
    if mine > 0:
        lanes = tl.arange(0, 128)
        for start in range(0, (mine + BLOCK_M - 1) // BLOCK_M, 128):
            block = start + lanes
            left = mine - block * BLOCK_M
            tl.store(block_expert + first + block, tl.zeros((128,), tl.int32) + expert, mask=left > 0)
            tl.store(block_rows + first + block, tl.minimum(left, BLOCK_M), mask=left > 0)
        before = 0
        for start in range(0, routes, CHUNK):
            match = (load_ids(ids, expert_map, start, routes, E, MAPPED, CHUNK) == expert).to(tl.int32)
            rank = before + tl.cumsum(match, axis=0) - 1  # a block holds BLOCK_M routes, so rank r lies at first * BLOCK_M + r
            tl.store(packed + first * BLOCK_M + rank, start + tl.arange(0, CHUNK), mask=match > 0)
            before += tl.sum(match, axis=0)


@triton.jit(do_not_specialize=["routes"])
def _pack_kernel(
    ids, routes, packed, block_expert, block_rows, num_blocks,
    E: tl.constexpr, E_PAD: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    pack_expert(tl.program_id(0), ids, ids, routes, packed, block_expert, block_rows, num_blocks, E, 0, E_PAD, BLOCK_M, CHUNK)


def pack_routes(topk_ids: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Groups the routes by expert: int32 (packed [B * block_m], block_expert [B], block_rows [B], num_blocks [1]).

    topk_ids: int32 or int64 [T, k], contiguous; -1 and every id outside of 0..num_experts-1 are left out. B is `max_blocks` of
    the shapes; blocks num_blocks.. and the entries of a block from block_rows on are not written. Capture-safe, deterministic.
    """
    routes = topk_ids.numel()
    blocks = max_blocks(routes, num_experts, block_m)
    new = lambda size: torch.empty(size, dtype=torch.int32, device=topk_ids.device)
    packed, block_expert, block_rows, num_blocks = new(blocks * block_m), new(blocks), new(blocks), new(1)
    with device_guard(topk_ids):
        _pack_kernel[(num_experts,)](
            topk_ids, routes, packed, block_expert, block_rows, num_blocks,
            num_experts, experts_padded(num_experts), block_m, id_chunk(routes), num_warps=4,
        )  # fmt: skip
    return packed, block_expert, block_rows, num_blocks
