"""Timing of candidates: CUDA graphs over more distinct weights than the L2 cache holds, in turns, and the limits of a card."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from exl3_triton.model.costs import INSTRUCTIONS_PER_WEIGHT
from exl3_triton.timing import header, microseconds

__all__ = ["capture", "copies_for", "header", "interleaved", "limit_fraction", "microseconds", "versions", "warm_clocks"]


def capture(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """A graph of all `calls` in a row, each run once before; compile beforehand."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def warm_clocks(graph: torch.cuda.CUDAGraph, seconds: float = 0.2) -> None:
    """Replay until the clocks have settled."""
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        graph.replay()
        torch.cuda.synchronize()


def interleaved(
    graphs: Sequence[torch.cuda.CUDAGraph], calls: int, *, rounds: int = 15, warm_seconds: float = 0.2
) -> list[float]:
    """Median microseconds of one of the `calls` in each graph: in every round all graphs run once, in alternating order."""
    times: list[list[float]] = [[] for _ in graphs]
    warm_clocks(graphs[0], warm_seconds)
    for turn in range(rounds):
        order = range(len(graphs)) if turn % 2 == 0 else reversed(range(len(graphs)))
        for i in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graphs[i].replay()
            end.record()
            end.synchronize()
            times[i].append(start.elapsed_time(end) * 1e3 / calls)
    return [statistics.median(each) for each in times]


def copies_for(weight_bytes: int, *, at_least: int = 260_000_000) -> int:
    """How many distinct weight sets exceed the cache several times over."""
    return max(1, -(-at_least // weight_bytes))


def versions() -> dict[str, str]:
    """torch, Triton and driver."""
    import triton

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False) if shutil.which("nvidia-smi") else None
    found = driver.stdout.strip() if driver else ""
    return {"torch": torch.__version__, "triton": triton.__version__, "driver": found or "unknown"}


def limit_fraction(us: float, *, weight_bytes: float, flops: float, weights_decoded: float, limits: dict[str, Any]) -> float:
    """The largest of three lower bounds (weight bytes once over HBM, FLOPs, decode instructions) over the measured time."""
    bounds = (
        weight_bytes / limits["hbm_read_gbps"] / 1e3,
        flops / limits["matmul_tflops"] / 1e6,
        weights_decoded * INSTRUCTIONS_PER_WEIGHT / (limits["sms"] * 128 * limits["clock_ghz"] * 1e3)
        if limits["clock_ghz"]
        else 0,
    )
    return max(bounds) / us
