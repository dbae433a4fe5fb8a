"""y = rotate(rotate(x * suh) W_rotated) * svh + bias over EXL3 matrices, decoding the weights inside the product.

Three launches at most: the rotation of the activations (`hadamard.launch_rotate_input`), the product, and, where the
product is split over k, a reduction. The last one writes y: output rotation, svh, the row's power of two, bias and the cast
in one place.

The product has weights as its first operand and tokens as its second, so the decoded tile never leaves registers and a few
tokens cost a small instruction. A program owns 128 output features (a rotation block) of BLOCK_M tokens. Matrices of one
call share the launch; those equal in format and size ("a class") share code, the others get a branch of their own with
every size a constant.

Rows up to DECODE_ROWS are one regime: the split over k depends on the matrices and the device, not on the number of rows,
so a row gives the same bits in any batch of that regime. Above, k is not split.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .. import reference
from ..format import Codebook, TrellisWeight
from ._args import FLOATS, as_rows
from ._dispatch import call, device_guard, use_triton
from ._triton import tl, triton
from .hadamard import launch_rotate_input, rotate_columns, scale_by_power
from .layout import layout_variant
from .trellis import decode_tiles, trellis_words

DECODE_ROWS = 64
_BLOCK_K = 128
_MIN_STEPS = 4  # k blocks that a program should have at least: fewer, and writing and reducing its partial sums outweighs them
_HOST_PROCESSORS = 4  # what the interpreter splits for


@dataclass(frozen=True)
class LinearConfig:
    """Launch parameters: tokens and k of a block, parts of k, warps, software pipeline stages."""

    block_m: int
    block_k: int
    split: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class _Class:
    """Matrices of a launch that share code: equal in rate, codebook and sizes, neighbours in the launch's order."""

    twice_bits: int
    codebook: int
    padded_out: int
    out_features: int
    has_bias: bool
    first: int  # index of the first matrix
    count: int
    block: int  # the launch's first block of 128 output features that belongs to the class

    @property
    def constants(self) -> tuple[int, ...]:
        return (
            self.twice_bits,
            self.codebook,
            self.padded_out,
            self.out_features,
            int(self.has_bias),
            self.first,
            self.count,
            self.block,
        )


@triton.jit
def _write_output(
    acc, exponents, svh, bias, y, matrix, rows, m, column, OUT: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Raw products fp32 [128, BLOCK_M] of one matrix -> y[rows, column..column+127]."""
    n = column + tl.arange(0, 128)
    live = rows < m
    result = rotate_columns(acc, BLOCK_M) * tl.load(svh + n).to(tl.float32)[:, None]
    exponent = tl.load(exponents + matrix * m + rows, mask=live, other=0)
    result = scale_by_power(result, exponent[None, :])
    if BIAS:
        result += tl.load(bias + n).to(tl.float32)[:, None]
    at = rows.to(tl.int64)[None, :] * OUT + n[:, None]
    tl.store(y + at, result.to(y.dtype.element_ty), mask=live[None, :] & (n < OUT)[:, None])


@triton.jit
def _pick(pointers, index, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """pointers[FIRST + index] for an index known at run time only."""
    chosen = pointers[FIRST]
    for i in tl.static_range(1, COUNT):
        if index == i:
            chosen = pointers[FIRST + i]
    return chosen


@triton.jit(do_not_specialize=["m"])
def _product_kernel(
    xh,
    exponents,
    words,
    svh,
    bias,
    y,
    partial,
    m,
    K: tl.constexpr,
    CLASSES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """Program (output block, part of k, token block). With SPLIT > 1 raw sums go to partial [token block, part, BLOCKS *
    128, BLOCK_M].
    """
    block = tl.program_id(0)
    part = tl.program_id(1)
    m0 = tl.program_id(2) * BLOCK_M
    rows = m0 + tl.arange(0, BLOCK_M)
    STEPS: tl.constexpr = (K // BLOCK_K + SPLIT - 1) // SPLIT
    first = part * STEPS
    for c in tl.static_range(len(CLASSES)):
        if block >= CLASSES[c][7] and block < CLASSES[c][7] + CLASSES[c][6] * (CLASSES[c][2] // 128):
            blocks_each: tl.constexpr = CLASSES[c][2] // 128
            row_words: tl.constexpr = CLASSES[c][2] // 16 * 4 * CLASSES[c][0]
            index = (block - CLASSES[c][7]) // blocks_each
            column = (block - CLASSES[c][7]) % blocks_each
            matrix = CLASSES[c][5] + index
            tile = _pick(words, index, CLASSES[c][5], CLASSES[c][6])
            tile += (first * (BLOCK_K // 16)).to(tl.int64) * row_words + column * (8 * 4 * CLASSES[c][0])
            at = (matrix * m + rows).to(tl.int64)[None, :] * K + tl.arange(0, BLOCK_K)[:, None]
            x_block = xh + first * BLOCK_K + at
            acc = tl.zeros((128, BLOCK_M), tl.float32)
            for _ in range(STEPS if K % (SPLIT * BLOCK_K) == 0 else tl.minimum(STEPS, K // BLOCK_K - first)):
                x = tl.load(x_block, mask=(rows < m)[None, :], other=0.0)
                w = decode_tiles(tile, row_words, CLASSES[c][0], CLASSES[c][1], BLOCK_K // 16, 8, VARIANT)
                acc = tl.dot(w, x, acc)
                tile += BLOCK_K // 16 * row_words
                x_block += BLOCK_K
            if SPLIT == 1:
                _write_output(
                    acc,
                    exponents,
                    _pick(svh, index, CLASSES[c][5], CLASSES[c][6]),
                    _pick(bias, index, CLASSES[c][5], CLASSES[c][6]),
                    _pick(y, index, CLASSES[c][5], CLASSES[c][6]),
                    matrix,
                    rows,
                    m,
                    column * 128,
                    CLASSES[c][3],
                    CLASSES[c][4],
                    BLOCK_M,
                )
            else:
                base = partial + ((tl.program_id(2) * SPLIT + part).to(tl.int64) * BLOCKS + block) * (128 * BLOCK_M)
                tl.store(base + tl.arange(0, 128)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :], acc)


@triton.jit(do_not_specialize=["m"])
def _reduce_kernel(
    exponents,
    svh,
    bias,
    y,
    partial,
    m,
    CLASSES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (output block, token block): the parts of k added in their order, then y."""
    block = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    base = partial + (tl.program_id(1).to(tl.int64) * (SPLIT * BLOCKS) + block) * (128 * BLOCK_M)
    at = tl.arange(0, 128)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    acc = tl.zeros((128, BLOCK_M), tl.float32)
    for _ in range(SPLIT):
        acc += tl.load(base + at)
        base += BLOCKS * 128 * BLOCK_M
    for c in tl.static_range(len(CLASSES)):
        if block >= CLASSES[c][7] and block < CLASSES[c][7] + CLASSES[c][6] * (CLASSES[c][2] // 128):
            blocks_each: tl.constexpr = CLASSES[c][2] // 128
            index = (block - CLASSES[c][7]) // blocks_each
            _write_output(
                acc,
                exponents,
                _pick(svh, index, CLASSES[c][5], CLASSES[c][6]),
                _pick(bias, index, CLASSES[c][5], CLASSES[c][6]),
                _pick(y, index, CLASSES[c][5], CLASSES[c][6]),
                CLASSES[c][5] + index,
                rows,
                m,
                (block - CLASSES[c][7]) % blocks_each * 128,
                CLASSES[c][3],
                CLASSES[c][4],
                BLOCK_M,
            )


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _HOST_PROCESSORS


def _split(k: int, blocks: int, processors: int) -> int:
    """Parts of k for about two programs a multiprocessor, none of them empty; the same for every number of rows."""
    steps = k // _BLOCK_K
    parts = max(1, min(2 * processors // blocks, steps // _MIN_STEPS))
    return -(-steps // -(-steps // parts))


def configure(m: int, k: int, blocks: int, processors: int) -> LinearConfig:
    if m > DECODE_ROWS:
        return LinearConfig(block_m=64, block_k=_BLOCK_K, split=1, num_warps=8, num_stages=1)
    block_m = max(16, triton.next_power_of_2(m))
    split = _split(k, blocks, processors)
    return LinearConfig(block_m=block_m, block_k=_BLOCK_K, split=split, num_warps=8 if block_m == 64 else 4, num_stages=1)


def _launch_linears(
    x: Tensor,
    trellises: Sequence[Tensor],
    suh: Sequence[Tensor],
    svh: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    codebooks: Sequence[int],
    out_features: Sequence[int],
    out_dtype: torch.dtype,
    config: LinearConfig | None = None,
) -> list[Tensor]:
    outputs = [torch.empty((*x.shape[:-1], features), dtype=out_dtype, device=x.device) for features in out_features]
    if x.numel() == 0:
        return outputs
    x = as_rows(x)
    m = x.shape[0]
    keys = [
        (t.shape[2] // 8, codebook, t.shape[1] * 16, features, bias is not None)
        for t, codebook, features, bias in zip(trellises, codebooks, out_features, biases)
    ]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    classes: list[_Class] = []
    blocks = 0
    for key in sorted(set(keys)):
        classes.append(_Class(*key, first=sum(c.count for c in classes), count=keys.count(key), block=blocks))
        blocks += classes[-1].count * (classes[-1].padded_out // 128)
    padded_in = trellises[0].shape[0] * 16
    if config is None:
        config = configure(m, padded_in, blocks, _processors(x.device))
    constants = tuple(c.constants for c in classes)
    token_blocks = triton.cdiv(m, config.block_m)
    with device_guard(x):
        xh, exponents = launch_rotate_input(x, [suh[i] for i in order], padded_in)
        partial = exponents
        if config.split > 1:
            shape = (token_blocks, config.split, blocks * 128, config.block_m)
            partial = torch.empty(shape, dtype=torch.float32, device=x.device)
        ends = (
            tuple(svh[i] for i in order),
            tuple(svh[i] if biases[i] is None else biases[i] for i in order),  # a matrix without bias never reads it
            tuple(outputs[i] for i in order),
            partial,
            m,
        )
        _product_kernel[(blocks, config.split, token_blocks)](
            xh,
            exponents,
            tuple(trellis_words(trellises[i]) for i in order),
            *ends,
            K=padded_in,
            CLASSES=constants,
            BLOCKS=blocks,
            BLOCK_M=config.block_m,
            BLOCK_K=config.block_k,
            SPLIT=config.split,
            VARIANT=layout_variant(x.device),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        if config.split > 1:
            _reduce_kernel[(blocks, token_blocks)](
                exponents,
                *ends,
                CLASSES=constants,
                BLOCKS=blocks,
                BLOCK_M=config.block_m,
                SPLIT=config.split,
                num_warps=4,
            )
    return outputs


def _linears_body(
    x: Tensor,
    trellises: Sequence[Tensor],
    suh: Sequence[Tensor],
    svh: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    codebooks: Sequence[int],
    out_features: Sequence[int],
    out_dtype: torch.dtype,
) -> list[Tensor]:
    if use_triton(x):
        return _launch_linears(x, trellises, suh, svh, biases, codebooks, out_features, out_dtype)
    weights = (
        TrellisWeight(t, u, v, Codebook(codebook), bias, x.shape[-1], features)
        for t, u, v, bias, codebook, features in zip(trellises, suh, svh, biases, codebooks, out_features)
    )
    return [reference.linear(x, w).to(out_dtype) for w in weights]


def _linear_body(
    x: Tensor,
    trellis: Tensor,
    suh: Tensor,
    svh: Tensor,
    bias: Tensor | None,
    codebook: int,
    out_features: int,
    out_dtype: torch.dtype,
) -> Tensor:
    return _linears_body(x, [trellis], [suh], [svh], [bias], [codebook], [out_features], out_dtype)[0]


_linears_op = torch.library.custom_op("exl3_triton::linears", _linears_body, mutates_args=())
_linear_op = torch.library.custom_op("exl3_triton::linear", _linear_body, mutates_args=())


@_linears_op.register_fake
def _(x, trellises, suh, svh, biases, codebooks, out_features, out_dtype):
    return [x.new_empty((*x.shape[:-1], features), dtype=out_dtype) for features in out_features]


@_linear_op.register_fake
def _(x, trellis, suh, svh, bias, codebook, out_features, out_dtype):
    return x.new_empty((*x.shape[:-1], out_features), dtype=out_dtype)


def _check(op: str, x: Tensor, w: TrellisWeight, out_dtype: torch.dtype) -> None:
    if x.dtype not in FLOATS:
        raise ValueError(f"{op}: x is {x.dtype}: required float16, bfloat16 or float32")
    if out_dtype not in FLOATS:
        raise ValueError(f"{op}: out_dtype={out_dtype}: required float16, bfloat16 or float32")
    if x.dim() == 0 or x.shape[-1] != w.in_features:
        raise ValueError(f"{op}: x is {list(x.shape)}: required [..., {w.in_features}], the matrix's input features")
    if x.device != w.device:
        raise ValueError(f"{op}: x on {x.device}: required {w.device}, as the matrix")


def linear(x: Tensor, w: TrellisWeight, *, out_dtype: torch.dtype | None = None, mode: str = "exact") -> Tensor:
    """x W + bias for one EXL3 matrix.

    x: [..., in_features] fp16, bf16 or fp32, any leading shape (also empty) and any strides. Returns [..., out_features],
    contiguous, in `out_dtype` (default: that of x). Weights are exact; the rotated activations are rounded to fp16 once,
    under a power of two a row, so any finite x gives a right result wherever that fits `out_dtype`. Sums are fp32, rounded
    once. mode: "exact". Raises ValueError for another dtype, width, device or mode.
    """
    out_dtype = out_dtype or x.dtype
    _check("linear", x, w, out_dtype)
    if mode != "exact":
        raise ValueError(f'linear: mode={mode!r}: required "exact"')
    return call(_linear_op, _linear_body, x, w.trellis, w.suh, w.svh, w.bias, int(w.codebook), w.out_features, out_dtype)


def linears(x: Tensor, weights: Sequence[TrellisWeight], *, out_dtype: torch.dtype | None = None) -> list[Tensor]:
    """[linear(x, w) for w in weights] in one launch: projections that share an input, such as q, k and v, or gate and up.

    x: [..., in_features]; rates, codebooks and output sizes of the matrices may differ, their input size must not. Raises
    ValueError as `linear` does, or for an empty list.
    """
    out_dtype = out_dtype or x.dtype
    if not weights:
        raise ValueError("linears: no matrices: required at least one")
    for w in weights:
        _check("linears", x, w, out_dtype)
    return call(
        _linears_op,
        _linears_body,
        x,
        [w.trellis for w in weights],
        [w.suh for w in weights],
        [w.svh for w in weights],
        [w.bias for w in weights],
        [int(w.codebook) for w in weights],
        [w.out_features for w in weights],
        out_dtype,
    )
