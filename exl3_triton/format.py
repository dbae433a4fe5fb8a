"""The EXL3 storage format: what a quantized matrix consists of, and every rule that its tensors must keep.

A matrix W of shape (in, out) (rows are input features, y = x W) is stored as

    W = diag(suh) P W_rotated P diag(svh),        P = block-diagonal 128-point Hadamard / sqrt(128)

with `suh` [in] and `svh` [out] in fp16, and `W_rotated` as 16x16 tiles of 256 trellis states, K bits a weight:
`trellis` int16 [in/16, out/16, 16 K]. A scalar marker names the codebook: `.mcg`, `.mul1`, or none for 3INST. Sizes are
padded with zeros to multiples of 128. `docs/format.md` has the bit stream, the tile permutation and the codebooks.

The tensors decide everything; configuration files are hints. The format is ExLlamaV3's (turboderp-org/exllamav3).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch
from torch import Tensor

HADAMARD = 128  # width of a rotation block: every stored size is a multiple of it
TILE = 16  # a tile is TILE x TILE weights
TWICE_BITS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)  # 2K of every rate; the odd ones (K = 1.5, 2.5, 3.5) exist for MUL1 only
SUFFIXES = ("trellis", "suh", "svh", "su", "sv", "mcg", "mul1", "bias")


class FormatError(ValueError):
    """A checkpoint or a quantized matrix breaks a rule of the format; the message names tensor, found and required."""


class Codebook(enum.IntEnum):
    """How a 16-bit trellis state becomes an fp16 value; the stored marker selects it."""

    THREE_INST = 0
    MCG = 1
    MUL1 = 2

    @property
    def label(self) -> str:
        """Name in files and options: "3inst", "mcg" or "mul1"."""
        return ("3inst", "mcg", "mul1")[self]

    @property
    def marker(self) -> int | None:
        """The 32 bits that the marker tensor must hold, as an unsigned integer; None for 3INST, which has no marker."""
        return (None, 0xCBAC1FED, 0x83DCD12D)[self]


def padded_size(features: int) -> int:
    """`features` rounded up to a multiple of 128, the width of a rotation block."""
    return -(-features // HADAMARD) * HADAMARD


def canonical_name(name: str) -> str:
    """A tensor or module name without its leading `model.` and `language_model.` segments, in any number and order."""
    head, dot, rest = name.partition(".")
    while dot and head in ("model", "language_model"):
        name = rest
        head, dot, rest = name.partition(".")
    return name


def _fail(name: str, found: object, required: str, rule: str) -> NoReturn:
    raise FormatError(f"{name}: found {found}, required {required} ({rule})")


def check_marker(name: str, marker: Tensor, codebook: Codebook) -> None:
    """Refuse a codebook marker that is not one element holding exactly the codebook's 32 bits, in any 4- or 8-byte spelling.

    The value of a marker on the meta device (headers only) is not checked. Raises FormatError.
    """
    if marker.numel() != 1:
        _fail(name, f"shape {list(marker.shape)}", "a scalar or one element", "codebook marker")
    if marker.dtype not in (torch.int32, torch.uint32, torch.int64, torch.uint64, torch.float32):
        _fail(name, marker.dtype, "a 32-bit pattern (int32)", "codebook marker")
    if marker.device.type == "meta":
        return
    flat = marker.detach().reshape(1).cpu()
    bits = int(flat.view(torch.int32).item() if flat.dtype == torch.float32 else flat.item())
    if -(1 << 31) <= bits < 0:
        bits += 1 << 32
    if bits != codebook.marker:
        _fail(name, hex(bits), hex(codebook.marker or 0), f"marker of codebook {codebook.label}")


def check_trellis(name: str, trellis: Tensor, codebook: Codebook) -> int:
    """2K of a trellis tensor after checking dtype, rank, rate and sizes. Raises FormatError naming `name`."""
    if trellis.dtype != torch.int16:
        _fail(name, trellis.dtype, "torch.int16", "a trellis is stored as int16")
    if trellis.dim() != 3:
        _fail(name, f"shape {list(trellis.shape)}", "[in/16, out/16, 16*K]", "a trellis has rank 3")
    rows, columns, words = trellis.shape
    if words % 8 or words // 8 not in TWICE_BITS:
        _fail(name, f"last dimension {words} (K = {words / 16:g})", "16*K with K in 1..8, or 1.5, 2.5, 3.5", "rate")
    if words % 16 and codebook is not Codebook.MUL1:
        _fail(name, f"K = {words / 16:g} with codebook {codebook.label}", "codebook mul1", "half rates exist for MUL1 only")
    for axis, tiles in (("in", rows), ("out", columns)):
        if tiles == 0 or tiles * TILE % HADAMARD:
            _fail(name, f"{axis} = {tiles * TILE}", "a positive multiple of 128", "128-wide rotation blocks, sizes are padded")
    return words // 8


def check_scales(name: str, scales: Tensor, features: int) -> None:
    """Refuse a suh/svh vector of another dtype or length than fp16 [features], or with NaN or infinity in it."""
    if scales.dtype != torch.float16:
        _fail(name, scales.dtype, "torch.float16", "rotation signs and scales")
    if tuple(scales.shape) != (features,):
        _fail(name, f"shape {list(scales.shape)}", f"[{features}]", "one value a channel of the trellis")
    if scales.device.type != "meta" and not bool(torch.isfinite(scales).all()):
        _fail(name, "NaN or infinity", "finite values", "rotation signs and scales")


def check_logical(name: str, axis: str, logical: int, padded: int) -> None:
    """Refuse a logical size that the stored, padded size cannot belong to."""
    if logical < 1 or padded_size(logical) != padded:
        _fail(name, f"{axis} = {padded} for a logical size of {logical}", f"{padded_size(max(logical, 1))}", "padded to 128")


def expand_signs(packed: Tensor) -> Tensor:
    """Legacy packed signs int16 [n/16] -> fp16 [n]: bit i of word j belongs to channel 16 j + i; set means -1, clear +1."""
    bits = packed.view(torch.int16).to(torch.int32).unsqueeze(-1) >> torch.arange(16, dtype=torch.int32, device=packed.device)
    return (1 - 2 * (bits & 1)).to(torch.float16).reshape(-1)


def fits_half(suh: Tensor, svh: Tensor) -> bool:
    """Whether fp16 holds the matrix in the original basis as well as it holds the stored values; reads suh and svh.

    In the original basis a weight is of the size of |suh_k svh_n|, and at most 1024 times that (stored values are below 8, a
    rotation of 128 of them keeps their norm). Asked for: at most 32 |suh svh|, so that nothing overflows, and in the root mean
    square of every row and column that is not zero at least 2^-14, the smallest normal number, so that the fixed step of
    subnormals (2^-24) adds no more than the relative rounding of normal numbers. Tensors on the meta device: False.
    """
    if suh.is_meta or svh.is_meta:
        return False
    scales = (suh.float().abs(), svh.float().abs())
    sizes = [scale.square().mean().sqrt() for scale in scales]
    least = [scale.masked_fill(scale == 0, torch.inf).min() for scale in scales]
    small = torch.minimum(least[0] * sizes[1], least[1] * sizes[0]) >= 2**-14
    return bool(small & (scales[0].max() * scales[1].max() <= 32))


@dataclass(frozen=True, eq=False)
class TrellisWeight:
    """One quantized matrix (in, out), y = x W.

    trellis: int16 [in_padded/16, out_padded/16, 16*K]; suh: fp16 [in_padded]; svh: fp16 [out_padded];
    bias: fp16 [out_padded] or None; in_features, out_features: logical sizes (the stored ones are padded to 128).
    foldable: `fits_half` of the scales; `from_tensors` and `Exl3Linear` find it out, else None, not known, counts as no.
    Raises FormatError on construction when a tensor breaks a rule; the data of suh and svh is checked by `from_tensors` only.
    """

    trellis: Tensor
    suh: Tensor
    svh: Tensor
    codebook: Codebook
    bias: Tensor | None = None
    in_features: int = 0
    out_features: int = 0
    foldable: bool | None = None

    def __post_init__(self) -> None:
        check_trellis("trellis", self.trellis, self.codebook)
        for axis, padded in (("in_features", self.padded_in), ("out_features", self.padded_out)):
            if getattr(self, axis) == 0:
                object.__setattr__(self, axis, padded)
            check_logical("trellis", axis, getattr(self, axis), padded)
        for name, vector, features in (("suh", self.suh, self.padded_in), ("svh", self.svh, self.padded_out)):
            if vector.dtype != torch.float16 or tuple(vector.shape) != (features,):
                _fail(name, f"{vector.dtype} {list(vector.shape)}", f"torch.float16 [{features}]", "one value a channel")

    @property
    def twice_bits(self) -> int:
        """2K, an integer also for the half rates."""
        return self.trellis.shape[2] // 8

    @property
    def bits(self) -> int | float:
        """K, bits a weight: 1..8, or 1.5, 2.5, 3.5; from the tensor, never from a configuration."""
        return self.twice_bits // 2 if self.twice_bits % 2 == 0 else self.twice_bits / 2

    @property
    def padded_in(self) -> int:
        """Stored number of input features, a multiple of 128."""
        return self.trellis.shape[0] * TILE

    @property
    def padded_out(self) -> int:
        """Stored number of output features, a multiple of 128."""
        return self.trellis.shape[1] * TILE

    @property
    def device(self) -> torch.device:
        return self.trellis.device

    def to(self, device: torch.device | str) -> TrellisWeight:
        """The same matrix on another device."""
        bias = None if self.bias is None else self.bias.to(device)
        return replace(self, trellis=self.trellis.to(device), suh=self.suh.to(device), svh=self.svh.to(device), bias=bias)

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], prefix: str, *, in_features: int | None = None, out_features: int | None = None
    ) -> TrellisWeight:
        """Collect and check one matrix out of a checkpoint's tensors.

        tensors: name -> tensor, holding `{prefix}.trellis`, `.suh` or `.su`, `.svh` or `.sv`, and optionally `.mcg` or
        `.mul1` and `.bias`. in_features, out_features: logical sizes, default the stored ones. Tensors on the meta device
        are checked by dtype and shape alone. Raises FormatError naming the tensor, what was found and what is required.
        """
        dot = f"{prefix}." if prefix else ""

        def get(suffix: str) -> Tensor | None:
            return tensors.get(dot + suffix)

        trellis = get("trellis")
        if trellis is None:
            raise FormatError(f"{dot}trellis: missing (an EXL3 matrix is .trellis with .suh/.su and .svh/.sv)")
        codebook = Codebook.THREE_INST
        if get("mcg") is not None and get("mul1") is not None:
            _fail(f"{dot}mcg", "both .mcg and .mul1", "at most one marker", "the marker selects the codebook")
        for candidate in (Codebook.MCG, Codebook.MUL1):
            marker = get(candidate.label)
            if marker is not None:
                check_marker(dot + candidate.label, marker, candidate)
                codebook = candidate
        check_trellis(f"{dot}trellis", trellis, codebook)
        padded_in, padded_out = trellis.shape[0] * TILE, trellis.shape[1] * TILE
        scales = {}
        for new, legacy, features in (("suh", "su", padded_in), ("svh", "sv", padded_out)):
            vector, packed = get(new), get(legacy)
            if vector is not None and packed is not None:
                _fail(f"{dot}{new}", f"both .{new} and .{legacy}", "one of them", "packed signs are the legacy spelling")
            if packed is not None:
                if packed.dtype not in (torch.int16, torch.uint16) or tuple(packed.shape) != (features // 16,):
                    found = f"{packed.dtype} {list(packed.shape)}"
                    _fail(f"{dot}{legacy}", found, f"torch.int16 [{features // 16}]", "16 signs a word")
                vector = expand_signs(packed)
            if vector is None:
                raise FormatError(f"{dot}{new}: missing (an EXL3 matrix needs .{new} or the legacy .{legacy})")
            check_scales(f"{dot}{new}", vector, features)
            scales[new] = vector.contiguous()
        bias = get("bias")
        if bias is not None:
            if not bias.dtype.is_floating_point or tuple(bias.shape) != (padded_out,):
                found = f"{bias.dtype} {list(bias.shape)}"
                _fail(f"{dot}bias", found, f"torch.float16 [{padded_out}]", "one value a stored output channel")
            bias = bias.to(torch.float16)
        check_logical(f"{dot}trellis", "in", padded_in if in_features is None else in_features, padded_in)
        check_logical(f"{dot}trellis", "out", padded_out if out_features is None else out_features, padded_out)
        sizes = (in_features or padded_in, out_features or padded_out)
        foldable = fits_half(scales["suh"], scales["svh"])
        return cls(trellis.contiguous(), scales["suh"], scales["svh"], codebook, bias, *sizes, foldable)


def format_code(twice_bits: int, codebook: int) -> int:
    """Rate and codebook as one small integer, the compile-time key of a decode function: 4 * 2K + codebook."""
    return 4 * twice_bits + codebook


@dataclass(frozen=True, eq=False)
class ExpertProjection:
    """One projection (gate, up or down) of all experts of a layer, in one slab whatever rates the experts have.

    words: int16 [sum of the experts' trellis sizes], the trellises back to back; layout: per expert (offset into `words`,
    2K, codebook); table: the layout as int64 [E, 3] on the weights' device, for the kernels; suh: fp16 [E, in_padded] or
    [1, in_padded] where all experts share it; svh: fp16 [E or 1, out_padded]; formats: the distinct (rate, codebook) pairs
    present, as sorted `format_code`s.
    """

    words: Tensor
    layout: tuple[tuple[int, int, int], ...]
    table: Tensor
    suh: Tensor
    svh: Tensor
    formats: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        codes = {format_code(twice_bits, codebook) for _, twice_bits, codebook in self.layout}
        object.__setattr__(self, "formats", tuple(sorted(codes)))

    @property
    def num_experts(self) -> int:
        return len(self.layout)

    @property
    def padded_in(self) -> int:
        return self.suh.shape[1]

    @property
    def padded_out(self) -> int:
        return self.svh.shape[1]

    def expert(self, index: int) -> TrellisWeight:
        """Expert `index` as a matrix whose tensors alias the slab."""
        offset, twice_bits, codebook = self.layout[index]
        rows, columns = self.padded_in // TILE, self.padded_out // TILE
        trellis = self.words.narrow(0, offset, rows * columns * 8 * twice_bits).view(rows, columns, 8 * twice_bits)
        suh = self.suh[index if self.suh.shape[0] > 1 else 0]
        svh = self.svh[index if self.svh.shape[0] > 1 else 0]
        return TrellisWeight(trellis, suh, svh, Codebook(codebook))

    def to(self, device: torch.device | str) -> ExpertProjection:
        moved = {name: getattr(self, name).to(device) for name in ("words", "table", "suh", "svh")}
        return replace(self, **moved)

    @classmethod
    def allocate(
        cls,
        formats: Sequence[tuple[int, int]],
        padded_in: int,
        padded_out: int,
        *,
        device: torch.device | str,
        shared_suh: bool = False,
        shared_svh: bool = False,
    ) -> ExpertProjection:
        """Unwritten slabs for experts of the given (2K, codebook) pairs; a loader copies into `.expert(e)`'s tensors."""
        tiles = padded_in // TILE * (padded_out // TILE)
        layout, offset = [], 0
        for twice_bits, codebook in formats:
            layout.append((offset, twice_bits, int(codebook)))
            offset += tiles * 8 * twice_bits
        experts = len(layout)
        return cls(
            words=torch.empty(offset, dtype=torch.int16, device=device),
            layout=tuple(layout),
            table=torch.tensor(layout, dtype=torch.int64).to(device),
            suh=torch.empty(1 if shared_suh else experts, padded_in, dtype=torch.float16, device=device),
            svh=torch.empty(1 if shared_svh else experts, padded_out, dtype=torch.float16, device=device),
        )

    @classmethod
    def from_weights(cls, weights: Sequence[TrellisWeight]) -> ExpertProjection:
        """The experts' matrices as one projection; aliases their memory where it already lies back to back, else copies."""
        first = weights[0]
        layout, offset = [], 0
        for index, weight in enumerate(weights):
            if (weight.padded_in, weight.padded_out) != (first.padded_in, first.padded_out):
                found = f"{weight.padded_in} x {weight.padded_out}"
                _fail(f"expert {index}", found, f"{first.padded_in} x {first.padded_out}", "experts of a layer have one size")
            if weight.bias is not None:
                _fail(f"expert {index} bias", "a bias", "none", "experts have no bias")
            layout.append((offset, weight.twice_bits, int(weight.codebook)))
            offset += weight.trellis.numel()
        return cls(
            words=_one_slab([weight.trellis for weight in weights]).reshape(-1),
            layout=tuple(layout),
            table=torch.tensor(layout, dtype=torch.int64).to(first.device),
            suh=_one_slab([weight.suh for weight in weights]).view(len(weights), -1),
            svh=_one_slab([weight.svh for weight in weights]).view(len(weights), -1),
        )


def _one_slab(parts: Sequence[Tensor]) -> Tensor:
    """The parts as one flat tensor: a view where they lie back to back in one storage, else a copy."""
    first = parts[0]
    start = first.storage_offset()
    position = start
    for part in parts:
        same_storage = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if first.device.type == "meta" or not same_storage or part.storage_offset() != position or not part.is_contiguous():
            return torch.cat([part.reshape(-1) for part in parts])
        position += part.numel()
    return first.as_strided((position - start,), (1,), start)


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The routed experts of one MoE layer: y = down(silu(gate(x)) * up(x)).

    Rates and codebooks are free per expert and projection. hidden_size, intermediate_size: logical widths; the stored ones
    are padded to 128.
    """

    gate: ExpertProjection
    up: ExpertProjection
    down: ExpertProjection
    hidden_size: int = 0
    intermediate_size: int = 0

    def __post_init__(self) -> None:
        gate, up, down = self.gate, self.up, self.down
        if not gate.num_experts == up.num_experts == down.num_experts:
            found = f"{gate.num_experts}, {up.num_experts}, {down.num_experts} of gate, up, down"
            _fail("experts", found, "equal numbers", "every expert has all three")
        found = ", ".join(f"{name} {p.padded_in}x{p.padded_out}" for name, p in (("gate", gate), ("up", up), ("down", down)))
        if (gate.padded_in, gate.padded_out) != (up.padded_in, up.padded_out):
            _fail("experts", found, "gate and up of one size", "gated MLP")
        if (down.padded_in, down.padded_out) != (gate.padded_out, gate.padded_in):
            _fail("experts", found, "down the transpose of gate", "gated MLP")
        for name, padded in (("hidden_size", gate.padded_in), ("intermediate_size", gate.padded_out)):
            if getattr(self, name) == 0:
                object.__setattr__(self, name, padded)
            check_logical("experts", name, getattr(self, name), padded)

    @property
    def num_experts(self) -> int:
        return self.gate.num_experts

    @property
    def projections(self) -> tuple[ExpertProjection, ExpertProjection, ExpertProjection]:
        """(gate, up, down)."""
        return self.gate, self.up, self.down

    @property
    def device(self) -> torch.device:
        return self.gate.words.device

    def to(self, device: torch.device | str) -> ExpertWeights:
        """The same experts on another device."""
        return replace(self, gate=self.gate.to(device), up=self.up.to(device), down=self.down.to(device))

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Tensor],
        prefix: str,
        *,
        num_experts: int,
        hidden_size: int | None = None,
        intermediate_size: int | None = None,
        names: Iterable[str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> ExpertWeights:
        """Collect and check `{prefix}.{e}.{gate,up,down}_proj.*` for e in 0..num_experts-1.

        Raises FormatError naming the first missing or wrong tensor; see `TrellisWeight.from_tensors`.
        """
        if num_experts < 1:
            raise FormatError(f"{prefix}: found {num_experts} experts, required at least 1")
        projections = []
        for name in names:
            sizes = (intermediate_size, hidden_size) if name == "down_proj" else (hidden_size, intermediate_size)
            weights = [
                TrellisWeight.from_tensors(tensors, f"{prefix}.{e}.{name}", in_features=sizes[0], out_features=sizes[1])
                for e in range(num_experts)
            ]
            projections.append(ExpertProjection.from_weights(weights))
        gate, up, down = projections
        return cls(gate, up, down, hidden_size or 0, intermediate_size or 0)
