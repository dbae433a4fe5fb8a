"""A product per head, x[:, h] @ w[h]: MLA's absorb (W_UK) and unfold (W_UV)."""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import reference
from ._args import block, check_float, unit_rows
from ._dispatch import call, device_guard, overlap, use_triton
from ._triton import start_next, tl, triton, wait_previous

DECODE_ROWS = 64  # up to here the tiles of decoding (weights read once), above it those of prefill


class HeadTile(NamedTuple):
    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


def head_tile(tokens: int, dtype: torch.dtype) -> HeadTile:
    """The tile for a token count; `inner` is the same within a regime, so that a row does not depend on the others."""
    if dtype == torch.float32:
        return HeadTile(16, 32, 32, 4, 1)
    if tokens <= DECODE_ROWS:
        return HeadTile(16 if tokens <= 16 else 32, 64, 128, 4, 3)
    return HeadTile(128, 64, 64, 4, 3)


@triton.jit(do_not_specialize=["tokens"])
def _head_matmul_kernel(
    x, w, out, tokens, x_token, x_head, w_head, w_row, w_column,
    H: tl.constexpr, A: tl.constexpr, B: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
    WIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_previous(OVERLAP)
    start_next(OVERLAP)
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B)
    a = tl.arange(0, BLOCK_A)
    rows = x + token.to(tl.int64)[:, None] * x_token + head * x_head
    weights = w + head * w_head + column[None, :] * w_column
    acc = tl.zeros((BLOCK_T, BLOCK_B), tl.float32)
    for start in range(0, A, BLOCK_A):
        k = start + a
        xs = tl.load(rows + k[None, :], mask=(token < tokens)[:, None] & (k < A)[None, :], other=0.0)
        ws = tl.load(weights + k[:, None] * w_row, mask=(k < A)[:, None] & (column < B)[None, :], other=0.0)
        if WIDE:
            xs = xs.to(tl.float32)
            ws = ws.to(tl.float32)
        acc = tl.dot(xs, ws, acc, input_precision="ieee")
    target = out + (token.to(tl.int64)[:, None] * H + head) * B + column[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & (column < B)[None, :])


def _launch_head_matmul(x: Tensor, w: Tensor, tile: HeadTile | None = None) -> Tensor:
    tokens, heads, inner = x.shape
    columns = w.shape[2]
    out = torch.empty(tokens, heads, columns, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    x = unit_rows(x)
    wide = x.dtype != w.dtype or x.dtype == torch.float32
    tile = tile or head_tile(tokens, torch.float32 if wide else x.dtype)
    block_b = min(tile.columns, block(columns))
    with device_guard(x):
        _head_matmul_kernel[(triton.cdiv(tokens, tile.rows), heads, triton.cdiv(columns, block_b))](
            x, w, out, tokens, x.stride(0), x.stride(1), w.stride(0), w.stride(1), w.stride(2),
            H=heads, A=inner, B=columns, BLOCK_T=tile.rows, BLOCK_A=min(tile.inner, block(inner)), BLOCK_B=block_b, WIDE=wide,
            num_warps=tile.warps, num_stages=tile.stages, **overlap(x.device, tokens),
        )  # fmt: skip
    return out


def _head_matmul_body(x: Tensor, w: Tensor) -> Tensor:
    if use_triton(x):
        return _launch_head_matmul(x, w)
    return reference.head_matmul(x, w).to(x.dtype).contiguous()


_head_matmul_op = torch.library.custom_op("exl3_triton::head_matmul", _head_matmul_body, mutates_args=())


@_head_matmul_op.register_fake
def _(x, w):
    return x.new_empty((x.shape[0], x.shape[1], w.shape[2]))


def head_matmul(x: Tensor, w: Tensor) -> Tensor:
    """out[t, h] = x[t, h] @ w[h], accumulated in fp32 and rounded once to the dtype of x.

    x: [T, H, A], w: [H, A, B], fp16, bf16 or fp32, any strides (w may be a transposed view). Equal 16-bit dtypes take the
    tensor cores; fp32 or mixed ones are multiplied in full fp32. Returns [T, H, B], contiguous. The order of summation is the
    same for every T up to 64, and for every T above. Raises ValueError for other shapes, dtypes or devices.
    """
    check_float("head_matmul", x=x, w=w)
    if x.dim() != 3 or w.dim() != 3 or x.shape[1] != w.shape[0] or x.shape[2] != w.shape[1]:
        raise ValueError(f"head_matmul: x {list(x.shape)}, w {list(w.shape)}: required [T, H, A] and [H, A, B]")
    return call(_head_matmul_op, _head_matmul_body, x, w)
