"""The model's shape, read from a Hugging Face `config.json`, one reader per family; unknown settings are refused."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint import read_json_object

_REQUIRED: Any = object()
_PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class Yarn:
    """Rotary positions stretched to `factor` times the context of training (YaRN, arXiv:2309.00071, as DeepSeek uses it).

    mscale and mscale_all_dim: 0 where the config does not say; transformers then scales the table by `magnitude(1)`.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def magnitude(self, mscale: float) -> float:
        """0.1 * mscale * ln(factor) + 1."""
        return 0.1 * mscale * math.log(max(self.factor, 1.0)) + 1.0

    @property
    def table_scale(self) -> float:
        """Factor on cosines and sines; 1 for every published model."""
        if self.mscale and self.mscale_all_dim:
            return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        return self.magnitude(1.0)

    def ramp(self, theta: float, width: int) -> list[float]:
        """For each of width/2 frequencies: 0 (kept) .. 1 (divided by `factor`), by how often it turns in the old context."""

        def pair(turns: float) -> float:
            return width * math.log(self.original_max_position_embeddings / (2 * math.pi * turns)) / (2 * math.log(theta))

        low, high = max(math.floor(pair(self.beta_fast)), 0), min(math.ceil(pair(self.beta_slow)), width - 1)
        span = high - low or 0.001  # the one case that would divide by zero, as transformers resolves it
        return [min(max((j - low) / span, 0.0), 1.0) for j in range(width // 2)]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of one model, the same for every family; widths are in elements.

    Attention is either latent (MLA: `kv_lora_rank` > 0) or grouped (GQA: `num_kv_heads` > 0); a width that a family lacks is
    0. A head of queries has `qk_rope_head_dim` rotated and `qk_nope_head_dim` plain elements: plain ones first in MLA, rotated
    ones first in GQA. `layer_kinds[l]` is "dense" or "sparse" (routed experts); `indexer_kinds[l]` is "full" (the layer owns
    an indexer) or "shared" (it attends to what the last full layer before it selected); none where the family has no indexer.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 0
    rms_norm_eps: float
    latent_norm_eps: float = 1e-6
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    attention_bias: bool = False
    use_qk_norm: bool = False
    rope_theta: float
    rope_interleave: bool
    yarn: Yarn | None = None
    max_position_embeddings: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_shared_experts: int
    experts_per_token: int
    n_group: int
    topk_group: int
    scoring: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    layer_kinds: tuple[str, ...]
    indexer_kinds: tuple[str, ...] = ()
    index_num_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    indexer_rope_interleave: bool = False
    num_mtp_layers: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @property
    def head_dim(self) -> int:
        """Width of a query head (and, in GQA, of a key and a value head)."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def owns_indexer(self, layer: int) -> bool:
        return bool(self.indexer_kinds) and self.indexer_kinds[layer] == "full"

    @property
    def kv_width(self) -> int:
        """Elements that a token takes in the key-value cache of one layer, the indexer's key not counted."""
        if self.kv_lora_rank:
            return self.kv_lora_rank + self.qk_rope_head_dim
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)

    @property
    def softmax_scale(self) -> float:
        """Factor on the attention scores: head_dim^-1/2, in MLA times YaRN's magnitude squared.

        Absorbing the up-projections into the queries does not change it.
        """
        scale = self.head_dim**-0.5
        if self.yarn is not None and self.kv_lora_rank:
            scale *= self.yarn.magnitude(self.yarn.mscale_all_dim) ** 2
        return scale

    def rope_frequencies(self) -> list[float]:
        """Radians a position for each of the qk_rope_head_dim / 2 rotations."""
        width = self.qk_rope_head_dim
        plain = [self.rope_theta ** (-2 * j / width) for j in range(width // 2)]
        if self.yarn is None:
            return plain
        ramp = self.yarn.ramp(self.rope_theta, width)
        return [f / self.yarn.factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]

    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """The published sizes of a model, e.g. "glm-5.2", without a checkpoint. Raises ValueError listing the known names."""
        if name not in cls.presets():
            raise ValueError(f"preset {name!r} is not known; known: {', '.join(cls.presets())}")
        return cls.from_dict(read_json_object(_PRESETS / f"{name}.json"))

    @staticmethod
    def presets() -> tuple[str, ...]:
        """The names that `preset` knows."""
        return tuple(sorted(each.stem for each in _PRESETS.glob("*.json")))

    @classmethod
    def from_dir(cls, path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None) -> ModelConfig:
        """Reads `config.json`, and `generation_config.json` for the stop tokens where it exists.

        Raises ValueError as `from_dict`, and for files that are absent or no JSON objects.
        """
        directory = Path(path)
        config = read_json_object(directory / "config.json")
        generation_path = directory / "generation_config.json"
        generation = read_json_object(generation_path) if generation_path.is_file() else None
        return cls.from_dict(config, overrides, generation_config=generation)

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
        *,
        generation_config: Mapping[str, Any] | None = None,
    ) -> ModelConfig:
        """`config` is a parsed `config.json`; `overrides` replaces keys of it before reading.

        The stop tokens come from the overrides, else from `generation_config`, else from `config`. Raises ValueError naming
        the key for an unknown family, a missing or ill-typed key, a setting that is not supported, and an override that would
        have no effect.
        """
        overrides = dict(overrides or {})
        keys = _Keys({**text_config(config), **overrides}, overrides)
        family = keys.get("model_type", None)
        if not isinstance(family, str) or family not in FAMILIES:
            raise ValueError(_unsupported(family))
        if generation_config and generation_config.get("eos_token_id") is not None and "eos_token_id" not in overrides:
            keys.values["eos_token_id"] = generation_config["eos_token_id"]
        result = FAMILIES[family](keys)
        unknown = sorted(key for key in overrides if key not in keys.known and key not in text_config(config))
        if unknown:
            names = ", ".join(unknown)
            raise ValueError(f"overrides name keys that neither config.json nor the {family} reader knows: {names}")
        return result


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's keys: multimodal wrappers nest them in `text_config`, whose values win over the wrapper's."""
    nested = config.get("text_config")
    if nested is None:
        return dict(config)
    if not isinstance(nested, Mapping):
        raise ValueError(f"text_config: found {nested!r}, an object is required")
    return {**{key: value for key, value in config.items() if key != "text_config"}, **nested}


def _unsupported(family: object) -> str:
    supported = f"supported: {', '.join(sorted(FAMILIES))}"
    if family is None:
        return f"config.json has no model_type; {supported}"
    message = f"model_type {family!r} is not supported; {supported}"
    if isinstance(family, str) and family.startswith("glm5_next"):
        message += (
            ". GLM-5 Next is a different architecture from glm_moe_dsa: linear attention in most layers, sparse attention"
            " without rotary positions over a pooled index in the others, and several residual streams"
        )
    return message


class _Keys:
    """Typed access to a config that remembers which keys a reader knows, so that overrides without effect are caught."""

    def __init__(self, values: dict[str, Any], overrides: Mapping[str, Any]):
        self.values = values
        self.overrides = overrides
        self.known: set[str] = set()

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value; `default` where the key is absent or null; an error where there is no default."""
        self.known.add(key)
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ValueError(f"config.json: {key} is missing")
        return default

    def integer(self, key: str, default: Any = _REQUIRED, *, minimum: int = 1) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(f"config.json: {key} = {value!r}, an integer >= {minimum} is required")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        return _positive(key, self.get(key, default))

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"config.json: {key} = {value!r}, true or false is required")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuses every value but these; an absent key is fine."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            choice = " or ".join(repr(item) for item in allowed)
            raise self.unsupported(key, value, f", {choice} is required")

    def absent(self, key: str) -> None:
        """Refuses any value but null."""
        if self.get(key, None) is not None:
            raise self.unsupported(key, self.values[key])

    def unsupported(self, key: str, value: Any, required: str = "") -> ValueError:
        return ValueError(f"config.json: {key} = {value!r} is not supported for {self.values['model_type']}{required}")

    def unused(self, why: str, *keys: str) -> None:
        """These keys decide nothing: overriding one is refused."""
        for key in keys:
            self.known.add(key)
            if key in self.overrides:
                raise ValueError(f"overrides: {key} has no effect because {why}")

    def shadow(self, by: str, *keys: str) -> None:
        """`by` decides, so that overriding one of `keys` would change nothing, unless `by` is overridden too."""
        self.known.update(keys)
        if by not in self.overrides:
            self.unused(f"config.json has {by}; override {by} instead", *keys)


def _positive(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"config.json: {key} = {value!r}, a positive finite number is required")
    return float(value)


def _per_layer(key: str, values: Any, num_layers: int, kinds: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(values, list) or len(values) != num_layers:
        found = f"{len(values)} entries" if isinstance(values, list) else repr(values)
        raise ValueError(f"config.json: {key} has {found}, a list of num_hidden_layers = {num_layers} entries is required")
    for layer, value in enumerate(values):
        if value not in kinds:
            raise ValueError(f"config.json: {key}[{layer}] = {value!r}, one of {', '.join(map(repr, kinds))} is required")
    return tuple(values)


def _layer_kinds(keys: _Keys, num_layers: int, first_dense: Any) -> tuple[str, ...]:
    """Which layers have routed experts: `mlp_layer_types` beats `first_k_dense_replace` with `moe_layer_freq`."""
    listed = keys.get("mlp_layer_types", None)
    if listed is not None:
        keys.shadow("mlp_layer_types", "first_k_dense_replace", "moe_layer_freq")
        return _per_layer("mlp_layer_types", listed, num_layers, ("dense", "sparse"))
    first = keys.integer("first_k_dense_replace", first_dense, minimum=0)
    frequency = keys.integer("moe_layer_freq", 1)
    return tuple("sparse" if layer >= first and layer % frequency == 0 else "dense" for layer in range(num_layers))


def _indexer_kinds(keys: _Keys, num_layers: int) -> tuple[str, ...]:
    """Which layers own an indexer: `indexer_types`, else `index_topk_pattern` ("FSSS..."), else frequency and offset."""
    listed, pattern = keys.get("indexer_types", None), keys.get("index_topk_pattern", None)
    rule = ("index_topk_freq", "index_skip_topk_offset")
    if listed is not None:
        keys.shadow("indexer_types", "index_topk_pattern", *rule)
        source, kinds = "indexer_types", _per_layer("indexer_types", listed, num_layers, ("full", "shared"))
    elif pattern is not None:
        keys.shadow("index_topk_pattern", *rule)
        letters = list(pattern) if isinstance(pattern, str) else pattern
        source = "index_topk_pattern"
        kinds = tuple({"F": "full", "S": "shared"}[letter] for letter in _per_layer(source, letters, num_layers, ("F", "S")))
    else:
        source, frequency = "index_topk_freq", keys.integer("index_topk_freq", 1)
        offset = keys.integer("index_skip_topk_offset", 2, minimum=0)
        kinds = tuple("full" if max(layer - offset + 1, 0) % frequency == 0 else "shared" for layer in range(num_layers))
    if kinds[0] != "full":
        raise ValueError(f"config.json: {source} makes layer 0 'shared', but there is no full layer before it to share with")
    return kinds


_YARN_KEYS = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
_ROPE_KEYS = {"rope_theta", "rope_type", "partial_rotary_factor"}


def _rope(keys: _Keys, default_part: float = 1.0) -> tuple[float, dict[str, Any]]:
    """(The rotated part of a head, theta and YaRN), in either spelling: `rope_parameters`, or flat beside `rope_scaling`.

    A value may be given twice if both agree.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def put(key: str, value: Any, origin: str) -> None:
        if values.setdefault(key, value) != value:
            raise ValueError(f"config.json: {origin} = {value!r} contradicts {origins[key]} = {values[key]!r}")
        origins.setdefault(key, origin)

    for name in ("rope_parameters", "rope_scaling"):
        given = keys.get(name, {})
        if not isinstance(given, Mapping):
            raise ValueError(f"config.json: {name} = {given!r}, an object is required")
        for key, value in given.items():
            if value is None:
                continue
            if key != "type" and key not in _ROPE_KEYS | _YARN_KEYS:
                raise keys.unsupported(f"{name}.{key}", value)
            put("rope_type" if key == "type" else key, value, f"{name}.{key}")
    for key in ("rope_theta", "partial_rotary_factor"):
        if keys.get(key, None) is not None:
            put(key, keys.get(key), key)

    def number(key: str, default: float | None = None) -> float:
        if key not in values:
            if default is None:
                raise ValueError(f"config.json: {key} is missing")
            return default
        return _positive(origins[key], values[key])

    part = number("partial_rotary_factor", default_part)
    if part > 1 or (default_part == 1 and part != 1):
        rule = ", 1 is required" if default_part == 1 else ", at most 1 is required"
        raise keys.unsupported(origins["partial_rotary_factor"], values["partial_rotary_factor"], rule)
    kind, theta = values.get("rope_type", "default"), number("rope_theta")
    if theta <= 1:
        raise ValueError(f"config.json: {origins['rope_theta']} = {theta}, a number above 1 is required")
    if kind == "default":
        for key in sorted(_YARN_KEYS & values.keys()):
            raise keys.unsupported(origins[key], values[key], ": the rope type is 'default'")
        return part, {"rope_theta": theta}
    if kind != "yarn":
        raise keys.unsupported(origins["rope_type"], kind, ", 'default' or 'yarn' is required")
    original = number("original_max_position_embeddings")
    if original != int(original):
        raise ValueError(f"config.json: {origins['original_max_position_embeddings']} = {original}, an integer is required")
    # zero, or absent, is a value of its own here
    mscales = {key: number(key) if values.get(key) else 0.0 for key in ("mscale", "mscale_all_dim")}
    betas = {"beta_fast": number("beta_fast", 32.0), "beta_slow": number("beta_slow", 1.0)}
    return part, {"rope_theta": theta, "yarn": Yarn(number("factor"), int(original), **betas, **mscales)}


def _eos_token_ids(keys: _Keys) -> tuple[int, ...]:
    value = keys.get("eos_token_id", [])
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
        raise ValueError(f"eos_token_id = {value!r}, a token id or a list of token ids is required")
    return tuple(ids)


def _check_routing(num_experts: int, per_token: int, n_group: int, topk_group: int) -> None:
    if num_experts % n_group:
        raise ValueError(f"config.json: n_routed_experts = {num_experts} is not divisible by n_group = {n_group}")
    if topk_group > n_group:
        raise ValueError(f"config.json: topk_group = {topk_group} is larger than n_group = {n_group}")
    reachable = num_experts // n_group * topk_group
    if per_token > reachable:
        raise ValueError(f"config.json: num_experts_per_tok = {per_token}, but routing chooses among {reachable} experts only")


def _latent_attention(keys: _Keys, *, q_lora: bool = False) -> dict[str, Any]:
    """MLA; with `q_lora` queries must come from a latent, as an indexer needs it, else they may.

    `head_dim` and `num_key_value_heads` are never read: these configs put one of several head widths, or anything, there.
    """
    keys.only("attention_bias", False)
    nope, rope = keys.integer("qk_nope_head_dim"), keys.integer("qk_rope_head_dim")
    if rope % 2:
        raise ValueError(f"config.json: qk_rope_head_dim = {rope}, an even number is required (rotations act on pairs)")
    if keys.integer("qk_head_dim", nope + rope) != nope + rope:
        found = keys.get("qk_head_dim")
        raise ValueError(f"config.json: qk_head_dim = {found}, nope + rope = {nope + rope} is required")
    direct = not q_lora and keys.get("q_lora_rank", None) is None
    return {
        # transformers builds the two latent norms with this value whatever rms_norm_eps says
        "latent_norm_eps": keys.number("latent_norm_eps", 1e-6),
        "q_lora_rank": None if direct else keys.integer("q_lora_rank"),
        "kv_lora_rank": keys.integer("kv_lora_rank"),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": keys.integer("v_head_dim"),
        "rope_interleave": keys.flag("rope_interleave", True),
        **_rope(keys)[1],
    }


def _grouped_attention(keys: _Keys) -> dict[str, Any]:
    """GQA as in GLM-4.5: half-split rotary positions on the first part of a head, biases on q, k, v, norms on q and k."""
    keys.only("rope_interleave", False)
    heads, kv_heads = keys.integer("num_attention_heads"), keys.integer("num_key_value_heads")
    if heads % kv_heads:
        raise ValueError(f"config.json: num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}")
    width = keys.integer("head_dim", keys.integer("hidden_size") // heads)
    part, rope = _rope(keys, 0.5)
    rotated = int(width * part)
    if rotated < 2 or rotated % 2:
        raise ValueError(
            f"config.json: head_dim = {width} times partial_rotary_factor = {part} makes {rotated} rotated elements, an even "
            "number above 0 is required"
        )
    return {
        "num_kv_heads": kv_heads,
        "qk_nope_head_dim": width - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": width,
        "attention_bias": keys.flag("attention_bias", False),
        "use_qk_norm": keys.flag("use_qk_norm", False),
        "rope_interleave": False,
        **rope,
    }


def _indexer(keys: _Keys, *, interleave: bool) -> dict[str, Any]:
    """The indexer of sparse attention; it rotates the first qk_rope_head_dim elements of its keys."""
    width, rope = keys.integer("index_head_dim"), keys.integer("qk_rope_head_dim")
    if width < rope:
        raise ValueError(f"config.json: index_head_dim = {width}, at least qk_rope_head_dim = {rope} is required")
    return {
        "indexer_kinds": _indexer_kinds(keys, keys.integer("num_hidden_layers")),
        "index_num_heads": keys.integer("index_n_heads"),
        "index_head_dim": width,
        "index_topk": keys.integer("index_topk"),
        "indexer_rope_interleave": keys.flag("indexer_rope_interleave", interleave),
    }


def _sigmoid_router(keys: _Keys) -> dict[str, Any]:
    """DeepSeek-V3's: sigmoid scores, chosen with a correction bias, in groups."""
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    return {
        "scoring": "sigmoid",
        "n_group": keys.integer("n_group", 1),
        "topk_group": keys.integer("topk_group", 1),
        "norm_topk_prob": keys.flag("norm_topk_prob", True),
    }


def _softmax_router(keys: _Keys) -> dict[str, Any]:
    """DeepSeek-V2's: softmax scores, never normalised (transformers ignores `norm_topk_prob`), in groups or not."""
    keys.only("scoring_func", "softmax")
    keys.only("topk_method", "greedy", "group_limited_greedy")
    keys.unused("this family never normalises the weights of the chosen experts", "norm_topk_prob")
    router = {"scoring": "softmax", "norm_topk_prob": False}
    if keys.get("topk_method", "greedy") == "greedy":
        keys.unused("topk_method is 'greedy'", "n_group", "topk_group")
        return {**router, "n_group": 1, "topk_group": 1}
    return {**router, "n_group": keys.integer("n_group"), "topk_group": keys.integer("topk_group")}


def _model(
    keys: _Keys, *parts: Mapping[str, Any], attention: str = "full_attention", first_dense: Any = _REQUIRED
) -> ModelConfig:
    """What all families have, and the `parts` of one; `attention`: what `layer_types` may say."""
    keys.only("hidden_act", "silu")
    keys.only("mlp_bias", False)
    keys.absent("swiglu_limit")
    num_layers = keys.integer("num_hidden_layers")
    if keys.get("layer_types", None) is not None:
        _per_layer("layer_types", keys.get("layer_types"), num_layers, (attention,))
    config = ModelConfig(
        model_type=keys.get("model_type"),
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=keys.integer("num_attention_heads"),
        rms_norm_eps=keys.number("rms_norm_eps"),
        max_position_embeddings=keys.integer("max_position_embeddings"),
        intermediate_size=keys.integer("intermediate_size"),
        moe_intermediate_size=keys.integer("moe_intermediate_size"),
        num_experts=keys.integer("n_routed_experts"),
        num_shared_experts=keys.integer("n_shared_experts", 0, minimum=0),
        experts_per_token=keys.integer("num_experts_per_tok"),
        routed_scaling_factor=keys.number("routed_scaling_factor"),
        layer_kinds=_layer_kinds(keys, num_layers, first_dense),
        num_mtp_layers=keys.integer("num_nextn_predict_layers", 0, minimum=0),
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        eos_token_ids=_eos_token_ids(keys),
        **{key: value for part in parts for key, value in part.items()},
    )
    _check_routing(config.num_experts, config.experts_per_token, config.n_group, config.topk_group)
    return config


def _deepseek_v2(keys: _Keys) -> ModelConfig:
    """DeepSeek-V2 and V2-Lite (queries without a latent): MLA, interleaved rotary positions, softmax router."""
    keys.only("rope_interleave", True)
    return _model(keys, _latent_attention(keys), _softmax_router(keys))


def _deepseek_v3(keys: _Keys) -> ModelConfig:
    """DeepSeek-V3, V3-0324, R1, V3.1: MLA, grouped sigmoid router."""
    return _model(keys, _latent_attention(keys), _sigmoid_router(keys))


def _deepseek_v32(keys: _Keys) -> ModelConfig:
    """DeepSeek-V3.2: V3 with an indexer in every layer; rotary positions are half-split there, interleaved in MLA."""
    parts = _latent_attention(keys, q_lora=True), _sigmoid_router(keys), _indexer(keys, interleave=False)
    return _model(keys, *parts, attention=SPARSE)


def _glm4_moe(keys: _Keys) -> ModelConfig:
    """GLM-4.5, 4.6, 4.7 and 4.5-Air: GQA, sigmoid router."""
    return _model(keys, _grouped_attention(keys), _sigmoid_router(keys))


def _glm4_moe_lite(keys: _Keys) -> ModelConfig:
    """GLM-4.7-Flash: MLA, sigmoid router; one dense layer where the config does not say."""
    return _model(keys, _latent_attention(keys), _sigmoid_router(keys), first_dense=1)


def _glm_moe_dsa(keys: _Keys) -> ModelConfig:
    """GLM-5 to 5.3: MLA with an indexer, all rotary positions interleaved, sigmoid router."""
    parts = _latent_attention(keys, q_lora=True), _sigmoid_router(keys), _indexer(keys, interleave=True)
    return _model(keys, *parts, attention=SPARSE)


SPARSE = "deepseek_sparse_attention"
FAMILIES: dict[str, Callable[[_Keys], ModelConfig]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v32,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "glm_moe_dsa": _glm_moe_dsa,
}
