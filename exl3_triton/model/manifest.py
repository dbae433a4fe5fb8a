"""`MANIFEST.sha256`: content hashes of a checkpoint's files, a line each, as `sha256sum` writes and reads them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from ..format import FormatError

MANIFEST = "MANIFEST.sha256"
_LINE = re.compile(r"([0-9a-f]{64})  ?\*?(.+)")
_CHUNK = 16 << 20


def read_manifest(directory: Path) -> dict[str, str] | None:
    """File name -> SHA-256 in hexadecimal, None where there is no manifest. Raises FormatError for a malformed one."""
    path = directory / MANIFEST
    if not path.is_file():
        return None
    hashes: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = _LINE.fullmatch(line)
        name = match.group(2).removeprefix("./") if match else ""
        if match is None or name.startswith(("/", "..")) or name in hashes:
            raise FormatError(f"{path}: line {number}: found {line!r:.100}, required one SHA-256, two blanks and a file name")
        hashes[name] = match.group(1)
    return hashes


def hash_file(path: Path, advance: Callable[[int], object] = lambda count: None) -> str:
    """The file's SHA-256 in hexadecimal; `advance` is told how many bytes have been read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def hash_problems(
    directory: Path, files: Iterable[str], hashes: dict[str, str], advance: Callable[[int], object] = lambda count: None
) -> list[str]:
    """One line for each of the files that is absent, or whose content is not what the manifest says."""
    problems = []
    for name in sorted(files):
        if not (directory / name).is_file():
            problems.append(f"{name}: listed in {MANIFEST}, but not there")
        elif (found := hash_file(directory / name, advance)) != hashes[name]:
            problems.append(f"{name}: found SHA-256 {found}, required {hashes[name]} ({MANIFEST})")
    return problems


def check_hashes(directory: Path, files: Iterable[str]) -> None:
    """Reads the files whole; FormatError naming those that are not what `MANIFEST.sha256` lists, or where there is none."""
    hashes = read_manifest(directory)
    if hashes is None:
        raise FormatError(f"{directory}: found no {MANIFEST}, required one to check hashes against")
    files = sorted(files)
    unlisted = [name for name in files if name not in hashes]
    problems = [f"{name}: not listed in {MANIFEST}" for name in unlisted]
    problems += hash_problems(directory, (name for name in files if name in hashes), hashes)
    if problems:
        raise FormatError(f"{directory}: {'; '.join(problems)}")
