"""Weights on their way from a checkpoint into modules.

A model is built from a `WeightSource` twice: on the meta device, where headers and codebook markers alone are read and every
rule is checked (the preflight), then on its real device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..format import SUFFIXES, Codebook, ExpertProjection, ExpertWeights, FormatError, TrellisWeight, padded_size
from ..ops.modes import check_mode
from .checkpoint import Checkpoint, TensorInfo, listing
from .config import ModelConfig
from .layers import Exl3Linear, PlainExperts, PlainLinear

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# kept in fp32 whatever is asked for: expert choice and index scores flip on near-ties when these are rounded
FP32_NAMES = ("mlp.gate.e_score_correction_bias", "self_attn.indexer.weights_proj.weight")
_MARKERS = {codebook.label: codebook for codebook in Codebook if codebook.marker is not None}
_PLAIN_DTYPES = ("F32", "F16", "BF16")


def mtp_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """Canonical names of the layers behind the trunk that predict further tokens; a model without them leaves these aside."""
    return tuple(f"layers.{config.num_layers + index}" for index in range(config.num_mtp_layers))


class WeightSource:
    """Gives a model its weights by canonical name, checked, and remembers which were used.

    device: "meta" for the preflight, where a missing tensor becomes a meta tensor of the required shape and is reported by
    `finish`; elsewhere a missing tensor raises at once. dtype: of plain weights; a few small ones stay fp32 (`FP32_NAMES`).
    progress: a bar on stderr, counting the bytes read against `total_bytes` (the preflight's `claimed_bytes`).
    mode: of `ops.linear`, for quantized matrices other than experts.
    A context manager: the files stay open inside it. All methods raise FormatError naming tensor, found and required.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        mode: str = "exact",
        progress: bool = False,
        total_bytes: int | None = None,
    ):
        if checkpoint.rank_sliced:
            tp = (checkpoint.rank_sliced_config or {}).get("tp", len(checkpoint.ranks))
            raise FormatError(
                f"{checkpoint.path}: a rank-sliced checkpoint, its experts are cut for tp = {tp}, cannot be loaded; required: "
                "a plain EXL3 or an unquantized checkpoint"
            )
        self.checkpoint = checkpoint
        self.device, self.dtype, self.mode = torch.device(device), dtype, mode
        self.claimed_bytes = 0
        self._meta = self.device.type == "meta"
        self._claimed: set[str] = set()
        self._missing: list[str] = []
        self._formats: dict[tuple[Any, ...], tuple[int, Codebook]] = {}
        self._reader = checkpoint.reader()
        self._markers: dict[str, Tensor] | None = None
        self._bar = tqdm(
            total=total_bytes, unit="B", unit_scale=True, unit_divisor=1024, desc="loading", disable=self._meta or not progress
        )

    def __enter__(self) -> WeightSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.close()
        self._reader.__exit__(*exc)

    def tensor(
        self, name: str, shape: Iterable[int], *, dtype: torch.dtype | None = None, optional: bool = False
    ) -> Tensor | None:
        """The plain tensor `name` of exactly this shape, on the device, in `dtype` (default: the source's, or fp32).

        None where it is optional and absent.
        """
        shape = tuple(shape)
        if dtype is None:
            dtype = torch.float32 if name.endswith(FP32_NAMES) else self.dtype
        info = self._claim(name)
        if info is None:
            return None if optional else self._absent(name, shape, dtype)
        _check_plain(name, info, shape)
        if self._meta:
            return torch.empty(shape, dtype=dtype, device="meta")
        return self._read(info).to(device=self.device, dtype=dtype)

    def linear(self, name: str, in_features: int, out_features: int) -> nn.Module:
        """The linear `name`: quantized where `{name}.trellis` is stored, else plain from `{name}.weight` [out, in].

        A stored bias is part of either. Quantized sizes may be the logical ones padded to 128, nothing else.
        """
        if self._is_quantized(name):
            self._exl3_format(name, in_features, out_features)
            weight = self._trellis(name, in_features, out_features)
            check_mode(name, self.mode, [weight])
            return Exl3Linear(weight.to(self.device), self.mode)
        weight_name = f"{name}.weight"
        if weight_name not in self.checkpoint.tensors and self._parts(name).keys() - {"bias"}:
            weight_name = f"{name}.trellis"  # the rest of a quantized matrix is there
        plain = self.tensor(weight_name, (out_features, in_features))
        assert plain is not None
        return PlainLinear(plain, self.tensor(f"{name}.bias", (out_features,), dtype=plain.dtype, optional=True))

    def lm_head(self, hidden_size: int, vocab_size: int, *, tied: bool, embedding: Tensor) -> nn.Module:
        """The output head: the stored one, or the embedding [vocab, hidden] where none is stored and the model is tied."""
        stored = any(f"lm_head.{suffix}" in self.checkpoint.tensors for suffix in (*SUFFIXES, "weight"))
        if tied and not stored:
            return PlainLinear(embedding, None)
        return self.linear("lm_head", hidden_size, vocab_size)

    def experts(self, name: str, num_experts: int, hidden_size: int, intermediate_size: int) -> ExpertWeights | PlainExperts:
        """The routed experts `{name}.{e}.{gate,up,down}_proj`, all quantized (rates and codebooks may differ) or all plain."""
        tensors = self.checkpoint.tensors
        matrices = [f"{name}.{expert}.{projection}" for expert in range(num_experts) for projection in PROJECTIONS]
        quantized = {matrix for matrix in matrices if self._is_quantized(matrix)}
        plain = next((matrix for matrix in matrices if f"{matrix}.weight" in tensors), None)
        if quantized and plain:
            raise FormatError(
                f"{name}: found {min(quantized)}.trellis and {plain}.weight, required all experts of a layer quantized or none"
            )
        suffix = "trellis" if quantized else "weight"
        absent = [f"{matrix}.{suffix}" for matrix in matrices if f"{matrix}.{suffix}" not in tensors]
        if absent and not self._meta:
            raise FormatError(f"{self.checkpoint.path}: missing expert tensors: {listing(absent)}")
        self._missing += absent
        wide, narrow = (hidden_size, intermediate_size), (intermediate_size, hidden_size)
        sizes = dict(zip(PROJECTIONS, (wide, wide, narrow), strict=True))
        if not quantized:
            return PlainExperts(*(self._plain_experts(name, each, num_experts, *sizes[each]) for each in PROJECTIONS))
        gate, up, down = (self._exl3_experts(name, each, num_experts, *sizes[each], quantized) for each in PROJECTIONS)
        return ExpertWeights(gate, up, down, hidden_size=hidden_size, intermediate_size=intermediate_size)

    def finish(self, ignored_prefixes: Iterable[str] = ()) -> None:
        """The strict report: FormatError listing tensors that were required but absent, and stored but never asked for.

        ignored_prefixes: canonical module names whose tensors may stay unused. Rotary tables are never needed.
        """
        prefixes = tuple(prefix.rstrip(".") + "." for prefix in ignored_prefixes)
        unexpected = [
            name
            for name in self.checkpoint.tensors
            if name not in self._claimed and not name.startswith(prefixes) and not name.endswith("rotary_emb.inv_freq")
        ]
        parts = []
        if self._missing:
            parts.append(f"{len(self._missing)} missing: {listing(self._missing)}")
        if unexpected:
            parts.append(f"{len(unexpected)} unexpected: {listing(unexpected)}")
        if parts:
            raise FormatError(f"{self.checkpoint.path}: tensors do not fit the model; {'; '.join(parts)}")

    def check_scales(self) -> None:
        """Refuse NaN and infinity in the claimed matrices' scales, one percent of the file, before the rest is read."""
        wanted = {self.checkpoint.tensors[name]: name for name in self._claimed if name.endswith((".suh", ".svh"))}
        for info, raw in self._reader.read_small(wanted):
            vector = torch.frombuffer(bytearray(raw), dtype=torch.float16)
            if not bool(torch.isfinite(vector).all()):
                raise FormatError(f"{wanted[info]}: found NaN or infinity, required finite values (rotation signs and scales)")

    def _claim(self, name: str) -> TensorInfo | None:
        info = self.checkpoint.tensors.get(name)
        if info is not None and name not in self._claimed:
            self._claimed.add(name)
            self.claimed_bytes += info.nbytes
        return info

    def _absent(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not self._meta:
            raise FormatError(f"{self.checkpoint.path}: {name} is missing")
        self._missing.append(name)
        return torch.empty(shape, dtype=dtype, device="meta")

    def _read(self, info: TensorInfo) -> Tensor:
        tensor = self._reader.read(info)
        self._bar.update(info.nbytes)
        return tensor

    def _is_quantized(self, name: str) -> bool:
        """Whether `{name}` is an EXL3 matrix; refuses a module that is stored both ways."""
        tensors = self.checkpoint.tensors
        if f"{name}.trellis" not in tensors:
            return False
        if f"{name}.weight" in tensors:
            raise FormatError(f"{name}: found both .trellis and .weight, required one of them")
        return True

    def _parts(self, name: str) -> dict[str, TensorInfo]:
        """What is stored of the EXL3 matrix `name`, by suffix."""
        found = {}
        for suffix in SUFFIXES:
            info = self._claim(f"{name}.{suffix}")
            if info is not None:
                found[suffix] = info
        return found

    def _marker(self, name: str) -> Tensor:
        """A codebook marker with its value; all markers are read together, in the preflight too: neighbours share a read."""
        if self._markers is None:
            wanted = {
                info: full
                for full, info in self.checkpoint.tensors.items()
                if full.rpartition(".")[2] in _MARKERS and 0 < info.nbytes <= 8
            }
            self._markers, alike = {}, {}
            for info, raw in self._reader.read_small(wanted):
                key = (raw, info.dtype, info.shape)
                if key not in alike:
                    alike[key] = torch.frombuffer(bytearray(raw), dtype=info.torch_dtype).reshape(info.shape)
                self._markers[wanted[info]] = alike[key]
        marker = self._markers.get(name)
        if marker is None:
            info = self.checkpoint.tensors[name]
            marker = torch.empty(info.shape, dtype=info.torch_dtype, device="meta")
        return marker

    def _trellis(self, name: str, in_features: int, out_features: int, *, meta: bool | None = None) -> TrellisWeight:
        """The checked matrix `name`, from headers on the meta device, else on the CPU."""
        meta = self._meta if meta is None else meta
        tensors = {}
        for suffix, info in self._parts(name).items():
            full = f"{name}.{suffix}"
            if suffix in _MARKERS:
                tensors[full] = self._marker(full)
                self._bar.update(0 if meta else info.nbytes)
            elif meta:
                tensors[full] = torch.empty(info.shape, dtype=info.torch_dtype, device="meta")
            else:
                tensors[full] = self._read(info)
        return TrellisWeight.from_tensors(tensors, name, in_features=in_features, out_features=out_features)

    def _exl3_format(self, name: str, in_features: int, out_features: int) -> tuple[int, Codebook]:
        """(2K, codebook) of a stored matrix, checked from headers and markers; matrices that look alike are checked once."""
        parts = self._parts(name)
        # equal markers are one tensor, see `_marker`
        markers = (id(self._marker(f"{name}.{suffix}")) for suffix in parts if suffix in _MARKERS)
        key = (in_features, out_features, *((suffix, info.dtype, info.shape) for suffix, info in parts.items()), *markers)
        if key not in self._formats:
            weight = self._trellis(name, in_features, out_features, meta=True)
            self._formats[key] = (weight.twice_bits, weight.codebook)
        return self._formats[key]

    def _exl3_experts(
        self, name: str, projection: str, num_experts: int, in_features: int, out_features: int, stored: set[str]
    ) -> ExpertProjection:
        matrices = [f"{name}.{expert}.{projection}" for expert in range(num_experts)]
        formats = []
        for matrix in matrices:
            if f"{matrix}.bias" in self.checkpoint.tensors:
                raise FormatError(f"{matrix}.bias: found a bias, required none (experts have no bias)")
            # a missing expert is on the list of missing tensors already; any format stands in for it in the preflight
            formats.append(self._exl3_format(matrix, in_features, out_features) if matrix in stored else (2, Codebook.MCG))
        sizes = padded_size(in_features), padded_size(out_features)
        slabs = ExpertProjection.allocate(formats, *sizes, device=self.device)
        if not self._meta:
            for expert, matrix in enumerate(matrices):
                weight, slot = self._trellis(matrix, in_features, out_features), slabs.expert(expert)
                slot.trellis.copy_(weight.trellis)
                slot.suh.copy_(weight.suh)
                slot.svh.copy_(weight.svh)
        return slabs

    def _plain_experts(self, name: str, projection: str, num_experts: int, in_features: int, out_features: int) -> Tensor:
        shape = (out_features, in_features)
        slab = torch.empty(num_experts, *shape, dtype=self.dtype, device=self.device)
        for expert in range(num_experts):
            full = f"{name}.{expert}.{projection}.weight"
            info = self._claim(full)
            if info is not None:
                _check_plain(full, info, shape)
                if not self._meta:
                    slab[expert].copy_(self._read(info))
        return slab


def _check_plain(name: str, info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.dtype not in _PLAIN_DTYPES:
        raise FormatError(f"{name}: found {info.dtype}, required {', '.join(_PLAIN_DTYPES)} (an unquantized tensor)")
    if info.shape != shape:
        raise FormatError(f"{name}: found shape {list(info.shape)}, required {list(shape)} (the sizes in config.json)")
