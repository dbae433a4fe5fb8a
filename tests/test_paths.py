"""The line that names kernels and block sizes."""

from __future__ import annotations

import pytest
import torch

from exl3_triton import tables
from exl3_triton.model.config import ModelConfig
from exl3_triton.model.dummy import dummy_model
from exl3_triton.model.paths import kernel_paths
from exl3_triton.ops.attention_tuning import decode_tile
from exl3_triton.ops.tuning import Device


def paths_of(name, family):
    model = dummy_model(ModelConfig.preset(name), device="meta", dtype=torch.float16, max_context=65536)
    return kernel_paths(model, Device(family, 132))


def test_a_latent_model_on_hopper():
    line = paths_of("glm-5.2", "sm_90")
    tile = decode_tile(64, torch.float16, Device("sm_90", 132))
    assert "\n" not in line
    assert line.startswith(
        "rules of sm_90; linear blocks of 16 to 16, 32 to 32, 64 to 64, 128 to 255 rows, above decoded once"
    )
    assert "expert blocks of 8 to 32, 16 to 256, 32 to 512, 64 to 1024, 128 to 2048 tokens" in line
    assert f"MLA decode {tile.heads} heads x {tile.keys} keys, prefill " in line
    assert line.endswith("2048 selected positions above 2048")
    assert "the shared expert among them up to 32; " in line


def test_tuned_tables_are_named(monkeypatch):
    monkeypatch.setattr(tables, "entries_for", lambda op, *device: dict.fromkeys(range(3) if op == "linear" else ()))
    model = dummy_model(ModelConfig.preset("glm-4.5-air"), device="meta", dtype=torch.float16, max_context=64)
    line = kernel_paths(model, Device("cuda", 188, "NVIDIA RTX PRO 6000", (12, 0)))
    assert line.startswith("rules of cuda, 3 tuned entries for linear; linear blocks")


@pytest.mark.parametrize("family", ["cuda", "hip"])
def test_a_grouped_model_elsewhere(family):
    line = paths_of("glm-4.5-air", family)
    assert line.startswith(f"rules of {family}; linear blocks of 16 to 16, 32 to 32, 64 to 64")
    assert ("decoded once" in line) == (family == "cuda")
    assert "GQA decode 16 heads x 64 keys, prefill" in line
