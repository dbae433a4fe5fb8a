"""Random weights of a real geometry, made on the device: for timing models whose checkpoints are not at hand.

Every random bit pattern is a valid trellis, so nothing has to be encoded. Scales are chosen so that a matrix keeps the
variance of its input; routers are random, which spreads the tokens about evenly over the experts. What is quantized is what
ExLlamaV3 quantizes, or the routed experts alone, as in rank-sliced checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..format import TWICE_BITS, Codebook, ExpertProjection, ExpertWeights, TrellisWeight, padded_size
from ..reference import codebook_values
from .config import ModelConfig
from .layers import Exl3Linear, PlainExperts, PlainLinear
from .loader import FP32_NAMES
from .parallel import Partition, Shard
from .rank_group import RankGroup
from .transformer import Transformer, choose_dtype

HEAD_BITS = 6  # ExLlamaV3's default for the output head
_PLAIN = ("indexer.wk", "indexer.weights_proj")  # matrices that ExLlamaV3 leaves alone
_BIASED = ("q_proj", "k_proj", "v_proj")


def first_layers(config: ModelConfig, layers: int) -> ModelConfig:
    """The model cut off behind its first `layers` layers. Raises ValueError unless it has as many."""
    if not 1 <= layers <= config.num_layers:
        raise ValueError(f"layers: found {layers}, required 1..{config.num_layers} (num_hidden_layers of {config.model_type})")
    return replace(
        config,
        num_layers=layers,
        layer_kinds=config.layer_kinds[:layers],
        indexer_kinds=config.indexer_kinds[:layers],
    )


def one_rank(config: ModelConfig, ranks: int) -> tuple[ModelConfig, tuple[str, ...]]:
    """What the first of `ranks` tensor-parallel ranks holds, whose part is the largest, and what is whole on every rank.

    The cuts are those of `Partition`, which says what they lie on and names what stays whole. A config has one width for
    routed and shared experts: where the two are cut to different ones, both stay whole here. Raises ValueError for ranks < 1.
    """
    if ranks < 1:
        raise ValueError(f"rank-of: found {ranks}, required an integer >= 1")
    mine, width = Partition.of(config, Shard(0, ranks)), config.moe_intermediate_size
    whole = mine.whole
    if len(mine.shared) == len(mine.moe) * config.num_shared_experts:
        width = len(mine.moe)
    else:
        whole += (f"routed and shared experts (cut to {len(mine.moe)} and {len(mine.shared)} features)",)
    sizes: dict[str, Any] = {
        "intermediate_size": len(mine.dense) or config.intermediate_size,
        "moe_intermediate_size": width,
        "vocab_size": len(mine.vocab),
    }
    return replace(mine.local(config), **sizes), whole


class DummySource:
    """Gives a model random weights, with the interface of `loader.WeightSource`.

    device: where they are made and stay, "meta" for sizes alone. dtype: of plain weights. bits: K of all matrices but the
    output head, which has `HEAD_BITS`. experts_only: everything but the routed experts stays plain. partition: the part of a
    rank, whose weights are other random ones than in the whole. The same seed gives the same weights on the same kind of
    device. Raises ValueError for a rate that does not exist or not with this codebook.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        bits: float = 3,
        codebook: Codebook = Codebook.MCG,
        experts_only: bool = False,
        seed: int = 0,
        partition: Partition | None = None,
    ):
        if 2 * bits not in TWICE_BITS:
            raise ValueError(f"bits: found {bits:g}, required 1..8, 1.5, 2.5 or 3.5")
        if 2 * bits % 2 and codebook is not Codebook.MUL1:
            raise ValueError(f"bits: found {bits:g} with codebook {codebook.label}: half rates exist for mul1 only")
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        self.bits, self.codebook, self.experts_only = bits, codebook, experts_only
        self.partition = partition
        self._std = float(codebook_values(codebook).float().std())
        self._random = None if self.device.type == "meta" else torch.Generator(self.device).manual_seed(seed)

    def tensor(
        self,
        name: str,
        shape: Iterable[int],
        *,
        dtype: torch.dtype | None = None,
        optional: bool = False,
        part: tuple[slice, ...] = (),
    ) -> Tensor | None:
        """Norms are 1, biases 0, embeddings and matrices [out, in] random. None where it is optional."""
        if optional:
            return None
        if dtype is None:
            dtype = torch.float32 if name.endswith(FP32_NAMES) else self.dtype
        shape = tuple(torch.empty(tuple(shape), device="meta")[part].shape)
        if len(shape) == 1:
            return torch.full(shape, float(name.endswith("norm.weight")), dtype=dtype, device=self.device)
        random = torch.empty(shape, dtype=dtype, device=self.device)
        return random.normal_(std=1.0 if "embed_tokens" in name else shape[-1] ** -0.5, generator=self._random)

    def linear(
        self, name: str, in_features: int, out_features: int, *, inputs: range | None = None, outputs: range | None = None
    ) -> nn.Module:
        """Quantized, or plain where ExLlamaV3 leaves it so; q, k and v have a bias where the config says so."""
        in_features, out_features = len(inputs or range(in_features)), len(outputs or range(out_features))
        bias = self.config.attention_bias and name.endswith(_BIASED)
        if self.experts_only or name.endswith(_PLAIN):
            weight = self.tensor(f"{name}.weight", (out_features, in_features))
            assert weight is not None
            return PlainLinear(weight, weight.new_zeros(out_features) if bias else None)
        bits = HEAD_BITS if name == "lm_head" else self.bits
        rows, columns = padded_size(in_features), padded_size(out_features)
        trellis = self._words(rows // 16, columns // 16, int(16 * bits))
        suh, svh = self._signs(1, rows, in_features, in_features**-0.5 / self._std), self._signs(1, columns, out_features, 1.0)
        biases = torch.zeros(columns, dtype=torch.float16, device=self.device) if bias else None
        return Exl3Linear(TrellisWeight(trellis, suh[0], svh[0], self.codebook, biases, in_features, out_features))

    def lm_head(self, hidden_size: int, vocab_size: int, *, tied: bool, embedding: Tensor) -> nn.Module:
        """The output head; the embedding [vocab, hidden] where the model is tied."""
        rows = range(vocab_size) if self.partition is None else self.partition.vocab
        if tied:
            return PlainLinear(embedding[rows.start : rows.stop], None)
        return self.linear("lm_head", hidden_size, vocab_size, outputs=rows)

    def experts(
        self, name: str, num_experts: int, hidden_size: int, intermediate_size: int, shared: str | None = None
    ) -> ExpertWeights | PlainExperts:
        """The routed experts of one layer, all of one rate and codebook; `shared` as in `WeightSource.experts`."""
        part = self.partition
        joins = shared is not None and not self.experts_only
        if part is not None:
            joins = joins and part.shared_joins(num_experts)
            num_experts, intermediate_size = len(part.experts), len(part.moe)
        num_experts += joins
        wide, narrow = (hidden_size, intermediate_size), (intermediate_size, hidden_size)
        gate, up, down = (self._projection(num_experts, *sizes) for sizes in (wide, wide, narrow))
        return ExpertWeights(gate, up, down, hidden_size=hidden_size, intermediate_size=intermediate_size)

    def expert_slices(
        self, name: str, num_experts: int, hidden_size: int, intermediate_size: int, shared: str | None = None
    ) -> tuple[ExpertWeights, ...] | PlainExperts:
        """The same as the only slice."""
        whole = self.experts(name, num_experts, hidden_size, intermediate_size, shared)
        return whole if isinstance(whole, PlainExperts) else (whole,)

    def _projection(self, num_experts: int, in_features: int, out_features: int) -> ExpertProjection:
        formats = [(int(2 * self.bits), int(self.codebook))] * num_experts
        rows, columns = padded_size(in_features), padded_size(out_features)
        empty = ExpertProjection.allocate(formats, rows, columns, device="meta")
        return replace(
            empty,
            words=self._words(empty.words.numel()),
            table=torch.tensor(empty.layout, dtype=torch.int64).to(self.device),
            suh=self._signs(num_experts, rows, in_features, in_features**-0.5 / self._std),
            svh=self._signs(num_experts, columns, out_features, 1.0),
        )

    def _words(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int16, device=self.device).random_(-(1 << 15), 1 << 15, generator=self._random)

    def _signs(self, count: int, padded: int, features: int, size: float) -> Tensor:
        """fp16 [count, padded] of +size and -size, 0 in the padding, as in real checkpoints."""
        signs = torch.empty(count, padded, dtype=torch.float16, device=self.device)
        signs.random_(0, 2, generator=self._random).mul_(2).sub_(1).mul_(size)
        signs[:, features:] = 0
        return signs


def dummy_model(
    config: ModelConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    max_context: int,
    mtp: bool = False,
    group: RankGroup | None = None,
    shard: Shard | None = None,
    expert_parallel: bool = False,
    **options: Any,
) -> Transformer:
    """A model of this geometry with random weights; arguments as in `load`, options as in `DummySource`.

    max_context: positions to prepare for. Raises ValueError as `DummySource` does, and for a max_context that the model lacks.
    """
    device = torch.device(device)
    dtype = choose_dtype(device, dtype)
    limit = config.max_position_embeddings
    if not 1 <= max_context <= limit:
        raise ValueError(f"max_context: found {max_context}, required 1..{limit} (max_position_embeddings)")
    with torch.inference_mode(False):
        shard, name = (shard, None) if group is None else (group.shard, group.name)
        partition = Partition.of(config, shard, expert_parallel=expert_parallel, group=name)
        source = DummySource(config, device, dtype, partition=partition, **options)
        model = Transformer(config, source, dtype=dtype, max_context=max_context, mtp=mtp).eval()
    model.group = group
    return model
