"""A matrix product for many rows: the weights decoded once into fp16 scratch, then `torch.mm`.

Two forms (`tuning.folds` chooses):

    rotated  x is rotated to fp16, the scratch holds the stored values, exact, and the product is rotated back: kernels that
             read and write m rows twice.
    folded   the scratch holds the matrix in the original basis, diag(suh) P W_rotated P diag(svh), rounded to fp16. Nothing of
             x is rotated; an fp16 product of fp16 x is one call of cuBLAS that writes y. Only where `TrellisWeight.foldable`.

Folding costs two small matrix products a tile: decoded weights are the first operand of the one that rotates k; its result,
rounded to fp16, is the second operand of the one that rotates n.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ._dispatch import register_limit
from ._triton import tl, triton
from .hadamard import exponent_of, rotate_row, rotate_rows, scale_by_power
from .layout import k_order, layout_variant
from .trellis import decode_tiles, tile_address, trellis_words
from .tuning import device_of

SCRATCH_ELEMENTS = 1 << 27  # fp16 weights in scratch at a time: 256 MiB
_FINISH_ROWS = 4  # 4096 rows of 6144 x 12288 as a whole: 1044 us with 4 and one warp, 1122 with 8, on an H200
_FOLD_WARPS = 4
# sm_90: three programs a multiprocessor; a form of this kernel took 99 us for 6144 x 12288 at 3 bits on an H200, 119 without
_FOLD_REGISTERS = 168
_WIDE = 1024  # columns that a program of `_scale_rows_kernel` and `_finish_folded_kernel` takes


@triton.jit
def finish_rows(acc, exponents, svh, bias, y, rows, live, column, OUT: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr):
    """Raw products fp32 [ROWS, 128] -> y[rows, column]; rows and live [ROWS, 1], column [1, 128]."""
    result = rotate_rows(acc, ROWS) * tl.load(svh + column).to(tl.float32)
    result = scale_by_power(result, tl.load(exponents + rows, mask=live, other=0))
    if BIAS:
        result += tl.load(bias + column).to(tl.float32)
    tl.store(y + rows.to(tl.int64) * OUT + column, result.to(y.dtype.element_ty), mask=live & (column < OUT))


@triton.jit(do_not_specialize=["stride", "rows", "m"])
def _rotate_and_decode_kernel(
    x,
    suh,
    xh,
    exponents,
    stride,
    rows,
    m,
    words,
    out,
    first,
    N: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    ALIGN: tl.constexpr,
    LOW: tl.constexpr,
    TWICE_BITS: tl.constexpr,
    CODEBOOK: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """The first `rows` programs rotate a row of x each; the others decode W^T [n, k] as stored, k in the order of `k_order`:
    128 inputs of 128 output features, of BLOCKS times as many from feature 128 `first` on.

    Neither needs the other, and the rotation, short of memory accesses in flight, hides under the decoding.
    """
    program = tl.program_id(0)
    if program < rows:
        rotate_row(x, suh, xh, exponents, program, stride, tl.cast(m, tl.int64) * K, D, K, GROUPS, ALIGN, VARIANT, LOW)
    else:
        block = (program - rows) % BLOCKS
        kb = (program - rows) // BLOCKS
        tile = tile_address(words, kb * 8, (first + block) * 8, N // 16, TWICE_BITS)
        w = decode_tiles(tile, N // 4 * TWICE_BITS, TWICE_BITS, CODEBOOK, 8, 8, VARIANT)
        n = block * 128 + tl.arange(0, 128)
        tl.store(out + n.to(tl.int64)[:, None] * K + (kb * 128 + tl.arange(0, 128))[None, :], w)


@triton.jit
def _signs_kernel(signs):
    """H64 [64, 64], 1 or -1, as fp16: the parity of the bits that both indices have."""
    i = tl.arange(0, 64)
    common = i[:, None] & i[None, :]
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    tl.store(signs + i[:, None] * 64 + i[None, :], (1 - 2 * (common & 1)).to(tl.float16))


@triton.jit
def _rotated_quarter(tile, h, h_k, N: tl.constexpr, TWICE_BITS: tl.constexpr, CODEBOOK: tl.constexpr, VARIANT: tl.constexpr):
    """H64 W^T H64 of 4 x 4 tiles, fp32; h_k has its rows in the order of the decoded k."""
    w = decode_tiles(tile, N // 4 * TWICE_BITS, TWICE_BITS, CODEBOOK, 4, 4, VARIANT)
    return tl.dot(h, tl.dot(w, h_k).to(tl.float16))


@triton.jit
def _store_quarter(out, value, svh, suh, K: tl.constexpr):
    i = tl.arange(0, 64)
    value *= tl.load(svh + i).to(tl.float32)[:, None]  # one after the other: an outer product would take 32 registers
    value *= tl.load(suh + i).to(tl.float32)[None, :] * 0.0078125
    tl.store(out + i[:, None] * K + i[None, :], value.to(tl.float16))


@triton.jit
def _fold_kernel(
    words,
    suh,
    svh,
    signs,
    out,
    first,
    N: tl.constexpr,
    K: tl.constexpr,
    TWICE_BITS: tl.constexpr,
    CODEBOOK: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """Program (128 output features from feature 128 `first` on, 128 inputs): W^T [n, k] in the original basis.

    W^T = diag(svh) H (W_rotated^T H) diag(suh) / 128 with H = H128 of 1 and -1, which is [[h, h], [h, -h]] for h = H64:
    quarters of the block go through matrix instructions with h, their sums and differences are those of H. Sums are fp32; the
    inner product, below 2^9 for weights below 8, is rounded to fp16, and so is the result.
    """
    block = tl.program_id(0)
    kb = tl.program_id(1)
    i = tl.arange(0, 64)
    h = tl.load(signs + i[:, None] * 64 + i[None, :])
    if VARIANT & 2:
        h_k = tl.load(signs + k_order(64, VARIANT)[:, None] * 64 + i[None, :])
    else:
        h_k = h
    tile = tile_address(words, kb * 8, (first + block) * 8, N // 16, TWICE_BITS)
    to_n: tl.constexpr = 4 * (4 * TWICE_BITS)  # words to the quarter of the next 64 outputs, of the next 64 inputs
    to_k: tl.constexpr = 4 * (N // 4 * TWICE_BITS)
    r0 = _rotated_quarter(tile, h, h_k, N, TWICE_BITS, CODEBOOK, VARIANT)
    r1 = _rotated_quarter(tile + to_k, h, h_k, N, TWICE_BITS, CODEBOOK, VARIANT)
    sum0 = r0 + r1
    difference0 = r0 - r1
    r0 = _rotated_quarter(tile + to_n, h, h_k, N, TWICE_BITS, CODEBOOK, VARIANT)
    r1 = _rotated_quarter(tile + (to_n + to_k), h, h_k, N, TWICE_BITS, CODEBOOK, VARIANT)
    sum1 = r0 + r1
    difference1 = r0 - r1
    suh += kb * 128
    svh += (first + block) * 128
    out += block.to(tl.int64) * 128 * K + kb * 128
    _store_quarter(out, sum0 + sum1, svh, suh, K)
    _store_quarter(out + 64, difference0 + difference1, svh, suh + 64, K)
    _store_quarter(out + 64 * K, sum0 - sum1, svh + 64, suh, K)
    _store_quarter(out + (64 * K + 64), difference0 - difference1, svh + 64, suh + 64, K)


@triton.jit(do_not_specialize=["m", "first", "width"])
def _finish_kernel(raw, exponents, svh, bias, y, m, first, width, OUT: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr):
    """Program (128 output features from feature 128 `first` on, ROWS rows) of raw products [m, width]."""
    n = tl.program_id(0) * 128 + tl.arange(0, 128)[None, :]
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    live = rows < m
    acc = tl.load(raw + rows.to(tl.int64) * width + n, mask=live, other=0.0)
    finish_rows(acc, exponents, svh, bias, y, rows, live, first * 128 + n, OUT, BIAS, ROWS)


@triton.jit(do_not_specialize=["stride"])
def _scale_rows_kernel(x, scaled, exponents, stride, D: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row): fp16 x * 2^s, the largest value between 2^14 and 2^15, and -s; what is below 2^-113 keeps s = 127.

    Products with weights below 2^15 then stay far inside fp32.
    """
    row = tl.program_id(0).to(tl.int64)
    x_row = x + row * tl.multiple_of(stride, ALIGN)
    k = tl.arange(0, BLOCK)
    bound = tl.full((BLOCK,), -127, tl.int32)
    for i in tl.static_range((D + BLOCK - 1) // BLOCK):  # unrolled: all loads in flight at once
        value = tl.load(x_row + i * BLOCK + k, mask=i * BLOCK + k < D, other=0.0).to(tl.float32)
        bound = tl.maximum(bound, exponent_of(value))
    shift = tl.minimum(14 - tl.max(bound), 127)
    for i in range(0, D, BLOCK):
        value = tl.load(x_row + i + k, mask=i + k < D, other=0.0).to(tl.float32)
        tl.store(scaled + row * D + i + k, scale_by_power(value, shift).to(tl.float16), mask=i + k < D)
    tl.store(exponents + row, -shift)


@triton.jit(do_not_specialize=["first", "width"])
def _finish_folded_kernel(
    raw,
    exponents,
    bias,
    y,
    first,
    width,
    OUT: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, BLOCK output features from feature `first` on) of products [m, width] in the original basis."""
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    live = (at < width) & (first + at < OUT)
    result = tl.load(raw + row * width + at, mask=live, other=0.0)
    if SCALED:
        result = scale_by_power(result, tl.load(exponents + row))
    if BIAS:
        result += tl.load(bias + first + at, mask=live, other=0.0).to(tl.float32)
    tl.store(y + row * OUT + first + at, result.to(y.dtype.element_ty), mask=live)


def _wide_product(x: Tensor, w: Tensor) -> Tensor:
    """x w in fp32 from fp16 operands."""
    if x.is_cuda:
        return torch.mm(x, w, out_dtype=torch.float32)
    return x.float() @ w.float()  # the interpreter's host has no fp16 product with fp32 results


@contextmanager
def _fp32_sums() -> Iterator[None]:
    """cuBLAS adds the parts of a split product in fp32, whatever the process has allowed (a setting of the whole process)."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_fp16_reduced_precision_reduction
    settings.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        settings.allow_fp16_reduced_precision_reduction = before


def _slices(k: int, columns: int) -> Iterator[tuple[int, int]]:
    """First output feature and number of them, whose fp16 weights fit the scratch (or 128 of them)."""
    width = min(columns, max(128, SCRATCH_ELEMENTS // k // 128 * 128))
    for start in range(0, columns, width):
        yield start, min(width, columns - start)


def _scratch(k: int, columns: int, device: torch.device) -> Tensor:
    return torch.empty((next(_slices(k, columns))[1], k), dtype=torch.float16, device=device)


def launch_rotated(
    x: Tensor,
    trellis: Tensor,
    suh: Tensor,
    svh: Tensor,
    bias: Tensor | None,
    codebook: int,
    y: Tensor,
    *,
    low: bool = False,
) -> None:
    """x rotated and W_rotated into scratch, `torch.mm` into fp32, then the output's rotation, scales, bias and cast.

    x [m, in_features], contiguous along its last dimension, y [m, out_features]; low: activations as two fp16 values each.
    Scratch: fp16 [m, K] of activations (twice with `low`), at most SCRATCH_ELEMENTS fp16 weights (or 128 columns of them) and
    fp32 [m, as many columns] (twice with `low`), for one slice of the columns at a time.
    """
    m, width = x.shape
    k, columns = trellis.shape[0] * 16, trellis.shape[1] * 16
    weights = _scratch(k, columns, x.device)
    xh = torch.empty((2 if low else 1, m, k), dtype=torch.float16, device=x.device)
    exponents = torch.empty(m, dtype=torch.int32, device=x.device)
    stride = x.stride(0) if m > 1 else width
    for start, size in _slices(k, columns):
        rows = m if start == 0 else 0
        _rotate_and_decode_kernel[(rows + size // 128 * (k // 128),)](
            x,
            suh,
            xh,
            exponents,
            stride,
            rows,
            m,
            trellis_words(trellis),
            weights,
            start // 128,
            N=columns,
            D=width,
            K=k,
            BLOCKS=size // 128,
            GROUPS=min(8, triton.next_power_of_2(k // 128)),
            ALIGN=8 if stride % 8 == 0 else 1,
            LOW=low,
            TWICE_BITS=trellis.shape[2] // 8,
            CODEBOOK=codebook,
            VARIANT=layout_variant(x.device),
            num_warps=4,
        )
        raw, *rest = (_wide_product(part, weights[:size].t()) for part in xh)
        if low:
            raw += rest[0]
        _finish_kernel[(size // 128, triton.cdiv(m, _FINISH_ROWS))](
            raw,
            exponents,
            svh,
            svh if bias is None else bias,
            y,
            m,
            start // 128,
            size,
            OUT=y.shape[-1],
            BIAS=bias is not None,
            ROWS=_FINISH_ROWS,
            num_warps=1,
        )


def scale_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [m, D] with a contiguous last dimension -> fp16 x * 2^s [m, D] and -s, int32 [m], one power of two a row."""
    m, width = x.shape
    scaled = torch.empty((m, width), dtype=torch.float16, device=x.device)
    exponents = torch.empty(m, dtype=torch.int32, device=x.device)
    stride = x.stride(0) if m > 1 else width
    _scale_rows_kernel[(m,)](
        x, scaled, exponents, stride, D=width, ALIGN=8 if stride % 8 == 0 else 1, BLOCK=_WIDE, num_warps=4
    )
    return scaled, exponents


def launch_folded(
    x: Tensor,
    exponents: Tensor | None,
    trellis: Tensor,
    suh: Tensor,
    svh: Tensor,
    bias: Tensor | None,
    codebook: int,
    y: Tensor,
) -> None:
    """W in the original basis into scratch, then `torch.mm`: straight into y where x came as fp16 and y is fp16, or fp32 and
    no bias is to be added.

    x fp16 [m, in_features], with `exponents` int32 [m] of `scale_rows` where it is scaled, y [m, out_features]. Scratch as for
    `launch_rotated`, without the fp32 product where `torch.mm` writes y.
    """
    m, width = x.shape
    k, columns, features = trellis.shape[0] * 16, trellis.shape[1] * 16, y.shape[-1]
    weights = _scratch(k, columns, x.device)
    signs = torch.empty((64, 64), dtype=torch.float16, device=x.device)
    _signs_kernel[(1,)](signs, num_warps=4)
    for start, size in _slices(k, columns):
        _fold_kernel[(size // 128, k // 128)](
            trellis_words(trellis),
            suh,
            svh,
            signs,
            weights,
            start // 128,
            N=columns,
            K=k,
            TWICE_BITS=trellis.shape[2] // 8,
            CODEBOOK=codebook,
            VARIANT=layout_variant(x.device),
            num_warps=_FOLD_WARPS,
            **register_limit(_FOLD_REGISTERS if device_of(x.device).family == "sm_90" else None),
        )
        live = min(size, features - start)  # the last slice may hold padding, at most 127 columns of it
        w, end = weights[:live, :width].t(), y[:, start : start + live]
        if exponents is None and x.is_cuda:  # the product is y already
            if y.dtype == torch.float32 and bias is None and end.is_contiguous():
                torch.mm(x, w, out_dtype=torch.float32, out=end)
                continue
            if y.dtype == torch.float16:
                with _fp32_sums():
                    if bias is None:
                        torch.mm(x, w, out=end)
                    else:
                        torch.addmm(bias[start : start + live], x, w, out=end)
                continue
        raw = _wide_product(x, w)
        _finish_folded_kernel[(m, triton.cdiv(live, _WIDE))](
            raw,
            raw if exponents is None else exponents,
            raw if bias is None else bias,
            y,
            start,
            live,
            OUT=features,
            SCALED=exponents is not None,
            BIAS=bias is not None,
            BLOCK=_WIDE,
            num_warps=4,
        )
