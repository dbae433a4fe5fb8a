import pytest
import torch
from rounding import INTERPRETED

from exl3_triton import reference
from exl3_triton.ops._dispatch import override_backend
from exl3_triton.ops.router import _router_op, router


def inputs(tokens, width, experts, dtype, device, bias=True):
    x = torch.randn(tokens, width, device=device).to(dtype)
    weight = torch.randn(experts, width, device=device) / width**0.5
    return x, weight, 0.5 * torch.randn(experts, device=device) if bias else None


def assert_routes(got, x, weight, bias, tolerance=1e-5, **options):
    """ids equal the float64 ones wherever float64 itself is sure (choice scores further apart than fp32 sums can err)."""
    exact_x, exact_weight, exact_bias = (None if t is None else t.double() for t in (x, weight, bias))
    weights, ids = reference.router(exact_x, exact_weight, exact_bias, **options)
    assert got[0].dtype == torch.float32
    assert got[1].dtype == torch.int32
    assert weights.norm() > 0 or x.shape[0] == 0
    sure = (got[1] == ids).all(-1)
    assert sure.float().mean() > 0.9 or x.shape[0] == 0
    assert torch.equal(got[1][sure], ids[sure])
    torch.testing.assert_close(got[0][sure].double(), weights[sure], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("experts", "options"),
    [
        (16, {"top_k": 4, "n_group": 4, "topk_group": 2, "scaling": 2.5}),
        (12, {"top_k": 3, "scoring": "softmax", "n_group": 3, "topk_group": 2, "norm_topk_prob": False}),
        (10, {"top_k": 8}),
        (1, {"top_k": 1}),
        (7, {"top_k": 2, "scoring": "softmax"}),
    ],
)
def test_router(experts, options, dtype, same, device, triton_backend):
    if same and INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of bf16")
    x, weight, bias = inputs(5, 200, experts, dtype, device, bias=options.get("scoring") != "softmax")
    weight = weight.to(dtype) if same else weight
    assert_routes(router(x, weight, bias, **options), x, weight, bias, **options)


def test_router_beyond_one_segment_and_one_token_block(device, triton_backend):
    x, weight, bias = inputs(66, 1100, 20, torch.bfloat16, device)
    assert_routes(router(x, weight, bias, top_k=4), x, weight, bias, top_k=4)
    assert_routes(router(x[:17], weight, bias, top_k=4), x[:17], weight, bias, top_k=4)


@pytest.mark.parametrize("always", [16, -1])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_router_with_a_column_for_a_shared_expert(top_k, always, device, triton_backend):
    """The other columns stay what they are; the last one has weight 1, whatever the scaling."""
    x, weight, bias = inputs(5, 200, 16, torch.float32, device)
    plain = router(x, weight, bias, top_k=top_k, scaling=2.5)
    weights, ids = router(x, weight, bias, top_k=top_k, scaling=2.5, always=always)
    assert weights.shape == ids.shape == (5, top_k + 1)
    assert torch.equal(weights[:, :top_k], plain[0])
    assert torch.equal(ids[:, :top_k], plain[1])
    assert (weights[:, top_k] == 1).all()
    assert (ids[:, top_k] == always).all()
    assert_routes(plain, x, weight, bias, top_k=top_k, scaling=2.5)


def test_router_breaks_ties_by_the_lowest_id(device, triton_backend):
    x = torch.randn(3, 64, device=device)
    weight = torch.zeros(8, 64, device=device)
    weights, ids = router(x, weight, None, top_k=3)
    assert ids.tolist() == [[0, 1, 2]] * 3
    torch.testing.assert_close(weights, torch.full((3, 3), 1 / 3, device=device))
    bias = torch.tensor([0, 1, 0, 1, 1, 0, 0, 0.5], device=device)
    assert router(x, weight, bias, top_k=5)[1].tolist() == [[1, 3, 4, 7, 0]] * 3
    grouped = router(x, weight, bias, top_k=3, n_group=4, topk_group=1)[1]  # groups (0,1) (2,3) (4,5) tie: the first one wins
    assert grouped[:, :2].tolist() == [[1, 0]] * 3


def test_router_takes_negative_choices_and_survives_nan(device, triton_backend):
    x, weight, _ = inputs(4, 96, 12, torch.float32, device)
    bias = torch.full((12,), -7.0, device=device)
    assert_routes(router(x, weight, bias, top_k=5, n_group=3, topk_group=1), x, weight, bias, top_k=5, n_group=3, topk_group=1)
    x[1] = float("nan")
    ids = router(x, weight, bias, top_k=5)[1]
    assert ((ids >= 0) & (ids < 12)).all()
    assert ids[1].unique().numel() == 5


def test_router_row_does_not_depend_on_the_others(device, triton_backend):
    x, weight, bias = inputs(9, 640, 16, torch.bfloat16, device)
    weights, ids = router(x, weight, bias, top_k=4)
    for row in range(0, 9, 4):
        alone = router(x[row : row + 1].clone(), weight, bias, top_k=4)
        assert torch.equal(alone[0][0], weights[row])
        assert torch.equal(alone[1][0], ids[row])


def test_router_of_nothing_and_of_strided_rows(device, triton_backend):
    x, weight, bias = inputs(3, 64, 8, torch.float16, device)
    assert [t.shape for t in router(x[:0], weight, bias, top_k=2)] == [(0, 2), (0, 2)]
    wide = torch.randn(3, 200, device=device, dtype=torch.float16)[:, 7:71]
    assert torch.equal(router(wide, weight, bias, top_k=2)[0], router(wide.contiguous(), weight, bias, top_k=2)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 17}, "top_k=17"),
        ({"scoring": "tanh"}, "tanh"),
        ({"n_group": 3}, "n_group=3"),
        ({"bias": torch.zeros(31)}, "31"),
        ({"always": -2}, "always=-2"),
        ({"x": torch.zeros(2, 65)}, "65"),
        ({"x": torch.zeros(2, 64, dtype=torch.int32)}, "int32"),
    ],
)
def test_router_refuses(change, message):
    good = {"x": torch.zeros(2, 64), "weight": torch.zeros(32, 64), "bias": torch.zeros(32), "top_k": 4}
    with pytest.raises(ValueError, match=message):
        router(**{**good, **change})


def test_router_opcheck(device):
    x, weight, bias = inputs(3, 64, 8, torch.float32, device)
    with override_backend("auto"):
        torch.library.opcheck(_router_op, (x, weight, bias, 2, "sigmoid", 2, 1, True, 1.0, None))
        torch.library.opcheck(_router_op, (x, weight, None, 2, "softmax", 1, 1, False, 1.0, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("experts", "groups", "kept"), [(256, 1, 1), (256, 8, 4), (160, 8, 3), (512, 1, 1)])
def test_router_at_size(experts, groups, kept, weight_dtype):
    x, weight, bias = inputs(300, 6144, experts, torch.bfloat16, "cuda")
    weight = weight.to(weight_dtype)
    options = {"top_k": 8, "n_group": groups, "topk_group": kept, "scaling": 2.5}
    together = router(x, weight, bias, **options)
    assert_routes(together, x, weight, bias, **options)
    for start, end in ((0, 1), (7, 64), (100, 165)):  # both launch shapes: bit for bit the same route
        part = router(x[start:end].clone(), weight, bias, **options)
        assert torch.equal(part[0], together[0][start:end])
        assert torch.equal(part[1], together[1][start:end])
