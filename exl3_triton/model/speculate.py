"""Speculative decoding: the next-token layer drafts, the trunk verifies several positions in one forward pass.

A step has three parts. Verify: the trunk is fed each sequence's last token and its N drafts, N + 1 positions, and as many
drafts are kept as the rule accepts, with one token of the trunk's own behind them. Extend: the next-token layer is fed the
new tokens with the trunk's states. Draft: the layer's output, fed to itself N - 1 times, gives N new drafts.

The rule is that of Leviathan et al., arXiv:2211.17192: a draft d is kept with probability min(1, p(d) / q(d)), and the first
one that is not is replaced by a draw from the positive part of p - q. Tokens then have the trunk's distribution p, whatever q
is. A greedy row is the case of p and q with all mass on one id: drafts are kept as long as they are the trunk's choices.

Nothing is rolled back: rows of the caches behind the accepted length are never attended to before later tokens overwrite
them, index keys included. Everything works on buffers of constant address and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..reference import PAGE
from .cache import Batch, KVCache
from .sampling import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    Sampled,
    SamplingBatch,
    adjust,
    gumbel_noise,
    uniform_noise,
    with_logprobs,
)
from .transformer import Transformer

MAX_DRAFTS = 5
NOTHING = -2  # in the place of a token: the step gave the sequence no token there


@dataclass
class SpeculationStats:
    """What speculation brought, counted over steps of single sequences.

    steps: verifications; proposed: drafts verified; accepted: drafts kept; tokens: tokens out, accepted and the trunk's own.
    """

    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    tokens: int = 0

    def add(self, proposed: int, tokens: int) -> None:
        """One sequence's step: drafts verified, tokens that came out."""
        self.steps += 1
        self.proposed += proposed
        self.accepted += tokens - 1
        self.tokens += tokens

    @property
    def acceptance_rate(self) -> float:
        """Accepted of the proposed drafts; 0 before any was proposed."""
        return self.accepted / max(self.proposed, 1)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a verification, the trunk's own included: 1 without speculation, at most N + 1."""
        return self.tokens / max(self.steps, 1)

    def speedup(self, step_seconds: float, plain_seconds: float) -> float:
        """Effective speed-up: tokens a step, times a plain decode step's seconds over a speculative step's."""
        return self.mean_accepted_length * plain_seconds / step_seconds


@dataclass(frozen=True)
class Verified:
    """One verification of B sequences with N drafts each.

    sampled: of [B * (N + 1)] rows, N + 1 a sequence; tokens behind those accepted are NOTHING, and -1 stands where logits were
    not usable. accepted: int64 [B], drafts kept.
    """

    sampled: Sampled
    accepted: Tensor


def probabilities(scores: Tensor, temperature: Tensor) -> Tensor:
    """fp32 [n, V], the distribution behind `adjust`ed scores; all mass on the best id in rows of temperature 0."""
    greedy = torch.zeros_like(scores).scatter(1, scores.argmax(dim=1, keepdim=True), 1.0)
    return torch.where((temperature == 0)[:, None], greedy, scores.softmax(dim=1))


def verify(
    logits: Tensor,
    drafts: Tensor,
    draft_probabilities: Tensor | None,
    usable: Tensor,
    batch: SamplingBatch,
    positions: Tensor,
    *,
    seen: Tensor | None = None,
    allowed: Tensor | None = None,
) -> Verified:
    """Accept drafts against the trunk's logits, without a host copy.

    Args:
        logits: fp32 [B * (N + 1), V] at the last token and the N drafts of each sequence.
        drafts: int64 [B, N].
        draft_probabilities: fp32 [B, N, V], what the drafts were drawn from; None where all rows are greedy.
        usable: bool [B, N + 1], the rows that were fed: the last token (false in a padding row), then drafts up to a length.
        batch: the parameters of the B * (N + 1) rows (`SamplingBatch.repeat`).
        positions: int64 [B], of the last tokens.
        seen: bool [B, V], ids of prompt and output so far; required if any row has a repetition penalty.
        allowed: int32 [B * (N + 1), words], the grammar's masks behind every draft; see `sample`.
    """
    count, number = drafts.shape
    place = torch.arange(number + 1, device=drafts.device)
    if batch.penalized and seen is not None:
        seen = _seen_with_drafts(seen, drafts)
    scores, finite = adjust(logits, batch, seen=seen, allowed=allowed)
    vocab = logits.shape[1]
    if batch.random:
        assert draft_probabilities is not None
        p = probabilities(scores, batch.temperature).unflatten(0, (count, number + 1))
        p_draft = p[:, :number].gather(2, drafts[:, :, None])[:, :, 0]
        q_draft = draft_probabilities.gather(2, drafts[:, :, None])[:, :, 0]
        seed = batch.seed.unflatten(0, (count, number + 1))
        draft_positions = positions[:, None] + 1 + place[:number]
        noise = uniform_noise((seed[:, :number] ^ ACCEPT_STREAM).flatten(), draft_positions.flatten())
        kept = noise.view(count, number) * q_draft < p_draft
        accepted = _prefix(kept & usable[:, 1:])
        row = accepted[:, None, None].expand(-1, 1, vocab)
        own = p.gather(1, row)[:, 0]
        drafted = torch.nn.functional.pad(draft_probabilities, (0, 0, 0, 1)).gather(1, row)[:, 0]
        # a draft stood here and was refused; otherwise the trunk's distribution as it is
        refused = torch.nn.functional.pad(usable[:, 1:], (0, 1)).gather(1, accepted[:, None])
        rest = (own - drafted).clamp(min=0)
        own = torch.where(refused & (rest.sum(dim=1, keepdim=True) > 0), rest, own)
        noise = gumbel_noise(seed[:, 0], positions + 1 + accepted, vocab)
        cold = batch.temperature.unflatten(0, (count, number + 1))[:, :1] == 0
        last = (own.log() + noise.masked_fill(cold, 0.0)).argmax(dim=1)
        tokens = torch.cat([drafts, last[:, None]], dim=1)
        tokens = torch.where(place == accepted[:, None], last[:, None], tokens)
    else:
        tokens = scores.argmax(dim=1).unflatten(0, (count, number + 1))
        accepted = _prefix((tokens[:, :number] == drafts) & usable[:, 1:])
    tokens = torch.where(finite.unflatten(0, (count, number + 1)), tokens, -1)
    tokens = torch.where((place <= accepted[:, None]) & usable[:, :1], tokens, NOTHING)
    return Verified(with_logprobs(logits, tokens.flatten(), batch), accepted)


def _prefix(kept: Tensor) -> Tensor:
    """int64 [B], how many of the columns of bool [B, N] are true before the first that is not."""
    return kept.to(torch.int64).cumprod(dim=1).sum(dim=1)


def _seen_with_drafts(seen: Tensor, drafts: Tensor) -> Tensor:
    """bool [B * (N + 1), V]: behind draft j, drafts 1..j count as output."""
    rows = [seen]
    for column in drafts.unbind(1):
        rows.append(rows[-1].scatter(1, column[:, None], True))
    return torch.stack(rows, dim=1).flatten(0, 1)


class Speculator:
    """Drafts and their buffers for up to `max_batch` sequences, beside a runner that owns tokens, positions and pages.

    Sequence b of a step is row b of all buffers. A row without drafts (one that just joined) is verified at its last token
    alone, which is a plain decode step for it.

    Args:
        model: loaded with `mtp=True`.
        num_pages: pages of the runner's cache; a sequence has the same ones in the next-token layer's cache.
        num_drafts: N, tokens drafted a step, 1 to 5.
        max_context: a bound of every position + 1, the same in every step.
        vocab_size: ids that can be sampled.

    Raises:
        ValueError: N out of range, or a model without the layer.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        num_pages: int,
        num_drafts: int,
        max_batch: int,
        max_context: int,
        vocab_size: int,
    ) -> None:
        check_num_drafts(num_drafts)
        if model.mtp is None:
            raise ValueError("speculate: the model was loaded without its next-token layer, required load(..., mtp=True)")
        self.model, self.num_drafts, self.max_context, self.vocab_size = model, num_drafts, max_context, vocab_size
        self.cache = model.mtp.new_cache(num_pages)
        self.stats = SpeculationStats()
        device = model.device
        self.drafts = torch.zeros(max_batch, num_drafts, dtype=torch.int64, device=device)
        self.drafted = torch.zeros(max_batch, dtype=torch.int64, device=device)  # drafts that a row has: none, or N
        self.ends = torch.zeros(max_batch, dtype=torch.int64, device=device)  # cache rows that a sequence may fill
        self.probabilities: Tensor | None = None  # fp32 [max_batch, N, vocab], once a row is sampled
        self._sampling = SamplingBatch.buffers(max_batch, device)
        self._place = torch.arange(num_drafts + 1, device=device)
        self._rows = torch.arange(max_batch, dtype=torch.int32, device=device)

    @property
    def buffers(self) -> list[Tensor]:
        """What a step changes in place, besides the caches."""
        state = [self.drafts, self.drafted, self.ends]
        return state if self.probabilities is None else [*state, self.probabilities]

    def prefill(self, batch: Batch, hidden: Tensor, following: Tensor) -> None:
        """Fill the layer's cache for a prompt's tokens: the trunk's batch and states [T, hidden], the token after each [T]."""
        self.model.draft(_with_tokens(batch, following), hidden, self.cache)

    def load(self, kept: Sequence[int | None], ends: Sequence[int], sampling: SamplingBatch) -> None:
        """Set the rows of the following steps, after sequences joined or left.

        kept: the row that each sequence had before, whose drafts it keeps, or None. ends: cache rows that each may fill;
        drafts that would lie behind are not verified, so that no more tokens come out than end + 1 - position.
        sampling: the parameters of `max_batch` rows (`SamplingBatch.buffers`), read by every step.
        """
        device, count = self.drafts.device, len(kept)
        self._sampling = sampling
        if sampling.random and self.probabilities is None:
            shape = (*self.drafts.shape, self.vocab_size)
            self.probabilities = torch.zeros(shape, dtype=torch.float32, device=device)
        source = torch.tensor([row or 0 for row in kept], dtype=torch.int64).to(device)
        stays = torch.tensor([row is not None for row in kept], dtype=torch.bool).to(device)
        # a greedy row's drafts may have been made while nothing was sampled: its outcome does not depend on q
        self.drafts[:count] = self.drafts[source]
        self.drafted[:count] = self.drafted[source] * stays
        if self.probabilities is not None and sampling.random:
            self.probabilities[:count] = self.probabilities[source]
        self.drafted[count:] = 0
        self.ends.zero_()
        self.ends[:count] = torch.tensor(list(ends), dtype=torch.int64).to(device)

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        block_table: Tensor,
        cache: KVCache,
        *,
        seen: Tensor | None = None,
        allowed: Tensor | None = None,
    ) -> tuple[Verified, Tensor]:
        """Verify, extend and draft for the B loaded sequences.

        tokens, positions: int64 [B], each sequence's last token, not in the cache yet, and its position (-1 pads); both are
        advanced in place. block_table: int32 [B, pages]. cache: the trunk's. seen: bool [B, vocab], updated in place, where
        a row has a repetition penalty. allowed: as `verify`.

        Returns what was verified and how many drafts of each row were, int64 [B]; `drafts` then holds the next ones.
        """
        count, number = tokens.shape[0], self.num_drafts
        drafts, ends, sampling = self.drafts[:count], self.ends[:count], self._sampling.head(count)
        place = self._place
        usable = (
            (positions >= 0)[:, None] & (positions[:, None] + place < ends[:, None]) & (place <= self.drafted[:count, None])
        )
        fed = torch.cat([tokens[:, None], drafts], dim=1)
        hidden = self.model(self._batch(fed, positions[:, None] + place, usable, block_table), cache)
        logits = self.model.compute_logits(hidden)[:, : self.vocab_size]
        q = self.probabilities[:count] if sampling.random and self.probabilities is not None else None
        repeated = sampling.repeat(number + 1)
        verified = verify(logits, drafts, q, usable, repeated, positions, seen=seen, allowed=allowed)
        proposed = usable[:, 1:].sum(dim=1)

        accepted = verified.accepted
        # an unusable row stops the request on the host; here it only must not be an index
        fresh = verified.sampled.tokens.unflatten(0, (count, number + 1)).clamp(min=0)
        new = place <= accepted[:, None]
        last = fresh.gather(1, accepted[:, None])[:, 0]
        if seen is not None:
            seen.scatter_(1, torch.where(new, fresh, last[:, None]), True)
        extend = self._batch(fresh, positions[:, None] + place, usable & new, block_table)
        states = self.model.draft(extend, hidden, self.cache).unflatten(0, (count, number + 1))
        state = states.gather(1, accepted[:, None, None].expand(-1, 1, states.shape[2]))[:, 0]
        active = positions >= 0
        tokens.copy_(torch.where(active, last, tokens))
        positions.copy_(torch.where(active, positions + 1 + accepted, positions))
        self._draft(state, positions, active, block_table, seen)
        return verified, proposed

    def _draft(self, state: Tensor, positions: Tensor, active: Tensor, block_table: Tensor, seen: Tensor | None) -> None:
        """N drafts behind the tokens at `positions`; `state` [B, hidden] is the layer's output for those tokens."""
        count, number = positions.shape[0], self.num_drafts
        batch = self._sampling.head(count)
        for index in range(number):
            scores, finite = adjust(self.model.compute_logits(state)[:, : self.vocab_size], batch, seen=seen)
            # whatever is drafted the outcome is right, as long as q is what it was drawn from
            scores = torch.where(finite[:, None], scores, 0.0)
            if batch.random:
                assert self.probabilities is not None
                self.probabilities[:count, index] = probabilities(scores, batch.temperature)
                noise = gumbel_noise(batch.seed ^ DRAFT_STREAM, positions + 1 + index, self.vocab_size)
                scores = scores + noise.masked_fill((batch.temperature == 0)[:, None], 0.0)
            draft = scores.argmax(dim=1)
            self.drafts[:count, index] = draft
            if index + 1 < number:
                usable = active & (positions + index < self.ends[:count])
                again = self._batch(draft[:, None], (positions + index)[:, None], usable[:, None], block_table)
                state = self.model.draft(again, state, self.cache)
        self.drafted[:count] = active * number

    def _batch(self, tokens: Tensor, positions: Tensor, usable: Tensor, block_table: Tensor) -> Batch:
        """A flat decode batch of [B, n] tokens; rows that are not usable are padding."""
        count, each = tokens.shape
        positions = torch.where(usable, positions, -1)
        page = block_table.gather(1, positions.clamp(min=0) // PAGE).to(torch.int64)
        slots = torch.where(usable, page * PAGE + positions % PAGE, -1)
        sequence = self._rows[:count, None].expand(-1, each).flatten()
        flat = (tokens.flatten(), positions.flatten(), slots.flatten())
        return Batch(*flat, block_table, sequence, max_context=self.max_context, prefill=False)


def check_num_drafts(value: int) -> None:
    """Raises ValueError unless 1 <= value <= 5."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DRAFTS:
        raise ValueError(f"speculate: found {value!r}, required an integer from 1 to {MAX_DRAFTS} (tokens drafted a step)")


def _with_tokens(batch: Batch, tokens: Tensor) -> Batch:
    place = (batch.positions, batch.slots, batch.block_table, batch.sequence)
    return Batch(tokens, *place, batch.max_context, batch.prefill)
