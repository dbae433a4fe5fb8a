"""MLA attention of decoding: absorbed, over the paged cache or over selected positions of it.

It is multi-query attention: the heads of a token are the rows of a tile, the cache rows are keys and, without their last R
values, values. A token's context is cut into ranges (flash decoding) by its own length alone, so neither the other tokens nor
`max_context` change a bit of its result; the grid is sized by `max_context`, so it can be captured; `_combine_kernel` adds
the ranges in ascending order. Prefill, the expanded form, is in `prefill.py`.
"""

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ._args import block, check_batch, check_float, check_index, check_latents, stored_format, unit_last, unit_rows
from ._dispatch import call, device_guard, overlap, use_triton
from ._triton import start_next, tl, triton, wait_previous
from .attention_tuning import DecodeTile, SplitPlan, select_decode
from .packed import e4m3_decode, latent_columns, rope_columns
from .prefill import LOG2E, mla_prefill
from .tuning import device_of

__all__ = ["mla_decode", "mla_prefill"]

SCRATCH_BYTES = 256 << 20  # partial results: a launch takes as many tokens as fit
_COMBINE_ROWS, _COMBINE_COLUMNS = 64, 32  # ranges and columns that the combine kernel adds at a time


@triton.jit
def _ranges(count, LEAST: tl.constexpr, MOST: tl.constexpr, BLOCK_N: tl.constexpr):
    """(keys in a range, ranges in use) of a context of `count` keys."""
    wanted = tl.maximum(tl.minimum(tl.cdiv(count, LEAST), MOST), 1)
    keys = tl.maximum(tl.cdiv(tl.cdiv(count, wanted), BLOCK_N), 1) * BLOCK_N
    return keys, tl.cdiv(count, keys)


@triton.jit
def _slots(first, end, position, token, pages, selected, S: tl.constexpr, BLOCK_N: tl.constexpr):
    """(slots, whether they count) of a tile's keys: positions first .., or the selected ones listed there."""
    n = first + tl.arange(0, BLOCK_N)
    if S > 0:
        at = tl.load(selected + token * S + n, mask=n < end, other=-1)
        valid = (at >= 0) & (at <= position)
        page = tl.load(pages + at // 64, mask=valid, other=0).to(tl.int64)
        return page * 64 + at % 64, valid
    page = tl.load(pages + first // 64, mask=first < end, other=0).to(tl.int64)
    return page * 64 + n % 64, n < end


@triton.jit
def _latents(
    cache, slot, valid, first, q, latent_scale, C: tl.constexpr, R: tl.constexpr, KV: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, WIDE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Columns first .. of a tile's latents [keys, BLOCK_C]; packed ones in the dtype of q."""
    if KV != "bf16":
        k = latent_columns(cache, slot, valid, first, latent_scale, q, C, R, KV, WIDTH, BLOCK_N, BLOCK_C, NATIVE)
    else:
        c = first + tl.arange(0, BLOCK_C)[None, :]
        k = tl.load(cache + slot[:, None] * (C + R) + c, mask=valid[:, None] & (c < C), other=0.0)
        if WIDE:
            k = k.to(tl.float32)
    return k


@triton.jit
def _rope_keys(
    cache, slot, valid, q, C: tl.constexpr, R: tl.constexpr, KV: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr,
    WIDE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """A tile's rope keys [keys, R]; packed ones in the dtype of q."""
    if KV != "bf16":
        k = rope_columns(cache, slot, valid, q, C, R, KV, WIDTH, BLOCK_R, NATIVE)
    else:
        r = tl.arange(0, BLOCK_R)[None, :]
        k = tl.load(cache + slot[:, None] * (C + R) + C + r, mask=valid[:, None] & (r < R), other=0.0)
        if WIDE:
            k = k.to(tl.float32)
    return k


@triton.jit
def _store_range(
    acc, running, total, part_acc, part_max, part_sum, out, lse, token, local, head, split, splits, c, mask_c, stored,
    H: tl.constexpr, C: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """A range's sums: to the partial results, or, where a token has one range only, divided to the output."""
    if MOST == 1:
        where = token * H + head
        empty = total == 0.0
        value = acc / tl.where(empty, 1.0, total)[:, None]
        tl.store(out + where[:, None] * C + c[None, :], value.to(out.dtype.element_ty), mask=mask_c)
        tl.store(
            lse + where,
            tl.where(empty, float("-inf"), running * 0.6931471805599453 + tl.log(tl.where(empty, 1.0, total))),
            mask=stored,
        )
    else:
        where = (local * H + head) * splits + split
        tl.store(part_acc + where[:, None] * C + c[None, :], acc, mask=mask_c)
        tl.store(part_max + where, running, mask=stored)
        tl.store(part_sum + where, total, mask=stored)


@triton.jit(
    do_not_specialize=["first_token", "table_stride", "splits"],
    do_not_specialize_on_alignment=["block_table", "sequence", "positions", "selected"],
)
def _mla_decode_kernel(
    q_latent, q_rope, cache, block_table, sequence, positions, selected, part_acc, part_max, part_sum, out, lse,
    scale, latent_scale, first_token, latent_token, latent_head, rope_token, rope_head, table_stride, splits,
    H: tl.constexpr, C: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr, PARTS: tl.constexpr,
    WIDE: tl.constexpr, KV: tl.constexpr, WIDTH: tl.constexpr, NATIVE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One (token, block of heads, range of keys). S: selected positions a token, 0 for all; MOST = 1: writes the result
    itself. PARTS = 2: it sums half of the columns. KV: format of the rows, WIDTH: their length.
    """
    wait_previous(OVERLAP)
    local = tl.program_id(0).to(tl.int64)  # row of the partial results
    token = local + first_token
    BLOCK_V: tl.constexpr = BLOCK_C // PARTS
    head = tl.program_id(1) // PARTS * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(2)
    position = tl.load(positions + token)
    count = (position + 1).to(tl.int32)
    if S > 0:
        count = tl.where(position >= 0, S, 0)
    range_keys, used = _ranges(count, LEAST, MOST, BLOCK_N)
    if (split < used) | (MOST == 1):
        column = 0
        stored = head < H
        if PARTS == 2:
            column = tl.program_id(1) % PARTS * BLOCK_V
            stored = stored & (column == 0)  # maximum and sum: by the program of the first half
        c = column + tl.arange(0, BLOCK_V)
        r = tl.arange(0, BLOCK_R)
        mine = head.to(tl.int64)[:, None]
        mask_c = (head < H)[:, None] & (c < C)[None, :]
        q = tl.load(q_latent + token * latent_token + mine * latent_head + c[None, :], mask=mask_c, other=0.0)
        if PARTS == 2:
            other = BLOCK_V - column + tl.arange(0, BLOCK_V)
            mask_o = (head < H)[:, None] & (other < C)[None, :]
            qo = tl.load(q_latent + token * latent_token + mine * latent_head + other[None, :], mask=mask_o, other=0.0)
            if WIDE:
                qo = qo.to(tl.float32)
        mask_r = (head < H)[:, None] & (r < R)[None, :]
        qr = tl.load(q_rope + token * rope_token + mine * rope_head + r[None, :], mask=mask_r, other=0.0)
        if WIDE:
            q = q.to(tl.float32)
            qr = qr.to(tl.float32)
        pages = block_table + tl.load(sequence + token).to(tl.int64) * table_stride
        running = tl.full((BLOCK_H,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_H,), tl.float32)
        acc = tl.zeros((BLOCK_H, BLOCK_V), tl.float32)
        end = tl.minimum((split + 1) * range_keys, count)
        slot, valid = _slots(split * range_keys, end, position, token, pages, selected, S, BLOCK_N)
        for first in range(split * range_keys, end, BLOCK_N):
            # a tile ahead: else the pipeliner counts the table's load as a stage and copies keys without overlap
            next_slot, next_valid = _slots(first + BLOCK_N, end, position, token, pages, selected, S, BLOCK_N)
            k = _latents(cache, slot, valid, column, q, latent_scale, C, R, KV, WIDTH, BLOCK_N, BLOCK_V, WIDE, NATIVE)
            kr = _rope_keys(cache, slot, valid, q, C, R, KV, WIDTH, BLOCK_R, WIDE, NATIVE)
            if PARTS == 2:
                at = BLOCK_V - column
                ko = _latents(cache, slot, valid, at, q, latent_scale, C, R, KV, WIDTH, BLOCK_N, BLOCK_V, WIDE, NATIVE)
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
            if PARTS == 2:
                s = tl.dot(qo, tl.trans(ko), s, input_precision="ieee")
            s = tl.dot(qr, tl.trans(kr), s, input_precision="ieee")
            s = tl.where(valid[None, :], s, float("-inf"))
            peak = tl.maximum(running, tl.max(s, axis=1) * scale)
            base = tl.where(peak == float("-inf"), 0.0, peak)  # a tile may hold no selected position at all
            p = tl.exp2(tl.fma(s, scale, -base[:, None]))
            shrink = tl.exp2(running - base)
            total = total * shrink + tl.sum(p, axis=1)
            acc = tl.dot(p.to(k.dtype), k, acc * shrink[:, None], input_precision="ieee")
            running = peak
            slot = next_slot
            valid = next_valid
        start_next(OVERLAP)
        _store_range(
            acc, running, total, part_acc, part_max, part_sum, out, lse, token, local, head, split, splits, c, mask_c, stored,
            H, C, MOST,
        )  # fmt: skip


@triton.jit
def _word_values(words, J: tl.constexpr, scale, like, NATIVE: tl.constexpr):
    """Byte J of words of four e4m3, times their scale, in the dtype of `like`."""
    return (e4m3_decode(((words >> (8 * J)) & 255).to(tl.uint8), NATIVE) * scale).to(like.dtype)


@triton.jit
def _load_quarter(q_latent, row, head, latent_head, J: tl.constexpr, H: tl.constexpr, C: tl.constexpr, WORDS: tl.constexpr):
    c = 4 * tl.arange(0, WORDS) + J
    mask = (head < H)[:, None] & (c < C)[None, :]
    return tl.load(q_latent + row + head.to(tl.int64)[:, None] * latent_head + c[None, :], mask=mask, other=0.0)


@triton.jit(
    do_not_specialize=["first_token", "table_stride", "splits"],
    do_not_specialize_on_alignment=["block_table", "sequence", "positions", "selected"],
)
def _mla_decode_fp8_kernel(
    q_latent, q_rope, cache, block_table, sequence, positions, selected, part_acc, part_max, part_sum, out, lse,
    scale, first_token, latent_token, latent_head, rope_token, rope_head, table_stride, splits,
    H: tl.constexpr, C: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr, NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """`_mla_decode_kernel` over fp8 rows. They are read as words of four latents and multiplied byte by byte, columns 4 w + j
    for each j: as operands of the second product bytes of one row would come out of shared memory one at a time.
    """
    wait_previous(OVERLAP)
    local = tl.program_id(0).to(tl.int64)
    token = local + first_token
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(2)
    position = tl.load(positions + token)
    count = (position + 1).to(tl.int32)
    if S > 0:
        count = tl.where(position >= 0, S, 0)
    range_keys, used = _ranges(count, LEAST, MOST, BLOCK_N)
    if (split < used) | (MOST == 1):
        WORDS: tl.constexpr = BLOCK_C // 4
        PER_SCALE: tl.constexpr = 32 if WORDS > 32 else WORDS
        w = tl.arange(0, WORDS)
        g = tl.arange(0, WORDS // PER_SCALE)
        r = tl.arange(0, BLOCK_R)
        q0 = _load_quarter(q_latent, token * latent_token, head, latent_head, 0, H, C, WORDS)
        q1 = _load_quarter(q_latent, token * latent_token, head, latent_head, 1, H, C, WORDS)
        q2 = _load_quarter(q_latent, token * latent_token, head, latent_head, 2, H, C, WORDS)
        q3 = _load_quarter(q_latent, token * latent_token, head, latent_head, 3, H, C, WORDS)
        mask_r = (head < H)[:, None] & (r < R)[None, :]
        qr = tl.load(q_rope + token * rope_token + head.to(tl.int64)[:, None] * rope_head + r[None, :], mask=mask_r, other=0.0)
        if WIDE:
            q0, q1, q2, q3, qr = q0.to(tl.float32), q1.to(tl.float32), q2.to(tl.float32), q3.to(tl.float32), qr.to(tl.float32)
        pages = block_table + tl.load(sequence + token).to(tl.int64) * table_stride
        running = tl.full((BLOCK_H,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_H,), tl.float32)
        a0 = tl.zeros((BLOCK_H, WORDS), tl.float32)
        a1 = tl.zeros((BLOCK_H, WORDS), tl.float32)
        a2 = tl.zeros((BLOCK_H, WORDS), tl.float32)
        a3 = tl.zeros((BLOCK_H, WORDS), tl.float32)
        end = tl.minimum((split + 1) * range_keys, count)
        slot, valid = _slots(split * range_keys, end, position, token, pages, selected, S, BLOCK_N)
        for first in range(split * range_keys, end, BLOCK_N):
            next_slot, next_valid = _slots(first + BLOCK_N, end, position, token, pages, selected, S, BLOCK_N)
            row = cache + slot * WIDTH
            words = tl.load(
                row.to(tl.pointer_type(tl.int32), bitcast=True)[:, None] + w[None, :],
                mask=valid[:, None] & (w < C // 4)[None, :], other=0,
            )  # fmt: skip
            by = tl.load(
                (row + C).to(tl.pointer_type(tl.float32), bitcast=True)[:, None] + g[None, :],
                mask=valid[:, None] & (g * PER_SCALE < C // 4)[None, :], other=0.0,
            )  # fmt: skip
            by = tl.reshape(tl.broadcast_to(by[:, :, None], (BLOCK_N, WORDS // PER_SCALE, PER_SCALE)), (BLOCK_N, WORDS))
            kr = _rope_keys(cache, slot, valid, qr, C, R, "fp8", WIDTH, BLOCK_R, WIDE, NATIVE)
            k0 = _word_values(words, 0, by, q0, NATIVE)
            k1 = _word_values(words, 1, by, q0, NATIVE)
            k2 = _word_values(words, 2, by, q0, NATIVE)
            k3 = _word_values(words, 3, by, q0, NATIVE)
            s = tl.dot(qr, tl.trans(kr), input_precision="ieee")
            s = tl.dot(q0, tl.trans(k0), s, input_precision="ieee")
            s = tl.dot(q1, tl.trans(k1), s, input_precision="ieee")
            s = tl.dot(q2, tl.trans(k2), s, input_precision="ieee")
            s = tl.dot(q3, tl.trans(k3), s, input_precision="ieee")
            s = tl.where(valid[None, :], s, float("-inf"))
            peak = tl.maximum(running, tl.max(s, axis=1) * scale)
            base = tl.where(peak == float("-inf"), 0.0, peak)
            p = tl.exp2(tl.fma(s, scale, -base[:, None]))
            shrink = tl.exp2(running - base)
            total = total * shrink + tl.sum(p, axis=1)
            p = p.to(k0.dtype)
            a0 = tl.dot(p, k0, a0 * shrink[:, None], input_precision="ieee")
            a1 = tl.dot(p, k1, a1 * shrink[:, None], input_precision="ieee")
            a2 = tl.dot(p, k2, a2 * shrink[:, None], input_precision="ieee")
            a3 = tl.dot(p, k3, a3 * shrink[:, None], input_precision="ieee")
            running = peak
            slot = next_slot
            valid = next_valid
        start_next(OVERLAP)
        acc = tl.reshape(tl.join(tl.join(a0, a2), tl.join(a1, a3)), (BLOCK_H, BLOCK_C))
        c = tl.arange(0, BLOCK_C)
        mask_c = (head < H)[:, None] & (c < C)[None, :]
        _store_range(
            acc, running, total, part_acc, part_max, part_sum, out, lse, token, local, head, split, splits, c, mask_c,
            head < H, H, C, MOST,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first_row", "splits"], do_not_specialize_on_alignment=["positions"])
def _combine_kernel(
    part_acc, part_max, part_sum, positions, out, lse, first_row, splits,
    H: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    MOST_PAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One (token, head, block of columns): the ranges' partial results, weighted and added, ROWS of them at a time."""
    wait_previous(OVERLAP)
    start_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    target = row + first_row
    position = tl.load(positions + target // H)
    count = (position + 1).to(tl.int32)
    if S > 0:
        count = tl.where(position >= 0, S, 0)
    _, used = _ranges(count, LEAST, MOST, BLOCK_N)
    i = tl.arange(0, MOST_PAD)
    maxima = tl.load(part_max + row * splits + i, mask=i < used, other=float("-inf"))
    peak = tl.max(maxima, axis=0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2(maxima - base) * tl.load(part_sum + row * splits + i, mask=i < used, other=0.0), axis=0)
    empty = total == 0.0
    acc = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, used, ROWS):
        j = first + tl.arange(0, ROWS)
        weight = tl.exp2(tl.load(part_max + row * splits + j, mask=j < used, other=float("-inf")) - base)
        values = tl.load(
            part_acc + (row * splits + j)[:, None] * C + c[None, :], mask=(j < used)[:, None] & (c < C)[None, :], other=0.0
        )
        acc += tl.sum(values * weight[:, None], axis=0)
    acc = acc / tl.where(empty, 1.0, total)
    tl.store(out + target * C + c, acc.to(out.dtype.element_ty), mask=c < C)
    if tl.program_id(1) == 0:
        tl.store(lse + target, tl.where(empty, float("-inf"), base * 0.6931471805599453 + tl.log(tl.where(empty, 1.0, total))))


def _launch_mla_decode(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    selected: Tensor | None,
    scale: float,
    max_context: int,
    latent_scale: float | None = None,
    tile: DecodeTile | None = None,
    plan: SplitPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """`tile` and `plan` override the defaults, for tuning and tests."""
    tokens, heads, latent = q_latent.shape
    device = q_latent.device
    out = torch.empty(tokens, heads, latent, dtype=q_latent.dtype, device=device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=device)
    if out.numel() == 0:
        return out, lse
    q_latent, q_rope, block_table = unit_rows(q_latent), unit_rows(q_rope), unit_last(block_table)
    sequence, positions = sequence.contiguous(), positions.contiguous()
    chosen = 0 if selected is None else selected.shape[1]
    picks = positions if selected is None else selected.contiguous()
    kv = stored_format(cache, latent, q_rope.shape[2])
    rows = q_latent.dtype if cache.dtype == torch.uint8 else cache.dtype
    wide = not (q_latent.dtype == q_rope.dtype == rows) or rows == torch.float32
    if tile is None or plan is None:
        work = torch.float32 if wide else rows
        default = select_decode(
            heads, latent, q_rope.shape[2], work, device_of(device), kv, tokens, chosen or max_context, sparse=chosen > 0
        )
        tile, plan = tile or default[0], plan or default[1]
    blocks = -(-heads // tile.heads) * tile.parts
    # tokens a launch: their partial results stay within the scratch; without ranges there are none
    step = tokens if plan.most == 1 else min(tokens, max(1, SCRATCH_BYTES // (heads * plan.grid * (latent + 2) * 4)))
    parts = (step, heads, plan.grid) if plan.most > 1 else (1,)
    part_acc = torch.empty(*parts, latent, dtype=torch.float32, device=device) if plan.most > 1 else lse
    part_max = torch.empty(parts, dtype=torch.float32, device=device)
    part_sum = torch.empty(parts, dtype=torch.float32, device=device)
    # packed tiles are small: programs that start early share multiprocessors while others idle (fp8, one sequence of 64k
    # tokens: 98 us with overlap, 67 without, on an H200)
    early = overlap(device, tokens) if kv == "bf16" else {"OVERLAP": False}
    widths = {"H": heads, "C": latent, "S": chosen, "BLOCK_N": tile.keys, "LEAST": plan.least, "MOST": plan.most}
    if tile.words and kv != "fp8":
        raise ValueError(f"mla_decode: words=True with kv={kv}: required fp8, whose bytes are latents")
    latent_scales = () if tile.words else (1.0 if latent_scale is None else latent_scale,)
    forms = {} if tile.words else {"PARTS": tile.parts, "KV": kv}
    with device_guard(q_latent):
        for t in range(0, tokens, step):
            n = min(step, tokens - t)
            kernel: Any = _mla_decode_fp8_kernel if tile.words else _mla_decode_kernel
            kernel[(n, blocks, plan.grid)](
                q_latent, q_rope, cache, block_table, sequence, positions, picks,
                part_acc, part_max, part_sum, out, lse, scale * LOG2E, *latent_scales,
                t, q_latent.stride(0), q_latent.stride(1), q_rope.stride(0), q_rope.stride(1), block_table.stride(0),
                plan.grid, R=q_rope.shape[2], BLOCK_H=tile.heads, BLOCK_C=block(latent), BLOCK_R=block(q_rope.shape[2]),
                WIDE=wide, WIDTH=cache.shape[2], NATIVE=device_of(device).family == "sm_90", **forms, **widths,
                num_warps=tile.warps, num_stages=tile.stages, **early,
            )  # fmt: skip
            if plan.most > 1:
                _combine_kernel[(n * heads, triton.cdiv(latent, _COMBINE_COLUMNS))](
                    part_acc, part_max, part_sum, positions, out, lse, t * heads, plan.grid,
                    MOST_PAD=block(plan.most, 2), ROWS=_COMBINE_ROWS, COLUMNS=_COMBINE_COLUMNS, **widths, num_warps=4,
                    **overlap(device, tokens),
                )  # fmt: skip
    return out, lse


def _mla_decode_body(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    selected: Tensor | None,
    scale: float,
    max_context: int,
    latent_scale: float | None,
) -> tuple[Tensor, Tensor]:
    place = (block_table, sequence, positions, selected, scale)
    if use_triton(q_latent):
        return _launch_mla_decode(q_latent, q_rope, cache, *place, max_context, latent_scale)
    out, lse = reference.mla_decode(q_latent, q_rope, cache, *place, latent_scale)
    return out.to(q_latent.dtype), lse.float()


_mla_decode_op = torch.library.custom_op("exl3_triton::mla_decode", _mla_decode_body, mutates_args=())


@_mla_decode_op.register_fake
def _(q_latent, q_rope, cache, block_table, sequence, positions, selected, scale, max_context, latent_scale):
    return q_latent.new_empty(q_latent.shape), q_latent.new_empty(q_latent.shape[:2], dtype=torch.float32)


def mla_decode(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    selected: Tensor | None = None,
    *,
    scale: float,
    max_context: int,
    latent_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Absorbed MLA: softmax((q_latent . latent + q_rope . key) * scale) over a token's context, applied to the latents.

    q_latent: [T, H, C], q_rope: [T, H, R], fp16, bf16 or fp32, any strides; cache: [pages, 64, C + R] (latent, rope key), the
    fast path where its dtype is that of the queries, or uint8 [pages, 64, bytes] in a format of `kv_format`, which the bytes
    tell (latent_scale: as it was written with); block_table: int32 [B, P], position p of sequence b lies in page
    block_table[b, p // 64], row p % 64; sequence: int32 [T]; positions: int64 [T], token t attends positions 0 ..
    positions[t]. selected: None, or int32 [T, S]: it attends those of these positions that are in 0 .. positions[t] (each
    listed once, in any order; -1 for none). scale: of the logits, natural. max_context: upper bound of positions + 1; sizes
    the grid, not the result.

    Returns (o [T, H, C] in the dtype of q_latent, lse fp32 [T, H], the natural logarithm of the sum of exponentials, for
    merging contexts); tokens that attend nothing (position < 0: padding) give o = 0, lse = -inf. A token's bits do not depend
    on the other tokens as long as T <= 64, or T > 64. Raises ValueError for other shapes, dtypes or devices.
    """
    op = "mla_decode"
    check_float(op, q_latent=q_latent, q_rope=q_rope)
    if q_latent.dim() != 3 or q_rope.dim() != 3 or q_latent.shape[:2] != q_rope.shape[:2]:
        raise ValueError(
            f"{op}: q_latent {list(q_latent.shape)}, q_rope {list(q_rope.shape)}: required [T, H, C] and [T, H, R]"
        )
    tokens, device = q_latent.shape[0], q_latent.device
    check_latents(op, cache, q_latent.shape[2], q_rope.shape[2], device)
    check_batch(op, tokens, block_table, sequence, positions, device)
    if selected is not None and (selected.dim() != 2 or selected.shape[1] == 0):
        raise ValueError(f"{op}: selected {list(selected.shape)}: required int32 [{tokens}, S >= 1], or None")
    if selected is not None:
        check_index(op, "selected", selected, torch.int32, (tokens, selected.shape[1]), device)
    if max_context < 1 or not scale > 0:
        raise ValueError(
            f"{op}: max_context={max_context}, scale={scale}: required an upper bound of positions + 1, >= 1, and scale > 0"
        )
    return call(
        _mla_decode_op,
        _mla_decode_body,
        q_latent,
        q_rope,
        cache,
        block_table,
        sequence,
        positions,
        selected,
        float(scale),
        max_context,
        latent_scale,
    )
