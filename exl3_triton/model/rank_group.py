"""The processes of one tensor-parallel model: joining, agreeing, and ending together.

    torchrun --nproc-per-node 2 script.py          # sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    with RankGroup.from_env() as group:
        model = load(path, group=group)            # every rank calls the same things with the same arguments

Tensors go through torch.distributed, NCCL on GPUs and gloo on CPUs. Its own time-outs are out of use: a rank that waits for a
user is not a rank that hangs. A thread of each rank tells the others through a store that it lives and whether it goes on; it
ends its process, with a message that names the rank at fault, when one died, failed, or keeps the others waiting.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.collective import register_group
from .parallel import Shard

DEFAULT_TIMEOUT = 60.0
EXIT_CODE = 3  # of a process that its watch has ended
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NEVER = timedelta(days=7)
_NO_VERDICT = "-"
_IDLE, _WORKING, _WAITING, _LEFT = "idle", "working", "waiting", "left"


class RankError(RuntimeError):
    """Another rank is missing, has failed or hangs; the message names it."""


def launched_ranks() -> int:
    """How many processes a launcher such as torchrun started together; 1 where none did."""
    value = os.environ.get("WORLD_SIZE", "1")
    return int(value) if value.isdecimal() else 1


class RankGroup:
    """One process among `shard.size` partners. Make it with `from_env`, use it as a context manager, one at a time.

    shard: this rank; device: of its tensors; timeout: seconds within which the others end after one rank died or hangs. Rank 0
    may take its time between calls of the model (a user types, a pipe is full); any other rank that others wait for, and every
    rank inside a call, has to go on within that time.
    """

    name = "ranks"

    def __init__(self, shard: Shard, device: torch.device, store: dist.Store, timeout: float):
        self.shard, self.device, self.timeout = shard, device, timeout
        self.process_group: Any = None
        self._state, self._activity = _IDLE, 0
        self.failed_first = False  # this rank left with an error before any other did
        self._watch = _Watch(self, store)
        register_group(self.name, self)

    @classmethod
    def from_env(cls, device: torch.device | str | None = None, *, timeout: float = DEFAULT_TIMEOUT) -> RankGroup:
        """Join the processes that torchrun started, this one's rank and address being in its environment.

        device: default the GPU number LOCAL_RANK, or the CPU where there is none. Raises ValueError for missing variables and
        a device that is not there, RankError naming ranks that have not come within `timeout` seconds, RuntimeError where
        torch.distributed is in use already.
        """
        absent = [name for name in _VARIABLES if not os.environ.get(name)]
        if absent:
            raise ValueError(f"ranks: {', '.join(absent)} not set in the environment; required: a start by torchrun")
        if not timeout > 0:
            raise ValueError(f"timeout: found {timeout}, required a positive number of seconds")
        if dist.is_initialized():
            raise RuntimeError("ranks: torch.distributed is initialised already; a RankGroup has to be the first to do so")
        shard = Shard(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        device = _own_device(device)
        # torchrun's agent may hold the store already
        master = shard.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        limit = timedelta(seconds=timeout)
        try:
            store = dist.TCPStore(address, port, is_master=master, timeout=limit, wait_for_workers=False)
            # a connection of its own for the watch: a main thread that waits in the store must not silence it
            other = dist.TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
        except (dist.DistError, RuntimeError) as error:
            found = " ".join(str(error).split())[:200]
            raise RankError(f"ranks: no store at {address}:{port} within {timeout:g} s ({found})") from error
        attempt = f"exl3_triton/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        names = dist.PrefixStore(attempt, store)
        _meet(names, shard, limit)
        group = cls(shard, device, dist.PrefixStore(f"{attempt}/watch", other), timeout)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        where: dict[str, Any] = {"store": dist.PrefixStore("torch", names), "rank": shard.rank, "world_size": shard.size}
        with group.waiting():
            dist.init_process_group(backend, timeout=_NEVER, **where)
            if device.type == "cuda":  # a communicator that is made on first use could not be made inside a graph
                torch.cuda.set_device(device)
                dist.all_reduce(torch.zeros(1, device=device))
                torch.cuda.synchronize(device)
        group.rest()
        group.process_group = dist.group.WORLD
        return group

    @property
    def rank(self) -> int:
        return self.shard.rank

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Leave. Without an error all ranks do so together; an error ends the others, who name this rank and the error."""
        if error is None:
            self.barrier()
        text = "" if error is None else " ".join(str(error).split()) or type(error).__name__
        self.failed_first = self._watch.stop(f"rank {self.rank}: {text}" if text else None)
        register_group(self.name, None)
        if error is None:
            dist.destroy_process_group()

    def barrier(self) -> None:
        """Wait for all ranks, as long as they live and go on."""
        self._control(lambda: dist.all_reduce(torch.zeros(1)))

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank: anything that can be pickled."""
        values = [value]
        self._control(lambda: dist.broadcast_object_list(values, src=0, device=torch.device("cpu")))
        return values[0]

    def least(self, value: int) -> int:
        """The smallest of all ranks' values, on every rank."""
        found = torch.tensor([value])
        self._control(lambda: dist.all_reduce(found, op=dist.ReduceOp.MIN))
        return int(found)

    def agree(self, what: str, value: Any) -> None:
        """Raises ValueError on ranks whose `value` is not that of rank 0."""
        if self.broadcast(value) != value:
            raise ValueError(f"{what}: rank {self.rank} has others than rank 0, required the same on all ranks")

    def _control(self, run: Any) -> None:
        with self.waiting():
            try:
                run()
            except RuntimeError as error:
                self._broken(error)
        self.rest()

    @contextmanager
    def collective(self, x: Tensor) -> Iterator[None]:
        """For `ops.collective`: on a CPU the rank waits in it; on a GPU it goes on, and waits when it wants a result."""
        if x.is_cuda:
            self.work()
            yield
            return
        with self.waiting():
            try:
                yield
            except RuntimeError as error:
                self._broken(error)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """This rank waits for others, or for its GPU, which may wait for others."""
        self._state, self._activity = _WAITING, self._activity + 1
        yield
        self.work()

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Control is with the caller; rank 0 may stay there."""
        self.rest()
        yield
        self.work()

    def work(self) -> None:
        """This rank has gone on, and others may be waiting for it."""
        self._state, self._activity = _WORKING, self._activity + 1

    def rest(self) -> None:
        """This rank is between two calls of the model."""
        self._state, self._activity = _IDLE, self._activity + 1

    def _broken(self, error: RuntimeError) -> NoReturn:
        """A collective failed, mostly because a partner is gone: the watch finds out which, and ends this process."""
        self._watch.hurry()
        time.sleep(self.timeout)
        raise RankError(f"rank {self.rank}: {error}") from error


class _Watch:
    """A thread that publishes this rank's state and judges those of the others."""

    def __init__(self, group: RankGroup, store: dist.Store):
        self._group = group
        self._interval = min(1.0, group.timeout / 20)
        self._keys = [f"state/{rank}" for rank in range(group.shard.size)]
        self._store = store
        self._beats = 0
        now = time.monotonic()
        # of each rank: beat, since when; activity and state, since when
        self._seen = dict.fromkeys(range(group.shard.size), ("", now, "", now))
        self._hurry = False
        self._stopped = threading.Event()
        self._store.compare_set("verdict", "", _NO_VERDICT)
        self._publish(group._state)
        for key in self._keys:
            self._store.wait([key])
        self._thread = threading.Thread(target=self._run, name="rank watch", daemon=True)
        self._thread.start()

    def stop(self, verdict: str | None) -> bool:
        """Stop watching; a verdict ends the other ranks. Returns whether it is the first one."""
        self._stopped.set()
        self._thread.join()
        try:
            first = verdict is not None and self._store.compare_set("verdict", _NO_VERDICT, verdict).decode() == verdict
            self._publish(_LEFT)
        except (dist.DistError, RuntimeError):
            return verdict is not None  # the store went with the rank that held it, and nobody is left to tell
        return first

    def hurry(self) -> None:
        """A collective has failed: a rank that does not answer is gone."""
        self._hurry = True

    def _publish(self, state: str) -> None:
        self._beats += 1
        key = self._keys[self._group.rank]
        self._store.set(key, f"{self._beats} {self._group._activity} {state}")

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            try:
                self._publish(self._group._state)
                *states, verdict = (value.decode() for value in self._store.multi_get([*self._keys, "verdict"]))
            except (dist.DistError, RuntimeError) as error:
                verdict = f"the store is gone, and with it rank 0 or the launcher ({' '.join(str(error).split())[:120]})"
            else:
                if verdict == _NO_VERDICT:
                    found = self._judge(states)
                    if found is None:
                        continue
                    verdict = self._store.compare_set("verdict", _NO_VERDICT, found).decode()
            # this rank may be about to leave by itself, with everyone or by the same error
            if not self._stopped.wait(max(1.0, 2 * self._interval)):
                shard = self._group.shard
                print(f"rank {shard.rank} of {shard.size} ends: {verdict}", file=sys.stderr, flush=True)
                os._exit(EXIT_CODE)

    def _judge(self, states: list[str]) -> str | None:
        """What is wrong and with whom, or None."""
        now, timeout, me = time.monotonic(), self._group.timeout, self._group.rank
        silent = 5 * self._interval if self._hurry else 0.5 * timeout
        stuck = 0.7 * timeout
        kinds, still = {}, {}
        for rank, text in enumerate(states):
            beat, _, doing = text.partition(" ")
            old_beat, beat_since, old_doing, doing_since = self._seen[rank]
            beat_since = beat_since if beat == old_beat else now
            doing_since = doing_since if doing == old_doing else now
            self._seen[rank] = (beat, beat_since, doing, doing_since)
            kinds[rank], still[rank] = doing.rpartition(" ")[2], now - doing_since >= stuck
            if rank != me and kinds[rank] != _LEFT and now - beat_since >= silent:
                seconds = f"{now - beat_since:.0f} s"
                return f"rank {rank} has given no sign of life for {seconds}: it was killed, or its machine stands still"
        if kinds[me] != _WAITING or not (still[me] or self._hurry):
            return None
        if left := [rank for rank, kind in kinds.items() if kind == _LEFT]:
            return f"rank {left[0]} has left while others wait for it"
        late = [r for r, kind in kinds.items() if still[r] and kind != _WAITING and not (r == 0 and kind == _IDLE)]
        if late:
            return f"rank {late[0]} hangs: others have been waiting for it for {stuck:.0f} s ({kinds[late[0]]})"
        if all(still[rank] and kind == _WAITING for rank, kind in kinds.items()):
            return f"no rank has gone on for {stuck:.0f} s: all of them wait for each other, or for a GPU that hangs"
        return None


def _own_device(device: torch.device | str | None) -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type != "cuda":
        return device
    if local >= torch.cuda.device_count():
        raise ValueError(
            f"ranks: local rank {local} has no GPU, {torch.cuda.device_count()} found; required one for each rank"
        )
    return device if device.index is not None else torch.device("cuda", local)


def _meet(store: dist.PrefixStore, shard: Shard, limit: timedelta) -> None:
    """Wait until all ranks are there; RankError naming those that are not."""
    keys = [f"here/{rank}" for rank in range(shard.size)]
    store.set(keys[shard.rank], "1")
    try:
        store.wait(keys, limit)
    except (dist.DistError, RuntimeError) as error:
        absent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        seconds = f"{limit.total_seconds():g} s"
        raise RankError(f"ranks: rank {', '.join(absent) or 0} of {shard.size} has not come within {seconds}") from error
