"""What launchers share: views that a kernel can address, block sizes, and the checks of public wrappers."""

import torch
from torch import Tensor

from ..kv_format import PAGE, latent_format
from ._dispatch import launchable

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def block(n: int, least: int = 16) -> int:
    """The smallest power of two >= n and >= least: tensor dimensions in Triton are powers of two, of `tl.dot` at least 16."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def unit_rows(x: Tensor) -> Tensor:
    """`x` as it is where its last dimension is contiguous and it starts on 16 bytes, a compact copy otherwise."""
    return x if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 else launchable(x)


def unit_last(x: Tensor) -> Tensor:
    """`x` as it is where its last dimension is contiguous, a compact copy otherwise; for tables read one entry at a time."""
    return x if x.stride(-1) == 1 else x.contiguous()


def as_rows(x: Tensor) -> Tensor:
    """`x` [..., D] as [rows, D] with a contiguous last dimension: a view where its strides allow it (a column slice of a fused
    projection does), a copy otherwise."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return unit_rows(x)


def check_float(op: str, **tensors: Tensor) -> None:
    """Raises ValueError for a tensor that is not fp16, bf16 or fp32, or that is on another device than the first."""
    first = next(iter(tensors.values()))
    for name, x in tensors.items():
        if x.dtype not in FLOATS:
            raise ValueError(f"{op}: {name} is {x.dtype}: required float16, bfloat16 or float32")
        if x.device != first.device:
            raise ValueError(f"{op}: {name} on {x.device}: required {first.device}, as {next(iter(tensors))}")


def check_index(op: str, name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """Raises ValueError unless `x` has this dtype, shape and device."""
    if x.dtype != dtype or tuple(x.shape) != shape:
        raise ValueError(f"{op}: {name} is {x.dtype} {list(x.shape)}: required {dtype} {list(shape)}")
    if x.device != device:
        raise ValueError(f"{op}: {name} on {x.device}: required {device}")


def check_cache(op: str, cache: Tensor, width: int, *, written: bool = False) -> None:
    """Raises ValueError unless `cache` is contiguous floats [pages, 64, width]."""
    if cache.dim() != 3 or cache.shape[1] != PAGE or cache.shape[2] != width or cache.dtype not in FLOATS:
        raise ValueError(f"{op}: cache is {cache.dtype} {list(cache.shape)}: required floats [pages, {PAGE}, {width}]")
    if not cache.is_contiguous():
        raise ValueError(
            f"{op}: cache has strides {list(cache.stride())}: required contiguous{', it is written in place' * written}"
        )


def check_latents(op: str, cache: Tensor, latent: int, rope: int, device: torch.device, *, written: bool = False) -> None:
    """Raises ValueError unless `cache` holds rows of MLA: floats as `check_cache`, or contiguous bytes of a packed format."""
    if cache.dtype != torch.uint8:
        check_cache(op, cache, latent + rope, written=written)
    elif (
        cache.dim() != 3
        or cache.shape[1] != PAGE
        or not cache.is_contiguous()
        or not latent_format(cache.shape[2], latent, rope)
    ):
        raise ValueError(
            f"{op}: cache is {cache.dtype} {list(cache.shape)} with strides {list(cache.stride())}: required contiguous "
            f"[pages, {PAGE}, bytes], bytes of a row of a packed format of {latent} + {rope} values"
        )
    if cache.device != device:
        raise ValueError(f"{op}: cache on {cache.device}: required {device}")


def check_index_keys(op: str, cache: Tensor, width: int, device: torch.device, *, written: bool = False) -> None:
    """Raises ValueError unless `cache` holds the indexer's keys: floats as `check_cache`, or bytes in the fp8 format."""
    if cache.dtype != torch.uint8:
        check_cache(op, cache, width, written=written)
    elif cache.dim() != 3 or tuple(cache.shape[1:]) != (PAGE, width + 4) or not cache.is_contiguous() or width % 4:
        raise ValueError(
            f"{op}: cache is {cache.dtype} {list(cache.shape)} with strides {list(cache.stride())}: required contiguous "
            f"[pages, {PAGE}, {width} + 4], keys of a multiple of 4 values, each with a scale of 4 bytes"
        )
    if cache.device != device:
        raise ValueError(f"{op}: cache on {cache.device}: required {device}")


def stored_format(cache: Tensor, latent: int, rope: int) -> str:
    """Format of rows that `check_latents` has passed: "bf16" stands for floats of any dtype."""
    return (latent_format(cache.shape[2], latent, rope) if cache.dtype == torch.uint8 else None) or "bf16"


def check_batch(op: str, tokens: int, block_table: Tensor, sequence: Tensor, positions: Tensor, device: torch.device) -> None:
    """Raises ValueError unless block_table is int32 [B, pages], sequence int32 [T] and positions int64 [T] on `device`."""
    if block_table.dim() != 2 or block_table.dtype != torch.int32 or block_table.device != device:
        raise ValueError(
            f"{op}: block_table is {block_table.dtype} {list(block_table.shape)} on {block_table.device}: "
            f"required torch.int32 [sequences, pages] on {device}"
        )
    check_index(op, "sequence", sequence, torch.int32, (tokens,), device)
    check_index(op, "positions", positions, torch.int64, (tokens,), device)


def check_table(op: str, table: Tensor, device: torch.device) -> None:
    """Raises ValueError unless `table` is a rope table: contiguous fp32 [L, R], R even, on `device`."""
    if table.dim() != 2 or table.dtype != torch.float32 or table.shape[1] % 2 or not table.is_contiguous():
        raise ValueError(
            f"{op}: table is {table.dtype} {list(table.shape)} with strides {list(table.stride())}: "
            "required contiguous float32 [L, R], R even"
        )
    if table.device != device:
        raise ValueError(f"{op}: table on {table.device}: required {device}")
