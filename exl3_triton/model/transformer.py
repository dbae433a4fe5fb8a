"""The model: embedding, pre-norm blocks of attention and MLP or experts, final norm, head; and `load`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..format import ExpertWeights
from ..plan import MoePlan, MoeSpec, default_policy, plan_moe
from . import manifest
from .attention import MLA
from .cache import Batch, KVCache, pages_for
from .checkpoint import Checkpoint
from .config import ModelConfig
from .gqa import GQA
from .layers import GatedMLP, PlainExperts, RMSNorm
from .loader import WeightSource, mtp_prefixes
from .moe import MoE
from .mtp import MTP, check_mtp, copies_of_the_trunk, mtp_layer_config
from .parallel import Partition, Shard
from .rank_group import RankGroup

DEFAULT_MAX_CONTEXT = 65536  # bounds the rope table where a model's own limit is a million tokens
PREFILL_ROWS = 2048  # rows that the experts' arena holds at once, unless the environment says otherwise


def rope_table(config: ModelConfig, length: int, device: torch.device | str) -> Tensor:
    """fp32 [length, R]: cos of position * frequency for R/2 frequencies, then sin, times YaRN's scale; angles in float64."""
    frequency = torch.tensor(config.rope_frequencies(), dtype=torch.float64)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    scale = config.yarn.table_scale if config.yarn else 1.0
    return (torch.cat([angle.cos(), angle.sin()], dim=-1) * scale).float().to(device)


class Block(nn.Module):
    """x += attention(norm(x)); x += feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig, source: Any, layer: int, partition: Partition):
        super().__init__()
        name, eps = f"layers.{layer}", config.rms_norm_eps
        self.input_norm = RMSNorm(source.tensor(f"{name}.input_layernorm.weight", (config.hidden_size,)), eps)
        self.attention = (MLA if config.kv_lora_rank else GQA)(config, source, layer, partition)
        self.post_norm = RMSNorm(source.tensor(f"{name}.post_attention_layernorm.weight", (config.hidden_size,)), eps)
        if config.layer_kinds[layer] == "dense":
            group = partition.group_of(partition.dense, config.intermediate_size)
            sizes = (config.hidden_size, config.intermediate_size)
            self.feed_forward: nn.Module = GatedMLP(source, f"{name}.mlp", *sizes, partition.dense, group)
        else:
            self.feed_forward = MoE(config, source, layer, partition)


class Transformer(nn.Module):
    """A GLM or DeepSeek decoder. Build one with `load`; `forward` runs a flat batch over a paged cache.

    The residual stream is fp32; normed activations, queries and the cache have `dtype`. `max_context` positions have rope
    table rows: longer sequences are refused by whoever builds the batch. `mtp` is the next-token layer, where it was loaded.
    `partition`: what of it is here, the rest being other ranks'; `group`: they and this one, None where there are none. All
    ranks must call with the same arguments, and get the same logits.
    """

    embedding: Tensor
    rope_table: Tensor

    def __init__(self, config: ModelConfig, source: Any, *, dtype: torch.dtype, max_context: int, mtp: bool = False):
        super().__init__()
        self.config, self.dtype, self.max_context = config, dtype, max_context
        self.partition: Partition = source.partition or Partition.of(config)
        self.group: RankGroup | None = None
        hidden = config.hidden_size
        self.register_buffer("embedding", source.tensor("embed_tokens.weight", (config.vocab_size, hidden)))
        self.blocks = nn.ModuleList(Block(config, source, layer, self.partition) for layer in range(config.num_layers))
        self.norm = RMSNorm(source.tensor("norm.weight", (hidden,)), config.rms_norm_eps)
        self.lm_head = source.lm_head(hidden, config.vocab_size, tied=config.tie_word_embeddings, embedding=self.embedding)
        self.register_buffer("rope_table", rope_table(config, max_context, self.embedding.device), persistent=False)
        block = Block(mtp_layer_config(config), source, config.num_layers, self.partition) if mtp else None
        self.mtp = MTP(self.partition.local(config), source, block, dtype=dtype) if block is not None else None
        if self.device.type not in ("cpu", "meta"):
            self.plan_experts()

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def plan_experts(self) -> None:
        """Plans and arenas for the quantized experts: one of each for the trunk's layers and one for the next-token layer.

        The two never share scratch: their steps may be captured separately. `load` calls this on a GPU.
        """
        for stack in self.expert_plans():
            arena = max((plan for _, plan in stack), key=lambda plan: plan.arena_bytes).new_arena(self.device)
            for layers, plan in stack:
                bound = plan.bind(arena)
                for layer in layers:
                    layer.bound = bound

    def expert_plans(self, device: torch.device | None = None) -> list[list[tuple[list[MoE], MoePlan]]]:
        """For every arena the layers that share a plan, with it: as a rule one plan, more where slices differ in size.

        device: what the plans are for (default: the model's). Longer prefills run in slices of PREFILL_ROWS.
        """
        stacks = [cast(list[Block], list(self.blocks)), [] if self.mtp is None else [cast(Block, self.mtp.block)]]
        found = []
        for blocks in stacks:
            groups: dict[tuple[int, int, bool], list[MoE]] = {}
            for block in blocks:
                layer = block.feed_forward
                if isinstance(layer, MoE) and not isinstance(layer.experts, PlainExperts):
                    experts = layer.experts[0]
                    groups.setdefault((experts.hidden_size, experts.intermediate_size, layer.joined), []).append(layer)
            if groups:
                found.append([(layers, self._plan(layers, device or self.device)) for layers in groups.values()])
        return found

    def _plan(self, layers: list[MoE], device: torch.device) -> MoePlan:
        slices = [experts for layer in layers for experts in cast(tuple[ExpertWeights, ...], layer.experts)]
        joined = layers[0].joined
        specs = [MoeSpec.of(experts, self.config.experts_per_token + joined) for experts in slices]
        specs[0] = replace(specs[0], joined=joined)
        rates = sorted({rate for spec in specs for rate in spec.rates})
        codebooks = sorted({codebook for spec in specs for codebook in spec.codebooks})
        policy = default_policy()
        capacity = min(policy.prefill_capacity or PREFILL_ROWS, self.max_context)
        return plan_moe(
            replace(specs[0], rates=tuple(rates), codebooks=tuple(codebooks)),
            max_tokens=self.max_context,
            policy=replace(policy, prefill_capacity=capacity),
            device=device,
        )

    def new_cache(self, num_pages: int, *, kv: str = "bf16") -> KVCache:
        """An empty cache of `num_pages` pages of 64 tokens, of which page 0 is reserved; kv as in `KVCache.allocate`."""
        return KVCache.allocate(self.partition.local(self.config), num_pages, dtype=self.dtype, device=self.device, kv=kv)

    def draft(self, batch: Batch, hidden: Tensor, cache: KVCache) -> Tensor:
        """`MTP.forward` with the trunk's embedding and rope table; the states go into `compute_logits` like the trunk's."""
        assert self.mtp is not None  # whoever drafts has loaded the layer
        return self.mtp(batch, hidden, cache, self.embedding, self.rope_table)

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Hidden states [T, hidden] after the final norm, in the activation dtype; writes the tokens' rows into the cache."""
        residual = F.embedding(batch.tokens, self.embedding).float()
        hidden: Tensor | None = None
        selected: Tensor | None = None
        for module, layer_cache in zip(self.blocks, cache.layers, strict=True):
            block = cast(Block, module)
            norm = block.input_norm
            normed = norm(residual, self.dtype) if hidden is None else norm.add(residual, hidden, self.dtype)
            hidden, selected = block.attention(normed, batch, layer_cache, selected, self.rope_table)
            hidden = block.feed_forward(block.post_norm.add(residual, hidden, self.dtype))
        assert hidden is not None
        return self.norm.add(residual, hidden, self.dtype)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """fp32 [n, vocab] logits of hidden states [n, hidden]."""
        return ops.gather_columns(self.lm_head(hidden, torch.float32), *self.partition.head_columns(self.config.vocab_size))

    def decode_step(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor, cache: KVCache, max_context: int
    ) -> Tensor:
        """fp32 [B, vocab] logits of one new token for each of B sequences; writes its rows into the cache.

        tokens, positions, slots: int64 [B]; a padding row has position and slot -1. block_table: int32 [B, pages].
        max_context: a bound of every position + 1, the same in every step: it is a constant of a graph or a compiled step.
        Never waits for the device; `torch.compile(model.decode_step, fullgraph=True)` makes one graph of it.
        """
        sequence = torch.arange(tokens.shape[0], dtype=torch.int32, device=tokens.device)
        batch = Batch(tokens, positions, slots, block_table, sequence, max_context=max_context, prefill=False)
        return self.compute_logits(self(batch, cache))

    @torch.inference_mode()
    def logits(self, token_ids: Tensor) -> Tensor:
        """fp32 [T, vocab] logits of one whole sequence, token_ids int [T]; for evaluation and tests.

        Raises ValueError when T is 0 or above `max_context`, or a token id is outside the vocabulary.
        """
        count = token_ids.numel()
        if token_ids.dim() != 1 or not 1 <= count <= self.max_context:
            raise ValueError(f"token_ids: found shape {list(token_ids.shape)}, required [T] with 1 <= T <= {self.max_context}")
        if int(token_ids.min()) < 0 or int(token_ids.max()) >= self.config.vocab_size:
            raise ValueError(f"token_ids: values must lie in 0..{self.config.vocab_size - 1}")
        pages = pages_for(count)
        batch = Batch.of_sequence(token_ids.to(self.device), 0, range(1, pages + 1))
        logits = self.compute_logits(self(batch, self.new_cache(pages + 1)))
        if self.group is not None:
            with self.group.waiting():
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
            self.group.rest()
        return logits


def choose_dtype(device: torch.device, dtype: torch.dtype | None) -> torch.dtype:
    """The activations' dtype: as asked, else fp32 on a CPU and fp16 on a GPU. Raises ValueError for other dtypes."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.float16
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype: found {dtype}, required torch.float32, torch.float16 or torch.bfloat16")
    return dtype


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    overrides: Mapping[str, Any] | None = None,
    max_context: int | None = None,
    mtp: bool = False,
    group: RankGroup | None = None,
    shard: Shard | None = None,
    expert_parallel: bool = False,
    mode: str = "exact",
    check_hashes: bool = False,
    progress: bool = True,
    check: Callable[[Transformer], object] | None = None,
) -> Transformer:
    """Load a checkpoint directory: EXL3, or unquantized, or some of each.

    device: where the weights go, by default a CPU, or the group's device. dtype: of activations, cache and unquantized
    weights; default fp32 on a CPU, fp16 on a GPU (the residual stream and everything that can grow is fp32 either way).
    overrides: changes config.json's keys before they are read, e.g. `{"index_topk": 64}`. max_context: positions to prepare
    for, default the model's own limit up to 65,536.
    mtp: also the next-token layer, for speculative decoding. group: the ranks that run the model together, of which each
    loads its part; environment variables alone divide nothing. shard: the part to load without partners, which can be looked
    at but not run. expert_parallel: ranks divide the routed experts by number instead of by width. mode: of `ops.linear`, for
    all quantized matrices but the routed experts, which are always exact. check_hashes: first read all files and hold them
    against `MANIFEST.sha256`, about as slow as `sha256sum`. progress: a bar on stderr, of rank 0. check: is shown the model on
    the meta device, sizes without data, and may refuse it by raising.

    Everything that can be refused is refused from the headers, before any weight is read: raises FormatError (a ValueError)
    naming the tensor or key, what was found and what is required; ValueError for options that contradict each other.
    """
    if group is not None and shard is not None:
        raise ValueError("load: found a group and a shard, required one of them (a group has its shard)")
    if group is not None:
        shard = group.shard
    if expert_parallel and (shard or Shard()).size == 1:
        raise ValueError("expert_parallel: found one rank, required several to divide the experts over")
    device = torch.device(device or ("cpu" if group is None else group.device))
    dtype = choose_dtype(device, dtype)
    checkpoint = Checkpoint.open(path)
    config = ModelConfig.from_dir(path, overrides)
    limit = config.max_position_embeddings
    max_context = min(limit, DEFAULT_MAX_CONTEXT) if max_context is None else max_context
    if not 1 <= max_context <= limit:
        raise ValueError(f"max_context: found {max_context}, required 1..{limit} (max_position_embeddings of {path})")
    if mtp:
        check_mtp(config)
    name = None if group is None else group.name
    partition = Partition.of(config, shard, expert_parallel=expert_parallel, group=name)
    with WeightSource(checkpoint, "meta", dtype, partition=partition, mode=mode) as headers:
        sizes = Transformer(config, headers, dtype=dtype, max_context=max_context, mtp=mtp)
        headers.finish(copies_of_the_trunk(config) if mtp else mtp_prefixes(config))
        if check is not None:
            check(sizes)
        headers.check_scales()
    if check_hashes:
        manifest.check_hashes(checkpoint.path, {"config.json", *(info.file for info in checkpoint.tensors.values())})
    options: dict[str, Any] = {
        "partition": partition,
        "mode": mode,
        "progress": progress and partition.shard.rank == 0,
        "total_bytes": headers.claimed_bytes,
        "on_read": None if group is None else group.work,
    }
    with torch.inference_mode(False), WeightSource(checkpoint, device, dtype, **options) as source:
        model = Transformer(config, source, dtype=dtype, max_context=max_context, mtp=mtp)
    model.group = group
    if group is not None:
        group.barrier()
    return model.eval()
