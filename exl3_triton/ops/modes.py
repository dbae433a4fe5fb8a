"""What the modes of `linear` other than "exact" need: their names and rules, and activations rounded to int8.

precise  exact weights, activations as two fp16 values each (`launch_rotate_input(low=True)`), two products a weight
split    3INST, MCG: a weight is the fp16 sum of two fp16 values; both enter the product, and the sum is not rounded
int8     MUL1: a weight is, before its rounding to fp16, an affine function of a sum of four bytes; bytes times activations
         rounded to int8, one scale a row, summed in int32
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..format import Codebook, TrellisWeight
from ._triton import tl, triton

MODES = ("exact", "precise", "split", "int8")
PARTS = {"exact": 1, "precise": 1, "split": 2, "int8": 4}
"""Values along k that stand for one weight: PARTS of `decode_words`."""

INT8_MAX_IN = 32768
"""Most input features of mode "int8": int32 holds the sum of 33025 weights, 127 * 4 * 128 each at most, and a row's block is a
power of two."""

# W = SLOPE * (sum of four (byte - 128)) + CENTER, from 0x1EEE * (1024 + sum of bytes) + 0xC931 in fp16; both are exact in fp32
SLOPE = tl.constexpr(0.00676727294921875)
CENTER = tl.constexpr(0.01171875)


def check_mode(op: str, mode: str, weights: Sequence[TrellisWeight]) -> None:
    """Raises ValueError for an unknown mode, and for a matrix whose codebook or size the mode does not know."""
    if mode not in MODES:
        raise ValueError(f"{op}: mode={mode!r}: required one of {', '.join(MODES)}")
    for i, w in enumerate(weights):
        what = f"{op}: mode={mode!r}: {f'matrix {i} has' if len(weights) > 1 else 'found'}"
        if mode == "split" and w.codebook is Codebook.MUL1:
            raise ValueError(f"{what} codebook mul1: required 3inst or mcg, whose weights are sums of two fp16 values")
        if mode == "int8" and w.codebook is not Codebook.MUL1:
            raise ValueError(f"{what} codebook {w.codebook.label}: required mul1, whose weights are sums of four bytes")
        if mode == "int8" and w.padded_in > INT8_MAX_IN:
            raise ValueError(
                f"{what} {w.padded_in} input features: required at most {INT8_MAX_IN}, int32 holds no more products"
            )


@triton.jit
def _quantize_rows_kernel(xh, xq, affine, K: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row of one matrix): int8 steps of a 127th of the row's largest magnitude, to the nearest."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    x = tl.load(xh + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    step = tl.div_rn(tl.maximum(tl.max(tl.abs(x)), 1e-30), 127.0)
    steps = tl.floor(tl.div_rn(x, step) + 0.5)
    tl.store(xq + row * K + k, steps.to(tl.int8), mask=k < K)
    tl.store(affine + row, step * SLOPE)
    tl.store(affine + tl.num_programs(0) + row, step * CENTER * tl.sum(steps))  # NaN where the row holds one


def launch_quantize_rows(xh: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated activations xh fp16 [count, m, K] as int8 steps [count, m, K] and `affine` fp32 [2, count, m].

    A product I of the steps with the bytes less 128 stands for affine[0] * I + affine[1].
    """
    count, m, k = xh.shape
    xq = torch.empty((count, m, k), dtype=torch.int8, device=xh.device)
    affine = torch.empty((2, count, m), dtype=torch.float32, device=xh.device)
    _quantize_rows_kernel[(count * m,)](xh, xq, affine, K=k, BLOCK=triton.next_power_of_2(k), num_warps=8)
    return xq, affine


@triton.jit
def raw_product(acc, affine, row, live, rows_in_all):
    """Accumulators of any mode as fp32; `row`, broadcast to `acc`, counts the rows of all matrices, `rows_in_all`."""
    if acc.dtype == tl.int32:
        slope = tl.load(affine + row, mask=live, other=0.0)
        acc = acc.to(tl.float32) * slope + tl.load(affine + rows_in_all + row, mask=live, other=0.0)
    return acc
