"""Rotations of rows and columns, and the rotation of activations on their way into a product."""

import pytest
import torch
from rounding import rounding

from exl3_triton import reference
from exl3_triton.ops.hadamard import launch_rotate_input, power_of_two, rotate_columns, rotate_rows, scale_by_power

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def _rotate_kernel(x, rows, columns, R: tl.constexpr):
    n, r = tl.arange(0, 128), tl.arange(0, R)
    tl.store(rows + r[:, None] * 128 + n[None, :], rotate_rows(tl.load(x + r[:, None] * 128 + n[None, :]), R))
    tl.store(columns + r[None, :] * 128 + n[:, None], rotate_columns(tl.load(x + r[None, :] * 128 + n[:, None]), R))


@triton.jit
def _scale_kernel(x, e, powers, scaled, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    exponent = tl.load(e + i)
    tl.store(powers + i, power_of_two(tl.maximum(tl.minimum(exponent, 127), -126)))
    tl.store(scaled + i, scale_by_power(tl.load(x + i), exponent))


def natural_order(xh, variant):
    """Undo the order of k inside 16-tiles that `launch_rotate_input` writes for a layout."""
    k = torch.arange(xh.shape[-1])
    if variant & 2:
        k = (k // 16) * 16 + ((k // 2) % 4) * 4 + ((k // 8) % 2) * 2 + k % 2
    return xh[..., k]


def check_rotation(x, suh, padded, variant):
    """The scaled fp16 rows against float64: half a step of fp16 each, besides the seven fp32 stages."""
    xh, exponents = launch_rotate_input(x, suh, padded, variant)
    assert xh.shape == (len(suh), x.shape[0], padded)
    assert exponents.shape == (len(suh), x.shape[0])
    assert torch.isfinite(xh).all()
    wide = torch.zeros(x.shape[0], padded, dtype=torch.float64)
    wide[:, : x.shape[1]] = x.double().cpu()
    for got, exponent, scales in zip(xh.double().cpu(), exponents.cpu(), suh):
        exact = reference.rotate(wide * scales.double().cpu())
        got = torch.ldexp(natural_order(got, variant), exponent.double()[:, None])
        step = torch.exp2(exponent.double())[:, None] * 2**-25  # what fp16 cannot resolve: half its smallest number
        # and eight roundings in fp32, of sums up to about the row's largest
        error = exact.abs().amax(-1, keepdim=True) * 16 * 2**-23
        assert exact.abs().max() > 0
        assert ((got - exact).abs() <= exact.abs() * 2**-11 * (1 + 2**-10) + step + error).all()


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_rotate_rows_and_columns_are_the_hadamard_transform(device, rows):
    x = torch.randn(rows, 128)
    out = torch.empty(2, rows, 128, device=device)
    _rotate_kernel[(1,)](x.to(device), out[0], out[1], rows)
    exact = reference.rotate(x.double())
    # seven additions of values up to sqrt(128) times the result's size, and the normalisation
    bound = 8 * 2**-24 * x.double().abs().sum(-1, keepdim=True) / 128**0.5
    for got in out.cpu().double():
        assert ((got - exact).abs() <= bound).all()


def test_rotating_twice_gives_the_input(device):
    x = torch.randn(16, 128)
    out = torch.empty(2, 16, 128, device=device)
    _rotate_kernel[(1,)](x.to(device), out[0], out[1], 16)
    assert torch.equal(out[0], out[1])
    _rotate_kernel[(1,)](out[0].clone(), out[0], out[1], 16)
    torch.testing.assert_close(out[0].cpu(), x, rtol=0, atol=16 * 2**-24 * float(x.abs().sum(-1).max()))


def test_scale_by_power_reaches_the_whole_range_of_fp32(device):
    exponents = torch.arange(-251, 254, dtype=torch.int32)
    exponents = torch.cat([exponents, torch.zeros(512 - len(exponents), dtype=torch.int32)])
    x = torch.randn(512).abs().clamp(0.5, 1.0).double()
    x = torch.ldexp(x, (-exponents).clamp(-126, 126).double()).float()  # so that the result is a normal number
    powers, scaled = (torch.empty(512, device=device) for _ in range(2))
    _scale_kernel[(1,)](x.to(device), exponents.to(device), powers, scaled, 512)
    assert torch.equal(powers.cpu().double(), torch.exp2(exponents.clamp(-126, 127).double()))
    exact = torch.ldexp(x.double(), exponents.double())
    assert torch.equal(scaled.cpu().double(), exact)


@pytest.mark.parametrize("variant", range(4))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_launch_rotate_input(device, dtype, variant):
    x = torch.randn(3, 384).to(dtype).to(device)
    suh = [(0.02 * torch.randn(384)).half().to(device) for _ in range(2)]
    check_rotation(x, suh, 384, variant)


@pytest.mark.parametrize("width", [1, 100, 128, 129, 2200])
def test_launch_rotate_input_extends_with_zeros(device, width):
    padded = -(-width // 128) * 128
    suh = (torch.randn(padded).sign() * (0.01 + torch.rand(padded))).half()
    check_rotation(torch.randn(2, width).to(device), [suh.to(device)], padded, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("magnitude", [1e-28, 1e-20, 1e-3, 1e5, 1e20, 3e38])
def test_launch_rotate_input_of_any_magnitude(device, dtype, magnitude):
    x = (torch.rand(2, 256) * 2 - 1).double() * magnitude
    x[1] /= 1e3
    check_rotation(x.to(dtype).to(device), [(torch.randn(256) * 0.02).half().to(device)], 256, 2)
    check_rotation(x.to(dtype).to(device), [torch.full((256,), 65504.0).half().to(device)], 256, 2)


def test_launch_rotate_input_with_rows_that_have_nothing_in_common(device):
    x = torch.randn(5, 256)
    x[1], x[3] = 0.0, 0.0
    x[3, 200] = 1e30
    x[4, 7] = float("nan")
    suh = torch.randn(256).half()
    suh[200] = 0.0
    xh, exponents = launch_rotate_input(x.to(device), [suh.to(device)], 256, 0)
    alone, exponent = launch_rotate_input(x[2:3].to(device), [suh.to(device)], 256, 0)
    assert torch.equal(xh[:, 2:3], alone)
    assert torch.equal(exponents[:, 2:3], exponent)
    assert not xh[0, 1].any()
    assert not xh[0, 3].any()  # a large value under a scale of zero is zero, not NaN
    assert torch.isfinite(xh[0, :4]).all()
    assert not torch.isfinite(xh[0, 4, :128]).any()
    assert torch.isfinite(xh[0, 4, 128:]).all()


def test_launch_rotate_input_takes_column_slices(device):
    wide = torch.randn(4, 3 * 256).to(device)
    suh = torch.randn(256).half().to(device)
    sliced, copied = (launch_rotate_input(x, [suh], 256, 0) for x in (wide[:, 256:512], wide[:, 256:512].contiguous()))
    assert torch.equal(sliced[0], copied[0])
    assert torch.equal(sliced[1], copied[1])


def test_rounded_rows_keep_half_precision(device):
    """A row that fp16 could hold as it is loses nothing to the scaling: the error stays that of one rounding."""
    x, suh = torch.randn(8, 512), torch.randn(512).sign().half()
    xh, exponents = launch_rotate_input(x.to(device), [suh.to(device)], 512, 0)
    got = torch.ldexp(xh[0].double().cpu(), exponents[0].double().cpu()[:, None])
    exact = reference.rotate(x.double() * suh.double())
    assert ((got - exact).norm() / exact.norm()).item() < rounding(torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [128, 6144, 18432])
@pytest.mark.parametrize("rows", [1, 300])
def test_launch_rotate_input_of_large_shapes(rows, padded):
    x = torch.randn(rows, padded, dtype=torch.bfloat16, device="cuda")
    suh = [(0.02 * torch.randn(padded)).half().cuda() for _ in range(3)]
    for variant in range(4):
        check_rotation(x, suh, padded, variant)
