"""Launch parameters: a pure function of the matrix, the device and the regime that a number of rows falls into.

A regime is a range of row counts that share a kernel configuration, so that a row gives the same bits in any batch of its
regime. Evidence for sm_90 (NVIDIA H200, 2026-11-30, torch 2.11, Triton 3.6, MCG at 3 bits, 6144 x 12288, microseconds of the
whole op in a CUDA graph, compared within one run each): 16 rows 80 registers 38.6, no limit 41.8 (before the reduction was
rewritten); 32 rows 80 registers 41.4, 128 99.8; 64 rows 128 registers 52.0, 168 100, eight warps 78; 128 rows 128 registers
87.9, no limit 111.9. At 6 bits and one row 80 registers spill and are still the fastest: 45.5, against 50.6 at 128 and 76.6 at
96. Other architectures take the settings that compile
without spills for sm_80 .. sm_121 and gfx targets: nobody has timed them.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class LinearConfig(NamedTuple):
    """Launch parameters of a product: tokens and k of a block, parts of k, warps, pipeline stages, most registers a thread."""

    block_m: int
    block_k: int
    split: int
    num_warps: int
    num_stages: int = 1
    registers: int | None = None


class Regime(NamedTuple):
    """Row counts up to `rows`: blocks of `block_m` tokens and `block_k` inputs; `resident` programs fit a multiprocessor."""

    rows: int
    block_m: int
    block_k: int
    num_warps: int
    registers: int | None
    resident: int


_HOPPER = (
    Regime(16, 16, 128, 4, 80, 6),
    Regime(32, 32, 128, 4, 80, 6),
    Regime(64, 64, 128, 4, 128, 4),
    Regime(255, 128, 64, 8, 128, 2),
)
_CUDA = (
    Regime(16, 16, 128, 4, None, 4),
    Regime(32, 32, 128, 4, None, 3),
    Regime(64, 64, 128, 8, None, 2),
    Regime(255, 64, 128, 8, None, 2),
)
_HIP = (
    Regime(16, 16, 128, 4, None, 4),
    Regime(32, 32, 128, 8, None, 2),  # four warps of gfx1100 spill
    Regime(64, 64, 128, 8, None, 2),
    Regime(1 << 31, 64, 128, 8, None, 2),
)


class Device(NamedTuple):
    """What the choice depends on: "sm_90", "cuda" (other NVIDIA GPUs), "hip" or "host", and the multiprocessors."""

    family: str
    processors: int


@cache
def device_of(device: torch.device) -> Device:
    """The `Device` of a torch device; a CPU (Triton's interpreter) counts as a small GPU."""
    if device.type != "cuda":
        return Device("host", 4)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if torch.version.hip:
        return Device("hip", processors)
    return Device("sm_90" if torch.cuda.get_device_capability(device) == (9, 0) else "cuda", processors)


def regimes(family: str) -> tuple[Regime, ...]:
    """The regimes of a device family in ascending order of rows; more rows than the last one's: decode once, then matmul."""
    return {"sm_90": _HOPPER, "hip": _HIP}.get(family, _CUDA)


def split_of(regime: Regime, k: int, blocks: int, device: Device) -> int:
    """Parts of k: one full wave of resident programs, none of them empty; the same for every number of rows."""
    steps = k // regime.block_k
    parts = max(1, min(regime.resident * device.processors // blocks, steps))
    return -(-steps // -(-steps // parts))


def select_linear(m: int, k: int, blocks: int, device: Device) -> LinearConfig | None:
    """Launch parameters for m rows of a product over k with `blocks` blocks of 128 output features.

    None where decoding the weights once and a plain matrix product are faster.
    """
    for regime in regimes(device.family):
        if m <= regime.rows:
            split = split_of(regime, k, blocks, device)
            return LinearConfig(regime.block_m, regime.block_k, split, regime.num_warps, 1, regime.registers)
    return None
