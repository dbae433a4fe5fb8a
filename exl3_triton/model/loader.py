"""Weights on their way from a checkpoint into modules.

A model is built from a `WeightSource` twice: on the meta device, where headers and codebook markers alone are read and every
rule is checked (the preflight), then on its real device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..format import (
    HADAMARD,
    SUFFIXES,
    TILE,
    Codebook,
    ExpertProjection,
    ExpertWeights,
    FormatError,
    TrellisWeight,
    check_scales,
    expand_signs,
    padded_size,
)
from ..ops.modes import check_mode
from .checkpoint import Checkpoint, TensorInfo, listing
from .config import ModelConfig
from .layers import Exl3Linear, PlainExperts, PlainLinear
from .parallel import Partition, Shard
from .rank_sliced import PROJECTIONS, SECTION, RankSliced
from .transfer import Uploader

# kept in fp32 whatever is asked for: expert choice and index scores flip on near-ties when these are rounded
FP32_NAMES = ("mlp.gate.e_score_correction_bias", "self_attn.indexer.weights_proj.weight")
_MARKERS = {codebook.label: codebook for codebook in Codebook if codebook.marker is not None}
_PLAIN_DTYPES = ("F32", "F16", "BF16")
_SCALES_TOGETHER = 4 << 20  # bytes of scales looked at in one go


def mtp_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """Canonical names of the layers behind the trunk that predict further tokens; a model without them leaves these aside."""
    return tuple(f"layers.{config.num_layers + index}" for index in range(config.num_mtp_layers))


class _Cut(NamedTuple):
    """The part of a matrix that a rank holds: features of inputs and outputs, None for all of them."""

    inputs: range | None = None
    outputs: range | None = None

    @classmethod
    def of(cls, in_features: int, out_features: int, inputs: range | None, outputs: range | None) -> _Cut:
        """Raises FormatError where a cut goes through a rotation block."""
        for axis, features, part in (("in", in_features, inputs), ("out", out_features, outputs)):
            if part is not None and (part.start % HADAMARD or (part.stop % HADAMARD and part.stop != features)):
                found = f"features {part.start} to {part.stop} of {features} ({axis})"
                raise FormatError(f"cut: found {found}, required multiples of 128 (128-wide rotation blocks)")
        whole_in, whole_out = inputs in (None, range(in_features)), outputs in (None, range(out_features))
        return cls(None if whole_in else inputs, None if whole_out else outputs)

    @property
    def follows(self) -> bool:
        """Whether these are inputs behind another rank's."""
        return self.inputs is not None and self.inputs.start > 0

    @property
    def plain(self) -> tuple[slice, slice]:
        """Of a weight [out, in]."""
        return _slice(self.outputs), _slice(self.inputs)

    def exl3(self, suffix: str) -> tuple[slice, ...]:
        """Of a tensor of an EXL3 matrix; () where it is whole."""
        if self.inputs is None and self.outputs is None:
            return ()
        if suffix == "trellis":
            return _slice(self.inputs, TILE), _slice(self.outputs, TILE)
        if suffix in ("suh", "su"):
            return (_slice(self.inputs, TILE if suffix == "su" else 1),)
        if suffix in ("svh", "sv", "bias"):
            return (_slice(self.outputs, TILE if suffix == "sv" else 1),)
        return ()

    def sizes(self, in_features: int, out_features: int) -> dict[str, int]:
        """Logical sizes of the part."""
        inputs, outputs = self.inputs or range(in_features), self.outputs or range(out_features)
        return {"in_features": len(inputs), "out_features": len(outputs)}


_WHOLE = _Cut()


def _slice(part: range | None, unit: int = 1) -> slice:
    """`part` of a stored dimension, which goes on to a multiple of 128."""
    return slice(None) if part is None else slice(part.start // unit, padded_size(part.stop) // unit)


def _part_bytes(info: TensorInfo, part: tuple[slice, ...]) -> int:
    """Bytes of `part` of a stored tensor; () is all of it."""
    size = info.nbytes
    for length, taken in zip(info.shape, part):
        size = size * len(range(*taken.indices(length))) // max(length, 1)
    return size


class WeightSource:
    """Gives a model its weights by canonical name, checked, and remembers which were used.

    device: "meta" for the preflight, where a missing tensor becomes a meta tensor of the required shape and is reported by
    `finish`; elsewhere a missing tensor raises at once. dtype: of plain weights; a few small ones stay fp32 (`FP32_NAMES`).
    partition: which part of the model this rank holds; the rest of a matrix is checked like all of it, and not read.
    progress: a bar on stderr, counting the bytes read against `total_bytes` (the preflight's `claimed_bytes`).
    mode: of `ops.linear`, for quantized matrices other than experts. on_read: called before each read.
    A context manager: the files stay open inside it. All methods raise FormatError naming tensor, found and required.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        partition: Partition | None = None,
        mode: str = "exact",
        progress: bool = False,
        total_bytes: int | None = None,
        on_read: Callable[[], None] | None = None,
    ):
        self.rank_sliced = RankSliced.of(checkpoint)
        self.checkpoint = checkpoint
        self.device, self.dtype, self.partition, self.mode = torch.device(device), dtype, partition, mode
        self.claimed_bytes = 0
        self._on_read = on_read
        self._meta = self.device.type == "meta"
        self._claimed: set[str] = set()
        self._missing: list[str] = []
        self._formats: dict[tuple[Any, ...], tuple[int, Codebook]] = {}
        self._others: set[str] = set()  # slices of other ranks, which are no concern of this one
        self._reader = checkpoint.reader()
        self._uploader = Uploader(self.device)
        self._markers: dict[str, Tensor] | None = None
        hidden = self._meta or not progress
        self._bar = tqdm(total=total_bytes, unit="B", unit_scale=True, desc="loading", disable=hidden)

    def __enter__(self) -> WeightSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self._uploader.finish()
        self._bar.close()
        self._reader.__exit__(*exc)

    def tensor(
        self,
        name: str,
        shape: Iterable[int],
        *,
        dtype: torch.dtype | None = None,
        optional: bool = False,
        part: tuple[slice, ...] = (),
    ) -> Tensor | None:
        """The plain tensor `name` of exactly this shape, on the device, in `dtype` (default: the source's, or fp32).

        part: what is wanted of it, along its first dimensions. None where it is optional and absent.
        """
        shape = tuple(shape)
        if dtype is None:
            dtype = torch.float32 if name.endswith(FP32_NAMES) else self.dtype
        info = self._claim(name, part)
        if info is None:
            return None if optional else self._absent(name, shape, dtype)[part]
        _check_plain(name, info, shape)
        if self._meta:
            return torch.empty(shape, dtype=dtype, device="meta")[part]
        return self._uploader.place(self._read(info, part), dtype)

    def linear(
        self, name: str, in_features: int, out_features: int, *, inputs: range | None = None, outputs: range | None = None
    ) -> nn.Module:
        """The linear `name`: quantized where `{name}.trellis` is stored, else plain from `{name}.weight` [out, in].

        A stored bias is part of either. Quantized sizes may be the logical ones padded to 128, nothing else. inputs, outputs:
        the features that this rank holds, beginning at a multiple of 128 and ending at one or at the last feature. Where
        inputs are cut, the outputs are to be summed over the ranks, so that the first alone has the bias.
        """
        cut = _Cut.of(in_features, out_features, inputs, outputs)
        if self._is_quantized(name):
            parts = self._parts(name, cut)
            self._exl3_format(name, in_features, out_features, parts)
            matrix, place = self._trellis(name, in_features, out_features, cut, parts=parts), self._uploader.place
            check_mode(name, self.mode, [matrix])
            bias = None if matrix.bias is None else place(matrix.bias)
            placed = (place(matrix.trellis), place(matrix.suh), place(matrix.svh))
            weight = TrellisWeight(*placed, matrix.codebook, bias, matrix.in_features, matrix.out_features, matrix.foldable)
            return Exl3Linear(weight, self.mode)
        weight_name = f"{name}.weight"
        if weight_name not in self.checkpoint.tensors and self._parts(name).keys() - {"bias"}:
            weight_name = f"{name}.trellis"  # the rest of a quantized matrix is there
        plain = self.tensor(weight_name, (out_features, in_features), part=cut.plain)
        assert plain is not None
        bias = self.tensor(f"{name}.bias", (out_features,), dtype=plain.dtype, optional=True, part=cut.plain[:1])
        return PlainLinear(plain, None if cut.follows else bias)

    def lm_head(self, hidden_size: int, vocab_size: int, *, tied: bool, embedding: Tensor) -> nn.Module:
        """The output head: the stored one, or the embedding [vocab, hidden] where none is stored and the model is tied."""
        rows = None if self.partition is None else self.partition.vocab
        stored = any(f"lm_head.{suffix}" in self.checkpoint.tensors for suffix in (*SUFFIXES, "weight"))
        if tied and not stored:
            return PlainLinear(embedding if rows is None else embedding[rows.start : rows.stop], None)
        return self.linear("lm_head", hidden_size, vocab_size, outputs=rows)

    def experts(
        self, name: str, num_experts: int, hidden_size: int, intermediate_size: int, shared: str | None = None
    ) -> ExpertWeights | PlainExperts:
        """The routed experts `{name}.{e}.{gate,up,down}_proj`, all quantized (rates and codebooks may differ) or all plain.

        Of a rank: its experts, or its part of each one's intermediate width. shared: an expert of the same size that comes
        last, where it is quantized like them and cut like them.
        """
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
        mine, width = range(num_experts), range(intermediate_size)
        if self.partition is not None:
            mine, width = self.partition.experts, self.partition.moe
        wide_cut = _Cut.of(*wide, None, width)
        cuts = dict(zip(PROJECTIONS, (wide_cut, wide_cut, _Cut.of(*narrow, width, None)), strict=True))
        if not quantized:
            each_plain = (self._plain_experts(name, each, num_experts, *sizes[each], mine, cuts[each]) for each in PROJECTIONS)
            return PlainExperts(*each_plain)
        names = {each: [f"{name}.{expert}.{each}" for expert in range(num_experts)] for each in PROJECTIONS}
        if shared is not None and self._joins(shared, num_experts):
            names = {each: [*names[each], f"{shared}.{each}"] for each in PROJECTIONS}
            quantized |= {names[each][-1] for each in PROJECTIONS}
            mine = range(num_experts + 1)
        gate, up, down = (
            self._exl3_experts(names[each], *sizes[each], quantized, mine=mine, cut=cuts[each]) for each in PROJECTIONS
        )
        return ExpertWeights(gate, up, down, hidden_size=hidden_size, intermediate_size=len(width))

    def _joins(self, shared: str, num_experts: int) -> bool:
        """Whether a shared expert of the routed ones' size can stand among them on this rank; experts know no other mode."""
        names = [f"{shared}.{each}" for each in PROJECTIONS]
        alike = self.partition is None or self.partition.shared_joins(num_experts)
        return (
            alike
            and self.mode == "exact"
            and all(self._is_quantized(each) and f"{each}.bias" not in self.checkpoint.tensors for each in names)
        )

    def expert_slices(
        self, name: str, num_experts: int, hidden_size: int, intermediate_size: int, shared: str | None = None
    ) -> tuple[ExpertWeights, ...] | PlainExperts:
        """The routed experts as slices by intermediate width, whose outputs sum to the layer's: this process's, in rank order.

        Experts that are stored whole are one slice, with `shared` in it as `experts` has it.
        """
        sliced = self.rank_sliced
        if sliced is None or int(name.split(".")[1]) not in sliced.layers:
            whole = self.experts(name, num_experts, hidden_size, intermediate_size, shared)
            return whole if isinstance(whole, PlainExperts) else (whole,)
        if num_experts != sliced.num_experts:
            found = f"{sliced.num_experts} experts (config.json: {SECTION}.experts_per_layer)"
            raise FormatError(f"{name}: found {found}, required {num_experts} (the model's experts)")
        width, rest = divmod(intermediate_size, sliced.tp)
        if rest or (sliced.tp > 1 and width % HADAMARD):
            found = f"slices for tp = {sliced.tp} of an intermediate size of {intermediate_size}"
            raise FormatError(f"{name}: found {found}, required slices of a multiple of 128 (128-wide rotation blocks)")
        wide, narrow = (hidden_size, width), (width, hidden_size)
        sizes = dict(zip(PROJECTIONS, (wide, wide, narrow), strict=True))
        slices = []
        shard = Shard() if self.partition is None else self.partition.shard
        if self.partition is not None and len(self.partition.experts) < num_experts:
            raise FormatError(f"{name}: found experts stored in slices by width, required whole ones to divide by expert")
        for rank in sliced.local(shard.rank, shard.size):
            gate, up, down = (
                self._exl3_experts(
                    matrices := [f"{name}.{expert}.{each}.rank{rank}" for expert in range(num_experts)],
                    *sizes[each],
                    set(matrices),
                    sliced.shared_name(name, each, rank),
                )
                for each in PROJECTIONS
            )
            slices.append(ExpertWeights(gate, up, down, hidden_size=hidden_size, intermediate_size=width))
        self._others.update(sliced.names(int(name.split(".")[1])))  # checked by RankSliced
        return tuple(slices)

    def finish(self, ignored_prefixes: Iterable[str] = ()) -> None:
        """The strict report: FormatError listing tensors that were required but absent, and stored but never asked for.

        ignored_prefixes: canonical module names whose tensors may stay unused. Rotary tables are never needed.
        """
        prefixes = tuple(prefix.rstrip(".") + "." for prefix in ignored_prefixes)
        unexpected = [
            name
            for name in self.checkpoint.tensors
            if name not in self._claimed
            and name not in self._others
            and not name.startswith(prefixes)
            and not name.endswith("rotary_emb.inv_freq")
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
        batch: list[tuple[TensorInfo, bytes]] = []
        pending = 0
        for info, raw in self._reader.read_small(wanted):
            batch.append((info, raw))
            pending += len(raw)
            if pending > _SCALES_TOGETHER:
                _check_finite(batch, wanted)
                batch, pending = [], 0
        _check_finite(batch, wanted)

    def _claim(self, name: str, part: tuple[slice, ...] | None = ()) -> TensorInfo | None:
        """What is stored as `name`, of which `part` will be read; None: nothing, it is another rank's."""
        info = self.checkpoint.tensors.get(name)
        if info is not None and name not in self._claimed:
            self._claimed.add(name)
            self.claimed_bytes += 0 if part is None else _part_bytes(info, part)
        return info

    def _absent(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not self._meta:
            raise FormatError(f"{self.checkpoint.path}: {name} is missing")
        self._missing.append(name)
        return torch.empty(shape, dtype=dtype, device="meta")

    def _read(self, info: TensorInfo, part: tuple[slice, ...] = ()) -> Tensor:
        """`part` of a stored tensor, of which no more than that is read: files are mapped."""
        if self._on_read is not None:
            self._on_read()
        self._bar.update(_part_bytes(info, part))
        return self._reader.read(info)[part]

    def _is_quantized(self, name: str) -> bool:
        """Whether `{name}` is an EXL3 matrix; refuses a module that is stored both ways."""
        tensors = self.checkpoint.tensors
        if f"{name}.trellis" not in tensors:
            return False
        if f"{name}.weight" in tensors:
            raise FormatError(f"{name}: found both .trellis and .weight, required one of them")
        return True

    def _parts(self, name: str, cut: _Cut | None = _WHOLE, suffixes: Sequence[str] = SUFFIXES) -> dict[str, TensorInfo]:
        """What is stored of the EXL3 matrix `name`, by suffix; cut None: of another rank's."""
        found = {}
        for suffix in suffixes:
            info = self._claim(f"{name}.{suffix}", None if cut is None else cut.exl3(suffix))
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

    def _trellis(
        self,
        name: str,
        in_features: int,
        out_features: int,
        cut: _Cut = _WHOLE,
        shared: _SharedVector | None = None,
        *,
        parts: Mapping[str, TensorInfo] | None = None,
        meta: bool | None = None,
    ) -> TrellisWeight:
        """The checked matrix `name`, or `cut` out of it, from headers on the meta device, else on the CPU.

        parts: what `_parts` has found of it.
        """
        meta = self._meta if meta is None else meta
        tensors = {}
        if shared is not None:
            tensors[f"{name}.{shared.suffix}"] = shared.vector.to("meta") if meta else shared.vector
        for suffix, info in (self._parts(name, cut) if parts is None else parts).items():
            full = f"{name}.{suffix}"
            if suffix in _MARKERS:
                tensors[full] = self._marker(full)
                self._bar.update(0 if meta else info.nbytes)
            elif meta:
                tensors[full] = torch.empty(info.shape, dtype=info.torch_dtype, device="meta")[cut.exl3(suffix)]
            else:
                tensors[full] = self._read(info, cut.exl3(suffix))
        if cut.follows:
            tensors.pop(f"{name}.bias", None)
        return TrellisWeight.from_tensors(tensors, name, **cut.sizes(in_features, out_features))

    def _exl3_format(
        self,
        name: str,
        in_features: int,
        out_features: int,
        parts: Mapping[str, TensorInfo],
        shared: _SharedVector | None = None,
    ) -> tuple[int, Codebook]:
        """(2K, codebook) of a stored matrix, checked whole from headers and markers; what looks alike is checked once."""
        # equal markers are one tensor, see `_marker`
        markers = (id(self._marker(f"{name}.{suffix}")) for suffix in parts if suffix in _MARKERS)
        key = (
            in_features,
            out_features,
            shared is None,
            *((suffix, info.dtype, info.shape) for suffix, info in parts.items()),
            *markers,
        )
        if key not in self._formats:
            weight = self._trellis(name, in_features, out_features, shared=shared, parts=parts, meta=True)
            self._formats[key] = (weight.twice_bits, weight.codebook)
        return self._formats[key]

    def _exl3_experts(
        self,
        matrices: Sequence[str],
        in_features: int,
        out_features: int,
        stored: set[str],
        shared: str | None = None,
        *,
        mine: range | None = None,
        cut: _Cut = _WHOLE,
    ) -> ExpertProjection:
        """One projection of all experts, `matrices` in their order; shared: the name of the vector that all of them share.

        mine: which of the experts this rank has, default all; cut: what it has of each.
        """
        mine = range(len(matrices)) if mine is None else mine
        common = None if shared is None else self._shared_vector(shared, in_features, out_features)
        formats, parts = [], []
        for expert, matrix in enumerate(matrices):
            if f"{matrix}.bias" in self.checkpoint.tensors:
                raise FormatError(f"{matrix}.bias: found a bias, required none (experts have no bias)")
            # a missing expert is on the list of missing tensors already; any format stands in for it in the preflight
            found = (2, Codebook.MCG)
            if matrix in stored:
                parts.append(self._parts(matrix, cut if expert in mine else None))
                found = self._exl3_format(matrix, in_features, out_features, parts[-1], common)
            formats.append(found)
        local = cut.sizes(in_features, out_features)
        sizes = padded_size(local["in_features"]), padded_size(local["out_features"])
        kind = common.suffix if common is not None else None
        slabs = ExpertProjection.allocate(
            formats[mine.start : mine.stop], *sizes, device=self.device, shared_suh=kind == "suh", shared_svh=kind == "svh"
        )
        if not self._meta:
            local_parts, fill = parts[mine.start : mine.stop], self._uploader.fill
            for suffix, slab in (("trellis", slabs.words), ("suh", slabs.suh), ("svh", slabs.svh)):
                if common is not None and common.suffix == suffix:
                    fill(slab, [common.vector])
                elif cut == _WHOLE and all(suffix in each for each in local_parts):
                    fill(slab, map(self._read, _joined(each[suffix] for each in local_parts)))
                else:
                    fill(slab, (self._part(each, suffix, cut) for each in local_parts))
        return slabs

    def _part(self, parts: Mapping[str, TensorInfo], suffix: str, cut: _Cut) -> Tensor:
        """`cut` of a stored "trellis", "suh" or "svh", or of the legacy spelling; `check_scales` has seen the values."""
        if suffix in parts:
            return self._read(parts[suffix], cut.exl3(suffix))
        return expand_signs(self._read(parts[suffix[:2]], cut.exl3(suffix[:2])))

    def _shared_vector(self, name: str, in_features: int, out_features: int) -> _SharedVector:
        suffix = name.rpartition(".")[2]
        info = self._claim(name)
        if info is None:
            raise FormatError(f"{self.checkpoint.path}: {name} is missing")
        vector = torch.empty(info.shape, dtype=info.torch_dtype, device="meta") if self._meta else self._read(info)
        check_scales(name, vector, padded_size(in_features if suffix == "suh" else out_features))
        return _SharedVector(suffix, vector)

    def _plain_experts(
        self, name: str, projection: str, num_experts: int, in_features: int, out_features: int, mine: range, cut: _Cut
    ) -> Tensor:
        shape = (out_features, in_features)
        local = torch.empty(shape, device="meta")[cut.plain].shape
        slab = torch.empty(len(mine), *local, dtype=self.dtype, device=self.device)
        for expert in range(num_experts):
            full = f"{name}.{expert}.{projection}.weight"
            info = self._claim(full, cut.plain if expert in mine else None)
            if info is not None:
                _check_plain(full, info, shape)
                if not self._meta and expert in mine:
                    self._uploader.fill(slab[expert - mine.start], [self._read(info, cut.plain)])
        return slab


def _joined(infos: Iterable[TensorInfo]) -> Iterator[TensorInfo]:
    """The tensors' elements in order, those that lie back to back in a file as one tensor: `slice` writes them so."""
    run: TensorInfo | None = None
    for info in infos:
        if run is not None and (run.file, run.offset + run.nbytes, run.dtype) == (info.file, info.offset, info.dtype):
            run = run._replace(nbytes=run.nbytes + info.nbytes, shape=(math.prod(run.shape) + math.prod(info.shape),))
        else:
            if run is not None:
                yield run
            run = info
    if run is not None:
        yield run


def _check_finite(batch: Sequence[tuple[TensorInfo, bytes]], names: Mapping[TensorInfo, str]) -> None:
    """Refuses NaN and infinity in stored fp16 vectors: all of them together, and one by one to find the culprit."""

    def finite(raw: bytes) -> bool:
        # an exponent of all ones; ten times as fast as torch.isfinite on fp16
        return not raw or int(torch.frombuffer(bytearray(raw), dtype=torch.int16).bitwise_and(0x7C00).max()) < 0x7C00

    if not finite(b"".join(raw for _, raw in batch)):
        wrong = next(names[info] for info, raw in batch if not finite(raw))
        raise FormatError(f"{wrong}: found NaN or infinity, required finite values (rotation signs and scales)")


class _SharedVector(NamedTuple):
    """A rotation vector that all experts of a projection share: "suh" or "svh", and its values."""

    suffix: str
    vector: Tensor


def _check_plain(name: str, info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.dtype not in _PLAIN_DTYPES:
        raise FormatError(f"{name}: found {info.dtype}, required {', '.join(_PLAIN_DTYPES)} (an unquantized tensor)")
    if info.shape != shape:
        raise FormatError(f"{name}: found shape {list(info.shape)}, required {list(shape)} (the sizes in config.json)")
