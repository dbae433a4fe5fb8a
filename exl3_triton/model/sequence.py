"""One request's sequence on the host: its tokens and pages, when it ends, and what is handed out for each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .grammar import Grammar
from .sampling import Sampled, SamplingParams
from .tokenizer import StreamDetokenizer


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probability of the chosen token, and (id, log-probability) of the most probable ids, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Output:
    """One token of one prompt.

    Attributes:
        index: which prompt.
        token_id: the token.
        text: text that became certain with it; "" while a character or a possible stop string is unfinished, and without a
            tokenizer.
        logprobs: where the request asked for them.
        finish_reason: None while the sequence goes on; "stop" (end-of-sequence id, stop id or stop string) or "length"
            (max_tokens, or the end of the context).
    """

    index: int
    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None


class StopStrings:
    """Cuts streamed text at the first stop string to be complete, and holds back what may be the beginning of one.

    The result does not depend on how the text is divided into pieces.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Text that can be shown, and whether a stop string was found (nothing follows then)."""
        text = self._held + piece
        ends = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if ends:
            self._held = ""
            return text[: min(ends)[1]], True
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                self._held = text[-length:]
                return text[:-length], False
        self._held = ""
        return text, False

    def flush(self) -> str:
        """What is still held back, when the text ends otherwise."""
        held, self._held = self._held, ""
        return held


@dataclass(eq=False)
class SequenceState:
    """One request on its way, the host's view of it.

    Attributes:
        tokens: the prompt, `prompt_length` of them, and what was generated behind it; the last generated one is fed next.
        limit: tokens to generate at most, by max_tokens and by the end of the context.
        pages: in the cache, in order of position; the first ones may be shared.
        cached: rows of the cache that hold the first tokens.
        keys, registered: `page_keys` of its pages, and how many pages can be found under theirs.
        row: in the decode buffers.
        drafts: what the next step verifies, where a grammar needs to know.
    """

    index: int
    tokens: list[int]
    params: SamplingParams
    seed: int
    limit: int
    stop_ids: frozenset[int]
    detokenizer: StreamDetokenizer | None
    stop_strings: StopStrings
    grammar: Grammar | None
    prompt_length: int = field(init=False)
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    keys: list[bytes] = field(default_factory=list)
    registered: int = 0
    row: int | None = None
    drafts: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def cache_rows(self) -> int:
        """Rows of the cache that it can ever fill: the last token is never fed back."""
        return self.prompt_length + self.limit - 1

    @property
    def prefill_end(self) -> int:
        """Tokens to prefill before it can decode: the prompt, and after a pause all that was fed before."""
        return len(self.tokens) - 1 if self.num_generated else self.prompt_length

    def accept(self, token: int, logprobs: TokenLogprobs | None) -> Output:
        """Append a sampled token and decide whether the sequence ends."""
        self.tokens.append(token)
        ends, complete = token in self.stop_ids, False
        if self.grammar is not None and not ends:
            self.grammar.advance(token)
            complete = self.grammar.finished
        reason = "stop" if ends or complete else "length" if self.num_generated >= self.limit else None
        text = ""
        if self.detokenizer is not None:
            piece = "" if ends else self.detokenizer.push(token)
            if reason is not None:
                piece += self.detokenizer.flush()
            text, found = self.stop_strings.push(piece)
            if found:
                reason = "stop"
            elif reason is not None:
                text += self.stop_strings.flush()
        self.finish_reason = reason
        return Output(self.index, token, text, logprobs, reason)


def pack(sampled: Sampled, *extra: Tensor) -> Tensor:
    """int32 [rows, columns]: tokens, `extra` integer columns and log-probabilities as 32-bit words of one tensor, to be
    copied to the host at once.
    """
    columns = [each[:, None].to(torch.int32) for each in (sampled.tokens, *extra)]
    if sampled.logprobs is not None and sampled.top_ids is not None and sampled.top_logprobs is not None:
        columns.append(sampled.logprobs[:, None].contiguous().view(torch.int32))
        columns.append(sampled.top_ids.to(torch.int32))
        columns.append(sampled.top_logprobs.contiguous().view(torch.int32))
    return torch.cat(columns, dim=1)


def unpack(packed: Tensor, whole: int) -> tuple[list[int], list[TokenLogprobs | None], list[list[int]]]:
    """Tokens, log-probabilities and the further columns of a packed tensor on the host; `whole`: integer columns in all."""
    tokens, *others = packed[:, :whole].T.tolist()
    if packed.shape[1] == whole:
        return tokens, [None] * len(tokens), others
    chosen = packed[:, whole].contiguous().view(torch.float32).tolist()
    ids, values = packed[:, whole + 1 :].tensor_split(2, dim=1)
    rows = zip(chosen, ids.tolist(), values.contiguous().view(torch.float32).tolist())
    return tokens, [TokenLogprobs(p, tuple(zip(row, row_values))) for p, row, row_values in rows], others
