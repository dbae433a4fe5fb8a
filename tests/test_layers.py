"""`Exl3Linear` as a drop-in: state_dict names, moving, compiling, and the package's import without Triton or a GPU."""

from __future__ import annotations

import subprocess
import sys

import golden
import pytest
import torch
from torch import nn

import exl3_triton
from exl3_triton import Exl3Linear, reference
from exl3_triton.format import Codebook

MATRIX = next(m for m in golden.matrices() if m.prefix == "mcg.3.")


def relative(actual, expected):
    assert expected.double().norm() > 0
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def test_exl3_linear_computes_the_matrix():
    layer = Exl3Linear(MATRIX.weight())
    for shape in ((256,), (3, 256), (2, 5, 256), (0, 256)):
        x = torch.randn(shape)
        assert layer(x).shape == (*shape[:-1], 384)
        if x.numel():
            assert relative(layer(x), reference.linear(x.double(), layer.weight)) < 1e-5
    assert layer(torch.randn(3, 256).bfloat16()).dtype == torch.bfloat16
    assert layer(torch.randn(3, 256).bfloat16(), torch.float32).dtype == torch.float32


def test_exl3_linear_takes_strided_input():
    layer, wide = Exl3Linear(MATRIX.weight()), torch.randn(4, 3, 512)
    x = wide[:, :, 128:384]
    assert relative(layer(x), reference.linear(x.double(), layer.weight)) < 1e-5


def test_exl3_linear_refuses_integer_activations_and_wrong_width():
    layer = Exl3Linear(MATRIX.weight())
    with pytest.raises(ValueError, match="int64"):
        layer(torch.ones(2, 256, dtype=torch.int64))
    with pytest.raises(ValueError, match="255"):
        layer(torch.ones(2, 255))


def test_exl3_linear_state_dict_has_the_checkpoints_names():
    layer = Exl3Linear(MATRIX.weight())
    state = nn.ModuleDict({"q_proj": layer}).state_dict()
    assert set(state) == {"q_proj.trellis", "q_proj.suh", "q_proj.svh", "q_proj.mcg"}
    other = nn.ModuleDict({"q_proj": Exl3Linear.empty(256, 384, 3, Codebook.MCG)})
    x = torch.randn(3, 256)
    assert not other["q_proj"](x).any()
    other.load_state_dict(state)
    assert torch.equal(other["q_proj"](x), layer(x))
    other.load_state_dict(state, assign=True)
    assert other["q_proj"].weight.trellis.data_ptr() == layer.trellis.data_ptr()


def test_exl3_linear_keeps_its_storage_types():
    layer = Exl3Linear(MATRIX.weight()).to(torch.bfloat16).double().half()
    assert (layer.trellis.dtype, layer.suh.dtype, layer.svh.dtype) == (torch.int16, torch.float16, torch.float16)
    assert torch.equal(layer.suh, MATRIX.tensors()["suh"])
    assert layer.to("meta").weight.trellis.device.type == "meta"


@pytest.mark.parametrize("bits", [2, 2.5, 6])
def test_exl3_linear_empty_has_the_asked_geometry(bits):
    layer = Exl3Linear.empty(300, 576, bits, Codebook.MUL1, bias=True)
    assert (layer.weight.bits, layer.in_features, layer.out_features) == (bits, 300, 576)
    assert layer.state_dict().keys() == {"trellis", "suh", "svh", "bias", "mul1"}
    assert "bits=" + str(bits) in repr(layer)


def test_exl3_linear_compiles_once_for_every_row_count():
    layer = Exl3Linear(MATRIX.weight())
    compiles = 0

    def backend(graph, inputs):
        nonlocal compiles
        compiles += 1
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for rows in (2, 3, 5, 17, 64):
        x = torch.randn(rows, 256)
        assert torch.equal(compiled(x), layer(x))
    assert compiles == 1


def test_import_needs_neither_triton_nor_a_gpu():
    program = """
import sys
sys.modules["triton"] = None
import torch, exl3_triton
import exl3_triton
from exl3_triton import Exl3Linear, LLM, MoePlan, load, ops
from exl3_triton.format import Codebook
layer = Exl3Linear.empty(128, 128, 3, Codebook.MCG)
assert layer(torch.randn(2, 128)).shape == (2, 128)
from exl3_triton.ops._dispatch import override_backend
with override_backend("triton"):
    try:
        layer(torch.randn(2, 128))
    except ImportError as error:
        assert "Triton" in str(error)
    else:
        raise AssertionError("ran kernels without Triton")
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_public_names_stay_what_they_are():
    """A submodule of a public name's own name would take its place once it is imported."""
    for name in set(exl3_triton.__all__) - {"ops"}:
        assert getattr(exl3_triton, name) is getattr(exl3_triton, name)
        assert callable(getattr(exl3_triton, name))
