"""How long a candidate takes, from its compiled code: for GPUs that need not be there.

A product's time on a multiprocessor is the largest of what its pipes need (issue, integer, multiplier, fp16, tensor core,
memory instructions), DRAM and L2, joined with the time that one program's chain of steps takes when too few programs hide it;
the launches around it and the partial sums are added. `Parameters` are fitted to measurements (`autotune.fit`); architectures
are in `machine.py`.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from exl3_triton.ops.tuning import LinearConfig, programs_and_parts

from .attention import row_bytes
from .features import Features, Step
from .machine import Machine
from .problems import AttentionProblem, IndexerProblem, LinearProblem, MoeProblem, Problem
from .space import MoeConfig

VERSION = 1
DRAM_WAIT = 800.0  # nanoseconds from asking DRAM to having, under load: an estimate
FITTED = Path(__file__).parent / "parameters.json"


@dataclass(frozen=True)
class Parameters:
    """What no data sheet says. Cycles unless said otherwise."""

    issue: float = 1.2  # slots that an instruction takes of its scheduler, waiting included
    chain: float = 2.0  # cycles between two instructions of one warp that is alone
    load: float = 700.0  # wait for a load of the step
    ahead: float = 150.0  # the same where the step's operands were loaded a step before
    row: float = 60.0  # what a row of activations adds to such a wait; `rows_power` for several
    rows_power: float = 0.5
    sync: float = 60.0  # barriers and the matrix instruction's latency
    access: float = 2.0  # a 128-byte access of the memory pipe
    spill: float = 3.0  # an access to local memory
    mma: float = 1.3  # a matrix instruction's time over that of the data sheet's rate
    turns: float = 1.3  # how decoding and multiplying overlap: 1 not at all
    narrow: float = 32.0  # tokens that a matrix instruction costs at least
    sharp: float = 3.0  # exponent of the joint of throughput and latency
    partial: float = 1.0  # cost of partial sums, in passes through L2
    start: float = 1500.0  # a program's beginning and end
    launch: float = 2.0  # microseconds of a call beside its products
    rows: float = 1.0  # cost of rotating and adding rows, in passes through L2
    experts: float = 8.0  # microseconds of an expert layer's other kernels


@functools.cache
def fitted() -> Parameters:
    """The parameters that the package comes with."""
    return Parameters(**json.loads(FITTED.read_text())["parameters"])


@dataclass(frozen=True)
class Product:
    """A launch of one of the products: what its time depends on. Tiles are 128 outputs wide.

    steps: passes of the loop a program; live: rows of activations that a program loads; dram, l2: bytes; flight: bytes that a
    program's pipeline keeps on their way, 0 where its warps load what they need at once.
    """

    step: Step
    warps: int
    registers: int
    shared: int
    outside: int
    block_k: int
    ahead: bool
    parts: tuple[tuple[float, int], ...]  # (programs, tokens of their matrix instruction)
    steps: float
    live: float
    dram: float
    l2: float
    flight: float = 0.0


def product_seconds(p: Product, machine: Machine, q: Parameters) -> float:
    """Seconds of one product."""
    most = machine.resident(p.registers, p.shared, p.warps)
    programs = sum(count for count, _ in p.parts)
    tokens = sum(count * max(width, q.narrow) for count, width in p.parts) / programs
    w, s = p.warps, p.step
    pipes = (
        q.issue * w * s.total / 4,
        w * 32 * s.alu / machine.alu,
        w * 32 * s.fma / machine.fma,
        w * 32 * s.half / machine.half,
        w * (q.access * s.memory + q.spill * s.spilled),
    )
    # pipes do not overlap perfectly, so a high norm instead of the maximum; decoding and multiplying take turns
    busy = sum(pipe**6 for pipe in pipes) ** (1 / 6)
    multiply = q.mma * 2 * 128 * tokens * p.block_k / machine.tensor
    busy = (busy**q.turns + multiply**q.turns) ** (1 / q.turns)
    wait = (q.ahead if p.ahead else q.load) + q.row * p.live**q.rows_power + q.sync + q.chain * s.total
    each = max(1.0, programs / machine.processors)
    crowd = min(most, each)
    # full rounds of `most` programs, and the last one, which may be thinner; a fraction of programs is an average over SMs
    rounds = math.ceil(each / most - 1e-9) if each <= 3 * most else each / most
    on_busiest = math.ceil(each - 1e-9) if each <= 3 * most else each
    throughput = on_busiest * (p.steps * busy + q.start * w / 16)
    latency = rounds * (p.steps * wait + q.start)
    cycles = (throughput**q.sharp + latency**q.sharp) ** (1 / q.sharp)
    compute = cycles / machine.clock_ghz / 1e9
    memory = max(p.dram / machine.dram_gbps, p.l2 / machine.l2_gbps) / 1e9
    fill = min(1.0, crowd * w / 8)  # few warps cannot ask for the full rate; a pipeline has to cover the wait for DRAM
    if p.flight:
        fill = min(1.0, crowd * p.flight * machine.processors / (machine.dram_gbps * DRAM_WAIT))
    memory /= max(fill, 0.1)
    return (compute**4 + memory**4) ** 0.25


def _wave(k: int, block_k: int, split: int) -> int:
    return -(-(k // block_k) // split)


def linear_seconds(
    problem: LinearProblem, config: LinearConfig, m: int, f: Features, machine: Machine, q: Parameters
) -> float:
    """Seconds of `ops.linear` on m rows."""
    k, n = problem.k, problem.n
    blocks = n // 128 * -(-m // config.block_m)
    weights = k * n * problem.format.bits / 8
    programs, parts = programs_and_parts(config, k, n // 128, machine.processors)
    all_steps = k // config.block_k
    if programs:
        programs, steps = programs * -(-m // config.block_m), -(-n // 128 * all_steps // programs)
    else:
        programs, steps = blocks * parts, -(-all_steps // parts)
    rows = programs * steps * config.block_m * config.block_k * 2
    product = Product(
        f.steps[0], config.num_warps, f.registers, f.shared, f.outside, config.block_k, config.prefetch,
        ((programs, config.block_m),), steps, min(m, config.block_m), weights, weights * -(-m // config.block_m) + rows,
    )  # fmt: skip
    seconds = product_seconds(product, machine, q)
    moved = 0.0
    if config.even or parts > 1:
        moved += q.partial * 2 * parts * m * n * 4
        seconds += 1e-6 * q.launch / 2
    moved += q.rows * m * (k * 4 + n * 2)
    return seconds + moved / machine.l2_gbps / 1e9 + 1e-6 * q.launch


@functools.lru_cache(maxsize=4096)
def expected_blocks(m: int, top_k: int, experts: int, block_m: int, small: int = 0) -> tuple[float, float, float]:
    """(experts with rows, blocks of more than `small` rows, other blocks) when every token takes top_k at random."""
    p = top_k / experts
    log_p, log_q = math.log(p), math.log1p(-p) if p < 1 else -1e30
    hit = large = few = 0.0
    mean, spread = m * p, math.sqrt(m * p * (1 - p)) + 1
    for r in range(max(1, int(mean - 8 * spread)), min(m, int(mean + 8 * spread + 8)) + 1):
        log = math.lgamma(m + 1) - math.lgamma(r + 1) - math.lgamma(m - r + 1) + r * log_p + (m - r) * log_q
        chance = experts * math.exp(log)
        rest = r % block_m
        hit += chance
        large += chance * (r // block_m + (rest > small))
        few += chance * (0 < rest <= small)
    return hit, large, few


def moe_seconds(
    problem: MoeProblem, config: MoeConfig, m: int, features: Sequence[Features], machine: Machine, q: Parameters
) -> float:
    """Seconds of `ops.moe` on m tokens with random routes."""
    p = problem
    hit, large, few = expected_blocks(m, p.top_k, p.num_experts, config.block_m, config.small)
    seconds = 0.0
    decode = m <= min(p.SAMPLES)
    sides = ((p.hidden, p.intermediate, 2, config.split), (p.intermediate, p.hidden, 1, config.down_split))
    for (k, n, count, split), f in zip(sides, features, strict=True):
        steps = _wave(k, config.block_k, split)
        tiles = count * (n // 128) * split
        weights = hit * k * n * p.format.bits / 8 * count
        rows = (large * config.block_m + few * config.small) * tiles * steps * config.block_k * 2
        loop = f.steps[-1]
        if config.small and len(f.steps) > 1 and few > large:
            loop = f.steps[0]
        product = Product(
            loop, config.warps, f.registers, f.shared, f.outside, config.block_k, bool(config.prefetch),
            ((large * tiles, config.block_m), (few * tiles, config.small)), steps, m * p.top_k / (large + few), weights,
            weights * (large + few) / max(hit, 1e-9) + rows,
        )  # fmt: skip
        seconds += product_seconds(product, machine, q)
        seconds += q.partial * 2 * (split if decode else 1) * m * p.top_k * n * count * 4 / machine.l2_gbps / 1e9
    moved = q.rows * m * p.top_k * (p.hidden * 4 + p.intermediate * 10)
    return seconds + moved / machine.l2_gbps / 1e9 + 1e-6 * (q.launch + q.experts)


def decode_once_seconds(problem: LinearProblem, m: int, machine: Machine, q: Parameters) -> float:
    """Seconds of `ops.linear` that decodes once: six instructions a weight, then a product at 70 % of the peak."""
    k, n = problem.k, problem.n
    decode = max(k * n * 6 * q.issue / (128 * machine.processors * machine.clock_ghz), 2 * k * n / machine.l2_gbps) / 1e9
    product = 2 * m * k * n / (0.7 * machine.tensor * machine.processors * machine.clock_ghz) / 1e9
    return decode + product + (m * (k * 4 + n * 10)) / machine.l2_gbps / 1e9 + 4e-6 * q.launch


def attention_seconds(
    problem: AttentionProblem | IndexerProblem, config: Any, m: int, f: Features, machine: Machine, q: Parameters
) -> float:
    """Seconds of a call on m tokens. f, machine, q: as `linear_seconds` has them.

    The main kernel's steps count as those of a product: a tile of keys does as many multiplications as one of 128 columns and
    `block_k` inputs. Partial results of decoding are written and read again through L2.
    """
    p, context = problem, problem.context(m)
    if isinstance(p, AttentionProblem) and p.kind == "mla_prefill":
        bytes_of_key = 2 * (p.width + p.value)
    else:
        bytes_of_key = row_bytes(p) // (1 if isinstance(p, IndexerProblem) else p.kv_heads)

    def seconds(programs: float, steps: float, tokens: int, per_key: float, dram: float, l2: float) -> float:
        step = f.steps[0]
        product = Product(
            step, config.warps, f.registers, f.shared, f.outside, config.keys * per_key / 128, config.stages > 1,
            ((programs, tokens),), steps, 0.0, dram, l2, (config.stages - 1) * config.keys * bytes_of_key,
        )  # fmt: skip
        return product_seconds(product, machine, q) + 1e-6 * q.launch

    bytes_read = m * context * row_bytes(p)
    if isinstance(p, IndexerProblem):
        programs = m * -(-context // config.span)
        return seconds(programs, config.span / config.keys, p.heads, p.width, bytes_read, bytes_read)
    if p.kind.endswith("prefill"):
        programs, steps = -(-m // config.rows) * p.heads, context / 2 / config.keys
        each = config.keys * (p.width + p.value) * 2
        size = context * p.kv_heads * (p.width + p.value) * 2
        return seconds(programs, steps, config.rows, p.width + p.value, size, programs * steps * each)
    keys = p.SELECTED if p.kind == "mla_sparse_decode" else context
    plan = config.plan(p.kind, keys)
    ranges = plan.grid
    in_range = -(-keys // ranges)
    steps = -(-in_range // config.keys)
    bytes_read = m * keys * row_bytes(p)
    shared = p.heads // p.kv_heads  # heads that read the same keys
    blocks = -(-shared // config.rows) * config.parts
    per_key = p.width + p.value / config.parts
    total = seconds(m * p.kv_heads * blocks * ranges, steps, config.rows, per_key, bytes_read, bytes_read * blocks)
    if plan.most > 1:
        total += 2 * m * p.heads * ranges * (p.value + 2) * 4 / machine.l2_gbps / 1e9 + 1e-6 * q.launch
    return total


def predict_us(
    problem: Problem, config: Any, m: int, features: Sequence[Features], machine: Machine, parameters: Parameters | None = None
) -> float:
    """Microseconds of a call of m rows. features: of the product, or of gate and up and of down (moe). Attention's
    times were never fitted: the parameters are those of products.
    """
    q = parameters or fitted()
    if isinstance(problem, AttentionProblem | IndexerProblem):
        return 1e6 * attention_seconds(problem, config, m, features[0], machine, q)
    if isinstance(problem, MoeProblem):
        return 1e6 * moe_seconds(problem, config, m, features, machine, q)
    if config is None:
        return 1e6 * decode_once_seconds(problem, m, machine, q)
    return 1e6 * linear_seconds(problem, config, m, features[0], machine, q)


__all__ = ["FITTED", "VERSION", "Parameters", "asdict", "fitted", "predict_us"]
