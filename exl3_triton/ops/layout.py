"""How a decoded block lies in registers: the order of its dimensions and of k, by Triton version and architecture.

Triton chooses the layout of a `tl.dot` operand itself. Of the ways to write the same block, one gets each decoded weight
where the matrix instruction wants it; the others cost a shuffle or a round trip through shared memory per weight. Which one
it is was found by compiling all of them (`python -m autotune audit --layouts`) and is asserted by the tests for the Triton
that is installed:

    Triton 3.6   sm_90: lanes first, natural k      sm_80, 86, 89, 120, 121: lanes first, k' order
    Triton 3.7   sm_90: lanes last, natural k       sm_80, 86, 89, 120, 121: lanes last, k' order
    Triton 3.9   lanes last, natural k
    sm_100 and AMD: the operand goes through shared memory in every layout
"""

from functools import cache

import torch

from ._triton import TRITON_VERSION, tl, triton

LANES_FIRST = 1
"""Bit of `layout_variant`: lane dimensions lead the decode tensor (what Triton before 3.7 maps to the fragment's lanes)."""

K_ORDER4 = 2
"""Bit of `layout_variant`: k' order, where position 4 (l % 4) + 2 j8 + j1 of a 16-tile holds k = 2 (l % 4) + 8 j8 + j1."""

NVIDIA = 4
"""Bit of `layout_variant`: MUL1 in PTX (byte sums by dp4a), with the same results in half the instructions."""

SHIFTS_BY_MULTIPLIER = 8
"""Bit of `layout_variant`: MCG and 3INST in PTX too, with fewer instructions of the integer pipe and more registers.

In one run on an H200, at 3 bits, the product took 25.7 us for MCG this way and 35.5 for 3INST the plain way. Elsewhere nobody
has measured it, and its registers spill on sm_86, 89 and 120.
"""

WORD_ORDER = 16
"""Bit added to `layout_variant` for `decode_words` with PARTS > 1, where one codeword fills an operand register: the weight at
k = 2 (l % 4) + 8 j8 + j1 of a 16-tile stands at 8 j1 + 4 j8 + l % 4 (with K_ORDER4 at 8 j1 + 2 (l % 4) + j8), PARTS times.
"""


def layout_variant_for(backend: str, arch: int | str) -> int:
    """The way to decode (LANES_FIRST | K_ORDER4 | NVIDIA | SHIFTS_BY_MULTIPLIER) that is cheapest on a target.

    backend: "cuda" or "hip"; arch: 90 for sm_90, "gfx942" and so on (the fields of triton's GPUTarget).
    """
    variant = LANES_FIRST if TRITON_VERSION < (3, 7) else 0
    if backend == "cuda":
        variant |= NVIDIA | (SHIFTS_BY_MULTIPLIER if arch == 90 else 0)
        if arch != 90 and TRITON_VERSION < (3, 9):
            variant |= K_ORDER4
    return variant


@cache
def layout_variant(device: torch.device) -> int:
    """`layout_variant_for` of a torch device; a CPU (the interpreter) takes none of its bits."""
    if device.type != "cuda":
        return 0
    if torch.version.hip:
        return layout_variant_for("hip", torch.cuda.get_device_properties(device).gcnArchName.split(":")[0])
    major, minor = torch.cuda.get_device_capability(device)
    return layout_variant_for("cuda", 10 * major + minor)


@triton.jit
def k_order(SIZE: tl.constexpr, VARIANT: tl.constexpr):
    """int32 [SIZE]: the input feature, relative to the block, that each position along k of a decoded block stands for."""
    p = tl.arange(0, SIZE)
    if VARIANT & 16:
        j8 = p % 2 if VARIANT & 2 else (p // 4) % 2
        p = (p // 16) * 16 + j8 * 8 + ((p // 2) % 4 if VARIANT & 2 else p % 4) * 2 + (p // 8) % 2
    elif VARIANT & 2:
        p = (p // 16) * 16 + ((p // 2) % 2) * 8 + ((p // 4) % 4) * 2 + p % 2
    return p


@triton.jit
def k_position(k, VARIANT: tl.constexpr):
    """The inverse of `k_order`, for any tensor of feature indices: the position along k at which feature `k` is expected."""
    if VARIANT & 16:
        lane, j8 = (k // 2) % 4, (k // 8) % 2
        k = (k // 16) * 16 + (k % 2) * 8 + (lane * 2 + j8 if VARIANT & 2 else j8 * 4 + lane)
    elif VARIANT & 2:
        k = (k // 16) * 16 + ((k // 2) % 4) * 4 + ((k // 8) % 2) * 2 + k % 2
    return k
