"""Sums and gathers over tensor-parallel ranks, through torch.distributed: NCCL for GPU tensors, gloo for CPU tensors.

A group is named by a string, so that it can be an argument of a custom op; `model/rank_group.py` registers it. On a GPU
nothing waits on the host and nothing is allocated behind torch's back: both ops can be captured in a CUDA graph once the
communicator exists.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ._args import FLOATS
from ._dispatch import call


class Group(Protocol):
    """What the ops need of a process group."""

    process_group: Any

    def collective(self, x: Tensor) -> Any:
        """A context in which `x` is reduced or gathered: who watches over the ranks learns that this one waits."""


_groups: dict[str, Group] = {}
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since torch 2.13, and before


def register_group(name: str, group: Group | None) -> None:
    """Make `group` known to the ops as `name`; None forgets it."""
    if group is None:
        _groups.pop(name, None)
    else:
        _groups[name] = group


def _group(op: str, name: str) -> Group:
    if name not in _groups:
        raise RuntimeError(
            f"{op}: no process group {name!r}: this part of a model runs with its partners only (init_parallel)"
        )
    return _groups[name]


def _all_reduce_body(x: Tensor, group: str) -> None:
    found = _group("all_reduce", group)
    with found.collective(x):
        dist.all_reduce(x, group=found.process_group)


_all_reduce_op = torch.library.custom_op("exl3_triton::all_reduce", _all_reduce_body, mutates_args=("x",))


@_all_reduce_op.register_fake
def _(x, group):
    return None


def all_reduce(x: Tensor, group: str | None) -> Tensor:
    """x += the other ranks' x, in place; returns x. Without a group (None) there is nothing to add.

    x: contiguous fp16, bf16 or fp32, any shape, the same on all ranks. All ranks get the same bits: every element is summed in
    one place and distributed. Raises ValueError for other tensors, RuntimeError for an unknown group.
    """
    if group is None:
        return x
    if x.dtype not in FLOATS or not x.is_contiguous():
        raise ValueError(f"all_reduce: x is {x.dtype} with strides {list(x.stride())}: required contiguous floats")
    call(_all_reduce_op, _all_reduce_body, x, group)
    return x


def _gather_columns_body(x: Tensor, sizes: Sequence[int], group: str) -> Tensor:
    found = _group("gather_columns", group)
    rows, width = x.shape[0], max(sizes)
    if x.shape[1] < width:
        x = torch.nn.functional.pad(x, (0, width - x.shape[1]))
    parts = torch.empty(len(sizes), rows, width, dtype=x.dtype, device=x.device)
    with found.collective(x):
        _gather(parts.view(-1, width), x.contiguous(), group=found.process_group)
    return torch.cat([part[:, :size] for part, size in zip(parts.unbind(), sizes)], dim=1)


_gather_columns_op = torch.library.custom_op("exl3_triton::gather_columns", _gather_columns_body, mutates_args=())


@_gather_columns_op.register_fake
def _(x, sizes, group):
    return x.new_empty(x.shape[0], sum(sizes))


def gather_columns(x: Tensor, sizes: Sequence[int], group: str | None) -> Tensor:
    """[n, sum(sizes)]: the ranks' columns beside each other, `x` [n, sizes[rank]] of this one; x itself without a group.

    Raises ValueError where x has another width than any rank, RuntimeError for an unknown group.
    """
    if group is None:
        return x
    if x.dim() != 2 or x.shape[1] not in sizes:
        raise ValueError(f"gather_columns: x is {list(x.shape)}: required [n, width], one of {list(sizes)} columns")
    return call(_gather_columns_op, _gather_columns_body, x, list(sizes), group)
