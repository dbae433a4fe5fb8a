"""The next-token layer behind the trunk (MTP, "NextN"): a state and the token after it give the token after that.

Source: DeepSeek-V3, arXiv:2412.19437, section 2.2. Position i takes the trunk's state after its final norm and the embedding
of token i + 1, embedding first, and predicts token i + 2. Fed its own output in place of the trunk's state, the same layer
predicts the token after that, and so on. It has its own attention, indexer, experts and cache, and shares the trunk's
embedding and head; the copies of those two that some checkpoints carry are never read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import Batch, KVCache
from .config import ModelConfig
from .layers import RMSNorm

FAMILIES = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")


def check_mtp(config: ModelConfig) -> None:
    """Raises ValueError unless the config describes a next-token layer: a family that has one, exactly one of them."""
    if config.model_type not in FAMILIES:
        raise ValueError(f"mtp: model_type {config.model_type!r} has no next-token layer; required: {', '.join(FAMILIES)}")
    if config.num_mtp_layers != 1:
        raise ValueError(
            f"mtp: config.json: num_nextn_predict_layers = {config.num_mtp_layers}, required 1 (one layer, used again for "
            "each further token)"
        )


def mtp_layer_config(config: ModelConfig) -> ModelConfig:
    """The config in which layer `num_layers` exists: routed experts, an indexer of its own where the family has one."""
    indexers = (*config.indexer_kinds, "full") if config.indexer_kinds else ()
    return replace(config, layer_kinds=(*config.layer_kinds, "sparse"), indexer_kinds=indexers)


def copies_of_the_trunk(config: ModelConfig) -> tuple[str, ...]:
    """Names below the layer that repeat the trunk's embedding and head."""
    return tuple(f"layers.{config.num_layers}.{name}" for name in ("embed_tokens", "shared_head.head"))


class MTP(nn.Module):
    """The next-token layer. `block` is layer `config.num_layers` of `mtp_layer_config(config)`."""

    def __init__(self, config: ModelConfig, source: Any, block: nn.Module, *, dtype: torch.dtype):
        super().__init__()
        self.config, self.dtype = config, dtype
        name, hidden, eps = f"layers.{config.num_layers}", config.hidden_size, config.rms_norm_eps
        self.embedding_norm = RMSNorm(source.tensor(f"{name}.enorm.weight", (hidden,)), eps)
        self.hidden_norm = RMSNorm(source.tensor(f"{name}.hnorm.weight", (hidden,)), eps)
        self.projection = source.linear(f"{name}.eh_proj", 2 * hidden, hidden)
        self.block = block
        self.norm = RMSNorm(source.tensor(f"{name}.shared_head.norm.weight", (hidden,)), eps)

    def new_cache(self, num_pages: int) -> KVCache:
        """A cache of this one layer; a sequence takes the pages that it has in the trunk's cache."""
        kinds = ("full",) if self.config.indexer_kinds else ()
        layer = replace(self.config, num_layers=1, layer_kinds=("sparse",), indexer_kinds=kinds)
        return KVCache.allocate(layer, num_pages, dtype=self.dtype, device=self.norm.weight.device)

    def forward(self, batch: Batch, hidden: Tensor, cache: KVCache, embedding: Tensor, rope_table: Tensor) -> Tensor:
        """States [T, hidden] in the activation dtype, for the trunk's head, and for this layer again one position on.

        batch: positions and slots of the states, and as `tokens` the token after each. hidden [T, hidden]: the trunk's
        states after its final norm, or this layer's. cache: one layer's. embedding, rope_table: the trunk's.
        """
        embedded = self.embedding_norm(F.embedding(batch.tokens, embedding), self.dtype)
        joined = torch.cat([embedded, self.hidden_norm(hidden, self.dtype)], dim=-1)
        residual = self.projection(joined, torch.float32)
        block: Any = self.block
        normed = block.input_norm(residual, self.dtype)
        out, _ = block.attention(normed, batch, cache.layers[0], None, rope_table)
        out = block.feed_forward(block.post_norm.add(residual, out, self.dtype))
        return self.norm.add(residual, out, self.dtype)
