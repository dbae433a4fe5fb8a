"""Multi-head latent attention, with the indexer of sparse attention where the family has one.

Sources: DeepSeek-V2, arXiv:2405.04434 (MLA); DeepSeek-V3.2, arXiv:2512.02556 (lightning indexer).
The cache holds one row a token: the normalised latent (C) and the turned rope key (R), shared by all heads. Prefill unfolds
keys and values per head from it; decoding and sparse attention move the queries into the latent space instead.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from .. import ops
from .cache import Batch, LatentCache
from .config import ModelConfig
from .layers import RMSNorm, linears
from .parallel import Partition

INDEX_NORM_EPS = 1e-6


class Indexer(nn.Module):
    """Chooses the positions that sparse attention may see; writes its own key for every token, also while all are seen."""

    k_norm_weight: Tensor
    k_norm_bias: Tensor

    def __init__(self, config: ModelConfig, source: Any, name: str):
        super().__init__()
        self.config = config
        heads, width = config.index_num_heads, config.index_head_dim
        assert config.q_lora_rank is not None  # the config reader refuses an indexer without it
        self.wq_b = source.linear(f"{name}.wq_b", config.q_lora_rank, heads * width)
        self.wk = source.linear(f"{name}.wk", config.hidden_size, width)
        self.weights_proj = source.linear(f"{name}.weights_proj", config.hidden_size, heads)
        self.register_buffer("k_norm_weight", source.tensor(f"{name}.k_norm.weight", (width,)))
        self.register_buffer("k_norm_bias", source.tensor(f"{name}.k_norm.bias", (width,)))

    def forward(self, x: Tensor, q_latent: Tensor, batch: Batch, keys: Tensor, table: Tensor) -> Tensor | None:
        """int32 [T, index_topk] positions, or None while no context is longer than that and every position is seen."""
        c = self.config
        norm = (self.k_norm_weight, self.k_norm_bias, INDEX_NORM_EPS)
        interleaved = c.indexer_rope_interleave
        k = self.wk(x, torch.float32)
        ops.index_k_write(k, *norm, batch.positions, batch.slots, table, keys, interleaved=interleaved)
        if batch.max_context <= c.index_topk:
            return None
        q = rearrange(self.wq_b(q_latent), "token (head d) -> token head d", head=c.index_num_heads)
        q = ops.rope(q, batch.positions, table, interleaved=interleaved)
        weights = self.weights_proj(x.float(), torch.float32)  # times (heads * width)^-1/2, which does not change an order
        place = (batch.block_table, batch.sequence, batch.positions)
        return ops.index_select(q, weights, keys, *place, topk=c.index_topk, max_context=batch.max_context)


class MLA(nn.Module):
    """One attention layer: it attends to everything, or to what its indexer or that of an earlier layer selected.

    A rank has some of the heads, and the latents, their cache and the indexer whole.
    """

    kv_a_norm: Tensor
    w_uk: Tensor
    w_uv: Tensor

    def __init__(self, config: ModelConfig, source: Any, layer: int, partition: Partition):
        super().__init__()
        self.config, c = partition.local(config), config
        self.group = partition.group_of(partition.heads, c.num_heads)
        name, heads = f"layers.{layer}.self_attn", partition.heads
        queries = range(heads.start * c.head_dim, heads.stop * c.head_dim)
        values = range(heads.start * c.v_head_dim, heads.stop * c.v_head_dim)
        self.q_a = self.q_a_norm = None
        if c.q_lora_rank is None:
            self.q_b = source.linear(f"{name}.q_proj", c.hidden_size, c.num_heads * c.head_dim, outputs=queries)
        else:
            self.q_a = source.linear(f"{name}.q_a_proj", c.hidden_size, c.q_lora_rank)
            self.q_a_norm = RMSNorm(source.tensor(f"{name}.q_a_layernorm.weight", (c.q_lora_rank,)), c.latent_norm_eps)
            self.q_b = source.linear(f"{name}.q_b_proj", c.q_lora_rank, c.num_heads * c.head_dim, outputs=queries)
        self.kv_a = source.linear(f"{name}.kv_a_proj_with_mqa", c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.register_buffer("kv_a_norm", source.tensor(f"{name}.kv_a_layernorm.weight", (c.kv_lora_rank,)))
        each = c.qk_nope_head_dim + c.v_head_dim
        rows = slice(heads.start * each, heads.stop * each)
        kv_b = source.tensor(f"{name}.kv_b_proj.weight", (c.num_heads * each, c.kv_lora_rank), part=(rows,))
        kv_b = rearrange(kv_b, "(head d) c -> head d c", head=len(heads))
        w_uk, w_uv = kv_b.split([c.qk_nope_head_dim, c.v_head_dim], dim=1)
        self.register_buffer("w_uk", w_uk.contiguous())
        self.register_buffer("w_uv", w_uv.contiguous())
        self.o = source.linear(f"{name}.o_proj", c.num_heads * c.v_head_dim, c.hidden_size, inputs=values)
        self.indexer = Indexer(c, source, f"{name}.indexer") if c.owns_indexer(layer) else None

    def forward(
        self, x: Tensor, batch: Batch, cache: LatentCache, selected: Tensor | None, table: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden] (normed) -> (fp32 [T, hidden], the selection for following "shared" layers)."""
        c, latent = self.config, cache.rows
        if self.q_a is None or self.q_a_norm is None:
            q_latent, kv = x, self.kv_a(x, torch.float32)
        else:
            q_a, kv = linears(x, [self.q_a, self.kv_a], torch.float32)
            q_latent = self.q_a_norm(q_a, x.dtype)
        q = rearrange(self.q_b(q_latent), "token (head d) -> token head d", head=c.num_heads)
        interleaved = c.rope_interleave
        q = ops.rope(q, batch.positions, table, interleaved=interleaved, start=c.qk_nope_head_dim)
        write = (self.kv_a_norm, c.latent_norm_eps, batch.positions, batch.slots, table, latent)
        ops.mla_kv_write(kv, *write, interleaved=interleaved, latent_scale=cache.latent_scale)
        if self.indexer is not None:
            assert cache.index_keys is not None
            selected = self.indexer(x, q_latent, batch, cache.index_keys, table)
        o = self._attend(q, batch, cache, selected)
        out = self.o(rearrange(o, "token head v -> token (head v)"), torch.float32)
        return ops.all_reduce(out, self.group), selected

    def _attend(self, q: Tensor, batch: Batch, cache: LatentCache, selected: Tensor | None) -> Tensor:
        """[T, heads, v] of turned queries [T, heads, D]; what is in the latent space, and large, lives no longer than this."""
        c, place = self.config, (batch.block_table, batch.sequence, batch.positions)
        limits: dict[str, Any] = {
            "scale": c.softmax_scale, "max_context": batch.max_context, "latent_scale": cache.latent_scale
        }  # fmt: skip
        if batch.prefill and selected is None:
            return ops.mla_prefill(q, cache.rows, self.w_uk, self.w_uv, *place, **limits)
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        absorbed = ops.head_matmul(q_nope, self.w_uk)
        o, _ = ops.mla_decode(absorbed, q_rope, cache.rows, *place, selected, **limits)
        return ops.head_matmul(o, self.w_uv.transpose(1, 2))
