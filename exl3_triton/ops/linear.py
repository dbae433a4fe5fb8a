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
from ._dispatch import call, device_guard, overlap, register_limit, use_triton
from ._triton import triton
from .decode_once import launch_folded, launch_rotated, scale_rows
from .hadamard import launch_rotate_input
from .layout import WORD_ORDER, layout_variant
from .linear_kernels import product_kernel, reduce_kernel
from .modes import PARTS, check_mode, launch_quantize_rows
from .trellis import trellis_words
from .tuning import LinearConfig, device_of, folds, programs_and_parts, select_linear


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
            passes = x.dtype != torch.float16 or out_dtype == torch.bfloat16
            folded = foldable and mode == "exact" and folds(m, padded_in, 128 * blocks, passes)
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
        programs, split = programs_and_parts(config, padded_in, blocks, device_of(x.device).processors)
        if programs or split > 1:
            shape = (split, blocks, m, 128)
            partial = torch.empty(shape, dtype=torch.int32 if mode == "int8" else torch.float32, device=x.device)
        ends = (
            tuple(svh[i] for i in order),
            tuple(svh[i] if biases[i] is None else biases[i] for i in order),  # a matrix without bias never reads it
            tuple(outputs[i] for i in order),
            partial,
            m,
        )
        product_kernel[(programs, 1, token_blocks) if programs else (blocks, split, token_blocks)](
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
            SPLIT=split,
            PROGRAMS=programs,
            VARIANT=variant,
            PREFETCH=config.prefetch,
            STAGES=config.stages,
            PARTS=parts,
            LOW=mode == "precise",
            num_warps=config.num_warps,
            num_stages=1,
            **register_limit(config.registers),
            **overlap(x.device, m),
        )
        if programs or split > 1:
            reduce_kernel[(blocks, m)](
                exponents,
                affine,
                *ends,
                CLASSES=constants,
                BLOCKS=blocks,
                SPLIT=split,
                STEPS=padded_in // config.block_k,
                PROGRAMS=programs,
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
