"""pytest-benchmark: the ops on a GPU, by CUDA graph replay over data that exceeds the cache. `make bench`, or

    pytest tests/benchmark -m gpu --benchmark-json FILE

The benchmark's clock sees replays of one graph of all calls; microseconds of a call by the GPU's own clock, GB/s and TFLOP/s
are in `extra_info`. Every shape, with other libraries' times and limits: `measure.py`, `attention.py`.
"""

from __future__ import annotations

import statistics

import pytest
import torch
from attention import BUILDERS, Problem
from measure import random_experts, random_matrix
from timing import copies_for

from exl3_triton import ops
from exl3_triton.format import Codebook
from exl3_triton.plan import MoeSpec, plan_moe
from exl3_triton.timing import captured, durations

pytestmark = pytest.mark.gpu

ATTENTION = [
    Problem("mla_decode", "glm_moe_dsa", 16, 65536, 1),
    Problem("mla_decode", "glm_moe_dsa", 64, 65536, 16),
    Problem("sparse_decode", "glm_moe_dsa", 16, 131072, 16),
    Problem("gqa_decode", "glm4_moe", 96, 65536, 16),
    Problem("mla_prefill", "glm_moe_dsa", 16, 8192, 1),
]


@pytest.fixture
def replay(benchmark):
    """Times a graph of `calls`; nbytes and flops are those that one call needs."""

    def run(calls, nbytes, flops):
        graph = captured(calls)
        us = statistics.median(durations(graph, "cuda", repeats=20)) / len(calls)
        benchmark.extra_info.update(
            device=torch.cuda.get_device_name(),
            calls=len(calls),
            us=round(us, 2),
            gbps=round(nbytes / us / 1e3, 1),
            tflops=round(flops / us / 1e6, 2),
        )
        benchmark.pedantic(lambda: (graph(), torch.cuda.synchronize()), rounds=10, warmup_rounds=1)

    return run


def linear_calls(k, n, m, codebook, mode):
    matrices = [random_matrix(k, n, 3, codebook) for _ in range(copies_for(k * n * 3 // 8))]
    x = torch.randn(m, k, device="cuda", dtype=torch.float16)
    return [lambda w=w: ops.linear(x, w, mode=mode) for w in matrices]


@pytest.mark.parametrize("m", [1, 16, 64, 512, 4096])
@pytest.mark.parametrize(("k", "n"), [(6144, 12288), (6144, 512), (2048, 16384)])
def test_linear(replay, k, n, m):
    replay(linear_calls(k, n, m, Codebook.MCG, "exact"), k * n * 3 / 8, 2 * m * k * n)


@pytest.mark.parametrize("m", [1, 16, 64, 512])
@pytest.mark.parametrize("mode", ["precise", "split", "int8"])
def test_linear_modes(replay, mode, m):
    codebook = Codebook.MUL1 if mode == "int8" else Codebook.MCG
    replay(linear_calls(6144, 12288, m, codebook, mode), 6144 * 12288 * 3 / 8, 2 * m * 6144 * 12288)


@pytest.mark.parametrize("tokens", [1, 16, 128, 2048])
@pytest.mark.parametrize(("experts", "hidden", "inner"), [(256, 6144, 512), (128, 4096, 1408)])
def test_moe(replay, experts, hidden, inner, tokens):
    """Eight experts a token, eight sets of random routes."""
    weights = random_experts(experts, hidden, inner, 3, Codebook.MCG)
    plan = plan_moe(MoeSpec.of(weights, 8), max_tokens=tokens)
    bound = plan.bind(plan.new_arena("cuda"))
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.float16)
    out = torch.empty_like(x)
    routes = []
    for _ in range(8):
        ids = torch.rand(tokens, experts, device="cuda").topk(8).indices
        routes.append((ids, torch.rand(tokens, 8, device="cuda")))
    hit = sum(ids.unique().numel() for ids, _ in routes) / len(routes)
    calls = [lambda r=r: bound(x, weights, *r, out=out) for r in routes]
    replay(calls, hit * 3 * hidden * inner * 3 / 8, 2 * tokens * 8 * 3 * hidden * inner)


@pytest.mark.parametrize("problem", ATTENTION, ids=lambda problem: problem.name)
def test_attention(replay, problem):
    work = BUILDERS[problem.op](problem, {}, False)
    replay(work.calls, work.nbytes, work.flops)
