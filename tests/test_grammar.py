"""Structured output: every text is what its schema or grammar allows, with and without speculation."""

from __future__ import annotations

import json
import random
import sys

import pytest
import torch
from test_scheduler import pause_at_random

import exl3_triton
from exl3_triton.model.grammar import GrammarCompiler
from exl3_triton.model.runner import LLM
from exl3_triton.model.sampling import SamplingBatch, SamplingParams, sample

pytest.importorskip("llguidance", reason="needs the extra `grammar` (llguidance)")
jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema, which checks what was generated")

DEMO = exl3_triton.__path__[0] + "/demo"


@pytest.fixture(scope="module")
def models():
    """Number of drafts -> LLM; both share one model."""
    model = exl3_triton.load(DEMO, progress=False, mtp=True)
    tokenizer = LLM(DEMO, progress=False).tokenizer
    return {number: LLM(model, tokenizer=tokenizer, speculate=number, max_batch=10, cache_tokens=16384) for number in (0, 3)}


@pytest.fixture(scope="module")
def compiler(models):
    llm = models[0]
    return GrammarCompiler(llm.tokenizer, llm.vocab_size, llm.model.config.eos_token_ids)


def random_schema(chance, depth=0):
    """A schema whose texts are bounded: a model that only babbles must come to an end by the schema alone."""
    kind = chance.choice(("object", "array", "string", "integer", "boolean", "null", "enum", "any")[: 8 if depth < 2 else 7])
    if depth == 0 or (kind == "object" and depth < 3):
        names = chance.sample(["name", "age", "tags", "a b", "größe", "x1", "nested", "id"], chance.randint(1, 4))
        properties = {name: random_schema(chance, depth + 1) for name in names}
        required = [name for name in names if chance.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array" and depth < 3:
        low = chance.randint(0, 2)
        return {
            "type": "array",
            "items": random_schema(chance, depth + 1),
            "minItems": low,
            "maxItems": low + chance.randint(0, 2),
        }
    if kind == "integer":
        low = chance.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 1000)}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "enum":
        return {"enum": chance.sample(["red", "green", 3, True, None, "two words"], 3)}
    if kind == "any":
        return {"anyOf": [random_schema(chance, depth + 2), random_schema(chance, depth + 2)]}
    if chance.random() < 0.3:
        return {"type": "string", "pattern": chance.choice(["^[a-c]{1,4}$", "^[0-9]{3}-[0-9]{2}$", "^(yes|no)$"])}
    return {"type": "string", "minLength": chance.randint(0, 2), "maxLength": chance.randint(2, 12)}


def check_random_schemas(llm, count, seed):
    chance = random.Random(seed)
    schemas = [random_schema(chance) for _ in range(count)]
    # compact text: the demo likes blank lines, and they take their time
    compact = [schema | {"x-guidance": {"whitespace_pattern": " "}} for schema in schemas]
    params = [
        SamplingParams(json_schema=schema, max_tokens=1000, temperature=chance.choice((0.0, 1.0)), seed=index)
        for index, schema in enumerate(compact)
    ]
    texts, reasons = [""] * count, [None] * count
    for output in llm.generate(["Elizabeth said: "] * count, params):
        texts[output.index] += output.text
        reasons[output.index] = output.finish_reason
    assert set(reasons) == {"stop"}
    for schema, text in zip(schemas, texts):
        jsonschema.validate(json.loads(text), schema)
    assert len(set(texts)) > count // 2


@pytest.mark.parametrize("number", [0, 3], ids=["plain", "speculation"])
def test_generate_random_schemas(models, number):
    check_random_schemas(models[number], 8, 1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 3], ids=["plain", "speculation"])
def test_generate_200_random_schemas(models, number):
    check_random_schemas(models[number], 200, 2)


@pytest.mark.parametrize("number", [0, 3], ids=["plain", "speculation"])
def test_generate_random_schemas_through_pauses(models, monkeypatch, number):
    pause_at_random(monkeypatch, random.Random(number))
    before = models[number].scheduling.pauses
    check_random_schemas(models[number], 4, 5)
    assert models[number].scheduling.pauses > before


def test_generate_greedy_is_the_same_under_speculation(models):
    """A row without a grammar beside one with; greedy choices under the masks of every verified position."""
    schema = {"type": "object", "properties": {"who": {"type": "string", "maxLength": 40}}, "required": ["who"]}
    params = [
        SamplingParams(json_schema=schema | {"additionalProperties": False}, max_tokens=200, logprobs=1),
        SamplingParams(max_tokens=30),
        SamplingParams(grammar='start: "And " ("it came" | "the king") " to pass"', max_tokens=60),
    ]
    found = {}
    for number, llm in models.items():
        outputs = list(llm.generate(["It is said: "] * 3, params))
        found[number] = [
            [(each.token_id, each.text, each.finish_reason) for each in outputs if each.index == index] for index in range(3)
        ]
    assert found[0] == found[3]
    texts = ["".join(text for _, text, _ in each) for each in found[3]]
    assert set(json.loads(texts[0])) == {"who"}
    assert texts[2] in ("And it came to pass", "And the king to pass")
    assert [each[-1][2] for each in found[3]] == ["stop", "length", "stop"]
    assert models[3].speculation.accepted > 0


def test_generate_ends_by_length_inside_a_grammar(models):
    for llm in models.values():
        outputs = list(llm.generate("a", SamplingParams(json_schema={"type": "array", "minItems": 50}, max_tokens=9)))
        assert len(outputs) == 9
        assert outputs[-1].finish_reason == "length"


def test_mask_follows_drafts_and_leaves_the_state_alone(compiler, models):
    """Each mask is the one that a grammar which really went that way has; behind a forbidden draft all is allowed."""
    tokenizer = models[0].tokenizer
    text = tokenizer.encode('{"a": [1, 25]}', add_prefix=False)
    params = SamplingParams(json_schema={"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]})
    grammar, other = compiler.compile(params), compiler.compile(params)
    masks = grammar.mask(text[:-1])
    assert torch.equal(masks[:1], grammar.mask())
    for token, mask in zip(text, masks):
        assert torch.equal(other.mask()[0], mask)
        assert (mask[token // 32] >> (token % 32)) & 1
        assert not bool((mask == -1).all())
        assert not other.finished
        other.advance(token)
    forbidden = grammar.mask([text[0], text[0], text[0]])
    assert torch.equal(forbidden[:2], masks[:2])
    assert (forbidden[2:] == -1).all()
    assert torch.equal(grammar.mask(), masks[:1])
    with pytest.raises(RuntimeError, match="grammar: "):
        grammar.advance(text[-1])


def test_compile_bounds_whitespace(compiler, models):
    tokenizer = models[0].tokenizer
    params = SamplingParams(json_schema={"type": "array", "items": {"type": "integer"}, "minItems": 1})
    for blanks, fits in ((0, True), (1, True), (40, True), (41, False)):
        text = tokenizer.encode("[" + "\n" * blanks + "7]", add_prefix=False)
        grammar = compiler.compile(params)
        if not fits:
            with pytest.raises(RuntimeError, match="grammar: "):
                [grammar.advance(token) for token in text]
            continue
        for token in text:
            grammar.advance(token)
        assert grammar.finished


def test_sample_chooses_among_allowed_ids_only():
    count, vocab = 500, 70
    logits = torch.randn(count, vocab)
    allowed = torch.rand(count, vocab) < 0.1
    allowed[:, 37] = True
    allowed[0] = False
    words = torch.zeros(count, 3, dtype=torch.int64)
    for token in range(vocab):
        words[:, token // 32] |= allowed[:, token].long() << (token % 32)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    for params in (SamplingParams(), SamplingParams(temperature=1.5, top_k=3), SamplingParams(temperature=1.0, top_p=0.5)):
        batch = SamplingBatch.from_params([params] * count, list(range(count)))
        tokens = sample(logits, batch, torch.arange(count), allowed=words).tokens
        assert tokens[0] == -1  # nothing is allowed there
        assert allowed[torch.arange(1, count), tokens[1:]].all()
        if params.greedy:
            assert torch.equal(tokens[1:], logits.masked_fill(~allowed, -torch.inf)[1:].argmax(1))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"json_schema": "{"}, "json_schema: not valid JSON"),
        ({"json_schema": [1]}, "json_schema: found list, required a JSON object"),
        ({"json_schema": {"const": {1, 2}}}, "json_schema: not JSON"),
        ({"grammar": " "}, "grammar: found ' ', required the text of a grammar"),
        ({"grammar": 'start: "a"', "json_schema": {}}, "json_schema, grammar: found both"),
        ({"json_schema": {}, "ignore_eos": True}, "json_schema, grammar: found ignore_eos"),
    ],
)
def test_sampling_params_refuse(options, match):
    with pytest.raises(ValueError, match=match):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("options", "match"),
    [({"json_schema": {"type": "text"}}, "json_schema: Invalid type: text"), ({"grammar": "start: /[a/"}, "grammar: ")],
)
def test_generate_refuses_an_invalid_grammar_before_any_work(models, options, match):
    with pytest.raises(ValueError, match=match):
        models[0].generate("a", SamplingParams(**options))


def test_generate_refuses_a_grammar_without_tokenizer_or_end(models):
    params = SamplingParams(json_schema={})
    with pytest.raises(ValueError, match="they need a tokenizer"):
        LLM(models[0].model).generate([[5]], params)
    with pytest.raises(ValueError, match="no end-of-sequence id"):
        GrammarCompiler(models[0].tokenizer, 4096, ())


def test_compiler_says_what_to_install(monkeypatch, models):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"pip install 'exl3-triton\[grammar\]'"):
        GrammarCompiler(models[0].tokenizer, 4096, (0,))
