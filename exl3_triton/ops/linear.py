"""y = rotate(rotate(x * suh) W_rotated) * svh + bias over EXL3 matrices.

Up to a few hundred rows the weights are decoded inside the product, in three launches at most: the rotation of the
activations (`hadamard.launch_rotate_input`), the product, and, where it is split over k, a reduction. The last one writes y:
output rotation, svh, the row's power of two, bias and the cast in one place. With more rows the weights are decoded once
into fp16 scratch and `torch.mm` does the product (`decode_once.py`).

The product has weights as its first operand and tokens as its second, so the decoded tile never leaves registers and a few
tokens cost a small instruction. A program owns 128 output features (a rotation block) of BLOCK_M tokens. Matrices of one
call share the launch; those equal in format and size ("a class") share code, the others get a branch of their own with
every size a constant.

The split over k depends on the matrices, the device and the regime (`tuning.regimes`), not on the number of rows: a row gives
the same bits in any batch of its regime.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import reference
from ..format import Codebook, TrellisWeight
from ._args import FLOATS, as_rows
from ._dispatch import call, device_guard, overlap, use_triton
from ._triton import start_next, tl, triton, wait_previous
from .decode_once import finish_rows, launch_folded, launch_rotated, scale_rows
from .hadamard import launch_rotate_input, rotate_columns, scale_by_power
from .layout import WORD_ORDER, layout_variant
from .modes import PARTS, check_mode, launch_quantize_rows, raw_product
from .trellis import decode_tiles, decode_words, load_tiles, trellis_words
from .tuning import LinearConfig, device_of, folds, select_linear


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
    acc,
    exponents,
    affine,
    svh,
    bias,
    y,
    matrix,
    rows,
    m,
    column,
    COUNT: tl.constexpr,
    OUT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Accumulators [128, BLOCK_M] of one matrix of COUNT -> y[rows, column..column+127]."""
    n = column + tl.arange(0, 128)
    live = rows < m
    raw = raw_product(acc, affine, (matrix * m + rows)[None, :], live[None, :], COUNT * m)
    result = rotate_columns(raw, BLOCK_M) * tl.load(svh + n).to(tl.float32)[:, None]
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


@triton.jit
def _load_rows(x, live, low, LOW: tl.constexpr):
    """A block of activations, and with LOW the block of their low parts, `low` elements further on."""
    high = tl.load(x, mask=live, other=0)
    if LOW:
        blocks = (high, tl.load(x + low, mask=live, other=0))
    else:
        blocks = (high,)  # type: ignore[assignment]
    return blocks


@triton.jit
def _multiply(w, blocks, acc):
    for i in tl.static_range(len(blocks) - 1, -1, -1):  # low parts first
        acc = tl.dot(w, blocks[i], acc, out_dtype=acc.dtype)
    return acc


@triton.jit(do_not_specialize=["m"])
def _product_kernel(
    xh,
    exponents,
    affine,
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
    PREFETCH: tl.constexpr,
    PARTS: tl.constexpr,
    LOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (output block, part of k, token block). With SPLIT > 1 raw sums go to partial [SPLIT, BLOCKS, m, 128].

    PARTS: of `decode_words`, each meeting the same activation. LOW: activations are [2, matrices, m, K], high and low parts.
    """
    block = tl.program_id(0)
    part = tl.program_id(1)
    m0 = tl.program_id(2) * BLOCK_M
    rows = m0 + tl.arange(0, BLOCK_M)
    live = (rows < m)[None, :]
    low = tl.cast(m, tl.int64) * (len(words) * K)
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
            at = (matrix * m + rows).to(tl.int64)[None, :] * K + (tl.arange(0, BLOCK_K * PARTS) // PARTS)[:, None]
            x_block = xh + first * BLOCK_K + at
            acc = tl.zeros((128, BLOCK_M), tl.int32 if PARTS == 4 else tl.float32)
            steps = STEPS if K % (SPLIT * BLOCK_K) == 0 else tl.minimum(STEPS, K // BLOCK_K - first)
            if PREFETCH:
                raw = load_tiles(tile, row_words, CLASSES[c][0], BLOCK_K // 16, 8, VARIANT)
                wait_previous(OVERLAP)
                x = _load_rows(x_block, live, low, LOW)
                for _ in range(1, steps):
                    tile += BLOCK_K // 16 * row_words
                    x_block += BLOCK_K
                    raw_next = load_tiles(tile, row_words, CLASSES[c][0], BLOCK_K // 16, 8, VARIANT)
                    x_next = _load_rows(x_block, live, low, LOW)
                    w = decode_words(raw, CLASSES[c][0], CLASSES[c][1], BLOCK_K // 16, 8, VARIANT, PARTS)
                    acc = _multiply(w, x, acc)
                    raw = raw_next
                    x = x_next
                w = decode_words(raw, CLASSES[c][0], CLASSES[c][1], BLOCK_K // 16, 8, VARIANT, PARTS)
                acc = _multiply(w, x, acc)
            else:
                wait_previous(OVERLAP)
                for _ in range(steps):
                    x = _load_rows(x_block, live, low, LOW)
                    w = decode_tiles(tile, row_words, CLASSES[c][0], CLASSES[c][1], BLOCK_K // 16, 8, VARIANT, PARTS)
                    acc = _multiply(w, x, acc)
                    tile += BLOCK_K // 16 * row_words
                    x_block += BLOCK_K
            start_next(OVERLAP)
            if SPLIT == 1:
                _write_output(
                    acc,
                    exponents,
                    affine,
                    _pick(svh, index, CLASSES[c][5], CLASSES[c][6]),
                    _pick(bias, index, CLASSES[c][5], CLASSES[c][6]),
                    _pick(y, index, CLASSES[c][5], CLASSES[c][6]),
                    matrix,
                    rows,
                    m,
                    column * 128,
                    len(words),
                    CLASSES[c][3],
                    CLASSES[c][4],
                    BLOCK_M,
                )
            else:
                n = tl.arange(0, 128)[:, None]
                at = ((part * BLOCKS + block).to(tl.int64) * m + rows.to(tl.int64)[None, :]) * 128 + n
                tl.store(partial + at, acc, mask=live)


@triton.jit(do_not_specialize=["m"])
def _reduce_kernel(
    exponents,
    affine,
    svh,
    bias,
    y,
    partial,
    m,
    CLASSES: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (output block, row): the parts of k added in their order, then y."""
    block = tl.program_id(0)
    row = tl.program_id(1) + tl.zeros((1, 1), tl.int32)
    n = tl.arange(0, 128)[None, :]
    part = partial + (block.to(tl.int64) * m + row) * 128 + n
    wait_previous(OVERLAP)
    start_next(OVERLAP)
    acc = tl.zeros((1, 128), partial.dtype.element_ty)
    for _ in tl.static_range(SPLIT):  # unrolled: all loads in flight at once
        acc += tl.load(part)
        part += (BLOCKS * m).to(tl.int64) * 128
    for c in tl.static_range(len(CLASSES)):
        if block >= CLASSES[c][7] and block < CLASSES[c][7] + CLASSES[c][6] * (CLASSES[c][2] // 128):
            blocks_each: tl.constexpr = CLASSES[c][2] // 128
            index = (block - CLASSES[c][7]) // blocks_each
            finish_rows(
                raw_product(acc, affine, (CLASSES[c][5] + index) * m + row, row < m, len(svh) * m),
                exponents + (CLASSES[c][5] + index) * m,
                _pick(svh, index, CLASSES[c][5], CLASSES[c][6]),
                _pick(bias, index, CLASSES[c][5], CLASSES[c][6]),
                _pick(y, index, CLASSES[c][5], CLASSES[c][6]),
                row,
                row < m,
                (block - CLASSES[c][7]) % blocks_each * 128 + n,
                CLASSES[c][3],
                CLASSES[c][4],
                1,
            )


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
    mode: str = "exact",
    foldable: bool = False,
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
        highest = max((c.twice_bits, c.codebook) for c in classes)
        config = select_linear(m, padded_in, blocks, device_of(x.device), *highest, mode)
    constants = tuple(c.constants for c in classes)
    parts = PARTS[mode] if config else 1
    variant = layout_variant(x.device) | (WORD_ORDER if parts > 1 else 0)
    with device_guard(x):
        if config is None:
            folded = foldable and mode == "exact" and folds(m, padded_in, 128 * blocks)
            x, scales = scale_rows(x) if folded and x.dtype != torch.float16 else (x, None)
            for i in order:
                y = outputs[i].view(m, out_features[i])
                if folded:
                    launch_folded(x, scales, trellises[i], suh[i], svh[i], biases[i], codebooks[i], y)
                else:
                    low = mode == "precise"
                    launch_rotated(x, trellises[i], suh[i], svh[i], biases[i], codebooks[i], y, low=low)
            return outputs
        xh, exponents = launch_rotate_input(x, [suh[i] for i in order], padded_in, variant, low=mode == "precise")
        xh, affine = launch_quantize_rows(xh) if mode == "int8" else (xh, exponents)
        token_blocks = triton.cdiv(m, config.block_m)
        partial = exponents
        if config.split > 1:
            shape = (config.split, blocks, m, 128)
            partial = torch.empty(shape, dtype=torch.int32 if mode == "int8" else torch.float32, device=x.device)
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
            affine,
            tuple(trellis_words(trellises[i]) for i in order),
            *ends,
            K=padded_in,
            CLASSES=constants,
            BLOCKS=blocks,
            BLOCK_M=config.block_m,
            BLOCK_K=config.block_k,
            SPLIT=config.split,
            VARIANT=variant,
            PREFETCH=config.prefetch,
            PARTS=parts,
            LOW=mode == "precise",
            num_warps=config.num_warps,
            num_stages=1,
            maxnreg=config.registers,
            **overlap(x.device, m),
        )
        if config.split > 1:
            _reduce_kernel[(blocks, m)](
                exponents,
                affine,
                *ends,
                CLASSES=constants,
                BLOCKS=blocks,
                SPLIT=config.split,
                num_warps=1,
                **overlap(x.device, m),
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
    mode: str = "exact",
    foldable: bool = False,
) -> list[Tensor]:
    if use_triton(x):
        fields = (trellises, suh, svh, biases, codebooks, out_features)
        return _launch_linears(x, *fields, out_dtype, mode=mode, foldable=foldable)
    weights = (
        TrellisWeight(t, u, v, Codebook(codebook), bias, x.shape[-1], features)
        for t, u, v, bias, codebook, features in zip(trellises, suh, svh, biases, codebooks, out_features)
    )
    return [reference.linear(x, w, mode).to(out_dtype) for w in weights]


def _linear_body(
    x: Tensor,
    trellis: Tensor,
    suh: Tensor,
    svh: Tensor,
    bias: Tensor | None,
    codebook: int,
    out_features: int,
    out_dtype: torch.dtype,
    mode: str = "exact",
    foldable: bool = False,
) -> Tensor:
    return _linears_body(x, [trellis], [suh], [svh], [bias], [codebook], [out_features], out_dtype, mode, foldable)[0]


_linears_op = torch.library.custom_op("exl3_triton::linears", _linears_body, mutates_args=())
_linear_op = torch.library.custom_op("exl3_triton::linear", _linear_body, mutates_args=())


@_linears_op.register_fake
def _(x, trellises, suh, svh, biases, codebooks, out_features, out_dtype, mode="exact", foldable=False):
    return [x.new_empty((*x.shape[:-1], features), dtype=out_dtype) for features in out_features]


@_linear_op.register_fake
def _(x, trellis, suh, svh, bias, codebook, out_features, out_dtype, mode="exact", foldable=False):
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
    once. With many rows (`tuning.folds`) it is not x but the weights of a `foldable` matrix that are rounded to fp16, in the
    original basis. mode, with the error of y before its rounding to `out_dtype`, relative in the root mean square, as measured
    with the kernels in Triton's interpreter at 2048 inputs (on a CPU "exact" and "precise" are the same fp32 product):

        exact    2.0e-4, the rounding of the activations; 2.9e-4 with many rows
        precise  2e-7: exact weights, activations as two fp16 values each; twice the matrix products
        split    MCG and 3INST only, 3.0e-4: weights are their two summands, not rounded to fp16; as exact where weights are
                 decoded once (more than 255 rows)
        int8     MUL1 only, 8.3e-3: activations rounded to int8 with one scale a row, weights not rounded to fp16, sums in
                 int32; at most 32768 input features

    Raises ValueError for another dtype, width, device or mode, and for a codebook that the mode does not know.
    """
    out_dtype = out_dtype or x.dtype
    _check("linear", x, w, out_dtype)
    check_mode("linear", mode, [w])
    sizes = (int(w.codebook), w.out_features)
    return call(_linear_op, _linear_body, x, w.trellis, w.suh, w.svh, w.bias, *sizes, out_dtype, mode, bool(w.foldable))


def linears(
    x: Tensor, weights: Sequence[TrellisWeight], *, out_dtype: torch.dtype | None = None, mode: str = "exact"
) -> list[Tensor]:
    """[linear(x, w) for w in weights] in one launch: projections that share an input, such as q, k and v, or gate and up.

    x: [..., in_features]; rates, codebooks and output sizes of the matrices may differ, their input size must not. Raises
    ValueError as `linear` does, or for an empty list.
    """
    out_dtype = out_dtype or x.dtype
    if not weights:
        raise ValueError("linears: no matrices: required at least one")
    for w in weights:
        _check("linears", x, w, out_dtype)
    check_mode("linears", mode, weights)
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
        mode,
        all(w.foldable for w in weights),
    )
