"""The modes of `linear` beside "exact": what each leaves out, its error against float64, and what it refuses."""

import importlib

import pytest
import torch
from rounding import rounding
from test_linear import SPLIT_ALL, butterfly, launch, one_hot, plain
from test_trellis import random_weight

import exl3_triton
from exl3_triton import Exl3Linear, reference
from exl3_triton.format import Codebook, FormatError, TrellisWeight
from exl3_triton.model.layers import linears as linear_layers
from exl3_triton.ops.linear import linear, linears
from exl3_triton.ops.modes import CENTER, INT8_MAX_IN, MODES, SLOPE
from exl3_triton.ops.tuning import Device, device_of, regimes, select_linear

pytest.importorskip("triton")

DEMO = exl3_triton.__path__[0] + "/demo"
CODEBOOKS = {"exact": Codebook.MCG, "precise": Codebook.MCG, "split": Codebook.THREE_INST, "int8": Codebook.MUL1}
APPROXIMATE = ["precise", "split", "int8"]
ROWS = [1, 17, 65, 257]  # one a regime


def matrix(mode, bits=3, rows=384, columns=256, device="cpu", **sizes):
    return random_weight(bits, CODEBOOKS[mode], rows, columns, device, **sizes)


def fp32_sums(k):
    """Largest relative error of a product whose operands carry 22 bits or more, summed over k in fp32, in the mean over y.

    Nine roundings of each rotation (seven butterflies, two scales), those of the operands and of the result; a matrix unit
    adds 16 products at a time and may cut off instead of rounding: a step of 2^-23 of the running sum for each 16 of k.
    """
    return (2 * 9 + 2 + k / 8) * 2**-24


def int8_error(x, weight):
    """Expected relative error under mode "int8": evenly spread over steps of a 127th of each row's largest magnitude."""
    rotated = reference.rotate(x.double().cpu() * weight.suh.double().cpu())
    step = rotated.abs().amax(-1) / 127
    return (step.square().sum() * rotated.shape[-1] / 12).sqrt() / rotated.norm()


def relative(y, exact):
    assert exact.norm() > 0
    return float((y.double().cpu() - exact).norm() / exact.norm())


def tolerance(mode, k, count):
    """Against float64 in the same mode: fp32 sums, the rounding of activations to fp16, and what int8 steps make of that.

    A value at the edge of two steps that fp32 rounds to another fp16 neighbour than float64 lands a whole step away, sqrt(12)
    times the usual error of about 2^-7; allowed for one value in 2^11 of `count`, and for two.
    """
    edge = (12 * max(2**-11, 2 / count)) ** 0.5 * 2**-7
    return fp32_sums(k) + {"precise": 0, "split": 1.1 * rounding(torch.float16), "int8": edge}[mode]


def check(y, x, weight, mode, out_dtype=torch.float32):
    expected = reference.linear(x.double().cpu(), weight.to("cpu"), mode)
    assert y.dtype == out_dtype
    assert y.shape == expected.shape
    bound = tolerance(mode, weight.padded_in, x.numel()) + 1.1 * rounding(out_dtype) * (out_dtype != torch.float32)
    assert relative(y, expected) < bound


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("mode", APPROXIMATE)
def test_modes_agree_with_float64(device, triton_backend, mode, m, monkeypatch):
    """The last number of rows decodes once (int8: does not), with little scratch, in two slices of the columns."""
    monkeypatch.setattr(importlib.import_module("exl3_triton.ops.decode_once"), "SCRATCH_ELEMENTS", 256 * 128)
    weight = matrix(mode, 3, 256, 256 if m > 255 else 128, device)
    x = torch.randn(m, 256, device=device)
    check(linear(x, weight, mode=mode), x, weight, mode)


@pytest.mark.parametrize(("mode", "bits"), [("precise", 3), ("split", 2), ("split", 7), ("int8", 2.5), ("int8", 5)])
def test_error_of_each_mode_is_the_stated_one(device, triton_backend, mode, bits):
    """The docstring of `linear`, by the cause of each error."""
    weight = matrix(mode, bits, device=device)
    x = torch.randn(16, 384, device=device)
    exact = reference.linear(x.double().cpu(), weight.to("cpu"))
    error = relative(linear(x, weight, mode=mode), exact)
    plain_error = relative(linear(x, weight), exact)
    if mode == "precise":
        assert error < fp32_sums(384) < plain_error / 20
    elif mode == "split":  # activations, and weights whose rounding to fp16 is left out
        assert plain_error < error < 1.1 * 2**0.5 * rounding(torch.float16)
    else:
        assert 0.8 < error / int8_error(x, weight) < 1.2
        assert 3e-3 < error < 1.2e-2


def test_precise_one_hot_rows_return_decoded_weights(device, triton_backend):
    weight = plain(matrix("precise", columns=128, device=device))
    rows = torch.randperm(384)[:17]
    y = linear(one_hot(rows, 384).to(device), weight, mode="precise").cpu()
    expected = butterfly(reference.decode(weight.trellis.cpu(), weight.codebook)[rows])
    # a one of the rotation may be off by 2^-24 here, which fp16 alone would round away
    assert (y - expected).abs().max() < 9 * 2**-24 * expected.abs().max()


@pytest.mark.parametrize("config", [None, SPLIT_ALL], ids=["", "split k"])
@pytest.mark.parametrize(("bits", "codebook"), [(1, Codebook.MCG), (3, Codebook.MCG), (6, Codebook.THREE_INST)])
def test_split_one_hot_rows_return_the_sum_of_both_halves(device, triton_backend, bits, codebook, config):
    weight = plain(random_weight(bits, codebook, 256, 128, device))
    rows = torch.randperm(256)[:16]
    y = launch(one_hot(rows, 256).to(device), [weight], config, mode="split")[0].cpu()
    stored = reference.decode(weight.trellis.cpu(), codebook, rounded=False)[rows]
    assert not torch.equal(stored, stored.half().float())
    assert torch.equal(y, butterfly(stored))


@pytest.mark.parametrize("config", [None, SPLIT_ALL], ids=["", "split k"])
@pytest.mark.parametrize("bits", [1, 2.5, 3, 7])
def test_int8_sums_are_those_of_integers(device, triton_backend, bits, config):
    """Rows whose rotation is integers up to 127, which add up to nothing: y is one rounding of the integer product."""
    weight = plain(random_weight(bits, Codebook.MUL1, 256, 128, device))
    steps = torch.randint(-127, 128, (9, 128))
    steps[:, 0] = 127
    steps = torch.cat([steps, -steps[:, torch.randperm(128)]], -1)
    x = (steps.double().view(9, 2, 128) @ reference.hadamard_matrix()).view(9, 256).float()
    states = reference.trellis_states(weight.trellis.cpu())
    product = states * 0x83DCD12D & 0xFFFFFFFF
    byte_sums = sum(product >> shift & 0xFF for shift in (0, 8, 16, 24)) - 512
    row, column = reference.tile_position()
    sums = torch.empty(16, 16, 8, 16, dtype=torch.int64)
    sums[:, row, :, column] = byte_sums.permute(2, 0, 1)
    product = steps @ sums.view(256, 128)
    assert product.abs().max() < 2**24  # exact in fp32
    y = launch(x.to(device), [weight], config, mode="int8")[0].cpu()
    assert torch.equal(y, butterfly(product.float() * SLOPE.value))


def test_constants_of_int8_are_the_codebook():
    states = torch.arange(1 << 16)
    product = states * 0x83DCD12D & 0xFFFFFFFF
    byte_sums = sum(product >> shift & 0xFF for shift in (0, 8, 16, 24)) - 512
    affine = byte_sums.double() * SLOPE.value + CENTER.value
    assert torch.equal(affine.half(), reference.codebook_values(Codebook.MUL1))
    assert torch.equal(affine.float(), reference.codebook_values(Codebook.MUL1, rounded=False))


@pytest.mark.parametrize("mode", APPROXIMATE)
def test_modes_of_padded_sizes_with_bias_and_strides(device, triton_backend, mode):
    weight = matrix(mode, 5, 256, 256, device, in_features=200, out_features=130)
    bias = torch.randn(256).half().to(device)
    weight = TrellisWeight(weight.trellis, weight.suh, weight.svh, weight.codebook, bias, 200, 130)
    wide = torch.randn(2, 2, 400, device=device)
    for x in (wide[..., 100:300], wide[..., ::2], wide[:0, :, :200]):
        for y in (linear(x, weight, mode=mode), launch(x, [weight], SPLIT_ALL, mode=mode)[0]):
            if x.numel():
                check(y, x, weight, mode)
            else:
                assert y.shape == (0, 2, 130)


@pytest.mark.parametrize("m", [3, pytest.param(300, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mode", APPROXIMATE)
def test_linears_of_mixed_rates(device, triton_backend, mode, m):
    weights = [matrix(mode, bits, 256, columns, device) for bits, columns in ((3, 128), (4, 256), (3, 128))]
    x = torch.randn(m, 256, device=device)
    for y, weight in zip(linears(x, weights, mode=mode), weights, strict=True):
        check(y, x, weight, mode)


@pytest.mark.parametrize(("dtype", "magnitude"), [(torch.bfloat16, 1e38), (torch.float32, 1e-30), (torch.float16, 6e4)])
@pytest.mark.parametrize("mode", APPROXIMATE)
def test_modes_of_activations_beyond_fp16(device, triton_backend, mode, dtype, magnitude):
    weight = matrix(mode, 3, 256, 128, device)
    x = ((torch.rand(4, 256) * 2 - 1).double() * magnitude).to(dtype).to(device)
    x[1] *= 1e-3
    x[3] = 0
    y = linear(x, weight, out_dtype=torch.float32, mode=mode)
    assert torch.isfinite(y).all()
    assert not y[3].any()
    for row in range(3):
        check(y[row : row + 1], x[row : row + 1], weight, mode)


@pytest.mark.parametrize("mode", APPROXIMATE)
def test_modes_keep_rows_apart(device, triton_backend, mode):
    """NaN and infinity stay in their rows. Sums are exact, so that the interpreter's order of summation cannot show."""
    weight = plain(matrix(mode, 3, 256, 128, device))
    basis = one_hot(torch.arange(256), 256)
    x = torch.stack([basis[torch.randperm(256)[:3]].sum(0) for _ in range(16)]).to(device)
    whole = linear(x, weight, mode=mode)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    spoiled = linear(x, weight, mode=mode)
    assert not torch.isfinite(spoiled[1:3]).any()
    torch.testing.assert_close(spoiled[3:], whole[3:], rtol=0, atol=0 if mode != "precise" else fp32_sums(256) * 16)
    assert whole.abs().max() > 1


def test_rules_of_the_modes_are_named():
    mcg, mul1 = matrix("exact", rows=128, columns=128), matrix("int8", rows=128, columns=128)
    x = torch.zeros(2, 128)
    with pytest.raises(ValueError, match=r"linear: mode='fast': required one of exact, precise, split, int8"):
        linear(x, mcg, mode="fast")
    with pytest.raises(ValueError, match=r"mode='split': found codebook mul1: required 3inst or mcg"):
        linear(x, mul1, mode="split")
    with pytest.raises(ValueError, match=r"mode='int8': found codebook mcg: required mul1"):
        linear(x, mcg, mode="int8")
    with pytest.raises(ValueError, match=r"linears: mode='int8': matrix 1 has codebook mcg"):
        linears(x, [mul1, mcg], mode="int8")
    with pytest.raises(ValueError, match=r"Exl3Linear: mode='split'.*mul1"):
        Exl3Linear(mul1, "split")
    wide = TrellisWeight(
        torch.zeros(2056, 8, 48, dtype=torch.int16), torch.zeros(32896).half(), torch.zeros(128).half(), Codebook.MUL1
    )
    with pytest.raises(ValueError, match=r"mode='int8': found 32896 input features: required at most 32768"):
        linear(torch.zeros(1, 32896), wide, mode="int8")


def test_int8_sums_fit_int32_at_the_largest_width():
    assert INT8_MAX_IN * 127 * 4 * 128 < 2**31


def test_regimes_of_the_modes():
    for mode in APPROXIMATE:
        for family in ("sm_90", "cuda", "hip", "host"):
            device, first = Device(family, 132), 1
            for regime in regimes(family, mode):
                last = min(regime.rows, 5000)
                configs = {select_linear(m, 6144, 16, device, 6, mode=mode) for m in range(first, last + 1, 7)}
                assert len(configs) == 1  # so a row's sums do not depend on the rows beside it
                first = regime.rows + 1
            assert (select_linear(100_000, 6144, 16, device, 6, mode=mode) is None) == (mode != "int8")


@pytest.mark.parametrize("mode", APPROXIMATE)
def test_modes_pass_opcheck(device, mode):
    weight = matrix(mode, 3, 128, 256, device, in_features=100, out_features=256)
    x = torch.randn(2, 3, 100, device=device)
    fields = (weight.trellis, weight.suh, weight.svh, weight.bias, int(weight.codebook), weight.out_features)
    torch.library.opcheck(torch.ops.exl3_triton.linear.default, (x, *fields, torch.bfloat16, mode))
    torch.library.opcheck(torch.ops.exl3_triton.linears.default, (x, *([f] for f in fields), torch.bfloat16, mode))


@pytest.mark.parametrize("mode", APPROXIMATE)
def test_layers_carry_their_mode(device, mode):
    layer = Exl3Linear(matrix(mode, device=device), mode)
    x = torch.randn(5, 384, device=device)
    expected = linear(x, layer.weight, mode=mode)
    assert torch.equal(layer(x), expected)
    assert f"mode={mode}" in repr(layer)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    for m in (5, 3, 40):
        rows = torch.randn(m, 384, device=device)
        assert torch.equal(compiled(rows), linear(rows, layer.weight, mode=mode))
    assert len(graphs) == 1
    exact = Exl3Linear(layer.weight)
    for y, want in zip(linear_layers(x, [layer, exact], torch.float32), (expected, linear(x, layer.weight)), strict=True):
        assert torch.equal(y, want)
    assert torch.equal(linear_layers(x, [layer, layer], torch.float32)[1], linears(x, [layer.weight] * 2, mode=mode)[1])


def test_load_gives_every_layer_its_mode():
    model = exl3_triton.load(DEMO, progress=False, mode="precise")
    layers = [module for module in model.modules() if isinstance(module, Exl3Linear)]
    assert len(layers) > 20
    assert {layer.mode for layer in layers} == {"precise"}


@pytest.mark.parametrize(("mode", "message"), [("int8", r"\w+.*: mode='int8': found codebook mcg"), ("half", "mode='half'")])
def test_load_refuses_a_mode_that_a_matrix_does_not_know(mode, message):
    with pytest.raises(ValueError, match=message) as raised:
        exl3_triton.load(DEMO, progress=False, mode=mode)
    assert not isinstance(raised.value, FormatError)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 40, 200, 300])
@pytest.mark.parametrize("mode", APPROXIMATE)
def test_modes_of_large_matrices(mode, m):
    weight = matrix(mode, 3, 6144, 2048, "cuda")
    x = torch.randn(m, 6144, device="cuda").bfloat16()
    check(linear(x, weight, out_dtype=torch.float32, mode=mode), x, weight, mode)
    check(linear(x, weight, mode=mode), x, weight, mode, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", APPROXIMATE)
def test_rows_of_a_mode_have_the_same_bits_in_any_batch(mode):
    weight = matrix(mode, 3, 2048, 512, "cuda")
    x = torch.randn(300, 2048, device="cuda")
    first = 1
    for regime in regimes(device_of(x.device).family, mode):
        last = min(regime.rows, 300)
        alone = linear(x[:first], weight, mode=mode)
        for m in range(first, last + 1, 1 if last <= 64 else 17):
            assert torch.equal(linear(x[:m], weight, mode=mode)[:first], alone)
        first = last + 1


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 17, 100, 300])
@pytest.mark.parametrize("mode", APPROXIMATE)
def test_modes_in_a_captured_graph(mode, m):
    """Replays follow their inputs, and 200 repeats have the same bits."""
    weight = matrix(mode, 3, 2048, 512, "cuda")
    x = torch.randn(m, 2048, device="cuda")
    linear(x, weight, mode=mode)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = linear(x, weight, mode=mode)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        expected = linear(x, weight, mode=mode)
        assert torch.equal(captured, expected)
    for _ in range(200):
        assert torch.equal(linear(x, weight, mode=mode), expected)


def test_every_mode_has_a_codebook_here():
    assert tuple(CODEBOOKS) == MODES
