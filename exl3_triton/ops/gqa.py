"""Grouped-query attention over a paged cache of keys and values: the cache write, decoding and prefill.

Decoding makes the query heads of one key-value head the rows of a tile, so that keys and values are read once for all of
them, and cuts contexts into ranges exactly as `mla_decode` does. Prefill takes tiles of tokens of one query head through the
whole context, causally. Either way a token's bits depend on its own context alone.
"""

import torch
from torch import Tensor

from .. import reference
from ._args import FLOATS, PAGE, block, check_batch, check_float, check_index, check_table, unit_last, unit_rows
from ._dispatch import call, device_guard, launchable, overlap, use_triton
from ._triton import start_next, tl, triton, wait_previous
from .attention import _COMBINE_COLUMNS, _COMBINE_ROWS, _combine_kernel, _ranges
from .attention_tuning import GroupedTile, SplitPlan, select_grouped_decode, select_grouped_prefill
from .packed import E4M3_MAX, TINY, e4m3_decode, e4m3_encode, head_plane
from .prefill import LOG2E, _bounds_kernel
from .rope import rope_factors, rope_pair
from .tuning import device_of

SCRATCH_BYTES = 64 << 20  # partial results of decoding: a launch takes as many tokens as fit
_MAX_GRID = 65535  # sequences a prefill launch: the third axis of a CUDA grid


@triton.jit(do_not_specialize=["length", "slots_end"], do_not_specialize_on_alignment=["positions", "slots"])
def _gqa_kv_write_kernel(
    k, v, weight, positions, slots, table, k_cache, v_cache, length, slots_end, k_token, k_head, v_token, v_head, eps,
    HEADS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One (token, block of key-value heads)."""
    wait_previous(OVERLAP)
    start_next(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < slots_end):
        head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        live = head < HEADS
        e = tl.arange(0, BLOCK_V)[None, :]
        value = tl.load(v + token * v_token + head * v_head + e, mask=live & (e < V), other=0.0)
        if FP8:
            values, scales = head_plane(v_cache, slot, HEADS, V)
            value = value.to(tl.float32)
            scale = tl.maximum(tl.max(tl.abs(value), axis=1)[:, None] / E4M3_MAX, TINY)
            tl.store(scales + head, scale, mask=live)
            tl.store(values + head * V + e, e4m3_encode(value / scale).to(tl.uint8), mask=live & (e < V))
        else:
            tl.store(v_cache + (slot * HEADS + head) * V + e, value.to(v_cache.dtype.element_ty), mask=live & (e < V))
        source = k + token * k_token + head * k_head
        d = tl.arange(0, BLOCK_D)[None, :]
        inside = live & (d < D)
        x = tl.load(source + d, mask=inside, other=0.0).to(tl.float32)
        pair = tl.arange(0, BLOCK_PAIRS)[None, :]
        cos, sin = rope_factors(table, tl.load(positions + token), length, pair, HALF)
        first, second = rope_pair(pair, HALF, INTERLEAVED)
        turned = live & (pair < HALF)
        a = tl.load(source + first, mask=turned, other=0.0).to(tl.float32)
        b = tl.load(source + second, mask=turned, other=0.0).to(tl.float32)
        if NORM:
            inverse = (1.0 / tl.sqrt(tl.sum(x * x, axis=1) / D + eps))[:, None]
            x = x * inverse * tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
            a = a * inverse * tl.load(weight + first, mask=pair < HALF, other=0.0).to(tl.float32)
            b = b * inverse * tl.load(weight + second, mask=pair < HALF, other=0.0).to(tl.float32)
        a, b = a * cos - b * sin, b * cos + a * sin
        rest = inside & (d >= 2 * HALF)
        if FP8:
            values, scales = head_plane(k_cache, slot, HEADS, D)
            largest = tl.max(tl.where(turned, tl.maximum(tl.abs(a), tl.abs(b)), 0.0), axis=1)
            scale = tl.maximum(largest, tl.max(tl.where(rest, tl.abs(x), 0.0), axis=1))[:, None] / E4M3_MAX
            scale = tl.maximum(scale, TINY)
            tl.store(scales + head, scale, mask=live)
            x, a, b = e4m3_encode(x / scale), e4m3_encode(a / scale), e4m3_encode(b / scale)
            target = values + head * D
        else:
            target = k_cache + (slot * HEADS + head) * D
        tl.store(target + d, x.to(k_cache.dtype.element_ty), mask=rest)
        tl.store(target + first, a.to(k_cache.dtype.element_ty), mask=turned)
        tl.store(target + second, b.to(k_cache.dtype.element_ty), mask=turned)


@triton.jit
def _head_rows(
    cache, slot, kv, mask, like, KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr,
    FP8: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """(rows `slot` of one head [rows, BLOCK_D], their scales' addresses where they are FP8); `like`: gives the dtype then."""
    d = tl.arange(0, BLOCK_D)[None, :]
    if FP8:
        values, scales = head_plane(cache, slot, KV, D)
        scales += kv
        x = e4m3_decode(tl.load(values[:, None] + kv * D + d, mask=mask, other=0), NATIVE).to(like.dtype)
    else:
        scales = cache
        x = tl.load(cache + (slot * KV + kv)[:, None] * D + d, mask=mask, other=0.0)
        if WIDE:
            x = x.to(tl.float32)
    return x, scales


@triton.jit(
    do_not_specialize=["first_token", "table_stride", "splits"],
    do_not_specialize_on_alignment=["block_table", "sequence", "positions"],
)
def _gqa_decode_kernel(
    q, k_cache, v_cache, block_table, sequence, positions, part_acc, part_max, part_sum, out, lse, scale,
    first_token, q_token, q_head, table_stride, splits,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr, WIDE: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One (token, block of the query heads of a key-value head, range of keys). MOST = 1: writes the result itself."""
    wait_previous(OVERLAP)
    GROUP: tl.constexpr = H // KV
    BLOCKS: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    local = tl.program_id(0).to(tl.int64)  # row of the partial results
    token = local + first_token
    kv = tl.program_id(1) // BLOCKS
    member = tl.program_id(1) % BLOCKS * BLOCK_G + tl.arange(0, BLOCK_G)
    head = kv * GROUP + member
    mine = member < GROUP
    split = tl.program_id(2)
    count = (tl.load(positions + token) + 1).to(tl.int32)
    range_keys, used = _ranges(count, LEAST, MOST, BLOCK_N)
    if (split < used) | (MOST == 1):
        d = tl.arange(0, BLOCK_D)
        e = tl.arange(0, BLOCK_V)
        n = tl.arange(0, BLOCK_N)
        rows = q + token * q_token + head.to(tl.int64)[:, None] * q_head
        x = tl.load(rows + d[None, :], mask=mine[:, None] & (d < D)[None, :], other=0.0)
        if WIDE:
            x = x.to(tl.float32)
        pages = block_table + tl.load(sequence + token).to(tl.int64) * table_stride
        running = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_G,), tl.float32)
        acc = tl.zeros((BLOCK_G, BLOCK_V), tl.float32)
        end = tl.minimum((split + 1) * range_keys, count)
        page = tl.load(pages + split * range_keys // 64, mask=split * range_keys < end, other=0).to(tl.int64)
        for first in range(split * range_keys, end, BLOCK_N):
            # a tile ahead: else the pipeliner counts the table's load as a stage and copies keys without overlap
            next_page = tl.load(pages + (first + BLOCK_N) // 64, mask=first + BLOCK_N < end, other=0).to(tl.int64)
            valid = first + n < end
            slot = page * 64 + first % 64 + n
            in_d = valid[:, None] & (d < D)[None, :]
            in_e = valid[:, None] & (e < V)[None, :]
            k, k_scales = _head_rows(k_cache, slot, kv, in_d, x, KV, D, BLOCK_D, WIDE, FP8, NATIVE)
            v, v_scales = _head_rows(v_cache, slot, kv, in_e, x, KV, V, BLOCK_V, WIDE, FP8, NATIVE)
            s = tl.dot(x, tl.trans(k), input_precision="ieee")
            if FP8:
                s *= tl.load(k_scales, mask=valid, other=0.0)[None, :]
            s = tl.where(valid[None, :], s, float("-inf"))
            peak = tl.maximum(running, tl.max(s, axis=1) * scale)
            p = tl.exp2(tl.fma(s, scale, -peak[:, None]))
            shrink = tl.exp2(running - peak)
            total = total * shrink + tl.sum(p, axis=1)
            if FP8:
                p *= tl.load(v_scales, mask=valid, other=0.0)[None, :]
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            running = peak
            page = next_page
        start_next(OVERLAP)
        if MOST == 1:
            where = token * H + head
            empty = total == 0.0
            value = acc / tl.where(empty, 1.0, total)[:, None]
            mask = mine[:, None] & (e < V)[None, :]
            tl.store(out + where[:, None] * V + e[None, :], value.to(out.dtype.element_ty), mask=mask)
            tl.store(lse + where, tl.where(empty, float("-inf"), running * 0.6931471805599453 + tl.log(total)), mask=mine)
        else:
            where = (local * H + head) * splits + split
            tl.store(part_acc + where[:, None] * V + e[None, :], acc, mask=mine[:, None] & (e < V)[None, :])
            tl.store(part_max + where, running, mask=mine)
            tl.store(part_sum + where, total, mask=mine)


@triton.jit
def _attend_tile(
    x, running, total, acc, k_cache, v_cache, page, kv, first, end, position, scale,
    KV: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, MASK: tl.constexpr, WIDE: tl.constexpr,
    FP8: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One tile of keys, positions first .. in `page`: updated (running maximum, sum, accumulator). MASK: causally, and up to
    `end`.
    """
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_V)
    n = first + tl.arange(0, BLOCK_N)
    in_d = (d < D)[None, :]
    in_e = (e < V)[None, :]
    if MASK:
        in_d = in_d & (n < end)[:, None]
        in_e = in_e & (n < end)[:, None]
    slot = page.to(tl.int64) * 64 + n % 64
    k, k_scales = _head_rows(k_cache, slot, kv, in_d, x, KV, D, BLOCK_D, WIDE, FP8, NATIVE)
    v, v_scales = _head_rows(v_cache, slot, kv, in_e, x, KV, V, BLOCK_V, WIDE, FP8, NATIVE)
    s = tl.dot(x, tl.trans(k), input_precision="ieee")
    if FP8:
        s *= tl.load(k_scales, mask=n < end, other=0.0)[None, :]
    if MASK:
        s = tl.where(n[None, :] <= position[:, None], s, float("-inf"))
    peak = tl.maximum(running, tl.max(s, axis=1) * scale)
    p = tl.exp2(tl.fma(s, scale, -peak[:, None]))  # an explicit fma: the same bits with and without the mask
    shrink = tl.exp2(running - peak)
    total = total * shrink + tl.sum(p, axis=1)
    if FP8:
        p *= tl.load(v_scales, mask=n < end, other=0.0)[None, :]
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return peak, total, acc


@triton.jit(
    do_not_specialize=["table_stride", "first_sequence"], do_not_specialize_on_alignment=["block_table", "bounds", "positions"]
)
def _gqa_prefill_kernel(
    q, k_cache, v_cache, block_table, bounds, positions, out, lse, scale, q_token, q_head, table_stride, first_sequence,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
    FP8: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One (tile of tokens, query head, sequence); a tile may hold the end of a sequence and the start of the next."""
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the longest contexts first
    sequence = first_sequence + tl.program_id(2)
    begin = tl.load(bounds + sequence * 3)
    stop = tl.load(bounds + sequence * 3 + 1)
    if (tile < stop) & (tile + BLOCK_M > begin):
        head = tl.program_id(1)
        kv = head // (H // KV)
        token = tile + tl.arange(0, BLOCK_M)
        mine = (token >= begin) & (token < stop)
        position = tl.load(positions + token, mask=mine, other=-1).to(tl.int32)
        last = tl.max(position, axis=0)
        position = tl.where(mine, position, last)
        lowest = tl.min(position, axis=0)
        d = tl.arange(0, BLOCK_D)
        e = tl.arange(0, BLOCK_V)
        row = token.to(tl.int64)
        x = tl.load(q + row[:, None] * q_token + head * q_head + d[None, :], mask=mine[:, None] & (d < D)[None, :], other=0.0)
        if WIDE:
            x = x.to(tl.float32)
        pages = block_table + sequence.to(tl.int64) * table_stride
        running = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
        end = last + 1
        whole = (lowest + 1) // BLOCK_N * BLOCK_N  # keys that every row attends
        page = tl.load(pages)
        for first in range(0, whole, BLOCK_N):
            next_page = tl.load(pages + (first + BLOCK_N) // 64, mask=first + BLOCK_N < end, other=0)  # ahead, as in decoding
            running, total, acc = _attend_tile(
                x, running, total, acc, k_cache, v_cache, page, kv, first, end, position, scale,
                KV, D, V, BLOCK_N, BLOCK_D, BLOCK_V, False, WIDE, FP8, NATIVE,
            )  # fmt: skip
            page = next_page
        for first in range(whole, end, BLOCK_N):
            next_page = tl.load(pages + (first + BLOCK_N) // 64, mask=first + BLOCK_N < end, other=0)
            running, total, acc = _attend_tile(
                x, running, total, acc, k_cache, v_cache, page, kv, first, end, position, scale,
                KV, D, V, BLOCK_N, BLOCK_D, BLOCK_V, True, WIDE, FP8, NATIVE,
            )  # fmt: skip
            page = next_page
        where = row * H + head
        mask = mine[:, None] & (e < V)[None, :]
        tl.store(out + where[:, None] * V + e[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
        tl.store(lse + where, running * 0.6931471805599453 + tl.log(total), mask=mine)


def _launch_gqa_kv_write(
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    eps: float,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    interleaved: bool,
) -> None:
    if k.numel() == 0:
        return
    k, v = unit_rows(k), unit_rows(v)
    tokens, heads, width = k.shape
    half, value = table.shape[1] // 2, v.shape[2]
    block_d = block(width, 1)
    block_heads = min(block(heads, 1), max(1, 2048 // block_d))
    with device_guard(k):
        _gqa_kv_write_kernel[(tokens, triton.cdiv(heads, block_heads))](
            k, v, k if weight is None else launchable(weight), positions.contiguous(), slots.contiguous(), launchable(table),
            k_cache, v_cache, table.shape[0], k_cache.shape[0] * PAGE, k.stride(0), k.stride(1), v.stride(0), v.stride(1), eps,
            HEADS=heads, D=width, V=value, HALF=half, NORM=weight is not None, FP8=k_cache.dtype == torch.uint8,
            INTERLEAVED=interleaved,
            BLOCK_HEADS=block_heads, BLOCK_D=block_d, BLOCK_V=block(value, 1), BLOCK_PAIRS=block(half, 1), num_warps=4,
            **overlap(k.device, tokens),
        )  # fmt: skip


def _gqa_kv_write_body(
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    eps: float,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    interleaved: bool,
) -> None:
    if use_triton(k):
        _launch_gqa_kv_write(k, v, weight, eps, positions, slots, table, k_cache, v_cache, interleaved)
    else:
        reference.gqa_kv_write(k, v, weight, eps, positions, slots, table, k_cache, v_cache, interleaved)


_gqa_kv_write_op = torch.library.custom_op(
    "exl3_triton::gqa_kv_write", _gqa_kv_write_body, mutates_args=("k_cache", "v_cache")
)


@_gqa_kv_write_op.register_fake
def _(k, v, weight, eps, positions, slots, table, k_cache, v_cache, interleaved):
    return None


def _head_width(cache: Tensor) -> int:
    """Values of a head in a cache [pages, 64, KV, D], in the fp8 format D + 4 bytes."""
    return cache.shape[3] - 4 * (cache.dtype == torch.uint8)


def _check_caches(op: str, k_cache: Tensor, v_cache: Tensor, heads: int | None = None) -> None:
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        rows = (k_cache.shape[0], PAGE, heads or (k_cache.shape[2] if k_cache.dim() == 4 else 0))
        kind = cache.dtype in FLOATS or (cache.dtype == k_cache.dtype == torch.uint8 and cache.shape[-1] % 4 == 0)
        if cache.dim() != 4 or tuple(cache.shape[:3]) != rows or not kind or not cache.is_contiguous():
            raise ValueError(
                f"{op}: {name} is {cache.dtype} {list(cache.shape)} with strides {list(cache.stride())}: "
                f"required contiguous floats [pages, {PAGE}, key-value heads, width], or both uint8 with 4 bytes more (widths "
                "then multiples of 4), and the same first three sizes"
            )


def gqa_kv_write(
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    eps: float,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    interleaved: bool,
) -> None:
    """Stores each token's keys, RMS-normalised per head (fp32) and rotated on their first R elements, and its values.

    k: [T, KV, D], v: [T, KV, V] fp16, bf16 or fp32, any strides; weight: [D] of the norm, or None: keys are not normalised;
    positions, slots: int64 [T], slot = page * 64 + row in the page, negative: the token is skipped; table: fp32 [L, R],
    R <= D, and interleaved as in `rope`; k_cache: [pages, 64, KV, D], v_cache: [pages, 64, KV, V], contiguous, written
    (rounded once to their dtype), or both uint8 with D + 4 and V + 4 bytes a head, fp8 as in `kv_format`. Two tokens of one
    call must not share a slot. On a GPU a slot past the cache is skipped too. Raises ValueError for other shapes, dtypes or
    devices.
    """
    op = "gqa_kv_write"
    check_float(op, k=k, v=v, **({} if weight is None else {"weight": weight}))
    check_table(op, table, k.device)
    if k.dim() != 3 or v.dim() != 3 or k.shape[:2] != v.shape[:2] or table.shape[1] > k.shape[2]:
        shapes = f"k {list(k.shape)}, v {list(v.shape)}, table {list(table.shape)}"
        raise ValueError(f"{op}: {shapes}: required [T, KV, D], [T, KV, V], [L, R <= D]")
    if weight is not None and tuple(weight.shape) != (k.shape[2],):
        raise ValueError(f"{op}: weight {list(weight.shape)}: required [{k.shape[2]}], the width of a key, or None")
    _check_caches(op, k_cache, v_cache, k.shape[1])
    if (_head_width(k_cache), _head_width(v_cache)) != (k.shape[2], v.shape[2]):
        shapes = f"k_cache {list(k_cache.shape)}, v_cache {list(v_cache.shape)}"
        raise ValueError(f"{op}: {shapes}: required heads of {k.shape[2]} and {v.shape[2]}, as k and v")
    check_index(op, "positions", positions, torch.int64, (k.shape[0],), k.device)
    check_index(op, "slots", slots, torch.int64, (k.shape[0],), k.device)
    caches = (k_cache, v_cache)
    call(_gqa_kv_write_op, _gqa_kv_write_body, k, v, weight, float(eps), positions, slots, table, *caches, interleaved)


def _launch_gqa_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    scale: float,
    max_context: int,
    tile: GroupedTile | None = None,
    plan: SplitPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """`tile` and `plan` override the defaults, for tuning and tests."""
    tokens, heads, width = q.shape
    kv_heads, value = v_cache.shape[2], _head_width(v_cache)
    out = torch.empty(tokens, heads, value, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    q, block_table, sequence, positions = unit_rows(q), unit_last(block_table), sequence.contiguous(), positions.contiguous()
    fp8 = k_cache.dtype == torch.uint8
    wide = q.dtype == torch.float32 or not (fp8 or q.dtype == k_cache.dtype == v_cache.dtype)
    sizes, kv, work = (heads, kv_heads, width, value), "fp8" if fp8 else "bf16", torch.float32 if wide else q.dtype
    if tile is None or plan is None:
        default = select_grouped_decode(sizes, work, device_of(q.device), kv, tokens, max_context)
        tile, plan = tile or default[0], plan or default[1]
    head_blocks = kv_heads * -(-(heads // kv_heads) // tile.rows)
    # tokens a launch: their partial results stay within the scratch; without ranges there are none
    step = tokens if plan.most == 1 else min(tokens, max(1, SCRATCH_BYTES // (heads * plan.grid * (value + 2) * 4)))
    parts = (step, heads, plan.grid) if plan.most > 1 else (1,)
    part_acc = torch.empty(*parts, value, dtype=torch.float32, device=q.device) if plan.most > 1 else lse
    part_max = torch.empty(parts, dtype=torch.float32, device=q.device)
    part_sum = torch.empty(parts, dtype=torch.float32, device=q.device)
    with device_guard(q):
        for t in range(0, tokens, step):
            n = min(step, tokens - t)
            _gqa_decode_kernel[(n, head_blocks, plan.grid)](
                q, k_cache, v_cache, block_table, sequence, positions, part_acc, part_max, part_sum, out, lse, scale * LOG2E,
                t, q.stride(0), q.stride(1), block_table.stride(0), plan.grid,
                H=heads, KV=kv_heads, D=width, V=value, BLOCK_G=tile.rows, BLOCK_D=block(width), BLOCK_V=block(value),
                BLOCK_N=tile.keys, LEAST=plan.least, MOST=plan.most, WIDE=wide, FP8=fp8,
                NATIVE=device_of(q.device).family == "sm_90", num_warps=tile.warps, num_stages=tile.stages,
                **overlap(q.device, tokens),
            )  # fmt: skip
            if plan.most > 1:
                _combine_kernel[(n * heads, triton.cdiv(value, _COMBINE_COLUMNS))](
                    part_acc, part_max, part_sum, positions, out, lse, t * heads, plan.grid,
                    H=heads, C=value, S=0, BLOCK_N=tile.keys, LEAST=plan.least, MOST=plan.most,
                    MOST_PAD=block(plan.most, 2), ROWS=_COMBINE_ROWS, COLUMNS=_COMBINE_COLUMNS, num_warps=4,
                    **overlap(q.device, tokens),
                )  # fmt: skip
    return out, lse


def _launch_gqa_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    scale: float,
    tile: GroupedTile | None = None,
) -> tuple[Tensor, Tensor]:
    """`tile` overrides the default, for tuning and tests."""
    tokens, heads, width = q.shape
    kv_heads, value = v_cache.shape[2], _head_width(v_cache)
    sequences = block_table.shape[0]
    out = torch.zeros(tokens, heads, value, dtype=q.dtype, device=q.device)  # padding rows stay as they are
    lse = torch.full((tokens, heads), float("-inf"), dtype=torch.float32, device=q.device)
    if out.numel() == 0 or sequences == 0:
        return out, lse
    q, block_table, sequence, positions = unit_rows(q), unit_last(block_table), sequence.contiguous(), positions.contiguous()
    fp8 = k_cache.dtype == torch.uint8
    wide = q.dtype == torch.float32 or not (fp8 or q.dtype == k_cache.dtype == v_cache.dtype)
    sizes, kv, work = (heads, kv_heads, width, value), "fp8" if fp8 else "bf16", torch.float32 if wide else q.dtype
    tile = tile or select_grouped_prefill(sizes, work, device_of(q.device), kv)
    bounds = torch.zeros(sequences, 3, dtype=torch.int32, device=q.device)
    with device_guard(q):
        _bounds_kernel[(triton.cdiv(tokens, 256),)](sequence, positions, bounds, tokens, BLOCK=256, num_warps=4)
        for b in range(0, sequences, _MAX_GRID):
            _gqa_prefill_kernel[(triton.cdiv(tokens, tile.rows), heads, min(_MAX_GRID, sequences - b))](
                q, k_cache, v_cache, block_table, bounds, positions, out, lse, scale * LOG2E,
                q.stride(0), q.stride(1), block_table.stride(0), b,
                H=heads, KV=kv_heads, D=width, V=value, BLOCK_M=tile.rows, BLOCK_D=block(width), BLOCK_V=block(value),
                BLOCK_N=tile.keys, WIDE=wide, FP8=fp8, NATIVE=device_of(q.device).family == "sm_90",
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
    return out, lse


def _gqa_attention_body(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    scale: float,
    max_context: int,
    prefill: bool,
) -> tuple[Tensor, Tensor]:
    if not use_triton(q):
        out, lse = reference.gqa_attention(q, k_cache, v_cache, block_table, sequence, positions, scale)
        return out.to(q.dtype), lse.float()
    if prefill:
        return _launch_gqa_prefill(q, k_cache, v_cache, block_table, sequence, positions, scale)
    return _launch_gqa_decode(q, k_cache, v_cache, block_table, sequence, positions, scale, max_context)


_gqa_attention_op = torch.library.custom_op("exl3_triton::gqa_attention", _gqa_attention_body, mutates_args=())


@_gqa_attention_op.register_fake
def _(q, k_cache, v_cache, block_table, sequence, positions, scale, max_context, prefill):
    return q.new_empty((*q.shape[:2], _head_width(v_cache))), q.new_empty(q.shape[:2], dtype=torch.float32)


def gqa_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    *,
    scale: float,
    max_context: int,
    prefill: bool = False,
) -> tuple[Tensor, Tensor]:
    """Causal attention of H query heads over KV key-value heads: head h attends those of head h // (H / KV).

    q: [T, H, D] fp16, bf16 or fp32, any strides; k_cache: [pages, 64, KV, D], v_cache: [pages, 64, KV, V], which already hold
    the rows of the call's own tokens; the fast path where all are of one 16-bit dtype, or both fp8 as `gqa_kv_write` stores
    them. block_table: int32 [B, P], position p
    of sequence b lies in page block_table[b, p // 64], row p % 64; sequence: int32 [T]; positions: int64 [T], token t attends
    positions 0 .. positions[t]. scale: of the logits, natural. max_context: upper bound of positions + 1; sizes the grid, not
    the result. prefill: the form that is fast for many tokens a sequence; these must then lie side by side, in ascending
    order of position.

    Returns (o [T, H, V] in the dtype of q, lse fp32 [T, H], the natural logarithm of the sum of exponentials, for merging
    contexts); tokens at negative positions (padding) give o = 0, lse = -inf. A token's bits do not depend on the other
    tokens; while decoding, as long as T <= 64, or T > 64. Raises ValueError for other shapes, dtypes or devices.
    """
    op = "gqa_attention"
    check_float(op, q=q)
    _check_caches(op, k_cache, v_cache)
    if q.dim() != 3 or q.shape[2] != _head_width(k_cache) or q.shape[1] % k_cache.shape[2]:
        shapes = f"q {list(q.shape)}, k_cache {list(k_cache.shape)}"
        raise ValueError(f"{op}: {shapes}: required [T, H, D] and [pages, {PAGE}, KV, D], H a multiple of KV")
    check_batch(op, q.shape[0], block_table, sequence, positions, q.device)
    if max_context < 1 or not scale > 0:
        rule = "required an upper bound of positions + 1, >= 1, and scale > 0"
        raise ValueError(f"{op}: max_context={max_context}, scale={scale}: {rule}")
    place = (block_table, sequence, positions)
    return call(_gqa_attention_op, _gqa_attention_body, q, k_cache, v_cache, *place, float(scale), max_context, prefill)
