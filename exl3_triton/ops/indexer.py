"""The lightning indexer (DeepSeek-V3.2, arXiv:2512.02556): scores of all cached keys, then an exact, deterministic top-k.

Selection is by radix: programs over segments of a row count the digits of its scores, eight bits a launch from the top, into a
histogram of the row (integer additions: their order does not matter), until the k-th largest score is known. One more launch
writes the survivors in ascending order of position; ties at the k-th go to the lowest ones. A row of one segment takes one
launch: its program keeps the scores.
"""

import torch
from torch import Tensor

from .. import reference
from ._args import PAGE, block, check_batch, check_float, check_index_keys, unit_last, unit_rows
from ._dispatch import call, device_guard, overlap, use_triton
from ._triton import start_next, tl, triton, wait_previous
from .attention_tuning import ScoreTile, select_scores
from .hadamard import rotate_rows, rotation_bits
from .packed import e4m3_decode, head_plane
from .tuning import device_of

MAX_TOPK = 16384
SEGMENT = 4096  # scores of a row that one program counts
REDUCED = tl.constexpr(16.0)  # rotated queries are divided by it: at most sqrt(128) / 16 of the largest, fp16 holds them
SCORES = 1 << 24  # fp32 scores in scratch: max(1, SCORES // max_context) tokens are scored and selected at a time


@triton.jit
def _rotate_queries_kernel(
    q, out, q_token, q_head,
    H: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [T, H, D]: queries / REDUCED in blocks of 2^BITS multiplied by the Hadamard matrix, as keys in fp8 are."""
    wait_previous(OVERLAP)
    start_next(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (h < H) & (d < D)
    x = tl.load(q + token * q_token + h * q_head + d, mask=inside, other=0.0).to(tl.float32)
    rows: tl.constexpr = BLOCK_H * (BLOCK_D >> BITS)
    x = tl.reshape(rotate_rows(tl.reshape(x / REDUCED, (rows, 1 << BITS)), rows, BITS), (BLOCK_H, BLOCK_D))
    tl.store(out + (token * H + h) * D + d, x.to(out.dtype.element_ty), mask=inside)


def _rotate_queries(q: Tensor) -> Tensor:
    """Queries [T, H, D] as `_score_kernel` takes them for keys in fp8, contiguous."""
    tokens, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _rotate_queries_kernel[(tokens, triton.cdiv(heads, 8))](
        q, out, q.stride(0), q.stride(1),
        H=heads, D=width, BITS=rotation_bits(width), BLOCK_H=8, BLOCK_D=block(width), num_warps=4,
        **overlap(q.device, tokens),
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["first_token", "table_stride", "width"],
    do_not_specialize_on_alignment=["block_table", "sequence", "positions"],
)
def _score_kernel(
    q, weights, cache, block_table, sequence, positions, scores,
    first_token, q_token, q_head, weight_token, table_stride, width,
    H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SPAN: tl.constexpr,
    WIDE: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """scores [tokens, width]: sum over heads of weight * relu(key . query), for SPAN keys of one token; none past its
    position. FP8: queries from `_rotate_queries`.
    """
    wait_previous(OVERLAP)
    local = tl.program_id(0).to(tl.int64)
    token = local + first_token
    start = tl.program_id(1) * SPAN
    end = tl.minimum(tl.minimum(tl.load(positions + token) + 1, width).to(tl.int32), start + SPAN)
    if start < end:
        h = tl.arange(0, BLOCK_H)
        d = tl.arange(0, BLOCK_D)
        n = tl.arange(0, BLOCK_N)
        queries = tl.load(
            q + token * q_token + h[None, :] * q_head + d[:, None], mask=(h < H)[None, :] & (d < D)[:, None], other=0.0
        )
        if WIDE:
            queries = queries.to(tl.float32)
        weight = tl.load(weights + token * weight_token + h, mask=h < H, other=0.0)
        pages = block_table + tl.load(sequence + token).to(tl.int64) * table_stride
        page = tl.load(pages + start // 64)
        for first in range(start, end, BLOCK_N):
            slot = page.to(tl.int64) * 64 + first % 64 + n
            page = tl.load(
                pages + (first + BLOCK_N) // 64, mask=first + BLOCK_N < end, other=0
            )  # ahead, so that keys are pipelined
            inside = (first + n < end)[:, None] & (d < D)[None, :]
            if FP8:
                values, scales = head_plane(cache, slot, 1, D)
                keys = e4m3_decode(tl.load(values[:, None] + d[None, :], mask=inside, other=0), NATIVE).to(queries.dtype)
            else:
                keys = tl.load(cache + slot[:, None] * D + d[None, :], mask=inside, other=0.0)
                if WIDE:
                    keys = keys.to(tl.float32)
            products = tl.dot(keys, queries, input_precision="ieee")
            products = tl.where(products < 0.0, 0.0, products)  # unlike a maximum this keeps NaN
            score = tl.sum(products * weight[None, :], axis=1)
            if FP8:  # a key's scale is positive: it passes the rectifier
                score *= tl.load(scales, mask=first + n < end, other=0.0) * REDUCED
            tl.store(scores + local * width + first + n, score, mask=first + n < end)
    start_next(OVERLAP)


@triton.jit
def _sortable(scores, i, width, position):
    """A row's entries i: keys uint32, ordered as the scores, 0 for what is past `position`.

    NaN counts as -inf and -0.0 as 0.0: a sum without positive products can be either, and they must tie.
    """
    valid = (i < width) & (i <= position)
    score = tl.load(scores + i, mask=valid, other=0.0)
    score = tl.where(score == score, score, float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)
    return tl.where(valid, key, tl.zeros_like(key))


@triton.jit
def _threshold(counts, k, DIGITS: tl.constexpr):
    """(the first DIGITS bytes of the k-th largest key, how many of those that begin with them are among the k largest).

    Zeros where there are fewer than k keys. counts [DIGITS, 256]: keys that begin with the threshold, by their next byte.
    """
    prefix = tl.zeros((), tl.uint32)
    v = tl.arange(0, 256)
    for digit in tl.static_range(DIGITS):
        count = tl.load(counts + digit * 256 + v)
        from_here = tl.sum(count, axis=0) - tl.cumsum(count, axis=0) + count  # keys of this byte or a higher one
        byte = tl.maximum(tl.sum((from_here >= k).to(tl.int32), axis=0) - 1, 0)
        k -= tl.sum(tl.where(v > byte, count, 0), axis=0)
        prefix = prefix * 256 + byte.to(tl.uint32)
    return prefix, k


@triton.jit
def _write_best(out, key, start, threshold, ties, above, equal, BLOCK: tl.constexpr):
    """Positions start.. of the keys above `threshold`, and of the first `ties` equal to it, to their places in `out`: behind
    `above` larger and `equal` equal ones of the segments before.
    """
    i = tl.arange(0, BLOCK)
    larger = key > threshold
    same = (key == threshold) & (key > 0)
    one = tl.where(larger, 65536, same.to(tl.int32))  # two counts in one: BLOCK is less than 2^15
    before = tl.cumsum(one, axis=0) - one
    tied = equal + before % 65536
    tl.store(out + above + before // 65536 + tl.minimum(tied, ties), start + i, mask=larger | (same & (tied < ties)))


@triton.jit
def _write_nothing(out, position, width, k, BLOCK: tl.constexpr):
    """-1 behind the positions of a row."""
    i = tl.arange(0, BLOCK)
    taken = tl.minimum(tl.minimum(position + 1, width), k).to(tl.int32)
    for first in range(tl.maximum(taken, 0) // BLOCK * BLOCK, k, BLOCK):
        tl.store(out + first + i, tl.full((BLOCK,), -1, tl.int32), mask=(first + i >= taken) & (first + i < k))


@triton.jit
def _next_bits(key, threshold, k, SHIFT: tl.constexpr):
    """`threshold` with the two bits at SHIFT of the k-th largest key, found by counting: the bins of a histogram would be
    fought for.
    """
    step = tl.full((), 1, tl.uint32) << SHIFT
    reached = (key >= threshold + step).to(tl.int64)  # three counts in one
    reached += (key >= threshold + 2 * step).to(tl.int64) << 20
    reached += (key >= threshold + 3 * step).to(tl.int64) << 40
    count = tl.sum(reached, axis=0)
    bits = ((count & 0xFFFFF) >= k).to(tl.uint32) + (((count >> 20) & 0xFFFFF) >= k).to(tl.uint32)
    return threshold + (bits + ((count >> 40) >= k).to(tl.uint32)) * step


@triton.jit(do_not_specialize=["first_token", "width", "k"], do_not_specialize_on_alignment=["positions"])
def _select_row_kernel(scores, positions, out, first_token, width, k, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """The k best of a row of at most BLOCK scores, ascending, then -1."""
    row = tl.program_id(0).to(tl.int64)
    wait_previous(OVERLAP)
    start_next(OVERLAP)
    position = tl.load(positions + first_token + row)
    out += row * k
    key = _sortable(scores + row * width, tl.arange(0, BLOCK), width, position)
    threshold = tl.zeros((), tl.uint32)
    for digit in tl.static_range(16):
        threshold = _next_bits(key, threshold, k, 30 - 2 * digit)
    ties = k - tl.sum((key > threshold).to(tl.int32), axis=0)
    _write_best(out, key, 0, threshold, ties, 0, 0, BLOCK)
    _write_nothing(out, position, width, k, BLOCK)


@triton.jit(do_not_specialize=["first_token", "width", "k", "segments"], do_not_specialize_on_alignment=["positions"])
def _count_kernel(
    scores, positions, counts, parts, first_token, width, k, segments,
    DIGIT: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Adds one segment of a row [width] to counts [row, DIGIT]; the last digit's also to parts [row, segment, 257], with the
    number of keys that are larger whatever that digit is.
    """
    wait_previous(OVERLAP)
    start_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    position = tl.load(positions + first_token + row)
    if start <= position:
        counts += row * 1024
        key = _sortable(scores + row * width, start + tl.arange(0, BLOCK), width, position)
        prefix, _ = _threshold(counts, k, DIGIT)
        begins = key > 0
        if DIGIT > 0:
            begins = begins & ((key >> (32 - 8 * DIGIT)) == prefix)
        count = tl.histogram(((key >> (24 - 8 * DIGIT)) & 255).to(tl.int32), 256, mask=begins)
        v = tl.arange(0, 256)
        tl.atomic_add(counts + DIGIT * 256 + v, count, mask=count > 0, sem="relaxed")
        if DIGIT == 3:
            parts += (row * segments + tl.program_id(1)) * 257
            tl.store(parts + v, count)
            tl.store(parts + 256, tl.sum(((key >> 8) > prefix).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["first_token", "width", "k", "segments"], do_not_specialize_on_alignment=["positions"])
def _write_kernel(
    scores, positions, counts, parts, out, first_token, width, k, segments,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The k best of a row, ascending, then -1: those of one segment, behind those of the segments before it."""
    wait_previous(OVERLAP)
    start_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    start = segment * BLOCK
    i = tl.arange(0, BLOCK)
    position = tl.load(positions + first_token + row)
    out += row * k
    if start <= position:
        threshold, ties = _threshold(counts + row * 1024, k, 4)
        parts += row * segments * 257
        v = tl.arange(0, 256)
        last = (threshold & 255).to(tl.int32)
        above = tl.zeros((), tl.int32)
        equal = tl.zeros((), tl.int32)
        for first in range(0, segment, PARTS):
            s = first + tl.arange(0, PARTS)
            count = tl.load(parts + s[:, None] * 257 + v[None, :], mask=(s < segment)[:, None], other=0)
            above += tl.sum(tl.sum(tl.where(v[None, :] > last, count, 0), axis=1), axis=0)
            above += tl.sum(tl.load(parts + s * 257 + 256, mask=s < segment, other=0), axis=0)
            equal += tl.sum(tl.sum(tl.where(v[None, :] == last, count, 0), axis=1), axis=0)
        key = _sortable(scores + row * width, start + i, width, position)
        _write_best(out, key, start, threshold, ties, above, equal, BLOCK)
    if segment == 0:
        _write_nothing(out, position, width, k, BLOCK)


def _select_rows(scores: Tensor, positions: Tensor, first_token: int, topk: int, out: Tensor) -> None:
    """Rows of `out` from `first_token` on: the `topk` best positions of each row of `scores`."""
    rows, width = scores.shape
    segments = triton.cdiv(width, SEGMENT)
    if segments == 1:
        _select_row_kernel[(rows,)](
            scores, positions, out[first_token:], first_token, width, topk, BLOCK=SEGMENT, num_warps=8,
            **overlap(scores.device, rows),
        )  # fmt: skip
        return
    counts = torch.zeros(rows, 4, 256, dtype=torch.int32, device=scores.device)
    parts = torch.empty(rows, segments, 257, dtype=torch.int32, device=scores.device)
    for digit in range(4):
        _count_kernel[(rows, segments)](
            scores,
            positions,
            counts,
            parts,
            first_token,
            width,
            topk,
            segments,
            DIGIT=digit,
            BLOCK=SEGMENT,
            num_warps=8,
            **overlap(scores.device, rows),
        )
    _write_kernel[(rows, segments)](
        scores, positions, counts, parts, out[first_token:], first_token, width, topk, segments,
        BLOCK=SEGMENT, PARTS=16, num_warps=8, **overlap(scores.device, rows),
    )  # fmt: skip


def _launch_scores(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    first_token: int,
    scores: Tensor,
    tile: ScoreTile | None = None,
) -> None:
    """Scores of the tokens from `first_token` on into `scores` [some, width]; `tile` overrides the default."""
    heads, dim = q.shape[1:]
    rows, width = scores.shape
    fp8 = cache.dtype == torch.uint8
    wide = q.dtype == torch.float32 or not (fp8 or q.dtype == cache.dtype)
    tile = tile or select_scores(heads, dim, torch.float32 if wide else q.dtype, device_of(q.device), "fp8" if fp8 else "bf16")
    _score_kernel[(rows, triton.cdiv(width, tile.span))](
        q, weights, cache, block_table, sequence, positions, scores,
        first_token, q.stride(0), q.stride(1), weights.stride(0), block_table.stride(0), width,
        H=heads, D=dim, BLOCK_H=block(heads), BLOCK_D=block(dim), BLOCK_N=tile.keys, SPAN=tile.span, WIDE=wide, FP8=fp8,
        NATIVE=device_of(q.device).family == "sm_90",
        num_warps=tile.warps, num_stages=tile.stages, **overlap(q.device, rows),
    )  # fmt: skip


def _launch_index_select(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    topk: int,
    max_context: int,
    scratch_scores: int = SCORES,
) -> Tensor:
    tokens = q.shape[0]
    width = min(max_context, block_table.shape[1] * PAGE)
    positions = positions.contiguous()
    if width <= topk:  # every position is selected, whatever its score
        every = torch.arange(topk, dtype=torch.int32, device=q.device)
        return torch.where((every <= positions[:, None]) & (every < width), every, -1)
    out = torch.empty(tokens, topk, dtype=torch.int32, device=q.device)
    if tokens == 0:
        return out
    q, weights, block_table, sequence = unit_rows(q), unit_last(weights), unit_last(block_table), sequence.contiguous()
    step = min(tokens, max(1, scratch_scores // width))
    scores = torch.empty(step, width, dtype=torch.float32, device=q.device)
    with device_guard(q):
        if cache.dtype == torch.uint8:
            q = _rotate_queries(q)
        for t in range(0, tokens, step):
            n = min(step, tokens - t)
            _launch_scores(q, weights, cache, block_table, sequence, positions, t, scores[:n])
            _select_rows(scores[:n], positions, t, topk, out)
    return out


def _index_select_body(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    topk: int,
    max_context: int,
) -> Tensor:
    if use_triton(q):
        return _launch_index_select(q, weights, cache, block_table, sequence, positions, topk, max_context)
    return reference.index_select(q, weights, cache, block_table, sequence, positions, topk)


_index_select_op = torch.library.custom_op("exl3_triton::index_select", _index_select_body, mutates_args=())


@_index_select_op.register_fake
def _(q, weights, cache, block_table, sequence, positions, topk, max_context):
    return q.new_empty((q.shape[0], topk), dtype=torch.int32)


def index_select(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    *,
    topk: int,
    max_context: int,
) -> Tensor:
    """The positions that each token's sparse attention may see: the `topk` best of 0 .. positions[t] by the indexer's score.

    score(s) = sum over heads of weights[t, h] * relu(q[t, h] . key[s]), in fp32. q: [T, Hi, Di] fp16, bf16 or fp32, with rope;
    weights: fp32 [T, Hi], scaled; cache: [pages, 64, Di] (fast where its dtype is that of q), or fp8 as `index_k_write`
    stores it: then the queries are multiplied by the same Hadamard matrix as its keys, and rounded to their dtype again;
    block_table, sequence, positions, max_context as in `mla_decode`; topk <= 16384.

    Returns int32 [T, topk], ascending, -1 at the end where there are fewer (all -1 for padding, position < 0). Exact and
    deterministic: of equal scores the lowest position wins, NaN counts as -inf, a row does not depend on the others. Scratch:
    at most max(64 MiB, 4 * max_context bytes) of scores (a sixteenth more to count them); tokens go in turns. Raises
    ValueError for other shapes, dtypes or devices.
    """
    op = "index_select"
    check_float(op, q=q, weights=weights)
    if q.dim() != 3 or weights.dtype != torch.float32 or tuple(weights.shape) != tuple(q.shape[:2]):
        raise ValueError(
            f"{op}: q {list(q.shape)}, weights {weights.dtype} {list(weights.shape)}: required [T, H, D] and float32 [T, H]"
        )
    check_index_keys(op, cache, q.shape[2], q.device)
    check_batch(op, q.shape[0], block_table, sequence, positions, q.device)
    if not 1 <= topk <= MAX_TOPK or max_context < 1:
        raise ValueError(f"{op}: topk={topk}, max_context={max_context}: required topk in 1..{MAX_TOPK} and max_context >= 1")
    return call(_index_select_op, _index_select_body, q, weights, cache, block_table, sequence, positions, topk, max_context)
