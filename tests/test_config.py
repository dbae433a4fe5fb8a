import json

import pytest
from fabricate import CONFIG

from exl3_triton.model.config import ModelConfig


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


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 40}},
        {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 40}},
    ],
)
def test_from_dict_refuses_scaled_rope(rope):
    refuse("rope_type = 'yarn' is not supported", **rope)


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
