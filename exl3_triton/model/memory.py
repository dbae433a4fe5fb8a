"""What a model needs on its device: weights, arenas, the scratch of a pass, and the cache that fits beside them.

All of it follows from sizes, so a model on the meta device answers before a weight is read. `scratch_bytes` bounds what a
pass allocates and frees again, with T rows, D = hidden_size, a = bytes of an activation:

    8 T D + 2 a T D           residual, the last sub-layer's output (fp32), two normed states
    + 8 T index_topk          positions that an indexer chose, for this layer and the one before
    + max(attention, feed-forward, head)

where the terms of the maximum are the stages below, one after the other: a stage's live inputs and outputs and its op's
scratch. A linear op over matrices k x n (padded to 128) takes, besides its outputs,

    2 T k + 4 T                           rotated activations and exponents, of each matrix
    + 512 split blocks T                  partial sums, where k is split (`tuning.select_linear`; blocks of 128 outputs)
    or, with more rows than its regimes have, of one matrix at a time (`ops.linear`: w columns, 2 k w <= 256 MiB)
    + 2 k w + 4 T w                       decoded weights and raw products, the latter twice where there are several slices

and attention at most the constants of its ops: 256 MiB of partial results (MLA), 64 MiB (GQA), or those of one token; 256 MiB
of unfolded keys and values in dense MLA prefill, or those of one head; 68 MiB of index scores, or those of one token. The
experts work in arenas (`MoePlan.arena_bytes`), which are there as long as the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..kv_format import KV_FORMATS, PAGE
from ..ops import attention, gqa, indexer, prefill
from ..ops.attention_tuning import select_decode, select_grouped_decode
from ..ops.decode_once import SCRATCH_ELEMENTS
from ..ops.router import SEGMENT, SEGMENT_WIDE, SPLIT_TOKENS
from ..ops.tuning import device_of, programs_and_parts, select_linear
from .attention import MLA, Indexer
from .cache import KVCache, pages_for
from .gqa import GQA
from .layers import Exl3Linear, GatedMLP, PlainLinear
from .moe import RIDING_ROWS, MoE
from .transformer import Transformer

GIB = 1 << 30
SAMPLER_COPIES = (
    20  # fp32 [rows, vocab] that sampling holds at most: noise, sorted copies and their int64 indices, log-softmax
)
LIBRARY_BYTES = 128 << 20  # cuBLAS workspaces (32 MiB a stream and handle on Hopper), Triton modules, fragments


def weight_bytes(model: Transformer) -> int:
    """Bytes of all weights and tables, those of the next-token layer included; also of a model on the meta device."""
    inside = [module.shared for module in model.modules() if isinstance(module, MoE) and module.joined and module.shared]
    views = {id(view) for mlp in inside for m in (mlp.gate, mlp.up, mlp.down) for view in (m.trellis, m.suh, m.svh)}
    buffers = sum(buffer.nbytes for buffer in model.buffers() if id(buffer) not in views)
    layers = [module.experts for module in model.modules() if isinstance(module, MoE)]
    slices = [each for layer in layers if isinstance(layer, tuple) for each in layer]
    slabs = [projection for each in slices for projection in each.projections]
    return buffers + sum(part.nbytes for slab in slabs for part in (slab.words, slab.table, slab.suh, slab.svh))


def arena_bytes(model: Transformer, device: torch.device | None = None) -> int:
    """Bytes of the experts' scratch, which is allocated once, on a device (default: the model's)."""
    return sum(max(plan.arena_bytes for _, plan in stack) for stack in model.expert_plans(device))


@dataclass(frozen=True)
class Pass:
    """A forward pass: `rows` tokens of `sequences` sequences, no context longer than `context`; prefill as in `Batch`.

    heads: rows whose logits are computed. device: where it is to run, which decides how a linear op works.
    """

    rows: int
    sequences: int
    heads: int
    context: int
    prefill: bool
    device: torch.device


def scratch_bytes(model: Transformer, work: Pass) -> int:
    """An upper bound of what `forward` and `compute_logits` allocate at the same time; the module's text has the formula."""
    c, rows, size = model.config, work.rows, model.dtype.itemsize
    states = (8 + 2 * size) * rows * c.hidden_size
    chosen = 8 * rows * c.index_topk if c.indexer_kinds and work.context > c.index_topk else 0
    blocks: list[Any] = [*model.blocks, *([] if model.mtp is None else [model.mtp.block])]
    layers = max(max(_attention(b.attention, work, size), _feed_forward(b.feed_forward, work)) for b in blocks)
    if model.mtp is not None:  # joined embedding and state, and the projection of both
        layers = max(layers, (4 * size) * rows * c.hidden_size + _linears([model.mtp.projection], rows, 4, work.device))
    head = _linears([model.lm_head], work.heads, 4, work.device)
    sizes, joined = model.partition.head_columns(c.vocab_size)
    if joined is not None:  # this rank's columns padded, those of all ranks, and joined
        head += 4 * work.heads * (max(sizes) * (1 + len(sizes)) + c.vocab_size)
    return states + chosen + max(layers, head)


def _linears(layers: Sequence[Any], rows: int, itemsize: int, device: torch.device, *, input_size: int = 2) -> int:
    """Outputs (elements of `itemsize` bytes) and scratch of linear layers over one input (`input_size` bytes an element)."""
    outputs = sum(rows * each.out_features * itemsize for each in layers)
    quantized = [each for each in layers if isinstance(each, Exl3Linear)]
    groups = [quantized] if len(quantized) == len(layers) else [[each] for each in quantized]
    scratch = [_exl3_scratch([each.weight for each in group], rows, device) for group in groups]
    for each in layers:
        if isinstance(each, PlainLinear):
            width = each.weight.itemsize
            cast = 0 if width == input_size else rows * each.in_features * width
            scratch.append(cast + (0 if width == itemsize else rows * each.out_features * width))
    return outputs + max(scratch)


def _exl3_scratch(weights: Sequence[Any], rows: int, device: torch.device) -> int:
    k, blocks = weights[0].padded_in, sum(each.padded_out // 128 for each in weights)
    rotated = len(weights) * rows * (2 * k + 4)
    highest = max((each.twice_bits, int(each.codebook)) for each in weights)
    config = select_linear(rows, k, blocks, device_of(device), *highest)
    if config is not None:
        programs, parts = programs_and_parts(config, k, blocks, device_of(device).processors)
        return rotated + (512 * parts * blocks * rows if programs or parts > 1 else 0)
    once = []
    for each in weights:
        width = min(each.padded_out, max(128, SCRATCH_ELEMENTS // k // 128 * 128))
        once.append(2 * k * width + 4 * rows * width * (1 if width == each.padded_out else 2))
    return rotated + max(once)


def _gated_mlp(mlp: GatedMLP, work: Pass) -> int:
    width = work.rows * mlp.down.in_features
    inner = _linears([mlp.gate, mlp.up], work.rows, 4, work.device)
    return max(inner, 12 * width + _linears([mlp.down], work.rows, 4, work.device, input_size=4))


def _feed_forward(module: nn.Module, work: Pass) -> int:
    if isinstance(module, GatedMLP):
        return _gated_mlp(module, work)
    assert isinstance(module, MoE)
    c, out = module.config, 4 * work.rows * module.config.hidden_size
    segment = SEGMENT_WIDE if module.gate.dtype == torch.float32 else SEGMENT
    parts = -(-c.hidden_size // segment) if work.rows <= SPLIT_TOKENS else 1
    routes = 4 * work.rows * (parts * c.num_experts + 2 * (c.experts_per_token + module.joined))
    rides = module.joined and work.rows <= RIDING_ROWS
    shared = 0 if module.shared is None or rides else max(_gated_mlp(module.shared, work), 2 * out)
    return routes + out + shared


def _attention(module: nn.Module, work: Pass, size: int) -> int:
    return _mla(module, work, size) if isinstance(module, MLA) else _gqa(module, work, size)  # type: ignore[arg-type]


def _dtype(size: int) -> torch.dtype:
    """One that products are computed in where the model's dtype has `size` bytes."""
    return torch.float32 if size == 4 else torch.float16


def _partial_results(rows: int, one: int, most: int) -> int:
    """Scratch of a launch that takes as many tokens as fit into `most` bytes, each of `one`."""
    return min(rows, max(1, most // one)) * one


def _gqa(module: GQA, work: Pass, size: int) -> int:
    c, rows = module.config, work.rows
    q, kv, out = rows * c.num_heads * c.head_dim, rows * c.kv_width, rows * c.num_heads * c.v_head_dim
    core = 12 * work.sequences
    if not work.prefill:
        sizes, on = (c.num_heads, c.num_kv_heads, c.head_dim, c.v_head_dim), (_dtype(size), device_of(work.device))
        plans = [select_grouped_decode(sizes, *on, kv, rows, work.context)[1] for kv in KV_FORMATS[:2]]
        grid = max(plan.grid for plan in plans)
        core += _partial_results(rows, 4 * c.num_heads * grid * (c.v_head_dim + 2), gqa.SCRATCH_BYTES)
    stages = (
        _linears([module.q, module.k, module.v], rows, 4, work.device),
        4 * (q + kv) + 2 * size * q,  # the norm, then the rotation
        4 * kv + size * (q + out) + 4 * rows * c.num_heads + core,
        4 * kv + size * (q + out) + _linears([module.o], rows, 4, work.device, input_size=size),
    )
    return max(stages)


def _mla(module: MLA, work: Pass, size: int) -> int:
    c, rows, device = module.config, work.rows, work.device
    latent, rope = c.kv_lora_rank, c.qk_rope_head_dim
    q, out = size * rows * c.num_heads * c.head_dim, size * rows * c.num_heads * c.v_head_dim
    down = 4 * rows * ((c.q_lora_rank or 0) + latent + rope) + size * rows * (c.q_lora_rank or 0)  # both stay, and the normed
    selects = bool(c.indexer_kinds) and work.context > c.index_topk
    first = [module.kv_a] if module.q_a is None else [module.q_a, module.kv_a]
    stages = [
        _linears(first, rows, 4, device),
        down + _linears([module.q_b], rows, size, device, input_size=size),
        down + 2 * q,
        down + q + (_indexer(module.indexer, work, size) if module.indexer is not None else 0),
    ]
    if work.prefill and not selects:
        core = _unfolding(c.num_heads, c.head_dim, c.v_head_dim, work, size)
    else:  # queries and sums in the latent space
        keys = c.index_topk if selects else work.context
        sizes = (c.num_heads, latent, rope, _dtype(size), device_of(device))
        plans = [select_decode(*sizes, kv, rows, keys, sparse=selects)[1] for kv in KV_FORMATS]
        core = 2 * size * rows * c.num_heads * latent + 4 * rows * c.num_heads
        core += max(
            _partial_results(rows, 4 * c.num_heads * plan.grid * (latent + 2), attention.SCRATCH_BYTES) if plan.most > 1 else 0
            for plan in plans
        )
    stages.append(down + q + out + core)
    stages.append(down + q + out + _linears([module.o], rows, 4, device, input_size=size))
    return max(stages)


def _unfolding(heads: int, width: int, value: int, work: Pass, size: int) -> int:
    """Keys and values of as many heads as fit, and the state of a context of several tiles."""
    key_rows = min(prefill.KEY_TILE, -(-work.context // PAGE) * PAGE)
    group = min(work.sequences, max(1, prefill.KEY_TILE // key_rows))
    state = 4 * work.rows * (value + 2) if work.context > key_rows else 0
    one = group * key_rows * (width + value) * size + state
    return min(heads * one, max(one, prefill.SCRATCH_BYTES)) + 12 * work.sequences


def _indexer(module: Indexer, work: Pass, size: int) -> int:
    c, rows = module.config, work.rows
    keys = _linears([module.wk], rows, 4, work.device, input_size=size)
    if work.context <= c.index_topk:
        return keys
    k, q, weights = (
        4 * rows * c.index_head_dim,
        size * rows * c.index_num_heads * c.index_head_dim,
        4 * rows * c.index_num_heads,
    )
    wide = 4 * rows * c.hidden_size  # the indexer's head weights come from the state in fp32
    width = -(-work.context // PAGE) * PAGE
    segments = -(-width // indexer.SEGMENT)
    one = 4 * width + (4 * 1024 + 4 * 257 * segments if segments > 1 else 0)  # counters of a row's digits
    scores = min(rows, max(1, indexer.SCORES // width)) * one
    return max(
        keys,
        k + q + _linears([module.wq_b], rows, size, work.device, input_size=size),
        k + 2 * q + wide + _linears([module.weights_proj], rows, 4, work.device, input_size=4) + weights,
        k + 2 * q + weights + scores,  # keys in fp8: the queries rotated, too
    )


def cache_page_bytes(model: Transformer, kv: str) -> int:
    """Bytes of a page of 64 tokens, in the trunk's cache and in that of the next-token layer where there is one."""
    trunk = KVCache.allocate(model.partition.local(model.config), 2, dtype=model.dtype, device=torch.device("meta"), kv=kv)
    draft = 0 if model.mtp is None else model.mtp.new_cache(2).bytes_per_token
    return PAGE * (trunk.bytes_per_token + draft)


@dataclass(frozen=True)
class Needs:
    """Everything but the cache, in bytes; `page`: of a cache page of 64 tokens."""

    weights: int
    arenas: int
    scratch: int
    page: int

    @classmethod
    def of(
        cls,
        model: Transformer,
        device: torch.device,
        *,
        kv: str,
        chunk: int,
        max_batch: int,
        max_context: int,
        drafts: int = 0,
    ) -> Needs:
        """What generation needs: prefill of `chunk` rows beside a decode step of max_batch * (drafts + 1), and its sampler.

        The two passes count both: a step's CUDA graph keeps its memory. The model may be on the meta device.
        """
        rows = max_batch * (drafts + 1)
        feed = Pass(chunk, max_batch, max_batch, max_context, True, device)
        step = Pass(rows, max_batch, rows, max_context, False, device)
        sampler = 4 * model.config.vocab_size * (SAMPLER_COPIES * rows + max_batch * drafts)
        scratch = scratch_bytes(model, feed) + scratch_bytes(model, step) + sampler + LIBRARY_BYTES
        return cls(weight_bytes(model), arena_bytes(model, device), scratch, cache_page_bytes(model, kv))


def device_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of a GPU; what torch keeps for reuse counts as free."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def cache_pages(
    model: Transformer,
    device: torch.device,
    *,
    cache_tokens: int | None,
    context: int,
    max_batch: int,
    gpu_memory: float,
    kv: str,
    chunk: int,
    drafts: int = 0,
) -> int:
    """Pages of the cache, the reserved one not among them, for `max_batch` sequences of up to `context` tokens.

    model: loaded, or on the meta device before it is loaded to `device`. cache_tokens: as many are wanted; None: on a GPU what
    is left of it, at most `max_batch` full contexts, elsewhere one context. gpu_memory: the part of the GPU's whole memory
    that may be in use in the end, by all processes. chunk, drafts: as in `Needs.of`. Raises ValueError, naming all parts,
    where `cache_tokens`, or one page, does not fit on the GPU; the memory of other devices is not asked.
    """
    wanted = None if cache_tokens is None else pages_for(cache_tokens)
    if device.type != "cuda":
        return wanted or pages_for(context)
    needs = Needs.of(model, device, kv=kv, chunk=chunk, max_batch=max_batch, max_context=context, drafts=drafts)
    loaded = model.device.type != "meta"
    free, total = device_memory(device)
    left = free - int((1 - gpu_memory) * total) - needs.scratch - (0 if loaded else needs.weights + needs.arenas)
    fit = max(0, left // needs.page - 1)
    if fit < (wanted or 1):
        a_gib = GIB // needs.page * PAGE
        kept = f"weights {_gib(needs.weights)}, experts' arenas {_gib(needs.arenas)}, scratch {_gib(needs.scratch)}"
        asked = f"{wanted * PAGE} tokens take {_gib(wanted * needs.page)}" if wanted else "not one page of 64 tokens fits"
        raise ValueError(
            f"cache_tokens: {asked}; beside {kept} there is room for {fit * PAGE} tokens ({a_gib} a GiB) with "
            f"gpu_memory={gpu_memory:g}: {_gib(total)} in all, {_gib(free)} free{'' if loaded else ' before loading'}"
        )
    return wanted or min(fit, max_batch * pages_for(context))


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
