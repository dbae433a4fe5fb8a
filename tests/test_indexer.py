import math

import pytest
import torch
from paged import paged
from rounding import EPS

from exl3_triton.ops import indexer
from exl3_triton.ops._dispatch import override_backend
from exl3_triton.ops.indexer import _index_select_op, _launch_index_select, _select_rows, index_select

# Triton's interpreter multiplies the bits of bf16, so bf16 products are tested on a GPU only
DTYPES = list(EPS)


def exact_scores(q, weights, batch, t):
    """float64 scores of token t for the positions that it may see."""
    keys = batch.contexts[int(batch.sequence[t])][: int(batch.positions[t]) + 1]
    return (q[t].double().cpu() @ keys.T).clamp(min=0).mul(weights[t].double().cpu()[:, None]).sum(0)


def best(scores, topk):
    """Positions of the topk largest, lowest first among equals, ascending."""
    order = sorted(range(len(scores)), key=lambda s: (-scores[s], s))[:topk]
    return sorted(order) + [-1] * (topk - len(order))


def select(q, weights, batch, topk, **options):
    return index_select(
        q, weights, batch.cache, batch.block_table, batch.sequence, batch.positions, topk=topk,
        **{"max_context": batch.max_context, **options},
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "dim", "lengths", "queries", "topk"),
    [
        (16, 16, [30, 200, 5], [3, 2, 5], 8),
        (16, 128, [90], [4], 64),
        (32, 24, [700, 64], [1, 1], 33),
        *[
            pytest.param(*case, marks=pytest.mark.gpu)
            for case in ((32, 128, [40_000, 3000], [2, 9], 2048), (64, 128, [5000], [70], 2048))
        ],
    ],
)
def test_index_select(heads, dim, lengths, queries, topk, dtype, device, triton_backend):
    batch = paged(lengths, queries, dim, dtype, device, padding=1)
    q = torch.randn(len(batch.positions), heads, dim).to(dtype).to(device)
    weights = torch.randn(len(batch.positions), heads).to(device)
    out = select(q, weights, batch, topk)
    assert out.dtype == torch.int32
    assert (out[-1] == -1).all()
    for t in range(len(out) - 1):
        count = min(topk, int(batch.positions[t]) + 1)
        chosen = out[t, :count].long().cpu()
        assert (out[t, count:] == -1).all()
        assert (chosen.diff() > 0).all()
        scores = exact_scores(q, weights, batch, t)
        assert scores.abs().max() > 0
        left = torch.ones(len(scores), dtype=torch.bool)
        left[chosen] = False
        # products of 16-bit values are exact in fp32, sums are off by a few roundings of their largest partial sum
        slack = EPS[torch.float32] * dim * weights[t].abs().sum().item() * 4
        assert not left.any() or scores[chosen].min() >= scores[left].max() - slack


@pytest.mark.parametrize("topk", [1, 7, 60])
def test_index_select_takes_the_lowest_positions_of_equal_scores(topk, device, triton_backend):
    """Small integers: scores are exact, most are equal, and heads of negative weight make -0.0 of nothing."""
    batch = paged([150, 70], [4, 3], 16, torch.float32, device)
    batch = batch._replace(
        cache=batch.cache.mul(0.7).round(), contexts=[context.float().mul(0.7).round().double() for context in batch.contexts]
    )
    q, weights = torch.randint(-1, 2, (7, 16, 16), device=device).float(), torch.randint(-2, 2, (7, 16), device=device).float()
    weights[1], weights[2] = -1, 0  # all scores <= 0; all zero, of either sign
    out = select(q, weights, batch, topk)
    for t in range(7):
        assert out[t].tolist() == best(exact_scores(q, weights, batch, t).tolist(), topk)


def test_index_select_counts_nan_as_the_least(device, triton_backend):
    batch = paged([100], [1], 16, torch.float32, device)
    q, weights = torch.randn(1, 16, 16, device=device), torch.rand(1, 16, device=device)
    lost = [0, 17, 64, 99]
    for position in lost:
        batch.cache[batch.block_table[0, position // 64], position % 64] = float("nan")
    scores = exact_scores(q, weights, batch, 0)
    scores[lost] = -math.inf
    assert select(q, weights, batch, 96)[0].tolist() == best(scores.tolist(), 96)
    assert select(q, weights, batch, 98)[0].tolist() == sorted(best(scores.tolist(), 96) + lost[:2])


def test_index_select_of_everything_when_contexts_are_short(device, triton_backend):
    batch = paged([9, 3], [4, 1], 16, torch.float16, device, padding=1)
    q, weights = torch.randn(6, 16, 16, device=device).half(), torch.randn(6, 16, device=device)
    for max_context in (9, 12, 500):
        out = select(q, weights, batch, 12, max_context=max_context)
        for t, position in enumerate(batch.positions.tolist()):
            assert out[t].tolist() == [*range(position + 1), *[-1] * (11 - position)]


def test_index_select_row_does_not_depend_on_the_others(device, triton_backend):
    batch = paged([400, 90], [5, 3], 128, torch.float16, device)
    q, weights = torch.randn(8, 16, 128, device=device).half(), torch.randn(8, 16, device=device)
    args = (q, weights, batch.cache, batch.block_table, batch.sequence, batch.positions, 20)
    together = select(q, weights, batch, 20)
    assert torch.equal(together, select(q, weights, batch, 20, max_context=5000))
    assert torch.equal(together, _launch_index_select(*args, 400, scratch_scores=1200))  # three tokens at a time
    for t in range(8):
        one = (
            q[t : t + 1],
            weights[t : t + 1],
            batch.cache,
            batch.block_table,
            batch.sequence[t : t + 1],
            batch.positions[t : t + 1],
        )
        assert torch.equal(together[t], index_select(*one, topk=20, max_context=400)[0])


def select_from(scores, positions, topk):
    out = torch.empty(len(scores), topk, dtype=torch.int32, device=scores.device)
    _select_rows(scores, positions, 0, topk, out)
    return out


@pytest.mark.parametrize(
    ("width", "topk", "cases"),
    [(3000, 16, 6), (500, 100, 6), (250, 40, 6), pytest.param(131_072, 2048, 300, marks=pytest.mark.gpu)],
)
def test_selection_equals_topk(width, topk, cases, device, monkeypatch):
    """Distinct scores of both signs; contexts of one or more segments."""
    if width < 10_000:
        monkeypatch.setattr(indexer, "SEGMENT", 256)
    for case in range(cases):
        n = width if case == 0 else int(torch.randint(topk + 1, width + 1, ()))
        scores = (torch.randperm(width, device=device).float() - width // 2) * 1.5
        position = torch.tensor([n - 1], device=device)
        out = select_from(scores[None], position, topk)[0].long()
        assert torch.equal(out, scores[:n].topk(topk).indices.sort().values)


@pytest.mark.parametrize("levels", ["one", "several"])
def test_selection_with_ties_across_segments(levels, device, monkeypatch):
    monkeypatch.setattr(indexer, "SEGMENT", 128 if levels == "several" else 4096)
    scores = torch.randint(-3, 3, (4, 1500), device=device).float() * torch.where(
        torch.rand(4, 1500, device=device) < 0.5, -1.0, 1.0
    )
    positions = torch.tensor([1499, 700, 31, 1000], device=device)
    out = select_from(scores, positions, 32)
    for row, position in enumerate(positions.tolist()):
        assert out[row].tolist() == best(scores[row, : position + 1].tolist(), 32)


def test_index_select_of_no_tokens(device, triton_backend):
    batch = paged([100], [0], 16, torch.float16, device)
    q, weights = torch.randn(0, 16, 16, device=device).half(), torch.randn(0, 16, device=device)
    assert select(q, weights, batch, 8).shape == (0, 8)


def test_index_select_refuses_what_it_does_not_take():
    batch = paged([9], [2], 16, torch.float32, "cpu")
    q, weights = torch.randn(2, 16, 16), torch.randn(2, 16)
    with pytest.raises(ValueError, match=r"weights torch.float16 \[2, 16\]"):
        select(q, weights.half(), batch, 4)
    with pytest.raises(ValueError, match="topk=0"):
        select(q, weights, batch, 0)
    with pytest.raises(ValueError, match=r"required floats \[pages, 64, 8\]"):
        select(q[..., :8], weights, batch, 4)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_index_select_is_a_sound_custom_op(backend, device):
    batch = paged([70, 9], [1, 1], 16, torch.float32, device)
    q, weights = torch.randn(2, 16, 16, device=device), torch.randn(2, 16, device=device)
    args = (q, weights, batch.cache, batch.block_table, batch.sequence, batch.positions)
    with override_backend(backend):
        torch.library.opcheck(_index_select_op, (*args, 8, 70))
        torch.library.opcheck(_index_select_op, (*args, 80, 70))
