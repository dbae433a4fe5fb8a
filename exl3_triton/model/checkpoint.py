"""A checkpoint directory, opened from its headers alone: everything about the files that can be refused is refused here.

The header of every safetensors file is parsed here (8-byte length, then JSON) and its data mapped, which is quick for
hundreds of thousands of tensors.
"""

from __future__ import annotations

import gc
import json
import math
import mmap
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ..format import FormatError, canonical_name

INDEX_FILE = "model.safetensors.index.json"
LISTED = 32  # problems of one kind that an error message lists
MAX_HEADER = 100_000_000  # bytes; the safetensors library reads no longer headers

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_DTYPE_BITS = {name: dtype.itemsize * 8 for name, dtype in TORCH_DTYPES.items()}
_DTYPE_BITS |= {"F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "C64": 64, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}

_SHARD_NAME = re.compile(r"model\.safetensors|model-.*\.safetensors|.*-\d{5}-of-\d{5}\.safetensors")
_SERIES = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_RANK = re.compile(r"\.rank(\d+)\.")
_WEIGHT_ROOTS = frozenset(("layers", "embed_tokens", "lm_head"))


class TensorInfo(NamedTuple):
    """Where one stored tensor lies: its name and file as stored, safetensors dtype, shape, bytes, offset in the file."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """FormatError for a storage type that torch has no name for."""
        dtype = TORCH_DTYPES.get(self.dtype)
        if dtype is None:
            raise FormatError(f"{self.name}: stored as {self.dtype}, which is not supported")
        return dtype


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; FormatError naming the file where it is absent, malformed or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: malformed JSON ({error})") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path}: holds a JSON {type(value).__name__}, an object is required")
    return value


def listing(names: Iterable[str]) -> str:
    """Up to 32 of the names, sorted, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - LISTED} more" if len(ordered) > LISTED else ""
    return ", ".join(ordered[:LISTED]) + more


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint directory whose headers have been read and checked.

    tensors: by canonical name (without `model.` and `language_model.` prefixes); config_dict: `config.json` as it is; ranks:
    the tensor-parallel ranks that tensor names mention, empty but for rank-sliced checkpoints.
    """

    path: Path
    config_dict: dict[str, Any]
    tensors: dict[str, TensorInfo]
    ranks: tuple[int, ...]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Reads `config.json`, the index where there is one, and every shard's header; no tensor data.

        With an index, it must name every tensor of every shard and nothing else, by plain file names. Without one, the
        shards are the `*.safetensors` files that hold weights; other safetensors files beside them are left alone.
        Raises FormatError naming file or tensor.
        """
        with paused_garbage_collection():
            return cls._open(Path(path))

    @classmethod
    def _open(cls, directory: Path) -> Checkpoint:
        if not directory.is_dir():
            found = "a file" if directory.exists() else "nothing"
            raise FormatError(f"{directory}: found {found}, a checkpoint directory is required")
        if not (directory / "config.json").is_file():
            raise FormatError(f"{directory}: not a checkpoint, it has no config.json")
        config = read_json_object(directory / "config.json")
        on_disk = sorted(entry.name for entry in directory.iterdir() if entry.name.endswith(".safetensors"))
        weight_map = _read_index(directory) if (directory / INDEX_FILE).is_file() else None
        if not on_disk and not weight_map:
            raise FormatError(f"{directory}: not a checkpoint, it has no .safetensors file")
        headers = {name: _read_header(directory / name) for name in sorted(set(on_disk) | set((weight_map or {}).values()))}
        holding = [name for name, header in headers.items() if _SHARD_NAME.fullmatch(name) or _holds_weights(header)]
        if weight_map is None:
            shards = holding
            _check_series(directory, shards)
        else:
            shards = sorted(set(weight_map.values()))
            omitted = set(holding) - set(shards)
            if omitted:
                raise FormatError(f"{directory}: {INDEX_FILE} omits shards that are on disk: {listing(omitted)}")
        if not any(headers[shard] for shard in shards):
            raise FormatError(f"{directory}: not a checkpoint, its .safetensors files hold no weights")
        tensors = _collect({shard: headers[shard] for shard in shards}, weight_map)
        ranks = {int(match.group(1)) for name in tensors if ".rank" in name and (match := _RANK.search(name))}
        return cls(directory, config, tensors, tuple(sorted(ranks)))

    @property
    def rank_sliced(self) -> bool:
        """Whether the routed experts are stored in slices, one per tensor-parallel rank."""
        return bool(self.ranks) or self.rank_sliced_config is not None

    @property
    def rank_sliced_config(self) -> dict[str, Any] | None:
        """The `hybrid_tr3_tail` section of `config.json`, which describes rank-sliced experts."""
        return self._section("hybrid_tr3_tail")

    @property
    def quantization_config(self) -> dict[str, Any] | None:
        """What `config.json`, else `quantization_config.json`, says about quantization: a hint, the tensors decide."""
        section = self._section("quantization_config")
        if section is None and (self.path / "quantization_config.json").is_file():
            section = read_json_object(self.path / "quantization_config.json")
            section.pop("tensor_storage", None)
        return section

    def _section(self, key: str) -> dict[str, Any] | None:
        for config in (self.config_dict, self.config_dict.get("text_config")):
            if isinstance(config, Mapping) and isinstance(config.get(key), dict):
                return config[key]
        return None

    def reader(self) -> TensorReader:
        """A context manager that reads tensors and keeps each file open."""
        return TensorReader(self.path)


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Hundreds of thousands of new objects, none of them garbage, would make the collector take half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _read_index(directory: Path) -> dict[str, str]:
    """The index's weight_map: tensor -> file name, after checking that the names stay in the directory and exist."""
    weight_map = read_json_object(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise FormatError(f"{directory / INDEX_FILE}: weight_map must be an object of tensor names and file names")
    files = set(weight_map.values())
    for file in files:
        if file in ("", ".", "..") or any(separator in file for separator in "/\\:\0"):
            tensor = next(tensor for tensor, named in weight_map.items() if named == file)
            raise FormatError(f"{INDEX_FILE}: weight_map[{tensor!r}] = {file!r}, a file name inside the directory is required")
    absent = {file for file in files if not (directory / file).is_file()}
    if absent:
        raise FormatError(f"{directory}: {INDEX_FILE} names files that are not there: {listing(absent)}")
    return weight_map


def _check_series(directory: Path, shards: Sequence[str]) -> None:
    """Without an index, shards numbered `-i-of-n` must all be there."""
    for shard in shards:
        match = _SERIES.fullmatch(shard)
        if match:
            stem, total = match.group(1), int(match.group(3))
            wanted = {f"{stem}-{number:05d}-of-{total:05d}.safetensors" for number in range(1, min(total, 99999) + 1)}
            absent = wanted - set(shards)
            if absent:
                raise FormatError(f"{directory}: shards are missing: {listing(absent)}")


def _holds_weights(header: dict[str, TensorInfo]) -> bool:
    return any(canonical_name(name).partition(".")[0] in _WEIGHT_ROOTS for name in header)


def _collect(headers: dict[str, dict[str, TensorInfo]], weight_map: dict[str, str] | None) -> dict[str, TensorInfo]:
    """All tensors by canonical name; refuses duplicates and disagreement with the index."""
    tensors: dict[str, TensorInfo] = {}
    misplaced = []
    for file, header in headers.items():
        for name, info in header.items():
            canonical = canonical_name(name)
            other = tensors.setdefault(canonical, info)
            if other is not info:
                raise FormatError(f"{name} in {file}: stored twice, also as {other.name} in {other.file}")
            if weight_map is not None and weight_map.get(name) != file:
                misplaced.append(f"{name} (is in {file}, index says {weight_map.get(name, 'nothing')})")
    if misplaced:
        raise FormatError(f"{INDEX_FILE} disagrees with the shards: {listing(misplaced)}")
    if weight_map is not None and len(weight_map) != len(tensors):
        stored = {info.name for info in tensors.values()}
        raise FormatError(f"{INDEX_FILE} lists tensors that are in no shard: {listing(set(weight_map) - stored)}")
    return tensors


def _read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file by stored name, every offset checked against dtype, shape and file size."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise FormatError(f"{path}: truncated safetensors file, {size} bytes are less than the 8-byte header length")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(size - 8, MAX_HEADER):
                raise FormatError(f"{path}: truncated or malformed safetensors file, header of {length} bytes in {size} bytes")
            raw = file.read(length)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: malformed safetensors header ({error})") from error
    if not isinstance(header, dict):
        raise FormatError(f"{path}: malformed safetensors header, a JSON object is required")
    header.pop("__metadata__", None)
    data_start, data_bytes = 8 + length, size - 8 - length
    file_name = path.name
    tensors = {name: _tensor_info(file_name, name, entry, data_start, data_bytes) for name, entry in header.items()}
    end = data_start
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != end:
            problem = "overlaps the tensor before it" if info.offset < end else "leaves a gap before it"
            raise FormatError(f"{path}: malformed safetensors header, {info.name} {problem}")
        end += info.nbytes
    if end != size:
        raise FormatError(f"{path}: malformed safetensors file, {size - end} bytes after the last tensor")
    return tensors


def _tensor_info(file: str, name: str, entry: Any, data_start: int, data_bytes: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        bits = _DTYPE_BITS.get(dtype)
        valid = type(begin) is int and type(end) is int and all(type(size) is int and size >= 0 for size in shape)
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        found = f"{entry!r:.200}"
        raise FormatError(f"{file}: malformed safetensors header, {name} needs dtype, shape and data_offsets, found {found}")
    if bits is None:
        raise FormatError(f"{file}: {name} has the unknown dtype {dtype!r}")
    if not 0 <= begin <= end:
        raise FormatError(f"{file}: malformed safetensors header, {name} has data_offsets [{begin}, {end}]")
    if end > data_bytes:
        raise FormatError(f"{file}: truncated, {name} ends at byte {end} of the data, the file holds {data_bytes}")
    if (end - begin) * 8 != math.prod(shape) * bits:
        needed = math.prod(shape) * bits / 8
        raise FormatError(f"{file}: {name} has {end - begin} bytes, {dtype} {list(shape)} needs {needed:g}")
    return TensorInfo(name, file, dtype, shape, end - begin, data_start + begin)


class TensorReader:
    """Reads tensors of one checkpoint; every file is mapped once, until the context ends and no tensor needs it."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._maps: dict[str, mmap.mmap] = {}
        self._files: dict[str, BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._maps.clear()
        self._files.clear()
        self._stack.close()

    def read(self, info: TensorInfo) -> Tensor:
        """The tensor on the CPU, mapped from the file where its alignment allows, else copied."""
        dtype = info.torch_dtype
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=dtype)
        try:
            if info.file not in self._maps:
                self._maps[info.file] = _map(self._directory / info.file)
            # headers need not be padded, so that data may start at any byte
            if info.offset % dtype.itemsize:
                raw = torch.frombuffer(self._maps[info.file], dtype=torch.uint8, count=info.nbytes, offset=info.offset)
                return raw.clone().view(dtype).view(info.shape)
            count = info.nbytes // dtype.itemsize
            return torch.frombuffer(self._maps[info.file], dtype=dtype, count=count, offset=info.offset).view(info.shape)
        except (OSError, ValueError) as error:
            raise FormatError(f"{self._directory / info.file}: {info.name} cannot be read ({error})") from error

    def read_small(self, infos: Iterable[TensorInfo], gap: int = 4096) -> Iterator[tuple[TensorInfo, bytes]]:
        """The raw bytes of many small tensors, in file order; neighbours less than `gap` bytes apart share one read."""
        for file, run in _runs(infos, gap):
            start, end = run[0].offset, max(info.offset + info.nbytes for info in run)
            data = _pread(self._raw(file), start, end - start)
            for info in run:
                raw = data[info.offset - start : info.offset - start + info.nbytes]
                if len(raw) != info.nbytes:
                    raise FormatError(f"{self._directory / file}: {info.name} cannot be read, the file has been truncated")
                yield info, raw

    def _raw(self, file: str) -> BinaryIO:
        if file not in self._files:
            self._files[file] = self._stack.enter_context((self._directory / file).open("rb"))
        return self._files[file]


def _map(path: Path) -> mmap.mmap:
    """The file, mapped; what is written to a tensor over it stays in memory and never reaches the file."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _pread(file: BinaryIO, start: int, length: int) -> bytes:
    file.seek(start)
    return file.read(length)


def _runs(infos: Iterable[TensorInfo], gap: int) -> Iterator[tuple[str, list[TensorInfo]]]:
    run: list[TensorInfo] = []
    for info in sorted(infos, key=lambda info: (info.file, info.offset)):
        if run and (run[-1].file != info.file or info.offset - (run[-1].offset + run[-1].nbytes) > gap):
            yield run[0].file, run
            run = []
        run.append(info)
    if run:
        yield run[0].file, run
