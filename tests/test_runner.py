"""LLM.generate: what comes out, in which order sequences share the cache, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import decoders, models, pre_tokenizers

import exl3_triton
from exl3_triton.model.runner import LLM, StopStrings
from exl3_triton.model.sampling import SamplingParams
from exl3_triton.model.tokenizer import Tokenizer
from exl3_triton.model.transformer import Transformer
from exl3_triton.reference import PAGE

DEMO = Path(exl3_triton.__file__).parent / "demo"
EOS = 7


class CacheEcho:
    """Stands for a Transformer whose next token is a function of the token ids that the paged cache holds for the sequence.

    The real model cannot say which token it finds at a position; this one notices a wrong slot, page or position at once.
    """

    device = torch.device("cpu")
    dtype = torch.float32
    max_context = 1000
    group = None

    def __init__(self, rule, vocab_size=300):
        self.config = SimpleNamespace(vocab_size=vocab_size, eos_token_ids=(EOS,), kv_lora_rank=0, model_type="rule")
        self.rule = rule
        self.batches = []

    decode_step = Transformer.decode_step

    def new_cache(self, num_pages, kv):
        assert kv == "bf16"
        return torch.full((num_pages * PAGE,), -1)

    def __call__(self, batch, cache):
        self.batches.append(batch)
        assert batch.tokens.dtype == batch.positions.dtype == batch.slots.dtype == torch.int64
        assert batch.block_table.dtype == batch.sequence.dtype == torch.int32
        assert len(set(batch.slots.tolist())) == len(batch.slots)
        assert int(batch.positions.max()) < batch.max_context
        cache[batch.slots] = batch.tokens
        hidden = []
        for row in range(len(batch.tokens)):
            position = int(batch.positions[row])
            pages = batch.block_table[int(batch.sequence[row])].long()
            where = torch.arange(position + 1)
            slots = pages[where // PAGE] * PAGE + where % PAGE
            assert slots.min() >= PAGE  # page 0 belongs to nobody
            assert slots[-1] == batch.slots[row]
            hidden.append(self.rule(cache[slots].tolist()))
        return torch.tensor(hidden)

    def compute_logits(self, hidden):
        logits = torch.full((len(hidden), self.config.vocab_size), -5.0)
        logits[torch.arange(len(hidden)), hidden] = 5.0
        return logits


def mixed(history):
    """A next token that depends on every token before it and their order."""
    value = 0
    for token in history:
        value = (value * 31 + token + 1) % 1_000_003
    return 10 + value % 290


def expected(prompt, count):
    history = list(prompt)
    for _ in range(count):
        history.append(mixed(history))
    return history[len(prompt) :]


def byte_tokenizer() -> Tokenizer:
    """One token per byte: every character beyond ASCII is several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}>")


BYTES = byte_tokenizer()


def writer(prompt, text):
    """An LLM that continues `prompt` with `text`, byte by byte, then with full stops."""
    script = BYTES.encode(text)
    start = len(BYTES.encode(prompt))
    rule = lambda history: (script + BYTES.encode("." * 100))[len(history) - start]
    model = CacheEcho(rule)
    model.config.eos_token_ids = ()
    return LLM(model, tokenizer=BYTES)


def collect(outputs, count):
    """Per prompt: tokens, text and finish reason; nothing may follow a finish reason."""
    tokens, texts, reasons = [[] for _ in range(count)], [""] * count, [None] * count
    for output in outputs:
        assert reasons[output.index] is None
        tokens[output.index].append(output.token_id)
        texts[output.index] += output.text
        reasons[output.index] = output.finish_reason
    return tokens, texts, reasons


@pytest.fixture(scope="module")
def demo():
    return LLM(DEMO, progress=False)


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
@pytest.mark.parametrize(("max_batch", "cache_tokens"), [(1, 1000), (3, 640), (16, 4000)])
def test_generate_joins_and_leaves(chunk, max_batch, cache_tokens):
    shuffle = random.Random(chunk * max_batch)
    prompts = [[shuffle.randrange(10, 300) for _ in range(shuffle.randrange(1, 200))] for _ in range(12)]
    params = [SamplingParams(max_tokens=shuffle.randrange(1, 90)) for _ in prompts]
    model = CacheEcho(mixed)
    llm = LLM(model, max_batch=max_batch, cache_tokens=cache_tokens, max_context=400, prefill_chunk=chunk)
    free = llm._allocator.available
    tokens, texts, reasons = collect(llm.generate(prompts, params), len(prompts))
    for prompt, p, found in zip(prompts, params, tokens):
        assert found == expected(prompt, p.max_tokens)
    assert set(reasons) == {"length"}
    assert texts == [""] * len(prompts)
    assert llm._allocator.available == free
    decode = [batch for batch in model.batches if not batch.prefill]
    together = max(len(batch.tokens) for batch in decode)
    assert together <= max_batch
    assert together > 1 or max_batch == 1
    # nothing that a decode step is given changes its address or bound: a captured step can be replayed
    for name in ("tokens", "positions", "slots", "block_table"):
        assert len({getattr(batch, name).data_ptr() for batch in decode}) == 1
    assert {batch.max_context for batch in decode} == {llm.max_context}
    for batch in model.batches:
        if batch.prefill:
            assert batch.max_context == int(batch.positions.max()) + 1
            assert len(batch.tokens) <= chunk


def test_generate_pads_unused_rows():
    llm = LLM(CacheEcho(mixed), max_batch=4)
    for _ in llm.generate([[11, 12], [13]], [SamplingParams(max_tokens=9), SamplingParams(max_tokens=3)]):
        used = (llm._rows.positions >= 0).sum()
        assert (llm._rows.slots[used:] == -1).all()
        assert (llm._rows.block_table[used:] == 0).all()
    assert (llm._rows.positions == -1).all()
    assert (llm._rows.slots == -1).all()


def test_generate_long_prompt_does_not_starve_others():
    llm = LLM(CacheEcho(mixed), prefill_chunk=10)
    order = [output.index for output in llm.generate([[11], [12] * 200], SamplingParams(max_tokens=30))]
    # a token of prompt 0 from its own prefill, and one beside each of the 20 chunks of prompt 1
    assert order.index(1) == 21
    assert sorted(order) == [0] * 30 + [1] * 30


def test_generate_single_prompt_forms():
    llm = LLM(CacheEcho(mixed), tokenizer=BYTES)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    ids = BYTES.encode("abc")
    wanted = expected_below(ids, 4, llm.vocab_size)
    for prompt in ("abc", ids, tuple(ids), torch.tensor(ids), ["abc"], [ids]):
        assert collect(llm.generate(prompt, params), 1)[0] == [wanted]
    assert collect(llm.generate(["abc", ids], params), 2)[0] == [wanted] * 2


def expected_below(prompt, count, vocab_size):
    """With only `vocab_size` ids allowed, a token of CacheEcho behind them leaves the lowest id as the greedy choice."""
    history = list(prompt)
    for _ in range(count):
        token = mixed(history)
        history.append(token if token < vocab_size else 0)
    return history[len(prompt) :]


def test_generate_never_samples_padding_ids():
    llm = LLM(CacheEcho(lambda history: 299), tokenizer=BYTES)
    assert llm.vocab_size == 256
    params = [SamplingParams(max_tokens=20, temperature=1.0, seed=seed) for seed in range(5)]
    tokens = collect(llm.generate(["a"] * 5, params), 5)[0]
    assert max(max(row) for row in tokens) < 256
    assert len({tuple(row) for row in tokens}) == 5


def test_generate_chat():
    rendered = "system: s\nuser: hé\n>"
    llm = writer(rendered, "ok")
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hé"}]
    params = SamplingParams(max_tokens=2)
    assert collect(llm.generate(messages, params, chat=True), 1)[1] == ["ok"]
    assert collect(llm.generate([messages, messages], params, chat=True), 2)[1] == ["ok"] * 2
    assert collect(writer("user: x\n>", "ok").generate("x", params, chat=True), 1)[1] == ["ok"]


def test_generate_streams_whole_characters():
    text = "Größe: 12 € 👧 日本"
    pieces = [output.text for output in writer("p", text).generate("p", SamplingParams(max_tokens=len(text.encode())))]
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)


def test_generate_flushes_half_a_character_at_the_end():
    outputs = list(writer("p", "a€").generate("p", SamplingParams(max_tokens=3)))
    assert [output.text for output in outputs] == ["a", "", "\N{REPLACEMENT CHARACTER}"]
    assert outputs[-1].finish_reason == "length"


def test_generate_completes_a_character_of_the_prompt():
    ids = BYTES.encode("ab€")
    llm = writer("ab€"[:2], "€!")
    assert collect(llm.generate(ids[:-1], SamplingParams(max_tokens=2)), 1)[1] == ["€!"]


@pytest.mark.parametrize(
    ("stop", "shown", "count"),
    [
        ("lo w", "hel", 7),
        (["zzz", "world"], "hello ", 11),
        ("wore", "hello world..", 13),
        (["o", "hello"], "", 5),
        ("é", "hello world..", 13),
    ],
)
def test_generate_stop_strings(stop, shown, count):
    llm = writer("p", "hello world")
    tokens, texts, reasons = collect(llm.generate("p", SamplingParams(max_tokens=13, stop=stop)), 1)
    assert texts == [shown]
    assert len(tokens[0]) == count
    assert reasons == ["length" if count == 13 else "stop"]
    assert llm._allocator.available == llm.cache.numel() // PAGE - 1


def test_generate_stop_string_held_back_at_the_end():
    outputs = list(writer("p", "hello").generate("p", SamplingParams(max_tokens=5, stop="lot")))
    assert [output.text for output in outputs] == ["h", "e", "", "l", "lo"]


@settings(deadline=None, max_examples=300)
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), st.integers(0, 2**30))
def test_stop_strings_do_not_depend_on_pieces(text, stop, cut):
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    wanted = text[: min(ends)[1]] if ends else text
    matcher = StopStrings(stop)
    shown, found, start = "", False, 0
    while start < len(text) and not found:
        size = 1 + (cut >> (start % 28)) % 4
        piece, found = matcher.push(text[start : start + size])
        shown += piece
        assert wanted.startswith(shown)
        start += size
    shown += matcher.flush()
    assert found == bool(ends)
    assert shown == wanted


def test_generate_stop_ids():
    history = lambda h: [20, 21, EOS, 22, 23, 24][len(h) - 1]
    llm = LLM(CacheEcho(history))
    assert collect(llm.generate([[9]]), 1) == ([[20, 21, EOS]], [""], ["stop"])
    params = SamplingParams(ignore_eos=True, max_tokens=5)
    assert collect(llm.generate([[9]], params), 1) == ([[20, 21, EOS, 22, 23]], [""], ["length"])
    params = SamplingParams(ignore_eos=True, stop_token_ids=[22])
    assert collect(llm.generate([[9]], params), 1) == ([[20, 21, EOS, 22]], [""], ["stop"])
    params = SamplingParams(max_tokens=1)
    assert collect(llm.generate([[9]], params), 1) == ([[20]], [""], ["length"])


def test_generate_stop_id_has_no_text():
    llm = writer("p", "ab!c")
    params = SamplingParams(stop_token_ids=BYTES.encode("!"))
    assert collect(llm.generate("p", params), 1)[1:] == (["ab"], ["stop"])


@pytest.mark.parametrize("length", [1, 63, 64, 100, 127, 128])
def test_generate_ends_at_the_context(length):
    llm = LLM(CacheEcho(mixed), max_context=128)
    prompt = list(range(10, 10 + length))
    tokens, _, reasons = collect(llm.generate([prompt], SamplingParams(max_tokens=10_000)), 1)
    # the last token needs no place in the cache
    assert tokens == [expected(prompt, 128 - length + 1)]
    assert reasons == ["length"]


def test_generate_cache_smaller_than_context():
    llm = LLM(CacheEcho(mixed), max_context=900, cache_tokens=100)
    assert llm.max_context == 128
    with pytest.raises(
        ValueError, match=r"prompt 1: 129 tokens, but the context holds 128 \(see max_context and cache_tokens\)"
    ):
        llm.generate([[11], [11] * 129])


@pytest.mark.parametrize(
    ("prompts", "params", "match"),
    [
        ("", None, "prompt 0: empty"),
        ([], None, "prompts: empty"),
        ([[11], []], None, "prompt 1: empty"),
        (5, None, "prompts: found int"),
        ([[11, 300]], None, "prompt 0: found token id 300, the vocabulary has ids 0 to 299"),
        ([[-1]], None, "prompt 0: found token id -1"),
        ([[1.5]], None, "prompt 0: found 1.5, required text or integer token ids"),
        ([[11]], SamplingParams(stop_token_ids=[300]), "stop_token_ids: found token id 300"),
        ([[11]], SamplingParams(logprobs=301), "logprobs: found 301, the vocabulary has 300 ids"),
        ([[11]], SamplingParams(stop="x"), "stop: stop strings need a tokenizer"),
        ("text", None, "prompt 0: text needs a tokenizer"),
        ([[11]], [SamplingParams()] * 2, "params: found 2, required one, or one for each of the 1 prompts"),
    ],
)
def test_generate_refuses_before_any_work(prompts, params, match):
    model = CacheEcho(mixed)
    with pytest.raises(ValueError, match=match):
        LLM(model).generate(prompts, params)
    assert model.batches == []


def test_generate_chat_refuses():
    with pytest.raises(ValueError, match="prompt 0: empty"):
        LLM(CacheEcho(mixed), tokenizer=BYTES).generate([[]], chat=True)
    with pytest.raises(ValueError, match="prompt 0: text needs a tokenizer"):
        LLM(CacheEcho(mixed)).generate("hi", chat=True)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_context": 0}, "max_context: found 0, required an integer >= 1"),
        ({"cache_tokens": -5}, "cache_tokens: found -5"),
        ({"max_batch": 0}, "max_batch: found 0"),
        ({"prefill_chunk": 1.5}, "prefill_chunk: found 1.5"),
        ({"max_context": 1001}, "max_context: found 1001, the model allows at most 1000"),
        ({"device": "cpu"}, "act on loading"),
    ],
)
def test_llm_refuses(options, match):
    with pytest.raises(ValueError, match=match):
        LLM(CacheEcho(mixed), **options)


def test_generate_one_at_a_time_and_close():
    llm = LLM(CacheEcho(mixed))
    free = llm._allocator.available
    first = llm.generate([[11] * 100])
    next(first)
    assert llm._allocator.available < free
    with pytest.raises(RuntimeError, match="still running"):
        llm.generate([[12]])
    first.close()
    assert llm._allocator.available == free
    second, third = llm.generate([[12]]), llm.generate([[13]])
    next(second)
    with pytest.raises(RuntimeError, match="still running"):
        next(third)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("when", [3, 5])
def test_generate_reports_unusable_logits(bad, when):
    class Broken(CacheEcho):
        def compute_logits(self, hidden):
            logits = super().compute_logits(hidden)
            if self.batches[-1].positions.max() >= when - 1:
                logits[-1, 5] = bad
            return logits

    llm = LLM(Broken(mixed))
    free = llm._allocator.available
    found = []
    with pytest.raises(FloatingPointError, match=f"prompt 0, position {when}: the model's logits hold NaN"):
        found.extend(llm.generate([[11, 12, 13]], SamplingParams(temperature=1.0)))
    assert len(found) == when - 3
    assert llm._allocator.available == free


GOLDEN = [("demo-exl3-3.0bpw-mcg", 512), ("demo-exl3-3.0bpw-mcg", 64), ("demo-exl3-mixed-mul1", 512)]


@pytest.mark.parametrize(("name", "chunk"), GOLDEN)
def test_generate_greedy_matches_golden(testdata, name, chunk):
    golden = load_file(testdata / "demo" / name / "golden.safetensors")
    llm = LLM(testdata / "demo" / name, progress=False, prefill_chunk=chunk)
    prompts = [golden[f"prompt{i}.input_ids"].tolist() for i in range(4)]
    wanted = [golden[f"prompt{i}.greedy16"].tolist() for i in range(4)]
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    assert collect(llm.generate(prompts, params), 4)[0] == wanted
    assert collect(llm.generate(prompts[2], params), 1)[0] == wanted[2:3]


def test_generate_together_equals_alone(demo):
    tokenizer = demo.tokenizer
    texts = ["In the beginning", "It is a truth universally acknowledged, that", "And Moses said unto", "She was", "Emma"]
    params = [
        SamplingParams(max_tokens=25),
        SamplingParams(max_tokens=12, temperature=1.0, seed=1, top_p=0.9),
        SamplingParams(max_tokens=30, temperature=0.8, seed=2, top_k=40, repetition_penalty=1.3),
        SamplingParams(max_tokens=20, repetition_penalty=1.2, logprobs=2),
        SamplingParams(max_tokens=8, temperature=1.5, seed=3, min_p=0.05),
    ]
    llm = LLM(demo.model, tokenizer=tokenizer, max_batch=3, prefill_chunk=4)
    tokens, together, _ = collect(llm.generate(texts, params), len(texts))
    for index, (text, p) in enumerate(zip(texts, params)):
        alone = collect(demo.generate(text, p), 1)
        assert alone[0][0] == tokens[index]
        assert alone[1][0] == together[index]
    assert all(together)


def test_generate_logprobs_and_penalty(demo):
    prompt = demo.tokenizer.encode("And it came to pass in those days, that")
    params = SamplingParams(max_tokens=12, repetition_penalty=1.4, logprobs=3, ignore_eos=True)
    history = list(prompt)
    for output in demo.generate([prompt], params):
        logits = demo.model.logits(torch.tensor(history))[-1].double()
        exact = logits.log_softmax(0)
        penalized = logits.clone()
        for token in set(history):
            penalized[token] = logits[token] / 1.4 if logits[token] > 0 else logits[token] * 1.4
        assert output.token_id == penalized.argmax().item()
        # the absorbed and the expanded form of attention differ by rounding in fp32
        assert output.logprobs.logprob == pytest.approx(exact[output.token_id].item(), abs=1e-3)
        best = exact.topk(3)
        assert [token for token, _ in output.logprobs.top] == best.indices.tolist()
        assert [value for _, value in output.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-3)
        history.append(output.token_id)
    assert len(history) == len(prompt) + 12
    assert set(history[len(prompt) :]) - set(prompt)


def test_describe(demo):
    # 5 rows of 128 + 32 and 3 index keys of 128 a token, in fp32
    assert demo.describe() == (
        "device cpu, activations float32, cache float32, kernels: reference (torch), "
        f"{2**30 // (4 * (5 * 160 + 3 * 128))} tokens a GiB of cache, {demo.max_context} in all"
    )
