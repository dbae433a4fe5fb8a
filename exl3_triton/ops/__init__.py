"""The ops, one module each: Triton kernels, launcher, `torch.library` custom op in the namespace `exl3_triton`.

GPU tensors run the kernels; CPU tensors run `exl3_triton.reference`, unless EXL3_TRITON_BACKEND says otherwise.
"""

from .attention import mla_decode, mla_prefill
from .collective import all_reduce, gather_columns
from .gqa import gqa_attention, gqa_kv_write
from .head_matmul import head_matmul
from .indexer import index_select
from .kv_cache import index_k_write, mla_kv_write
from .linear import linear, linears
from .moe import moe
from .norm import add_rms_norm, rms_norm
from .plain_moe import plain_moe
from .rope import rope
from .router import router
from .swiglu import swiglu
from .trellis import dequantize

__all__ = [
    "add_rms_norm",
    "all_reduce",
    "dequantize",
    "gather_columns",
    "gqa_attention",
    "gqa_kv_write",
    "head_matmul",
    "index_k_write",
    "index_select",
    "linear",
    "linears",
    "mla_decode",
    "mla_kv_write",
    "mla_prefill",
    "moe",
    "plain_moe",
    "rms_norm",
    "rope",
    "router",
    "swiglu",
]
