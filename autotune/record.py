"""Compile what a launcher would launch, for a GPU that need not be there: it runs on meta tensors, kernels are recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from exl3_triton.ops.tuning import Device

_TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.uint8: "*u8", torch.int32: "*i32",
    torch.int64: "*i64",
}  # fmt: skip


class _Recorder:
    """Stands in for a kernel in its module: a launch becomes a compilation, specialised as Triton would."""

    def __init__(self, kernel: JITFunction, gpu: GPUTarget, found: dict[str, tuple[str, Any]]) -> None:
        self.kernel, self.gpu, self.found = kernel, gpu, found

    def __getitem__(self, grid: Any) -> Any:
        return self.compile

    def compile(self, *args: Any, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in kwargs}
        values = dict(zip(self.kernel.arg_names, args)) | kwargs
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}
        for i, parameter in enumerate(self.kernel.params):
            value, aligned = values[parameter.name], False
            if parameter.is_constexpr:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name], aligned = _TYPES[value.dtype], not parameter.do_not_specialize_on_alignment
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            elif value == 1 and not parameter.do_not_specialize:
                signature[parameter.name], constants[parameter.name] = "constexpr", 1
            else:
                signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                aligned = value % 16 == 0 and not parameter.do_not_specialize
            if aligned:
                attributes[(i,)] = [["tt.divisibility", 16]]
        key = f"{self.kernel.__name__} {sorted((n, c) for n, c in constants.items() if c is not None)} {options}"
        if key not in self.found:
            source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=attributes)
            self.found[key] = self.kernel.__name__, triton.compile(source, target=self.gpu, options=options)


class _Ignored:
    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


@contextlib.contextmanager
def recording(
    modules: Sequence[ModuleType], gpu: GPUTarget, device: Device, only: str = ""
) -> Iterator[dict[str, tuple[str, Any]]]:
    """Within the block, launches of kernels of `modules` are compiled for `gpu` instead, by launchers that take the present
    device for `device`.

    Gives specialisation -> (the kernel's name, Triton's CompiledKernel). only: the kernels to compile end so; others are left
    out. Not under TRITON_INTERPRET=1, which replaces kernels by Python functions at import.
    """
    found: dict[str, tuple[str, Any]] = {}
    with contextlib.ExitStack() as undo:
        for module in modules:
            changed: dict[str, Any] = {"device_of": lambda _: device} if hasattr(module, "device_of") else {}
            for name, kernel in vars(module).items():
                if isinstance(kernel, JITFunction) and name.endswith("_kernel"):
                    changed[name] = _Recorder(kernel, gpu, found) if name.endswith(only) else _Ignored()
            for name, value in changed.items():
                undo.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)
        yield found
