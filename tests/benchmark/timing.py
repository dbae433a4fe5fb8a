"""What the benchmarks of single ops share beyond `exl3_triton.timing`: enough weights to exceed the L2 cache, and limits."""

from __future__ import annotations

from typing import Any

from autotune.bench import copies_for
from exl3_triton.model.costs import INSTRUCTIONS_PER_WEIGHT
from exl3_triton.timing import header, microseconds

__all__ = ["copies_for", "header", "limit_fraction", "microseconds"]


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
