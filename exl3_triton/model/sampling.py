"""Choosing the next token: greedy, temperature, top-k, top-p, min-p, repetition penalty, log-probabilities.

Everything is tensor arithmetic on the logits' device without a host copy, so that a captured decode step can contain it.

Randomness is counter-based: the noise of vocabulary id v in the row with `seed` that fills position p is a hash of (seed, p,
v) alone. A request's tokens therefore depend on its own seed and logits, never on its neighbours in the batch, on the order
of requests or on generator state; two requests with one seed and one prompt give the same text. The hash is SplitMix64
(Steele, Lea,
Flood: Fast splittable pseudorandom number generators, 2014); the choice is the Gumbel maximum: argmax(log p + g) is
    distributed as p.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
# Seeds of further streams of noise at a position are the request's, xor one of these (digits of pi).
DRAFT_STREAM = 0x243F6A8885A308D3
ACCEPT_STREAM = 0x13198A2E03707344


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Attributes:
        temperature: 0 is greedy (the largest logit, the lowest id on ties); otherwise logits are divided by it.
        top_k: keep the k most probable ids; 0 keeps all.
        top_p: keep the smallest set of most probable ids whose probability reaches top_p, in (0, 1]; 1 keeps all.
        min_p: keep ids at least min_p times as probable as the most probable one, in [0, 1]; 0 keeps all.
        seed: 0 <= seed < 2**63; None draws one per request from the operating system.
        repetition_penalty: > 0; positive logits of ids seen in prompt or output are divided by it, negative ones multiplied
            (Keskar et al., CTRL, 2019); 1 is off.
        max_tokens: most tokens to generate, >= 1.
        stop: strings that end the text and are not part of it.
        stop_token_ids: ids that end the text, besides the model's own end-of-sequence ids.
        logprobs: report the chosen token's log-probability and those of the n most probable ids; None reports none. They are
            the model's own, before penalty, temperature and filters.
        ignore_eos: do not end at the model's end-of-sequence ids.
        json_schema: the text is JSON that this schema allows (an object, or its JSON text; kept as text), and ends with it.
        grammar: the text is one of this grammar (Lark's notation, as llguidance reads it), and ends with it.

    Filters act in the order temperature, top_k, top_p, min_p; among equally probable ids the lower id counts as more probable.

    Raises:
        ValueError: an option out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    max_tokens: int = 128
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    logprobs: int | None = None
    ignore_eos: bool = False
    json_schema: str | Mapping[str, Any] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        def normalise(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        normalise("temperature", _real("temperature", self.temperature, "a finite number >= 0", lambda x: x >= 0))
        normalise("top_k", _integer("top_k", self.top_k, 0))
        normalise("top_p", _real("top_p", self.top_p, "a number in (0, 1]", lambda x: 0 < x <= 1))
        normalise("min_p", _real("min_p", self.min_p, "a number in [0, 1]", lambda x: 0 <= x <= 1))
        rule = "a finite number > 0"
        normalise("repetition_penalty", _real("repetition_penalty", self.repetition_penalty, rule, lambda x: x > 0))
        normalise("max_tokens", _integer("max_tokens", self.max_tokens, 1))
        if self.seed is not None:
            normalise("seed", _integer("seed", self.seed, 0, 2**63))
        if self.logprobs is not None:
            normalise("logprobs", _integer("logprobs", self.logprobs, 0))
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop: found {text!r}, required non-empty strings")
        normalise("stop", stop)
        normalise("stop_token_ids", tuple(_integer("stop_token_ids", token, 0) for token in self.stop_token_ids))
        if self.json_schema is not None:
            normalise("json_schema", _schema_text(self.json_schema))
        if self.grammar is not None and (not isinstance(self.grammar, str) or not self.grammar.strip()):
            raise ValueError(f"grammar: found {self.grammar!r}, required the text of a grammar")
        if self.structured and (self.ignore_eos or None not in (self.json_schema, self.grammar)):
            found = "ignore_eos" if self.ignore_eos else "both"
            raise ValueError(f"json_schema, grammar: found {found}, required one of them, and a text that may end with it")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def structured(self) -> bool:
        return self.json_schema is not None or self.grammar is not None


def _schema_text(schema: Any) -> str:
    """A JSON schema, as an object or its JSON text, as JSON text. Raises ValueError for anything else."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError as error:
            raise ValueError(f"json_schema: not valid JSON: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise ValueError(f"json_schema: found {type(schema).__name__}, required a JSON object, or its text")
    try:
        return json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise ValueError(f"json_schema: not JSON: {error}") from None


def _real(name: str, value: Any, rule: str, accept: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or not accept(value):
        raise ValueError(f"{name}: found {value!r}, required {rule}")
    return float(value)


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    number = None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
    if number is None or number < low or (high is not None and number >= high):
        rule = f"an integer >= {low}" + ("" if high is None else f" and < {high}")
        raise ValueError(f"{name}: found {value!r}, required {rule}")
    return number


@dataclass
class SamplingBatch:
    """The parameters of B rows as tensors on one device, and on the host which parts of the work any row needs.

    A switched-off option is an exact no-op, so what another row asks for never changes a row's token.
    """

    temperature: Tensor  # fp32 [B]
    top_k: Tensor  # int64 [B], vocabulary size or more where off
    top_p: Tensor  # fp32 [B]
    min_p: Tensor  # fp32 [B]
    penalty: Tensor  # fp32 [B]
    seed: Tensor  # int64 [B]
    random: bool = False
    filtered: bool = False
    penalized: bool = False
    num_logprobs: int | None = None

    @classmethod
    def from_params(
        cls, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device | str = "cpu"
    ) -> SamplingBatch:
        """One row per entry of `params`; `seeds` are the rows' seeds (`resolve_seed`)."""

        def column(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device)

        requested = [p.logprobs for p in params if p.logprobs is not None]
        return cls(
            temperature=column([p.temperature for p in params], torch.float32),
            top_k=column([p.top_k or 2**62 for p in params], torch.int64),
            top_p=column([p.top_p for p in params], torch.float32),
            min_p=column([p.min_p for p in params], torch.float32),
            penalty=column([p.repetition_penalty for p in params], torch.float32),
            seed=column(list(seeds), torch.int64),
            random=any(not p.greedy for p in params),
            filtered=any(not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params),
            penalized=any(p.repetition_penalty != 1 for p in params),
            num_logprobs=max(requested) if requested else None,
        )

    @classmethod
    def buffers(cls, capacity: int, device: torch.device | str) -> SamplingBatch:
        """Rows at constant addresses, to be filled by `load`."""
        return cls.from_params([_NEUTRAL] * capacity, [0] * capacity, device)

    def load(self, params: Sequence[SamplingParams], seeds: Sequence[int]) -> None:
        """Write the first rows, and neutral parameters into those behind them."""
        behind = self.seed.shape[0] - len(params)
        filled = SamplingBatch.from_params([*params, *[_NEUTRAL] * behind], [*seeds, *[0] * behind], self.seed.device)
        for name, value in vars(filled).items():
            if isinstance(value, Tensor):
                getattr(self, name).copy_(value)
            else:
                setattr(self, name, value)

    @property
    def kind(self) -> tuple[bool, bool, bool, int | None]:
        """What decides which operations `sample` runs."""
        return self.random, self.filtered, self.penalized, self.num_logprobs

    def head(self, rows: int) -> SamplingBatch:
        """The first `rows` rows, as views."""
        cut: dict[str, Any] = {name: value[:rows] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **cut)

    def repeat(self, times: int) -> SamplingBatch:
        """Every row `times` times in a row, for as many positions of one sequence."""
        return replace(
            self,
            temperature=self.temperature.repeat_interleave(times),
            top_k=self.top_k.repeat_interleave(times),
            top_p=self.top_p.repeat_interleave(times),
            min_p=self.min_p.repeat_interleave(times),
            penalty=self.penalty.repeat_interleave(times),
            seed=self.seed.repeat_interleave(times),
        )


_NEUTRAL = SamplingParams(temperature=0.0)  # of padding rows


def resolve_seed(params: SamplingParams) -> int:
    """The request's seed, or a fresh one from the operating system."""
    return secrets.randbits(63) if params.seed is None else params.seed


@dataclass(frozen=True)
class Sampled:
    """What `sample` chose: `tokens` int64 [B], -1 where the row's logits were not usable (NaN, +inf, or all -inf).

    `logprobs` fp32 [B], `top_ids` int64 [B, n] and `top_logprobs` fp32 [B, n], most probable first, or None if nobody asked.
    """

    tokens: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


def sample(
    logits: Tensor, batch: SamplingBatch, positions: Tensor, *, seen: Tensor | None = None, allowed: Tensor | None = None
) -> Sampled:
    """Choose a token per row, without a host copy.

    Args:
        logits: fp32 [B, V].
        batch: the rows' parameters.
        positions: int64 [B], the position that each chosen token will take in its sequence; the counter of its noise.
        seen: bool [B, V], ids of prompt and output so far; required if any row has a repetition penalty.
        allowed: int32 [B, at least V / 32], bit i of word w set where id 32 w + i may be chosen; None allows all.

    Raises:
        ValueError: wrong shapes or dtype, or a penalty without `seen`.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(f"logits: found {logits.dtype} {tuple(logits.shape)}, required float32 [B, V]")
    rows = logits.shape[0]
    if positions.shape != (rows,) or batch.seed.shape != (rows,):
        found = f"{tuple(positions.shape)} positions and parameters of {tuple(batch.seed.shape)} rows"
        raise ValueError(f"positions: found {found}, required one of each for {rows} rows of logits")
    scores, usable = adjust(logits, batch, seen=seen, allowed=allowed)
    if batch.random:
        noise = gumbel_noise(batch.seed, positions, logits.shape[1])
        scores = scores + noise.masked_fill((batch.temperature == 0)[:, None], 0.0)
    tokens = torch.where(usable, scores.argmax(dim=1), -1)
    return with_logprobs(logits, tokens, batch)


def adjust(
    logits: Tensor, batch: SamplingBatch, *, seen: Tensor | None = None, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What rows are sampled from: (scores fp32 [B, V], usable bool [B]); arguments as `sample`.

    Scores are logits after grammar, penalty, temperature and filters; their softmax is the row's distribution, and a greedy
    row's token is their argmax. A row without one finite best logit (the largest is NaN if any is) is not usable: it has no
    distribution.
    """
    scores = logits
    if batch.penalized:
        if seen is None or seen.shape != logits.shape:
            raise ValueError(f"seen: found {None if seen is None else tuple(seen.shape)}, required bool {tuple(logits.shape)}")
        scores = _penalize(scores, seen, batch.penalty)
    if allowed is not None:
        scores = scores.masked_fill(~_bits(allowed, logits.shape[1]), -math.inf)
    best = scores.amax(dim=1)
    if batch.random:
        divisor = torch.where(batch.temperature == 0, 1.0, batch.temperature)
        scores = (scores - best[:, None]) / divisor[:, None]
        if batch.filtered:
            scores = scores.masked_fill(~_keep(scores, batch), -math.inf)
    return scores, torch.isfinite(best)


def with_logprobs(logits: Tensor, tokens: Tensor, batch: SamplingBatch) -> Sampled:
    """The chosen `tokens` int64 [B] with what the batch reports of the model's own log-probabilities."""
    if batch.num_logprobs is None:
        return Sampled(tokens)
    logprobs = logits.log_softmax(dim=1)
    chosen = logprobs.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
    ids = _order(logprobs)[:, : batch.num_logprobs]
    return Sampled(tokens, chosen, ids, logprobs.gather(1, ids))


def uniform_noise(seed: Tensor, positions: Tensor) -> Tensor:
    """Uniform noise fp32 [B] in (0, 1), a pure function of (seed int64 [B], position int64 [B])."""
    return _uniform(_mix(_mix(seed) + positions))


def gumbel_noise(seed: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise fp32 [B, V], a pure function of (seed int64 [B], position int64 [B], id)."""
    key = _mix(_mix(seed) + positions)
    ids = torch.arange(1, vocab_size + 1, device=seed.device, dtype=torch.int64)
    bits = _mix(key[:, None] + ids * _signed(_GOLDEN))
    return -torch.log(-torch.log1p(-_uniform(bits)))


def _uniform(bits: Tensor) -> Tensor:
    """63 random bits as a float in (0, 1): small values keep their relative precision, and those decide rare tokens."""
    uniform = ((bits & (2**63 - 1)).to(torch.float32) + 0.5) * 2.0**-63
    return uniform.clamp(max=1 - 2**-24)


def _bits(words: Tensor, count: int) -> Tensor:
    """bool [B, count] from int32 words [B, W], lowest bit first."""
    shifts = torch.arange(32, device=words.device, dtype=torch.int32)
    return ((words[:, :, None] >> shifts) & 1).flatten(1)[:, :count].bool()


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64 (arithmetic wraps modulo 2**64)."""
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX2)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's shift of int64 copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _penalize(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    factor = penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)


def _order(scores: Tensor) -> Tensor:
    """Ids [B, V] from the most to the least probable; the lower id first on ties."""
    return scores.sort(dim=1, descending=True, stable=True).indices


def _keep(scores: Tensor, batch: SamplingBatch) -> Tensor:
    """bool [B, V]: ids that pass top_k, top_p and min_p. `scores` are after temperature, the largest of each row being 0."""
    order = _order(scores)
    ranked = scores.gather(1, order)
    kept = torch.arange(scores.shape[1], device=scores.device)[None, :] < batch.top_k[:, None]
    probability = ranked.masked_fill(~kept, -math.inf).softmax(dim=1)
    # An id stays if the more probable ones have not reached top_p yet, so the first always stays.
    before = torch.nn.functional.pad(probability.cumsum(dim=1)[:, :-1], (1, 0))
    kept &= (before < batch.top_p[:, None]) | (batch.top_p >= 1)[:, None]
    kept &= ranked >= batch.min_p.log()[:, None]
    return torch.zeros_like(kept).scatter(1, order, kept)
