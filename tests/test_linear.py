"""`linear` and `linears`: exact weights, the rounding of activations and nothing else, whatever the number and stride of
rows.
"""

import random
import sys
from dataclasses import replace

import pytest
import torch
from golden import matrices
from rounding import rounding
from test_trellis import FORMATS, format_id, random_weight

from exl3_triton import reference
from exl3_triton.format import Codebook, TrellisWeight, fits_half
from exl3_triton.ops import decode_once
from exl3_triton.ops.linear import _launch_linears, linear, linears
from exl3_triton.ops.tuning import (
    Device,
    LinearConfig,
    device_of,
    folds,
    owner_of,
    programs_and_parts,
    regimes,
    select_linear,
)

pytest.importorskip("triton")

SPLIT_ALL = LinearConfig(block_m=16, block_k=128, split=2, num_warps=4)
AHEAD = LinearConfig(block_m=16, block_k=64, split=2, num_warps=4, prefetch=True)
EVEN = LinearConfig(block_m=16, block_k=32, split=1, num_warps=4, even=1)  # 4 processors of the interpreter: within blocks
STAGED = LinearConfig(block_m=16, block_k=32, split=1, num_warps=4, prefetch=True, even=1, stages=3)


def launch(x, weights, config=None, out_dtype=None, mode="exact", fold=None):
    """The launcher itself, to force a configuration, or decoding once in one of its forms."""
    fields = ([w.trellis for w in weights], [w.suh for w in weights], [w.svh for w in weights], [w.bias for w in weights])
    codebooks, sizes = [int(w.codebook) for w in weights], [w.out_features for w in weights]
    with pytest.MonkeyPatch.context() as patch:
        if fold is not None:
            patch.setattr(sys.modules["exl3_triton.ops.linear"], "select_linear", lambda *_: None)
            patch.setattr(sys.modules["exl3_triton.ops.linear"], "folds", lambda *_: fold)
        return _launch_linears(x, *fields, codebooks, sizes, out_dtype or x.dtype, config, mode, bool(fold))


def plain(weight):
    """The matrix without scales: rotations alone stand between x, the stored values and y."""
    ones = [torch.ones_like(vector) for vector in (weight.suh, weight.svh)]
    return TrellisWeight(weight.trellis, *ones, weight.codebook)


def one_hot(rows, width):
    """x whose rotation is exactly one at feature rows[i] of row i, and zero elsewhere."""
    x = torch.zeros(len(rows), width, dtype=torch.float64)
    for i, row in enumerate(rows):
        first = row // 128 * 128
        x[i, first : first + 128] = reference.hadamard_matrix()[row % 128]
    return x.float()


def butterfly(rows):
    """Rows of fp32 rotated as the kernel does, operation by operation."""
    x = rows.float().view(len(rows), -1, 128)
    for stage in range(7):
        pairs = x.view(*x.shape[:2], 64 >> stage, 2, 1 << stage)
        x = torch.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2).view(*x.shape)
    return (x * torch.tensor(128**-0.5, dtype=torch.float32)).view(len(rows), -1)


def check(y, x, weight, *, out_dtype):
    """y against float64, relative to its size.

    Each rotated activation carries one rounding to fp16, independent of the others, so the error of a sum relative to the
    sum is that of one rounding in the root mean square; y is rounded once more. fp32 sums add a hundredth of that.
    """
    exact = reference.linear(x.double().cpu(), weight.to("cpu"))
    assert y.dtype == out_dtype
    assert y.shape == exact.shape
    assert y.is_contiguous()
    assert exact.norm() > 0
    error = (y.double().cpu() - exact).norm() / exact.norm()
    assert error < 1.1 * (rounding(torch.float16) + rounding(out_dtype)), error


@pytest.mark.parametrize("config", [None, SPLIT_ALL, AHEAD, EVEN, STAGED], ids=["", "split", "ahead", "even", "staged"])
@pytest.mark.parametrize(("bits", "codebook"), FORMATS, ids=format_id)
def test_linear_of_one_hot_rows_returns_decoded_weights(device, triton_backend, bits, codebook, config):
    weight = plain(random_weight(bits, codebook, 256, 128, device))
    rows = torch.randperm(256)[:16]
    stored = reference.decode(weight.trellis.cpu(), codebook)[rows]
    y = launch(one_hot(rows, 256).to(device), [weight], config)[0].cpu()
    assert stored.abs().max() > 1
    assert torch.equal(y, butterfly(stored))


@pytest.mark.parametrize("m", [17, 33, 65, 256])
def test_linear_of_one_hot_rows_in_the_other_regimes(device, triton_backend, m, monkeypatch):
    """The last one decodes once; with little scratch it does so in two slices of the columns."""
    monkeypatch.setattr(sys.modules["exl3_triton.ops.decode_once"], "SCRATCH_ELEMENTS", 128 * 128)
    weight = plain(random_weight(2.5, Codebook.MUL1, 128, 256, device))
    rows = torch.arange(m) % 128
    y = linear(one_hot(rows, 128).to(device), weight).cpu()
    assert torch.equal(y, butterfly(reference.decode(weight.trellis.cpu(), Codebook.MUL1)[rows]))


def foldable(weight):
    found = replace(weight, foldable=fits_half(weight.suh, weight.svh))
    assert found.foldable
    return found


@pytest.mark.parametrize("columns", [384, 128], ids=["whole", "slices"])
@pytest.mark.parametrize(
    ("bits", "codebook"), [(3, Codebook.MCG), (2.5, Codebook.MUL1), (7, Codebook.THREE_INST)], ids=format_id
)
def test_folded_one_hot_rows_return_the_matrix_in_its_original_basis(
    device, triton_backend, bits, codebook, columns, monkeypatch
):
    """Weights are rounded to fp16 twice, once as an inner product of a rotation, which spreads that error over 128 weights."""
    monkeypatch.setattr(decode_once, "SCRATCH_ELEMENTS", 256 * columns)
    weight = foldable(random_weight(bits, codebook, 256, 384, device, 200, 300))
    rows = torch.arange(300) % 200
    x = torch.eye(200, dtype=torch.float16)[rows].to(device)
    exact = reference.dense_weight(weight.to("cpu"), torch.float64)[rows]
    y = launch(x, [weight], out_dtype=torch.float32, fold=True)[0].double().cpu()
    assert y.shape == exact.shape == (300, 300)
    assert exact.norm() > 0
    assert (y - exact).norm() / exact.norm() < 1.1 * rounding(torch.float16)
    scale = weight.suh.double().cpu()[rows, None] * weight.svh.double().cpu()[None, :300]
    assert ((y - exact) / scale).abs().max() < 32 * rounding(torch.float16)  # before the scales a weight is far below 32


@pytest.mark.parametrize("m", [1, 67, 257])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_folded_products_are_right(device, triton_backend, dtype, out_dtype, m):
    """The same bound as with rotations: one rounding of independent factors (here weights, and those of x beyond 11 bits)."""
    weight = random_weight(3, Codebook.MCG, 384, 256, device, 300, 200)
    bias = torch.randn(256).half().to(device)
    for b in (None, bias):
        each = foldable(replace(weight, bias=b))
        x = torch.randn(m, 2, 300).to(dtype).to(device)[:, 1]
        check(launch(x, [each], out_dtype=out_dtype, fold=True)[0], x, each, out_dtype=out_dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e-30, 1e5, 1e30])
def test_folded_rows_of_any_size_stay_right(device, triton_backend, dtype, size):
    weight = foldable(random_weight(3, Codebook.MCG, 256, 128, device))
    x = (torch.randn(5, 256) * torch.tensor([size, 1.0, 0.0, size, 1e-3])[:, None]).to(dtype).to(device)
    y = launch(x, [weight], fold=True)[0]
    assert y.isfinite().all()
    assert (y[2] == 0).all()
    for row in (0, 1, 3, 4):
        check(y[row : row + 1], x[row : row + 1], weight, out_dtype=dtype)


def test_folded_outputs_beyond_the_range_of_fp16(device, triton_backend):
    weight = foldable(random_weight(3, Codebook.MCG, 256, 128, device))
    x = (torch.randn(3, 256) * 2e6).bfloat16().to(device)
    y = launch(x, [weight], fold=True)[0]
    assert y.abs().max() > 1e6
    check(y, x, weight, out_dtype=torch.bfloat16)


def test_what_may_be_folded(device, triton_backend):
    """Only matrices that say so, with many rows; the others are rotated, exact weights and all."""
    weight = random_weight(3, Codebook.MCG, 128, 256, device)
    ones, zero = torch.ones(128).half(), torch.zeros(128).half()
    assert fits_half(weight.suh, weight.svh)
    assert fits_half(torch.cat([ones, zero]), ones)
    assert not fits_half(ones * 2**-8, ones * 2**-8)
    assert not fits_half(ones, torch.cat([ones, ones * 2**-16]))
    assert not fits_half(ones * 8, ones * 8)
    assert not fits_half(ones.to("meta"), ones)
    assert folds(4096, 6144, 12288, False)
    assert folds(300, 6144, 512, False)
    assert not folds(1024, 6144, 12288, False)
    assert not folds(4096, 6144, 12288, True)
    x = torch.randn(300, 128).half().to(device)
    rotated, folded = linear(x, weight), linear(x, foldable(weight))
    assert torch.equal(rotated, launch(x, [weight], fold=False)[0])
    assert torch.equal(folded, launch(x, [weight], fold=True)[0])
    assert not torch.equal(rotated, folded)
    assert torch.equal(linear(x[:200], foldable(weight)), linear(x[:200], weight))
    assert torch.equal(linear(x, foldable(weight), mode="precise"), linear(x, weight, mode="precise"))
    assert torch.equal(linears(x, [foldable(weight), weight])[0], rotated)


@pytest.mark.parametrize(
    "golden", [golden for golden in matrices() if "y1" in golden.tensors()], ids=lambda golden: golden.prefix
)
def test_linear_matches_exllamav3(device, triton_backend, golden):
    tensors, weight = golden.tensors(), golden.weight(device)
    for m in (1, 3, 16, 200) if device == "cuda" else (1, 3, 16):
        y = linear(tensors[f"x{m}"].to(device), weight).cpu().double()
        expected = tensors[f"y{m}"].double()
        assert expected.norm() > 0
        assert (
            y - expected
        ).norm() / expected.norm() < 2e-3  # two implementations' roundings: theirs is within 7e-4 of float64


@pytest.mark.parametrize("m", [1, 3, 17, 67, 257])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_linear_is_right_for_any_number_of_rows(device, triton_backend, dtype, m):
    weight = random_weight(3, Codebook.MCG, 384, 256, device)
    x = torch.randn(m, 384).to(dtype).to(device)
    check(linear(x, weight), x, weight, out_dtype=dtype)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_linear_converts_to_another_dtype_once(device, triton_backend, out_dtype):
    weight = random_weight(4, Codebook.MUL1, 128, 128, device)
    x = torch.randn(2, 3, 128, dtype=torch.float32, device=device)
    check(linear(x, weight, out_dtype=out_dtype), x, weight, out_dtype=out_dtype)


@pytest.mark.parametrize(("in_features", "out_features"), [(100, 200), (129, 128), (250, 1)])
def test_linear_of_padded_sizes_with_bias(device, triton_backend, in_features, out_features):
    padded = [-(-n // 128) * 128 for n in (in_features, out_features)]
    weight = random_weight(5, Codebook.THREE_INST, *padded, device, in_features, out_features)
    bias = torch.randn(padded[1]).half().to(device)
    weight = TrellisWeight(weight.trellis, weight.suh, weight.svh, weight.codebook, bias, in_features, out_features)
    x = torch.randn(40, in_features, device=device)
    for y in (linear(x, weight), *launch(x, [weight], SPLIT_ALL if padded[0] > 128 else None)):
        check(y, x, weight, out_dtype=torch.float32)


def test_linear_of_no_rows(device, triton_backend):
    weight = random_weight(3, Codebook.MCG, 128, 256, device)
    for shape in ((0, 128), (2, 0, 128)):
        y = linear(torch.empty(shape, dtype=torch.bfloat16, device=device), weight, out_dtype=torch.float32)
        assert y.shape == (*shape[:-1], 256)
        assert y.dtype == torch.float32


def test_linear_takes_strided_inputs(device, triton_backend):
    weight = random_weight(3, Codebook.MCG, 128, 128, device)
    wide = torch.randn(2, 3, 384, device=device)
    for x in (wide[:, :, 128:256], wide[:, :, 1:129], wide[:, ::2, :128], wide.transpose(0, 1)[:, :, :128], wide[:, :, ::3]):
        assert torch.equal(linear(x, weight), linear(x.contiguous(), weight))
        check(linear(x, weight), x, weight, out_dtype=torch.float32)
    column = torch.randn(128, 5, device=device).T
    assert torch.equal(linear(column, weight), linear(column.contiguous(), weight))


@pytest.mark.parametrize(
    ("dtype", "magnitude"), [(torch.bfloat16, 1e38), (torch.bfloat16, 1e5), (torch.float32, 1e-30), (torch.float16, 6e4)]
)
def test_linear_of_activations_beyond_fp16(device, triton_backend, dtype, magnitude):
    weight = random_weight(3, Codebook.MCG, 256, 128, device)
    x = ((torch.rand(4, 256) * 2 - 1).double() * magnitude).to(dtype).to(device)
    x[1] *= 1e-3
    for y in (linear(x, weight, out_dtype=torch.float32), *launch(x, [weight], SPLIT_ALL, torch.float32)):
        assert torch.isfinite(y).all()
        for row in range(4):
            check(y[row : row + 1], x[row : row + 1], weight, out_dtype=torch.float32)


def test_linear_of_a_large_result(device, triton_backend):
    """A true output of about 1e6: beyond fp16, so sums and rotations must not pass through it."""
    weight = random_weight(3, Codebook.MCG, 256, 128, device)
    x = (torch.randn(3, 256) * 2e6).bfloat16().to(device)
    y = linear(x, weight)
    assert y.abs().max() > 1e6
    check(y, x, weight, out_dtype=torch.bfloat16)


def test_linear_keeps_rows_apart(device, triton_backend):
    """NaN and infinity stay in their rows, and a row's bits do not depend on its neighbours.

    Rows are sums of a few one-hot rows with small integer weights: all sums are exact, so the interpreter's order of
    summation, which is numpy's, cannot show; the GPU's is tested with any numbers below.
    """
    weight = plain(random_weight(3, Codebook.MCG, 256, 128, device))
    basis = one_hot(torch.arange(256), 256)
    x = torch.stack([basis[torch.randperm(256)[:3]].sum(0) for _ in range(16)]).to(device)
    whole = linear(x, weight)
    assert whole.abs().max() > 1
    for rows in ((0, 1), (3, 9), (7, 16)):
        assert torch.equal(linear(x[slice(*rows)], weight), whole[slice(*rows)])
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    spoiled = linear(x, weight)
    assert not torch.isfinite(spoiled[1:3]).any()
    assert torch.equal(spoiled[3:], whole[3:])
    assert torch.equal(spoiled[0], whole[0])


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("split", [2, 3, 5])
def test_linear_split_over_k(device, triton_backend, split, ahead):
    weight = random_weight(3, Codebook.MCG, 640, 256, device)
    steps = -(-5 // split)
    x = torch.randn(19, 640, device=device)
    config = LinearConfig(block_m=16, block_k=128, split=-(-5 // steps), num_warps=4, prefetch=ahead)
    y = launch(x, [weight], config)[0]
    check(y, x, weight, out_dtype=torch.float32)
    torch.testing.assert_close(y, linear(x, weight), rtol=0, atol=64 * 2**-24 * float(y.abs().max()))


def test_split_depends_on_the_matrix_and_the_device_alone():
    for k in (128, 384, 2048, 6144, 18432):
        for blocks in (1, 4, 16, 48, 1002):
            for processors in (4, 84, 132, 188):
                for family in ("sm_90", "cuda", "hip", "host"):
                    first = 1
                    twice_bits = random.choice((4, 6, 7, 12, 16))
                    for regime in regimes(family):
                        device = Device(family, processors)
                        last = min(regime.rows, 1000)
                        (config,) = {select_linear(m, k, blocks, device, twice_bits) for m in range(first, last + 1, 7)}
                        steps = -(-(k // config.block_k) // config.split)
                        assert 1 <= config.split <= k // config.block_k
                        assert (config.split - 1) * steps < k // config.block_k <= config.split * steps  # no part is empty
                        first = regime.rows + 1
                    if family != "hip":
                        assert select_linear(first, k, blocks, device) is None  # decode once


@pytest.mark.parametrize(
    ("m", "k", "n", "bits", "even", "stages", "split"),
    [
        (1, 6144, 12288, 3, 0, 1, 8),
        (1, 5120, 17408, 4, 7, 1, 1),  # 680 of 792 slots in whole blocks
        (1, 2048, 16384, 4, 0, 1, 4),
        (1, 6144, 12288, 6, 0, 1, 4),
        (32, 6144, 12288, 4, 0, 1, 4),
        (32, 5120, 17408, 4, 6, 1, 1),
        (64, 6144, 12288, 5, 2, 3, 1),
        (64, 6144, 12288, 6, 0, 1, 4),
        (64, 12288, 6144, 3, 0, 3, 5),
        (128, 6144, 12288, 3, 2, 3, 1),
        (128, 12288, 6144, 3, 0, 3, 5),
        (128, 6144, 38784, 3, 2, 3, 1),  # 303 blocks in 264 slots
        (128, 512, 6144, 3, 0, 3, 4),  # too little work to share
    ],
)
def test_forms_of_an_h200_are_the_measured_ones(m, k, n, bits, even, stages, split):
    """The table in `ops/tuning.py`."""
    config = select_linear(m, k, n // 128, Device("sm_90", 132), 2 * bits)
    assert config is not None
    assert (config.even, config.stages, config.split) == (even, stages, split)


def test_only_sm_90_has_stages_and_even_shares():
    """Compiled for mma.sync, stages spill at 64 and 128 rows; nobody has timed even shares there."""
    for family in ("cuda", "hip", "host"):
        for m in (1, 32, 64, 200):
            config = select_linear(m, 5120, 136, Device(family, 132), 8)
            assert config is not None
            assert (config.even, config.stages) == (0, 1)


@pytest.mark.parametrize(("blocks", "steps", "programs"), [(136, 40, 792), (5, 8, 4), (3, 7, 21), (2, 16, 1), (10, 3, 7)])
def test_even_shares_meet_in_no_more_programs_than_a_launch_has_room_for(blocks, steps, programs):
    """Every program's range, counted step by step."""
    units = blocks * steps
    owners = [owner_of(unit, units, programs) for unit in range(units)]
    assert owners == sorted(owners)
    shares = [owners.count(program) for program in range(programs)]
    assert max(shares) - min(shares) <= 1
    most = max(len(set(owners[block * steps : (block + 1) * steps])) for block in range(blocks))
    config = LinearConfig(16, 32, 1, 4, even=1)
    assert programs_and_parts(config, 32 * steps, blocks, programs) == (programs, most)


@pytest.mark.parametrize("config", [EVEN, STAGED], ids=["even", "staged"])
def test_even_shares_give_a_row_the_same_bits_in_any_batch(device, triton_backend, config):
    weight = random_weight(4, Codebook.MCG, 256, 384, device)
    x = torch.randn(16, 256).to(device)
    y = launch(x, [weight], config)[0]
    for m in (1, 5):
        assert torch.equal(launch(x[:m], [weight], config)[0], y[:m])


def test_linears_of_mixed_formats(device, triton_backend):
    weights = [
        random_weight(3, Codebook.MCG, 256, 128, device),
        random_weight(2.5, Codebook.MUL1, 256, 384, device),
        random_weight(3, Codebook.MCG, 256, 128, device),
        random_weight(8, Codebook.THREE_INST, 256, 128, device, 256, 100),
    ]
    bias = torch.randn(128).half().to(device)
    first = weights[0]
    weights.append(TrellisWeight(first.trellis, first.suh, first.svh, first.codebook, bias, 256, 128))
    for m in (1, 17):
        x = torch.randn(m, 256).bfloat16().to(device)
        forced = [launch(x, weights, config, torch.float32) for config in (SPLIT_ALL, EVEN, STAGED)]
        for outputs in (linears(x, weights, out_dtype=torch.float32), *forced):
            assert len(outputs) == len(weights)
            for y, weight in zip(outputs, weights):
                check(y, x, weight, out_dtype=torch.float32)


def test_linears_of_one_is_linear(device, triton_backend):
    weight = random_weight(3, Codebook.MCG, 256, 256, device)
    x = torch.randn(2, 3, 256, device=device)
    assert torch.equal(linears(x, [weight])[0], linear(x, weight))
    assert [tuple(y.shape) for y in linears(x[:0], [weight, weight])] == [(0, 3, 256)] * 2


def test_linear_on_the_cpu_is_the_reference():
    weight = random_weight(3, Codebook.MCG, 128, 256, in_features=100, out_features=256)
    x = torch.randn(5, 100)
    assert torch.equal(linear(x, weight), reference.linear(x, weight))
    assert torch.equal(linears(x, [weight], out_dtype=torch.bfloat16)[0], reference.linear(x, weight).bfloat16())


@pytest.mark.parametrize("op", [linear, lambda x, w, **options: linears(x, [w], **options)], ids=["linear", "linears"])
def test_refused_arguments_are_named(op):
    weight = random_weight(3, Codebook.MCG, 128, 128)
    with pytest.raises(ValueError, match="int32"):
        op(torch.zeros(2, 128, dtype=torch.int32), weight)
    with pytest.raises(ValueError, match="float64"):
        op(torch.zeros(2, 128, dtype=torch.float64), weight)
    with pytest.raises(ValueError, match=r"\[2, 127\].*128"):
        op(torch.zeros(2, 127), weight)
    with pytest.raises(ValueError, match="out_dtype"):
        op(torch.zeros(2, 128), weight, out_dtype=torch.int8)
    with pytest.raises(ValueError, match="meta.*cpu"):
        op(torch.zeros(2, 128, device="meta"), weight)


def test_modes_and_empty_lists_are_refused():
    weight = random_weight(3, Codebook.MCG, 128, 128)
    with pytest.raises(ValueError, match="mode='int4'.*exact"):
        linear(torch.zeros(2, 128), weight, mode="int4")
    with pytest.raises(ValueError, match="at least one"):
        linears(torch.zeros(2, 128), [])


def op_arguments(x, weight):
    return (x, weight.trellis, weight.suh, weight.svh, weight.bias, int(weight.codebook), weight.out_features, torch.bfloat16)


def test_linear_passes_opcheck(device):
    weight = random_weight(3, Codebook.MCG, 128, 256, device, 100, 256)
    x = torch.randn(2, 3, 100, device=device)
    arguments = op_arguments(x, weight)
    torch.library.opcheck(torch.ops.exl3_triton.linear.default, arguments)
    lists = [[a] for a in arguments[1:-1]]
    torch.library.opcheck(torch.ops.exl3_triton.linears.default, (x, *lists, torch.bfloat16))


def test_linear_compiles_once_for_all_row_counts(device):
    weights = [random_weight(3, Codebook.MCG, 128, 128, device), random_weight(4, Codebook.MUL1, 128, 256, device)]
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=backend, dynamic=True)
    def two(x):
        return [linear(x, weights[0]) + 1, *linears(x, weights)]

    for m in (2, 3, 40, 100):
        x = torch.randn(m, 128, device=device)
        expected = [linear(x, weights[0]) + 1, *linears(x, weights)]
        for got, want in zip(two(x), expected):
            assert torch.equal(got, want)
    assert len(graphs) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("bits", "codebook"), FORMATS, ids=format_id)
def test_every_row_of_a_matrix_comes_back_on_a_gpu(bits, codebook):
    weight = plain(random_weight(bits, codebook, 2048, 384, "cuda"))
    expected = butterfly(reference.decode(weight.trellis.cpu(), codebook))
    for m in (1, 16, 64, 200):
        for first in range(0, 2048, 2048 if m == 1 else 256):
            rows = torch.arange(first, min(first + m, 2048))
            assert torch.equal(linear(one_hot(rows, 2048).cuda(), weight).cpu(), expected[rows])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("k", "n"), [(6144, 2048), (2048, 6144), (384, 2304), (4096, 128), (6144, 512), (512, 4352), (384, 128256)]
)
@pytest.mark.parametrize("m", [1, 5, 16, 40, 300])
def test_linear_of_large_matrices(k, n, m):
    weight = random_weight(3, Codebook.MCG, k, n, "cuda")
    x = torch.randn(m, k, device="cuda").bfloat16()
    check(linear(x, weight), x, weight, out_dtype=torch.bfloat16)
    check(linear(x, weight, out_dtype=torch.float32), x, weight, out_dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "n"), [(6144, 512), (2048, 6144)])
def test_rows_have_the_same_bits_in_any_batch(k, n):
    weights = [random_weight(3, Codebook.MCG, k, n, "cuda"), random_weight(2.5, Codebook.MUL1, k, 640, "cuda")]
    x = torch.randn(300, k, device="cuda").bfloat16()
    first = 1
    for regime in regimes(device_of(x.device).family):
        last = min(regime.rows, 300)
        alone = linears(x[:first], weights, out_dtype=torch.float32)
        for m in range(first, last + 1, 1 if last <= 64 else 17):
            for got, want in zip(linears(x[:m], weights, out_dtype=torch.float32), alone):
                assert torch.equal(got[:first], want), m
        first = last + 1
    ends = [linears(x[m - 1 : m], weights)[0] for m in (1, 7, 16)]
    whole = linears(x[:16], weights)[0]
    for end, m in zip(ends, (1, 7, 16)):
        assert torch.equal(end[0], whole[m - 1])


@pytest.mark.gpu
def test_regimes_differ_by_the_order_of_summation_alone():
    weight = random_weight(3, Codebook.MCG, 6144, 512, "cuda")
    x = torch.randn(600, 6144, device="cuda")
    one = linear(x[:16], weight)
    for m in (20, 40, 100, 300, 600):
        other = linear(x[:m], weight)[:16]
        # k products summed in fp32 in two orders: 2 sqrt(k) roundings of the running sum, about the result's size
        assert (one - other).norm() / other.norm() < 2 * 6144**0.5 * 2**-24


@pytest.mark.gpu
def test_repeats_are_bit_identical():
    weights = [random_weight(3, Codebook.MCG, 4096, 512, "cuda"), random_weight(4, Codebook.MUL1, 4096, 512, "cuda")]
    x = torch.randn(8, 4096, device="cuda").bfloat16()
    first = linears(x, weights)
    for _ in range(200):
        assert all(torch.equal(a, b) for a, b in zip(linears(x, weights), first))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 17, 100])
def test_a_captured_graph_follows_its_inputs(m):
    weights = [random_weight(3, Codebook.MCG, 2048, 512, "cuda"), random_weight(4, Codebook.MUL1, 2048, 512, "cuda")]
    x = torch.randn(m, 2048, device="cuda").bfloat16()
    linears(x, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = linears(x, weights)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, linears(x, weights)))


@pytest.mark.gpu
def test_two_streams_do_not_share_scratch():
    weight = random_weight(3, Codebook.MCG, 6144, 512, "cuda")
    inputs = [torch.randn(4, 6144, device="cuda") for _ in range(2)]
    expected = [linear(x, weight) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(50):
        results = []
        for stream, x in zip(streams, inputs):
            with torch.cuda.stream(stream):
                results.append([linear(x, weight) for _ in range(4)])
        torch.cuda.synchronize()
        for got, want in zip(results, expected):
            assert all(torch.equal(y, want) for y in got)


@pytest.mark.multi_gpu
def test_weights_on_another_device_than_the_current_one():
    weight = random_weight(3, Codebook.MCG, 512, 256, "cuda:1")
    x = torch.randn(3, 512, device="cuda:1")
    assert torch.cuda.current_device() == 0
    check(linear(x, weight), x, weight, out_dtype=torch.float32)
    with pytest.raises(ValueError, match="cuda:0.*cuda:1"):
        linear(x.to("cuda:0"), weight)
