"""Timing on a GPU: CUDA graph replay over enough distinct weights to exceed the L2 cache, medians, warm clocks."""

from __future__ import annotations

import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

INSTRUCTIONS_PER_WEIGHT = 5  # what decoding a weight costs at least: the third bound of `limit_fraction`


def microseconds(calls: Sequence[Callable[[], Any]], *, replays: int = 20, warmup_seconds: float = 0.1) -> float:
    """Median microseconds of one call, over CUDA graph replays of all `calls` in a row (each over its own weights)."""
    return interleaved([capture(calls)], len(calls), rounds=replays, warm_seconds=warmup_seconds)[0]


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


def hbm_read_gbps() -> float:
    """GB/s of reading a large tensor once (a reduction), measured now."""
    data = torch.randn(1 << 30, device="cuda")
    return data.nbytes / microseconds([data.amax]) / 1e3


def matmul_tflops(size: int = 8192) -> float:
    """TFLOP/s of `torch.matmul` on fp16 squares of random numbers, measured now."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.float16) for _ in range(2))
    return 2 * size**3 / microseconds([lambda: a @ b]) / 1e6


def versions() -> dict[str, str]:
    """torch, Triton and driver."""
    import triton

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False) if shutil.which("nvidia-smi") else None
    found = driver.stdout.strip() if driver else ""
    return {"torch": torch.__version__, "triton": triton.__version__, "driver": found or "unknown"}


def header() -> dict[str, Any]:
    """Device, date, versions, command, and the two measured limits."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        **versions(),
        "cuda": torch.version.cuda,
        "command": " ".join(["python", *(argument for argument in sys.argv)]),
        "hbm_read_gbps": round(hbm_read_gbps(), 1),
        "matmul_tflops": round(matmul_tflops(), 1),
        "sms": properties.multi_processor_count,
        "clock_ghz": round(getattr(properties, "clock_rate", 0) / 1e6, 3),
    }


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
