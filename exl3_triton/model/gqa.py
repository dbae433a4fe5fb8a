"""Grouped-query attention: each key-value head serves a group of query heads, over a cache of keys and values."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from .. import ops
from ..format import FormatError
from .cache import Batch, GroupedCache
from .config import ModelConfig
from .layers import RMSNorm, linears
from .parallel import Partition


class GQA(nn.Module):
    """One attention layer, with biases on queries, keys and values and norms on queries and keys where the config says so.

    A rank has some of the key-value heads, in its cache too, and the query heads that they serve.
    """

    k_norm: Tensor | None

    def __init__(self, config: ModelConfig, source: Any, layer: int, partition: Partition):
        super().__init__()
        self.config, c = partition.local(config), config
        self.group = partition.group_of(partition.heads, c.num_heads)
        name = f"layers.{layer}.self_attn"
        widths = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.v_head_dim)
        names = [f"{name}.{letter}_proj" for letter in "qkv"]
        spans = ((partition.heads, c.head_dim), (partition.kv_heads, c.head_dim), (partition.kv_heads, c.v_head_dim))
        parts = [range(heads.start * width, heads.stop * width) for heads, width in spans]
        self.q, self.k, self.v = (
            source.linear(n, c.hidden_size, width, outputs=part) for n, width, part in zip(names, widths, parts, strict=True)
        )
        for projection, linear in zip(names, (self.q, self.k, self.v), strict=True):
            if c.attention_bias != (linear.bias is not None):
                found, required = ("none", "one") if c.attention_bias else ("one", "none")
                rule = f"attention_bias is {str(c.attention_bias).lower()} in config.json"
                raise FormatError(f"{projection}.bias: found {found}, required {required} ({rule})")
        values = range(partition.heads.start * c.v_head_dim, partition.heads.stop * c.v_head_dim)
        self.o = source.linear(f"{name}.o_proj", c.num_heads * c.v_head_dim, c.hidden_size, inputs=values)
        q_norm, k_norm = (source.tensor(f"{name}.{p}_norm.weight", (c.head_dim,)) if c.use_qk_norm else None for p in "qk")
        self.q_norm = RMSNorm(q_norm, c.rms_norm_eps) if q_norm is not None else None
        self.register_buffer("k_norm", k_norm)

    def forward(
        self, x: Tensor, batch: Batch, cache: GroupedCache, selected: Tensor | None, table: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden] (normed) -> (fp32 [T, hidden], `selected` as it came: this attention sees every position)."""
        c = self.config
        q, k, v = linears(x, [self.q, self.k, self.v], torch.float32)
        q = rearrange(q, "token (head d) -> token head d", head=c.num_heads)
        k, v = (rearrange(each, "token (head d) -> token head d", head=c.num_kv_heads) for each in (k, v))
        q = q.to(x.dtype) if self.q_norm is None else self.q_norm(q, x.dtype)
        q = ops.rope(q, batch.positions, table, interleaved=c.rope_interleave)
        write = (self.k_norm, c.rms_norm_eps, batch.positions, batch.slots, table, cache.keys, cache.values)
        ops.gqa_kv_write(k, v, *write, interleaved=c.rope_interleave)
        place = (batch.block_table, batch.sequence, batch.positions)
        scale, bound = c.softmax_scale, batch.max_context
        o, _ = ops.gqa_attention(q, cache.keys, cache.values, *place, scale=scale, max_context=bound, prefill=batch.prefill)
        out = self.o(rearrange(o, "token head v -> token (head v)"), torch.float32)
        return ops.all_reduce(out, self.group), selected
