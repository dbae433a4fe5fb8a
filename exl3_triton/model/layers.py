"""Building blocks: quantized and plain linear layers behind one call, RMSNorm, the gated MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..format import Codebook, TrellisWeight, fits_half, padded_size
from ..ops.modes import check_mode


def _with_foldable(weight: TrellisWeight) -> TrellisWeight:
    return replace(weight, foldable=fits_half(weight.suh, weight.svh))


class Exl3Linear(nn.Module):
    """An EXL3 matrix as a drop-in for `nn.Linear`: y = x W + bias, in anyone's model, compiled or not.

    Its `state_dict` has the checkpoint's names (`trellis`, `suh`, `svh`, `mcg` or `mul1`, `bias`), so a plain EXL3
    checkpoint loads with `load_state_dict`. `.to(device)` moves it; the storage types never change, whatever dtype is asked.

    weight: the matrix; build an unwritten one of a known geometry with `Exl3Linear.empty`. mode: of `ops.linear`, also to be
    changed later. Raises ValueError for a mode that the matrix's codebook does not know.
    """

    trellis: Tensor
    suh: Tensor
    svh: Tensor
    bias: Tensor | None

    def __init__(self, weight: TrellisWeight, mode: str = "exact"):
        check_mode("Exl3Linear", mode, [weight])
        super().__init__()
        self.mode = mode
        self.in_features, self.out_features, self.codebook = weight.in_features, weight.out_features, weight.codebook
        for name in ("trellis", "suh", "svh", "bias"):
            self.register_buffer(name, getattr(weight, name))
        if (marker := weight.codebook.marker) is not None:
            bits = torch.tensor(marker - (1 << 32), dtype=torch.int32, device=weight.device)
            self.register_buffer(weight.codebook.label, bits)
        self.weight = weight if weight.foldable is not None else _with_foldable(weight)
        self.register_load_state_dict_post_hook(lambda module, _: module._rebuild())

    @classmethod
    def empty(
        cls,
        in_features: int,
        out_features: int,
        bits: float,
        codebook: Codebook,
        *,
        bias: bool = False,
        device: torch.device | str = "cpu",
    ) -> Exl3Linear:
        """An unwritten matrix of the given logical sizes, K and codebook, to be filled by `load_state_dict`."""
        rows, columns = padded_size(in_features), padded_size(out_features)

        def half(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float16, device=device)

        trellis = torch.zeros(rows // 16, columns // 16, int(16 * bits), dtype=torch.int16, device=device)
        biases = half(columns) if bias else None
        return cls(TrellisWeight(trellis, half(rows), half(columns), codebook, biases, in_features, out_features))

    def _rebuild(self) -> None:
        buffers = (self.trellis, self.suh, self.svh, self.codebook, self.bias)
        self.weight = _with_foldable(TrellisWeight(*buffers, self.in_features, self.out_features))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Exl3Linear:
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep_dtype, recurse)
        self._rebuild()
        return self

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [..., in_features], fp16, bf16 or fp32 -> [..., out_features] in `out_dtype` (default: x's)."""
        return ops.linear(x, self.weight, out_dtype=out_dtype, mode=self.mode)

    def extra_repr(self) -> str:
        w = self.weight
        text = f"{w.in_features}, {w.out_features}, bits={w.bits}, codebook={w.codebook.label}, bias={w.bias is not None}"
        return text if self.mode == "exact" else f"{text}, mode={self.mode}"


class PlainLinear(nn.Module):
    """An unquantized matrix, weight [out, in] and bias [out] or None; computes in the weight's dtype."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [..., in] -> [..., out] in `out_dtype` (default: x's)."""
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(out_dtype or x.dtype)


class PlainExperts(nn.Module):
    """Unquantized routed experts: gate and up [E, intermediate, hidden], down [E, hidden, intermediate]."""

    gate: Tensor
    up: Tensor
    down: Tensor

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor):
        super().__init__()
        for name, tensor in (("gate", gate), ("up", up), ("down", down)):
            self.register_buffer(name, tensor)


def linears(x: Tensor, layers: Sequence[nn.Module], out_dtype: torch.dtype) -> list[Tensor]:
    """Several linear layers over one input; quantized ones of one mode share their launches."""
    modes = {layer.mode if isinstance(layer, Exl3Linear) else None for layer in layers}
    mode = modes.pop()
    if mode is not None and not modes:
        return ops.linears(x, [layer.weight for layer in layers], out_dtype=out_dtype, mode=mode)  # type: ignore[misc]
    return [layer(x, out_dtype) for layer in layers]


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last dimension."""

    weight: Tensor

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.register_buffer("weight", weight)
        self.eps = eps

    def forward(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, out_dtype=out_dtype)

    def add(self, residual: Tensor, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        """residual += x, in place; returns the norm of the sum."""
        return ops.add_rms_norm(residual, x, self.weight, self.eps, out_dtype=out_dtype)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)); intermediates in fp32, since their products pass fp16's range in real models.

    part: the intermediate features that this rank has; group: over which the outputs are summed, where not by the caller.
    """

    def __init__(
        self, source: Any, name: str, hidden_size: int, intermediate_size: int, part: range, group: str | None = None
    ):
        super().__init__()
        self.gate = source.linear(f"{name}.gate_proj", hidden_size, intermediate_size, outputs=part)
        self.up = source.linear(f"{name}.up_proj", hidden_size, intermediate_size, outputs=part)
        self.down = source.linear(f"{name}.down_proj", intermediate_size, hidden_size, inputs=part)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> fp32 [T, hidden]."""
        gate, up = linears(x, [self.gate, self.up], torch.float32)
        return ops.all_reduce(self.down(ops.swiglu(gate, up), torch.float32), self.group)
