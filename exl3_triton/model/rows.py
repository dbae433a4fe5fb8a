"""The decode step's input buffers, and which row of the paged cache a position has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..reference import PAGE
from .sequence import SequenceState


class DecodeRows:
    """The decode step's input buffers, one row per decoding sequence, at constant addresses."""

    def __init__(self, capacity: int, pages: int, device: torch.device) -> None:
        self.tokens = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.positions = torch.full((capacity,), -1, dtype=torch.int64, device=device)
        self.slots = torch.full((capacity,), -1, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(capacity, pages, dtype=torch.int32, device=device)

    def load(self, sequences: Sequence[SequenceState]) -> None:
        """Write the rows of `sequences`, whose last generated token is to be fed next; the rows behind become padding."""
        count = len(sequences)
        self.tokens.zero_()
        self.positions.fill_(-1)
        self.slots.fill_(-1)
        self.block_table.zero_()
        if not count:
            return
        device = self.tokens.device
        table = torch.zeros(count, self.block_table.shape[1], dtype=torch.int32)
        for row, sequence in enumerate(sequences):
            table[row, : len(sequence.pages)] = torch.tensor(sequence.pages, dtype=torch.int32)
        positions = torch.tensor([len(s.prompt) + len(s.generated) - 1 for s in sequences])
        self.tokens[:count] = torch.tensor([s.generated[-1] for s in sequences]).to(device)
        self.positions[:count] = positions.to(device)
        self.slots[:count] = cache_slots(table, positions).to(device)
        self.block_table[:count] = table.to(device)

    def advance(self, tokens: Tensor) -> None:
        """Feed `tokens` int64 [n] next, in rows 0..n-1."""
        count = tokens.shape[0]
        self.tokens[:count] = tokens
        self.positions[:count] += 1
        self.slots[:count] = cache_slots(self.block_table[:count], self.positions[:count])


def cache_slots(block_table: Tensor, positions: Tensor) -> Tensor:
    """Cache rows int64 [n] of one position of each sequence; past the table (a row that just ended) the page is clamped."""
    column = (positions // PAGE).clamp(max=block_table.shape[1] - 1)
    page = block_table.gather(1, column[:, None])[:, 0].to(torch.int64)
    return page * PAGE + positions % PAGE
