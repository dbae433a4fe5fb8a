"""Launch parameters: a pure function of the matrix, the device and the regime that a number of rows falls into.

A regime is a range of row counts that share a kernel configuration, so that a row gives the same bits in any batch of its
regime. Evidence for sm_90 (NVIDIA H200, 2026-12-01, torch 2.11, Triton 3.6, microseconds of the whole op in a CUDA graph,
compared within one run each; 6144 x 12288 and MCG unless said otherwise; "ahead": words and activations of the next step
are loaded before the present one is decoded; "staged": words ahead in registers, activations two steps ahead in shared
memory; "even": programs share all steps of all blocks evenly):

    rows   bits   as chosen                                          instead
    1      3      80 registers, K 128               30.9             ahead, K 64, no limit, 4 resident    32.8; 3 resident 38.5
    1      6      ahead, K 64, no limit, 3 resident 35.6             80 registers, K 128                  46.5
    1      6 MUL1 ahead, K 64, 168 registers        34.1             no limit: 4 fit some multiprocessors 41.3
    1      5, 8   ahead, K 64, no limit, 3 resident 33.3, 35.4       80 registers, K 128                  35.5, 37.3
    1      4      2048 x 16384: ahead, 4 resident   15.1             80 registers, K 128                  16.6
    1      4      5120 x 17408: even, 7 x 72 reg.   34.8             split 5, 6 x 80 registers            38.5
    32     3, 6   ahead, K 64, no limit, 3 resident 34.9, 38.7       80 registers, K 128, 6 resident      39.7, 61.7
    32     4      5120 x 17408: even, 6 x 80 reg.   46.3             split 5, 6 x 80 registers            50.6
    64     3, 6   ahead, K 32, no limit, 3 resident 46.3, 54.0       128 registers, K 128, 4 resident     55.4, 76.7
    64     5      staged, K 64, even                54.4             not ahead                            69.1
    64     3      2048 x 16384: staged, K 64        26.2             ahead, K 32                          28.6
    128    3, 4   staged, K 64, even                73.7, 69.7       ahead, K 32, split 2                 85.8, 91.1
    128    3      12288 x 6144: staged, K 64        79.4             even 82.0; ahead, K 32               89.8

Other architectures take the settings that compile without spills for sm_80 .. sm_121 and gfx targets: nobody has timed them.
These are the rules; an entry for the device in a table (`exl3_triton/tables.py`), measured or predicted, goes before them.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from .. import tables
from ..format import Codebook


class LinearConfig(NamedTuple):
    """Launch parameters of a product: tokens and k of a block, parts of k, warps, most registers a thread, and whether the
    next step's words and activations are loaded ahead.

    even: 0, or programs a multiprocessor that share all steps of all output blocks evenly, across blocks (split is 1 then).
    stages: 1, or steps of activations in flight through shared memory, with words loaded ahead as well.
    """

    block_m: int
    block_k: int
    split: int
    num_warps: int
    registers: int | None = None
    prefetch: bool = False
    even: int = 0
    stages: int = 1


class Regime(NamedTuple):
    """Row counts up to `rows`: blocks of `block_m` tokens and `block_k` inputs; `resident` programs fit a multiprocessor.

    prefetch, stages: of `LinearConfig`.
    """

    rows: int
    block_m: int
    block_k: int
    num_warps: int
    registers: int | None
    resident: int
    prefetch: bool = False
    stages: int = 1


SMALL_MATRIX = 48 << 20
"""Weights of a launch below which sm_90's regime of few rows is ruled by latency."""

_HOPPER = (
    Regime(16, 16, 128, 4, 80, 6),
    Regime(32, 32, 64, 4, None, 3, prefetch=True),
    Regime(64, 64, 64, 4, 255, 2, prefetch=True, stages=3),
    Regime(255, 128, 64, 8, 128, 2, prefetch=True, stages=3),
)
_HOPPER_SMALL = Regime(16, 16, 64, 4, None, 4, prefetch=True)
_HOPPER_MANY_BITS = {  # rows -> twice the bits from which on, and what
    16: (10, Regime(16, 16, 64, 4, 168, 3, prefetch=True)),  # some formats need less, and a fourth program is one too many
    64: (12, Regime(64, 64, 32, 4, None, 3, prefetch=True)),
}
_HOPPER_EVEN = {  # what shares the steps evenly, where that differs
    (16, 6): Regime(16, 16, 128, 4, 72, 7),
    (32, 3): Regime(32, 32, 128, 4, 80, 6),
}
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
_MODES = (
    Regime(16, 16, 64, 4, None, 3),
    Regime(32, 32, 64, 4, None, 3),
    Regime(64, 64, 64, 8, None, 2),
    Regime(255, 64, 64, 8, None, 2),
)
_INT8 = (*_MODES[:3], Regime(1 << 31, 64, 64, 8, None, 0))  # never decoded once; many blocks of tokens need no split


class Device(NamedTuple):
    """What the choice depends on: "sm_90", "cuda" (other NVIDIA GPUs), "hip" or "host", the multiprocessors, and by which
    name and compute capability to look for a table (no name: the rules alone).
    """

    family: str
    processors: int
    name: str = ""
    capability: tuple[int, int] = (0, 0)


@cache
def device_of(device: torch.device) -> Device:
    """The `Device` of a torch device; a CPU (Triton's interpreter) counts as a small GPU."""
    if device.type != "cuda":
        return Device("host", 4)
    properties = torch.cuda.get_device_properties(device)
    processors = properties.multi_processor_count
    if torch.version.hip:
        return Device("hip", processors)
    capability = torch.cuda.get_device_capability(device)
    return Device("sm_90" if capability == (9, 0) else "cuda", processors, properties.name, capability)


def regimes(family: str, mode: str = "exact") -> tuple[Regime, ...]:
    """The regimes of a device family in ascending order of rows; more rows than the last one's: decode once, then matmul.

    The modes of `linear` other than "exact" share settings that compile without spills everywhere: nobody has timed them.
    """
    if mode != "exact":
        table = _INT8 if mode == "int8" else _MODES
        return tuple(regime._replace(block_k=32) for regime in table) if family == "hip" else table  # gfx1100 spills at 64
    return {"sm_90": _HOPPER, "hip": _HIP}.get(family, _CUDA)


def whole_parts(parts: int, steps: int) -> int:
    """At most `parts` (at least one) equal parts of `steps`, the last one shorter and none empty."""
    parts = max(1, min(parts, steps))
    return -(-steps // -(-steps // parts))


def split_of(regime: Regime, k: int, blocks: int, device: Device) -> int:
    """Parts of k: one full wave of resident programs, none of them empty; the same for every number of rows."""
    return whole_parts(regime.resident * device.processors // blocks, k // regime.block_k)


def owner_of(unit: int, units: int, programs: int) -> int:
    """The program that owns a unit of work where programs share units in order, the first units % programs one more each."""
    each, longer = divmod(units, programs)
    return unit // (each + 1) if unit < longer * (each + 1) else (unit - longer) // each


@cache
def programs_and_parts(config: LinearConfig, k: int, blocks: int, processors: int) -> tuple[int, int]:
    """How a launch cuts k: (0, parts of every block), or with `even` (programs, most programs that meet in one block).

    Depends on the shapes, the device and the regime, never on the number of rows.
    """
    if not config.even:
        return 0, config.split
    steps = k // config.block_k
    units = blocks * steps
    programs = min(config.even * processors, units)
    return programs, max(
        owner_of((block + 1) * steps - 1, units, programs) - owner_of(block * steps, units, programs) + 1
        for block in range(blocks)
    )


def _form(regime: Regime, k: int, blocks: int, device: Device, twice_bits: int) -> Regime:
    """`regime` as it suits the matrix."""
    if device.family != "sm_90" or regime.rows not in _HOPPER_MANY_BITS:
        return regime
    bits, form = _HOPPER_MANY_BITS[regime.rows]
    if twice_bits >= bits:
        return form
    return _HOPPER_SMALL if regime.rows == 16 and k * blocks * 128 < SMALL_MATRIX else regime


def _evenly(regime: Regime, k: int, blocks: int, device: Device) -> bool:
    """Whether programs share the steps of all blocks: where whole blocks, cut alike, leave a tenth of the slots idle, and
    there is enough work for it to matter more than the additional partial sums.
    """
    slots = regime.resident * device.processors
    programs = blocks * split_of(regime, k, blocks, device)
    filled = programs / (-(-programs // slots) * slots)
    return device.family == "sm_90" and filled < 0.9 and blocks * (k // regime.block_k) >= 6 * slots


def _from_table(regime: Regime, k: int, blocks: int, device: Device, format_code: int) -> LinearConfig | None:
    """A table's configuration for the device (`tables.py`); its split of k is scaled to the number of multiprocessors."""
    if not device.name:
        return None
    codebook = Codebook(format_code % 4).label
    key = (k, blocks * 128, codebook, format_code // 4 / 2, regime.rows)
    found = tables.entries_for("linear", *device[2:], device.processors).get(key)
    if found is None:
        return None
    entry, processors = found
    config = LinearConfig(**entry.config)
    if config.even or processors == device.processors:
        return config
    return config._replace(split=whole_parts(config.split * device.processors // processors, k // config.block_k))


@cache
def _configure(regime: Regime, k: int, blocks: int, device: Device, format_code: int, mode: str) -> LinearConfig:
    if mode == "exact":
        if (config := _from_table(regime, k, blocks, device, format_code)) is not None:
            return config
        regime = _form(regime, k, blocks, device, format_code // 4)
        if _evenly(regime, k, blocks, device):
            regime = _HOPPER_EVEN.get((regime.rows, regime.resident), regime)
            return _config_of(regime, split=1, even=regime.resident)
    return _config_of(regime, split=split_of(regime, k, blocks, device))


def _config_of(regime: Regime, *, split: int, even: int = 0) -> LinearConfig:
    return LinearConfig(
        regime.block_m, regime.block_k, split, regime.num_warps, regime.registers, regime.prefetch, even, regime.stages
    )


def select_linear(
    m: int, k: int, blocks: int, device: Device, twice_bits: int = 6, codebook: int = 1, mode: str = "exact"
) -> LinearConfig | None:
    """Launch parameters for m rows of a product over k with `blocks` blocks of 128 output features.

    twice_bits, codebook: of the matrix with the highest rate (and codebook) of the launch. A table's entry for the device goes
    before the rules. None where decoding the weights once and a plain matrix product are faster.
    """
    for regime in regimes(device.family, mode):
        if m <= regime.rows:
            return _configure(regime, k, blocks, device, 4 * twice_bits + codebook, mode)
    return None


def folds(m: int, k: int, n: int, passes: bool) -> bool:
    """Whether decoding the weights (k x n) of a product of m rows to the original basis is cheaper than rotating x and y.

    Folding costs time per weight, 0.7 ps on an H200, rotations cost time per row, 2 ps an element of x and y. passes: x has to
    be scaled and the product converted, which takes most of what rotating them does.
    """
    return (m * (k + n) > 2 * k * n) if passes else (3 * m * (k + n) > k * n)
