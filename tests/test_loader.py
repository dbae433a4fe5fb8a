import json

import pytest
import torch
from fabricate import Fabricated, exl3_matrix
from safetensors.torch import save_file

from exl3_triton import Codebook, Exl3Linear, ExpertWeights, FormatError, load
from exl3_triton.model.checkpoint import Checkpoint, TensorReader
from exl3_triton.model.config import ModelConfig
from exl3_triton.model.layers import PlainExperts, PlainLinear
from exl3_triton.model.loader import WeightSource, mtp_prefixes

MATRIX = "model.layers.0.self_attn.q_a_proj"
EXPERT = "model.layers.2.mlp.experts.1.up_proj"


def refuse(fabricated, tmp_path, match, monkeypatch):
    """`load` refuses the checkpoint before it reads a single weight."""
    path = fabricated.write(tmp_path / "checkpoint")
    monkeypatch.setattr(TensorReader, "read", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(FormatError, match=match) as error:
        load(path, progress=False)
    return str(error.value)


def source_of(fabricated, tmp_path, device="cpu", dtype=torch.float32):
    return WeightSource(Checkpoint.open(fabricated.write(tmp_path)), device, dtype)


@pytest.mark.parametrize("quantized", [True, False])
def test_load_uses_every_tensor(tmp_path, quantized):
    path = Fabricated(quantized=quantized).write(tmp_path, shards=2)
    model = load(path, progress=False)
    assert isinstance(model.lm_head, Exl3Linear if quantized else PlainLinear)
    experts = model.blocks[1].feed_forward.experts
    assert isinstance(experts[0], ExpertWeights) if quantized else isinstance(experts, PlainExperts)
    assert model.embedding.dtype == torch.float32
    assert not any(buffer.is_meta for buffer in model.buffers())


@pytest.mark.parametrize(
    ("bits", "codebook"), [(3, Codebook.MCG), (1, Codebook.THREE_INST), (8, Codebook.MUL1), (2.5, Codebook.MUL1)]
)
def test_linear_quantized(tmp_path, bits, codebook):
    fabricated = Fabricated(bits=bits, codebook=codebook)
    name = "layers.0.self_attn.kv_a_proj_with_mqa"
    with source_of(fabricated, tmp_path) as source:
        layer = source.linear(name, 128, 80)
    assert (layer.weight.in_features, layer.weight.out_features, layer.weight.padded_out) == (128, 80, 128)
    assert (layer.weight.bits, layer.weight.codebook) == (bits, codebook)
    for part in ("trellis", "suh", "svh"):
        assert torch.equal(getattr(layer.weight, part), fabricated.tensors[f"model.{name}.{part}"])


def test_linear_plain_with_bias(tmp_path):
    fabricated = Fabricated(quantized=False)
    fabricated.plain(f"{MATRIX}.bias", 96)
    with source_of(fabricated, tmp_path, dtype=torch.float16) as source:
        layer = source.linear("layers.0.self_attn.q_a_proj", 128, 96)
    assert layer.weight.dtype == layer.bias.dtype == torch.float16
    assert torch.equal(layer.weight, fabricated.tensors[f"{MATRIX}.weight"].half())
    assert torch.equal(layer.bias, fabricated.tensors[f"{MATRIX}.bias"].half())


def test_linear_legacy_signs(tmp_path):
    fabricated = Fabricated()
    del fabricated.tensors[f"{MATRIX}.suh"]
    packed = torch.randint(-(2**15), 2**15, (8,), dtype=torch.int16)
    fabricated.tensors[f"{MATRIX}.su"] = packed
    with source_of(fabricated, tmp_path) as source:
        suh = source.linear("layers.0.self_attn.q_a_proj", 128, 96).weight.suh
    expected = [-1.0 if (int(packed[channel // 16]) >> channel % 16) & 1 else 1.0 for channel in range(128)]
    assert suh.tolist() == expected
    load(tmp_path, progress=False)


def test_experts_of_mixed_rates_and_codebooks(tmp_path):
    fabricated = Fabricated()
    kinds = [(3, Codebook.MCG), (2.5, Codebook.MUL1), (4, Codebook.THREE_INST), (1, Codebook.MUL1)]
    prefix = "model.layers.1.mlp.experts"
    for name in fabricated.matching(prefix):
        del fabricated.tensors[name]
    for expert, kind in enumerate(kinds):
        fabricated.tensors |= exl3_matrix(f"{prefix}.{expert}.gate_proj", 128, 96, *kind)
        fabricated.tensors |= exl3_matrix(f"{prefix}.{expert}.up_proj", 128, 96, *kinds[expert - 1])
        fabricated.tensors |= exl3_matrix(f"{prefix}.{expert}.down_proj", 96, 128, *kind)
    with source_of(fabricated, tmp_path) as source:
        experts = source.experts("layers.1.mlp.experts", 4, 128, 96)
    assert (experts.hidden_size, experts.intermediate_size) == (128, 96)
    for expert, kind in enumerate(kinds):
        for projection, slabs in zip(("gate", "up", "down"), experts.projections, strict=True):
            weight = slabs.expert(expert)
            assert (weight.bits, weight.codebook) == (kinds[expert - 1] if projection == "up" else kind)
            for part in ("trellis", "suh", "svh"):
                stored = fabricated.tensors[f"{prefix}.{expert}.{projection}_proj.{part}"]
                assert torch.equal(getattr(weight, part), stored)
    load(tmp_path, progress=False)


def test_experts_plain(tmp_path):
    fabricated = Fabricated(quantized=False)
    with source_of(fabricated, tmp_path, dtype=torch.bfloat16) as source:
        experts = source.experts("layers.2.mlp.experts", 4, 128, 96)
    assert experts.down.shape == (4, 128, 96)
    for projection in ("gate", "up", "down"):
        for expert in range(4):
            stored = fabricated.tensors[f"model.layers.2.mlp.experts.{expert}.{projection}_proj.weight"]
            assert torch.equal(getattr(experts, projection)[expert], stored)


def test_tensor_keeps_sensitive_weights_in_fp32(tmp_path):
    fabricated = Fabricated()
    bias = "layers.1.mlp.gate.e_score_correction_bias"
    fabricated.plain(f"model.{bias}", 4, dtype=torch.float16)
    with source_of(fabricated, tmp_path, dtype=torch.float16) as source:
        assert source.tensor(bias, (4,)).dtype == torch.float32
        assert source.linear("layers.0.self_attn.indexer.weights_proj", 128, 4).weight.dtype == torch.float32
        assert source.tensor("norm.weight", (128,)).dtype == torch.float16
        assert source.tensor("norm.weight", (128,), dtype=torch.float32).dtype == torch.float32
        assert source.tensor("norm.bias", (128,), optional=True) is None


@pytest.mark.parametrize("quantized", [True, False])
def test_preflight_and_load_claim_the_same_bytes(tmp_path, quantized):
    checkpoint = Checkpoint.open(Fabricated(quantized=quantized).write(tmp_path))
    claimed = []
    for device in ("meta", "cpu"):
        with WeightSource(checkpoint, device, torch.float32) as source:
            source.linear("lm_head", 128, 160)
            source.experts("layers.1.mlp.experts", 4, 128, 96)
            source.tensor("norm.weight", (128,))
            claimed.append(source.claimed_bytes)
    used = [name for name in checkpoint.tensors if name.startswith(("lm_head", "layers.1.mlp.experts", "norm"))]
    assert claimed == [sum(checkpoint.tensors[name].nbytes for name in used)] * 2


def test_lm_head_of_tied_models(tmp_path):
    embedding = torch.rand(160, 128)
    quantized = Fabricated(tie_word_embeddings=True)
    with source_of(quantized, tmp_path / "quantized") as source:
        head = source.lm_head(128, 160, tied=True, embedding=embedding)
    assert torch.equal(head.weight.trellis, quantized.tensors["lm_head.trellis"])  # the stored head wins
    tied = Fabricated(quantized=False, tie_word_embeddings=True)
    del tied.tensors["lm_head.weight"]
    with source_of(tied, tmp_path / "tied") as source:
        assert source.lm_head(128, 160, tied=True, embedding=embedding).weight is embedding
    model = load(tmp_path / "tied", progress=False)
    assert torch.equal(model.lm_head.weight, model.embedding)
    with pytest.raises(FormatError, match=r"lm_head\.weight"), source_of(tied, tmp_path / "untied") as source:
        source.lm_head(128, 160, tied=False, embedding=embedding)


def test_mtp_layer_and_rotary_tables_are_left_aside(tmp_path, monkeypatch):
    fabricated = Fabricated()
    fabricated.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(8)
    config = ModelConfig.from_dir(fabricated.write(tmp_path))
    assert mtp_prefixes(config) == ("layers.3",)
    read = []
    original = TensorReader.read
    monkeypatch.setattr(TensorReader, "read", lambda self, info: (read.append(info.name), original(self, info))[1])
    load(tmp_path, progress=False)
    assert len(read) > 100
    assert not any("layers.3." in name or "rotary" in name for name in read)


def test_progress_goes_to_stderr(tmp_path, capsys):
    path = Fabricated().write(tmp_path)
    load(path, progress=True)
    captured = capsys.readouterr()
    assert "loading" in captured.err
    load(path, progress=False)
    assert capsys.readouterr().err == captured.out == ""


def test_missing_and_unexpected_tensors_in_one_report(tmp_path, monkeypatch):
    fabricated = Fabricated()
    for name in ("model.norm.weight", f"{MATRIX}.trellis"):
        del fabricated.tensors[name]
    fabricated.tensors |= {f"model.vision.{index}.weight": torch.rand(2) for index in range(40)}
    message = refuse(fabricated, tmp_path, "2 missing: .*, norm.weight; 40 unexpected: ", monkeypatch)
    assert "layers.0.self_attn.q_a_proj.trellis" in message
    assert "and 8 more" in message


def test_mtp_layer_is_unexpected_when_the_config_has_none(tmp_path, monkeypatch):
    fabricated = Fabricated()
    fabricated.config["num_nextn_predict_layers"] = 0
    refuse(fabricated, tmp_path, r"unexpected: layers\.3\.", monkeypatch)


@pytest.mark.parametrize("name", [MATRIX, EXPERT])
def test_trellis_of_wrong_dtype(tmp_path, monkeypatch, name):
    fabricated = Fabricated()
    fabricated.tensors[f"{name}.trellis"] = fabricated.tensors[f"{name}.trellis"].to(torch.int32)
    refuse(fabricated, tmp_path, rf"{name[6:]}\.trellis: found torch\.int32, required torch\.int16", monkeypatch)


@pytest.mark.parametrize("name", [MATRIX, EXPERT])
def test_trellis_of_wrong_rank(tmp_path, monkeypatch, name):
    fabricated = Fabricated()
    fabricated.tensors[f"{name}.trellis"] = fabricated.tensors[f"{name}.trellis"].reshape(-1, 48)
    refuse(fabricated, tmp_path, rf"{name[6:]}\.trellis: found shape \[64, 48\]", monkeypatch)


@pytest.mark.parametrize("name", [MATRIX, EXPERT])
@pytest.mark.parametrize("words", [0, 12, 52, 132, 144, 72])
def test_last_dimension_that_is_no_rate(tmp_path, monkeypatch, name, words):
    """0 is K = 0, 144 is K = 9, 72 is K = 4.5."""
    fabricated = Fabricated(codebook=Codebook.MUL1)
    fabricated.tensors[f"{name}.trellis"] = torch.ones(8, 8, words, dtype=torch.int16)
    refuse(fabricated, tmp_path, rf"{name[6:]}\.trellis: found last dimension {words} \(K = ", monkeypatch)


@pytest.mark.parametrize("codebook", [Codebook.THREE_INST, Codebook.MCG])
def test_half_rates_without_mul1(tmp_path, monkeypatch, codebook):
    fabricated = Fabricated(codebook=codebook)
    for suffix in ("trellis", "suh", "svh", codebook.label):
        fabricated.tensors.pop(f"{EXPERT}.{suffix}", None)
    fabricated.tensors |= exl3_matrix(EXPERT, 128, 96, 2.5, codebook)
    refuse(fabricated, tmp_path, f"K = 2.5 with codebook {codebook.label}, required codebook mul1", monkeypatch)


@pytest.mark.parametrize("name", [MATRIX, EXPERT])
def test_both_markers(tmp_path, monkeypatch, name):
    fabricated = Fabricated()
    fabricated.tensors[f"{name}.mul1"] = torch.tensor(Codebook.MUL1.marker, dtype=torch.uint32).view(torch.int32)
    refuse(fabricated, tmp_path, rf"{name[6:]}\.mcg: found both \.mcg and \.mul1", monkeypatch)


@pytest.mark.parametrize("name", [MATRIX, EXPERT])
def test_wrong_marker_value(tmp_path, monkeypatch, name):
    fabricated = Fabricated()
    fabricated.tensors[f"{name}.mcg"] = torch.tensor(0x0BAC1FED, dtype=torch.int32)
    refuse(fabricated, tmp_path, rf"{name[6:]}\.mcg: found 0xbac1fed, required 0xcbac1fed", monkeypatch)


def test_wrong_marker_shape_or_dtype(tmp_path, monkeypatch):
    fabricated = Fabricated()
    fabricated.tensors[f"{EXPERT}.mcg"] = torch.zeros(2, dtype=torch.int32)
    refuse(fabricated, tmp_path, r"mcg: found shape \[2\]", monkeypatch)
    fabricated.tensors[f"{EXPERT}.mcg"] = torch.zeros(1, dtype=torch.int16)
    refuse(fabricated, tmp_path, r"mcg: found torch\.int16", monkeypatch)


def test_markers_in_other_spellings(tmp_path):
    fabricated = Fabricated()
    value = Codebook.MCG.marker
    fabricated.tensors[f"{MATRIX}.mcg"] = torch.tensor([value], dtype=torch.int64)
    fabricated.tensors[f"{EXPERT}.mcg"] = torch.tensor([value], dtype=torch.uint32)
    with source_of(fabricated, tmp_path) as source:
        assert source.linear(MATRIX[6:], 128, 96).weight.codebook is Codebook.MCG
    load(tmp_path, progress=False)


@pytest.mark.parametrize("name", [MATRIX, EXPERT])
@pytest.mark.parametrize("vector", ["suh", "svh"])
def test_scales_of_wrong_length_or_dtype(tmp_path, monkeypatch, name, vector):
    fabricated = Fabricated()
    good = fabricated.tensors[f"{name}.{vector}"]
    short, wide, nested = good[:96].clone(), good.float(), good[None]
    for bad, found in ((short, r"shape \[96\]"), (wide, r"torch\.float32"), (nested, r"shape \[1, 128\]")):
        fabricated.tensors[f"{name}.{vector}"] = bad
        refuse(fabricated, tmp_path, rf"{name[6:]}\.{vector}: found {found}", monkeypatch)


@pytest.mark.parametrize("name", [MATRIX, EXPERT])
@pytest.mark.parametrize("vector", ["suh", "svh"])
def test_missing_scales(tmp_path, monkeypatch, name, vector):
    fabricated = Fabricated()
    del fabricated.tensors[f"{name}.{vector}"]
    refuse(fabricated, tmp_path, rf"{name[6:]}\.{vector}: missing", monkeypatch)


@pytest.mark.parametrize("name", [MATRIX, EXPERT])
@pytest.mark.parametrize("vector", ["suh", "svh"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_in_scales(tmp_path, monkeypatch, name, vector, value):
    fabricated = Fabricated()
    fabricated.tensors[f"{name}.{vector}"][17] = value
    refuse(fabricated, tmp_path, rf"{name[6:]}\.{vector}: found NaN or infinity", monkeypatch)


def replace_matrix(fabricated, name, tensors):
    for suffix in ("trellis", "suh", "svh", "mcg"):
        del fabricated.tensors[f"{name}.{suffix}"]
    fabricated.tensors |= tensors


@pytest.mark.parametrize("name", [MATRIX, EXPERT])
def test_sizes_that_are_no_multiple_of_128(tmp_path, monkeypatch, name):
    fabricated = Fabricated()
    fabricated.tensors[f"{name}.trellis"] = torch.ones(8, 6, 48, dtype=torch.int16)
    fabricated.tensors[f"{name}.svh"] = torch.ones(96, dtype=torch.float16)
    refuse(fabricated, tmp_path, rf"{name[6:]}\.trellis: found out = 96, required a positive multiple of 128", monkeypatch)


@pytest.mark.parametrize("name", [MATRIX, EXPERT])
@pytest.mark.parametrize("sizes", [(256, 128), (128, 256)])
def test_padded_size_must_be_the_next_multiple_of_128(tmp_path, monkeypatch, name, sizes):
    fabricated = Fabricated()
    replace_matrix(fabricated, name, exl3_matrix(name, *sizes))
    refuse(fabricated, tmp_path, rf"{name[6:]}\.trellis: found (in|out) = 256 for a logical size of", monkeypatch)


@pytest.mark.parametrize("quantized", [True, False])
def test_missing_expert(tmp_path, monkeypatch, quantized):
    fabricated = Fabricated(quantized=quantized)
    for name in fabricated.matching("layers.2.mlp.experts.3."):
        del fabricated.tensors[name]
    suffix = "trellis" if quantized else "weight"
    refuse(fabricated, tmp_path, rf"3 missing: layers\.2\.mlp\.experts\.3\.down_proj\.{suffix}", monkeypatch)


@pytest.mark.parametrize("quantized", [True, False])
def test_missing_expert_without_preflight(tmp_path, quantized):
    fabricated = Fabricated(quantized=quantized)
    for name in fabricated.matching("layers.2.mlp.experts.3."):
        del fabricated.tensors[name]
    with pytest.raises(FormatError, match=r"layers\.2\.mlp\.experts\.3\.up_proj"), source_of(fabricated, tmp_path) as source:
        source.experts("layers.2.mlp.experts", 4, 128, 96)


def test_more_experts_than_the_config_says(tmp_path, monkeypatch):
    fabricated = Fabricated()
    fabricated.mlp("model.layers.2.mlp.experts.4", 96)
    refuse(fabricated, tmp_path, r"unexpected: layers\.2\.mlp\.experts\.4\.", monkeypatch)


def test_experts_partly_quantized(tmp_path, monkeypatch):
    fabricated = Fabricated()
    for name in fabricated.matching(EXPERT):
        del fabricated.tensors[name]
    fabricated.plain(f"{EXPERT}.weight", 96, 128)
    refuse(fabricated, tmp_path, r"experts\.1\.up_proj\.weight, required all experts", monkeypatch)


def test_experts_with_bias(tmp_path, monkeypatch):
    fabricated = Fabricated()
    fabricated.tensors[f"{EXPERT}.bias"] = torch.ones(128, dtype=torch.float16)
    refuse(fabricated, tmp_path, rf"{EXPERT[6:]}\.bias: found a bias", monkeypatch)


@pytest.mark.parametrize("name", [MATRIX, EXPERT])
def test_weight_beside_trellis(tmp_path, monkeypatch, name):
    fabricated = Fabricated()
    fabricated.plain(f"{name}.weight", 96, 128)
    refuse(fabricated, tmp_path, rf"{name[6:]}: found both \.trellis and \.weight", monkeypatch)


@pytest.mark.parametrize("name", [MATRIX, EXPERT, "model.layers.1.input_layernorm"])
def test_plain_tensor_of_wrong_shape_or_dtype(tmp_path, monkeypatch, name):
    fabricated = Fabricated(quantized=False)
    good = fabricated.tensors[f"{name}.weight"]
    fabricated.tensors[f"{name}.weight"] = good[:64].clone()
    refuse(fabricated, tmp_path, rf"{name[6:]}\.weight: found shape \[64.*required \[", monkeypatch)
    fabricated.tensors[f"{name}.weight"] = good.to(torch.float8_e4m3fn)
    refuse(fabricated, tmp_path, rf"{name[6:]}\.weight: found F8_E4M3, required F32, F16, BF16", monkeypatch)


def test_unknown_family(tmp_path):
    path = Fabricated(quantized=False).write(tmp_path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="'llama' is not supported; supported: deepseek_v2, .*glm_moe_dsa"):
        load(path, progress=False)


def test_file_that_changes_after_opening(tmp_path):
    fabricated = Fabricated()
    checkpoint = Checkpoint.open(fabricated.write(tmp_path))
    save_file({"other": torch.rand(2)}, tmp_path / "model.safetensors")
    with WeightSource(checkpoint, "cpu", torch.float32) as source, pytest.raises(FormatError, match="cannot be read"):
        source.tensor("norm.weight", (128,))
