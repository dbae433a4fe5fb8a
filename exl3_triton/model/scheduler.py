"""Which sequences run, which of their tokens are fed next, and whose pages make room when the cache is full.

First come, first served: the sequences that run are always the oldest ones. Between two decode steps at most `prefill_chunk`
tokens are prefilled, of one long prompt or of several short ones, so that no decode step waits for more than that.

A sequence joins when the cache has room for its prompt and for one more page of every sequence that runs; further pages it
gets a step before it needs them. Where none is left, the youngest sequence is paused: it gives its pages back and waits at
the head of the line. It resumes by prefilling its prompt with what it had generated, and the last token is fed next as if
nothing had happened. The oldest can pause all others and fits alone, so something always moves on.

Full pages can be found by the tokens that they hold, for as long as nobody needed their room (`PageAllocator`): a prompt
takes over the pages of the longest known prefix. Its last token is always fed, since what follows depends on it; a page that
is taken over is never written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .cache import PAGE, PageAllocator, page_keys, pages_for
from .sequence import SequenceState


@dataclass
class SchedulerStats:
    """Counts since loading.

    prefilled: tokens fed by prefill; reused: tokens whose rows were found in the cache instead; pauses: of sequences.
    """

    prefilled: int = 0
    reused: int = 0
    pauses: int = 0


@dataclass(frozen=True)
class Chunk:
    """Tokens start..end-1 of a sequence, to be prefilled in this step.

    samples: the prompt ends here and its first token is to be chosen; a resumed sequence has its next token already.
    """

    sequence: SequenceState
    start: int
    end: int
    samples: bool

    def completes(self, page: int, key: bytes) -> bool:
        """Whether this page of the sequence is full once the chunk is fed, and has this key."""
        return self.start // PAGE <= page < self.end // PAGE and self.sequence.keys[page : page + 1] == [key]


class Scheduler:
    """The queue of sequences and their pages; on the host alone.

    A step: decode all of `decoding`, prefill `next_chunks()`, then `settle()`.

    Args:
        allocator: of the cache.
        max_batch: most sequences that decode together.
        prefill_chunk: most tokens prefilled between two decode steps.
        num_drafts: tokens drafted a step.
        prefix_caching: whether sequences take over pages of known prefixes.
    """

    def __init__(
        self, allocator: PageAllocator, *, max_batch: int, prefill_chunk: int, num_drafts: int = 0, prefix_caching: bool = True
    ) -> None:
        self.allocator, self.max_batch, self.prefill_chunk = allocator, max_batch, prefill_chunk
        self.prefix_caching = prefix_caching
        self.waiting: deque[SequenceState] = deque()
        self.prefilling: SequenceState | None = None
        self.joining: list[SequenceState] = []  # their last chunk is in this step
        self.decoding: list[SequenceState] = []
        self.stats = SchedulerStats()
        # rows that a step touches behind the one of the token it feeds: the next token's; the drafts', and the following ones'
        self._ahead = max(1, 2 * num_drafts - 1)
        self._behind = 1 if num_drafts else 0  # a row of the draft's cache depends on one token more

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.decoding)

    def add(self, sequences: Iterable[SequenceState]) -> None:
        """Append to the line. Each must fit into the cache alone."""
        self.waiting.extend(sequences)

    def next_chunks(self) -> list[Chunk]:
        """What to prefill before the next decode step, at most `prefill_chunk` tokens, oldest sequences first."""
        budget, chunks = self.prefill_chunk, list[Chunk]()
        while budget:
            sequence = self.prefilling or self._admit(chunks)
            if sequence is None:
                break
            start = sequence.cached
            end = min(start + budget, sequence.prefill_end)
            done = end == sequence.prefill_end
            chunks.append(Chunk(sequence, start, end, samples=done and not sequence.num_generated))
            budget -= end - start
            self.prefilling = None if done else sequence
            if done:
                self.joining.append(sequence)
        return chunks

    def _admit(self, chunks: Sequence[Chunk]) -> SequenceState | None:
        """The sequence at the head of the line, with its pages, if it can run now beside `chunks`."""
        running = len(self.decoding) + len(self.joining)
        if not self.waiting or running >= self.max_batch:
            return None
        sequence = self.waiting[0]
        keys = self._keys(sequence)[: (sequence.prefill_end - 1) // PAGE]
        shared = self.allocator.find(keys)
        found = len(shared)
        if found < len(keys) and any(chunk.completes(found, keys[found]) for chunk in chunks):
            return None  # after this step there is more to take over
        wanted = self._pages_wanted(sequence) - found
        if wanted + running > self.allocator.available_beside(shared):
            return None
        self.waiting.popleft()
        self.allocator.share(shared)
        sequence.pages = shared + self.allocator.allocate(wanted)
        sequence.registered, sequence.cached = found, found * PAGE
        self.stats.reused += sequence.cached
        return sequence

    def settle(self, chunks: Sequence[Chunk]) -> list[tuple[int, int, int]]:
        """After a step fed `chunks` and its tokens were accepted: who ended leaves, who is prefilled joins, and everyone gets
        the pages of the next step, for which others may have to pause.

        Returns the pages added, as (index in `decoding`, column of the block table, page).
        """
        for chunk in chunks:
            chunk.sequence.cached = chunk.end
            self.stats.prefilled += chunk.end - chunk.start
        self.decoding += self.joining
        self.joining = []
        for sequence in self.decoding:
            sequence.cached = len(sequence.tokens) - 1
        for sequence in (*self.decoding, *filter(None, [self.prefilling])):
            self._register(sequence)
            if sequence.finish_reason is not None:
                self._release(sequence)
        self.decoding = [sequence for sequence in self.decoding if sequence.finish_reason is None]
        return self._reserve()

    def clear(self) -> None:
        """Forget all sequences, wherever they are, and take their pages back."""
        for sequence in (*self.decoding, *self.joining, *filter(None, [self.prefilling])):
            self._release(sequence)
        self.waiting.clear()
        self.prefilling, self.joining, self.decoding = None, [], []

    def _reserve(self) -> list[tuple[int, int, int]]:
        added: list[tuple[int, int, int]] = []
        for index, sequence in enumerate(self.decoding):  # oldest first; who is paused is no longer in the list
            missing = self._pages_wanted(sequence) - len(sequence.pages)
            while missing > self.allocator.available:
                if self._pause_youngest() is sequence:
                    return added  # whoever is older has its pages already
            for page in self.allocator.allocate(max(missing, 0)):
                added.append((index, len(sequence.pages), page))
                sequence.pages.append(page)
        return added

    def _pages_wanted(self, sequence: SequenceState) -> int:
        """Pages up to the end of the next decode step's rows."""
        return pages_for(min(sequence.prefill_end + 1 + self._ahead, sequence.cache_rows))

    def _pause_youngest(self) -> SequenceState:
        sequence, self.prefilling = self.prefilling or self.decoding.pop(), None
        self._release(sequence)
        self.waiting.appendleft(sequence)
        self.stats.pauses += 1
        return sequence

    def _release(self, sequence: SequenceState) -> None:
        self.allocator.free(sequence.pages[::-1])  # of a cached prefix the end goes first
        sequence.pages, sequence.cached, sequence.registered = [], 0, 0
        sequence.row, sequence.drafts = None, []

    def _register(self, sequence: SequenceState) -> None:
        """Lets others find the pages that are full by now."""
        keys = self._keys(sequence)[: sequence.cached // PAGE]
        for index in range(sequence.registered, len(keys)):
            self.allocator.register(sequence.pages[index], keys[index])
        sequence.registered = max(sequence.registered, len(keys))

    def _keys(self, sequence: SequenceState) -> list[bytes]:
        return page_keys(sequence.tokens, sequence.keys, self._behind) if self.prefix_caching else []
