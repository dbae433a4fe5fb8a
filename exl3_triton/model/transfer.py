"""From mapped files into final memory: on a GPU through two pinned buffers, one being filled while the other is copied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

STAGING_BYTES = 64 << 20  # of each of the two pinned buffers: all host memory that loading takes beside mapped files


class Uploader:
    """Writes tensors on the CPU, as a rule views of mapped files, into tensors on `device`, converted to their dtype.

    Nothing is allocated on the device but what `place` returns, nor on the host but the two buffers. On the CPU it copies at
    once. On a GPU copies run on a stream of their own, which the current stream waits for; sources may go when a call returns.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._bytes = STAGING_BYTES
        self._turn = 0
        self._buffers: list[Tensor] = []
        self._free: list[torch.cuda.Event] = []  # recorded behind the last copy out of each buffer
        self._stream: torch.cuda.Stream | None = None

    def place(self, source: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """`source`, any strides, on the device and contiguous; dtype: default the source's. On a CPU a copy only if needed."""
        if self.device.type == "cpu":
            return source.to(dtype or source.dtype).contiguous()
        target = torch.empty(source.shape, dtype=dtype or source.dtype, device=self.device)
        self.fill(target, [source])
        return target

    def fill(self, target: Tensor, sources: Iterable[Tensor]) -> None:
        """Write the sources one behind the other into `target`, contiguous and of as many elements as all of them."""
        flat = target.view(-1)
        if self.device.type != "cuda":
            start = 0
            for source in sources:
                flat[start : start + source.numel()].view(source.shape).copy_(source)
                start += source.numel()
            return
        stream = self._prepare()
        capacity = self._bytes // target.element_size()
        start, used, staging = 0, 0, self._next_buffer(target.dtype)
        for source in sources:
            for part in _parts(source, capacity):
                if used + part.numel() > capacity:
                    self._send(flat[start : start + used], staging[:used])
                    start, used, staging = start + used, 0, self._next_buffer(target.dtype)
                staging[used : used + part.numel()].view(part.shape).copy_(part)
                used += part.numel()
        self._send(flat[start : start + used], staging[:used])
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def finish(self) -> None:
        """Wait for all copies and give the buffers back."""
        if self._stream is not None:
            self._stream.synchronize()
        self._buffers, self._free, self._stream = [], [], None

    def _prepare(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
            self._buffers = [torch.empty(self._bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._free = [torch.cuda.Event() for _ in range(2)]
        # the target's memory may have been something else to kernels that still run
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return self._stream

    def _next_buffer(self, dtype: torch.dtype) -> Tensor:
        self._turn ^= 1
        self._free[self._turn].synchronize()
        return self._buffers[self._turn].view(dtype)

    def _send(self, target: Tensor, staged: Tensor) -> None:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            target.copy_(staged, non_blocking=True)
            self._free[self._turn].record(self._stream)


def _parts(source: Tensor, capacity: int) -> Iterator[Tensor]:
    """The tensor in pieces of at most `capacity` elements, in order."""
    if source.numel() <= capacity:
        yield source
    elif source.is_contiguous():
        yield from source.view(-1).split(capacity)
    else:
        rows = max(1, capacity * source.shape[0] // source.numel())
        for block in source.split(rows):
            yield from _parts(block if block.shape[0] > 1 else block[0], capacity)
