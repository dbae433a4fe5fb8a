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
class LatentCache:
    """One MLA layer's rows [pages, 64, C + R], and index keys [pages, 64, D] where it owns an indexer, else None."""

    rows: Tensor
    index_keys: Tensor | None


@dataclass(frozen=True)
class GroupedCache:
    """One GQA layer's keys and values [pages, 64, key-value heads, D], the keys normed and rotated."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class KVCache:
    """The cache of every layer: all `LatentCache` or all `GroupedCache`, by the family's attention."""

    layers: tuple[LatentCache | GroupedCache, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All cache tensors [pages, 64, ...]."""
        return tuple(each for layer in self.layers for each in vars(layer).values() if each is not None)

    @property
    def num_pages(self) -> int:
        return self.tensors[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all cache tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @classmethod
    def allocate(cls, config: ModelConfig, num_pages: int, *, dtype: torch.dtype, device: torch.device) -> KVCache:
        """A zeroed cache of `num_pages` pages, page 0 included, which holds no sequence. Raises ValueError below 2 pages."""
        if num_pages < 2:
            raise ValueError(f"num_pages: found {num_pages}, required at least 2 (page 0 is reserved)")

        def pages(*row: int) -> Tensor:
            return torch.zeros(num_pages, PAGE, *row, dtype=dtype, device=device)

        def layer(index: int) -> LatentCache | GroupedCache:
            c = config
            if not c.kv_lora_rank:
                return GroupedCache(pages(c.num_kv_heads, c.head_dim), pages(c.num_kv_heads, c.v_head_dim))
            return LatentCache(pages(c.kv_width), pages(c.index_head_dim) if c.owns_indexer(index) else None)

        return cls(tuple(layer(index) for index in range(config.num_layers)))


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
