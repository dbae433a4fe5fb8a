import pytest
import torch
from rounding import EPS, rounding

from exl3_triton.ops._dispatch import override_backend
from exl3_triton.ops.swiglu import _swiglu_op, swiglu


def expected(gate, up, limit=None):
    gate, up = gate.double().cpu(), up.double().cpu()
    if limit is not None:
        gate, up = torch.minimum(gate, torch.tensor(limit)), up.clip(-limit, limit)
    return gate / (1 + torch.exp(-gate)) * up


def assert_rounded(out, exact):
    """One rounding to the output's dtype, and fp32 ones before (of the exponential's argument too: 2^-24 |gate|)."""
    assert exact.abs().max() > 0
    error = (out.double().cpu() - exact).abs()
    assert (error <= (rounding(out.dtype) + 2e-5) * exact.abs() + 1e-7).all(), error.max()


@pytest.mark.parametrize("dtype", list(EPS))
@pytest.mark.parametrize("shape", [(3, 2, 40), (1, 1), (5, 1024), (2, 1500)])
def test_swiglu(shape, dtype, device, triton_backend):
    gate, up = ((torch.randn(shape) * 4).to(dtype).to(device) for _ in range(2))
    out = swiglu(gate, up)
    assert out.dtype == dtype
    assert_rounded(out, expected(gate, up))


def test_swiglu_limit_clamps_gate_above_and_up_on_both_sides(device, triton_backend):
    gate, up = (torch.randn(16, 64, device=device) * 20 for _ in range(2))
    assert all((x > 7).any() and (x < -7).any() for x in (gate, up))
    out = swiglu(gate, up, limit=7.0)
    assert_rounded(out, expected(gate, up, 7.0))
    assert not torch.equal(out, swiglu(gate, up))


@pytest.mark.filterwarnings("ignore:overflow")  # exp of -gate, where the result is 0
def test_swiglu_of_halves_with_a_wider_output(device, triton_backend):
    both = torch.randn(6, 192, device=device).half() * 100
    out = swiglu(both[:, :96], both[:, 96:], out_dtype=torch.float32)
    assert_rounded(out, expected(both[:, :96], both[:, 96:]))
    assert torch.isfinite(out).all()


def test_swiglu_of_nothing(device, triton_backend):
    assert swiglu(torch.randn(0, 8, device=device), torch.randn(0, 8, device=device)).shape == (0, 8)


def test_swiglu_refuses_what_it_does_not_take():
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match="required the same"):
        swiglu(x, x[:1])
    with pytest.raises(ValueError, match=r"limit=-1\.0: required positive"):
        swiglu(x, x, limit=-1.0)
    with pytest.raises(ValueError, match="up is torch.int64"):
        swiglu(x, x.long())


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_swiglu_is_a_sound_custom_op(backend, device):
    gate, up = (torch.randn(4, 48, device=device).half() for _ in range(2))
    with override_backend(backend):
        torch.library.opcheck(_swiglu_op, (gate, up, None, torch.float32))
        torch.library.opcheck(_swiglu_op, (gate, up, 1.5, torch.float16))
