"""Timing on the device at hand: CUDA graphs, medians, warm clocks, and the two rates that kernels are held against."""

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


def captured(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """Replays a CUDA graph of all `calls` in a row; each is run once before the capture, which compiles what it needs."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # other threads, NCCL's among them, may go on calling CUDA
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return graph.replay


def durations(
    run: Callable[[], Any], device: torch.device | str, *, repeats: int, warmup_seconds: float = 0.1, budget: float = 30.0
) -> list[float]:
    """Microseconds of each of `repeats` runs, fewer where `budget` seconds are over, after a warm-up of at least one run.

    A GPU's own clock between events on its stream, on a CPU the wall's. warmup_seconds: 0 leaves the warm-up out.
    """
    on_gpu = torch.device(device).type == "cuda"
    deadline = time.perf_counter() + warmup_seconds
    while time.perf_counter() < deadline:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    times: list[float] = []
    deadline = time.perf_counter() + budget
    while len(times) < repeats and (not times or time.perf_counter() < deadline):
        if on_gpu:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        else:
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e6)
    return times


def microseconds(calls: Sequence[Callable[[], Any]], *, replays: int = 20, warmup_seconds: float = 0.1) -> float:
    """Median microseconds of one call, over CUDA graph replays of all `calls` in a row (each over its own weights)."""
    run = captured(calls)
    return statistics.median(durations(run, "cuda", repeats=replays, warmup_seconds=warmup_seconds)) / len(calls)


def _median(call: Callable[[], Any], device: torch.device | str) -> float:
    run = captured([call]) if torch.device(device).type == "cuda" else call
    return statistics.median(durations(run, device, repeats=20))


def read_gbps(device: torch.device | str = "cuda") -> float:
    """GB/s of reading a large tensor once (a maximum over 4 GiB, on a CPU 256 MiB), measured now."""
    data = torch.randn(1 << (30 if torch.device(device).type == "cuda" else 26), device=device)
    return data.nbytes / _median(data.amax, device) / 1e3


def matmul_tflops(device: torch.device | str = "cuda") -> float:
    """TFLOP/s of `torch.matmul` on squares of random numbers, 8192 wide in fp16 (on a CPU 1024, fp32), measured now."""
    size, dtype = (8192, torch.float16) if torch.device(device).type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / _median(lambda: a @ b, device) / 1e6


def header(device: torch.device | str = "cuda") -> dict[str, Any]:
    """Device, date, versions, command, and the two measured limits."""
    from .ops._triton import HAS_TRITON, triton

    found: dict[str, Any] = {"device": f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"}
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False) if shutil.which("nvidia-smi") else None
        found = {
            "device": properties.name,
            "driver": driver.stdout.strip() if driver else "unknown",
            "cuda": torch.version.cuda,
            "sms": properties.multi_processor_count,
            "clock_ghz": round(getattr(properties, "clock_rate", 0) / 1e6, 3),
        }
    return found | {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__ if HAS_TRITON else None,
        "command": " ".join(["python", *sys.argv]),
        "hbm_read_gbps": round(read_gbps(device), 1),
        "matmul_tflops": round(matmul_tflops(device), 3 if torch.device(device).type == "cpu" else 1),
    }
