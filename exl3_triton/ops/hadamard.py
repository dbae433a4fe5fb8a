"""128-wide Hadamard rotations: of activations on the way in (a kernel), of accumulators on the way out (device functions).

P = H128 / sqrt(128) in natural (Sylvester) order, block-diagonal over 128 channels, in fp32. A butterfly stage needs each
element's partner at distance 2^b. It comes from an integer sum over the pair minus the element's own bits (exact, modulo
2^32): a reduction leaves the tensor in its layout, so a stage is register moves, warp shuffles or, between warps, one small
exchange, and never a conversion of the tensor.
"""

import torch
from torch import Tensor

from ._dispatch import overlap
from ._triton import start_next, tl, triton, wait_previous
from .layout import k_position, layout_variant

NORM = tl.constexpr(0.08838834764831845)  # 1 / sqrt(128)
_FEW_ROWS = 255  # up to here several programs share a row, each scanning all of it for the scale


@triton.jit
def _stage(x, axis: tl.constexpr, sign):
    """One butterfly over an axis of length 2: (a, b) -> (a + b, a - b); `sign` is (1, -1) along that axis."""
    own = x.to(tl.int32, bitcast=True)
    partner = (tl.sum(own, axis=axis, keep_dims=True) - own).to(tl.float32, bitcast=True)
    return partner + sign * x


@triton.jit
def rotate_rows(x, ROWS: tl.constexpr, BITS: tl.constexpr = 7):
    """x fp32 [ROWS, 2^BITS] -> x P, each row rotated; P of that size."""
    sign = (1 - 2 * tl.arange(0, 2)).to(tl.float32)[None, None, :, None]
    for b in tl.static_range(BITS):
        x = tl.reshape(_stage(tl.reshape(x, (ROWS, (1 << BITS) // (2 << b), 2, 1 << b)), 2, sign), (ROWS, 1 << BITS))
    return x * 0.5 ** (BITS / 2)


@triton.jit
def rotate_columns(x, COLUMNS: tl.constexpr):
    """x fp32 [128, COLUMNS] -> P x, each column rotated."""
    sign = (1 - 2 * tl.arange(0, 2)).to(tl.float32)[None, :, None, None]
    for b in tl.static_range(7):
        x = tl.reshape(_stage(tl.reshape(x, (64 // (1 << b), 2, 1 << b, COLUMNS)), 1, sign), (128, COLUMNS))
    return x * NORM


def rotation_bits(width: int) -> int:
    """log2 of the block in which index keys of `width` are rotated (`kv_format`): the largest that divides it, at most 128."""
    return min(7, (width & -width).bit_length() - 1)


@triton.jit
def exponent_of(x):
    """int32: floor(log2 |x|) of fp32 values; -127 for zero and subnormals, 128 for infinity and NaN."""
    return ((x.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127


@triton.jit
def power_of_two(e):
    """fp32 2^e for int32 e in -126..127."""
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_by_power(x, e):
    """x * 2^e for int32 e in -252..254, in two steps of the same sign: exact, as long as the result is a normal fp32
    number.
    """
    half = e >> 1
    return x * power_of_two(half) * power_of_two(e - half)


@triton.jit
def row_shift(bound):
    """The power s to scale a row of activations by, so that fp16 holds its rotation: int32 from the row's maximum of
    exponent_of(x) + exponent_of(suh).

    Each |x * suh| < 2^(bound + 2), so a rotated value is at most sqrt(128) 2^(bound + 2); s brings that to 46341 < 65504.
    What the clamp leaves out are rows of zeros and of products below 2^-190, which no fp32 times fp16 gives.
    """
    return tl.minimum(10 - bound, 200)


@triton.jit
def rotate_scaled(x, suh, shift, ROWS: tl.constexpr):
    """fp16 [ROWS, 128]: rotate(x * suh) * 2^shift; x, suh fp32 [ROWS, 128], shift int32 scalar or [ROWS, 1] (`row_shift`)."""
    return _rotate_scaled(x, suh, shift, ROWS).to(tl.float16)


@triton.jit
def _rotate_scaled(x, suh, shift, ROWS: tl.constexpr):
    """`rotate_scaled` before its rounding to fp16.

    suh takes half of the shift first: no intermediate value overflows, and the only rounding before the rotation is that of
    x * suh.
    """
    half = shift >> 1
    return rotate_rows((suh * power_of_two(half)) * x * power_of_two(shift - half), ROWS)


@triton.jit
def _store_rotated(xh, rotated, mask, low, LOW: tl.constexpr):
    """Rotated activations as fp16, and with LOW what that rounding left, also as fp16, `low` elements further on."""
    high = rotated.to(tl.float16)
    tl.store(xh, high, mask=mask)
    if LOW:
        tl.store(xh + low, (rotated - high.to(tl.float32)).to(tl.float16), mask=mask)


@triton.jit
def _pick_scales(suh, matrix):
    scales = suh[0]
    for i in tl.static_range(1, len(suh)):
        if matrix == i:
            scales = suh[i]
    return scales


@triton.jit
def _shift_of_row(x_row, scales, D: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr):
    """`row_shift` of one row of activations, all of it."""
    at = tl.arange(0, GROUPS * 128)
    bound = tl.full((GROUPS * 128,), -254, tl.int32)
    for i in tl.static_range((K + GROUPS * 128 - 1) // (GROUPS * 128)):  # unrolled: all loads in flight at once
        k = i * (GROUPS * 128) + at
        value = tl.load(x_row + k, mask=k < D, other=0.0).to(tl.float32)
        scale = tl.load(scales + k, mask=k < D, other=0.0).to(tl.float32)
        bound = tl.maximum(bound, exponent_of(value) + exponent_of(scale))
    return row_shift(tl.max(bound))


@triton.jit
def _rotate_blocks(
    x_row, scales, xh_row, shift, first, low,
    D: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, VARIANT: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """GROUPS rotation blocks of a row, from column `first` on."""
    k = first + tl.arange(0, GROUPS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    value = tl.load(x_row + k, mask=k < D, other=0.0).to(tl.float32)
    scale = tl.load(scales + k, mask=k < D, other=0.0).to(tl.float32)
    rotated = _rotate_scaled(value, scale, shift, GROUPS)
    _store_rotated(xh_row + k_position(k, VARIANT), rotated, k < K, low, LOW)


@triton.jit(do_not_specialize=["stride"])
def _rotate_input_kernel(
    x,
    suh,
    xh,
    exponents,
    stride,
    D: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    ALIGN: tl.constexpr,
    VARIANT: tl.constexpr,
    LOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Few rows. Program (row, chunk of GROUPS rotation blocks, matrix); each scans its whole row for the scale."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    matrix = tl.program_id(2)
    scales = _pick_scales(suh, matrix)
    wait_previous(OVERLAP)
    start_next(OVERLAP)
    x_row = x + row * tl.multiple_of(stride, ALIGN)
    shift = _shift_of_row(x_row, scales, D, K, GROUPS)
    xh_row = xh + (matrix * tl.num_programs(0) + row) * K
    low = (tl.num_programs(2) * tl.num_programs(0)).to(tl.int64) * K
    _rotate_blocks(x_row, scales, xh_row, shift, chunk * (GROUPS * 128), low, D, K, GROUPS, VARIANT, LOW)
    if chunk == 0:
        tl.store(exponents + matrix * tl.num_programs(0) + row, -shift)


@triton.jit
def rotate_row(
    x,
    scales,
    xh,
    exponents,
    row,
    stride,
    low,
    D: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    ALIGN: tl.constexpr,
    VARIANT: tl.constexpr,
    LOW: tl.constexpr,
):
    """Row `row` of x, scaled, rotated, rounded: to xh [m, K] (with LOW the low parts `low` elements further on) and
    exponents [m]. A warp takes whole blocks of 128, so no butterfly leaves it; the second reading of the row is cached.
    """
    x_row = x + row.to(tl.int64) * tl.multiple_of(stride, ALIGN)
    xh_row = xh + row.to(tl.int64) * K
    shift = _shift_of_row(x_row, scales, D, K, GROUPS)
    for first in range(0, K, GROUPS * 128):
        _rotate_blocks(x_row, scales, xh_row, shift, first, low, D, K, GROUPS, VARIANT, LOW)
    tl.store(exponents + row, -shift)


@triton.jit(do_not_specialize=["stride"])
def _rotate_rows_kernel(
    x,
    suh,
    xh,
    exponents,
    stride,
    D: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    ALIGN: tl.constexpr,
    VARIANT: tl.constexpr,
    LOW: tl.constexpr,
):
    """Many rows. Program (row, matrix), one warp."""
    m, matrix = tl.num_programs(0).to(tl.int64), tl.program_id(1)
    scales = _pick_scales(suh, matrix)
    low = tl.num_programs(1) * m * K
    xh += matrix * m * K
    exponents += matrix * m
    rotate_row(x, scales, xh, exponents, tl.program_id(0), stride, low, D, K, GROUPS, ALIGN, VARIANT, LOW)


def launch_rotate_input(
    x: Tensor, suh: list[Tensor], padded: int, variant: int | None = None, *, low: bool = False
) -> tuple[Tensor, Tensor]:
    """Activations as the matrix kernels take them: rotated with each matrix's `suh`, scaled by a power of two a row, in fp16.

    x: [m, D] fp16, bf16 or fp32 with a contiguous last dimension, D <= padded (zero-extended); m >= 1; suh: fp16 [padded]
    each. Returns xh fp16 [len(suh), m, padded], k in the order of the decode layout `variant` (default: the device's), and
    exponents int32 [len(suh), m]: a product with xh is to be multiplied by 2^exponent (`scale_by_power`). With `low` xh is
    [2, len(suh), m, padded], the fp16 values and, as fp16, what they differ by from the rotation in fp32: together 22 bits of
    each value and 2^-30 of the row's largest, since the row's scale keeps small values clear of subnormals.
    """
    m, width = x.shape
    shape = (len(suh), m, padded)
    xh = torch.empty((2, *shape) if low else shape, dtype=torch.float16, device=x.device)
    exponents = torch.empty((len(suh), m), dtype=torch.int32, device=x.device)
    stride = x.stride(0) if m > 1 else width
    sizes = {"D": width, "K": padded, "ALIGN": 8 if stride % 8 == 0 else 1}
    variant = layout_variant(x.device) if variant is None else variant
    count = len(suh)
    if m <= _FEW_ROWS:
        groups = min(4, triton.next_power_of_2(padded // 128))
        grid = (m, triton.cdiv(padded, groups * 128), count)
        _rotate_input_kernel[grid](
            x,
            tuple(suh),
            xh,
            exponents,
            stride,
            GROUPS=groups,
            VARIANT=variant,
            LOW=low,
            num_warps=4,
            **overlap(x.device, m),
            **sizes,
        )
        return xh, exponents
    groups = min(8, triton.next_power_of_2(padded // 128))
    _rotate_rows_kernel[(m, count)](
        x, tuple(suh), xh, exponents, stride, GROUPS=groups, VARIANT=variant, LOW=low, num_warps=1, **sizes
    )
    return xh, exponents
