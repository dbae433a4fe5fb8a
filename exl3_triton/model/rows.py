"""Sequences as tensors: the decode step's buffers, a prefill batch, and which row of the paged cache a position has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..reference import PAGE
from .cache import Batch
from .scheduler import Chunk
from .sequence import SequenceState


class DecodeRows:
    """The decode step's input buffers, one row per decoding sequence, at constant addresses.

    tokens, positions, slots: int64 [capacity]; block_table: int32 [capacity, pages]. Rows behind the sequences are padding:
    position and slot -1.
    """

    def __init__(self, capacity: int, pages: int, device: torch.device) -> None:
        self.tokens = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.positions = torch.full((capacity,), -1, dtype=torch.int64, device=device)
        self.slots = torch.full((capacity,), -1, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(capacity, pages, dtype=torch.int32, device=device)
        self.sequences: list[SequenceState] = []

    @property
    def buffers(self) -> list[Tensor]:
        return [self.tokens, self.positions, self.slots, self.block_table]

    def clear(self) -> None:
        """Make every row padding."""
        self.tokens.zero_()
        self.positions.fill_(-1)
        self.slots.fill_(-1)
        self.block_table.zero_()

    def load(self, sequences: Sequence[SequenceState]) -> None:
        """Write the rows of `sequences`, whose last token is to be fed next; the rows behind become padding."""
        count = len(sequences)
        self.sequences = list(sequences)
        self.clear()
        if not count:
            return
        device = self.tokens.device
        table = _block_table(sequences, self.block_table.shape[1])
        positions = torch.tensor([len(s.tokens) - 1 for s in sequences])
        self.tokens[:count] = torch.tensor([s.tokens[-1] for s in sequences]).to(device)
        self.positions[:count] = positions.to(device)
        self.slots[:count] = cache_slots(table, positions).to(device)
        self.block_table[:count] = table.to(device)

    def add_pages(self, added: Sequence[tuple[int, int, int]]) -> None:
        """Write further pages into the block table, as (row, column, page)."""
        if added:
            rows, columns, pages = torch.tensor(added).to(self.tokens.device).unbind(1)
            self.block_table[rows, columns] = pages.to(torch.int32)

    def advance(self, tokens: Tensor) -> None:
        """Feed `tokens` int64 [n] next, in rows 0..n-1; padding among them stays padding."""
        count = tokens.shape[0]
        used = self.positions[:count] >= 0
        self.tokens[:count] = tokens
        self.positions[:count] += used
        slots = cache_slots(self.block_table[:count], self.positions[:count].clamp(min=0))
        self.slots[:count] = torch.where(used, slots, -1)


def prefill_batch(chunks: Sequence[Chunk], pages: int, device: torch.device) -> Batch:
    """The chunks of several sequences as one flat batch, with block tables of `pages` columns."""
    lengths = torch.tensor([chunk.end - chunk.start for chunk in chunks])
    table = _block_table([chunk.sequence for chunk in chunks], pages)
    positions = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
    sequence = torch.arange(len(chunks)).repeat_interleave(lengths)
    tokens = torch.tensor([token for chunk in chunks for token in chunk.sequence.tokens[chunk.start : chunk.end]])
    return Batch(
        tokens=tokens.to(device),
        positions=positions.to(device),
        slots=(table[sequence, positions // PAGE].long() * PAGE + positions % PAGE).to(device),
        block_table=table.to(device),
        sequence=sequence.to(torch.int32).to(device),
        max_context=max(chunk.end for chunk in chunks),
        prefill=True,
    )


def _block_table(sequences: Sequence[SequenceState], pages: int) -> Tensor:
    table = torch.zeros(len(sequences), pages, dtype=torch.int32)
    for row, sequence in zip(table, sequences):
        row[: len(sequence.pages)] = torch.tensor(sequence.pages, dtype=torch.int32)
    return table


def cache_slots(block_table: Tensor, positions: Tensor) -> Tensor:
    """Cache rows int64 [n] of one position of each sequence; past the table (a row that just ended) the page is clamped."""
    column = (positions // PAGE).clamp(max=block_table.shape[1] - 1)
    page = block_table.gather(1, column[:, None])[:, 0].to(torch.int64)
    return page * PAGE + positions % PAGE
