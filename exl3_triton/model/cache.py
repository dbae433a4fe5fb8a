"""The paged key-value cache: pages of 64 tokens, a block table per sequence, who holds which page, and a batch of tokens."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import takewhile

import torch
from torch import Tensor

from ..kv_format import KV_FORMATS, PAGE, latent_bytes
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
    """One MLA layer's rows [pages, 64, C + R], and index keys [pages, 64, D] where it owns an indexer, else None.

    Packed formats (`kv_format`): uint8 [pages, 64, bytes]; latent_scale: of this layer, for NVFP4.
    """

    rows: Tensor
    index_keys: Tensor | None
    latent_scale: float | None = None


@dataclass(frozen=True)
class GroupedCache:
    """One GQA layer's keys and values [pages, 64, key-value heads, D], the keys normed and rotated; fp8: D + 4 bytes."""

    keys: Tensor
    values: Tensor


def check_kv(config: ModelConfig, kv: str) -> None:
    """Raises ValueError unless the family's cache can have the format `kv`: GQA is packed as fp8 only."""
    allowed = KV_FORMATS if config.kv_lora_rank else KV_FORMATS[:2]
    if kv not in allowed:
        raise ValueError(f"kv={kv!r}: required one of {', '.join(allowed)} ({config.model_type})")
    if config.kv_lora_rank and kv != "bf16":
        latent_bytes(kv, config.kv_lora_rank, config.qk_rope_head_dim)


@dataclass(frozen=True)
class KVCache:
    """The cache of every layer: all `LatentCache` or all `GroupedCache`, by the family's attention."""

    layers: tuple[LatentCache | GroupedCache, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All cache tensors [pages, 64, ...]."""
        return tuple(each for layer in self.layers for each in vars(layer).values() if isinstance(each, Tensor))

    @property
    def num_pages(self) -> int:
        return self.tensors[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all cache tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token takes in all layers together."""
        return self.nbytes // (self.num_pages * PAGE)

    @property
    def tokens_per_gib(self) -> int:
        """Tokens that a GiB holds. `allocate` on the meta device tells it without memory."""
        return (1 << 30) // self.bytes_per_token

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        num_pages: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kv: str = "bf16",
        index_kv: str | None = None,
        latent_scales: Sequence[float | None] | None = None,
    ) -> KVCache:
        """A zeroed cache of `num_pages` pages, page 0 included, which holds no sequence.

        kv: a format of `kv_format.KV_FORMATS`; "bf16" stands for `dtype`. GQA takes "bf16" and "fp8". index_kv: of the
        indexer's keys, "bf16" or "fp8"; None: as kv, NVFP4 with fp8. latent_scales: one a layer, for NVFP4. Raises ValueError
        below 2 pages, for other formats, sizes that a format does not take, and scales that are not one a layer.
        """
        if num_pages < 2:
            raise ValueError(f"num_pages: found {num_pages}, required at least 2 (page 0 is reserved)")
        check_kv(config, kv)
        index_kv = index_kv or ("bf16" if kv == "bf16" else "fp8")
        if index_kv not in KV_FORMATS[:2]:
            raise ValueError(f"index_kv={index_kv!r}: required one of {', '.join(KV_FORMATS[:2])}")
        if latent_scales is not None and (len(latent_scales) != config.num_layers or not kv.startswith("nvfp4")):
            raise ValueError(
                f"latent_scales: found {len(latent_scales)} with kv={kv!r}, required one for each of {config.num_layers} "
                "layers and a NVFP4 format"
            )

        def pages(*row: int) -> Tensor:
            return torch.zeros(num_pages, PAGE, *row, dtype=dtype, device=device)

        def heads(*row: int) -> Tensor:
            """fp8: a scale of 4 bytes for each vector."""
            return torch.zeros(num_pages, PAGE, *row[:-1], row[-1] + 4, dtype=torch.uint8, device=device)

        def layer(index: int) -> LatentCache | GroupedCache:
            c = config
            if not c.kv_lora_rank:
                make = pages if kv == "bf16" else heads
                return GroupedCache(make(c.num_kv_heads, c.head_dim), make(c.num_kv_heads, c.v_head_dim))
            rows = pages(c.kv_width)
            if kv != "bf16":
                width = latent_bytes(kv, c.kv_lora_rank, c.qk_rope_head_dim)
                rows = torch.zeros(num_pages, PAGE, width, dtype=torch.uint8, device=device)
            keys = (pages if index_kv == "bf16" else heads)(c.index_head_dim) if c.owns_indexer(index) else None
            return LatentCache(rows, keys, latent_scales[index] if latent_scales is not None else None)

        return cls(tuple(layer(index) for index in range(config.num_layers)))


class PageAllocator:
    """Who holds which of the pages 1..num_pages-1; page 0 is a place where padding may point.

    A page is free, or held by one or more sequences, or cached: held by nobody, but full of tokens under whose key it is
    found again (`page_keys`). Cached pages are handed out again when no free one is left, the least recently held first.
    """

    def __init__(self, num_pages: int):
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently held first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Pages that can be handed out now, cached ones included."""
        return len(self._free) + len(self._cached)

    def available_beside(self, shared: Sequence[int]) -> int:
        """Pages that could still be handed out once these are shared."""
        return self.available - sum(page in self._cached for page in shared)

    def allocate(self, count: int) -> list[int]:
        """`count` pages, lowest free numbers first on a fresh allocator. Raises ValueError when there are not enough."""
        if count > self.available:
            raise ValueError(f"cache: {count} pages of {PAGE} tokens wanted, {self.available} free")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page

    def free(self, pages: Sequence[int]) -> None:
        """Takes back one holder's pages, those to be kept longest last. Raises ValueError for a page that nobody holds."""
        for page in pages:
            if page not in self._holders:
                raise ValueError(f"cache: page {page} freed, but it is not in use")
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def register(self, page: int, key: bytes) -> None:
        """Makes a held page, which is full, findable; without effect where another one has the key or the page has one.

        Raises ValueError for a page that nobody holds.
        """
        if page not in self._holders:
            raise ValueError(f"cache: page {page} registered, but it is not in use")
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the first keys, up to one that no page has."""
        return [self._page_of[key] for key in takewhile(self._page_of.__contains__, keys)]

    def forget(self) -> None:
        """No page is found by its tokens any more; cached ones are free."""
        self._free += self._cached
        self._cached.clear()
        self._page_of.clear()
        self._key_of.clear()

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for found pages, who only reads them."""
        for page in pages:
            self._cached.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1


def page_keys(tokens: Sequence[int], keys: list[bytes], behind: int = 0) -> list[bytes]:
    """Appends to `keys`, the keys of a sequence's first pages, those of its further full pages, and returns it.

    A key is a SHA-256 hash of the page's tokens and the key before it, so it stands for everything up to the end of the page;
    with `behind`, also for as many tokens behind the page: the next-token layer's rows depend on one.
    """
    while (end := (len(keys) + 1) * PAGE + behind) <= len(tokens):
        page = array("q", tokens[end - behind - PAGE : end]).tobytes()
        keys.append(sha256((keys[-1] if keys else b"") + page).digest())
    return keys


def pages_for(tokens: int) -> int:
    """Pages that `tokens` cache rows take."""
    return -(-tokens // PAGE)
