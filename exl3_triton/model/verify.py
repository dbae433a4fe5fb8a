"""`exl3-triton verify`: everything about a checkpoint that can be found wrong without running the model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from ..format import Codebook, FormatError, check_marker
from .checkpoint import Checkpoint, TensorInfo, TensorReader
from .config import ModelConfig
from .inspect import preflight, stores_mtp
from .manifest import MANIFEST, hash_problems, read_manifest
from .rank_sliced import RankSliced

_CHUNK = 1 << 24  # elements looked at together
_MARKERS = {codebook.label: codebook for codebook in Codebook if codebook.marker is not None}


@dataclass(frozen=True)
class VerifyReport:
    """problems: one line each, empty for a sound checkpoint; hashed: files compared with the manifest, None without one."""

    path: Path
    tensors: int
    bytes: int
    hashed: int | None
    rank_sliced: bool
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def sound(self) -> bool:
        return not self.problems


def verify_checkpoint(path: str | os.PathLike[str], *, progress: bool = True) -> VerifyReport:
    """Read a checkpoint directory whole and report what is wrong with it.

    Headers, index and names; completeness, for rank-sliced experts on every rank; the checks that `load` makes, the
    next-token layer included; content hashes where there is a `MANIFEST.sha256`; finite values in every tensor of floating
    point; codebook markers of every matrix and rank. Raises FormatError only for a directory that is no checkpoint (no
    `config.json`).
    """
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise FormatError(f"{directory}: not a checkpoint, it has no config.json")
    problems: list[str] = []
    notes: list[str] = []
    hashed: int | None = None
    checkpoint: Checkpoint | None = None
    try:
        checkpoint = Checkpoint.open(directory)
    except FormatError as error:
        problems.append(str(error))
    hashes: dict[str, str] | None = None
    try:
        hashes = read_manifest(directory)
    except FormatError as error:
        problems.append(str(error))
    shards = sorted({info.file for info in checkpoint.tensors.values()}) if checkpoint is not None else []
    total = sum((directory / name).stat().st_size for name in hashes or () if (directory / name).is_file())
    total += sum(info.nbytes for info in checkpoint.tensors.values()) if checkpoint is not None else 0
    with tqdm(total=total, unit="B", unit_scale=True, desc="verifying", disable=not progress) as bar:
        if hashes is not None:
            hashed = len(hashes)
            problems += hash_problems(directory, hashes, hashes, bar.update)
            problems += [f"{name}: not listed in {MANIFEST}" for name in shards if name not in hashes]
        if checkpoint is not None:
            problems += _model_problems(checkpoint, notes)
            with checkpoint.reader() as reader:
                for info in sorted(checkpoint.tensors.values(), key=lambda info: (info.file, info.offset)):
                    problem = _content_problem(reader, info)
                    if problem is not None:
                        problems.append(problem)
                    bar.update(info.nbytes)
    tensors = checkpoint.tensors if checkpoint is not None else {}
    size = sum(info.nbytes for info in tensors.values())
    sliced = checkpoint is not None and checkpoint.rank_sliced
    return VerifyReport(directory, len(tensors), size, hashed, sliced, tuple(problems), tuple(notes))


def _model_problems(checkpoint: Checkpoint, notes: list[str]) -> list[str]:
    """What `load` would refuse; for a family that this version does not run, the set of slices alone."""
    try:
        config = ModelConfig.from_dir(checkpoint.path)
    except ValueError as error:
        notes.append(f"not held against a model: {error}")
        try:
            RankSliced.of(checkpoint)
        except FormatError as wrong:
            return [str(wrong)]
        return []
    try:
        preflight(checkpoint, config, mtp=stores_mtp(checkpoint, config))
    except ValueError as error:
        return [str(error)]
    return []


def _content_problem(reader: TensorReader, info: TensorInfo) -> str | None:
    suffix = info.name.rpartition(".")[2]
    try:
        if suffix in _MARKERS:
            check_marker(info.name, reader.read(info), _MARKERS[suffix])
        elif info.torch_dtype.is_floating_point:
            flat = reader.read(info).reshape(-1)
            for chunk in flat.split(_CHUNK):
                wide = chunk.float() if chunk.element_size() == 1 else chunk
                if not bool(torch.isfinite(wide).all()):
                    return f"{info.name}: found NaN or infinity, required finite values"
    except FormatError as error:
        return str(error)
    return None
