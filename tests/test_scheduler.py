"""Continuous batching: pages as needed, pauses, prefill beside decoding, shared prefixes; what comes out does not show any."""

from __future__ import annotations

import gc
import random
import runpy
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mtp import oracle_with_mtp
from test_runner import CacheEcho, collect, expected, mixed
from test_speculate import Markov, TwoCaches, exact
from ties import moved_by_rounding

import exl3_triton
from exl3_triton.model.cache import PAGE, PageAllocator, page_keys, pages_for
from exl3_triton.model.runner import LLM
from exl3_triton.model.sampling import SamplingBatch, SamplingParams, adjust, gumbel_noise
from exl3_triton.model.scheduler import Scheduler
from exl3_triton.model.sequence import SequenceState, StopStrings

DEMO = Path(exl3_triton.__file__).parent / "demo"
# A prompt prefilled in other chunks, or a sequence decoded in another batch, is another shape of fp32 matrix products: logits
# differ by up to 1e-5, and a choice between two that are closer than this is a tie.
TIE = 1e-3


def sequence(tokens, limit, index=0):
    options = {"seed": 0, "stop_ids": frozenset(), "detokenizer": None, "stop_strings": StopStrings(()), "grammar": None}
    return SequenceState(index, list(tokens), SamplingParams(), limit=limit, **options)


def related_prompts(shuffle, count, longest):
    """Prompts that share beginnings of any length with each other, page boundaries and whole prompts among them."""
    prompts = []
    for _ in range(count):
        base = list(shuffle.choice(prompts)) if prompts and shuffle.random() < 0.7 else []
        cut = shuffle.choice([len(base), len(base) // PAGE * PAGE, shuffle.randrange(len(base) + 1)])
        fresh = [shuffle.randrange(10, 300) for _ in range(shuffle.randrange(longest))]
        prompts.append((base[:cut] + fresh)[:longest] or [11])
    return prompts


def check_nothing_held(llm, free):
    """All pages are back, and the scheduler remembers no sequence."""
    assert llm._allocator.available == free
    assert not llm._allocator._holders
    assert not llm._scheduler.busy


# The allocator


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_allocator_accounts_for_every_page(data):
    """Against a model that only knows who holds which page and which content a page was registered with."""
    total = data.draw(st.integers(1, 9))
    allocator = PageAllocator(total + 1)
    held: list[list[int]] = []
    content: dict[int, bytes] = {}  # of pages that were registered and have not been handed out since
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["allocate", "free", "register", "share", "forget"]))
        in_use = {page for pages in held for page in pages}
        assert allocator.available == total - len(in_use)
        if action == "allocate":
            count = data.draw(st.integers(0, total))
            if count > total - len(in_use):
                with pytest.raises(ValueError, match=rf"cache: {count} pages of 64 tokens wanted"):
                    allocator.allocate(count)
                continue
            pages = allocator.allocate(count)
            assert len(set(pages)) == count
            assert not in_use.intersection(pages)
            assert set(pages) <= set(range(1, total + 1))
            content = {page: key for page, key in content.items() if page not in pages}
            held.append(pages)
        elif action == "free" and held:
            allocator.free(held.pop(data.draw(st.integers(0, len(held) - 1))))
        elif action == "register" and in_use:
            page, key = data.draw(st.sampled_from(sorted(in_use))), bytes([data.draw(st.integers(0, 3))])
            allocator.register(page, key)
            if page not in content and key not in content.values():
                content[page] = key
        elif action == "forget":
            allocator.forget()
            content = {}
        elif action == "share":
            keys = [bytes([value]) for value in data.draw(st.permutations(range(4)))]
            found = allocator.find(keys)
            assert [content[page] for page in found] == keys[: len(found)]
            assert len(found) == 4 or keys[len(found)] not in content.values()
            fresh = sum(page not in in_use for page in found)
            assert allocator.available_beside(found) == allocator.available - fresh
            allocator.share(found)
            held.append(found)
    for pages in held:
        allocator.free(pages)
    assert sorted(allocator.allocate(total)) == list(range(1, total + 1))
    assert allocator.find([bytes([value]) for value in range(4)]) == []


def test_allocator_evicts_the_least_recently_held_and_the_end_of_a_prefix_first():
    allocator = PageAllocator(5)
    first, second = allocator.allocate(2), allocator.allocate(2)
    for page, key in zip(first + second, (b"a", b"ab", b"c", b"cd")):
        allocator.register(page, key)
    allocator.free(first[::-1])
    allocator.free(second[::-1])
    assert allocator.allocate(1) == first[1:]
    assert allocator.find([b"a", b"ab"]) == first[:1]
    allocator.share(first[:1])
    assert allocator.available == 2
    assert allocator.allocate(2) == second[::-1]
    assert allocator.find([b"c"]) == []


def test_allocator_refuses_pages_that_nobody_holds():
    allocator = PageAllocator(3)
    with pytest.raises(ValueError, match="page 1 registered, but it is not in use"):
        allocator.register(1, b"")
    pages = allocator.allocate(1)
    allocator.share(pages)
    allocator.free(pages)
    allocator.free(pages)
    with pytest.raises(ValueError, match="page 1 freed, but it is not in use"):
        allocator.free(pages)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300), st.sampled_from([0, 1]))
def test_page_keys_are_equal_for_equal_beginnings(length, cut, more, behind):
    tokens = [random.randrange(3) for _ in range(length)]
    keys = page_keys(tokens, [], behind)
    assert len(keys) == max(0, length - behind) // PAGE
    assert page_keys(tokens, page_keys(tokens[:cut], [], behind), behind) == keys  # in two steps
    changed = [*tokens[:cut], *[token + 1 for token in tokens[cut:]], *([5] * more)]
    same = sum(one == other for one, other in zip(keys, page_keys(changed, [], behind)))
    assert same == min(max(0, min(cut, length) - behind) // PAGE, len(keys))
    assert len(set(keys)) == len(keys)


# The scheduler alone


@pytest.mark.parametrize("seed", range(40))
def test_scheduler_gives_every_step_what_it_needs(seed):
    """Random steps: pages are there before they are written, nobody writes a page of another, all end, in a bounded time."""
    shuffle = random.Random(seed)
    pages, max_batch = shuffle.randrange(4, 13), shuffle.randrange(1, 7)
    chunk, drafts = shuffle.randrange(1, 151), shuffle.randrange(6)
    allocator = PageAllocator(pages + 1)
    scheduler = Scheduler(allocator, max_batch=max_batch, prefill_chunk=chunk, num_drafts=drafts)
    sequences = []
    for index, prompt in enumerate(related_prompts(shuffle, 10, 3 * PAGE)):
        sequences.append(sequence(prompt, shuffle.randrange(1, pages * PAGE - len(prompt) + 2), index))
    scheduler.add(sequences[:5])
    for step in range(10_000):
        if step == 30:
            scheduler.add(sequences[5:])
        if not scheduler.busy and step > 30:
            break
        for each in scheduler.decoding:
            position = len(each.tokens) - 1
            last = min(position + max(1, 2 * drafts - 1), each.cache_rows - 1)
            check_writes(scheduler, each, range(position, last + 1))
            for _ in range(min(shuffle.randrange(drafts + 1) + 1, each.limit - each.num_generated)):
                each.accept(shuffle.randrange(10, 300), None)
        chunks = scheduler.next_chunks()
        assert sum(part.end - part.start for part in chunks) <= chunk
        assert len(scheduler.decoding) + len(scheduler.joining) + (scheduler.prefilling is not None) <= max_batch
        for part in chunks:
            assert part.start == part.sequence.cached < part.end
            check_writes(scheduler, part.sequence, range(part.start, part.end))
            assert part.samples == (part.end == part.sequence.prompt_length == len(part.sequence.tokens))
            if part.samples:
                part.sequence.accept(shuffle.randrange(10, 300), None)
        scheduler.settle(chunks)
        running = [each.index for each in scheduler.decoding] + [each.index for each in filter(None, [scheduler.prefilling])]
        assert running + [each.index for each in scheduler.waiting] == [
            each.index for each in sequences if each.finish_reason is None and (step >= 30 or each.index < 5)
        ]
    assert [each.num_generated for each in sequences] == [each.limit for each in sequences]
    assert allocator.available == pages
    assert not allocator._holders


def check_writes(scheduler, writer, positions):
    """The rows of these positions are in pages that the writer alone holds."""
    others = [*scheduler.decoding, *scheduler.joining, *filter(None, [scheduler.prefilling])]
    foreign = {page for other in others if other is not writer for page in other.pages}
    for position in positions:
        assert writer.pages[position // PAGE] not in foreign


def test_scheduler_takes_pages_when_they_are_needed():
    allocator = PageAllocator(11)
    scheduler = Scheduler(allocator, max_batch=1, prefill_chunk=1000)
    each = sequence(range(10, 60), 300)
    scheduler.add([each])
    chunks = scheduler.next_chunks()
    while not each.finish_reason:
        each.accept(7, None)
        scheduler.settle(chunks)
        # rows up to that of the token after the one fed next, as far as there is one
        assert each.finish_reason or len(each.pages) == pages_for(min(len(each.tokens) + 1, 349))
        chunks = []
    assert allocator.available == 10


def test_short_prompts_share_a_step():
    model = CacheEcho(mixed)
    prompts = [[11 + i, 12, 13] for i in range(10)]
    llm = LLM(model, prefill_chunk=20, cache_tokens=2000)
    assert collect(llm.generate(prompts, SamplingParams(max_tokens=5)), 10)[0] == [expected(prompt, 5) for prompt in prompts]
    assert [len(batch.tokens) for batch in model.batches if batch.prefill] == [20, 10]


def test_same_prompts_at_once_are_prefilled_once():
    """The second waits for the step in which the first one fills the pages that they share."""
    model = CacheEcho(mixed)
    prompt = [random.randrange(10, 300) for _ in range(200)]
    llm = LLM(model, prefill_chunk=1000, max_context=300, cache_tokens=4000)
    assert collect(llm.generate([prompt] * 8, SamplingParams(max_tokens=5)), 8)[0] == [expected(prompt, 5)] * 8
    assert llm.scheduling.prefilled == 200 + 7 * 8
    assert llm.scheduling.reused == 7 * 192


# Pauses and shared prefixes, with models that see every wrong row


class CheckedCaches(TwoCaches):
    """A state also holds what its layer read, so that the draft layer can check its own cache against it."""

    def __call__(self, batch, cache):
        states = [[mixed(h), h[0], fingerprint(h)] if h else [0, 0, 0] for h in self._histories(batch, cache)]
        return torch.tensor(states).double()

    def draft(self, batch, hidden, cache):
        states = []
        for history, (_, first, read) in zip(self._histories(batch, cache), hidden.long().tolist()):
            whole = [first, *history]
            assert not history or fingerprint(whole[:-1]) == read
            states.append([self.guess(whole), first, fingerprint(whole)] if history else [0, 0, 0])
        return torch.tensor(states).double()


def fingerprint(history):
    return hash(tuple(history)) % 2**50


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_pauses_and_shared_prefixes_do_not_show(seed, prefix_caching, drafts):
    shuffle = random.Random(seed)
    prompts = related_prompts(shuffle, 14, 200)
    params = [SamplingParams(max_tokens=shuffle.randrange(1, 350), ignore_eos=True) for _ in prompts]
    model = CheckedCaches(lambda history: sum(history) % 3 == 0) if drafts else CacheEcho(mixed)
    sizes = {"max_batch": 8, "cache_tokens": 10 * PAGE, "max_context": 600, "prefill_chunk": 100}
    llm = LLM(model, speculate=drafts, prefix_caching=prefix_caching, **sizes)
    free = llm._allocator.available
    tokens, _, reasons = collect(llm.generate(prompts, params), len(prompts))
    assert tokens == [expected(prompt, p.max_tokens) for prompt, p in zip(prompts, params)]
    assert set(reasons) == {"length"}
    check_nothing_held(llm, free)
    assert llm.scheduling.pauses > 3
    assert (llm.scheduling.reused > 0) == prefix_caching
    if not prefix_caching:
        assert llm._allocator.find(page_keys(prompts[0], [])) == []


def test_what_follows_a_text_takes_over_its_pages():
    """As in a chat: the next prompt is the last one with the answer and more."""
    model = CacheEcho(mixed)
    llm = LLM(model, cache_tokens=1000)
    prompt = [random.randrange(10, 300) for _ in range(100)]
    answer = collect(llm.generate([prompt], SamplingParams(max_tokens=60, ignore_eos=True)), 1)[0][0]
    before = llm.scheduling.prefilled
    turn = [*prompt, *answer, 20, 21]
    assert collect(llm.generate([turn], SamplingParams(max_tokens=9)), 1)[0] == [expected(turn, 9)]
    assert llm.scheduling.prefilled - before == len(turn) - 2 * PAGE


def test_the_last_token_of_a_known_prompt_is_fed_again():
    model = CacheEcho(mixed)
    llm = LLM(model, cache_tokens=1000)
    prompt = [random.randrange(10, 300) for _ in range(2 * PAGE)]
    for fed in (2 * PAGE, PAGE):
        before = llm.scheduling.prefilled
        assert collect(llm.generate([prompt], SamplingParams(max_tokens=9)), 1)[0] == [expected(prompt, 9)]
        assert llm.scheduling.prefilled - before == fed


@pytest.mark.parametrize("drafts", [0, 2])
def test_close_at_any_time(drafts):
    """Nothing stays behind, and the next request is right, whatever pages the last one left in the cache."""
    shuffle = random.Random(drafts)
    prompts = related_prompts(shuffle, 6, 150)
    params = [SamplingParams(max_tokens=shuffle.randrange(1, 170), ignore_eos=True) for _ in prompts]
    model = CheckedCaches(lambda history: sum(history) % 3 == 0) if drafts else CacheEcho(mixed)
    llm = LLM(model, speculate=drafts, max_batch=4, cache_tokens=5 * PAGE, prefill_chunk=40)
    free = llm._allocator.available
    total = sum(p.max_tokens for p in params)
    for taken in sorted({0, 1, 2, total, *shuffle.sample(range(total), 6)}):
        outputs = llm.generate(prompts, params)
        for _ in range(taken):
            next(outputs)
        outputs.close()
        check_nothing_held(llm, free)
    assert collect(llm.generate(prompts, params), 6)[0] == [expected(q, p.max_tokens) for q, p in zip(prompts, params)]
    assert llm.scheduling.pauses > 0


def test_pages_of_a_model_that_failed_are_not_taken_over():
    class Broken(CacheEcho):
        broken = True

        def compute_logits(self, hidden):
            return super().compute_logits(hidden) + (float("nan") if self.broken and len(self.batches) > 3 else 0.0)

    model = Broken(mixed)
    llm = LLM(model)
    prompt = [random.randrange(10, 300) for _ in range(150)]
    free = llm._allocator.available
    with pytest.raises(FloatingPointError):
        list(llm.generate([prompt]))
    check_nothing_held(llm, free)
    model.broken = False
    assert collect(llm.generate([prompt], SamplingParams(max_tokens=5)), 1)[0] == [expected(prompt, 5)]
    assert llm.scheduling.reused == 0


def test_no_decode_step_waits_for_more_than_a_chunk():
    prompts = [[11], *related_prompts(random.Random(5), 15, 300)]
    model = CacheEcho(mixed)
    llm = LLM(model, max_batch=6, cache_tokens=30 * PAGE, max_context=800, prefill_chunk=50)
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in [500, *[40] * 15]]
    outputs = list(llm.generate(prompts, params))
    assert outputs[-1].index == 0  # so it decoded in every step
    decoded = [index for index, batch in enumerate(model.batches) if not batch.prefill]
    between = [model.batches[one + 1 : other] for one, other in pairwise(decoded)]
    assert max(sum(len(batch.tokens) for batch in batches) for batches in between) == 50


def test_a_request_that_fits_alone_waits_and_one_that_never_fits_is_refused():
    model = CacheEcho(mixed)
    llm = LLM(model, max_context=900, cache_tokens=4 * PAGE, prefill_chunk=64)
    prompts = [[11] * 10, [12] * (4 * PAGE - 20), [13] * 10]
    params = [SamplingParams(max_tokens=100, ignore_eos=True), SamplingParams(max_tokens=21, ignore_eos=True)]
    assert collect(llm.generate(prompts, [*params, params[0]]), 3)[0] == [
        expected(prompt, count) for prompt, count in zip(prompts, (100, 21, 100))
    ]
    model.batches.clear()
    with pytest.raises(ValueError, match="prompt 1: 257 tokens, but the context holds 256"):
        llm.generate([[11], [12] * 257])
    assert model.batches == []


def test_sampled_tokens_have_the_trunks_distribution_through_pauses():
    """A resumed sequence has no drafts in its first step: other random numbers decide, with the same distribution.

    Chi-square over all transitions, within 5 standard deviations of the statistic.
    """

    class Chains(Markov):
        max_context = 1000
        config = TwoCaches(None).config

        def new_cache(self, num_pages, kv):
            return torch.zeros(num_pages)

    vocab, count, length = 8, 25, 200
    model, options = Chains(vocab), SamplingParams(temperature=0.8, max_tokens=length)
    model.config.vocab_size = vocab
    model.decode_step = None  # speculation never comes here
    llm = LLM(model, speculate=3, max_batch=6, cache_tokens=7 * PAGE)
    prompts = [[random.randrange(vocab)] for _ in range(count)]
    texts = collect(llm.generate(prompts, options), count)[0]
    assert llm.scheduling.pauses > 5
    observed = torch.zeros(vocab, vocab, dtype=torch.float64)
    for prompt, text in zip(prompts, texts):
        for source, target in zip([*prompt, *text], text):
            observed[source, target] += 1
    p = torch.stack([exact(row, options) for row in model.tables[:vocab]])
    predicted = observed.sum(1, keepdim=True) * p
    likely = predicted > 5  # the rule of thumb for the statistic's approximation
    statistic = ((observed - predicted).square() / predicted)[likely].sum().item()
    freedom = likely.sum().item() - vocab
    assert freedom > 8
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


# The real model


@pytest.fixture(scope="module")
def model():
    return exl3_triton.load(DEMO, progress=False, mtp=True)


@torch.inference_mode()
def ties(model, prompt, tokens, params, vocab_size, bound):
    """What whole forward passes choose, token by token: the differences, each of which must be a tie."""
    seed, count = params.seed or 0, len(tokens)
    logits = model.logits(torch.tensor(prompt + tokens[:-1]))[-count:, :vocab_size].cpu()
    batch = SamplingBatch.from_params([params] * count, [seed] * count)
    seen = torch.zeros(count, vocab_size, dtype=torch.bool)
    for index, row in enumerate(seen):
        row[prompt + tokens[:index]] = True
    scores, _ = adjust(logits, batch, seen=seen)
    if not params.greedy:
        scores = scores + gumbel_noise(batch.seed, len(prompt) + torch.arange(count), vocab_size)
    chosen = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    margins = (scores.amax(1) - chosen).tolist()
    for index, margin in enumerate(margins):
        assert margin < bound or margin < 2 * moved_by_rounding(model, prompt + tokens[:index])
    return [(index, f"{margin:.1e}") for index, margin in enumerate(margins) if margin > 0]


def text_prompts(shuffle, count, vocab_size):
    """Random ids, many with a beginning in common."""
    return [[100 + token % (vocab_size - 100) for token in prompt] for prompt in related_prompts(shuffle, count, 170)]


def pause_at_random(monkeypatch, shuffle):
    """Beside the pauses that a full cache brings: now and then some of the youngest sequences make room."""
    settle = Scheduler.settle

    def settle_and_pause(self, chunks):
        added = settle(self, chunks)
        if shuffle.random() < 0.3:
            for _ in range(min(len(self.decoding), shuffle.randrange(1, 6))):
                self._pause_youngest()
        return added

    monkeypatch.setattr(Scheduler, "settle", settle_and_pause)


GREEDY = [{}, {"repetition_penalty": 1.2}]
SAMPLED = [{"temperature": 0.9, "top_k": 40, "seed": 5}, {"temperature": 1.1, "top_p": 0.9, "seed": 6}]


def check_64_sequences(model, monkeypatch, drafts, longest, kinds, bound=TIE):
    """They join, leave, pause and resume; every token is what its own history alone gives. Ties are printed."""
    shuffle = random.Random()
    pause_at_random(monkeypatch, shuffle)
    llm = LLM(model, speculate=drafts, max_batch=64, max_context=400, cache_tokens=100 * PAGE, prefill_chunk=200)
    prompts = text_prompts(shuffle, 64, llm.vocab_size)
    params = [
        SamplingParams(max_tokens=shuffle.randrange(1, longest), ignore_eos=True, **kinds[index % len(kinds)])
        for index in range(64)
    ]
    free = llm._allocator.available
    tokens, _, _ = collect(llm.generate(prompts, params), 64)
    check_nothing_held(llm, free)
    assert [len(each) for each in tokens] == [p.max_tokens for p in params]
    for index, each in enumerate(tokens):
        if found := ties(model, prompts[index], each, params[index], llm.vocab_size, bound):
            print(f"sequence {index}: ties at {found}")
    assert llm.scheduling.pauses > 0
    assert llm.scheduling.reused > 0
    if drafts:
        assert llm.speculation.tokens == sum(map(len, tokens)) - 64


@pytest.mark.parametrize("drafts", [0, 3])
def test_64_sequences_equal_each_alone(model, monkeypatch, drafts):
    # with speculation sampled tokens come from other random numbers
    check_64_sequences(model, monkeypatch, drafts, 16, GREEDY if drafts else GREEDY + SAMPLED)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo-exl3-3.0bpw-mcg", "demo-exl3-mixed-mul1"])
def test_64_sequences_on_the_larger_checkpoints(testdata, monkeypatch, name):
    model = exl3_triton.load(testdata / "demo" / name, progress=False)
    check_64_sequences(model, monkeypatch, 0, 200, GREEDY + SAMPLED)


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 3])
def test_64_sequences_on_a_gpu(monkeypatch, drafts):
    """In CUDA graphs. fp16: logits of size 10 have a relative error of up to 2e-3 (the goldens' bound), a difference twice it.

    No filters: a probability at their edge is a tie that moves a score by more than rounding.
    """
    model = exl3_triton.load(DEMO, device="cuda", progress=False, mtp=True)
    kinds = [{}] if drafts else [{}, {"temperature": 1.0, "seed": 5}]
    check_64_sequences(model, monkeypatch, drafts, 100, kinds, bound=0.04)


@pytest.mark.gpu
def test_memory_on_a_gpu_stays_constant_over_10_000_steps(monkeypatch):
    steps, decode = [], LLM._decode
    monkeypatch.setattr(LLM, "_decode", lambda self, decoding: (steps.append(1), decode(self, decoding))[1])
    llm = LLM(DEMO, device="cuda", progress=False, max_batch=8, cache_tokens=40 * PAGE)
    marks = []
    while len(steps) < 10_000:
        prompts = [[random.randrange(100, 4000) for _ in range(random.randrange(1, 150))] for _ in range(8)]
        for _ in llm.generate(prompts, SamplingParams(max_tokens=600, ignore_eos=True)):
            pass
        marks.append(torch.cuda.memory_allocated())
    assert llm.scheduling.pauses > 0
    assert marks[-1] == marks[1]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("demo", {}),
        ("demo", {"speculate": 2}),
        ("demo", {"kv": "fp8"}),
        ("demo", {"kv": "nvfp4"}),
        ("glm4_moe", {}),
        ("glm4_moe", {"kv": "fp8", "speculate": 2}),
        ("deepseek_v32", {"speculate": 2}),
    ],
)
def test_shared_prefixes_equal_own_ones(model, tmp_path, family, options):
    """Every kind of cache: index keys that select (the last family from 8 positions on), packed rows, the draft's own."""
    if family != "demo":
        model = exl3_triton.load(oracle_with_mtp(tmp_path, family), progress=False, mtp=True)
    vocab = model.config.vocab_size
    beginning = [random.randrange(vocab) for _ in range(140)]
    prompts = [beginning + [random.randrange(vocab) for _ in range(count)] for count in (1, 9, 30)]
    params = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=0)
    found = []
    for prefix_caching in (True, False):
        llm = LLM(model, max_context=200, cache_tokens=1000, prefix_caching=prefix_caching, **options)
        found.append([list(llm.generate(prompt, params)) for prompt in ([prompts[0]], [prompts[1]], [prompts[2]])])
        assert llm.scheduling.reused == 2 * 128 * prefix_caching
    # a rounding difference may move a packed value by one of its steps
    bound = 2e-2 if "kv" in options else 1e-4
    for shared, own in zip(*found):
        assert [each.token_id for each in shared] == [each.token_id for each in own]
        assert [each.logprobs.logprob for each in shared] == pytest.approx([each.logprobs.logprob for each in own], abs=bound)


def test_memory_stays_constant_over_many_steps():
    """3,000 steps of ever new prompts, with pauses and evictions: neither Python's memory nor the number of tensors grows."""

    class Last(CacheEcho):
        def __call__(self, batch, cache):
            return 10 + (31 * batch.tokens + batch.positions) % 290

    llm = LLM(Last(None), max_batch=4, cache_tokens=8 * PAGE, prefill_chunk=64)
    shuffle, marks = random.Random(1), []
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    for _ in range(12):
        for count, _ in enumerate(llm.generate(related_prompts(shuffle, 6, 100), params)):
            assert count < 6 * 150
        gc.collect()
        tensors = sum(type(each) is torch.Tensor for each in gc.get_objects())
        marks.append((sys.getallocatedblocks(), tensors))
    assert llm.scheduling.pauses > 0
    assert abs(marks[-1][0] - marks[5][0]) < 500  # a step that left one object behind would leave 1,500
    assert marks[-1][1] == marks[5][1]


def test_example(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["batch.py"])
    runpy.run_path(str(Path(__file__).parents[1] / "examples" / "batch.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line[:2] for line in lines[:-1]) == [f"[{index}" for index in range(5)]
    assert int(lines[-1].split(" prompt tokens fed, ")[1].split()[0]) > 0
