"""Tokenizer: prefixes, chat templates, streaming text that never shows half a character."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import decoders, models, pre_tokenizers, processors

import exl3_triton
from exl3_triton.model.tokenizer import REPLACEMENT, StreamDetokenizer, Tokenizer

DEMO = Path(exl3_triton.__file__).parent / "demo"
SPECIAL = ["[gMASK]", "<sop>", "<bos>", "<|user|>", "<|assistant|>"]
SENTENCE = "Für 12 € gab's 👩‍👩‍👧 und 日本語, naïve café\n\tend."


def byte_backend(special=SPECIAL, merges=()) -> tokenizers.Tokenizer:
    """A byte-level tokenizer whose tokens are single bytes, and the given merges of them: many are parts of characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return backend


BYTES = Tokenizer(byte_backend(special=[]))


def write(path: Path, *, backend=None, config=None, settings=None, template=None) -> Path:
    (backend or byte_backend()).save(str(path / "tokenizer.json"))
    for name, value in (("config.json", config), ("tokenizer_config.json", settings)):
        if value is not None:
            (path / name).write_text(json.dumps(value))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


@pytest.mark.parametrize(
    ("model_type", "settings", "special", "prefix"),
    [
        ("glm_moe_dsa", {"add_bos_token": True, "bos_token": "<bos>"}, SPECIAL, ["[gMASK]", "<sop>"]),
        ("glm4_moe", None, SPECIAL, ["[gMASK]", "<sop>"]),
        ("glm4_moe", None, ["<bos>"], []),
        ("deepseek_v3", {"add_bos_token": True, "bos_token": {"content": "<bos>", "lstrip": False}}, SPECIAL, ["<bos>"]),
        ("deepseek_v3", {"add_bos_token": False, "bos_token": "<bos>"}, SPECIAL, []),
        ("deepseek_v3", {"bos_token": "<bos>"}, SPECIAL, []),
        (None, None, SPECIAL, []),
    ],
)
def test_encode_prefix(tmp_path, model_type, settings, special, prefix):
    config = None if model_type is None else {"model_type": model_type}
    tokenizer = Tokenizer.from_dir(write(tmp_path, backend=byte_backend(special), config=config, settings=settings))
    text = tokenizer.encode("abc é", add_prefix=False)
    assert tokenizer.decode(text) == "abc é"
    ids = tokenizer.encode("abc é")
    assert [tokenizer.token_text(token) for token in ids[: len(prefix)]] == prefix
    assert ids[len(prefix) :] == text
    # a text that brings the prefix along does not get it twice
    assert tokenizer.encode("".join(prefix) + "abc é") == ids


def test_encode_prefix_of_post_processor(tmp_path):
    backend = byte_backend()
    bos = backend.token_to_id("<bos>")
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A <sop>", special_tokens=[("<bos>", bos), ("<sop>", bos - 1)]
    )
    assert Tokenizer.from_dir(write(tmp_path, backend=backend)).prefix_ids == (bos,)


def test_encode_never_truncates(tmp_path):
    backend = byte_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer.from_dir(write(tmp_path, backend=backend))
    assert len(tokenizer.encode("abcdefgh")) == 8


def test_vocab_size_counts_added_tokens():
    assert Tokenizer(byte_backend()).vocab_size == 256 + len(SPECIAL)


def test_from_dir_refuses(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.from_dir(tmp_path)
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: not valid JSON"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ValueError, match="found a JSON list, required an object"):
        Tokenizer.from_dir(tmp_path)


TEMPLATE = """[gMASK]<sop>
{%- for m in messages %}
    {%- if m.role == 'stop' %}{% break %}{% endif %}
    {%- if m.role == 'assistant' %}<|assistant|>{% generation %}{{ m.content }}{% endgeneration %}
    {%- else %}<|user|>{{ m.content }}{% endif %}
{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""


def test_apply_chat_template(tmp_path):
    tokenizer = Tokenizer.from_dir(write(tmp_path, config={"model_type": "glm4_moe"}, template=TEMPLATE))
    messages = [{"role": "user", "content": "Hé"}, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "x"}]
    text = "[gMASK]<sop><|user|>Hé<|assistant|>yo<|user|>x"
    assert tokenizer.apply_chat_template(messages) == text + "<|assistant|>"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == text
    assert tokenizer.apply_chat_template([*messages, {"role": "stop"}, messages[0]], add_generation_prompt=False) == text
    with_tools = tokenizer.apply_chat_template(messages, False, tools=[{"name": "grüße <&>"}])
    assert with_tools == text + '[{"name": "grüße <&>"}]'
    ids = tokenizer.encode_chat(messages)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text + "<|assistant|>"
    assert ids.count(tokenizer.prefix_ids[0]) == 1


def test_apply_chat_template_globals(tmp_path):
    template = (
        "{{ strftime_now('%Y') }} {{ bos_token }}{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}"
    )
    tokenizer = Tokenizer.from_dir(write(tmp_path, settings={"bos_token": {"content": "<bos>"}, "chat_template": template}))
    year = datetime.datetime.now().year
    assert tokenizer.apply_chat_template([{}]) in (f"{year} <bos>", f"{year - 1} <bos>")
    with pytest.raises(ValueError, match="refused the messages: one only"):
        tokenizer.apply_chat_template([{}, {}])


def test_chat_template_sources(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    settings = {"chat_template": named}
    assert Tokenizer.from_dir(write(tmp_path, settings=settings)).apply_chat_template([]) == "D"
    assert Tokenizer.from_dir(write(tmp_path, settings=settings, template="F")).apply_chat_template([]) == "F"
    override = Tokenizer.from_dir(
        tmp_path, chat_template=lambda messages, add_generation_prompt: f"{messages}{add_generation_prompt}"
    )
    assert override.apply_chat_template([1]) == "[1]True"


def test_apply_chat_template_refuses(tmp_path):
    with pytest.raises(ValueError, match=r"no chat_template\.jinja"):
        Tokenizer.from_dir(write(tmp_path)).apply_chat_template([])
    for template, messages in (
        ("{% if %}", []),
        ("{{ messages[0].content + 'x' }}", [{"content": None}]),
        ("{{ messages[0].nothing + 'x' }}", [{}]),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", []),
        ("{{ messages.append(1) }}", []),
    ):
        with pytest.raises(ValueError, match="chat template"):
            Tokenizer.from_dir(write(tmp_path, template=template)).apply_chat_template(messages)


def stream(tokenizer, ids, context=()):
    detokenizer = StreamDetokenizer(tokenizer, context)
    return [detokenizer.push(token) for token in ids], detokenizer.flush()


def test_stream_detokenizer_holds_back_characters():
    pieces, rest = stream(BYTES, BYTES.encode(SENTENCE))
    assert "".join(pieces) == SENTENCE
    assert rest == ""
    # every token is one byte: each character comes with its last byte
    assert [len(piece) for piece in stream(BYTES, BYTES.encode("aé€👧"))[0]] == [1, 0, 1, 0, 0, 1, 0, 0, 0, 1]


@settings(deadline=None, max_examples=200)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters=REPLACEMENT), max_size=60), split=st.integers(0, 60))
def test_stream_detokenizer_any_text(text, split):
    ids = BYTES.encode(text)
    shown = ""
    detokenizer = StreamDetokenizer(BYTES)
    for token in ids:
        shown += detokenizer.push(token)
        assert text.startswith(shown)
    assert shown + detokenizer.flush() == text
    # cut anywhere, also inside a character: prompt and continuation make the whole
    split = min(split, len(ids))
    before = BYTES.decode(ids[:split])
    pieces, rest = stream(BYTES, ids[split:], ids[:split])
    assert before.removesuffix(REPLACEMENT) + "".join(pieces) + rest == text


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=60))
def test_stream_detokenizer_any_bytes(ids):
    pieces, rest = stream(BYTES, ids)
    assert "".join(pieces) + rest == BYTES.decode(ids)


def test_stream_detokenizer_skips_special_tokens():
    tokenizer = Tokenizer(byte_backend())
    ids = tokenizer.encode("a<bos>€<sop>b")
    assert stream(tokenizer, ids) == (["a", "", "", "", "€", "", "b"], "")
    shown = StreamDetokenizer(tokenizer, skip_special_tokens=False)
    assert "".join(shown.push(token) for token in ids) == "a<bos>€<sop>b"


def test_stream_detokenizer_flushes_unfinished():
    ids = BYTES.encode("a👧")[:-1]
    pieces, rest = stream(BYTES, ids)
    assert "".join(pieces) == "a"
    assert rest == REPLACEMENT


def test_stream_detokenizer_keeps_leading_space():
    # decoders in the manner of SentencePiece drop the space at the start of a text; in a continuation it is part of the text
    vocabulary = {"<unk>": 0, "▁Hello": 1, "▁world": 2, "s": 3}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode([2]) == "world"
    assert "".join(stream(tokenizer, [2, 3, 2], context=[1])[0]) == " worlds world"


def test_demo_encode_matches_golden(testdata):
    tokenizer = Tokenizer.from_dir(DEMO)
    golden = load_file(testdata / "demo" / "demo-exl3-3.0bpw-mcg" / "golden.safetensors")
    ids = golden["prompt0.input_ids"].tolist()
    assert tokenizer.encode("In the beginning God created the heaven") == ids
    message = {"role": "user", "content": "Elizabeth walked to the window, and saw"}
    assert tokenizer.encode_chat([message]) == golden["prompt1.input_ids"].tolist()


def test_demo_encode_round_trip():
    tokenizer = Tokenizer.from_dir(DEMO)
    ids = tokenizer.encode(SENTENCE)
    assert len(ids) > 10
    assert tokenizer.decode(ids) == SENTENCE
    assert "".join(stream(tokenizer, ids)[0]) == SENTENCE
