"""The search space: launch parameters that may suit a problem, pruned by what a multiprocessor has."""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass
from typing import Any

from exl3_triton.ops.attention_tuning import ScoreTile
from exl3_triton.ops.tuning import Device, LinearConfig, regimes, select_linear, whole_parts
from exl3_triton.plan import MoeSpec, plan_moe

from .attention import AttentionConfig, attention_space, score_space
from .machine import REGISTERS
from .problems import AttentionProblem, IndexerProblem, LinearProblem, MoeProblem, Problem

moe = importlib.import_module("exl3_triton.ops.moe")  # by name, because `exl3_triton.ops.moe` is the op

SHARED_LIMIT = 99 * 1024  # bytes that a block may use on every target


@dataclass(frozen=True)
class MoeConfig:
    """How a range of rows runs: the fields of `ops.moe.Regime` that are chosen, not given."""

    block_m: int
    split: int
    down_split: int
    block_k: int
    warps: int
    registers: int = 0
    small: int = 0
    prefetch: int = 0

    def regime(self, rows: int, *, sequential: int, half: int) -> Any:
        """As a `Regime` for calls of up to `rows` tokens."""
        tile = (self.block_k, self.warps, self.registers, self.small, self.prefetch)
        return moe.Regime(rows, self.block_m, self.split, self.down_split, sequential, half, *tile)


Config = LinearConfig | MoeConfig | AttentionConfig | ScoreTile
CONFIGS: dict[str, Any] = {"linear": LinearConfig, "moe": MoeConfig, "attention": AttentionConfig, "indexer": ScoreTile}


def config_json(config: Any) -> dict[str, Any] | None:
    """A config's fields by name."""
    return config._asdict() if isinstance(config, LinearConfig | ScoreTile) else config if config is None else asdict(config)


_LINEAR_FORMS = {  # rows -> (block_m, block_k, warps, most registers, ahead)
    16: [(16, k, 4, r, ahead) for k, r, ahead in (
        (128, 80, False), (128, 96, False), (128, 128, False), (128, None, False), (64, 80, False), (64, None, False),
        (64, None, True), (32, None, True), (64, 96, True), (32, 80, True), (256, 128, False), (128, None, True))],
    32: [(32, k, 4, r, ahead) for k, r, ahead in (
        (128, 80, False), (128, 96, False), (128, None, False), (64, 80, False), (64, None, False), (64, None, True),
        (32, None, True), (32, 96, True), (64, 128, True))] + [(32, 128, 8, None, False)],
    64: [(64, 128, 4, 128, False), (64, 128, 8, None, False), (64, 128, 8, 80, False), (64, 64, 4, 128, False),
         (64, 64, 4, None, False), (64, 64, 4, None, True), (64, 32, 4, None, True), (64, 64, 8, 80, False),
         (64, 32, 8, None, True)],
    255: [(128, 64, 8, 128, False), (128, 128, 8, 128, False), (128, 32, 8, 128, True), (128, 32, 8, None, True),
          (128, 64, 8, None, True), (64, 128, 8, None, False), (64, 64, 8, 80, False), (64, 64, 4, 128, False)],
}  # fmt: skip

_STAGED_FORMS = {  # sm_90: rows -> (block_m, block_k, warps, most registers, programs a multiprocessor, stages)
    16: [(16, 128, 4, 72, 7, 1), (16, 64, 4, 128, 4, 1), (16, 64, 4, 168, 3, 1)],
    32: [(32, 128, 4, 80, 6, 1), (32, 64, 4, 168, 3, 3), (32, 64, 4, 168, 3, 1)],
    64: [(64, 64, 4, 255, 2, 3), (64, 128, 8, 128, 2, 3)],
    255: [(128, 64, 8, 128, 2, 3), (128, 64, 4, 255, 2, 3)],
}

_DECODE_TILES = {  # block_m -> (block_k, warps, registers, ahead)
    8: [(128, 4, 0, 0), (64, 4, 0, 0), (64, 4, 0, 1), (32, 4, 0, 1), (128, 4, 80, 0)],
    16: [(128, 4, 80, 0), (128, 4, 0, 0), (64, 4, 0, 0), (64, 4, 0, 1)],
}
_PREFILL_TILES = {  # block_m -> (block_k, warps, registers, small, ahead)
    8: [(128, 4, 0, 0, 0), (64, 4, 0, 0, 1)],
    16: [(128, 4, 80, 0, 0), (128, 4, 0, 0, 0), (64, 4, 0, 0, 1)],
    32: [(64, 8, 80, 0, 0), (128, 4, 0, 0, 0), (128, 4, 80, 0, 0), (64, 4, 0, 0, 1)],
    64: [(64, 8, 80, 0, 0), (128, 8, 128, 0, 0), (64, 4, 128, 0, 0), (64, 8, 80, 32, 0), (32, 8, 0, 0, 1)],
    128: [(64, 8, 128, 64, 0), (64, 8, 0, 64, 0), (32, 8, 128, 64, 0), (64, 8, 128, 0, 0)],
}


def _splits(problem: LinearProblem, block_k: int, warps: int, registers: int | None, processors: int) -> list[int]:
    """Parts of k: whole waves of as many programs as the registers allow, and of fewer, without empty parts."""
    steps, blocks = problem.k // block_k, problem.n // 128
    most = min(REGISTERS // ((registers or 128) * 32 * warps), 48 // warps)
    residents = sorted({most, max(1, most - 1), max(1, most // 2)} | ({3, 4} if registers is None else set()), reverse=True)
    found = []
    for programs in residents:
        split = whole_parts(programs * processors // blocks, steps)
        if split not in found:
            found.append(split)
    return found[:4]


def linear_space(problem: LinearProblem, rows: int, device: Device) -> list[LinearConfig]:
    """Candidates for a range of rows; the rules' own choice comes first."""
    first = select_linear(rows, problem.k, problem.n // 128, device._replace(name=""), problem.format.twice_bits)
    found = [first] if first is not None else []
    for block_m, block_k, warps, registers, ahead in _LINEAR_FORMS[rows]:
        if problem.k % block_k == 0 and (block_m + 128) * block_k * 2 <= SHARED_LIMIT:
            for split in _splits(problem, block_k, warps, registers, device.processors):
                found.append(LinearConfig(block_m, block_k, split, warps, registers, ahead))
    for block_m, block_k, warps, registers, programs, stages in _STAGED_FORMS[rows] if device.family == "sm_90" else ():
        if problem.k % block_k == 0:
            ahead = stages > 1 or block_k < 128
            found.append(LinearConfig(block_m, block_k, 1, warps, registers, ahead, programs, stages))
            split = whole_parts(programs * device.processors // (problem.n // 128), problem.k // block_k)
            found.append(LinearConfig(block_m, block_k, split, warps, registers, ahead, 0, stages))
    return list(dict.fromkeys(found))


def rule_moe(problem: MoeProblem, rows: int, device: Device) -> MoeConfig:
    """What a plan without a table takes for a range of rows."""
    sizes = (problem.hidden, problem.intermediate, problem.num_experts, problem.top_k)
    spec = MoeSpec(*sizes, (problem.format.bits,), (problem.format.index,))
    plan = plan_moe(spec, max_tokens=max(rows, 33))
    regime = next(regime for regime in plan.regimes if rows <= regime.rows)
    tile = moe.tile_for(regime.block_m, device.family)
    return MoeConfig(
        regime.block_m, regime.split, regime.down_split, tile.block_k, tile.warps, tile.registers or 0, tile.small,
        int(tile.prefetch),
    )  # fmt: skip


def _moe_splits(problem: MoeProblem) -> list[tuple[int, int]]:
    """Parts of k for gate and up and for down: as the rules cut one token's work, none, and twice as fine."""
    steps, down_steps = problem.hidden // 128, problem.intermediate // 128
    blocks = problem.top_k * 2 * (problem.intermediate // 128)
    down_blocks = problem.top_k * (problem.hidden // 128)
    found = [
        (whole_parts(programs // blocks, steps), whole_parts(programs // down_blocks, down_steps))
        for programs in (768, 384, 1536)
    ]
    return list(dict.fromkeys([*found, (1, 1)]))


def moe_space(problem: MoeProblem, rows: int, device: Device) -> list[MoeConfig]:
    """Candidates for a range of rows; the rules' own choice comes first."""
    found = [rule_moe(problem, rows, device)]
    if rows == min(problem.SAMPLES):
        for block_m, tiles in _DECODE_TILES.items():
            for i, (block_k, warps, registers, ahead) in enumerate(tiles):
                for split, down_split in _moe_splits(problem)[: 4 if i == 0 else 1]:
                    found.append(MoeConfig(block_m, split, down_split, block_k, warps, registers, 0, ahead))
        return list(dict.fromkeys(found))
    share = rows * problem.top_k / problem.num_experts
    for block_m, options in _PREFILL_TILES.items():
        if share / 2 <= block_m <= max(16, 8 * share):
            for block_k, warps, registers, small, ahead in options:
                found.append(MoeConfig(block_m, 1, 1, block_k, warps, registers, small, ahead))
    return list(dict.fromkeys(found))


def space(problem: Problem, rows: int, device: Device) -> list[Config]:
    """Candidates for a problem and a range of rows, the rules' choice first. Raises ValueError for rows that are no range."""
    if rows not in problem.SAMPLES:
        raise ValueError(f"rows {rows}: required one of {', '.join(map(str, problem.SAMPLES))}")
    if isinstance(problem, LinearProblem):
        if device.family == "hip" or {r.rows for r in regimes(device.family)} != set(problem.SAMPLES):
            raise ValueError(f"device family {device.family}: its ranges of rows are not tuned")
        return list(linear_space(problem, rows, device))
    if isinstance(problem, AttentionProblem):
        return list(attention_space(problem, rows, device))
    if isinstance(problem, IndexerProblem):
        return list(score_space(problem, device))
    return list(moe_space(problem, rows, device))
