"""Golden tensors made by ExLlamaV3's quantizer and CUDA kernels: the 3-bit ones in tests/data, all of them where available."""

from __future__ import annotations

import os
import pathlib
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor

from exl3_triton.format import Codebook, ExpertWeights, TrellisWeight

DATA = pathlib.Path(__file__).parent / "data" / "golden"
SHARED = pathlib.Path(os.environ.get("EXL3_TRITON_TESTDATA", pathlib.Path(__file__).parents[2] / "shared")) / "golden"
FILES = (DATA / "exllamav3_3bit.safetensors", DATA / "decode_other_rates.safetensors", SHARED / "exllamav3_1.6.5.safetensors")
CODEBOOKS = {codebook.label: codebook for codebook in Codebook}


def read_tensors(path: str | os.PathLike[str], prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a safetensors file whose names begin with `prefix`, without it."""
    with safe_open(str(path), "pt") as file:
        return {name[len(prefix) :]: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118


@dataclass(frozen=True)
class Golden:
    """One quantized matrix of a golden file: `prefix` is "{codebook}.{K}."."""

    path: pathlib.Path
    prefix: str

    @property
    def codebook(self) -> Codebook:
        return CODEBOOKS[self.prefix.split(".")[0]]

    def tensors(self) -> dict[str, Tensor]:
        return read_tensors(self.path, self.prefix)

    def weight(self, device: str = "cpu") -> TrellisWeight:
        """The matrix; entries with a trellis alone get random scales of a realistic size."""
        tensors = self.tensors()
        trellis = tensors["trellis"]
        scales = {}
        for name, tiles in (("suh", trellis.shape[0]), ("svh", trellis.shape[1])):
            signs = torch.randint(0, 2, (tiles * 16,)) * 2 - 1
            scales[name] = tensors.get(name, (signs * (0.02 + 0.02 * torch.rand(tiles * 16))).half())
        return TrellisWeight(trellis, scales["suh"], scales["svh"], self.codebook).to(device)


def matrices() -> list[Golden]:
    """Every matrix of the golden files that are there, each once; usable as pytest parameters (ids: `str(golden.prefix)`)."""
    found: dict[str, Golden] = {}
    for path in FILES:
        if path.exists():
            with safe_open(str(path), "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if name.endswith(".weight_rotated"):
                        prefix = name.removesuffix("weight_rotated")
                        found.setdefault(prefix, Golden(path, prefix))
    return list(found.values())


def experts(name: str) -> tuple[ExpertWeights, dict[str, Tensor]] | None:
    """The experts "moe.mcg.3." or "moe.mul1.4." with all their tensors, or None where their file is absent."""
    for path in FILES:
        tensors = read_tensors(path, name) if path.exists() else {}
        if tensors:
            codebook = CODEBOOKS[name.split(".")[1]]
            assert codebook.marker is not None
            marker = torch.tensor(codebook.marker - (1 << 32), dtype=torch.int32)
            for matrix in [key.removesuffix("trellis") for key in tensors if key.endswith("trellis")]:
                tensors[matrix + codebook.label] = marker
            named = {f"experts.{key}": value for key, value in tensors.items()}
            return ExpertWeights.from_tensors(named, "experts", num_experts=8), tensors
    return None
