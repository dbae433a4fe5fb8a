"""Triton, or a stand-in where it is not installed, so that every op module imports anywhere.

Kernels are written with the real names (`@triton.jit`, `tl.constexpr`). Without Triton the decorators return the plain
function and every attribute resolves to an inert object; launching such a kernel is refused by `_dispatch.use_triton`.
"""

from typing import Any

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
    TRITON_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
except ImportError:
    HAS_TRITON = False
    TRITON_VERSION = (0, 0)

    class _Inert:
        """Accepts every attribute access and call; a decorator applied through it returns the function unchanged."""

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    triton = _Inert()
    tl = _Inert()

__all__ = ["HAS_TRITON", "TRITON_VERSION", "tl", "triton"]
