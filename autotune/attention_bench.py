"""Random attention problems on this machine's GPU; see `bench`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exl3_triton import reference
from exl3_triton.kv_format import PAGE, head_planes, pack_heads, pack_latents, unpack_heads

from .attention import LATENT, SCALE, cache_shape, caller, indexer, random_call, row_bytes
from .bench import Bench, copies_for
from .problems import AttentionProblem, IndexerProblem


class _PagedBench(Bench):
    """A batch over pages in random order, with caches enough to exceed the GPU's own. 16-bit data is bf16."""

    tolerance = 8e-3
    """bf16 rounds the probabilities, unpacked keys and the result: a relative error of 2e-3 in all."""

    def __init__(self, problem: Any, m: int, copies: int | None, device: str):
        super().__init__(problem, m)
        self.device = device
        one = isinstance(problem, AttentionProblem) and (problem.context(m) == m or m > 128)
        sequences, context = 1 if one else m, problem.context(m)
        pages = sequences * (context // PAGE)
        self.copies = copies or min(64, copies_for(sequences * context * row_bytes(problem)))
        self.table = torch.randperm(pages, device=device).int().view(sequences, -1)
        self.sequence = (torch.arange(m, device=device) % sequences).int()
        last = torch.arange(context - m, context, device=device)
        self.positions = last if sequences == 1 else torch.full((m,), context - 1, device=device)
        self.pages = pages

    def make(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).bfloat16()

    def heads_cache(self, shape: tuple[int, ...], kv: str) -> Tensor:
        if kv == "bf16":
            return self.make(*shape)
        cache = torch.empty(shape, dtype=torch.uint8, device=self.device)
        values = torch.randn(*shape[:-1], shape[-1] - 4, device=self.device)
        for plane, packed in zip(head_planes(cache), pack_heads(values), strict=True):
            plane.copy_(packed)
        return cache

    @property
    def place(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.table, self.sequence, self.positions

    def some(self) -> tuple[Tensor, Tensor, Tensor]:
        """`place` of the rows that are compared."""
        rows = self.rows.to(self.device)
        return self.table, self.sequence[rows], self.positions[rows]


class AttentionBench(_PagedBench):
    def __init__(self, problem: AttentionProblem, m: int, copies: int | None = None, device: str = "cuda"):
        super().__init__(problem, m, copies, device)
        p = problem
        shape = cache_shape(p, self.pages)
        if p.kind.startswith("gqa"):
            widths = (shape[-1], p.value + shape[-1] - p.width)
            first = [self.heads_cache((*shape[:-1], width), p.kv) for width in widths]
        elif p.kv == "bf16":
            first = [self.make(*shape)]
        else:
            some = torch.randn(self.pages, PAGE, p.width, device=device)
            first = [pack_latents(some, p.value, p.kv)]
        self.caches = [first] + [[cache.clone() for cache in first] for _ in range(self.copies - 1)]
        self.queries = random_call(p, m, device, self.make)
        if p.kind == "mla_prefill":
            self.queries[1:] = [weight * LATENT**-0.5 for weight in self.queries[1:]]
        self.selected = None
        if p.kind == "mla_sparse_decode":
            chance = torch.rand(m, p.context(m), device=device)
            chance.masked_fill_(torch.arange(p.context(m), device=device) > self.positions[:, None], -1.0)
            self.selected = chance.topk(min(p.SELECTED, p.context(m)), dim=1).indices.sort(dim=1).values.int()

    def calls(self, config: Any) -> list[Callable[[], Tensor]]:
        call = caller(self.problem, config, self.m)  # type: ignore[arg-type]
        rest = (*self.place, self.selected)
        return [lambda c=caches: call(*self._ordered(self.queries, c), *rest) for caches in self.caches]  # type: ignore[misc]

    def _ordered(self, queries: list[Tensor], caches: list[Tensor]) -> tuple[Tensor, ...]:
        if self.problem.kind == "mla_prefill":  # type: ignore[union-attr]
            return (queries[0], *caches, *queries[1:])
        return (*queries, *caches)

    def want(self) -> Tensor:
        kind, rows = self.problem.kind, self.rows.to(self.device)  # type: ignore[union-attr]
        floats: list[Any] = [cache if cache.dtype == torch.uint8 else cache.float() for cache in self.caches[0]]
        queries: list[Any] = [q[rows].float() for q in self.queries[: 1 if kind == "mla_prefill" else None]]
        call: tuple[Any, ...] = (*queries, *floats, *self.some(), SCALE)
        if kind == "mla_prefill":
            w_uk, w_uv = (weight.float() for weight in self.queries[1:])
            return reference.mla_prefill(queries[0], floats[0], w_uk, w_uv, *self.some(), SCALE)
        if kind.startswith("gqa"):
            return reference.gqa_attention(*call)[0]
        selected = None if self.selected is None else self.selected[rows]
        call = (*queries, *floats, *self.some(), selected, SCALE)
        return reference.mla_decode(*call)[0]


class ScoreBench(_PagedBench):
    def __init__(self, problem: IndexerProblem, m: int, copies: int | None = None, device: str = "cuda"):
        super().__init__(problem, m, copies, device)
        p, context = problem, problem.context(m)
        first = self.heads_cache(cache_shape(p, self.pages), p.kv)
        self.caches = [first] + [first.clone() for _ in range(self.copies - 1)]
        self.q, self.weights = self.make(m, p.heads, p.width), torch.randn(m, p.heads, device=device)
        self.queries = indexer._rotate_queries(self.q) if p.kv == "fp8" else self.q  # no candidate changes that launch
        self.scores = torch.empty(m, context, device=device)

    def calls(self, config: Any) -> list[Callable[[], Tensor]]:
        def call(cache: Tensor) -> Tensor:
            indexer._launch_scores(self.queries, self.weights, cache, *self.place, 0, self.scores, config)
            return self.scores

        return [lambda c=cache: call(c) for cache in self.caches]  # type: ignore[misc]

    def want(self) -> Tensor:
        rows, first = self.rows.to(self.device), self.caches[0]
        keys = reference.rotate_index(unpack_heads(first)) if first.dtype == torch.uint8 else first.float()  # its own inverse
        keys = keys[self.table[self.sequence[rows].long()].long()].flatten(1, 2)
        products = torch.einsum("thd,tnd->thn", self.q[rows].float(), keys).relu()
        return torch.einsum("thn,th->tn", products, self.weights[rows])
