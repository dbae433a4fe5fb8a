"""Triton, or a stand-in where it is not installed, so that every op module imports anywhere.

Kernels are written with the real names (`@triton.jit`, `tl.constexpr`). Without Triton the decorators return the plain
function and every attribute resolves to an inert object; launching such a kernel is refused by `_dispatch.use_triton`.
"""

from typing import Any

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
    gdc_launch_dependents = gdc_wait = _Inert()


@triton.jit
def wait_previous(OVERLAP: tl.constexpr):
    """Waits for the kernels before this one. Before it, only constants (weights) may be read, and nothing written."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def start_next(OVERLAP: tl.constexpr):
    """Lets the next kernel of the stream start; it stops in its own `wait_previous`.

    Called after `wait_previous`: then no more than one kernel waits behind the running one and takes its place.
    """
    if OVERLAP:
        gdc_launch_dependents()


__all__ = ["HAS_TRITON", "TRITON_VERSION", "start_next", "tl", "triton", "wait_previous"]
