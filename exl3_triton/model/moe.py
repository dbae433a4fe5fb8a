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


class MoE(nn.Module):
    """shared(x) + sum over the chosen experts of weight * expert(x); the routed sum runs in fp32."""

    gate: Tensor
    correction_bias: Tensor | None

    def __init__(self, config: ModelConfig, source: Any, layer: int):
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
        self.shared = GatedMLP(source, f"{name}.shared_experts", c.hidden_size, width) if width else None

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
        return routed if self.shared is None else routed + self.shared(x)

    def _routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """fp32 [T, hidden]; slices are added in the order of their ranks."""
        if isinstance(self.experts, PlainExperts):
            return ops.plain_moe(x, self.experts.gate, self.experts.up, self.experts.down, ids, weights)
        total: Tensor | None = None
        for experts in self.experts:
            if self.bound is not None:
                out = self.bound(x, experts, ids, weights, out=torch.empty(x.shape, dtype=torch.float32, device=x.device))
            else:
                out = ops.moe(x, experts, ids, weights, out_dtype=torch.float32)
            total = out if total is None else total.add_(out)
        assert total is not None  # a process has at least one slice
        return total
