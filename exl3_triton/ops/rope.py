"""Rotary position embedding over a range of a head's dimensions, from a table of cosines and sines."""

import torch
from torch import Tensor

from .. import reference
from ._args import block, check_float, check_index, check_table, unit_rows
from ._dispatch import call, device_guard, launchable, overlap, use_triton
from ._triton import start_next, tl, triton, wait_previous


@triton.jit
def rope_factors(table, position, length, pair, HALF: tl.constexpr):
    """(cos, sin) of `pair` at `position`: negative positions count as 0, those past the table give NaN rather than a stray
    read.
    """
    position = tl.maximum(position, 0)
    mask = (pair < HALF) & (position < length)
    at = table + position * (2 * HALF) + pair
    return tl.load(at, mask=mask, other=float("nan")), tl.load(at + HALF, mask=mask, other=float("nan"))


@triton.jit
def rope_pair(pair, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two dimensions, counted from the first rotated one, that rotation `pair` turns into each other."""
    if INTERLEAVED:
        return 2 * pair, 2 * pair + 1
    return pair, pair + HALF


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["positions"])
def _rope_kernel(
    x, positions, table, out, length, token_stride, head_stride,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, START: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_previous(OVERLAP)
    start_next(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    source = x + token * token_stride + head * head_stride
    target = out + (token * HEADS + head) * D
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    cos, sin = rope_factors(table, tl.load(positions + token), length, pair, HALF)
    first, second = rope_pair(pair, HALF, INTERLEAVED)
    mask = (head < HEADS) & (pair < HALF)
    a = tl.load(source + START + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + START + second, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + START + first, (a * cos - b * sin).to(out.dtype.element_ty), mask=mask)
    tl.store(target + START + second, (b * cos + a * sin).to(out.dtype.element_ty), mask=mask)
    if D > 2 * HALF:
        d = tl.arange(0, BLOCK_D)[None, :]
        rest = (head < HEADS) & (d < D) & ((d < START) | (d >= START + 2 * HALF))
        tl.store(target + d, tl.load(source + d, mask=rest, other=0.0), mask=rest)


def _launch_rope(x: Tensor, positions: Tensor, table: Tensor, interleaved: bool, start: int) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    x, positions, table = unit_rows(x), positions.contiguous(), launchable(table)
    tokens, heads, width = x.shape
    block_d = block(width, 1)
    block_heads = min(block(heads, 1), max(1, 2048 // block_d))
    with device_guard(x):
        _rope_kernel[(tokens, triton.cdiv(heads, block_heads))](
            x, positions, table, out, table.shape[0], x.stride(0), x.stride(1),
            HEADS=heads, D=width, HALF=table.shape[1] // 2, START=start, INTERLEAVED=interleaved,
            BLOCK_HEADS=block_heads, BLOCK_PAIRS=block(table.shape[1] // 2, 1), BLOCK_D=block_d, num_warps=4,
            **overlap(x.device, tokens),
        )  # fmt: skip
    return out


def _rope_body(x: Tensor, positions: Tensor, table: Tensor, interleaved: bool, start: int) -> Tensor:
    if use_triton(x):
        return _launch_rope(x, positions, table, interleaved, start)
    return reference.rope(x, positions, table, interleaved, start).to(x.dtype).contiguous()


_rope_op = torch.library.custom_op("exl3_triton::rope", _rope_body, mutates_args=())


@_rope_op.register_fake
def _(x, positions, table, interleaved, start):
    return x.new_empty(x.shape)


def rope(x: Tensor, positions: Tensor, table: Tensor, *, interleaved: bool, start: int = 0) -> Tensor:
    """A copy of `x` with dimensions start .. start+R-1 of every head rotated by their token's position; fp32 inside.

    x: [T, heads, D] fp16, bf16 or fp32, any strides; positions: int64 [T], negative ones (padding) count as 0; table: fp32 [L,
    R], cosines of the R/2 frequencies, then sines. interleaved: pairs are dimensions (0, 1), (2, 3) ..; otherwise (j, j +
    R/2). The result has the layout of the input (no reordering). Positions >= L give NaN on a GPU and an IndexError on the
    CPU. Raises ValueError for other shapes, dtypes or devices.
    """
    check_float("rope", x=x)
    check_table("rope", table, x.device)
    if x.dim() != 3 or start < 0 or start + table.shape[1] > x.shape[2]:
        raise ValueError(
            f"rope: x {list(x.shape)}, start={start}, table {list(table.shape)}: required [T, heads, D >= start + R]"
        )
    check_index("rope", "positions", positions, torch.int64, (x.shape[0],), x.device)
    return call(_rope_op, _rope_body, x, positions, table, interleaved, start)
