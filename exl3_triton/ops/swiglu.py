"""SwiGLU: silu(gate) * up, with the clamps of models that have them."""

import torch
from torch import Tensor

from .. import reference
from ._args import FLOATS, as_rows, check_float
from ._dispatch import call, device_guard, overlap, use_triton
from ._triton import start_next, tl, triton, wait_previous

_BLOCK = 1024


@triton.jit
def _swiglu_kernel(
    gate, up, out, gate_stride, up_stride, limit,
    D: tl.constexpr, BLOCK: tl.constexpr, LIMITED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_previous(OVERLAP)
    start_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < D
    g = tl.load(gate + row * gate_stride + d, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + d, mask=mask, other=0.0).to(tl.float32)
    if LIMITED:  # comparisons, so that a NaN stays one
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    y = g / (1.0 + tl.exp(-g)) * u
    tl.store(out + row * D + d, y.to(out.dtype.element_ty), mask=mask)


def _launch_swiglu(gate: Tensor, up: Tensor, limit: float | None, out_dtype: torch.dtype) -> Tensor:
    out = torch.empty(gate.shape, dtype=out_dtype, device=gate.device)
    if out.numel() == 0:
        return out
    gate, up = as_rows(gate), as_rows(up)
    rows, width = gate.shape
    with device_guard(gate):
        _swiglu_kernel[(rows, triton.cdiv(width, _BLOCK))](
            gate,
            up,
            out,
            gate.stride(0),
            up.stride(0),
            limit or 0.0,
            D=width,
            BLOCK=_BLOCK,
            LIMITED=limit is not None,
            num_warps=4,
            **overlap(gate.device, rows),
        )
    return out


def _swiglu_body(gate: Tensor, up: Tensor, limit: float | None, out_dtype: torch.dtype) -> Tensor:
    if use_triton(gate):
        return _launch_swiglu(gate, up, limit, out_dtype)
    return reference.swiglu(gate, up, limit).to(out_dtype).contiguous()


_swiglu_op = torch.library.custom_op("exl3_triton::swiglu", _swiglu_body, mutates_args=())


@_swiglu_op.register_fake
def _(gate, up, limit, out_dtype):
    return gate.new_empty(gate.shape, dtype=out_dtype)


def swiglu(gate: Tensor, up: Tensor, *, limit: float | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """silu(gate) * up in fp32, rounded once.

    gate, up: [..., I] fp16, bf16 or fp32, any strides (halves of one tensor too). limit: where given, gate is first clamped
    from above to it and up to +-limit (GPT-OSS, GLM-5.3-Flash). Returns [..., I] in `out_dtype` (default: that of gate),
    contiguous. Raises ValueError for shapes that differ, other dtypes, or a limit that is not positive.
    """
    check_float("swiglu", gate=gate, up=up)
    out_dtype = out_dtype or gate.dtype
    if gate.shape != up.shape or gate.dim() == 0:
        raise ValueError(f"swiglu: gate {list(gate.shape)}, up {list(up.shape)}: required the same [..., I]")
    if out_dtype not in FLOATS:
        raise ValueError(f"swiglu: out_dtype={out_dtype}: required float16, bfloat16 or float32")
    if limit is not None and not limit > 0:
        raise ValueError(f"swiglu: limit={limit}: required positive, or None for no clamp")
    return call(_swiglu_op, _swiglu_body, gate, up, None if limit is None else float(limit), out_dtype)
