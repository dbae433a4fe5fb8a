"""Structured output: which tokens a JSON schema or a grammar allows next, by llguidance (the extra `grammar`).

A `Grammar` follows one sequence on the host. Its masks are int32 words, bit i of word w for id 32 w + i, as `sample` takes
them. Under speculation a mask is made behind every draft, and the grammar moves on by the tokens that the step really gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .sampling import SamplingParams
from .tokenizer import Tokenizer

# Between the tokens of JSON: enough for indented text, and a bound, so that no text goes on with blanks until it is cut off.
WHITESPACE = r"[ \t\n\r]{1,40}"


class GrammarCompiler:
    """Makes the grammars of requests, for one tokenizer.

    Args:
        tokenizer: the model's.
        vocab_size: ids that can be sampled.
        eos_token_ids: ids that end a text; a grammar allows them where its text may end.

    Raises:
        ImportError: llguidance is not installed.
        ValueError: a model without an end-of-sequence id, which no grammar could end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        try:
            import llguidance
        except ImportError:
            raise ImportError(
                "json_schema and grammar need llguidance, which is not installed: pip install 'exl3-triton[grammar]'"
            ) from None
        if not eos_token_ids:
            raise ValueError("json_schema and grammar: the model has no end-of-sequence id, required one to end the text with")
        self._matcher: Any = llguidance.LLMatcher
        self._tokenizer = llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self.words = -(-vocab_size // 32)

    def compile(self, params: SamplingParams) -> Grammar | None:
        """The grammar of a request at its beginning, None where it has none. Raises ValueError for one that is not valid."""
        if params.json_schema is not None:
            name, options = "json_schema", {"whitespace_pattern": WHITESPACE}
            source = self._matcher.grammar_from_json_schema(params.json_schema, defaults=options)
        elif params.grammar is not None:
            name, source = "grammar", self._matcher.grammar_from_lark(params.grammar)
        else:
            return None
        matcher = self._matcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            raise ValueError(f"{name}: {matcher.get_error()}")
        return Grammar(matcher, self.words)


class Grammar:
    """The state of one sequence's grammar."""

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher, self._words = matcher, words

    def mask(self, drafts: Sequence[int] = ()) -> Tensor:
        """int32 [len(drafts) + 1, words]: what may follow now, and behind each draft; the state stays as it is.

        Behind a draft that is not allowed everything is: such a draft is never accepted, so nothing behind it is either.
        """
        masks = torch.full((len(drafts) + 1, self._words), -1, dtype=torch.int32)
        taken = 0
        for row in masks:
            self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.nbytes)
            if taken == len(drafts) or self._matcher.try_consume_tokens([drafts[taken]]) == 0:
                break
            taken += 1
        if taken:
            self._matcher.rollback(taken)
        self._check()
        return masks

    def advance(self, token: int) -> None:
        """The sequence goes on with `token`. Raises RuntimeError where the grammar does not allow it."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def finished(self) -> bool:
        """The text is complete: nothing but an end-of-sequence id may follow."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RuntimeError(f"grammar: {self._matcher.get_error()}")
