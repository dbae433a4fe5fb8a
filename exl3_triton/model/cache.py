"""The paged key-value cache: pages of 64 tokens, a block table per sequence, who owns which page, and a batch of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
