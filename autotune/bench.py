"""Random problems on this machine's GPU: calls with given launch parameters, their errors, their compiled code."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from exl3_triton import reference
from exl3_triton.format import Codebook, ExpertProjection, ExpertWeights, TrellisWeight, padded_size
from exl3_triton.plan import DispatchPolicy, MoePlan, MoeSpec
from exl3_triton.timing import captured, durations

from .features import Features, features_of
from .problems import AttentionProblem, IndexerProblem, LinearProblem, MoeProblem, Problem
from .space import Config, MoeConfig

# by name, because the ops have the names of their modules
decode_once, linear, moe = (importlib.import_module(f"exl3_triton.ops.{name}") for name in ("decode_once", "linear", "moe"))

TOLERANCE = 2e-3
"""Largest relative error (Frobenius norm) of a right candidate: fp16 activations and products of 11 bits give about 5e-4."""

_ROUTES = 8  # sets of routes that a graph runs through; fewer where a call is long


def copies_for(weight_bytes: int, *, at_least: int = 260_000_000) -> int:
    """How many distinct weight sets exceed the cache several times over."""
    return max(1, -(-at_least // weight_bytes))


def interleaved(runs: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Median microseconds of each run, on warm clocks: in every round all of them once, in alternating order."""
    times: list[list[float]] = [[] for _ in runs]
    durations(runs[0], "cuda", repeats=1, warmup_seconds=0.2)
    for turn in range(rounds):
        order = range(len(runs))
        for i in order if turn % 2 == 0 else reversed(order):
            times[i] += durations(runs[i], "cuda", repeats=1, warmup_seconds=0)
    return [statistics.median(each) for each in times]


def random_matrix(k: int, n: int, bits: float, codebook: Codebook, device: str = "cuda") -> TrellisWeight:
    """A matrix of random trellis data with scales of a realistic size."""
    shape = (padded_size(k) // 16, padded_size(n) // 16, int(16 * bits))
    trellis = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device=device)
    suh = torch.randn(shape[0] * 16, device=device).sign() * 0.02
    svh = torch.randn(shape[1] * 16, device=device).sign()
    return TrellisWeight(trellis, suh.half(), svh.half(), codebook, None, k, n, foldable=True)


def random_experts(
    experts: int, hidden: int, intermediate: int, bits: float, codebook: Codebook, device: str = "cuda"
) -> ExpertWeights:
    """A layer of random experts of one rate and codebook."""
    wide, inner = padded_size(hidden), padded_size(intermediate)
    projections = []
    for k, n in ((wide, inner), (wide, inner), (inner, wide)):
        projection = ExpertProjection.allocate([(int(2 * bits), int(codebook))] * experts, k, n, device=device)
        projection.words.random_(-(1 << 15), 1 << 15)
        projection.suh.copy_(torch.randn(experts, k, device=device).sign() * 0.02)
        projection.svh.copy_(torch.randn(experts, n, device=device).sign())
        projections.append(projection)
    gate, up, down = projections
    return ExpertWeights(gate, up, down, hidden, intermediate)


@dataclass
class Bench:
    """Data of one problem at m rows. `call(config)` gives the calls that one graph holds, over different weights or routes."""

    problem: Problem
    m: int
    tolerance: ClassVar[float] = TOLERANCE

    def calls(self, config: Config | None) -> list[Callable[[], Tensor]]:
        raise NotImplementedError

    def want(self) -> Tensor:
        """Some rows of the first call's result, by the reference."""
        raise NotImplementedError

    @property
    def rows(self) -> Tensor:
        return torch.linspace(0, self.m - 1, min(self.m, 3)).long()

    def error(self, config: Config | None, want: Tensor) -> float:
        """Relative error of a candidate."""
        got = self.calls(config)[0]()[self.rows.to(want.device)].float()
        return ((got - want).norm() / want.norm()).item()

    def time(self, configs: list[Any], rounds: int = 15) -> list[float]:
        """Microseconds of a call with each of the configs, interleaved."""
        lists = [self.calls(config) for config in configs]
        return [us / len(lists[0]) for us in interleaved([captured(calls) for calls in lists], rounds)]


class LinearBench(Bench):
    def __init__(self, problem: LinearProblem, m: int, copies: int | None = None, device: str = "cuda"):
        super().__init__(problem, m)
        k, n, format = problem.k, problem.n, problem.format
        copies = copies or min(64, copies_for(int(k * n * format.bits / 8)))
        self.matrices = [random_matrix(k, n, format.bits, format.index, device) for _ in range(copies)]
        self.x = torch.randn(m, k, device=device, dtype=torch.float16)

    def calls(self, config: Any) -> list[Callable[[], Tensor]]:
        n, x = self.problem.n, self.x  # type: ignore[union-attr]
        return [
            lambda w=w: linear._launch_linears(  # type: ignore[misc]
                x, [w.trellis], [w.suh], [w.svh], [None], [int(w.codebook)], [n], torch.float16, config
            )[0]
            for w in self.matrices
        ]

    def want(self) -> Tensor:
        return reference.linear(self.x[self.rows.to(self.x.device)].float(), self.matrices[0])


class MoeBench(Bench):
    def __init__(self, problem: MoeProblem, m: int, rows: int, device: str = "cuda"):
        """rows: the range that the calls of m rows fall into; the scratch is sized by it."""
        super().__init__(problem, m)
        p = problem
        self.range = rows
        self.experts = random_experts(p.num_experts, p.hidden, p.intermediate, p.format.bits, p.format.index, device)
        generator = torch.Generator(device).manual_seed(m)
        self.x = torch.randn(m, p.hidden, device=device, dtype=torch.float16, generator=generator)
        self.routes = []
        for _ in range(_ROUTES if m < 1024 else 3):
            ids = torch.rand(m, p.num_experts, device=device, generator=generator).topk(p.top_k).indices
            self.routes.append((ids, torch.rand(m, p.top_k, device=device, generator=generator)))

    def bind(self, config: MoeConfig) -> Any:
        """A plan of the single regime that the config describes: with one launch for gate and up below the largest range."""
        rows = self.range
        spec = MoeSpec.of(self.experts, self.problem.top_k)  # type: ignore[union-attr]
        decode = rows == min(MoeProblem.SAMPLES)
        regime = config.regime(rows, sequential=int(rows == max(MoeProblem.SAMPLES)), half=int(not decode))
        schedule = moe.Schedule(rows, 1, 128, regime if decode else None, () if decode else (regime,))
        plan = MoePlan(spec, schedule, DispatchPolicy())
        return plan.bind(plan.new_arena(self.x.device))

    def calls(self, config: Any) -> list[Callable[[], Tensor]]:
        bound = self.bind(config)
        out = torch.empty(self.x.shape, device=self.x.device, dtype=torch.float32)
        return [lambda r=r: bound(self.x, self.experts, *r, out=out) for r in self.routes]  # type: ignore[misc]

    def want(self) -> Tensor:
        ids, weights = self.routes[0]
        rows = self.rows.to(self.x.device)
        return reference.moe(self.x[rows].float(), self.experts, ids[rows], weights[rows], None)


def bench_of(problem: Problem, m: int, rows: int, *, copies: int | None = None) -> Bench:
    """The bench of a problem at m rows of the range `rows`."""
    from .attention_bench import AttentionBench, ScoreBench

    if isinstance(problem, LinearProblem):
        return LinearBench(problem, m, copies)
    if isinstance(problem, AttentionProblem):
        return AttentionBench(problem, m, copies)
    if isinstance(problem, IndexerProblem):
        return ScoreBench(problem, m, copies)
    return MoeBench(problem, m, rows)


def compile_here(bench: Bench, config: Config | None) -> list[Features]:
    """Runs a candidate once, so that it lies in Triton's cache, and returns the features of its products.

    linear: the product (or, without a config, the decoding kernel); moe: gate and up, down.
    """
    kernel = moe.expert_gemm_kernel
    if isinstance(bench, LinearBench):
        kernel = decode_once._rotate_and_decode_kernel if config is None else linear.product_kernel
    kernel.device_caches.clear()
    bench.calls(config)[0]()
    torch.cuda.synchronize()
    compiled = [each for cache in kernel.device_caches.values() for each in cache[0].values()]
    return [features_of(each) for each in compiled]
