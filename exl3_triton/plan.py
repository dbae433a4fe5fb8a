"""Plans of the mixture of experts: how calls are dispatched by their number of rows, and what scratch they need.

    plan = plan_moe(MoeSpec(6144, 512, 256, 8, rates=(3,), codebooks=(Codebook.MCG,)), max_tokens=4096)
    bound = plan.bind(torch.empty(plan.arena_bytes, dtype=torch.uint8, device="cuda"))
    y = bound(x, experts, topk_ids, topk_weights)

One plan and one arena serve all layers of a model; two models that run interleaved (target and draft) need an arena each.
A plan knows sizes and formats, no weights. The environment is read once, by `DispatchPolicy.from_env`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from . import tables
from .format import TWICE_BITS, Codebook, ExpertWeights, format_code, padded_size
from .ops._dispatch import use_triton
from .ops.moe import (
    BLOCKS_M,
    MAX_EXPERTS,
    MAX_TOP_K,
    Dims,
    Regime,
    Schedule,
    Scratch,
    arena_layout,
    call_planned,
    carve,
    check_call,
    expert_tensors,
    run_moe,
)
from .ops.tuning import Device, device_of, whole_parts

_PREFIX = "EXL3_TRITON_"
_UNPLANNED_ROWS = 4096  # rows at a time of calls without a plan
_DECODE_BLOCK = 8
DECODE_RANGE, *PREFILL_RANGES = tables.RANGES["moe"]
_PREFILL_BLOCKS = (16, 32, 64, 128)
_WAVE = 768  # programs of one wave of a large GPU: 6 on each of 128 multiprocessors


def _positive(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(_PREFIX + name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{_PREFIX}{name}={text!r}: must be a positive integer (blank or unset: {default or 'no bound'})")
    return int(text)


def _switch(environ: Mapping[str, str], name: str, default: bool) -> bool:
    text = environ.get(_PREFIX + name, "").strip().lower()
    if text not in ("", "0", "1", "true", "false"):
        raise ValueError(f"{_PREFIX}{name}={text!r}: must be 0, 1, true or false (blank or unset: {int(default)})")
    return default if not text else text in ("1", "true")


@dataclass(frozen=True)
class DispatchPolicy:
    """Windows and blocks by which a plan dispatches. Fields carry the name of their environment variable, EXL3_TRITON_*.

    min_m..max_m rows run the decode plan, in blocks of block_m rows an expert (None: the device's table, else 8); more rows
    run the prefill plan (unless `prefill` is off), in blocks of prefill_block_m (None: the device's table, else by the rows
    that an expert gets on average) and slices of at most prefill_capacity rows (None: the plan's max_tokens); everything else
    takes the reference path, prefill_chunk rows at a time. Raises ValueError naming the variable for illegal values.
    """

    min_m: int = 1
    max_m: int = 32
    block_m: int | None = None
    prefill: bool = True
    prefill_block_m: int | None = None
    prefill_capacity: int | None = None
    prefill_chunk: int = 128

    def __post_init__(self) -> None:
        for name in ("min_m", "max_m", "prefill_capacity", "prefill_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{_PREFIX}{name.upper()}={value}: must be a positive integer")
        for name in ("block_m", "prefill_block_m"):
            if (value := getattr(self, name)) is not None:
                _check_block(_PREFIX + name.upper(), value)
        if self.min_m > self.max_m:
            raise ValueError(f"{_PREFIX}MIN_M={self.min_m}, {_PREFIX}MAX_M={self.max_m}: the window must not be empty")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> DispatchPolicy:
        """The policy that the environment asks for (default: os.environ). A variable that is blank counts as unset."""
        environ = os.environ if environ is None else environ
        return cls(
            min_m=_positive(environ, "MIN_M", cls.min_m),
            max_m=_positive(environ, "MAX_M", cls.max_m),
            block_m=_positive(environ, "BLOCK_M", 0) or None,
            prefill=_switch(environ, "PREFILL", cls.prefill),
            prefill_block_m=_positive(environ, "PREFILL_BLOCK_M", 0) or None,
            prefill_capacity=_positive(environ, "PREFILL_CAPACITY", 0) or None,
            prefill_chunk=_positive(environ, "PREFILL_CHUNK", cls.prefill_chunk),
        )


@functools.cache
def default_policy() -> DispatchPolicy:
    """The environment's policy as it was when first asked for."""
    return DispatchPolicy.from_env()


def _check_block(name: str, value: int) -> None:
    if value not in BLOCKS_M:
        raise ValueError(f"{name}={value}: must be one of {', '.join(map(str, BLOCKS_M))} (rows of one expert in a block)")


@dataclass(frozen=True)
class MoeSpec:
    """What a plan knows of its layers: logical sizes, experts per token, and the rates and codebooks that may occur.

    rates: K of any expert and projection (1..8, 1.5, 2.5, 3.5); codebooks: `Codebook`s. joined: the last expert and the last
    route of a token belong to a shared expert, so tables and blocks of prefill go by the others. Raises ValueError for illegal
    values.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    rates: tuple[int | float, ...]
    codebooks: tuple[Codebook, ...]
    joined: bool = False

    def __post_init__(self) -> None:
        for name, most in (("hidden", 1 << 20), ("intermediate", 1 << 20), ("num_experts", MAX_EXPERTS), ("top_k", MAX_TOP_K)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"MoeSpec: {name}={getattr(self, name)}: must be in 1..{most}")
        object.__setattr__(self, "rates", tuple(self.rates))
        object.__setattr__(self, "codebooks", tuple(Codebook(codebook) for codebook in self.codebooks))
        wrong = [rate for rate in self.rates if 2 * rate not in TWICE_BITS]
        if wrong or not self.rates or not self.codebooks:
            found = f"rates={self.rates}, codebooks={self.codebooks}"
            raise ValueError(f"MoeSpec: {found}: required rates out of 1..8, 1.5, 2.5, 3.5, and at least one of both")

    @property
    def dims(self) -> Dims:
        """The sizes as stored, padded to 128."""
        return Dims(padded_size(self.hidden), padded_size(self.intermediate), self.num_experts, self.top_k)

    @property
    def routed(self) -> Dims:
        """`dims` without a joined expert."""
        return self.dims._replace(num_experts=self.num_experts - self.joined, top_k=self.top_k - self.joined)

    @property
    def formats(self) -> tuple[int, ...]:
        """The `format_code`s that may occur, ascending."""
        return tuple(sorted(format_code(int(2 * rate), int(codebook)) for rate in self.rates for codebook in self.codebooks))

    @classmethod
    def of(cls, experts: ExpertWeights, top_k: int) -> MoeSpec:
        """The spec of one layer's experts."""
        codes = sorted({code for projection in experts.projections for code in projection.formats})
        rates = sorted({code // 4 / 2 for code in codes})
        codebooks = tuple(Codebook(c) for c in sorted({code % 4 for code in codes}))
        sizes = (experts.hidden_size, experts.intermediate_size, experts.num_experts, top_k)
        return cls(*sizes, tuple(int(rate) if rate.is_integer() else rate for rate in rates), codebooks)


def _split(blocks: int, steps: int) -> int:
    """Parts of k for one token in the decode plan: up to _WAVE programs, none with fewer than 4 of the `steps` of 128 inputs.

    blocks: programs without a split. Depends on the layer's sizes alone: the number of rows must not change the order of a
    row's sums.
    """
    return whole_parts(min(_WAVE // blocks, steps // 4), steps)


@functools.cache
def _tuned(dims: Dims, format_code: int, device: Device) -> tuple[Regime, ...]:
    """The device's table for experts of these sizes, in ascending order of rows, the decode plan's first; may be empty."""
    if not device.name:
        return ()
    entries = tables.entries_for("moe", device.name, device.capability, device.processors)
    sizes = (dims.num_experts, dims.hidden, dims.intermediate, dims.top_k)
    problem = (*sizes, Codebook(format_code % 4).label, format_code // 4 / 2)
    found = sorted((key[-1], entry.config) for key, (entry, _) in entries.items() if key[:-1] == problem)
    return tuple(Regime(rows, sequential=0, half=int(rows > DECODE_RANGE), **config) for rows, config in found)


def _decode_regime(
    dims: Dims, rows: int, block_m: int | None, tuned: tuple[Regime, ...] = (), *, joined: bool = False
) -> Regime:
    """joined: the table's splits are for one route less, so they are cut by its share: a wave stays a wave."""
    hidden, intermediate = dims.hidden // 128, dims.intermediate // 128
    if block_m is None:
        for regime in tuned:
            if regime.rows == DECODE_RANGE and joined:
                wide, down = (
                    whole_parts(parts * (dims.top_k - 1) // dims.top_k, steps)
                    for parts, steps in ((regime.split, hidden), (regime.down_split, intermediate))
                )
                return regime._replace(rows=rows, split=wide, down_split=down)
            if regime.rows == DECODE_RANGE:
                return regime._replace(rows=rows)
        block_m = _DECODE_BLOCK
    wide, down = _split(dims.top_k * 2 * intermediate, hidden), _split(dims.top_k * hidden, intermediate)
    return Regime(rows, block_m, wide, down, sequential=0, half=0)


def _prefill_regimes(dims: Dims, capacity: int, block_m: int | None, tuned: tuple[Regime, ...] = ()) -> tuple[Regime, ...]:
    """One regime of blocks of `block_m`; or (None) a table's, else blocks of twice the rows that an expert gets on average.

    Below half of the capacity gate and up run at once: the arena holds the rotated rows of both.
    """
    if block_m is not None:
        return (Regime(capacity, block_m, 1, 1, sequential=1, half=1),)
    limits = [size * dims.num_experts // (2 * dims.top_k) for size in _PREFILL_BLOCKS[:-1]]
    wider = {regime.rows: regime for regime in tuned if regime.rows > DECODE_RANGE}
    ends = sorted({rows for rows in (*limits, *(PREFILL_RANGES if wider else ())) if rows < capacity} | {capacity})
    regimes: list[Regime] = []
    for rows in ends:
        size = next((size for size, limit in zip(_PREFILL_BLOCKS, limits) if rows <= limit), _PREFILL_BLOCKS[-1])
        regime = Regime(rows, size, 1, 1, sequential=int(2 * rows > capacity), half=1)
        named = next((end for end in PREFILL_RANGES if rows <= end), PREFILL_RANGES[-1])
        if named in wider:
            regime = wider[named]._replace(rows=rows, sequential=regime.sequential)
        if regimes and regimes[-1][1:] == regime[1:]:
            regimes.pop()
        regimes.append(regime)
    return tuple(regimes)


def default_schedule(dims: Dims, tokens: int, format_code: int, device: Device) -> Schedule:
    """The schedule of a call that brought no plan: the environment's windows, scratch for about its own number of rows."""
    policy = default_policy()
    tuned = _tuned(dims, format_code, device)
    rows = min(-(-tokens // 256) * 256, policy.prefill_capacity or _UNPLANNED_ROWS)
    decode = _decode_regime(dims, policy.max_m, policy.block_m, tuned) if tokens <= policy.max_m else None
    prefills = policy.prefill and tokens > policy.max_m
    prefill = _prefill_regimes(dims, rows, policy.prefill_block_m, tuned) if prefills else ()
    return Schedule(tokens, policy.min_m, policy.prefill_chunk, decode, prefill)


@dataclass(frozen=True)
class MoePlan:
    """How `ops.moe` runs for one `MoeSpec`: made by `plan_moe`, bound to scratch by `bind`."""

    spec: MoeSpec
    schedule: Schedule
    policy: DispatchPolicy
    block_m: int | None = None
    device: Device | None = None

    @property
    def max_tokens(self) -> int:
        """Most rows of a call; more raise ValueError."""
        return self.schedule.max_tokens

    @property
    def regimes(self) -> tuple[Regime, ...]:
        """The decode plan and those of prefill, as far as they exist, in ascending order of rows."""
        return self.schedule.regimes

    @property
    def arena_bytes(self) -> int:
        """Bytes of scratch: what the largest regime needs (they never run at once).

        With R = rows * top_k routes, H and I padded to 128, B = min(R, (R + E (block_m - 1)) // block_m) blocks, and every
        term rounded up to 256 bytes:

            decode (rows = max_m):              4 B block_m + 4 B + 4 B + 4 + 8 R + 4 R + 4 + 8 R I split + 2 R I
                                                + 4 R H down_split
            prefill (rows = prefill_capacity):  4 B block_m + 4 B + 4 B + 4 + 8 R + 4 R + R H / 32 + 8 R I + 2 R I + 2 R H

        GLM-5.2 at TP4 (H 6144, I 512, E 256, top-8): 0.134 MiB a row for prefill.
        """
        return max((arena_layout(self.spec.dims, regime)[1] for regime in self.regimes), default=0)

    def check(self, experts: ExpertWeights, top_k: int) -> None:
        """Raises ValueError unless the experts have the sizes, rates and codebooks that the plan was made for."""
        spec = self.spec
        found = (experts.hidden_size, experts.intermediate_size, experts.num_experts, top_k)
        required = (spec.hidden, spec.intermediate, spec.num_experts, spec.top_k)
        if found != required:
            raise ValueError(f"moe: (hidden, intermediate, experts, top_k) = {found}: the plan was made for {required}")
        planned = spec.formats
        for name, projection in (("gate", experts.gate), ("up", experts.up), ("down", experts.down)):
            for code in projection.formats:
                if code not in planned:
                    labels = [codebook.label for codebook in spec.codebooks]
                    raise ValueError(
                        f"moe: {name} holds K = {code // 4 / 2:g} with {Codebook(code % 4).label}: the plan was made for "
                        f"rates {spec.rates} and codebooks {labels}"
                    )

    def replan(self, max_tokens: int) -> MoePlan:
        """The plan for another capacity; its arena has another size. Raises RuntimeError during a CUDA graph capture."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"moe: replan({max_tokens}) during a CUDA graph capture: plan before, a graph keeps its arena")
        return plan_moe(self.spec, max_tokens=max_tokens, block_m=self.block_m, policy=self.policy, device=self.device)

    def new_arena(self, device: torch.device | str) -> Tensor:
        """Scratch of the right size, uninitialised."""
        return torch.empty(self.arena_bytes, dtype=torch.uint8, device=device)

    def bind(self, arena: Tensor) -> BoundMoe:
        """The plan over caller-owned scratch: uint8, contiguous, at least `arena_bytes`, 16-byte aligned, else ValueError."""
        return BoundMoe(self, arena)


class BoundMoe:
    """A plan with its scratch: callable, allocates nothing but its output, and not even that when `out` is given."""

    def __init__(self, plan: MoePlan, arena: Tensor):
        self.plan = plan
        self.arena = arena
        self.scratch: dict[Regime, Scratch] = {regime: carve(arena, plan.spec.dims, regime) for regime in plan.regimes}
        self._encoded = plan.schedule.encode()

    def __call__(
        self,
        x: Tensor,
        experts: ExpertWeights,
        topk_ids: Tensor,
        topk_weights: Tensor,
        out: Tensor | None = None,
        *,
        limit: float | None = None,
        expert_map: Tensor | None = None,
    ) -> Tensor:
        """`ops.moe` over this plan and arena: [T, H] in `out` (contiguous, any float dtype) or a new tensor of x's dtype."""
        check_call(x, experts, topk_ids, topk_weights, limit, expert_map)
        self.plan.check(experts, topk_ids.shape[1])
        if out is not None and (out.shape != x.shape or not out.is_contiguous() or out.device != x.device):
            found = f"{list(out.shape)}, strides {list(out.stride())}, on {out.device}"
            raise ValueError(f"moe: out is {found}: required contiguous {list(x.shape)} on {x.device}")
        if torch.compiler.is_compiling() or not use_triton(x):
            dtype = x.dtype if out is None else out.dtype
            result = call_planned(x, experts, topk_ids, topk_weights, self.arena, self._encoded, limit, expert_map, dtype)
            return result if out is None else out.copy_(result)
        if out is None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        gate, up, down = experts.projections
        run_moe(
            x, topk_ids, topk_weights.float(), expert_tensors(gate), expert_tensors(up), expert_tensors(down),
            (gate.formats, up.formats, down.formats), experts.intermediate_size, self.plan.schedule, self.scratch, limit,
            expert_map, out,
        )  # fmt: skip
        return out


def plan_moe(
    spec: MoeSpec,
    *,
    max_tokens: int,
    block_m: int | None = None,
    policy: DispatchPolicy | None = None,
    device: torch.device | str | Device | None = None,
) -> MoePlan:
    """A plan for calls of 1..max_tokens rows.

    device: where it will run: blocks, tiles and the split of k come from its table (`tables.py`) where that has the layer's
    sizes and highest format; by default from the rules, which look at sizes alone.

    policy: windows and blocks (default: the environment's, `DispatchPolicy.from_env`). block_m: a single regime with blocks of
    this many rows for all calls instead, of the decode kind where max_tokens <= policy.max_m, else of the prefill kind. Rows
    beyond the policy's prefill_capacity run as consecutive slices. Raises ValueError for an illegal block, max_tokens < 1, or
    a prefill_capacity above max_tokens.
    """
    policy = default_policy() if policy is None else policy
    if isinstance(device, (str, torch.device)):
        device = device_of(torch.device(device))
    tuned = () if device is None else _tuned(spec.routed, max(spec.formats), device)
    if max_tokens < 1:
        raise ValueError(f"plan_moe: max_tokens={max_tokens}: must be positive")
    capacity = max_tokens if policy.prefill_capacity is None else policy.prefill_capacity
    if capacity > max_tokens:
        raise ValueError(f"{_PREFIX}PREFILL_CAPACITY={capacity}: must not exceed the plan's max_tokens, {max_tokens}")
    decode: Regime | None = None
    prefill: tuple[Regime, ...] = ()
    if block_m is not None:
        _check_block("plan_moe: block_m", block_m)
        if max_tokens <= policy.max_m:
            decode = _decode_regime(spec.dims, max_tokens, block_m)
        else:
            prefill = _prefill_regimes(spec.routed, capacity, block_m)
    else:
        decode = _decode_regime(spec.dims, min(policy.max_m, max_tokens), policy.block_m, tuned, joined=spec.joined)
        if policy.prefill and max_tokens > policy.max_m:
            prefill = _prefill_regimes(spec.routed, capacity, policy.prefill_block_m, tuned)
    return MoePlan(spec, Schedule(max_tokens, policy.min_m, policy.prefill_chunk, decode, prefill), policy, block_m, device)


__all__ = ["BoundMoe", "DispatchPolicy", "MoePlan", "MoeSpec", "default_policy", "plan_moe"]
