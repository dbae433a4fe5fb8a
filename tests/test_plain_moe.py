"""`plain_moe`: unquantized experts against a float64 loop, empty input, refusals, opcheck."""

from __future__ import annotations

import pytest
import torch

from exl3_triton import ops


def case(rows, device="cpu", dtype=torch.float32):
    x = torch.randn(rows, 24, dtype=dtype)
    gate, up = (torch.randn(6, 40, 24, dtype=dtype) / 5 for _ in range(2))
    down = torch.randn(6, 24, 40, dtype=dtype) / 6
    ids = torch.rand(rows, 6).topk(2).indices.to(torch.int32)
    return tuple(each.to(device) for each in (x, gate, up, down, ids, torch.rand(rows, 2)))


@pytest.mark.parametrize("rows", [0, 1, 13])
def test_plain_moe_against_float64(device, rows):
    x, gate, up, down, ids, weights = case(rows, device)
    expected = torch.zeros(rows, 24, dtype=torch.float64, device=device)
    for t in range(rows):
        for e, w in zip(ids[t].tolist(), weights[t].double()):
            g, u = gate[e].double() @ x[t].double(), up[e].double() @ x[t].double()
            expected[t] += w * (down[e].double() @ (g * g.sigmoid() * u))
    actual = ops.plain_moe(x, gate, up, down, ids, weights)
    assert actual.shape == (rows, 24)
    if rows:
        assert expected.norm() > 0
        # three products of up to 40 terms in fp32: a few times sqrt(40) 2^-24
        assert (actual - expected).norm() / expected.norm() < 10 * 40**0.5 * 2**-24


def test_plain_moe_passes_opcheck(device):
    torch.library.opcheck(torch.ops.exl3_triton.plain_moe.default, case(5, device))


def test_plain_moe_refuses_wrong_shapes():
    x, gate, up, down, ids, weights = case(3)
    with pytest.raises(ValueError, match="plain_moe"):
        ops.plain_moe(x[:, :-1], gate, up, down, ids, weights)
    with pytest.raises(ValueError, match="plain_moe"):
        ops.plain_moe(x, gate, up, down, ids, weights[:, :1])
