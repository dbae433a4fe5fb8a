"""The mixture-of-experts feed-forward: router, routed experts, shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..format import ExpertWeights
from ..plan import BoundMoe
from .config import ModelConfig
from .layers import Exl3Linear, GatedMLP, PlainExperts
from .parallel import Partition

RIDING_ROWS = 32
"""Most rows with which a shared expert rides along: there it costs no launches of its own. More rows of it are faster in
matrix products of their own than in the blocks of routed experts, which have few rows each."""


class _Joined:
    """Where a gated MLP takes its matrices from when they are the last of some experts' slabs."""

    def __init__(self, experts: ExpertWeights):
        self.experts = experts

    def linear(self, name: str, in_features: int, out_features: int, *, inputs: Any = None, outputs: Any = None) -> Exl3Linear:
        projection = getattr(self.experts, name.rpartition(".")[2].removesuffix("_proj"))
        sizes = {"in_features": len(inputs or range(in_features)), "out_features": len(outputs or range(out_features))}
        return Exl3Linear(replace(projection.expert(projection.num_experts - 1), **sizes))


class MoE(nn.Module):
    """shared(x) + sum over the chosen experts of weight * expert(x); the routed sum runs in fp32.

    A rank has a part of every expert's width, or some of the experts, and a part of the shared expert; every rank routes. A
    shared expert of the routed ones' size and kind is stored behind them (`joined`): with few rows it is one more route of
    every token.
    """

    gate: Tensor
    correction_bias: Tensor | None
    expert_map: Tensor | None

    def __init__(self, config: ModelConfig, source: Any, layer: int, partition: Partition):
        super().__init__()
        self.config = c = config
        name = f"layers.{layer}.mlp"
        self.register_buffer("gate", source.tensor(f"{name}.gate.weight", (c.num_experts, c.hidden_size)))
        bias_name = f"{name}.gate.e_score_correction_bias"
        biased = c.scoring == "sigmoid"  # a softmax router chooses by the scores themselves
        bias = source.tensor(bias_name, (c.num_experts,), dtype=torch.float32) if biased else None
        self.register_buffer("correction_bias", bias)
        # slices by intermediate width, whose outputs add up; one, unless the checkpoint is rank-sliced
        shared_name = f"{name}.shared_experts" if c.num_shared_experts == 1 else None
        self.experts: tuple[ExpertWeights, ...] | PlainExperts = source.expert_slices(
            f"{name}.experts", c.num_experts, c.hidden_size, c.moe_intermediate_size, shared_name
        )
        first = None if isinstance(self.experts, PlainExperts) else self.experts[0]
        self.joined = first is not None and first.num_experts > c.num_experts
        self.bound: BoundMoe | None = None  # the model's plan over its arena; without one a call allocates its scratch
        width = c.moe_intermediate_size * c.num_shared_experts
        part = partition.shared
        place = _Joined(first) if self.joined and first is not None else source
        self.shared = GatedMLP(place, f"{name}.shared_experts", c.hidden_size, width, part) if width else None
        self.shared_group = partition.group_of(part, width)
        by_expert = partition.group_of(partition.experts, c.num_experts)
        held = (
            partition.moe if isinstance(self.experts, PlainExperts) else range(sum(e.intermediate_size for e in self.experts))
        )
        self.group = by_expert or partition.group_of(held, c.moe_intermediate_size)
        expert_map = None
        if by_expert:
            numbers = torch.arange(c.num_experts, dtype=torch.int32) - partition.experts.start
            expert_map = numbers.where((numbers >= 0) & (numbers < len(partition.experts)), -1).to(self.gate.device)
        self.register_buffer("expert_map", expert_map, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] (normed) -> fp32 [T, hidden]."""
        c = self.config
        rides = self.joined and x.shape[0] <= RIDING_ROWS
        weights, ids = ops.router(
            x,
            self.gate,
            self.correction_bias,
            top_k=c.experts_per_token,
            scoring=c.scoring,
            n_group=c.n_group,
            topk_group=c.topk_group,
            norm_topk_prob=c.norm_topk_prob,
            scaling=c.routed_scaling_factor,
            always=(c.num_experts if rides else -1) if self.joined else None,
        )
        routed = self._routed(x, ids, weights)
        if self.shared is None or rides:
            return ops.all_reduce(routed, self.group)
        shared = self.shared(x)
        if self.group == self.shared_group:
            return ops.all_reduce(routed.add_(shared), self.group)
        return ops.all_reduce(routed, self.group) + ops.all_reduce(shared, self.shared_group)

    def _routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """fp32 [T, hidden], this rank's part of the routed sum; slices are added in the order of their ranks."""
        if isinstance(self.experts, PlainExperts):
            plain, local = self.experts, ids if self.expert_map is None else self.expert_map[ids]
            return ops.plain_moe(x, plain.gate, plain.up, plain.down, local, weights)
        total: Tensor | None = None
        for experts in self.experts:
            if self.bound is not None:
                out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
                out = self.bound(x, experts, ids, weights, out=out, expert_map=self.expert_map)
            else:
                out = ops.moe(x, experts, ids, weights, out_dtype=torch.float32, expert_map=self.expert_map)
            total = out if total is None else total.add_(out)
        assert total is not None  # a process has at least one slice
        return total
