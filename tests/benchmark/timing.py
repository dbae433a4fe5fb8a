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
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    deadline = time.perf_counter() + warmup_seconds
    while time.perf_counter() < deadline:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


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


def header() -> dict[str, Any]:
    """Device, date, versions, command, and the two measured limits."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False) if shutil.which("nvidia-smi") else None
    return {
        "device": properties.name,
        "driver": driver.stdout.strip() if driver else "unknown",
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
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
