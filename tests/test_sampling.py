"""Sampling: distribution against exact probabilities, filters against per-row Python in float64, seeds, errors."""

from __future__ import annotations

import math

import pytest
import torch

from exl3_triton.model.sampling import SamplingBatch, SamplingParams, _keep, gumbel_noise, resolve_seed, sample


def draw(logits, params, *, positions=None, seen=None, seeds=None):
    """`sample` with one SamplingParams for all rows, or one per row."""
    rows = logits.shape[0]
    listed = [params] * rows if isinstance(params, SamplingParams) else params
    seeds = [resolve_seed(p) for p in listed] if seeds is None else seeds
    positions = torch.arange(rows) if positions is None else positions
    return sample(logits, SamplingBatch.from_params(listed, seeds), positions, seen=seen)


def chi_square_bound(degrees: int, sigmas: float = 4.75) -> float:
    """Upper quantile of the chi-square distribution (Wilson and Hilferty, 1931); 4.75 sigmas leave about 1e-6."""
    ninth = 2 / (9 * degrees)
    return degrees * (1 - ninth + sigmas * math.sqrt(ninth)) ** 3


def allowed_ids(logits, params: SamplingParams) -> tuple[set[int], float]:
    """Ids that pass the filters, one by one in float64, and how near a cumulated probability came to top_p."""
    scaled = [float(x) / params.temperature for x in logits.tolist()]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if params.top_k:
        order = order[: params.top_k]
    weights = [math.exp(scaled[i] - scaled[order[0]]) for i in order]
    total = math.fsum(weights)
    kept, reached, margin = [], 0.0, 1.0
    for i, weight in zip(order, weights):
        if params.top_p < 1:
            margin = min(margin, abs(reached - params.top_p))
            if reached >= params.top_p:
                break
        kept.append(i)
        reached += weight / total
    best = scaled[order[0]]
    return {i for i in kept if math.exp(scaled[i] - best) >= params.min_p}, margin


FILTERS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_k=7),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=0.9, min_p=0.02),
    SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.02),
]


@pytest.mark.parametrize("params", FILTERS, ids=["plain", "cool", "top_k", "top_p", "min_p", "all"])
@pytest.mark.parametrize("vary", ["position", "seed"])
def test_sample_distribution(params, vary):
    torch.manual_seed(11)
    draws, vocab = 40_000, 40
    logits = torch.randn(vocab) * 2
    keep, _ = allowed_ids(logits, params)
    exact = torch.full((vocab,), -math.inf, dtype=torch.float64)
    ids = torch.tensor(sorted(keep))
    exact[ids] = logits[ids].double() / params.temperature
    exact = exact.softmax(0)

    counting = torch.arange(draws)
    seeds = counting.tolist() if vary == "seed" else [1234] * draws
    positions = counting if vary == "position" else torch.full((draws,), 17)
    tokens = draw(logits.expand(draws, -1), params, positions=positions, seeds=seeds).tokens
    counts = torch.bincount(tokens, minlength=vocab).double()
    assert counts[exact == 0].sum() == 0
    # the chi-square approximation wants about 5 expected draws a cell: rarer ids are one cell together
    expected = exact * draws
    common, rare = expected >= 5, (expected < 5) & (expected > 0)
    observed, wanted = counts[common].tolist(), expected[common].tolist()
    if expected[rare].sum() >= 5:
        observed.append(counts[rare].sum().item())
        wanted.append(expected[rare].sum().item())
    assert len(wanted) > 2
    statistic = sum((o - w) ** 2 / w for o, w in zip(observed, wanted))
    assert statistic < chi_square_bound(len(wanted) - 1)


def test_gumbel_noise_distribution():
    noise = gumbel_noise(torch.tensor([5, 6]), torch.tensor([0, 0]), 200_000)
    assert torch.isfinite(noise).all()
    for row in noise.double():
        ordered = row.sort().values
        exact = torch.exp(-torch.exp(-ordered))
        steps = torch.arange(1, len(row) + 1, dtype=torch.float64) / len(row)
        # Kolmogorov-Smirnov: P(sqrt(n) D > 2.7) is about 1e-6
        assert (exact - steps).abs().max() * math.sqrt(len(row)) < 2.7
    a, b = noise.double().exp().neg().exp()
    # correlation of independent rows is about normal with deviation 1 / sqrt(n)
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 5 / math.sqrt(len(a))


@pytest.mark.parametrize("kind", ["normal", "ties", "peaked"])
def test_sample_filters_match_rows_alone(kind):
    torch.manual_seed(3)
    rows, vocab = 64, 97
    logits = torch.randn(rows, vocab) * (8 if kind == "peaked" else 2)
    if kind == "ties":
        logits = logits.round()
    generator = torch.Generator().manual_seed(4)
    params = []
    for _ in range(rows):
        a, b, c, d = torch.rand(4, generator=generator).tolist()
        params.append(
            SamplingParams(
                temperature=0.3 + 2 * a,
                top_k=int(b * vocab) if b > 0.3 else 0,
                top_p=c if c > 0.3 else 1.0,
                min_p=d / 10 if d > 0.5 else 0.0,
            )
        )
    batch = SamplingBatch.from_params(params, range(rows))
    scores = (logits - logits.amax(1, keepdim=True)) / batch.temperature[:, None]
    kept = _keep(scores, batch)
    compared = 0
    for row in range(rows):
        wanted, margin = allowed_ids(logits[row], params[row])
        # a probability cumulated in fp32 may fall on the other side of top_p when it comes this near
        if margin > 1e-5:
            assert set(kept[row].nonzero()[:, 0].tolist()) == wanted
            compared += 1
    assert compared > rows * 0.9
    for position in range(50):
        tokens = draw(logits, params, positions=torch.full((rows,), position), seeds=range(rows)).tokens
        assert kept[torch.arange(rows), tokens].all()


def test_sample_greedy_takes_lowest_of_ties():
    torch.manual_seed(0)
    logits = torch.randn(5, 300)
    logits[:, 40] = logits[:, 200] = 9.0
    assert draw(logits, SamplingParams()).tokens.tolist() == [40] * 5
    # beside a sampled row, greedy rows go through the same arithmetic and choose the same
    mixed = [SamplingParams(), SamplingParams(temperature=5.0, top_p=0.5), *[SamplingParams()] * 3]
    tokens = draw(logits, mixed).tokens.tolist()
    assert [tokens[i] for i in (0, 2, 3, 4)] == [40] * 4


def test_sample_tiny_temperature_is_greedy():
    torch.manual_seed(1)
    logits = torch.randn(64, 100) * 50
    assert torch.equal(draw(logits, SamplingParams(temperature=1e-30, seed=1)).tokens, logits.argmax(1))


def test_sample_does_not_depend_on_neighbours():
    torch.manual_seed(7)
    rows, vocab = 9, 211
    logits = torch.randn(rows, vocab) * 3
    params = [
        SamplingParams(seed=1),
        SamplingParams(temperature=1.0, seed=2),
        SamplingParams(temperature=0.8, top_k=5, seed=3),
        SamplingParams(temperature=1.2, top_p=0.7, seed=4),
        SamplingParams(temperature=1.2, min_p=0.05, seed=5),
        SamplingParams(temperature=1.0, repetition_penalty=1.7, seed=6),
        SamplingParams(repetition_penalty=1.7, seed=7),
        SamplingParams(temperature=1.0, logprobs=3, seed=8),
        SamplingParams(temperature=2.0, seed=2**63 - 1),
    ]
    seen = torch.rand(rows, vocab) < 0.3
    for step in range(30):
        positions = torch.arange(rows) * 100 + step
        together = draw(logits, params, positions=positions, seen=seen).tokens
        again = draw(logits.flip(0), params[::-1], positions=positions.flip(0), seen=seen.flip(0)).tokens.flip(0)
        assert torch.equal(together, again)
        for row in range(rows):
            one = slice(row, row + 1)
            alone = draw(logits[one], [params[row]], positions=positions[one], seen=seen[one]).tokens
            assert alone.item() == together[row].item()


def test_sample_seeds():
    torch.manual_seed(2)
    logits = torch.randn(1, 500).expand(200, -1)
    hot = SamplingParams(temperature=3.0, seed=9)
    assert torch.equal(draw(logits, hot).tokens, draw(logits, hot).tokens)
    assert not torch.equal(draw(logits, hot).tokens, draw(logits, SamplingParams(temperature=3.0, seed=10)).tokens)
    assert len(set(draw(logits, hot).tokens.tolist())) > 50  # positions differ, so does the noise
    assert resolve_seed(hot) == 9
    fresh = {resolve_seed(SamplingParams(temperature=1.0)) for _ in range(20)}
    assert len(fresh) == 20
    assert all(0 <= seed < 2**63 for seed in fresh)


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_sample_repetition_penalty(penalty):
    torch.manual_seed(5)
    logits = torch.randn(40, 60)
    seen = torch.rand(40, 60) < 0.5
    wanted = logits.clone()
    for row, column in seen.nonzero().tolist():
        value = logits[row, column].item()
        wanted[row, column] = value / penalty if value > 0 else value * penalty
    tokens = draw(logits, SamplingParams(repetition_penalty=penalty), seen=seen).tokens
    assert torch.equal(tokens, wanted.argmax(1))
    assert not torch.equal(tokens, logits.argmax(1))
    with pytest.raises(ValueError, match="seen: found None"):
        draw(logits, SamplingParams(repetition_penalty=penalty))


def test_sample_logprobs():
    torch.manual_seed(6)
    logits = torch.randn(8, 120) * 4
    params = SamplingParams(temperature=0.5, top_k=3, logprobs=5, seed=1, repetition_penalty=1.2)
    sampled = draw(logits, params, seen=torch.rand(8, 120) < 0.5)
    exact = logits.double().log_softmax(1)
    assert sampled.top_ids.shape == (8, 5)
    best = exact.topk(5, dim=1)
    assert torch.equal(sampled.top_ids, best.indices)
    # fp32 log-softmax of 120 logits below 20 in magnitude: a few ulp of 20
    assert (sampled.top_logprobs - best.values).abs().max() < 1e-5
    assert (sampled.logprobs - exact.gather(1, sampled.tokens[:, None])[:, 0]).abs().max() < 1e-5
    assert draw(logits, SamplingParams()).logprobs is None
    zero = draw(logits, SamplingParams(logprobs=0))
    assert zero.top_ids.shape == (8, 0)
    assert (zero.logprobs - exact.amax(1)).abs().max() < 1e-5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sample_marks_unusable_rows(temperature):
    torch.manual_seed(8)
    logits = torch.randn(5, 30)
    logits[1, 7] = math.nan
    logits[2, 3] = math.inf
    logits[3] = -math.inf
    logits[4, :29] = -math.inf
    tokens = draw(logits, SamplingParams(temperature=temperature, top_p=0.9, logprobs=2, seed=0)).tokens.tolist()
    assert tokens[0] >= 0
    assert tokens[1:] == [-1, -1, -1, 29]


@pytest.mark.gpu
def test_sample_on_gpu_equals_cpu_without_host_copies():
    torch.manual_seed(9)
    rows, vocab = 64, 5000
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.9, top_k=50, top_p=0.9, min_p=0.01),
        SamplingParams(temperature=1.0, repetition_penalty=1.2, logprobs=4),
        SamplingParams(temperature=2.0),
    ] * (rows // 4)
    logits, positions, seen = torch.randn(rows, vocab) * 3, torch.arange(rows), torch.rand(rows, vocab) < 0.1
    wanted = draw(logits, params, positions=positions, seen=seen, seeds=range(rows))
    batch = SamplingBatch.from_params(params, range(rows), "cuda")
    arguments = logits.cuda(), batch, positions.cuda()
    seen = seen.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = sample(*arguments, seen=seen)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.tokens.cpu(), wanted.tokens)
    assert torch.equal(found.top_ids.cpu(), wanted.top_ids)
    assert torch.allclose(found.logprobs.cpu(), wanted.logprobs, atol=1e-5)


@pytest.mark.parametrize(
    ("logits", "positions", "match"),
    [
        (torch.ones(2, 3, dtype=torch.bfloat16), torch.arange(2), r"logits: found torch.bfloat16 \(2, 3\)"),
        (torch.ones(3), torch.arange(2), "logits: found"),
        (torch.ones(2, 3), torch.arange(3), "positions: found"),
    ],
)
def test_sample_refuses(logits, positions, match):
    batch = SamplingBatch.from_params([SamplingParams()] * 2, [0, 0])
    with pytest.raises(ValueError, match=match):
        sample(logits, batch, positions)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("max_tokens", None),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("logprobs", -1),
        ("logprobs", True),
    ],
)
def test_sampling_params_refuses(option, value):
    with pytest.raises(ValueError, match=rf"^{option}: found .*required"):
        SamplingParams(**{option: value})


def test_sampling_params_normalises():
    params = SamplingParams(stop="end", stop_token_ids=[3, 4], temperature=1, top_p=1)
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert isinstance(params.temperature, float)
    assert SamplingParams().greedy
    assert not params.greedy
