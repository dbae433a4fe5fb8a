"""Generation: prompts in, tokens and text out as they come.

A step decodes all running sequences as one flat batch, then prefills some prompt tokens of those that wait; `scheduler.py`
says which, and who is paused where the cache is full.

The decode step works on buffers of constant address, rows 0..n-1 in use and the rest padding (position -1, slot -1), and the
chosen tokens, positions and slots advance on the device: the host reads one small tensor a step, and writes only when a
sequence joins or leaves or gets another page. With speculation (`speculate.py`) a step gives a sequence several tokens;
grammars (`grammar.py`) live on the host, and their masks go to the device before each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .cache import PAGE, PageAllocator, check_kv, pages_for
from .config import ModelConfig
from .grammar import Grammar, GrammarCompiler
from .graphs import DecodeGraphs, use_graphs
from .memory import cache_pages
from .paths import kernel_paths
from .prompts import Prompt, as_list, tokens_of
from .rank_group import RankGroup
from .rows import DecodeRows, prefill_batch
from .sampling import Sampled, SamplingBatch, SamplingParams, resolve_seed, sample
from .scheduler import Chunk, Scheduler, SchedulerStats
from .sequence import Output, SequenceState, StopStrings, TokenLogprobs, pack, unpack
from .speculate import NOTHING, SpeculationStats, Speculator, check_num_drafts
from .tokenizer import StreamDetokenizer, Tokenizer
from .transformer import Transformer, load

# Without max_context the context ends here: a cache for the million positions of some models would not fit most machines.
DEFAULT_CONTEXT = 8192


class LLM:
    """A model with its tokenizer and KV cache.

    Args:
        model: checkpoint directory, or a loaded `Transformer`.
        device, dtype, overrides, progress, group, expert_parallel: as `exl3_triton.load`; for a directory only. Ranks of a
            group make the same calls, and get the same tokens; seeds that are not given are drawn by rank 0.
        max_context: most positions of one sequence, prompt and output together. Default: what the model allows, at most 8192.
        cache_tokens: positions in the KV cache, shared by all sequences, rounded up to pages of 64. Default: on a GPU what is
            left beside weights and scratch (`memory`), at most `max_batch` full contexts; elsewhere one full context. More
            than fits on a GPU is refused before weights are read.
        gpu_memory: the part of a GPU's memory that may be in use in the end, above 0 and at most 1.
        max_batch: most sequences decoded together.
        prefill_chunk: most prompt tokens fed between two decode steps, of all sequences together.
        speculate: tokens that the next-token layer drafts a step, 1 to 5; 0 decodes token by token. The outcome has the same
            distribution, greedy text is the same up to rounding at ties. The text of a seed depends on the drafts; a pause
            (`scheduler.py`) drops them.
        kv: how the trunk's cache is stored: "bf16" (which stands for the model's dtype), "fp8", and for MLA "nvfp4" and
            "nvfp4-fp8rope" (`kv_format`). Packed rows take less memory and cost accuracy; the draft's cache is never packed.
        prefix_caching: prompts take over cache pages whose tokens they begin with, also of texts that have ended.
        graphs: whether the decode step runs as CUDA graphs (`graphs.py`). Default: on a GPU, unless experts are unquantized
            (their row counts are read on the host). True requires it.
        tokenizer: default: the checkpoint's, where it has one. Without a tokenizer prompts are token ids and no text comes
            out.

    Attributes:
        max_context: positions that one sequence can really use.
        vocab_size: ids that can be sampled; rows of the head behind the tokenizer's last id are padding.
        kv: the cache's format.
        scheduling: counts of prefilled and reused tokens and of pauses since loading.
        speculation: counts of what speculation brought since loading, None without it.

    Raises:
        ValueError: an option out of range or without effect; and whatever `load` raises.
    """

    def __init__(
        self,
        model: str | Path | Transformer,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        overrides: Mapping[str, Any] | None = None,
        progress: bool | None = None,
        max_context: int | None = None,
        cache_tokens: int | None = None,
        gpu_memory: float = 0.9,
        max_batch: int = 16,
        prefill_chunk: int = 512,
        speculate: int = 0,
        kv: str = "bf16",
        graphs: bool | None = None,
        prefix_caching: bool = True,
        tokenizer: Tokenizer | None = None,
        group: RankGroup | None = None,
        expert_parallel: bool = False,
    ) -> None:
        for name, value in (
            ("max_context", max_context),
            ("cache_tokens", cache_tokens),
            ("max_batch", max_batch),
            ("prefill_chunk", prefill_chunk),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}: found {value!r}, required an integer >= 1")
        if not 0 < gpu_memory <= 1:
            raise ValueError(f"gpu_memory: found {gpu_memory!r}, required a number above 0 and at most 1")
        if speculate != 0:
            check_num_drafts(speculate)

        def pages(model: Transformer, device: torch.device) -> int:
            return cache_pages(
                model,
                device,
                cache_tokens=cache_tokens,
                context=max_context or min(model.max_context, DEFAULT_CONTEXT),
                max_batch=max_batch,
                gpu_memory=gpu_memory,
                kv=kv,
                chunk=prefill_chunk,
                drafts=speculate,
            )

        check_kv(ModelConfig.from_dir(model, overrides) if isinstance(model, (str, Path)) else model.config, kv)
        if isinstance(model, (str, Path)):
            if tokenizer is None and (Path(model) / "tokenizer.json").is_file():
                tokenizer = Tokenizer.from_dir(model)
            target = torch.device(device or ("cpu" if group is None else group.device))
            model = load(
                model,
                device=target,
                dtype=dtype,
                overrides=overrides,
                max_context=max_context,
                mtp=speculate > 0,
                group=group,
                expert_parallel=expert_parallel,
                progress=progress is not False,
                check=lambda sizes: pages(sizes, target),
            )
        elif not (device is dtype is overrides is progress is group is None) or expert_parallel:
            raise ValueError(
                "device, dtype, overrides, progress, group and expert_parallel act on loading; this model is loaded already"
            )
        if max_context is not None and max_context > model.max_context:
            raise ValueError(f"max_context: found {max_context}, the model allows at most {model.max_context} positions")
        context = max_context or min(model.max_context, DEFAULT_CONTEXT)
        num_pages = pages(model, model.device)
        if model.group is not None:  # ranks schedule alike, whatever memory each has
            num_pages = model.group.least(num_pages)
        self.model = model
        self.tokenizer = tokenizer
        self.max_context = min(context, num_pages * PAGE)
        self.prefill_chunk = prefill_chunk
        self.max_batch = max_batch
        self.vocab_size = model.config.vocab_size
        if tokenizer is not None:
            self.vocab_size = min(self.vocab_size, tokenizer.vocab_size)
        # page 0 takes the writes of padding rows
        self.cache = model.new_cache(num_pages + 1, kv=kv)
        self.kv = kv
        self._allocator = PageAllocator(num_pages + 1)
        self._scheduler = Scheduler(
            self._allocator,
            max_batch=max_batch,
            prefill_chunk=prefill_chunk,
            num_drafts=speculate,
            prefix_caching=prefix_caching,
        )
        self._rows = DecodeRows(max_batch, pages_for(self.max_context), model.device)
        self._sampling = SamplingBatch.buffers(max_batch, model.device)
        self._seen: Tensor | None = None  # bool [max_batch, vocab], once a row has a repetition penalty
        self._masks: Tensor | None = None  # int32 [max_batch * rows of each, words], once a row has a grammar
        self._grammars: GrammarCompiler | None = None
        self._speculator: Speculator | None = None
        if speculate:
            self._speculator = Speculator(
                model,
                num_pages=num_pages + 1,
                num_drafts=speculate,
                max_batch=max_batch,
                max_context=self.max_context,
                vocab_size=self.vocab_size,
            )
        self._graphs: DecodeGraphs | None = None
        if use_graphs(model, graphs):
            self._graphs = DecodeGraphs(max_batch, model.device, buffers=self._step_buffers, clear=self._rows.clear)
        self._busy = False

    @property
    def scheduling(self) -> SchedulerStats:
        return self._scheduler.stats

    @property
    def speculation(self) -> SpeculationStats | None:
        return None if self._speculator is None else self._speculator.stats

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
    ) -> Iterator[Output]:
        """Generate for one prompt or several; yields an `Output` per token as it is chosen, the prompts interleaved.

        Args:
            prompts: text, token ids, or a list of those. Text gets the model's prefix tokens in front; token ids are taken as
                they are. With `chat`, a prompt is the user's message or a list of messages, rendered with the chat template.
            params: for all prompts, or one per prompt. Default: greedy, 128 tokens.

        Raises:
            ValueError: at once, before any work: an empty prompt, one longer than the context, ids outside the vocabulary,
                options that need a tokenizer, a JSON schema or grammar that is not valid.
            ImportError: a request has a JSON schema or grammar, and the extra `grammar` is not installed.
            RuntimeError: an earlier iterator of this LLM is neither exhausted nor closed.
            FloatingPointError: while iterating: logits hold NaN or have no finite maximum.
        """
        listed = as_list(prompts, chat)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(listed)
        else:
            each = list(params)
            if len(each) != len(listed):
                raise ValueError(f"params: found {len(each)}, required one, or one for each of the {len(listed)} prompts")
        sequences = [self._sequence(index, prompt, p, chat) for index, (prompt, p) in enumerate(zip(listed, each))]
        self._check_idle()
        self._agree(sequences)
        return self._run(sequences)

    def _agree(self, sequences: Sequence[SequenceState]) -> None:
        """All ranks draw what rank 0 draws, and work on the same prompts."""
        group = self.model.group
        if group is not None:
            group.agree("prompts and parameters", [(sequence.tokens, sequence.params) for sequence in sequences])
            for sequence, seed in zip(sequences, group.broadcast([sequence.seed for sequence in sequences])):
                sequence.seed = seed

    def describe(self) -> str:
        """One line: device, dtypes, the cache and the kernels in use."""
        packed = "" if self.kv == "bf16" else f", cache packed as {self.kv}"
        graphs = "" if self._graphs is None else ", decode steps as CUDA graphs"
        size = f"{self.cache.tokens_per_gib} tokens a GiB of cache, {(self.cache.num_pages - 1) * PAGE} in all"
        return f"{describe(self.model)}{packed}, {size}{graphs}"

    def _with_caller(self) -> AbstractContextManager[None]:
        return nullcontext() if self.model.group is None else self.model.group.idle()

    def _waiting(self) -> AbstractContextManager[None]:
        return nullcontext() if self.model.group is None else self.model.group.waiting()

    def _check_idle(self) -> None:
        if self._busy:
            raise RuntimeError("another generate() of this LLM is still running; exhaust or close its iterator first")

    def _sequence(self, index: int, prompt: Prompt, params: SamplingParams, chat: bool) -> SequenceState:
        tokens = tokens_of(index, prompt, chat, self.tokenizer)
        size = self.model.config.vocab_size
        for name, ids in ((f"prompt {index}", tokens), ("stop_token_ids", params.stop_token_ids)):
            outside = [token for token in ids if not 0 <= token < size]
            if outside:
                raise ValueError(f"{name}: found token id {outside[0]}, the vocabulary has ids 0 to {size - 1}")
        if params.logprobs is not None and params.logprobs > self.vocab_size:
            raise ValueError(f"logprobs: found {params.logprobs}, the vocabulary has {self.vocab_size} ids")
        if len(tokens) > self.max_context:
            raise ValueError(
                f"prompt {index}: {len(tokens)} tokens, but the context holds {self.max_context}"
                " (see max_context and cache_tokens)"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: stop strings need a tokenizer, and the model came without one; use stop_token_ids")
        eos = () if params.ignore_eos else self.model.config.eos_token_ids
        return SequenceState(
            index=index,
            tokens=tokens,
            params=params,
            seed=resolve_seed(params),
            limit=min(params.max_tokens, self.max_context - len(tokens) + 1),
            stop_ids=frozenset((*eos, *params.stop_token_ids)),
            detokenizer=StreamDetokenizer(self.tokenizer, tokens) if self.tokenizer is not None else None,
            stop_strings=StopStrings(params.stop),
            grammar=self._grammar(params) if params.structured else None,
        )

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if self.tokenizer is None:
            raise ValueError("json_schema, grammar: they need a tokenizer, and the model came without one")
        if self._grammars is None:
            self._grammars = GrammarCompiler(self.tokenizer, self.vocab_size, self.model.config.eos_token_ids)
        return self._grammars.compile(params)

    def _run(self, sequences: Sequence[SequenceState]) -> Iterator[Output]:
        self._check_idle()
        self._busy = True
        scheduler = self._scheduler
        try:
            scheduler.add(sequences)
            while scheduler.busy:
                outputs = self._decode(scheduler.decoding) if scheduler.decoding else []
                chunks = scheduler.next_chunks()
                if chunks:
                    outputs += self._prefill(chunks)
                added = scheduler.settle(chunks)
                if scheduler.decoding == self._rows.sequences:
                    self._rows.add_pages(added)
                else:
                    self._load(scheduler.decoding)
                with self._with_caller():
                    yield from outputs
        except FloatingPointError:
            self._allocator.forget()  # whatever brought NaN may be in pages that others would take over
            raise
        finally:
            scheduler.clear()
            self._busy = False
            if self.model.group is not None:
                self.model.group.rest()

    @torch.inference_mode()
    def _prefill(self, chunks: Sequence[Chunk]) -> list[Output]:
        """Feed chunks of prompts; where a prompt ends, choose its first token."""
        device = self.model.device
        batch = prefill_batch(chunks, self._rows.block_table.shape[1], device)
        hidden = self.model(batch, self.cache)
        ends = torch.tensor([chunk.end - chunk.start for chunk in chunks]).cumsum(0) - 1
        last = ends[[chunk.samples for chunk in chunks]].to(device)
        sequences = [chunk.sequence for chunk in chunks if chunk.samples]
        sampled = self._first_tokens(hidden[last], sequences) if sequences else None
        if self._speculator is not None:
            # the token behind each one; behind a prompt's last the one just chosen
            fed = [chunk.sequence.tokens[chunk.start + 1 : chunk.end + 1] + [0] * chunk.samples for chunk in chunks]
            following = torch.cat([torch.tensor(tokens) for tokens in fed]).to(device)
            if sampled is not None:
                following[last] = sampled.tokens.clamp(min=0)
            self._speculator.prefill(batch, hidden, following)
        return [] if sampled is None else self._accept(sequences, pack(sampled))

    def _first_tokens(self, hidden: Tensor, sequences: Sequence[SequenceState]) -> Sampled:
        """The tokens behind prompts, from the states [n, hidden] at their ends."""
        logits = self.model.compute_logits(hidden)[:, : self.vocab_size]
        sampling = SamplingBatch.from_params([s.params for s in sequences], [s.seed for s in sequences], logits.device)
        seen = self._seen_by(sequences) if sampling.penalized else None
        positions = torch.tensor([sequence.prompt_length for sequence in sequences]).to(logits.device)
        masks = self._masks_of(sequences, 1)
        return sample(logits, sampling, positions, seen=seen, allowed=None if masks is None else masks.to(logits.device))

    @torch.inference_mode()
    def _load(self, decoding: Sequence[SequenceState]) -> None:
        """Rewrite the decode buffers after sequences joined or left."""
        self._rows.load(decoding)
        if not decoding:
            return
        self._sampling.load([s.params for s in decoding], [s.seed for s in decoding])
        if self._sampling.penalized:
            if self._seen is None:
                self._seen = torch.zeros(self.max_batch, self.vocab_size, dtype=torch.bool, device=self.model.device)
            self._seen[: len(decoding)] = self._seen_by(decoding)
        if self._speculator is not None:
            kept = [sequence.row for sequence in decoding]
            self._speculator.load(kept, [sequence.cache_rows for sequence in decoding], self._sampling)
        for row, sequence in enumerate(decoding):
            sequence.row = row

    @torch.inference_mode()
    def _decode(self, decoding: Sequence[SequenceState]) -> list[Output]:
        """One step of all rows."""
        each = 1 if self._speculator is None else self._speculator.num_drafts + 1
        masks = self._masks_of(decoding, each)
        if masks is not None:
            if self._masks is None:
                shape = (self.max_batch * each, masks.shape[1])
                self._masks = torch.full(shape, -1, dtype=torch.int32, device=self.model.device)
            self._masks[: len(masks)].copy_(masks)

        def step(rows: int) -> Tensor:
            return self._step(rows, each, masked=masks is not None)

        if self._graphs is None:
            packed = step(len(decoding))
        else:
            packed = self._graphs.run((self._sampling.kind, masks is not None), len(decoding), step)
        return self._accept(decoding, packed, each)

    def _step(self, count: int, each: int, *, masked: bool) -> Tensor:
        """Feed rows 0..count-1 and choose their next tokens, all of it on the device; `each` rows a sequence, packed."""
        rows, sampling, speculator = self._rows, self._sampling.head(count), self._speculator
        tokens, positions, table = rows.tokens[:count], rows.positions[:count], rows.block_table[:count]
        seen = self._seen[:count] if self._seen is not None and sampling.penalized else None
        allowed = self._masks[: count * each] if self._masks is not None and masked else None
        if speculator is not None:
            verified, proposed = speculator.step(tokens, positions, table, self.cache, seen=seen, allowed=allowed)
            drafts = torch.nn.functional.pad(speculator.drafts[:count], (0, 1)).flatten()
            return pack(verified.sampled, drafts, proposed.repeat_interleave(each))
        # the context bound is the same in every step, so that nothing is compiled for a new value
        logits = self.model.decode_step(tokens, positions, rows.slots[:count], table, self.cache, self.max_context)
        sampled = sample(logits[:, : self.vocab_size], sampling, positions + 1, seen=seen, allowed=allowed)
        if seen is not None:
            seen.scatter_(1, sampled.tokens.clamp(min=0)[:, None], True)
        rows.advance(sampled.tokens)
        return pack(sampled)

    def _step_buffers(self) -> list[Tensor]:
        """What a step changes in place, besides the caches."""
        state = self._rows.buffers + ([] if self._seen is None else [self._seen])
        return state if self._speculator is None else [*state, *self._speculator.buffers]

    def _masks_of(self, sequences: Sequence[SequenceState], each: int) -> Tensor | None:
        """The grammars' masks int32 [sequences * each, words] for the next step's rows, on the host; None where no sequence
        has a grammar.
        """
        if self._grammars is None or all(sequence.grammar is None for sequence in sequences):
            return None
        masks = torch.full((len(sequences), each, self._grammars.words), -1, dtype=torch.int32)
        for rows, sequence in zip(masks, sequences):
            if sequence.grammar is not None:
                found = sequence.grammar.mask(sequence.drafts)
                rows[: len(found)] = found
        return masks.flatten(0, 1)

    def _seen_by(self, sequences: Sequence[SequenceState]) -> Tensor:
        seen = torch.zeros(len(sequences), self.vocab_size, dtype=torch.bool)
        for row, sequence in enumerate(sequences):
            ids = torch.tensor(sequence.tokens)
            seen[row, ids[ids < self.vocab_size]] = True
        return seen.to(self.model.device)

    def _accept(self, sequences: Sequence[SequenceState], packed: Tensor, each: int = 1) -> list[Output]:
        """The step's one copy to the host, and what each sequence makes of its tokens, `each` rows a sequence.

        packed: of `pack`, with two more columns in a speculative step: each sequence's next drafts, and how many it has
        verified.
        """
        with self._waiting():
            packed = packed.cpu()
        tokens, logprobs, columns = unpack(packed, 1 if each == 1 else 3)
        starts = range(0, len(tokens), each)
        found = [[row for row in range(start, start + each) if tokens[row] != NOTHING] for start in starts]
        for sequence, rows in zip(sequences, found):
            for row in rows:
                if tokens[row] < 0:
                    position = len(sequence.tokens) + row - rows[0]
                    raise FloatingPointError(
                        f"prompt {sequence.index}, position {position}: the model's logits hold NaN, or no finite maximum"
                    )
        outputs = []
        for sequence, rows in zip(sequences, found):
            if columns and self.speculation is not None:
                sequence.drafts = columns[0][rows[0] : rows[0] + each - 1]
                self.speculation.add(columns[1][rows[0]], len(rows))
            for row in rows:
                wanted, known = sequence.params.logprobs, logprobs[row]
                cut = None if wanted is None or known is None else TokenLogprobs(known.logprob, known.top[:wanted])
                outputs.append(sequence.accept(tokens[row], cut))
                if outputs[-1].finish_reason is not None:
                    break  # what was accepted behind the end is not part of the text
        return outputs


def describe(model: Transformer) -> str:
    """One line: a model's device, dtypes and the kernels in use."""
    from ..ops._dispatch import use_triton

    kernels = "reference (torch)"
    if use_triton(torch.zeros((), device=model.device)):
        import triton

        kernels = f"triton {triton.__version__}; {kernel_paths(model)}"
    name = f" ({torch.cuda.get_device_name(model.device)})" if model.device.type == "cuda" else ""
    dtype = str(model.dtype).removeprefix("torch.")
    ranks = f"; {model.partition.describe()}" if model.partition.shard.size > 1 else ""
    return f"device {model.device}{name}, activations {dtype}, cache {dtype}, kernels: {kernels}{ranks}"
