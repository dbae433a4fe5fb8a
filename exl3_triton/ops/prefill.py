"""MLA attention of prefill: expanded, causal, reading the whole context back from the paged cache.

Works in tiles of KEY_TILE positions: one launch each unfolds keys (the rope key appended) and values of a tile for some heads
and sequences into scratch, another lets every query attend them; maximum, sum and accumulator go from tile to tile in fp32.
Nothing is read back to the host: launches are counted by `max_context` and the rows of the block table, and programs without
work leave.
"""

import math

import torch
from torch import Tensor

from .. import reference
from ._args import PAGE, block, check_batch, check_float, check_latents, stored_format, unit_last, unit_rows
from ._dispatch import call, device_guard, use_triton
from ._triton import tl, triton
from .attention_tuning import PrefillTile, select_prefill
from .packed import latent_columns, rope_columns
from .tuning import device_of

LOG2E = math.log2(math.e)
KEY_TILE = 16384  # positions unfolded at a time; the only number here that a result depends on
SCRATCH_BYTES = 256 << 20  # as many heads at a time as fit
_MAX_GROUP = 16  # sequences a launch: every tile of queries has a program for each, most of which leave at once
_UNFOLD_ROWS, _UNFOLD_COLUMNS, _UNFOLD_INNER = 128, 64, 64


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["sequence", "positions"])
def _bounds_kernel(sequence, positions, bounds, tokens, BLOCK: tl.constexpr):
    """bounds int32 [B, 3]: a sequence's first token, one past its last, length of its context; absent ones keep zeros."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tokens
    position = tl.load(positions + i, mask=inside, other=-1)
    mine = tl.load(sequence + i, mask=inside, other=-1)
    live = position >= 0
    before = tl.load(sequence + i - 1, mask=inside & (i > 0), other=-1)
    before = tl.where(tl.load(positions + i - 1, mask=inside & (i > 0), other=-1) >= 0, before, -1)
    after = tl.load(sequence + i + 1, mask=i + 1 < tokens, other=-1)
    after = tl.where(tl.load(positions + i + 1, mask=i + 1 < tokens, other=-1) >= 0, after, -1)
    at = bounds + mine.to(tl.int64) * 3
    last = live & (after != mine)
    tl.store(at, i, mask=live & (before != mine))
    tl.store(at + 1, i + 1, mask=last)
    tl.store(at + 2, (position + 1).to(tl.int32), mask=last)


@triton.jit(
    do_not_specialize=["table_stride", "first_sequence", "first_head", "heads", "start", "key_rows"],
    do_not_specialize_on_alignment=["block_table", "bounds"],
)
def _unfold_kernel(
    cache, block_table, bounds, w, out, latent_scale,
    table_stride, w_head, w_row, w_column, first_sequence, first_head, heads, start, key_rows,
    C: tl.constexpr, R: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, WIDE: tl.constexpr,
    KV: tl.constexpr, WIDTH: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """out [sequences, heads, key_rows, D + ROPE] = latents of positions start, start + 1 .. times w[head]^T, w [H, D, C]; then
    the rope key, where ROPE is R and not 0.
    """
    sequence = tl.program_id(2) // heads
    local_head = tl.program_id(2) % heads
    length = tl.load(bounds + (first_sequence + sequence) * 3 + 2)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    position = start + row
    if start + tl.program_id(0) * BLOCK_N < length:
        valid = (position < length) & (row < key_rows)
        pages = block_table + (first_sequence + sequence).to(tl.int64) * table_stride
        slot = tl.load(pages + position // 64, mask=valid, other=0).to(tl.int64) * 64 + position % 64
        d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        c = tl.arange(0, BLOCK_C)
        latents = cache + slot[:, None] * (C + R)
        weights = w + (first_head + local_head).to(tl.int64) * w_head + d[None, :] * w_row
        acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for first in range(0, C, BLOCK_C):
            k = first + c
            ws = tl.load(weights + k[:, None] * w_column, mask=(k < C)[:, None] & (d < D)[None, :], other=0.0)
            if WIDE:
                ws = ws.to(tl.float32)
            if KV != "bf16":
                xs = latent_columns(cache, slot, valid, first, latent_scale, ws, C, R, KV, WIDTH, BLOCK_N, BLOCK_C, NATIVE)
            else:
                xs = tl.load(latents + k[None, :], mask=valid[:, None] & (k < C)[None, :], other=0.0)
                if WIDE:
                    xs = xs.to(tl.float32)
            acc = tl.dot(xs, ws, acc, input_precision="ieee")
        target = out + (tl.program_id(2).to(tl.int64) * key_rows + row)[:, None] * (D + ROPE)
        tl.store(target + d[None, :], acc.to(out.dtype.element_ty), mask=valid[:, None] & (d < D)[None, :])
        if (ROPE > 0) & (tl.program_id(1) == 0):
            r = tl.arange(0, BLOCK_R)[None, :]
            if KV != "bf16":
                rope = rope_columns(cache, slot, valid, acc, C, R, KV, WIDTH, BLOCK_R, NATIVE)
            else:
                rope = tl.load(latents + C + r, mask=valid[:, None] & (r < R), other=0.0)
            tl.store(target + D + r, rope.to(out.dtype.element_ty), mask=valid[:, None] & (r < R))


@triton.jit
def _attend_tile(
    q1, q2, running, total, acc, keys, values, first, start, end, position, scale,
    W: tl.constexpr, W1: tl.constexpr, V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W1: tl.constexpr, BLOCK_W2: tl.constexpr, BLOCK_V: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """One tile of keys, positions start + first ..: updated (running maximum, sum, accumulator). MASK: causally, and up to
    `end`.
    """
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_W1)
    e = tl.arange(0, BLOCK_V)
    in_d = (d < W1)[None, :]
    in_e = (e < V)[None, :]
    if MASK:
        in_d = in_d & (n < end)[:, None]
        in_e = in_e & (n < end)[:, None]
    k = tl.load(keys + n[:, None] * W + d[None, :], mask=in_d, other=0.0)
    s = tl.dot(q1, tl.trans(k), input_precision="ieee")
    if BLOCK_W2 > 0:
        d2 = W1 + tl.arange(0, BLOCK_W2)
        in_d2 = (d2 < W)[None, :]
        if MASK:
            in_d2 = in_d2 & (n < end)[:, None]
        k2 = tl.load(keys + n[:, None] * W + d2[None, :], mask=in_d2, other=0.0)
        s = tl.dot(q2, tl.trans(k2), s, input_precision="ieee")
    if MASK:
        s = tl.where((start + n)[None, :] <= position[:, None], s, float("-inf"))
    peak = tl.maximum(running, tl.max(s, axis=1) * scale)
    p = tl.exp2(tl.fma(s, scale, -peak[:, None]))  # an explicit fma: the same bits with and without the mask
    shrink = tl.exp2(running - peak)
    total = total * shrink + tl.sum(p, axis=1)
    v = tl.load(values + n[:, None] * V + e[None, :], mask=in_e, other=0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return peak, total, acc


@triton.jit(
    do_not_specialize=["first_sequence", "first_head", "heads", "start", "key_rows"],
    do_not_specialize_on_alignment=["bounds", "positions"],
)
def _mla_prefill_kernel(
    q, keys, values, bounds, positions, state_acc, state_max, state_sum, out, scale,
    q_token, q_head, first_sequence, first_head, heads, start, key_rows,
    H: tl.constexpr, W: tl.constexpr, W1: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_W1: tl.constexpr, BLOCK_W2: tl.constexpr, BLOCK_V: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One (tile of queries, head, sequence) against the unfolded positions start .. start + key_rows - 1.

    The tiles lie on the flat tokens, so one may hold the end of a sequence and the start of the next: each sequence has its
    own program, which keeps to its rows. W1 is the largest power of two <= W, the width of a key; the rest, if any, is a
    second product.
    """
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the longest contexts first
    sequence = first_sequence + tl.program_id(2)
    begin = tl.load(bounds + sequence * 3)
    stop = tl.load(bounds + sequence * 3 + 1)
    token = tile + tl.arange(0, BLOCK_M)
    mine = (token >= begin) & (token < stop)
    position = tl.load(positions + token, mask=mine, other=-1).to(tl.int32)
    last = tl.max(position, axis=0)
    if last >= start:  # else: nothing of this sequence here, or it was finished with an earlier tile of keys
        lowest = tl.min(tl.where(mine, position, last), axis=0)
        position = tl.where(mine, position, last)
        head = first_head + tl.program_id(1)
        row = token.to(tl.int64)
        source = q + row[:, None] * q_token + head.to(tl.int64) * q_head
        d = tl.arange(0, BLOCK_W1)
        q1 = tl.load(source + d[None, :], mask=mine[:, None] & (d < W1)[None, :], other=0.0)
        q2 = q1
        if BLOCK_W2 > 0:
            d2 = W1 + tl.arange(0, BLOCK_W2)
            q2 = tl.load(source + d2[None, :], mask=mine[:, None] & (d2 < W)[None, :], other=0.0)
        if WIDE:
            q1 = q1.to(tl.float32)
            q2 = q2.to(tl.float32)
        e = tl.arange(0, BLOCK_V)
        mask_v = mine[:, None] & (e < V)[None, :]
        state = row * heads + tl.program_id(1)
        running = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
        if start > 0:
            running = tl.load(state_max + state, mask=mine, other=0.0)
            total = tl.load(state_sum + state, mask=mine, other=0.0)
            acc = tl.load(state_acc + state[:, None] * V + e[None, :], mask=mask_v, other=0.0)
        block_row = (tl.program_id(2) * heads + tl.program_id(1)).to(tl.int64) * key_rows
        keys += block_row * W
        values += block_row * V
        end = tl.minimum(last + 1 - start, key_rows)
        whole = tl.maximum(tl.minimum(lowest + 1 - start, key_rows), 0) // BLOCK_N * BLOCK_N  # keys that every row attends
        for first in range(0, whole, BLOCK_N):
            running, total, acc = _attend_tile(
                q1, q2, running, total, acc, keys, values, first, start, end, position, scale,
                W, W1, V, BLOCK_N, BLOCK_W1, BLOCK_W2, BLOCK_V, False,
            )  # fmt: skip
        for first in range(whole, end, BLOCK_N):
            running, total, acc = _attend_tile(
                q1, q2, running, total, acc, keys, values, first, start, end, position, scale,
                W, W1, V, BLOCK_N, BLOCK_W1, BLOCK_W2, BLOCK_V, True,
            )  # fmt: skip
        if last < start + key_rows:
            target = out + (row * H + head)[:, None] * V + e[None, :]
            tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask_v)
        else:
            tl.store(state_max + state, running, mask=mine)
            tl.store(state_sum + state, total, mask=mine)
            tl.store(state_acc + state[:, None] * V + e[None, :], acc, mask=mask_v)


def _launch_mla_prefill(
    q: Tensor,
    cache: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    scale: float,
    max_context: int,
    latent_scale: float | None = None,
    key_tile: int = KEY_TILE,
    scratch_bytes: int = SCRATCH_BYTES,
    tile: PrefillTile | None = None,
) -> Tensor:
    """The last three override the defaults, for tuning and tests; key_tile: a multiple of 64."""
    tokens, heads, width = q.shape
    nope, latent, value = w_uk.shape[1], w_uk.shape[2], w_uv.shape[1]
    rope = width - nope
    device = q.device
    out = torch.zeros(tokens, heads, value, dtype=q.dtype, device=device)  # padding rows stay zero
    if out.numel() == 0 or block_table.shape[0] == 0:
        return out
    q, block_table = unit_rows(q), unit_last(block_table)
    sequence, positions = sequence.contiguous(), positions.contiguous()
    kv = stored_format(cache, latent, rope)
    stored = cache.dtype if kv == "bf16" else q.dtype
    wide = not (q.dtype == stored == w_uk.dtype == w_uv.dtype) or q.dtype == torch.float32
    work = torch.float32 if wide else q.dtype
    tile = tile or select_prefill(heads, width, value, work, device_of(device))

    context = min(max_context, block_table.shape[1] * PAGE)
    key_rows = min(key_tile, -(-context // PAGE) * PAGE)
    key_tiles = -(-context // key_rows)
    group = min(block_table.shape[0], max(1, key_tile // key_rows), _MAX_GROUP)  # short contexts: several sequences a launch
    head_bytes = group * key_rows * (width + value) * work.itemsize + (tokens * (value + 2) * 4 if key_tiles > 1 else 0)
    some = max(1, min(heads, scratch_bytes // head_bytes))
    some = -(-heads // -(-heads // some))  # launches of about equally many
    keys = torch.empty(group, some, key_rows, width, dtype=work, device=device)
    values = torch.empty(group, some, key_rows, value, dtype=work, device=device)
    states = (tokens, some) if key_tiles > 1 else (1, 1)
    state_acc = torch.empty(*states, value, dtype=torch.float32, device=device)
    state_max = torch.empty(states, dtype=torch.float32, device=device)
    state_sum = torch.empty(states, dtype=torch.float32, device=device)
    bounds = torch.zeros(block_table.shape[0], 3, dtype=torch.int32, device=device)

    first_part = block(width + 1, 1) // 2  # the largest power of two <= width
    rest = width - first_part
    if first_part < 16:
        first_part, rest = width, 0
    rows, columns, inner = (32, 32, 32) if wide else (_UNFOLD_ROWS, _UNFOLD_COLUMNS, _UNFOLD_INNER)
    with device_guard(q):
        _bounds_kernel[(triton.cdiv(tokens, 256),)](sequence, positions, bounds, tokens, BLOCK=256, num_warps=4)
        for b in range(0, block_table.shape[0], group):
            sequences = min(group, block_table.shape[0] - b)
            for h in range(0, heads, some):
                n = min(some, heads - h)
                for start in range(0, context, key_rows):
                    for w, unfolded, appended in ((w_uk, keys, rope), (w_uv, values, 0)):
                        grid = (triton.cdiv(key_rows, rows), triton.cdiv(w.shape[1], columns), sequences * n)
                        _unfold_kernel[grid](
                            cache, block_table, bounds, w, unfolded, 1.0 if latent_scale is None else latent_scale,
                            block_table.stride(0), w.stride(0), w.stride(1), w.stride(2), b, h, n, start, key_rows,
                            C=latent, R=rope, D=w.shape[1], ROPE=appended, BLOCK_N=rows, BLOCK_D=columns, BLOCK_C=inner,
                            BLOCK_R=block(rope), WIDE=wide, KV=kv, WIDTH=cache.shape[2],
                            NATIVE=device_of(device).family == "sm_90",
                            num_warps=4 if kv == "bf16" else 8, num_stages=1 if wide else 3,
                        )  # fmt: skip
                    _mla_prefill_kernel[(triton.cdiv(tokens, tile.queries), n, sequences)](
                        q, keys, values, bounds, positions, state_acc, state_max, state_sum, out, scale * LOG2E,
                        q.stride(0), q.stride(1), b, h, n, start, key_rows,
                        H=heads, W=width, W1=first_part, V=value, BLOCK_M=tile.queries, BLOCK_N=tile.keys,
                        BLOCK_W1=block(first_part), BLOCK_W2=block(rest) if rest else 0, BLOCK_V=block(value), WIDE=wide,
                        num_warps=tile.warps, num_stages=tile.stages,
                    )  # fmt: skip
    return out


def _mla_prefill_body(
    q: Tensor,
    cache: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    scale: float,
    max_context: int,
    latent_scale: float | None,
) -> Tensor:
    place = (block_table, sequence, positions, scale)
    if use_triton(q):
        return _launch_mla_prefill(q, cache, w_uk, w_uv, *place, max_context, latent_scale)
    return reference.mla_prefill(q, cache, w_uk, w_uv, *place, latent_scale).to(q.dtype)


_mla_prefill_op = torch.library.custom_op("exl3_triton::mla_prefill", _mla_prefill_body, mutates_args=())


@_mla_prefill_op.register_fake
def _(q, cache, w_uk, w_uv, block_table, sequence, positions, scale, max_context, latent_scale):
    return q.new_empty((q.shape[0], q.shape[1], w_uv.shape[1]))


def mla_prefill(
    q: Tensor,
    cache: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    *,
    scale: float,
    max_context: int,
    latent_scale: float | None = None,
) -> Tensor:
    """Expanded MLA: causal attention with keys and values unfolded per head from the cached latents.

    q: [T, H, N + R] fp16, bf16 or fp32, any strides; cache: [pages, 64, C + R] (latent, rope key), which already holds the
    rows of the call's own tokens; w_uk: [H, N, C], w_uv: [H, V, C], views allowed; the fast path where all are of one 16-bit
    dtype. Packed caches, block_table, sequence, positions, scale, max_context and latent_scale as in `mla_decode`; the tokens
    of a sequence lie side by side, in ascending order of position; tokens at negative positions are padding and give 0.
    Returns [T, H, V] in the dtype of q.

    Scratch: keys and values of up to KEY_TILE positions and, for longer contexts, fp32 accumulators of all tokens, for as many
    heads as fit into SCRATCH_BYTES (at least one): at most max(SCRATCH_BYTES, KEY_TILE * (N + R + V) * itemsize + T *
    (V + 2) * 4). A row's bits depend on its context alone. Raises ValueError for other shapes, dtypes or devices.
    """
    op = "mla_prefill"
    check_float(op, q=q, w_uk=w_uk, w_uv=w_uv)
    if q.dim() != 3 or w_uk.dim() != 3 or w_uv.dim() != 3 or not q.shape[1] == w_uk.shape[0] == w_uv.shape[0]:
        raise ValueError(
            f"{op}: q {list(q.shape)}, w_uk {list(w_uk.shape)}, w_uv {list(w_uv.shape)}: "
            f"required [T, H, N + R], [H, N, C], [H, V, C]"
        )
    if w_uk.shape[2] != w_uv.shape[2] or q.shape[2] <= w_uk.shape[1]:
        raise ValueError(
            f"{op}: q {list(q.shape)}, w_uk {list(w_uk.shape)}, w_uv {list(w_uv.shape)}: "
            f"required one C, and R = {q.shape[2]} - N > 0"
        )
    check_latents(op, cache, w_uk.shape[2], q.shape[2] - w_uk.shape[1], q.device)
    check_batch(op, q.shape[0], block_table, sequence, positions, q.device)
    if max_context < 1 or not scale > 0:
        raise ValueError(
            f"{op}: max_context={max_context}, scale={scale}: required an upper bound of positions + 1, >= 1, and scale > 0"
        )
    place = (block_table, sequence, positions, float(scale), max_context)
    return call(_mla_prefill_op, _mla_prefill_body, q, cache, w_uk, w_uv, *place, latent_scale)
