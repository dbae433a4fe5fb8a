"""Text to token ids and back: `tokenizer.json`, the chat template, and decoding of a growing token list.

A checkpoint's own files decide: `tokenizer.json` (read by the `tokenizers` library), and `chat_template.jinja` or the
`chat_template` of `tokenizer_config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

Message = Mapping[str, Any]
ChatTemplate = str | Callable[..., str]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# What GLM models were trained to see before any text; no file of the checkpoint says so for raw text.
GLM_PREFIX = ("[gMASK]", "<sop>")
SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """A checkpoint's tokenizer.

    Attributes:
        prefix_ids: ids in front of raw text (`[gMASK]<sop>` for GLM, the bos token where the tokenizer asks for one, or none).
        vocab_size: one more than the largest id that has a text; a model's logits may be wider (padding rows, never sampled).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        prefix_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
        special_tokens: Mapping[str, str] | None = None,
        source: str = "tokenizer",
    ) -> None:
        self._backend = backend
        self.prefix_ids = tuple(prefix_ids)
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        self.source = source
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @classmethod
    def from_dir(cls, path: str | Path, *, chat_template: ChatTemplate | None = None) -> Tokenizer:
        """Read the tokenizer of the checkpoint directory `path`.

        Args:
            path: directory with `tokenizer.json`; the other files are optional.
            chat_template: replaces the checkpoint's template: Jinja source, or a function
                `(messages, add_generation_prompt=..., **kwargs) -> str` for models that ship none.

        Raises:
            ValueError: no `tokenizer.json`, or one of the files cannot be parsed.
        """
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{path}: no tokenizer.json; text prompts need one (token id prompts do not)")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{file}: not a tokenizer that the tokenizers library can read: {error}") from None
        # Truncation and padding belong to training pipelines; a prompt is never cut silently.
        backend.no_truncation()
        backend.no_padding()

        config = _read_json(path / "config.json")
        settings = _read_json(path / "tokenizer_config.json")
        special = {key: text for key in SPECIAL_TOKEN_KEYS if (text := _token_text(settings.get(key))) is not None}
        return cls(
            backend,
            prefix_ids=_prefix_ids(backend, str(config.get("model_type", "")), settings, special),
            chat_template=chat_template if chat_template is not None else _find_template(path, settings),
            special_tokens=special,
            source=str(path),
        )

    def encode(self, text: str, add_prefix: bool = True) -> list[int]:
        """Token ids of raw `text`, behind `prefix_ids` unless `add_prefix` is false or the text already begins with them.

        Special tokens written out in the text become their ids.
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        prefix = list(self.prefix_ids)
        if add_prefix and ids[: len(prefix)] != prefix:
            return prefix + ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that form no character become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def to_json(self) -> str:
        """The tokenizer as the text of a `tokenizer.json`."""
        return self._backend.to_str()

    def token_text(self, token_id: int) -> str:
        """Text of one token as the vocabulary has it, special tokens included."""
        return self.decode([token_id], skip_special_tokens=False)

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """Render `messages` (`{"role": ..., "content": ...}`) with the model's chat template; `kwargs` reach the template.

        Encode the result with `add_prefix=False`: the template writes the model's prefix itself.

        Raises:
            ValueError: the checkpoint has no chat template, or the template refuses the messages.
        """
        template = self.chat_template
        if template is None:
            raise ValueError(
                f"{self.source}: no chat_template.jinja and no chat_template in tokenizer_config.json; use a raw prompt"
            )
        if callable(template):
            return template(messages, add_generation_prompt=add_generation_prompt, **kwargs)
        import jinja2

        values = {**self.special_tokens, "tools": None, "documents": None, **kwargs}
        try:
            return self._compiled_template.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"{self.source}: the chat template refused the messages: {error}") from None

    def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: Any) -> list[int]:
        """Token ids of the rendered chat; see `apply_chat_template`."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt, **kwargs), add_prefix=False)

    @cached_property
    def _compiled_template(self) -> Any:
        assert isinstance(self.chat_template, str)
        return _compile_template(self.chat_template, self.source)


class StreamDetokenizer:
    """Text of a growing token list, piece by piece, never half a character.

    The pieces of `push` and `flush`, joined, are the decoded text of all pushed tokens. Only a short window is decoded each
    time: the tokens since the last point where the text ended on a whole character, behind the piece before it (decoders that
    treat the start of a text differently need that context).

    Args:
        tokenizer: decodes the window.
        context: the last tokens of the prompt; a character that they leave unfinished belongs to the first piece.
        skip_special_tokens: leave special tokens out of the text.
    """

    # A prompt's last tokens that are context enough: one character spans at most 4 tokens.
    CONTEXT = 8

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(context[-self.CONTEXT :])
        self._settled = len(self._window)
        self._emitted = self._stable(self._decode(self._window))

    def push(self, token_id: int) -> str:
        """Append a token; return the characters that are now certain (often one word, sometimes none)."""
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = self._stable(text)
        piece = text[self._emitted : stable]
        self._emitted = max(self._emitted, stable)
        if stable == len(text) and piece:
            del self._window[: self._settled]
            self._settled = len(self._window)
            self._emitted = len(self._decode(self._window))
        return piece

    def flush(self) -> str:
        """What is still held back: U+FFFD for a character that never became whole. The detokenizer is at its end then."""
        text = self._decode(self._window)
        piece = text[self._emitted :]
        self._emitted = len(text)
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    @staticmethod
    def _stable(text: str) -> int:
        """Length of `text` without an unfinished last character (up to 3 bytes, each possibly shown as one U+FFFD)."""
        end = len(text)
        while end > 0 and len(text) - end < 3 and text[end - 1] == REPLACEMENT:
            end -= 1
        return end


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: found a JSON {type(value).__name__}, required an object")
    return value


def _token_text(value: Any) -> str | None:
    """A special token in tokenizer_config.json is a string or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _prefix_ids(
    backend: tokenizers.Tokenizer, model_type: str, settings: Mapping[str, Any], special: Mapping[str, str]
) -> list[int]:
    if model_type.startswith("glm"):
        ids = [token for text in GLM_PREFIX if (token := backend.token_to_id(text)) is not None]
        if len(ids) == len(GLM_PREFIX):
            return ids
    add_bos = settings.get("add_bos_token")
    if add_bos is not None:
        bos = backend.token_to_id(special["bos_token"]) if add_bos and "bos_token" in special else None
        return [] if bos is None else [bos]
    # Newer files leave the decision to the post-processor: whatever it puts in front of a text.
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    return []


def _find_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) else None


def _compile_template(source: str, owner: str) -> Any:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}` marks the assistant's tokens for training; for inference its body stands as it is."""

        def __init__(self, environment: jinja2.Environment) -> None:
            super().__init__(environment)
            self.tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"{owner}: the chat template is not valid Jinja: {error}") from None
