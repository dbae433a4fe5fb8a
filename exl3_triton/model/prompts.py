"""What `LLM.generate` takes as prompts: text, token ids, chats, or several of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from .tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


def as_list(prompts: Any, chat: bool) -> list[Prompt]:
    """One prompt or a list of prompts, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    listed = prompts.tolist() if isinstance(prompts, Tensor) else list(prompts) if isinstance(prompts, Iterable) else None
    if listed is None:
        raise ValueError(f"prompts: found {type(prompts).__name__}, required text, token ids, or a list of prompts")
    if not listed:
        raise ValueError("prompts: empty")
    single = isinstance(listed[0], Mapping) if chat else not isinstance(listed[0], (str, Iterable))
    return [listed] if single else listed


def tokens_of(index: int, prompt: Prompt, chat: bool, tokenizer: Tokenizer | None) -> list[int]:
    """A prompt's token ids. Raises ValueError for an empty one, ids that are no integers, and text without a tokenizer."""
    if len(prompt) == 0:
        raise ValueError(f"prompt {index}: empty")
    if not chat and not isinstance(prompt, str):
        return [_token_id(index, token) for token in prompt]
    if tokenizer is None:
        raise ValueError(f"prompt {index}: text needs a tokenizer, and the model came without one; give token ids")
    if not chat:
        return tokenizer.encode(str(prompt))
    messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return tokenizer.encode_chat(messages)


def _token_id(index: int, token: Any) -> int:
    try:
        return int(token.__index__())
    except (AttributeError, TypeError):
        raise ValueError(f"prompt {index}: found {token!r}, required text or integer token ids") from None
