import dataclasses
import json
import math
from pathlib import Path

import pytest
from fabricate import CONFIG

import exl3_triton.model.config
from exl3_triton.model.config import ModelConfig, Yarn
from exl3_triton.model.transformer import rope_table


def read(overrides=None, /, **changes):
    """The fabricated config with keys changed; None removes a key."""
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    return ModelConfig.from_dict(config, overrides)


def refuse(match, overrides=None, /, **changes):
    with pytest.raises(ValueError, match=match):
        read(overrides, **changes)


def test_from_dict_reads_every_field():
    config = read()
    assert (config.num_layers, config.num_heads, config.hidden_size, config.vocab_size) == (3, 2, 128, 160)
    assert (config.q_lora_rank, config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim) == (96, 64, 32, 16)
    assert (config.num_experts, config.num_shared_experts, config.experts_per_token) == (4, 1, 2)
    assert (config.index_num_heads, config.index_head_dim, config.index_topk) == (4, 32, 8)
    assert config.layer_kinds == ("dense", "sparse", "sparse")
    assert config.indexer_kinds == ("full", "full", "shared")
    assert config.rope_interleave
    assert config.indexer_rope_interleave
    assert config.scoring == "sigmoid"
    assert config.num_mtp_layers == 1
    assert config.eos_token_ids == (0, 3)
    assert config.softmax_scale == 48**-0.5


def test_from_dict_latent_norm_eps_defaults_to_1e_6():
    assert read(rms_norm_eps=1e-5).latent_norm_eps == 1e-6
    assert read(latent_norm_eps=1e-5).latent_norm_eps == 1e-5


def test_from_dict_accepts_both_spellings_of_rope():
    assert read(rope_parameters={"rope_theta": 8e6, "rope_type": "default"}).rope_theta == 8e6
    assert read(rope_parameters=None, rope_theta=1000000).rope_theta == 1e6
    assert read(rope_parameters=None, rope_theta=5e5, rope_scaling={"type": "default"}).rope_theta == 5e5
    refuse("rope_theta = 1.0 contradicts rope_parameters", rope_theta=1.0)
    refuse("rope_theta is missing", rope_parameters=None)


YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
THETA = {"rope_theta": 1e4}


def test_from_dict_reads_yarn_in_both_spellings():
    flat = {key: value for key, value in YARN.items() if key != "rope_type"}
    expected = Yarn(40.0, 4096, 32.0, 1.0, 0.707, 0.5)
    full = {"beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.5}
    assert read(rope_parameters={**YARN, **THETA, **full}).yarn == expected
    assert read(rope_parameters=None, rope_theta=10000, rope_scaling={"type": "yarn", **flat, **full}).yarn == expected
    assert read(rope_parameters={**THETA, "rope_type": "yarn", **flat}).yarn == Yarn(40.0, 4096)
    both = {"type": "yarn", "rope_type": "yarn", **flat}
    assert read(rope_parameters=None, rope_theta=1e4, rope_scaling=both).yarn == Yarn(40.0, 4096)
    assert read().yarn is None


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_parameters": {**THETA, "rope_type": "linear", "factor": 4}}, r"rope_parameters.rope_type = 'linear' is not"),
        ({"rope_parameters": THETA, "rope_scaling": {"type": "dynamic", "factor": 4}}, "rope_scaling.type = 'dynamic' is"),
        ({"rope_parameters": {**THETA, "mrope_section": [1]}}, r"rope_parameters.mrope_section = \[1\] is not supported"),
        ({"rope_parameters": {**THETA, **YARN, "truncate": False}}, "rope_parameters.truncate = False is not supported"),
        ({"rope_parameters": {**THETA, **YARN, "attention_factor": 1.5}}, "rope_parameters.attention_factor = 1.5 is not"),
        ({"rope_parameters": {**THETA, "factor": 40}}, "rope_parameters.factor = 40 is .*rope type is 'default'"),
        ({"rope_parameters": {**THETA, **YARN, "factor": None}}, "factor is missing"),
        ({"rope_parameters": {**THETA, **YARN, "factor": 0}}, "rope_parameters.factor = 0, a positive"),
        ({"rope_parameters": {**THETA, **YARN, "mscale": "1"}}, "rope_parameters.mscale = '1', a positive"),
        ({"rope_parameters": {**THETA, **YARN, "original_max_position_embeddings": 0.5}}, "embeddings = 0.5, an integer"),
        ({"rope_parameters": {**THETA, **YARN}, "rope_scaling": {"factor": 4}}, "rope_scaling.factor = 4 contradicts .*= 40"),
        ({"rope_parameters": {**THETA, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 is not supported"),
        ({"rope_parameters": {"rope_theta": 1}}, "rope_theta = 1.0, a number above 1"),
        ({"rope_parameters": [1]}, "rope_parameters = .*an object is required"),
    ],
)  # fmt: skip
def test_from_dict_refuses_other_rope(rope, message):
    refuse(message, **rope)


def test_yarn_of_deepseek():
    """The ramp runs from frequency 10 to 23 of 32; all published models leave the table's size alone."""
    config = ModelConfig.preset("deepseek-v3")
    assert config.yarn.magnitude(1.0) == pytest.approx(1.36888795, abs=5e-9)
    assert config.yarn.magnitude(1.0) ** 2 == pytest.approx(1.87385421, abs=5e-9)
    assert config.yarn.magnitude(0.707) == pytest.approx(1.260803, abs=1e-6)
    ramp = config.yarn.ramp(config.rope_theta, 64)
    assert [j for j, value in enumerate(ramp) if 0 < value < 1] == list(range(11, 23))
    assert (ramp[10], ramp[23], ramp[0], ramp[31]) == (0, 1, 0, 1)
    assert ramp[15] == pytest.approx(5 / 13)
    frequencies = config.rope_frequencies()
    assert frequencies[:11] == [1e4 ** (-j / 32) for j in range(11)]
    assert frequencies[23:] == [1e4 ** (-j / 32) / 40 for j in range(23, 32)]
    assert frequencies[15] == pytest.approx(1e4 ** (-15 / 32) * (1 - 5 / 13 * 39 / 40))


def test_yarn_table_scale():
    assert Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=0.5).table_scale == pytest.approx(
        (1 + 0.1 * math.log(40)) / (1 + 0.05 * math.log(40))
    )
    assert Yarn(40.0, 4096).table_scale == pytest.approx(1 + 0.1 * math.log(40))
    assert Yarn(1.0, 4096).table_scale == 1
    # one pair, whose two bounds coincide: all or nothing, without a division by zero
    assert set(Yarn(40.0, 16).ramp(1e4, 4)) <= {0.0, 1.0}


def test_rope_table_of_yarn():
    """Logits of the oracles with YaRN check it against transformers; here one row of it, from the formula."""
    config = ModelConfig.preset("deepseek-v3.2")
    table = rope_table(config, 5000, "cpu")
    assert table.shape == (5000, 64)
    angles = [4097 * frequency for frequency in config.rope_frequencies()]
    expected = [math.cos(angle) for angle in angles] + [math.sin(angle) for angle in angles]
    assert table[4097].tolist() == pytest.approx(expected, abs=1e-6)
    stretched = dataclasses.replace(config, yarn=Yarn(40.0, 4096))
    assert rope_table(stretched, 2, "cpu")[0, 0] == pytest.approx(1 + 0.1 * math.log(40))


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("deepseek-v2-lite", 0.11472),
        ("deepseek-v3", 0.13523378),
        ("deepseek-v3.2", 0.13523378),
        ("glm-4.5-air", 0.08839),
        ("glm-4.7-flash", 1 / 16),
        ("glm-5.2", 1 / 16),
    ],
)
def test_softmax_scale_of_published_models(name, scale):
    assert ModelConfig.preset(name).softmax_scale == pytest.approx(scale, abs=5e-6 if scale > 0.1 and scale < 0.12 else 2e-6)


@pytest.mark.parametrize(
    ("name", "sizes", "heads", "experts", "dense"),
    [
        ("deepseek-v2-lite", (102400, 2048, 27), (16, 0, 192, 128), (64, 2, 6, 1, 1, "softmax", False, 1.0), 1),
        ("deepseek-v3", (129280, 7168, 61), (128, 0, 192, 128), (256, 1, 8, 8, 4, "sigmoid", True, 2.5), 3),
        ("deepseek-v3.2", (129280, 7168, 61), (128, 0, 192, 128), (256, 1, 8, 8, 4, "sigmoid", True, 2.5), 3),
        ("glm-4.5-air", (151552, 4096, 46), (96, 8, 128, 128), (128, 1, 8, 1, 1, "sigmoid", True, 1.0), 1),
        ("glm-4.7-flash", (154880, 2048, 47), (20, 0, 256, 256), (64, 1, 4, 1, 1, "sigmoid", True, 1.8), 1),
        ("glm-5.2", (154880, 6144, 78), (64, 0, 256, 256), (256, 1, 8, 1, 1, "sigmoid", True, 2.5), 3),
    ],
)
def test_presets(name, sizes, heads, experts, dense):
    c = ModelConfig.preset(name)
    assert (c.vocab_size, c.hidden_size, c.num_layers) == sizes
    assert (c.num_heads, c.num_kv_heads, c.head_dim, c.v_head_dim) == heads
    routing = (c.n_group, c.topk_group, c.scoring, c.norm_topk_prob, c.routed_scaling_factor)
    assert (c.num_experts, c.num_shared_experts, c.experts_per_token, *routing) == experts
    assert c.layer_kinds == ("dense",) * dense + ("sparse",) * (c.num_layers - dense)
    assert c.qk_rope_head_dim == 64
    assert c.kv_width == (2048 if c.num_kv_heads else 576)
    assert c.num_mtp_layers == (name != "deepseek-v2-lite")


def test_presets_with_an_indexer():
    glm, deepseek = ModelConfig.preset("glm-5.2"), ModelConfig.preset("deepseek-v3.2")
    assert [layer for layer in range(78) if glm.owns_indexer(layer)] == [0, 1, 2, *range(6, 75, 4)]
    assert glm.indexer_kinds.count("full") == 21
    assert deepseek.indexer_kinds == ("full",) * 61
    assert (glm.index_num_heads, glm.index_head_dim, glm.index_topk) == (32, 128, 2048)
    assert (deepseek.index_num_heads, deepseek.index_head_dim, deepseek.index_topk) == (64, 128, 2048)
    assert (glm.indexer_rope_interleave, deepseek.indexer_rope_interleave) == (True, False)
    assert glm.rope_interleave
    assert deepseek.rope_interleave
    assert not ModelConfig.preset("deepseek-v3").owns_indexer(0)
    # the frequency and offset that the config gives too make the same layers
    path = Path(exl3_triton.model.config.__file__).parent / "presets" / "glm-5.2.json"
    config = json.loads(path.read_text())
    del config["indexer_types"]
    assert ModelConfig.from_dict(config).indexer_kinds == glm.indexer_kinds


def test_preset_unknown():
    with pytest.raises(ValueError, match="preset 'glm-6' is not known; known: deepseek-v2-lite, .*glm-5.2"):
        ModelConfig.preset("glm-6")


DEEPSEEK_V2 = {
    **{key: value for key, value in CONFIG.items() if "index" not in key and key != "architectures"},
    "model_type": "deepseek_v2", "n_routed_experts": 8, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
}  # fmt: skip
GLM4 = {
    **{key: value for key, value in CONFIG.items() if "lora" not in key and "index" not in key and "qk_" not in key},
    "model_type": "glm4_moe", "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rope_parameters": None, "rope_theta": 1e6,
}  # fmt: skip
del GLM4["v_head_dim"], GLM4["architectures"]


def test_deepseek_v2():
    config = read(**DEEPSEEK_V2)
    assert (config.scoring, config.norm_topk_prob, config.n_group, config.topk_group) == ("softmax", False, 4, 2)
    assert config.indexer_kinds == ()
    greedy = read(**{**DEEPSEEK_V2, "topk_method": "greedy", "q_lora_rank": None})
    assert (greedy.n_group, greedy.topk_group, greedy.q_lora_rank) == (1, 1, None)
    refuse(
        "topk_method = 'noaux_tc' is not supported for deepseek_v2, 'greedy' or 'group_limited_greedy'",
        **{**DEEPSEEK_V2, "topk_method": "noaux_tc"},
    )
    refuse("scoring_func = 'sigmoid' is not supported for deepseek_v2", **{**DEEPSEEK_V2, "scoring_func": "sigmoid"})
    refuse("n_group is missing", **{**DEEPSEEK_V2, "n_group": None})
    refuse("rope_interleave = False is not supported for deepseek_v2", **{**DEEPSEEK_V2, "rope_interleave": False})
    refuse("norm_topk_prob has no effect because this family never", {"norm_topk_prob": True}, **DEEPSEEK_V2)
    refuse("n_group has no effect because topk_method is 'greedy'", {"n_group": 2}, **{**DEEPSEEK_V2, "topk_method": "greedy"})


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_latent_families_without_an_indexer(family):
    dense = {**CONFIG, "model_type": family, "layer_types": ["full_attention"] * 3}
    config = read(**dense)
    assert (config.model_type, config.indexer_kinds, config.index_topk) == (family, (), 0)
    assert config.kv_width == 80
    assert read(**{**dense, "q_lora_rank": None}).q_lora_rank is None
    assert not read(**{**dense, "rope_interleave": False}).rope_interleave
    refuse("layer_types", **{**dense, "layer_types": ["sliding_attention"] * 3})
    refuse("scoring_func = 'softmax' is not supported", **{**dense, "scoring_func": "softmax"})
    refuse("attention_bias", **{**dense, "attention_bias": True})
    counted = {**dense, "mlp_layer_types": None, "first_k_dense_replace": None}
    if family == "glm4_moe_lite":
        assert read(**counted).layer_kinds == ("dense", "sparse", "sparse")
    else:
        refuse("first_k_dense_replace is missing", **counted)


def test_deepseek_v32_indexer_is_half_split():
    config = read(**{**CONFIG, "model_type": "deepseek_v32", "indexer_types": None})
    assert (config.indexer_rope_interleave, config.rope_interleave) == (False, True)
    assert config.indexer_kinds == ("full",) * 3
    refuse("q_lora_rank is missing", model_type="deepseek_v32", q_lora_rank=None)


def test_glm4_moe():
    config = read(**GLM4)
    assert (config.kv_lora_rank, config.num_kv_heads, config.head_dim, config.v_head_dim) == (0, 2, 32, 32)
    assert (config.qk_rope_head_dim, config.qk_nope_head_dim, config.kv_width) == (16, 16, 128)
    assert not config.rope_interleave
    assert (config.attention_bias, config.use_qk_norm) == (False, False)
    assert config.softmax_scale == 32**-0.5
    both = read(**{**GLM4, "attention_bias": True, "use_qk_norm": True, "head_dim": None, "partial_rotary_factor": 0.25})
    assert (both.attention_bias, both.use_qk_norm, both.head_dim, both.qk_rope_head_dim) == (True, True, 32, 8)
    assert read(**{**GLM4, "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 1.0}}).qk_nope_head_dim == 0
    stretched = read(**{**GLM4, "rope_theta": None, "rope_parameters": {**YARN, "rope_theta": 1e6, "mscale_all_dim": 1.0}})
    assert stretched.softmax_scale == 32**-0.5  # transformers scales the tables of this family, not the scores
    refuse("num_key_value_heads = 3 does not divide num_attention_heads = 4", **{**GLM4, "num_key_value_heads": 3})
    refuse("head_dim = 32 times partial_rotary_factor = 0.1 makes 3", **{**GLM4, "partial_rotary_factor": 0.1})
    refuse("partial_rotary_factor = 1.5 is not supported.*at most 1", **{**GLM4, "partial_rotary_factor": 1.5})
    refuse("rope_interleave = True is not supported", **{**GLM4, "rope_interleave": True})


def test_from_dict_layer_kinds():
    assert read(mlp_layer_types=None, first_k_dense_replace=2).layer_kinds == ("dense", "dense", "sparse")
    # the list wins over the count
    assert read(first_k_dense_replace=3).layer_kinds == ("dense", "sparse", "sparse")
    every_other = read(mlp_layer_types=None, first_k_dense_replace=0, moe_layer_freq=2)
    assert every_other.layer_kinds == ("sparse", "dense", "sparse")
    refuse(r"mlp_layer_types has 2 entries.*num_hidden_layers = 3", mlp_layer_types=["dense", "sparse"])
    refuse(r"mlp_layer_types\[1\] = 'moe'", mlp_layer_types=["dense", "moe", "sparse"])


def test_from_dict_indexer_kinds():
    assert read(indexer_types=None, index_topk_pattern="FSF").indexer_kinds == ("full", "shared", "full")
    assert read(index_topk_pattern="FSF").indexer_kinds == ("full", "full", "shared")
    assert read(indexer_types=None).indexer_kinds == ("full",) * 3
    refuse(r"indexer_types has 4 entries", indexer_types=["full"] * 4)
    refuse(r"index_topk_pattern\[1\] = 'X'", indexer_types=None, index_topk_pattern="FXS")
    refuse("indexer_types makes layer 0 'shared'", indexer_types=["shared", "full", "full"])


def test_from_dict_indexer_frequency_gives_21_of_78_layers():
    many = {"num_hidden_layers": 78, "mlp_layer_types": None, "indexer_types": None}
    config = read(**many, index_topk_freq=4, index_skip_topk_offset=3)
    full = [layer for layer, kind in enumerate(config.indexer_kinds) if kind == "full"]
    assert full == [0, 1, 2, *range(6, 78, 4)]
    assert len(full) == 21


def test_from_dict_null_groups_mean_one():
    config = read(n_group=None, topk_group=None)
    assert (config.n_group, config.topk_group) == (1, 1)
    assert ModelConfig.from_dict({**CONFIG, "n_group": None}).n_group == 1


def test_from_dict_reads_nested_text_config():
    nested = {"model_type": "wrapper", "vision_config": {}, "text_config": dict(CONFIG)}
    assert ModelConfig.from_dict(nested) == read()


@pytest.mark.parametrize("family", ["llama", "mistral", None, ["glm_moe_dsa"]])
def test_unknown_family(family):
    with pytest.raises(ValueError, match="supported: .*glm_moe_dsa") as error:
        ModelConfig.from_dict({**CONFIG, "model_type": family})
    if isinstance(family, str):
        assert family in str(error.value)


def test_unknown_family_glm5_next_says_why():
    for family in ("glm5_next", "glm5_next_text"):
        refuse(f"'{family}' is not supported.*linear attention", model_type=family)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("swiglu_limit", 10.0),
        ("partial_rotary_factor", 0.5),
        ("index_topk", 0),
        ("index_topk", -1),
        ("index_topk", 8.0),
        ("hidden_size", "128"),
        ("hidden_size", True),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("qk_rope_head_dim", 15),
        ("qk_head_dim", 40),
        ("index_head_dim", 8),
        ("norm_topk_prob", "yes"),
        ("layer_types", ["full_attention"] * 3),
        ("eos_token_id", "</s>"),
        ("num_experts_per_tok", 5),
        ("topk_group", 2),
        ("n_group", 3),
    ],
)
def test_from_dict_refuses_and_names_the_key(key, value):
    refuse("n_group" if key == "n_group" else key, **{key: value})


@pytest.mark.parametrize("key", ["hidden_size", "kv_lora_rank", "q_lora_rank", "index_topk", "vocab_size"])
def test_from_dict_names_missing_keys(key):
    refuse(f"{key} is missing", **{key: None})


def test_overrides_change_keys_before_reading():
    assert read({"index_topk": 64}).index_topk == 64
    assert read({"latent_norm_eps": 1e-5}).latent_norm_eps == 1e-5  # known to the reader, absent from the config
    assert read({"architectures": []}) == read()  # in the config, of no interest
    assert read({"eos_token_id": 7}).eos_token_ids == (7,)
    refuse("neither config.json nor the glm_moe_dsa reader knows: index_top_k", {"index_top_k": 64})
    refuse("index_topk = 0", {"index_topk": 0})


def test_overrides_without_effect_are_refused():
    refuse("first_k_dense_replace has no effect because config.json has mlp_layer_types", {"first_k_dense_replace": 2})
    refuse("index_topk_freq has no effect because config.json has indexer_types", {"index_topk_freq": 2})


def test_from_dir_generation_config_wins_for_eos(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (0, 3)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert ModelConfig.from_dir(str(tmp_path)).eos_token_ids == (5,)
    assert ModelConfig.from_dir(tmp_path, {"eos_token_id": [8, 9]}).eos_token_ids == (8, 9)
    (tmp_path / "generation_config.json").write_text("{}")
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (0, 3)


def test_from_dir_names_bad_files(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
        ModelConfig.from_dir(tmp_path)
    for text in ("{", "[]", "\udcff", "[" * 100_000):
        (tmp_path / "config.json").write_text(text, errors="surrogateescape")
        with pytest.raises(ValueError, match=r"config\.json: (malformed|holds)"):
            ModelConfig.from_dir(tmp_path)


def test_from_dir_reads_the_demo_and_the_oracle(testdata):
    demo = ModelConfig.from_dir(testdata / "demo" / "demo-exl3-3.0bpw-mcg")
    assert (demo.num_layers, demo.num_experts, demo.index_topk, demo.num_mtp_layers) == (5, 8, 512, 1)
    oracle = ModelConfig.from_dir(testdata / "oracle" / "glm_moe_dsa")
    assert oracle.indexer_kinds == tuple(("full", "shared")[kind] for kind in (0, 0, 0, 1, 1, 1, 0, 1))
    assert oracle.rope_theta == 8e6
