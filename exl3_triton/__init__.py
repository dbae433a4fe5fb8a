"""EXL3 (trellis-quantized) inference for GLM and DeepSeek mixture-of-experts models, in pure Triton.

    from exl3_triton import LLM
    for output in LLM("path/to/checkpoint", device="cuda").generate(["Hello"]):
        print(output.text, end="")

`load` gives the model itself, `Exl3Linear` and `ops` (linear, moe, dequantize, ...) serve other people's models.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import ops as ops
    from ._warmup import warmup as warmup
    from .format import Codebook as Codebook
    from .format import ExpertWeights as ExpertWeights
    from .format import FormatError as FormatError
    from .format import TrellisWeight as TrellisWeight
    from .model.layers import Exl3Linear as Exl3Linear
    from .model.rank_group import RankGroup as RankGroup
    from .model.runner import LLM as LLM
    from .model.sampling import SamplingParams as SamplingParams
    from .model.transformer import Transformer as Transformer
    from .model.transformer import load as load
    from .plan import MoePlan as MoePlan
    from .plan import MoeSpec as MoeSpec
    from .plan import plan_moe as plan_moe

_EXPORTS = {
    "Codebook": ".format",
    "Exl3Linear": ".model.layers",
    "ExpertWeights": ".format",
    "FormatError": ".format",
    "LLM": ".model.runner",
    "MoePlan": ".plan",
    "MoeSpec": ".plan",
    "RankGroup": ".model.rank_group",
    "SamplingParams": ".model.sampling",
    "Transformer": ".model.transformer",
    "TrellisWeight": ".format",
    "load": ".model.transformer",
    "plan_moe": ".plan",
    "warmup": "._warmup",
}
__all__ = [*sorted(_EXPORTS), "ops"]


def __getattr__(name: str) -> Any:  # torch and the model are imported by what needs them: `exl3-triton --help` is quick
    if name == "ops":
        return importlib.import_module(".ops", __name__)
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
