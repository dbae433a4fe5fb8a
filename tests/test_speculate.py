"""Speculative decoding: the same text as plain decoding, the right distribution, and exact bookkeeping of both caches."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from test_mtp import oracle_with_mtp
from test_runner import collect, mixed
from ties import moved_by_rounding

import exl3_triton
from exl3_triton.model.cache import Batch
from exl3_triton.model.runner import LLM
from exl3_triton.model.sampling import SamplingBatch, SamplingParams
from exl3_triton.model.speculate import NOTHING, SpeculationStats, Speculator, verify
from exl3_triton.ops._dispatch import override_backend
from exl3_triton.reference import PAGE

DEMO = exl3_triton.__path__[0] + "/demo"
PROMPTS = (
    "In the beginning", "It is a truth universally acknowledged, that", "And Moses said unto", "She was", "Emma", "The LORD",
    "Mr. Darcy", "Elizabeth walked to the window, and saw", "And it came to pass", "My dear", "He that", "There was no",
    "The house of", "I am sure you", "Behold, the king", "When they came", "Her sister", "Now the sons of", "It was",
    "We have",
)  # fmt: skip
# Plain and speculative decoding feed different numbers of rows to fp32 matrix products: logits differ by up to 1e-5, and a
# choice between two that are closer than this is a tie.
TIE = 1e-3


@pytest.fixture(scope="module")
def model():
    return exl3_triton.load(DEMO, progress=False, mtp=True)


@pytest.fixture(scope="module")
def tokenizer():
    return LLM(DEMO, progress=False).tokenizer


def check_greedy(model, tokenizer, prompts, plain, number, params, *, tie=TIE, **options):
    """Tokens as in `plain`; a difference must be a tie between the two tokens, and the ones behind it are not compared."""
    llm = LLM(model, tokenizer=tokenizer, speculate=number, **options)
    free = llm._allocator.available
    found = collect(llm.generate(prompts, params), len(prompts))[0]
    assert llm._allocator.available == free
    for prompt, tokens, expected in zip(prompts, found, plain):
        different = [index for index, pair in enumerate(zip(tokens, expected)) if pair[0] != pair[1]]
        if different:
            at = different[0]
            before = tokenizer.encode(prompt) + expected[:at]
            logits = model.logits(torch.tensor(before))[-1]
            margin = (logits[expected[at]] - logits[tokens[at]]).abs().item()
            print(f"{prompt!r}, token {at}: {tokens[at]} for {expected[at]}, logits {margin:.1e} apart")
            assert margin < tie or margin < 2 * moved_by_rounding(model, before)
        else:
            assert tokens == expected
    stats = llm.speculation
    # every sequence's first token comes from its prefill, and tokens behind a limit are never proposed
    assert stats.tokens == sum(map(len, found)) - len(prompts)
    assert stats.tokens == stats.steps + stats.accepted
    return stats


def plain_tokens(model, tokenizer, prompts, params):
    return collect(LLM(model, tokenizer=tokenizer, max_batch=20).generate(prompts, params), len(prompts))[0]


@pytest.fixture(scope="module")
def short(model, tokenizer):
    """Parameters of a short greedy text and what plain decoding makes of them."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    return params, plain_tokens(model, tokenizer, PROMPTS[:5], params)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_greedy_equals_plain(model, tokenizer, short, number):
    params, plain = short
    stats = check_greedy(model, tokenizer, PROMPTS[:5], plain, number, params, max_batch=3, cache_tokens=1000)
    # the demo's measured acceptance of a first draft is 0.60 to 0.62 on text; later drafts are kept less often
    assert stats.acceptance_rate > 0.25
    assert 1.3 < stats.mean_accepted_length <= number + 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_greedy_equals_plain_for_20_prompts_of_200_tokens(model, tokenizer, number):
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    plain = plain_tokens(model, tokenizer, PROMPTS, params)
    check_greedy(model, tokenizer, PROMPTS, plain, number, params, max_batch=8)


def test_greedy_equals_plain_where_the_indexer_selects(tokenizer):
    """index_topk 64, prompts around and above it: each verified position chooses for itself, rejected keys are overwritten."""
    sparse = exl3_triton.load(DEMO, progress=False, mtp=True, overrides={"index_topk": 64})
    prompts = [" ".join(PROMPTS[start:]) for start in (0, 8, 14)]
    assert [len(tokenizer.encode(prompt)) > 64 for prompt in prompts] == [True, False, False]
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    plain = plain_tokens(sparse, tokenizer, prompts, params)
    check_greedy(sparse, tokenizer, prompts, plain, 3, params, prefill_chunk=40)


def test_generate_with_everything_equals_plain(model, tokenizer):
    """Greedy rows with penalty, stop strings, limits and log-probabilities, beside a sampled one that joins and leaves."""
    params = [
        SamplingParams(max_tokens=30, repetition_penalty=1.3, logprobs=2),
        SamplingParams(max_tokens=40, stop="and", logprobs=0),
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=7, temperature=1.0, seed=3, top_k=20),
        SamplingParams(max_tokens=2),
        SamplingParams(max_tokens=25, stop=["the", "ing"], repetition_penalty=1.1),
    ]
    prompts = PROMPTS[: len(params)]
    outputs = [], []
    for found, number in zip(outputs, (0, 3)):
        llm = LLM(model, tokenizer=tokenizer, speculate=number, max_batch=3, prefill_chunk=5)
        found += [list(llm.generate(prompt, p)) for prompt, p in zip(prompts, params)]
        together = collect(llm.generate(prompts, params), len(prompts))
        assert together[0] == [[output.token_id for output in each] for each in found]
        assert together[1] == ["".join(output.text for output in each) for each in found]
    for p, expected, actual in zip(params, *outputs):
        if not p.greedy:
            continue
        for name in ("token_id", "text", "finish_reason"):
            assert [getattr(each, name) for each in actual] == [getattr(each, name) for each in expected]
        for one, other in zip(actual, expected):
            if p.logprobs is not None:
                assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)
                assert [each for each, _ in one.logprobs.top] == [each for each, _ in other.logprobs.top]
                assert len(one.logprobs.top) == p.logprobs


class Markov:
    """A model whose next token depends on the last one alone, with a draft layer that is another chain.

    States are token ids, those of the draft layer behind the trunk's. There is no cache to get wrong here.
    """

    device, dtype, group = torch.device("cpu"), torch.float32, None
    mtp = SimpleNamespace(new_cache=lambda pages: None)

    def __init__(self, vocab, sharpness=1.5):
        self.tables = sharpness * torch.randn(2 * vocab, vocab)
        self.vocab = vocab

    def __call__(self, batch, cache):
        return batch.tokens[:, None].float()

    def draft(self, batch, hidden, cache):
        return batch.tokens[:, None].float() + self.vocab

    def compute_logits(self, hidden):
        return self.tables[hidden[:, 0].long()]


def exact(logits, params):
    """float64 distribution of one row, written out: temperature, then top_k, top_p, min_p."""
    p = (logits.double() / params.temperature).softmax(0)
    best, order = p.sort(descending=True)
    keep = torch.arange(len(p)) < (params.top_k or len(p))
    best = torch.where(keep, best, 0.0) / best[keep].sum()
    keep &= best.cumsum(0) - best < params.top_p
    keep &= best >= params.min_p * best[0]
    p = torch.zeros_like(p).scatter(0, order, torch.where(keep, best, 0.0))
    return p / p.sum()


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize(
    "options",
    [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.3, "top_p": 0.8, "min_p": 0.05}],
    ids=["plain", "top-k", "top-p and min-p"],
)
def test_sampled_tokens_have_the_trunks_distribution(number, options):
    """Chi-square over all transitions at fixed positions: within 5 standard deviations of the statistic."""
    vocab, count, length = 8, 3000, 12
    model, params = Markov(vocab), SamplingParams(**options)
    sizes = {"num_pages": 2, "num_drafts": number, "max_batch": count, "max_context": PAGE, "vocab_size": vocab}
    speculator = Speculator(model, **sizes)
    seeds = torch.randint(0, 2**62, (count,)).tolist()
    speculator.load([None] * count, [PAGE] * count, SamplingBatch.from_params([params] * count, seeds))
    tokens, positions = torch.randint(0, vocab, (count,)), torch.zeros(count, dtype=torch.int64)
    texts = [[token] for token in tokens.tolist()]
    table = torch.zeros(count, 1, dtype=torch.int32)
    proposed = accepted = 0
    while min(map(len, texts)) <= length:
        verified, tried = speculator.step(tokens, positions, table, None)
        proposed, accepted = proposed + int(tried.sum()), accepted + int(verified.accepted.sum())
        for text, found in zip(texts, verified.sampled.tokens.view(count, number + 1).tolist()):
            text += [token for token in found if token != NOTHING]
        assert tokens.tolist() == [text[-1] for text in texts]
        assert positions.tolist() == [len(text) - 1 for text in texts]
    assert 0.01 < accepted / proposed < 0.95  # both branches of the rule were at work

    observed = torch.zeros(vocab, vocab, dtype=torch.float64)
    for text in texts:
        for source, target in pairwise(text[: length + 1]):
            observed[source, target] += 1
    p = torch.stack([exact(row, params) for row in model.tables[:vocab]])
    expected = observed.sum(1, keepdim=True) * p
    assert (observed[p == 0] == 0).all()
    likely = expected > 5  # the rule of thumb for the statistic's approximation
    statistic = ((observed - expected).square() / expected)[likely].sum().item()
    freedom = likely.sum().item() - vocab
    assert freedom > 8
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def rows_of(params, count, number):
    return SamplingBatch.from_params([params] * count, list(range(count))).repeat(number + 1)


def test_verify_keeps_every_draft_of_its_own_distribution_and_none_of_a_disjoint_one():
    count, number, vocab = 200, 3, 10
    batch = rows_of(SamplingParams(temperature=1.0), count, number)
    logits = torch.randn(count, number + 1, vocab)
    logits[:, :, 5:] = -torch.inf
    p = logits.softmax(-1)[:, :number]
    drafts = torch.multinomial(p.flatten(0, 1), 1).view(count, number)
    usable = torch.ones(count, number + 1, dtype=torch.bool)
    positions = torch.arange(count)
    same = verify(logits.flatten(0, 1), drafts, p, usable, batch, positions)
    assert (same.accepted == number).all()
    assert torch.equal(same.sampled.tokens.view(count, -1)[:, :number], drafts)
    other = verify(logits.flatten(0, 1), drafts + 5, p.roll(5, -1), usable, batch, positions)
    assert (other.accepted == 0).all()
    tokens = other.sampled.tokens.view(count, -1)
    assert (tokens[:, 0] < 5).all()
    assert (tokens[:, 1:] == NOTHING).all()


def test_verify_stops_at_rows_that_were_not_fed_and_reports_unusable_logits():
    number, vocab = 2, 6
    batch = rows_of(SamplingParams(), 4, number)
    drafts = torch.tensor([[1, 2]] * 4)
    logits = torch.zeros(4, number + 1, vocab)
    for row, token in enumerate((1, 2, 3)):
        logits[:, row, token] = 1.0
    logits[3, 1, 4] = torch.nan
    usable = torch.tensor([[True, True, True], [True, True, False], [False, False, False], [True, True, True]])
    found = verify(logits.flatten(0, 1), drafts, None, usable, batch, torch.tensor([5, 5, -1, 5]))
    nothing = NOTHING
    assert found.sampled.tokens.view(4, 3).tolist() == [[1, 2, 3], [1, 2, nothing], [nothing] * 3, [1, -1, nothing]]


class TwoCaches:
    """Trunk and draft layer that know nothing but the token ids in their paged caches: a wrong row shows at once.

    A state is (next token, first token of the sequence). The draft layer rebuilds the history from the first token and its
    own cache; where `wrong` says so it drafts another token on purpose.
    """

    device, dtype, max_context, group = torch.device("cpu"), torch.float32, 1000, None

    def __init__(self, wrong):
        self.config = SimpleNamespace(vocab_size=300, eos_token_ids=(), kv_lora_rank=0, model_type="rule")
        self.wrong = wrong
        self.mtp = SimpleNamespace(new_cache=self.new_cache)

    def new_cache(self, num_pages, kv="bf16"):
        return torch.full((num_pages * PAGE,), -1)

    def _histories(self, batch, cache):
        used = batch.slots >= 0
        assert torch.equal(used, batch.positions >= 0)
        assert len(set(batch.slots[used].tolist())) == int(used.sum())
        cache[batch.slots[used]] = batch.tokens[used]
        for row, position in enumerate(batch.positions.tolist()):
            where = torch.arange(position + 1)
            slots = batch.block_table[int(batch.sequence[row])].long()[where // PAGE] * PAGE + where % PAGE
            assert position < 0 or (slots.min() >= PAGE and slots[-1] == batch.slots[row])
            yield cache[slots].tolist()

    def __call__(self, batch, cache):
        assert int(batch.positions.max()) < batch.max_context
        return torch.tensor([[mixed(h), h[0]] if h else [0, 0] for h in self._histories(batch, cache)]).double()

    def draft(self, batch, hidden, cache):
        states = []
        for history, first in zip(self._histories(batch, cache), hidden[:, 1].long().tolist()):
            states.append([self.guess([first, *history]), first] if history else [0, 0])
        return torch.tensor(states).double()

    def guess(self, history):
        token = mixed(history)
        return 10 + (token - 9) % 290 if self.wrong(history) else token

    def compute_logits(self, hidden):
        logits = torch.full((len(hidden), 300), -5.0)
        logits[torch.arange(len(hidden)), hidden[:, 0].long()] = 5.0
        return logits


def simulate(model, prompt, limit, number):
    """(tokens, steps, proposed, accepted) as they must come, from the histories alone."""
    history, counts, fresh = [*prompt, mixed(prompt)], [0, 0, 0], True
    end = len(prompt) + limit
    while len(history) < end:
        drafts, accepted = list(history), 0
        tries = 0 if fresh else min(number, end - 1 - len(history))
        for _ in range(tries):
            drafts.append(model.guess(drafts))
        while accepted < tries and drafts[len(history) + accepted] == mixed(drafts[: len(history) + accepted]):
            accepted += 1
        for _ in range(accepted + 1):
            history.append(mixed(history))
        counts = [counts[0] + 1, counts[1] + tries, counts[2] + accepted]
        fresh = False
    return history[len(prompt) :], *counts


@pytest.mark.parametrize("number", [1, 3, 5])
@pytest.mark.parametrize(("max_batch", "cache_tokens"), [(1, 1000), (3, 640), (16, 4000)])
def test_generate_keeps_both_caches_right(number, max_batch, cache_tokens):
    shuffle = random.Random(number * max_batch)
    prompts = [[shuffle.randrange(10, 300) for _ in range(shuffle.randrange(1, 150))] for _ in range(8)]
    params = [SamplingParams(max_tokens=shuffle.randrange(1, 90)) for _ in prompts]
    model = TwoCaches(lambda history: sum(history) % 3 == 0)
    sizes = {"max_batch": max_batch, "cache_tokens": cache_tokens, "max_context": 400, "prefill_chunk": 32}
    llm = LLM(model, speculate=number, **sizes)
    tokens, _, reasons = collect(llm.generate(prompts, params), len(prompts))
    wanted = [simulate(model, prompt, p.max_tokens, number) for prompt, p in zip(prompts, params)]
    assert tokens == [each[0] for each in wanted]
    assert set(reasons) == {"length"}
    stats = llm.speculation
    assert (stats.steps, stats.proposed, stats.accepted) == tuple(sum(each[part] for each in wanted) for part in (1, 2, 3))
    assert 0.3 < stats.acceptance_rate < 1


@pytest.mark.parametrize("length", [1, 63, 64, 100, 127, 128])
def test_generate_ends_at_the_context(length):
    model = TwoCaches(lambda history: False)
    llm = LLM(model, speculate=4, max_context=128)
    prompt = list(range(10, 10 + length))
    tokens, _, reasons = collect(llm.generate([prompt], SamplingParams(max_tokens=10_000)), 1)
    assert tokens == [simulate(model, prompt, 128 - length + 1, 4)[0]]
    assert reasons == ["length"]


def test_generate_reports_unusable_logits():
    class Broken(TwoCaches):
        def compute_logits(self, hidden):
            logits = super().compute_logits(hidden)
            logits[:, 7] = torch.where(hidden[:, 0] == self.at, torch.nan, -5.0)
            return logits

    model = Broken(lambda history: False)
    texts = simulate(model, [11, 12], 12, 2)[0]
    model.at = texts[8]
    llm = LLM(model, speculate=2)
    free = llm._allocator.available
    with pytest.raises(FloatingPointError, match="prompt 0, position 10: the model's logits hold NaN"):
        list(llm.generate([[11, 12]], SamplingParams(max_tokens=12)))
    assert llm._allocator.available == free


@torch.inference_mode()
def steps(path, device, number=2, count=2, length=11):
    """Tokens and next drafts of three steps, the last sequence's room ending in the middle of one."""
    model = exl3_triton.load(path, device=device, dtype=torch.float32, progress=False, mtp=True)
    vocab = model.config.vocab_size
    prompts = (torch.arange(count * length, device=device) * 37 % vocab).view(count, length)
    speculator = Speculator(model, num_pages=count + 1, num_drafts=number, max_batch=4, max_context=PAGE, vocab_size=vocab)
    cache = model.new_cache(count + 1)
    for row in range(count):
        batch = Batch.of_sequence(prompts[row, :-1], 0, [1 + row])
        speculator.prefill(batch, model(batch, cache), prompts[row, 1:])
    sampling = SamplingBatch.from_params([SamplingParams()] * count, [0] * count, device)
    speculator.load([None] * count, [PAGE] * (count - 1) + [length + 2], sampling)
    tokens, positions = prompts[:, -1].clone(), torch.full((count,), length - 1, device=device)
    table = torch.arange(1, count + 1, dtype=torch.int32, device=device)[:, None]
    found = []
    for _ in range(3):
        verified, proposed = speculator.step(tokens, positions, table, cache)
        found.append((verified.sampled.tokens.tolist(), proposed.tolist(), speculator.drafts[:count].tolist()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v32", "glm4_moe"])
def test_step_through_the_triton_kernels(tmp_path, device, family):
    """Several positions of a sequence and padding rows among them, past index_topk = 8; fp32 products on every path."""
    path = oracle_with_mtp(tmp_path, family)
    expected = steps(path, "cpu")
    with override_backend("triton"):
        assert steps(path, device) == expected
    assert expected[1][1][0] == 2


@pytest.mark.parametrize("value", [-1, 6, 1.5, True])
def test_llm_refuses_speculate(value):
    with pytest.raises(ValueError, match=r"speculate: found .*, required an integer from 1 to 5"):
        LLM(DEMO, speculate=value)


def test_llm_refuses_to_speculate_without_the_layer():
    with pytest.raises(ValueError, match=r"speculate: the model was loaded without its next-token layer"):
        LLM(exl3_triton.load(DEMO, progress=False), speculate=1)


def test_stats():
    stats = SpeculationStats()
    assert (stats.acceptance_rate, stats.mean_accepted_length) == (0, 0)
    stats.add(3, 3)
    stats.add(0, 1)
    assert stats == SpeculationStats(steps=2, proposed=3, accepted=2, tokens=4)
    assert stats.acceptance_rate == pytest.approx(2 / 3)
    assert stats.speedup(step_seconds=0.03, plain_seconds=0.02) == pytest.approx(2 * 0.02 / 0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_greedy_equals_plain_on_a_gpu(tokenizer, number):
    """fp16: logits of size 10 carry a relative error of up to 2e-3 (the goldens' bound), a difference of two twice that."""
    model = exl3_triton.load(DEMO, device="cuda", progress=False, mtp=True)
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    plain = plain_tokens(model, tokenizer, PROMPTS, params)
    stats = check_greedy(model, tokenizer, PROMPTS, plain, number, params, tie=0.04, max_batch=8)
    assert stats.acceptance_rate > 0.25


@pytest.mark.gpu
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_step_in_a_cuda_graph(sampled):
    """A captured step, replayed, gives what eager steps give; it never waits for the device."""
    model = exl3_triton.load(DEMO, device="cuda", progress=False, mtp=True)
    count, number, length = 3, 3, 70
    options = {"temperature": 0.9, "top_p": 0.9} if sampled else {}
    batch = SamplingBatch.from_params([SamplingParams(**options)] * count, [5, 6, 7], "cuda")
    prompts = torch.randint(10, 4000, (count, length), device="cuda")
    table = 1 + torch.arange(count * 4, device="cuda", dtype=torch.int32).view(count, 4)

    @torch.inference_mode()
    def run(captured):
        sizes = {"num_pages": 1 + count * 4, "num_drafts": number, "max_batch": count}
        speculator = Speculator(model, **sizes, max_context=4 * PAGE, vocab_size=4096)
        cache = model.new_cache(1 + count * 4)
        for row, pages in enumerate(table.tolist()):
            prompt = Batch.of_sequence(prompts[row, :-1], 0, pages)
            speculator.prefill(prompt, model(prompt, cache), prompts[row, 1:])
        speculator.load([None] * count, [4 * PAGE] * count, batch)
        tokens = prompts[:, -1].clone()
        positions = torch.full((count,), length - 1, device="cuda")
        found, graph = [], torch.cuda.CUDAGraph()
        state = [tokens, positions, speculator.drafts, speculator.drafted, *cache.tensors, *speculator.cache.tensors]
        if sampled:
            state.append(speculator.probabilities)
        if captured:
            before = [each.clone() for each in state]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                speculator.step(tokens, positions, table, cache)  # compiles
            torch.cuda.current_stream().wait_stream(side)
            for each, value in zip(state, before):
                each.copy_(value)
            with torch.cuda.graph(graph):
                verified, _ = speculator.step(tokens, positions, table, cache)
            for each, value in zip(state, before):
                each.copy_(value)
        for _ in range(8):
            if captured:
                graph.replay()
            else:
                torch.cuda.set_sync_debug_mode("error")
                try:
                    verified, _ = speculator.step(tokens, positions, table, cache)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            found.append(verified.sampled.tokens.tolist())
        return found

    run(False)  # compiles
    eager = run(False)
    assert run(True) == eager
    assert max(max(row) for row in eager) > 0
