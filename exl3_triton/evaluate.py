"""Perplexity of a model on windows of text, and how far it is from another model on the same windows."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from .model.cache import Batch, pages_for
from .model.tokenizer import Tokenizer
from .model.transformer import Transformer
from .reference import PAGE

# The first predicted token is no text where a window begins with two prefix tokens, and has no context where it does not.
UNSCORED = 2
# Logits of this many elements (fp32) are held at once.
LOGITS_BUDGET = 1 << 26


@dataclass(frozen=True)
class Perplexity:
    """`loss` is the mean negative log-likelihood in nats, `perplexity` its exponential, `tokens` how many were scored."""

    loss: float
    perplexity: float
    tokens: int


@dataclass(frozen=True)
class Comparison:
    """A model (`model`) beside a reference (`other`) on the same windows.

    `mean_kl` is the mean over positions of KL(other || model) in nats; `top1_agreement` the share of positions with the same
    most probable token.
    """

    model: Perplexity
    other: Perplexity
    mean_kl: float
    top1_agreement: float


@torch.inference_mode()
def perplexity(model: Transformer, windows: Tensor, *, batch_size: int = 4, progress: bool = True) -> Perplexity:
    """Perplexity over windows of equal length.

    Args:
        model: the model.
        windows: integer [N, L + 1]; a window's first L tokens are fed, and its tokens 2..L (counted from 0) are scored, L - 1
            of them.
        batch_size: windows fed together; memory grows with it, results do not depend on it beyond rounding.
        progress: a bar on stderr.

    Raises:
        ValueError: windows of wrong rank or dtype, fewer than 3 tokens wide, wider than the model's context, or ids outside
            the vocabulary.
    """
    total, count = 0.0, 0
    for hidden, targets in _scored([model], windows, batch_size, progress):
        logprobs = model.compute_logits(hidden[0]).log_softmax(dim=1)
        total -= logprobs.gather(1, targets[:, None].to(logprobs.device)).double().sum().item()
        count += len(targets)
    return _perplexity(total, count)


@torch.inference_mode()
def compare(
    model: Transformer, other: Transformer, windows: Tensor, *, batch_size: int = 4, progress: bool = True
) -> Comparison:
    """`perplexity` of both models, and the divergence of `model` from `other`, over the same positions.

    Raises:
        ValueError: as `perplexity`; vocabularies of different sizes.
    """
    if model.config.vocab_size != other.config.vocab_size:
        sizes = f"{model.config.vocab_size} and {other.config.vocab_size}"
        raise ValueError(f"vocab_size: found {sizes}, required the same size in both models to compare their distributions")
    losses, kl, agree, count = [0.0, 0.0], 0.0, 0, 0
    for hidden, targets in _scored([model, other], windows, batch_size, progress):
        index = targets[:, None].to(model.device)
        p = model.compute_logits(hidden[0]).log_softmax(dim=1)
        q = other.compute_logits(hidden[1]).to(model.device).log_softmax(dim=1)
        for which, logprobs in enumerate((p, q)):
            losses[which] -= logprobs.gather(1, index).double().sum().item()
        kl += (q.exp() * (q - p)).sum(dim=1).double().sum().item()
        agree += int((p.argmax(dim=1) == q.argmax(dim=1)).sum())
        count += len(targets)
    return Comparison(_perplexity(losses[0], count), _perplexity(losses[1], count), kl / count, agree / count)


@torch.inference_mode()
def mtp_acceptance(model: Transformer, windows: Tensor, *, batch_size: int = 4, progress: bool = True) -> tuple[float, int]:
    """How often the next-token layer, fed the text, agrees with the trunk: (share, positions).

    The layer sees the trunk's state at position i and token i + 1; it agrees where its most probable token is the trunk's at
    i + 1. That is the share of first drafts that greedy speculative decoding would accept along this text.

    Args:
        model: loaded with `mtp=True`.
        windows, batch_size, progress: as `perplexity`; a window's first L tokens are fed, which gives L - 1 positions.

    Raises:
        ValueError: a model without its next-token layer; windows as in `perplexity`.
    """
    if model.mtp is None:
        raise ValueError("mtp_acceptance: the model was loaded without its next-token layer, required load(..., mtp=True)")
    _check([model], windows, batch_size)
    windows = windows.to(torch.int64)
    length = windows.shape[1] - 1
    pages = pages_for(length)
    batch_size = min(batch_size, len(windows))
    cache, draft_cache = model.new_cache(1 + batch_size * pages), model.mtp.new_cache(1 + batch_size * pages)
    rows = max(1, LOGITS_BUDGET // model.config.vocab_size)
    agree = 0
    with tqdm(total=len(windows), unit="window", file=sys.stderr, disable=not progress) as bar:
        for start in range(0, len(windows), batch_size):
            part = windows[start : start + batch_size]
            states = model(_batch(part[:, :-1], pages, model.device), cache)
            drafts = model.draft(_batch(part[:, 1:], pages, model.device), states, draft_cache)
            best = [
                torch.cat([model.compute_logits(piece).argmax(dim=1) for piece in each.split(rows)]).unflatten(0, (-1, length))
                for each in (states, drafts)
            ]
            agree += int((best[0][:, 1:] == best[1][:, :-1]).sum())
            bar.update(len(part))
    count = len(windows) * (length - 1)
    return agree / count, count


def read_windows(file: str | Path) -> Tensor:
    """The tensor `windows` of a safetensors file.

    Raises:
        ValueError: not a safetensors file, or it has no such tensor.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt") as tensors:
            names = list(tensors.keys())
            if "windows" not in names:
                raise ValueError(f"{file}: found tensors {names[:5]}, required one named 'windows' (integer [N, L + 1])")
            return tensors.get_tensor("windows")
    except SafetensorError as error:
        raise ValueError(f"{file}: not a readable safetensors file: {error}") from None


def cut_windows(tokenizer: Tokenizer, text: str, context: int) -> tuple[Tensor, int]:
    """Cut `text` into windows int64 [N, L + 1], L = `context`; also returns how many tokens at the end fill no window.

    Each window begins with the model's prefix tokens. A text shorter than one window is one shorter window.

    Raises:
        ValueError: fewer than 3 tokens to a window, or a text without a token to score.
    """
    prefix = list(tokenizer.prefix_ids)
    step = context + 1 - len(prefix)
    if context < UNSCORED or step < 1:
        raise ValueError(f"context: found {context}, required at least {max(UNSCORED, len(prefix))} to score a token")
    ids = tokenizer.encode(text, add_prefix=False)
    if len(prefix) + len(ids) <= UNSCORED:
        raise ValueError(f"text: found {len(ids)} tokens, required at least {UNSCORED + 1 - len(prefix)}")
    if len(ids) < step:
        return torch.tensor([prefix + ids]), 0
    starts = range(0, len(ids) - step + 1, step)
    return torch.tensor([prefix + ids[start : start + step] for start in starts]), len(ids) % step


def _perplexity(total: float, count: int) -> Perplexity:
    loss = total / count
    return Perplexity(loss, math.exp(loss), count)


def _scored(
    models: list[Transformer], windows: Tensor, batch_size: int, progress: bool
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Feed the windows to every model; yields (hidden [n, D] per model, target ids int64 [n]), n bounded."""
    _check(models, windows, batch_size)
    windows = windows.to(torch.int64)
    length = windows.shape[1] - 1
    pages = pages_for(length)
    batch_size = min(batch_size, len(windows))
    caches = [model.new_cache(1 + batch_size * pages) for model in models]
    rows = max(1, LOGITS_BUDGET // models[0].config.vocab_size)
    with tqdm(total=len(windows), unit="window", file=sys.stderr, disable=not progress) as bar:
        for start in range(0, len(windows), batch_size):
            part = windows[start : start + batch_size]
            hidden = []
            for model, cache in zip(models, caches):
                states = model(_batch(part[:, :-1], pages, model.device), cache).unflatten(0, (len(part), length))
                # the state after token t predicts token t + 1
                hidden.append(states[:, UNSCORED - 1 :].flatten(0, 1))
            targets = part[:, UNSCORED:].flatten()
            for first in range(0, len(targets), rows):
                yield [states[first : first + rows] for states in hidden], targets[first : first + rows]
            bar.update(len(part))


def _batch(tokens: Tensor, pages: int, device: torch.device) -> Batch:
    """Whole sequences int64 [B, L], sequence b in the pages behind page 0 and those of the sequences before it."""
    count, length = tokens.shape
    table = 1 + torch.arange(count * pages).reshape(count, pages)
    positions = torch.arange(length).repeat(count)
    sequence = torch.arange(count).repeat_interleave(length)
    slots = table[sequence, positions // PAGE] * PAGE + positions % PAGE
    return Batch(
        tokens=tokens.flatten().to(device),
        positions=positions.to(device),
        slots=slots.to(device),
        block_table=table.to(torch.int32).to(device),
        sequence=sequence.to(torch.int32).to(device),
        max_context=length,
        prefill=True,
    )


def _check(models: list[Transformer], windows: Tensor, batch_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size: found {batch_size}, required at least 1")
    if windows.dim() != 2 or windows.is_floating_point() or windows.dtype == torch.bool or windows.shape[0] == 0:
        raise ValueError(f"windows: found {windows.dtype} {tuple(windows.shape)}, required integers [N >= 1, L + 1]")
    length = windows.shape[1] - 1
    if length < UNSCORED:
        raise ValueError(f"windows: found {length + 1} tokens each, required at least {UNSCORED + 1} to score one")
    for model in models:
        if length > model.max_context:
            raise ValueError(f"windows: found {length + 1} tokens each, the model allows a context of {model.max_context}")
    low, high, size = int(windows.min()), int(windows.max()), models[0].config.vocab_size
    if low < 0 or high >= size:
        raise ValueError(f"windows: found token ids {low} to {high}, the vocabulary has ids 0 to {size - 1}")
