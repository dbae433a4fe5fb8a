"""What a forward pass has to read and multiply at least, op by op: the yardstick of the benchmarks.

A kernel's limit is the largest of three times: its bytes over the memory's read rate, its FLOPs over the rate of a plain fp16
matrix product, and the weights that it decodes over the rate at which `INSTRUCTIONS_PER_WEIGHT` instructions of the vector
units decode them. Bytes are weights and cache rows, each read once; activations, which mostly stay in the L2 cache, rotations,
norms and samplers count as nothing, so the sum over all ops is a lower bound that no kernel passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from .attention import MLA
from .cache import GroupedCache, KVCache, LatentCache
from .gqa import GQA
from .layers import Exl3Linear, PlainExperts, PlainLinear
from .moe import MoE
from .transformer import Transformer

INSTRUCTIONS_PER_WEIGHT = 5  # what decoding a weight costs at least


@dataclass(frozen=True)
class Work:
    """New tokens of some sequences, `tokens` each, behind `past` cached ones; prefill: the form of attention (`Batch`)."""

    sequences: int
    tokens: int
    past: int
    prefill: bool

    @property
    def rows(self) -> int:
        """All new tokens."""
        return self.sequences * self.tokens

    @property
    def context(self) -> int:
        """Positions of a sequence, the new ones included."""
        return self.past + self.tokens

    def pairs(self, most: int | None = None) -> int:
        """Pairs of a new token and a position that it attends to, at most `most` for each token."""
        if most is None or self.context <= most:
            return self.sequences * (self.tokens * self.past + self.tokens * (self.tokens + 1) // 2)
        free = max(0, min(self.tokens, most - self.past))  # tokens that still see every position
        return self.sequences * (free * self.past + free * (free + 1) // 2 + (self.tokens - free) * most)

    def keys(self, most: int | None = None) -> int:
        """Cache rows read at least: every position once, or as many as can be chosen."""
        return self.sequences * (self.context if most is None else min(self.context, self.pairs(most) // self.sequences))


class Cost(NamedTuple):
    """One op of a pass: bytes read, floating-point operations, weights decoded from trellises."""

    name: str
    bytes: float
    flops: float
    decoded: float = 0.0


def limit_us(costs: Iterable[Cost], *, gbps: float, tflops: float, instructions: float = math.inf) -> float:
    """The sum of the ops' own limits in microseconds.

    gbps: the read rate in GB/s; tflops: of a matrix product, in TFLOP/s; instructions: of all lanes of the vector units
    together, a second, by default without a limit.
    """
    decode = 1e6 * INSTRUCTIONS_PER_WEIGHT / instructions
    return sum(max(cost.bytes / gbps / 1e3, cost.flops / tflops / 1e6, cost.decoded * decode) for cost in costs)


def pass_costs(model: Transformer, cache: KVCache, work: Work) -> list[Cost]:
    """Every op of `forward` over this work, in order; the head is apart (`head_costs`)."""
    costs: list[Cost] = []
    for block, layer_cache in zip(model.blocks, cache.layers, strict=True):
        attention: Any = block.attention
        layer = _mla(attention, layer_cache, work) if isinstance(attention, MLA) else _gqa(attention, layer_cache, work)
        costs += [*_linears(attention, work.rows), *layer]
        costs += _linears(block.feed_forward, work.rows)
        if isinstance(block.feed_forward, MoE):
            costs += _experts(block.feed_forward, work.rows)
    return costs


def head_costs(model: Transformer, rows: int) -> list[Cost]:
    """`compute_logits` of `rows` states."""
    return _linears(nn.ModuleList([model.lm_head]), rows)


def bytes_of(module: nn.Module) -> int:
    """Bytes of a module's own buffers."""
    return sum(buffer.nbytes for buffer in module.buffers(recurse=False))


def _linears(module: Any, rows: int) -> list[Cost]:
    """The linear layers below a module, without an indexer's, which not every pass runs."""
    return [
        Cost(name, bytes_of(each), 2.0 * rows * each.in_features * each.out_features, _decoded(each))
        for name, each in module.named_modules()
        if isinstance(each, (Exl3Linear, PlainLinear)) and not name.startswith("indexer.")
    ]


def _decoded(layer: Exl3Linear | PlainLinear) -> float:
    return float(layer.weight.padded_in * layer.weight.padded_out) if isinstance(layer, Exl3Linear) else 0.0


def _row_bytes(cache: Tensor) -> int:
    """Bytes of a token's row in a cache [pages, 64, ...]."""
    return cache[0, 0].nbytes


def _gqa(attention: GQA, cache: GroupedCache | LatentCache, work: Work) -> list[Cost]:
    assert isinstance(cache, GroupedCache)
    c = attention.config
    row = _row_bytes(cache.keys) + _row_bytes(cache.values)
    return [Cost("attention", work.keys() * row, 2.0 * work.pairs() * c.num_heads * (c.head_dim + c.v_head_dim))]


def _mla(attention: MLA, cache: LatentCache | GroupedCache, work: Work) -> list[Cost]:
    """Dense prefill unfolds keys and values of every head from the latents; the other forms move queries and sums instead."""
    assert isinstance(cache, LatentCache)
    c, row = attention.config, _row_bytes(cache.rows)
    unfold = c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)
    weights = attention.w_uk.nbytes + attention.w_uv.nbytes
    costs: list[Cost] = []
    most = None
    if c.indexer_kinds and work.context > c.index_topk:
        most = c.index_topk
    if attention.indexer is not None:
        indexer, keys = attention.indexer, cache.index_keys
        assert keys is not None
        skipped = () if most else ("wq_b", "weights_proj")
        costs += [cost for cost in _linears(indexer, work.rows) if cost.name not in skipped]
        if most:
            flops = 2.0 * work.pairs() * c.index_num_heads * c.index_head_dim
            costs.append(Cost("index scores", work.keys() * _row_bytes(keys), flops))
    if work.prefill and most is None:
        flops = 2.0 * c.num_heads * (work.pairs() * (c.head_dim + c.v_head_dim) + work.keys() * unfold)
        return [*costs, Cost("attention", work.keys() * row + weights, flops)]
    costs.append(Cost("absorption", weights, 2.0 * work.rows * c.num_heads * unfold))
    flops = 2.0 * work.pairs(most) * c.num_heads * (2 * c.kv_lora_rank + c.qk_rope_head_dim)
    return [*costs, Cost("attention", work.keys(most) * row, flops)]


def _experts(moe: MoE, rows: int) -> list[Cost]:
    """Router and routed experts; of E experts evenly random routes of `rows` tokens reach E (1 - (1 - k / E) ** rows)."""
    c, experts = moe.config, moe.experts
    if isinstance(experts, PlainExperts):
        whole, decoded = float(bytes_of(experts)), 0.0
    else:
        projections = [projection for part in experts for projection in part.projections]
        whole = sum(each.nbytes for p in projections for each in (p.words, p.suh, p.svh))
        decoded = float(sum(p.num_experts * p.padded_in * p.padded_out for p in projections))
        routed = c.num_experts / (c.num_experts + moe.joined)  # a shared expert's matrices count as linear layers
        whole, decoded = whole * routed, decoded * routed
    reached = 1 - (1 - c.experts_per_token / c.num_experts) ** rows
    flops = 6.0 * rows * c.experts_per_token * c.hidden_size * c.moe_intermediate_size
    router = Cost("router", moe.gate.nbytes, 2.0 * rows * c.num_experts * c.hidden_size)
    return [router, Cost("experts", whole * reached, flops, decoded * reached)]
