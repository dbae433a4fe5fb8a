import pytest
import torch
from rounding import EPS, rounding

from exl3_triton.ops._dispatch import override_backend
from exl3_triton.ops.rope import _rope_op, rope


def angles(length, width, theta=1e4):
    return torch.arange(length, dtype=torch.float64)[:, None] * theta ** (
        -torch.arange(0, width, 2, dtype=torch.float64) / width
    )


def make_table(length, width, device="cpu"):
    angle = angles(length, width)
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float().to(device)


def expected(x, positions, width, interleaved, start):
    """By complex multiplication, in float64."""
    x = x.double().cpu().clone()
    turn = torch.polar(torch.ones(()).double(), angles(int(positions.max()) + 1, width))[positions.clamp(min=0).cpu()][:, None]
    part = x[..., start : start + width]
    first, second = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, dim=-1)
    turned = torch.complex(first.contiguous(), second.contiguous()) * turn
    if interleaved:
        part[..., 0::2], part[..., 1::2] = turned.real, turned.imag
    else:
        part[..., : width // 2], part[..., width // 2 :] = turned.real, turned.imag
    return x


@pytest.mark.parametrize("dtype", list(EPS))
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("heads", "dim", "width", "start"), [(4, 24, 8, 16), (1, 64, 64, 0), (3, 128, 64, 0), (5, 96, 32, 64), (2, 20, 12, 4)]
)
def test_rope(heads, dim, width, start, interleaved, dtype, device, triton_backend):
    x = torch.randn(7, heads, dim).to(dtype).to(device)
    positions = torch.tensor([0, 1, 2, 77, 299, 13, -1], device=device)
    out = rope(x, positions, make_table(300, width, device), interleaved=interleaved, start=start)
    exact = expected(x, positions, width, interleaved, start)
    # one rounding to the output's dtype; the table's fp32 entries are off by at most 2^-24 of a value of size <= |a| + |b|
    limit = rounding(dtype) * exact.abs() + 2**-22 * x.double().cpu().abs().amax()
    assert ((out.double().cpu() - exact).abs() <= limit).all()
    assert not torch.equal(out, x)
    kept = [d for d in range(dim) if not start <= d < start + width]
    assert torch.equal(out[..., kept], x[..., kept])


def test_rope_of_a_slice(device, triton_backend):
    projected = torch.randn(5, 3, 40, device=device)
    positions = torch.arange(5, device=device) * 3
    for part in (projected[..., 24:], projected[..., 1:17], projected[:, 1:, ::2]):
        before = part.clone()
        out = rope(part, positions, make_table(16, 8, device), interleaved=True, start=4)
        assert out.is_contiguous()
        torch.testing.assert_close(out.double().cpu(), expected(before, positions, 8, True, 4), rtol=0, atol=2e-6)
        assert torch.equal(part, before)


def test_rope_past_the_table_is_nan(device, triton_backend):
    out = rope(
        torch.randn(2, 1, 8, device=device), torch.tensor([3, 4], device=device), make_table(4, 8, device), interleaved=True
    )
    assert torch.isfinite(out[0]).all()
    assert out[1].isnan().all()


def test_rope_refuses_what_it_does_not_take():
    x, positions, table = torch.randn(3, 2, 16), torch.arange(3), make_table(8, 8)
    with pytest.raises(ValueError, match=r"required \[T, heads, D >= start \+ R\]"):
        rope(x, positions, table, interleaved=True, start=9)
    with pytest.raises(ValueError, match=r"positions is torch.int32 \[3\]: required torch.int64"):
        rope(x, positions.int(), table, interleaved=True)
    with pytest.raises(ValueError, match="table is torch.float16"):
        rope(x, positions, table.half(), interleaved=True)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_rope_is_a_sound_custom_op(backend, device):
    x = torch.randn(4, 3, 24, device=device)
    args = (x, torch.arange(4, device=device), make_table(8, 8, device), False, 8)
    with override_backend(backend):
        torch.library.opcheck(_rope_op, args)
