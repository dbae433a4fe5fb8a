"""The mixture-of-experts feed-forward: router, routed experts, shared expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..format import ExpertWeights
from ..plan import BoundMoe
from .config import ModelConfig
from .layers import GatedMLP, PlainExperts
from .parallel import Partition


class MoE(nn.Module):
    """shared(x) + sum over the chosen experts of weight * expert(x); the routed sum runs in fp32.

    A rank has a part of every expert's width, or some of the experts, and a part of the shared expert; every rank routes.
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
        self.experts: tuple[ExpertWeights, ...] | PlainExperts = source.expert_slices(
            f"{name}.experts", c.num_experts, c.hidden_size, c.moe_intermediate_size
        )
        self.bound: BoundMoe | None = None  # the model's plan over its arena; without one a call allocates its scratch
        width = c.moe_intermediate_size * c.num_shared_experts
        part = partition.shared
        self.shared = GatedMLP(source, f"{name}.shared_experts", c.hidden_size, width, part) if width else None
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
        )
        routed = self._routed(x, ids, weights)
        if self.shared is None:
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
