"""How far one rounding may be off: what the kernel tests' tolerances are made of."""

import os

import torch

EPS = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}  # distance of neighbours, relative
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def rounding(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to `dtype`: half a step (Triton's interpreter cuts bf16 off: a whole one)."""
    return EPS[dtype] * (1.0 if INTERPRETED and dtype == torch.bfloat16 else 0.5)
