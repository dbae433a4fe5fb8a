"""The reference against ExLlamaV3's own tensors: decoded weights bit for bit, outputs within derived bounds."""

from __future__ import annotations

import golden
import pytest
import torch

from exl3_triton import reference
from exl3_triton.format import Codebook

MATRICES = golden.matrices()
IDS = [m.prefix.rstrip(".") for m in MATRICES]


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert expected.double().norm() > 0
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def test_every_rate_and_codebook_is_covered():
    """The committed files alone hold every rate; the larger file adds its own tensors of some."""
    rates = {(m.codebook, m.weight().bits) for m in MATRICES}
    assert {bits for _, bits in rates} >= {1, 1.5, 2.5, 3, 3.5, 7}
    assert {codebook for codebook, _ in rates} == set(Codebook)


@pytest.mark.parametrize("matrix", MATRICES, ids=IDS)
def test_decode_is_bit_exact(matrix):
    tensors = matrix.tensors()
    decoded = reference.decode(tensors["trellis"], matrix.codebook)
    assert torch.equal(decoded.view(torch.int16), tensors["weight_rotated"].view(torch.int16))


@pytest.mark.parametrize("matrix", [m for m in MATRICES if "x1" in m.tensors()], ids=lambda m: m.prefix.rstrip("."))
@pytest.mark.parametrize("rows", [1, 3, 16, 200])
def test_linear_agrees_with_exllamav3(matrix, rows):
    """ExLlamaV3 rounds four times to fp16 (input scale, rotated input, output rotation, output scale): 2e-3 covers them.

    Against our own float64 the fp32 reference has only the summation error: 256 products, 2^-24 each, with a factor 10 for
    the two rotations' and the weights' own sums.
    """
    tensors, weight = matrix.tensors(), matrix.weight()
    x, y = tensors[f"x{rows}"], tensors[f"y{rows}"]
    assert relative(reference.linear(x, weight), y) < 2e-3
    exact = reference.linear(x.double(), weight)
    assert relative(y, exact) < 2e-3
    assert relative(reference.linear(x, weight), exact) < 10 * 256**0.5 * 2**-24


@pytest.mark.parametrize("name", ["moe.mcg.3.", "moe.mul1.4."])
@pytest.mark.parametrize("rows", [1, 4, 40])
def test_moe_agrees_with_exllamav3(name, rows):
    loaded = golden.experts(name)
    if loaded is None:
        pytest.skip("needs the larger test data: set EXL3_TRITON_TESTDATA")
    experts, tensors = loaded
    x, ids, weights = (tensors[f"{key}{rows}"] for key in ("x", "sel", "rw"))
    exact = reference.moe(x.double(), experts, ids, weights)
    assert relative(tensors[f"y{rows}"], exact) < 2e-3
    assert relative(reference.moe(x, experts, ids, weights), exact) < 20 * 256**0.5 * 2**-24


@pytest.mark.parametrize("codebook", Codebook, ids=lambda c: c.label)
def test_codebook_statistics(codebook):
    """Published statistics of the three codebooks over all 65,536 states (docs/format.md)."""
    values = reference.codebook_values(codebook).double()
    mean, std, low, high, distinct = {
        Codebook.THREE_INST: (0.000210, 1.243711, -3.9570, 3.9727, 10598),
        Codebook.MCG: (-0.000037, 1.244112, -3.9492, 3.9492, 10746),
        Codebook.MUL1: (-0.001931, 1.000310, -3.4531, 3.3477, 913),
    }[codebook]
    assert values.mean().item() == pytest.approx(mean, abs=1e-6)
    assert values.std().item() == pytest.approx(std, abs=1e-5)
    assert (values.min().item(), values.max().item()) == pytest.approx((low, high), abs=1e-4)
    assert values.unique().numel() == distinct


def test_rotate_is_its_own_inverse():
    x = torch.randn(5, 384, dtype=torch.float64)
    assert torch.allclose(reference.rotate(reference.rotate(x)), x, rtol=0, atol=1e-13)
    assert not torch.allclose(reference.rotate(x), x, atol=0.1)


def test_gpu_rounding_rounds_and_survives_large_inputs():
    """fp16 has 11 significant bits: a rounded input is off by up to 2^-12 relative, so is an average over many."""
    weight = MATRICES[0].weight()
    x = torch.randn(7, weight.in_features, dtype=torch.float64) * torch.logspace(-30, 30, 7, dtype=torch.float64)[:, None]
    with reference.gpu_rounding():
        rounded = reference.linear(x, weight)
    exact = reference.linear(x, weight)
    for row in range(7):
        error = relative(rounded[row], exact[row])
        assert 0 < error < 2**-11


def test_dense_cache_follows_changes_of_the_weights():
    weight = MATRICES[0].weight()
    x = torch.randn(2, weight.in_features)
    before = reference.linear(x, weight)
    weight.trellis.copy_(torch.randint(-(1 << 15), 1 << 15, weight.trellis.shape, dtype=torch.int16))
    after = reference.linear(x, weight)
    assert relative(after, before) > 0.5
    assert relative(after, reference.linear(x.double(), weight)) < 1e-5
