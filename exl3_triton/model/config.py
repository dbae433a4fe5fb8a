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


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one model, the same for every family; widths are in elements.

    `layer_kinds[l]` is "dense" or "sparse" (routed experts); `indexer_kinds[l]` is "full" (the layer owns an indexer) or
    "shared" (it attends to what the last full layer before it selected), and empty where the family has no indexer.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    rms_norm_eps: float
    latent_norm_eps: float
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float
    rope_interleave: bool
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
    indexer_kinds: tuple[str, ...]
    index_num_heads: int
    index_head_dim: int
    index_topk: int
    indexer_rope_interleave: bool
    num_mtp_layers: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @property
    def softmax_scale(self) -> float:
        """Factor on the attention scores: (nope + rope)^-1/2; absorbing the up-projections does not change it."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5

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

    def shadow(self, by: str, *keys: str) -> None:
        """`by` decides, so that overriding one of `keys` would change nothing: refused unless `by` is overridden too."""
        for key in keys:
            self.known.add(key)
            if key in self.overrides and by not in self.overrides:
                raise ValueError(f"overrides: {key} has no effect because config.json has {by}; override {by} instead")


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


def _layer_kinds(keys: _Keys, num_layers: int) -> tuple[str, ...]:
    """Which layers have routed experts: `mlp_layer_types` beats `first_k_dense_replace` with `moe_layer_freq`."""
    listed = keys.get("mlp_layer_types", None)
    if listed is not None:
        keys.shadow("mlp_layer_types", "first_k_dense_replace", "moe_layer_freq")
        return _per_layer("mlp_layer_types", listed, num_layers, ("dense", "sparse"))
    first = keys.integer("first_k_dense_replace", minimum=0)
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


def _plain_rope_theta(keys: _Keys) -> float:
    """theta of unscaled rotary positions, in either spelling: `rope_parameters`, or `rope_theta` beside `rope_scaling`."""
    parameters = keys.get("rope_parameters", None)
    scaling = keys.get("rope_scaling", None)
    flat = keys.get("rope_theta", None)
    for name, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise ValueError(f"config.json: {name} = {value!r}, an object is required")
        kind = value.get("rope_type", value.get("type", "default"))
        if kind != "default":
            raise keys.unsupported(f"{name}.rope_type", kind, ", 'default' is required")
        if value.get("partial_rotary_factor", 1) != 1:
            raise keys.unsupported(f"{name}.partial_rotary_factor", value["partial_rotary_factor"], ", 1 is required")
    keys.only("partial_rotary_factor", 1)
    theta = parameters.get("rope_theta") if parameters is not None else None
    if theta is None:
        return keys.number("rope_theta")
    if flat is not None and flat != theta:
        raise ValueError(f"config.json: rope_theta = {flat!r} contradicts rope_parameters.rope_theta = {theta!r}")
    return _positive("rope_parameters.rope_theta", theta)


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


def _glm_moe_dsa(keys: _Keys) -> ModelConfig:
    """GLM-5 to 5.3: MLA with interleaved rotary positions, sparse-attention indexer, sigmoid router with a correction bias.

    `head_dim` is never read: these configs put one of several head widths there.
    """
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    keys.only("mlp_bias", False)
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    keys.absent("swiglu_limit")
    num_layers = keys.integer("num_hidden_layers")
    if keys.get("layer_types", None) is not None:
        _per_layer("layer_types", keys.get("layer_types"), num_layers, ("deepseek_sparse_attention",))
    nope, rope = keys.integer("qk_nope_head_dim"), keys.integer("qk_rope_head_dim")
    if rope % 2:
        raise ValueError(f"config.json: qk_rope_head_dim = {rope}, an even number is required (rotations act on pairs)")
    if keys.integer("qk_head_dim", nope + rope) != nope + rope:
        found = keys.get("qk_head_dim")
        raise ValueError(f"config.json: qk_head_dim = {found}, nope + rope = {nope + rope} is required")
    index_head_dim = keys.integer("index_head_dim")
    if index_head_dim < rope:
        raise ValueError(f"config.json: index_head_dim = {index_head_dim}, at least qk_rope_head_dim = {rope} is required")
    num_experts, per_token = keys.integer("n_routed_experts"), keys.integer("num_experts_per_tok")
    n_group, topk_group = keys.integer("n_group", 1), keys.integer("topk_group", 1)
    _check_routing(num_experts, per_token, n_group, topk_group)
    return ModelConfig(
        model_type=keys.get("model_type"),
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=keys.integer("num_attention_heads"),
        rms_norm_eps=keys.number("rms_norm_eps"),
        # transformers builds the two latent norms with this value whatever rms_norm_eps says
        latent_norm_eps=keys.number("latent_norm_eps", 1e-6),
        q_lora_rank=keys.integer("q_lora_rank"),
        kv_lora_rank=keys.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=keys.integer("v_head_dim"),
        rope_theta=_plain_rope_theta(keys),
        rope_interleave=keys.flag("rope_interleave", True),
        max_position_embeddings=keys.integer("max_position_embeddings"),
        intermediate_size=keys.integer("intermediate_size"),
        moe_intermediate_size=keys.integer("moe_intermediate_size"),
        num_experts=num_experts,
        num_shared_experts=keys.integer("n_shared_experts", 0, minimum=0),
        experts_per_token=per_token,
        n_group=n_group,
        topk_group=topk_group,
        scoring="sigmoid",
        norm_topk_prob=keys.flag("norm_topk_prob", True),
        routed_scaling_factor=keys.number("routed_scaling_factor"),
        layer_kinds=_layer_kinds(keys, num_layers),
        indexer_kinds=_indexer_kinds(keys, num_layers),
        index_num_heads=keys.integer("index_n_heads"),
        index_head_dim=index_head_dim,
        index_topk=keys.integer("index_topk"),
        indexer_rope_interleave=keys.flag("indexer_rope_interleave", True),
        num_mtp_layers=keys.integer("num_nextn_predict_layers", 0, minimum=0),
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        eos_token_ids=_eos_token_ids(keys),
    )


FAMILIES: dict[str, Callable[[_Keys], ModelConfig]] = {"glm_moe_dsa": _glm_moe_dsa}
