"""Rank-sliced checkpoints ("TR3"): routed experts stored as one EXL3 matrix for each tensor-parallel rank.

    model.layers.{L}.mlp.experts.{E}.{gate,up,down}_proj.rank{r}.{trellis,suh,svh,mcg|mul1}

Gate and up are cut by output, down by input; a rank's slices are ordinary EXL3 matrices with rotations of their own, which can
be neither joined nor cut again. `hybrid_tr3_tail` in `config.json` describes the set. Everything else in the checkpoint is
unquantized or plain EXL3. The layout is brandonmusic's GLM-5.2-EXL3-TR3; `docs/format.md` has it in full.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ..format import TWICE_BITS, Codebook, FormatError
from .checkpoint import Checkpoint, TensorInfo, listing, read_json_object

SECTION = "hybrid_tr3_tail"
FORMAT = "exl3-trellis"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
SHARED_VECTOR = {"gate_proj": "suh", "up_proj": "suh", "down_proj": "svh"}  # of width hidden: one a layer in shared_h_v1
TENSOR_SCHEMA = "model.layers.{L}.mlp.experts.{E}.{gate_proj|up_proj|down_proj}.rank{r}.{trellis|suh|svh|%s}"
SHARED_SCHEMA = "model.layers.{L}.mlp.experts.shared_h.{proj}.rank{r}.{suh|svh}"
_REQUIRED = ("bits", "codebook", "experts_per_layer", "moe_layers", "tensor_schema", "tp")
_CODEBOOKS = {codebook.label: codebook for codebook in Codebook if codebook.marker is not None}


@dataclass(frozen=True)
class RankSliced:
    """What `hybrid_tr3_tail` declares, checked. Rates are 2K, as everywhere.

    layers: those whose experts are sliced, contiguous; allowed: the rates that may occur; declared: layer -> rate of each
    expert where the configuration says so, `allowed` has one rate where it is uniform.
    """

    tp: int
    layers: range
    num_experts: int
    codebook: Codebook
    shared_h: bool
    allowed: frozenset[int]
    declared: Mapping[int, tuple[int, ...]]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> RankSliced | None:
        """The description of a rank-sliced checkpoint whose set of tensors is complete, None for any other checkpoint.

        From `describe` and headers: for every rank, not one's own alone, all tensors must be there, be alike on all ranks, and
        have the declared rate. Raises FormatError naming key or tensor.
        """
        found = cls.describe(checkpoint)
        if found is not None:
            found._check_tensors(checkpoint)
        return found

    @classmethod
    def describe(cls, checkpoint: Checkpoint) -> RankSliced | None:
        """What `config.json`, and `tier_bitmap.json` where `bits` is "mixed", say; FormatError naming the key."""
        section = checkpoint.rank_sliced_config
        if section is None:
            if checkpoint.ranks:
                raise FormatError(
                    f"{checkpoint.path}: config.json has no {SECTION}, but tensors are named for ranks "
                    f"{', '.join(map(str, checkpoint.ranks))}; required: the section that describes them"
                )
            return None
        return _parse(checkpoint, section)

    @property
    def layout(self) -> str:
        """The name of `rotation_layout`."""
        return "shared_h_v1" if self.shared_h else "per_expert_v1"

    def local(self, rank: int, size: int) -> tuple[int, ...]:
        """The stored ranks whose slices process `rank` of `size` holds: r with r * size // tp == rank.

        Raises FormatError where the processes do not divide `tp`: slices cannot be cut again.
        """
        if self.tp % size:
            raise FormatError(
                f"tp: found {size} processes, required a divisor of {self.tp} (the routed experts are stored in slices "
                f"for tp = {self.tp}, which cannot be cut again)"
            )
        return tuple(stored for stored in range(self.tp) if stored * size // self.tp == rank)

    def suffixes(self, projection: str) -> tuple[str, ...]:
        """The suffixes stored under every expert's matrix of this projection."""
        vectors = [vector for vector in ("suh", "svh") if not (self.shared_h and vector == SHARED_VECTOR[projection])]
        return ("trellis", *vectors, self.codebook.label)

    def shared_name(self, layer_experts: str, projection: str, rank: int) -> str | None:
        """The full name of the vector that all experts below `layer_experts` share, None where each has its own."""
        return f"{layer_experts}.shared_h.{projection}.rank{rank}.{SHARED_VECTOR[projection]}" if self.shared_h else None

    def names(self, layer: int) -> Iterator[str]:
        """Every tensor that the layer's set consists of, by canonical name, all ranks."""
        experts = f"layers.{layer}.mlp.experts"
        for projection in PROJECTIONS:
            suffixes = self.suffixes(projection)
            for rank in range(self.tp):
                if self.shared_h:
                    yield f"{experts}.shared_h.{projection}.rank{rank}.{SHARED_VECTOR[projection]}"
                for expert in range(self.num_experts):
                    matrix = f"{experts}.{expert}.{projection}.rank{rank}."
                    for suffix in suffixes:
                        yield matrix + suffix

    def missing(self, tensors: Mapping[str, TensorInfo]) -> list[str]:
        """The tensors of the set that are not stored."""
        return [name for layer in self.layers for name in self.names(layer) if name not in tensors]

    def _check_tensors(self, checkpoint: Checkpoint) -> None:
        tensors = checkpoint.tensors
        missing = self.missing(tensors)
        stored = [name for name in tensors if ".rank" in name and ".mlp.experts." in name]
        expected = sum(1 for layer in self.layers for _ in self.names(layer))
        parts = [f"{len(missing)} of {expected} are missing: {listing(missing)}"] if missing else []
        if len(stored) + len(missing) != expected:
            known = {name for layer in self.layers for name in self.names(layer)}
            unexpected = [name for name in stored if name not in known]
            parts.append(f"{len(unexpected)} are unexpected: {listing(unexpected)}")
        if parts:
            raise FormatError(
                f"{checkpoint.path}: the tensors of the rank-sliced experts (tp = {self.tp}, layers {self.layers[0]}.."
                f"{self.layers[-1]}, {self.num_experts} experts, {self.codebook.label}) are not a set; {'; '.join(parts)}"
            )
        for layer in self.layers:
            self._check_layer(layer, tensors)

    def _check_layer(self, layer: int, tensors: Mapping[str, TensorInfo]) -> None:
        """Ranks alike, rates as declared; sizes against the model's are checked by whoever knows the model."""
        experts = f"layers.{layer}.mlp.experts"
        for name in self.names(layer):
            if ".rank0." in name:
                first = tensors[name]
                if name.endswith(".trellis"):
                    expert = int(name.split(".")[4])
                    self._check_rate(name, first, layer, expert)
                for rank in range(1, self.tp):
                    other = tensors[name.replace(".rank0.", f".rank{rank}.")]
                    if (other.dtype, other.shape) != (first.dtype, first.shape):
                        found, required = (f"{info.dtype} {list(info.shape)}" for info in (other, first))
                        full = name.replace(".rank0.", f".rank{rank}.")
                        _fail(full, found, required, f"slices are alike on all ranks, rank 0 of {experts}")

    def _check_rate(self, name: str, info: TensorInfo, layer: int, expert: int) -> None:
        if len(info.shape) != 3:
            _fail(name, f"shape {list(info.shape)}", "[in/16, out/16, 16*K]", "a trellis has rank 3")
        twice_bits = info.shape[2] / 8
        declared = self.declared.get(layer)
        allowed = {declared[expert]} if declared is not None else self.allowed
        if twice_bits not in allowed:
            required = " or ".join(f"{rate / 2:g}" for rate in sorted(allowed))
            found = f"K = {twice_bits / 2:g} (last dimension {info.shape[2]})"
            _fail(name, found, f"K = {required}", f"config.json: {SECTION} declares it")


def _fail(name: str, found: object, required: str, rule: str) -> NoReturn:
    raise FormatError(f"{name}: found {found}, required {required} ({rule})")


def _key(key: str) -> str:
    return f"config.json: {SECTION}.{key}"


def _is_count(value: Any, least: int = 1) -> bool:
    return type(value) is int and value >= least


def _parse(checkpoint: Checkpoint, section: Mapping[str, Any]) -> RankSliced:
    if section.get("format") != FORMAT:
        _fail(_key("format"), repr(section.get("format")), repr(FORMAT), "the only layout of rank-sliced experts known")
    absent = [key for key in _REQUIRED if section.get(key) is None]
    if absent:
        _fail(f"config.json: {SECTION}", f"no {', '.join(absent)}", ", ".join(_REQUIRED), "what describes the slices")
    codebook = _CODEBOOKS.get(section["codebook"]) if isinstance(section["codebook"], str) else None
    if codebook is None:
        _fail(_key("codebook"), repr(section["codebook"]), " or ".join(map(repr, _CODEBOOKS)), "a codebook with a marker")
    schema = TENSOR_SCHEMA % codebook.label
    if section["tensor_schema"] != schema:
        _fail(_key("tensor_schema"), repr(section["tensor_schema"]), repr(schema), "the only naming of slices known")
    for key in ("tp", "experts_per_layer"):
        if not _is_count(section[key]):
            _fail(_key(key), repr(section[key]), "a positive integer", "the size of the set")
    tail = section.get("tr3_tail_per_layer", section["experts_per_layer"])
    if tail != section["experts_per_layer"]:
        _fail(_key("tr3_tail_per_layer"), repr(tail), repr(section["experts_per_layer"]), "every expert is EXL3, no hybrids")
    span = section["moe_layers"]
    if not isinstance(span, list) or len(span) != 2 or not all(_is_count(each, 0) for each in span) or span[0] > span[1]:
        _fail(_key("moe_layers"), repr(span), "[first, last] with 0 <= first <= last", "the layers with sliced experts")
    layout = section.get("rotation_layout", "per_expert_v1")
    if layout not in ("per_expert_v1", "shared_h_v1"):
        _fail(_key("rotation_layout"), repr(layout), "'per_expert_v1' or 'shared_h_v1'", "how rotation vectors are stored")
    shared_schema = section.get("shared_h_tensor_schema")
    required_schema = SHARED_SCHEMA if layout == "shared_h_v1" else None
    if shared_schema != required_schema:
        _fail(_key("shared_h_tensor_schema"), repr(shared_schema), repr(required_schema), f"rotation_layout is {layout}")
    layers = range(span[0], span[1] + 1)
    allowed, declared = _rates(checkpoint, section, layers, codebook)
    sizes = section["tp"], layers, section["experts_per_layer"]
    return RankSliced(*sizes, codebook, layout == "shared_h_v1", allowed, declared)


def _twice_bits(where: str, value: Any, codebook: Codebook) -> int:
    """2K of a declared rate; a bool is no number."""
    number = type(value) in (int, float) and math.isfinite(value)
    twice = 2 * value if number else 0
    if twice not in TWICE_BITS or (twice % 2 and codebook is not Codebook.MUL1):
        _fail(where, repr(value), "K in 1..8, or with mul1 1.5, 2.5, 3.5", "bits a weight")
    return int(twice)


def _rates(
    checkpoint: Checkpoint, section: Mapping[str, Any], layers: range, codebook: Codebook
) -> tuple[frozenset[int], dict[int, tuple[int, ...]]]:
    """The rates that may occur, and by layer what each expert has where `bits_per_expert` says it."""
    bits = section["bits"]
    if bits not in ("mixed", "mixed_tensor"):
        return frozenset((_twice_bits(_key("bits"), bits, codebook),)), {}
    values = section.get("k_values")
    if not isinstance(values, list) or not values:
        _fail(_key("k_values"), repr(values), "a list of the rates that occur", f"bits is {bits!r}")
    allowed = frozenset(_twice_bits(_key("k_values"), value, codebook) for value in values)
    if bits == "mixed_tensor":  # every matrix has its own rate: the tensors say which
        return allowed, {}
    reference = section.get("bits_per_expert")
    file, colon, field = reference.partition(":") if isinstance(reference, str) else ("", "", "")
    if not (file.endswith(".json") and colon and field) or any(separator in file for separator in "/\\\0"):
        _fail(_key("bits_per_expert"), repr(reference), "'FILE.json:FIELD', FILE in the directory", "bits is 'mixed'")
    table = read_json_object(checkpoint.path / file)
    declared = {}
    for layer in layers:
        record = table.get(str(layer))
        where = f"{file}: layer {layer}"
        if not isinstance(record, dict):
            _fail(where, repr(record), f"an object with {field!r}", "each layer of moe_layers has one")
        experts = section["experts_per_layer"]
        rates = record.get(field)
        if rates is None and record.get("tail_tr3") == list(range(experts)):
            rates = [3] * experts  # how overlays spell a layer of 3 bits throughout
        if not isinstance(rates, list) or len(rates) != experts:
            found = f"{len(rates)} entries" if isinstance(rates, list) else repr(rates)
            _fail(f"{where}: {field}", found, f"a list of {experts} rates", "one an expert")
        declared[layer] = tuple(_twice_bits(f"{where}: {field}", rate, codebook) for rate in rates)
        undeclared = set(declared[layer]) - allowed
        if undeclared:
            found = ", ".join(f"{rate / 2:g}" for rate in sorted(undeclared))
            _fail(f"{where}: {field}", f"K = {found}", f"one of k_values, {values}", "only declared rates occur")
    return allowed, declared
