"""A batch of sequences over a paged cache for the tests: pages in random order, every row that nothing wrote is NaN."""

from typing import NamedTuple

import torch
from torch import Tensor


class Paged(NamedTuple):
    cache: Tensor  # [pages, 64, width]
    contexts: list[Tensor]  # float64 [length, width] on the CPU: each sequence's rows, as the cache stores them
    block_table: Tensor
    sequence: Tensor
    positions: Tensor

    @property
    def max_context(self) -> int:
        return max(len(context) for context in self.contexts)


def paged(lengths, queries, width, dtype, device, *, scale=1.0, padding=0, spare_pages=2) -> Paged:
    """Sequences of these lengths; the last `queries[b]` tokens of each are the call's, then `padding` at position -1."""
    needed = [-(-length // 64) for length in lengths]
    pages = (1 + torch.randperm(sum(needed) + spare_pages)).tolist()
    cache = torch.full((len(pages) + 1, 64, width), float("nan"), dtype=dtype)
    block_table = torch.zeros(len(lengths), max(needed) + 1, dtype=torch.int32)
    contexts = []
    for b, (length, count) in enumerate(zip(lengths, needed)):
        mine, pages = pages[:count], pages[count:]
        rows = (torch.randn(length, width) * scale).to(dtype)
        for i, page in enumerate(mine):
            part = rows[i * 64 : (i + 1) * 64]
            cache[page, : len(part)] = part
            block_table[b, i] = page
        contexts.append(rows.double())
    sequence = torch.cat([torch.full((n,), b) for b, n in enumerate(queries)] + [torch.zeros(padding)])
    positions = torch.cat(
        [torch.arange(length - n, length) for length, n in zip(lengths, queries)] + [torch.full((padding,), -1)]
    )
    return Paged(cache.to(device), contexts, block_table.to(device), sequence.int().to(device), positions.long().to(device))
