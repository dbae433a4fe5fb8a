import pytest
import torch
from rounding import EPS, INTERPRETED, rounding

from exl3_triton.ops._dispatch import override_backend
from exl3_triton.ops.norm import _add_rms_norm_op, _rms_norm_op, add_rms_norm, rms_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def expected(x, weight, eps):
    x = x.double().cpu()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double().cpu()


def assert_rounded(out, exact):
    """One rounding to the output's dtype (half a step) and a few fp32 roundings before it."""
    assert exact.abs().max() > 0
    error = (out.double().cpu() - exact).abs()
    assert (error <= (rounding(out.dtype) + 8 * EPS[torch.float32]) * exact.abs() + 1e-7).all(), error.max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 96), (1, 1), (7, 16), (33, 128), (4, 2048), (2, 9000)])
def test_rms_norm(shape, dtype, device, triton_backend):
    x = (torch.randn(shape) * 3).to(dtype).to(device)
    weight = (torch.randn(shape[-1]) + 1).to(dtype).to(device)
    out = rms_norm(x, weight, 1e-5)
    assert out.shape == x.shape
    assert out.dtype == dtype
    assert_rounded(out, expected(x, weight, 1e-5))


def test_rms_norm_of_column_slices_and_other_dtypes(device, triton_backend):
    fused = torch.randn(6, 100, device=device, dtype=torch.bfloat16)
    weight = torch.randn(64, device=device)
    for part in (fused[:, :64], fused[:, 36:], fused[:, 3:67], fused.t()[:64].t()[::2]):
        out = rms_norm(part, weight, 1e-6, out_dtype=torch.float32)
        assert out.is_contiguous()
        assert_rounded(out, expected(part, weight, 1e-6))


def test_rms_norm_of_nothing(device, triton_backend):
    assert rms_norm(torch.randn(0, 64, device=device), torch.ones(64, device=device), 1e-6).shape == (0, 64)


def test_rms_norm_row_does_not_depend_on_the_others(device, triton_backend):
    x = torch.randn(37, 96, device=device)
    weight = torch.randn(96, device=device)
    together = rms_norm(x, weight, 1e-6)
    for row in (0, 8, 36):
        assert torch.equal(together[row], rms_norm(x[row : row + 1], weight, 1e-6)[0])


@pytest.mark.parametrize(
    ("residual_dtype", "dtype"), [(a, b) for a in DTYPES for b in DTYPES if torch.float32 in (a, b) or a == b]
)
@pytest.mark.parametrize("shape", [(5, 96), (3, 2048), (2, 9000)])
def test_add_rms_norm(shape, residual_dtype, dtype, device, triton_backend):
    residual = (torch.randn(shape) * 4).to(residual_dtype).to(device)
    x = torch.randn(shape).to(dtype).to(device)
    weight = torch.randn(shape[1]).to(device)
    exact = (residual.float() + x.float()).to(residual_dtype)
    out = add_rms_norm(residual, x, weight, 1e-5)
    if INTERPRETED and residual_dtype == torch.bfloat16:
        torch.testing.assert_close(residual, exact, rtol=EPS[torch.bfloat16], atol=0)
    else:
        assert torch.equal(residual, exact)
    assert out.dtype == dtype
    assert_rounded(out, expected(residual, weight, 1e-5))


def test_add_rms_norm_keeps_large_bf16_residuals(device, triton_backend):
    residual = (torch.randn(4, 256) * 1e5).bfloat16().to(device)
    out = add_rms_norm(residual, torch.randn(4, 256).bfloat16().to(device), torch.ones(256, device=device), 1e-5)
    assert residual.abs().max() > 65504
    assert_rounded(out, expected(residual, torch.ones(256), 1e-5))


def test_add_rms_norm_writes_a_strided_residual(device, triton_backend):
    wide = torch.randn(5, 200, device=device)
    before, x, weight = wide.clone(), torch.randn(5, 96, device=device), torch.randn(96, device=device)
    out = add_rms_norm(wide[:, 100:196], x, weight, 1e-6)
    before[:, 100:196] += x
    assert torch.equal(wide, before)
    assert_rounded(out, expected(before[:, 100:196], weight, 1e-6))


def test_norms_refuse_what_they_do_not_take():
    x, weight = torch.randn(3, 64), torch.ones(64)
    with pytest.raises(ValueError, match=r"weight \[32\] for x \[3, 64\]"):
        rms_norm(x, weight[:32], 1e-6)
    with pytest.raises(ValueError, match="x is torch.int32"):
        rms_norm(x.int(), weight, 1e-6)
    with pytest.raises(ValueError, match="out_dtype=torch.int8"):
        rms_norm(x, weight, 1e-6, out_dtype=torch.int8)
    with pytest.raises(ValueError, match="required the same"):
        add_rms_norm(x[:2], x, weight, 1e-6)
    with pytest.raises(ValueError, match="contiguous"):
        add_rms_norm(torch.randn(64, 3).t(), x, weight, 1e-6)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_norms_are_sound_custom_ops(backend, device):
    x, weight = torch.randn(4, 96, device=device, dtype=torch.float16), torch.randn(96, device=device)
    with override_backend(backend):
        torch.library.opcheck(_rms_norm_op, (x, weight, 1e-6, torch.float32))
        torch.library.opcheck(_add_rms_norm_op, (torch.randn(4, 96, device=device), x, weight, 1e-6, torch.float16))
