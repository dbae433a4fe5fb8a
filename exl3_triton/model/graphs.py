"""CUDA graphs of the decode step: one per number of rows, so that a step costs the host one launch.

A graph repeats what was recorded: the same kernels on the same addresses. So the step works on buffers that stay where they
are, its rows are rounded up to a bucket (the rest is padding), and whatever decides which kernels run is part of the key
under which a graph is kept. Buckets are recorded from the largest to the smallest over one memory pool, so that a smaller
one fits into what the largest took.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from .layers import PlainExperts
from .transformer import Transformer


def use_graphs(model: Transformer, wanted: bool | None) -> bool:
    """Whether a model's decode step is to be a graph: as wanted, by default where it can be. ValueError where it cannot."""
    obstacle = ""
    if model.device.type != "cuda":
        obstacle = f"the model is on {model.device}, CUDA graphs need a GPU"
    elif any(isinstance(module, PlainExperts) for module in model.modules()):
        obstacle = "the experts are unquantized, and their path reads row counts on the host"
    if wanted and obstacle:
        raise ValueError(f"graphs=True: {obstacle}")
    return not obstacle if wanted is None else wanted


def buckets(max_batch: int) -> list[int]:
    """Numbers of rows that have a graph: powers of two, and `max_batch` itself. Ascending."""
    sizes = [1 << power for power in range(max_batch.bit_length()) if 1 << power < max_batch]
    return [*sizes, max_batch]


class DecodeGraphs:
    """Records a step for every bucket when its key is first seen, and replays it.

    Args:
        max_batch: most rows of a step.
        device: the model's GPU.
        buffers: the tensors that the step updates in place, rows or state that later steps depend on. Their contents survive
            a recording, which runs the step on padding.
        clear: fills the buffers with padding.
    """

    def __init__(
        self,
        max_batch: int,
        device: torch.device,
        *,
        buffers: Callable[[], Sequence[Tensor]],
        clear: Callable[[], None],
    ) -> None:
        self._sizes = buckets(max_batch)
        self._device, self._buffers, self._clear = device, buffers, clear
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[Hashable, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def __len__(self) -> int:
        """Graphs recorded so far."""
        return len(self._graphs)

    def run(self, key: Hashable, rows: int, step: Callable[[int], Tensor]) -> Tensor:
        """`step(bucket of rows)` by a graph; the result is overwritten by the next step.

        key: everything besides the number of rows that decides which kernels `step` launches.
        """
        bucket = next(size for size in self._sizes if size >= rows)
        if (key, bucket) not in self._graphs:
            self._record(key, step)
        graph, result = self._graphs[key, bucket]
        graph.replay()
        return result

    def _record(self, key: Hashable, step: Callable[[int], Tensor]) -> None:
        buffers = self._buffers()
        saved = [buffer.clone() for buffer in buffers]
        self._clear()
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for size in reversed(self._sizes):
                    step(size)  # compiles and loads what a recording cannot
            torch.cuda.current_stream().wait_stream(stream)
            for size in reversed(self._sizes):
                graph = torch.cuda.CUDAGraph()
                # the threads that watch over communicators may ask about events meanwhile
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    result = step(size)
                self._graphs[key, size] = graph, result
        for buffer, before in zip(buffers, saved, strict=True):
            buffer.copy_(before)
