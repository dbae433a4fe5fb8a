"""RMSNorm, and RMSNorm of a residual sum: fp32 inside, one rounding at the output."""

import torch
from torch import Tensor

from .. import reference
from ._args import FLOATS, as_rows, block, check_float
from ._dispatch import call, device_guard, launchable, overlap, use_triton
from ._triton import start_next, tl, triton, wait_previous

_MAX_BLOCK = 8192  # columns that one program holds in registers; wider rows are read twice


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x, residual, weight, out, rows, x_stride, residual_stride, eps,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = rms(x) * weight for ROWS rows a program; with ADD x is first added into `residual`, and the sum rounded."""
    wait_previous(OVERLAP)
    start_next(OVERLAP)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = row < rows
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    values = squares
    for start in tl.static_range(0, D, BLOCK):
        d = start + column
        mask = inside & (d < D)
        values = tl.load(x + row * x_stride + d, mask=mask, other=0.0).to(tl.float32)
        if ADD:
            at = residual + row * residual_stride + d
            total = (tl.load(at, mask=mask, other=0.0).to(tl.float32) + values).to(residual.dtype.element_ty)
            tl.store(at, total, mask=mask)
            values = total.to(tl.float32)
        squares += values * values
    if ADD and D > BLOCK:
        tl.debug_barrier()  # the second pass reads the sums back, perhaps in other threads
    inverse = 1.0 / tl.sqrt(tl.sum(squares, axis=1)[:, None] / D + eps)
    for start in tl.static_range(0, D, BLOCK):
        d = start + column
        mask = inside & (d < D)
        if D > BLOCK:
            if ADD:
                values = tl.load(residual + row * residual_stride + d, mask=mask, other=0.0).to(tl.float32)
            else:
                values = tl.load(x + row * x_stride + d, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
        tl.store(out + row * D + d, (values * inverse * scale).to(out.dtype.element_ty), mask=mask)


def _launch_rms_norm(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
    """Normalises `x`, or `residual` after adding `x` into it."""
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    width = x.shape[-1]
    x, weight = as_rows(x), launchable(weight)
    columns = min(block(width), _MAX_BLOCK)
    rows = max(1, 1024 // columns)
    grid = (triton.cdiv(x.shape[0], rows),)
    target = x if residual is None else residual
    with device_guard(x):
        _rms_norm_kernel[grid](
            x, target, weight, out, x.shape[0], x.stride(0), target.stride(0), eps,
            D=width, ROWS=rows, BLOCK=columns, ADD=residual is not None, num_warps=8 if columns >= 4096 else 4,
            **overlap(x.device, x.shape[0]),
        )  # fmt: skip
    return out


def _rms_norm_body(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    if use_triton(x):
        return _launch_rms_norm(x, weight, eps, out_dtype)
    return reference.rms_norm(x, weight, eps).to(out_dtype).contiguous()


_rms_norm_op = torch.library.custom_op("exl3_triton::rms_norm", _rms_norm_body, mutates_args=())


@_rms_norm_op.register_fake
def _(x, weight, eps, out_dtype):
    return x.new_empty(x.shape, dtype=out_dtype)


def _add_rms_norm_body(residual: Tensor, x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    if use_triton(x):
        return _launch_rms_norm(x, weight, eps, out_dtype, residual)
    residual.copy_(residual.float() + x.float())
    return reference.rms_norm(residual, weight, eps).to(out_dtype).contiguous()


_add_rms_norm_op = torch.library.custom_op("exl3_triton::add_rms_norm", _add_rms_norm_body, mutates_args=("residual",))


@_add_rms_norm_op.register_fake
def _(residual, x, weight, eps, out_dtype):
    return x.new_empty(x.shape, dtype=out_dtype)


def _check(op: str, x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> None:
    check_float(op, x=x, weight=weight)
    if x.dim() == 0 or tuple(weight.shape) != tuple(x.shape[-1:]):
        raise ValueError(
            f"{op}: weight {list(weight.shape)} for x {list(x.shape)}: required [{x.shape[-1] if x.dim() else 'D'}]"
        )
    if out_dtype not in FLOATS:
        raise ValueError(f"{op}: out_dtype={out_dtype}: required float16, bfloat16 or float32")


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; fp32 inside, rounded once.

    x: [..., D] fp16, bf16 or fp32, any strides; weight: [D]. Returns [..., D] in `out_dtype` (default: that of x), contiguous.
    Raises ValueError for other shapes or dtypes.
    """
    out_dtype = out_dtype or x.dtype
    _check("rms_norm", x, weight, out_dtype)
    return call(_rms_norm_op, _rms_norm_body, x, weight, float(eps), out_dtype)


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """`residual += x` in place (summed in fp32, rounded to the residual's dtype), then `rms_norm` of the rounded sum.

    residual: [T, D], contiguous last dimension, written; x: [T, D]; weight: [D]. Returns [T, D] in `out_dtype` (default: that
    of x). Raises ValueError for other shapes or dtypes, or where residual and x are of different devices.
    """
    out_dtype = out_dtype or x.dtype
    _check("add_rms_norm", x, weight, out_dtype)
    check_float("add_rms_norm", x=x, residual=residual)
    if x.dim() != 2 or residual.shape != x.shape or residual.stride(1) != 1:
        raise ValueError(
            f"add_rms_norm: residual {list(residual.shape)} with strides {list(residual.stride())}, x {list(x.shape)}: "
            "required the same [T, D], the residual's last dimension contiguous"
        )
    return call(_add_rms_norm_op, _add_rms_norm_body, residual, x, weight, float(eps), out_dtype)
