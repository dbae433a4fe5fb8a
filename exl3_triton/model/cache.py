"""The paged key-value cache: pages of 64 tokens, a block table per sequence, who owns which page, and a batch of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..reference import PAGE
from .config import ModelConfig


@dataclass(frozen=True)
class Batch:
    """Tokens of one or more sequences laid flat, with everything that attention needs to know about them.

    tokens, positions, slots: int64 [T]; a padding row has position and slot -1. block_table: int32 [B, pages] of page
    numbers; sequence: int32 [T], the row of the block table that a token belongs to. Tokens of one sequence are contiguous,
    in ascending positions. max_context: a host-side bound of every position + 1. prefill: many tokens a sequence are
    expected, so that attention takes the form that is cheap for them; the result is the same.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    block_table: Tensor
    sequence: Tensor
    max_context: int
    prefill: bool

    @classmethod
    def of_sequence(
        cls, tokens: Tensor, start: int, pages: Sequence[int], *, prefill: bool = True, max_context: int | None = None
    ) -> Batch:
        """Consecutive `tokens` [T] of one sequence, the first at position `start`, in the given pages."""
        device, count = tokens.device, tokens.shape[0]
        table = torch.tensor([list(pages)], dtype=torch.int32, device=device)
        positions = torch.arange(start, start + count, device=device)
        slots = table[0].long()[positions // PAGE] * PAGE + positions % PAGE
        sequence = torch.zeros(count, dtype=torch.int32, device=device)
        return cls(tokens.long(), positions, slots, table, sequence, max_context or start + count, prefill)


@dataclass(frozen=True)
class KVCache:
    """Per layer: latent rows [pages, 64, C + R], and index keys [pages, 64, D] where the layer owns an indexer, else None."""

    latent: tuple[Tensor, ...]
    index_keys: tuple[Tensor | None, ...]

    @property
    def num_pages(self) -> int:
        return self.latent[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all cache tensors."""
        return sum(t.nbytes for t in (*self.latent, *self.index_keys) if t is not None)

    @classmethod
    def allocate(cls, config: ModelConfig, num_pages: int, *, dtype: torch.dtype, device: torch.device) -> KVCache:
        """A zeroed cache of `num_pages` pages, page 0 included, which holds no sequence. Raises ValueError below 2 pages."""
        if num_pages < 2:
            raise ValueError(f"num_pages: found {num_pages}, required at least 2 (page 0 is reserved)")

        def pages(width: int) -> Tensor:
            return torch.zeros(num_pages, PAGE, width, dtype=dtype, device=device)

        owners = (kind == "full" for kind in config.indexer_kinds)
        return cls(
            latent=tuple(pages(config.kv_lora_rank + config.qk_rope_head_dim) for _ in range(config.num_layers)),
            index_keys=tuple(pages(config.index_head_dim) if owner else None for owner in owners),
        )


class PageAllocator:
    """Hands out the pages 1..num_pages-1; page 0 is a place where padding may point."""

    def __init__(self, num_pages: int):
        self._free = list(range(num_pages - 1, 0, -1))
        self._owned: set[int] = set()

    @property
    def available(self) -> int:
        """Pages that can be handed out now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` pages, lowest free numbers first on a fresh allocator. Raises ValueError when there are not enough."""
        if count > len(self._free):
            raise ValueError(f"cache: {count} pages of {PAGE} tokens wanted, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        self._owned.update(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Takes pages back. Raises ValueError for a page that is not handed out."""
        for page in pages:
            if page not in self._owned:
                raise ValueError(f"cache: page {page} freed, but it is not in use")
            self._owned.remove(page)
            self._free.append(page)


def pages_for(tokens: int) -> int:
    """Pages that `tokens` cache rows take."""
    return -(-tokens // PAGE)
