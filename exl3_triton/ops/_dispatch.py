"""Where an op runs: Triton kernels for GPU tensors, the reference for CPU tensors, the registered op while tracing."""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ._triton import HAS_TRITON

_BACKENDS = ("auto", "triton", "reference")


def _read_backend() -> str:
    value = os.environ.get("EXL3_TRITON_BACKEND", "").strip().lower() or "auto"
    if value not in _BACKENDS:
        raise ValueError(f"EXL3_TRITON_BACKEND={value!r}: must be one of {', '.join(_BACKENDS)} (or unset)")
    return value


_backend = _read_backend()


def backend() -> str:
    """The backend in force: "auto" (GPU tensors: Triton, CPU tensors: reference), "triton" or "reference" (every tensor)."""
    return _backend


@contextlib.contextmanager
def override_backend(name: str) -> Iterator[None]:
    """Force a backend within a `with` block; for tests and for comparing paths. Not for use around compiled code."""
    global _backend
    if name not in _BACKENDS:
        raise ValueError(f"backend {name!r}: must be one of {', '.join(_BACKENDS)}")
    previous, _backend = _backend, name
    try:
        yield
    finally:
        _backend = previous


def use_triton(x: Tensor) -> bool:
    """Whether the op that received `x` runs its Triton kernels. Raises ImportError when it should and Triton is missing."""
    if _backend == "reference" or (_backend == "auto" and x.device.type == "cpu"):
        return False
    if not HAS_TRITON:
        raise ImportError(f"tensor on {x.device}: this needs Triton >= 3.6, which is not installed (pip install triton)")
    return True


def device_guard(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensor's GPU the current one: Triton launches on the current device, whatever the arguments say."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


OVERLAP_ROWS = 32
"""Most rows up to which kernels of a linear overlap: on an H200 3 to 24 % faster at one row, equal at 32, slower above."""


@cache
def _can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)


def overlap(device: torch.device, rows: int) -> dict[str, Any]:
    """Launch options of a kernel that calls `wait_previous` and `start_next`: its beginning overlaps the end of the kernel
    before it (programmatic dependent launch), on NVIDIA GPUs from sm_90 on and for few rows.
    """
    if rows > OVERLAP_ROWS or not _can_overlap(device):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


def register_limit(registers: int | None) -> dict[str, Any]:
    """Launch options that let a thread have at most so many registers; none without a limit, since AMD's compiler does not
    know the option.
    """
    return {"maxnreg": registers} if registers else {}


def call(op: Any, body: Callable[..., Any], *args: Any) -> Any:
    """`body(*args)` in eager mode, the registered custom op `op` while something traces.

    The dispatcher costs tens of microseconds a call, which eager decoding would pay hundreds of times a token.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return op(*args)
    return body(*args)


def launchable(x: Tensor) -> Tensor:
    """`x`, contiguous and 16-byte aligned, copied only where it is not: Triton specialises kernels on both."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x
