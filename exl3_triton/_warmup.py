"""Compiling ahead: after `warmup` nothing compiles, whatever number of rows arrives."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import ops
from .format import ExpertWeights
from .model.cache import Batch, pages_for
from .model.layers import Exl3Linear
from .model.moe import MoE
from .model.transformer import Transformer
from .plan import BoundMoe
from .reference import PAGE


def row_counts(max_tokens: int) -> list[int]:
    """One number of rows in each class that launchers distinguish up to `max_tokens`: powers of two, and one above each."""
    counts, power = {max_tokens}, 1
    while power <= max_tokens:
        counts.update(count for count in (power, power + 1) if count <= max_tokens)
        power *= 2
    return sorted(counts)


def plan_row_counts(bound: BoundMoe, max_tokens: int) -> list[int]:
    """`row_counts` with the ends of a plan's regimes, up to `max_tokens` and the plan's own limit."""
    plan = bound.plan
    counts = {count for regime in plan.regimes for count in (regime.rows, regime.rows + 1)} | set(row_counts(plan.max_tokens))
    return sorted(count for count in counts if plan.policy.min_m <= count <= min(max_tokens, plan.max_tokens))


@torch.inference_mode()
def warmup(obj: Any, max_tokens: int) -> None:
    """Compile every kernel that calls of 1..max_tokens rows on `obj` can reach, by running each class of sizes once.

    obj: a `Transformer` (prefill and decode, over a scratch cache that is freed again), an `nn.Module` with `Exl3Linear`s
    in it (each in fp16, bf16 and fp32), `(ExpertWeights, top_k)` for calls without a plan, or `(ExpertWeights, BoundMoe)`. On
    a CPU there is nothing to compile. Raises ValueError when max_tokens < 1, or above a Transformer's max_context, TypeError
    for other objects.
    """
    if max_tokens < 1:
        raise ValueError(f"warmup: max_tokens={max_tokens}: must be positive")
    if isinstance(obj, Transformer):
        if max_tokens > obj.max_context:
            raise ValueError(f"warmup: max_tokens={max_tokens}: must not exceed max_context={obj.max_context}")
        _warm_transformer(obj, max_tokens)
    elif isinstance(obj, nn.Module):
        layers = [module for module in obj.modules() if isinstance(module, Exl3Linear)]
        kinds = {
            (m.weight.trellis.shape, m.codebook, m.in_features, m.out_features, m.bias is None, m.mode): m for m in layers
        }
        for layer in kinds.values():
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                for rows in row_counts(max_tokens):
                    layer(torch.zeros(rows, layer.in_features, dtype=dtype, device=layer.trellis.device))
    elif isinstance(obj, tuple) and len(obj) == 2 and isinstance(obj[0], ExpertWeights):
        experts, planned = obj
        run = planned if isinstance(planned, BoundMoe) else ops.moe
        top_k = planned.plan.spec.top_k if isinstance(planned, BoundMoe) else planned
        counts = plan_row_counts(planned, max_tokens) if isinstance(planned, BoundMoe) else row_counts(max_tokens)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for rows in counts:
                x = torch.zeros(rows, experts.hidden_size, dtype=dtype, device=experts.device)
                ids = torch.arange(top_k, device=experts.device).expand(rows, top_k)
                weights = torch.ones(rows, top_k, device=experts.device)
                for id_type in (torch.int32, torch.int64):
                    run(x, experts, ids.to(id_type), weights)
    else:
        required = "a Transformer, an nn.Module, (ExpertWeights, top_k) or (ExpertWeights, BoundMoe)"
        raise TypeError(f"warmup: found {type(obj).__name__}, required {required}")


def _warm_transformer(model: Transformer, max_tokens: int) -> None:
    device = model.device
    if device.type == "cpu":
        return
    pages = pages_for(max_tokens)
    cache = model.new_cache(pages + 1)
    draft_cache = None if model.mtp is None else model.mtp.new_cache(pages + 1)
    topk = model.config.index_topk or 0
    counts = set(row_counts(max_tokens))
    for module in model.modules():
        if isinstance(module, MoE) and module.bound is not None:
            counts.update(plan_row_counts(module.bound, max_tokens))
    for rows in sorted(counts):
        tokens = torch.zeros(rows, dtype=torch.long, device=device)
        # a short bound sees every position, longer ones select among them: all forms of attention
        for bound in {rows, min(max(rows, topk + PAGE), model.max_context), model.max_context}:
            for prefill in (False, True):
                batch = Batch.of_sequence(tokens, 0, range(1, pages + 1), prefill=prefill, max_context=bound)
                hidden = model(batch, cache)
                model.compute_logits(hidden)
                if draft_cache is not None:
                    model.draft(batch, hidden, draft_cache)
    torch.cuda.synchronize(device)
