"""Random weights of real geometries: sizes of every preset, and small models that run."""

from __future__ import annotations

import pytest
import torch
from fabricate import CONFIG, GQA

from exl3_triton.format import Codebook, ExpertWeights
from exl3_triton.model.cache import Batch
from exl3_triton.model.config import ModelConfig
from exl3_triton.model.dummy import DummySource, dummy_model, first_layers, one_rank
from exl3_triton.model.layers import Exl3Linear, PlainLinear
from exl3_triton.model.parallel import Shard
from exl3_triton.reference import dequantize

# billions of parameters as the models' authors publish them, without the next-token layer
PUBLISHED = {"deepseek-v2-lite": 15.7, "deepseek-v3": 671, "deepseek-v3.2": 671, "glm-4.5-air": 106, "glm-4.7-flash": 30}
GLM_5_2 = 753_329_921_024  # with the next-token layer, from the checkpoint's headers
TINY = ModelConfig.from_dict({**CONFIG, "hidden_size": 256, "n_routed_experts": 8})


def parameters(model):
    """Logical parameters, routers' correction biases not counted, as the published figures have it."""
    total, apart = 0, ("rope_table", "correction_bias")
    for module in model.modules():
        for experts in getattr(module, "experts", ()):
            routed = experts.num_experts - module.joined  # the shared expert counts as linear layers
            total += 3 * routed * experts.hidden_size * experts.intermediate_size
        if isinstance(module, Exl3Linear):
            total += module.in_features * module.out_features + (0 if module.bias is None else module.out_features)
        else:
            total += sum(each.numel() for name, each in module.named_buffers(recurse=False) if name not in apart)
    return total


def test_every_preset_has_a_published_size():
    assert set(ModelConfig.presets()) == {*PUBLISHED, "glm-5.2"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name):
    model = dummy_model(ModelConfig.preset(name), device="meta", dtype=torch.float16, max_context=64)
    assert parameters(model) / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)
    layers = [module for module in model.modules() if isinstance(module, Exl3Linear)]
    assert {layer.weight.bits for layer in layers} == {3, 6}
    assert model.lm_head.weight.bits == 6


def test_glm_has_every_parameter_of_the_checkpoint():
    model = dummy_model(ModelConfig.preset("glm-5.2"), device="meta", dtype=torch.float16, max_context=64, mtp=True)
    assert parameters(model) == GLM_5_2


def test_what_is_quantized():
    """ExLlamaV3 leaves indexer.wk, the indexer's head weights, routers and kv_b alone."""
    model = dummy_model(TINY, max_context=64, bits=2.5, codebook=Codebook.MUL1)
    plain = {name for name, module in model.named_modules() if isinstance(module, PlainLinear)}
    assert plain == {f"blocks.{i}.attention.indexer.{part}" for i in (0, 1) for part in ("wk", "weights_proj")}
    (experts,) = model.blocks[1].feed_forward.experts
    assert {(rate, book) for p in experts.projections for _, rate, book in p.layout} == {(5, Codebook.MUL1)}
    bare = dummy_model(TINY, max_context=64, experts_only=True)
    assert not [module for module in bare.modules() if isinstance(module, Exl3Linear)]
    assert isinstance(bare.blocks[1].feed_forward.experts[0], ExpertWeights)


@pytest.mark.parametrize("codebook", list(Codebook))
@pytest.mark.parametrize(("rows", "columns"), [(256, 384), (200, 96)])
def test_matrices_keep_the_variance(codebook, rows, columns):
    """256 x 384 products of unit normals: the sample variance of y is within 10 % of 1 (its error is about 3 %)."""
    source = DummySource(TINY, "cpu", torch.float32, bits=2, codebook=codebook, seed=torch.seed() % 2**31)
    weight = source.linear("mlp.up_proj", rows, columns).weight
    dense = dequantize(weight, rotated=False).double()
    assert dense.shape == (rows, columns) or dense[rows:].abs().max() == 0
    y = torch.randn(512, rows, dtype=torch.float64) @ dense[:rows, :columns]
    assert y.var().item() == pytest.approx(1, rel=0.1)
    assert weight.suh[rows:].abs().sum() == 0
    assert weight.svh[columns:].abs().sum() == 0
    assert (weight.suh[:rows] > 0).any()
    assert (weight.suh[:rows] < 0).any()


@pytest.mark.parametrize("config", [TINY, ModelConfig.from_dict(GQA)], ids=["mla", "gqa"])
def test_a_small_model_runs(config):
    model = dummy_model(config, max_context=64, seed=3)
    with torch.inference_mode():
        logits = model.logits(torch.randint(0, config.vocab_size, (40,)))
    assert logits.isfinite().all()
    assert 0.3 < logits.std() < 3  # a normed state times a matrix that keeps the variance
    again = dummy_model(config, max_context=64, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), again.buffers(), strict=True))


def test_routing_is_roughly_balanced():
    """Half of the experts' fair share at least for every expert of 8, over 400 random tokens."""
    model = dummy_model(TINY, max_context=64)
    moe, counts = model.blocks[1].feed_forward, torch.zeros(8)
    moe.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    seen: list[torch.Tensor] = []
    tokens = torch.randint(0, TINY.vocab_size, (60,))
    with torch.inference_mode():
        model(Batch.of_sequence(tokens, 0, [1]), model.new_cache(2))
    scores = (seen[0].double() @ moe.gate.double().T).sigmoid()
    counts = torch.bincount(scores.topk(TINY.experts_per_token).indices.flatten(), minlength=8)
    assert counts.sum() == 120
    assert counts.min() >= 3


def test_first_layers():
    glm = first_layers(ModelConfig.preset("glm-5.2"), 8)
    assert glm.layer_kinds == ("dense",) * 3 + ("sparse",) * 5
    assert glm.indexer_kinds == ("full",) * 3 + ("shared",) * 3 + ("full", "shared")
    for layers in (0, 79):
        with pytest.raises(ValueError, match=f"layers: found {layers}, required 1..78"):
            first_layers(ModelConfig.preset("glm-5.2"), layers)


def test_one_rank_has_the_first_part():
    glm, whole = one_rank(ModelConfig.preset("glm-5.2"), 4)
    assert (glm.num_heads, glm.intermediate_size, glm.moe_intermediate_size) == (16, 3072, 512)
    assert glm.vocab_size == 303 * 128  # 1210 blocks of the vocabulary on 4 ranks
    assert whole == ()
    assert (glm.q_lora_rank, glm.kv_lora_rank, glm.index_num_heads) == (2048, 512, 32)
    air, whole = one_rank(ModelConfig.preset("glm-4.5-air"), 2)
    assert (air.num_heads, air.num_kv_heads) == (48, 4)
    assert (air.intermediate_size, air.moe_intermediate_size) == (43 * 128, 6 * 128)  # 86 and 11 blocks on 2 ranks
    assert whole == ()
    air, whole = one_rank(ModelConfig.preset("glm-4.5-air"), 16)
    assert (air.num_heads, air.num_kv_heads, air.moe_intermediate_size) == (96, 8, 1408)
    assert [each.split(" (")[0] for each in whole] == ["attention, heads", "routed experts", "shared experts"]
    flash, whole = one_rank(ModelConfig.preset("glm-4.7-flash"), 8)
    assert flash.num_heads == 3  # 20 heads on 8 ranks
    lite, whole = one_rank(ModelConfig.preset("deepseek-v2-lite"), 2)
    assert lite.moe_intermediate_size == 1408
    assert whole == ("routed and shared experts (cut to 768 and 1408 features)",)
    assert one_rank(glm, 1) == (glm, ())
    with pytest.raises(ValueError, match="rank-of: found 0"):
        one_rank(glm, 0)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["glm-5.2", "glm-4.5-air", "deepseek-v3.2"])
def test_one_rank_is_as_large_as_that_rank(name, ranks):
    """Every matrix of four layers has the sizes that rank 0 holds; only the embedding is cut with the vocabulary."""
    config = first_layers(ModelConfig.preset(name), 4)
    alone = dummy_model(one_rank(config, ranks)[0], device="meta", dtype=torch.float16, max_context=64)
    rank = dummy_model(config, device="meta", dtype=torch.float16, max_context=64, shard=Shard(0, ranks))
    sizes = [{name: tuple(each.shape) for name, each in model.named_buffers()} for model in (alone, rank)]
    assert {name for name in sizes[0] if sizes[0][name] != sizes[1][name]} <= {"embedding"}
    assert sizes[0].keys() == sizes[1].keys()


@pytest.mark.parametrize(("bits", "codebook"), [(1.5, Codebook.MCG), (9, Codebook.MCG), (4.5, Codebook.MUL1)])
def test_rates_that_do_not_exist(bits, codebook):
    with pytest.raises(ValueError, match=f"bits: found {bits:g}"):
        DummySource(TINY, "meta", torch.float16, bits=bits, codebook=codebook)


def test_max_context_beyond_the_model():
    with pytest.raises(ValueError, match="max_context: found 65, required 1..64"):
        dummy_model(TINY, device="meta", max_context=65)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [1, 3, 8])
def test_a_small_model_on_the_gpu(bits):
    """Weights are made on the device: its logits there, against the reference kernels on the same weights."""
    model = dummy_model(TINY, device="cuda", max_context=64, bits=bits)
    host = dummy_model(TINY, device="cpu", max_context=64, bits=bits)
    tokens = torch.randint(0, TINY.vocab_size, (40,))
    with torch.inference_mode():
        logits = model.logits(tokens)
        assert host.logits(tokens).isfinite().all()
    assert logits.isfinite().all()
    assert 0.3 < logits.std() < 3
