"""The next-token layer: against the demo's goldens and metrics, its cache, its scratch, and what its loading refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import golden
import pytest
import torch
from safetensors.torch import load_file, save_file

import exl3_triton
from exl3_triton.evaluate import mtp_acceptance, read_windows
from exl3_triton.format import ExpertWeights, FormatError
from exl3_triton.model.cache import Batch, pages_for
from exl3_triton.model.config import ModelConfig
from exl3_triton.model.mtp import FAMILIES, check_mtp

DATA = golden.DATA.parent
DEMO = exl3_triton.__path__[0] + "/demo"
CHECKPOINTS = ("demo-bf16", "demo-exl3-3.0bpw-mcg", "demo-exl3-mixed-mul1")


@pytest.fixture(scope="module")
def demo():
    return exl3_triton.load(DEMO, progress=False, mtp=True)


def relative(actual, expected):
    assert expected.norm() > 0
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@torch.inference_mode()
def trunk_states(model, ids):
    pages = pages_for(len(ids))
    return model(Batch.of_sequence(ids, 0, range(1, pages + 1)), model.new_cache(pages + 1))


@torch.inference_mode()
def drafts(model, hidden, following, chunk=None):
    """Logits of the layer over a whole sequence, fed in chunks."""
    count = len(following)
    pages = list(range(pages_for(count), 0, -1))
    cache, logits = model.mtp.new_cache(len(pages) + 1), []
    for start in range(0, count, chunk or count):
        part = following[start : start + (chunk or count)]
        batch = Batch.of_sequence(part, start, pages, prefill=chunk is None)
        logits.append(model.compute_logits(model.draft(batch, hidden[start : start + len(part)], cache)))
    return torch.cat(logits)


def check_goldens(model, tensors, chunk=None):
    """1e-3 relative as for the trunk's goldens; every top-1 whose two best are more than 0.03 apart."""
    for prompt in range(4):
        key = f"prompt{prompt}."
        hidden = trunk_states(model, tensors[key + "input_ids"])
        logits = drafts(model, hidden, tensors[key + "mtp_tokens"], chunk)
        assert relative(logits[-1], tensors[key + "mtp_logits_last"]) < 1e-3
        best = logits.topk(2).values
        clear = best[:, 0] - best[:, 1] > 0.03
        assert clear.sum() > 5
        assert torch.equal(logits.argmax(-1)[clear], tensors[key + "mtp_top1"][clear])


@pytest.mark.parametrize("chunk", [None, 7], ids=["whole", "chunks of 7"])
def test_draft_of_the_embedded_demo(demo, chunk):
    check_goldens(demo, load_file(DATA / "demo" / "golden.safetensors"), chunk)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_draft_of_the_demo_checkpoints(testdata, name):
    path = testdata / "demo" / name
    check_goldens(exl3_triton.load(path, progress=False, mtp=True), load_file(path / "golden.safetensors"))


def test_draft_selects_with_its_own_indexer(demo):
    """Past index_topk the layer sees a selection: its first 64 positions are the dense layer's, the last ones differ."""
    tensors = load_file(DATA / "demo" / "golden.safetensors")
    ids, following = tensors["prompt3.input_ids"], tensors["prompt3.mtp_tokens"]
    sparse = exl3_triton.load(DEMO, progress=False, mtp=True, overrides={"index_topk": 64})
    hidden = trunk_states(demo, ids)
    dense, selected = drafts(demo, hidden, following), drafts(sparse, hidden, following)
    assert relative(selected[:64], dense[:64]) < 1e-5
    assert 1e-4 < relative(selected[-1], dense[-1]) < 0.5
    assert relative(drafts(sparse, hidden, following, 50), selected) < 1e-5


@pytest.mark.slow
def test_draft_through_the_triton_kernels(demo, device, triton_backend):
    """fp32 products; activations of quantized matrices are rounded to fp16, 2^-11 relative each."""
    tensors = load_file(DATA / "demo" / "golden.safetensors")
    model = exl3_triton.load(DEMO, device=device, dtype=torch.float32, progress=False, mtp=True)
    ids, following = tensors["prompt0.input_ids"], tensors["prompt0.mtp_tokens"].to(device)
    hidden = trunk_states(model, ids.to(device)) if device == "cuda" else trunk_states(demo, ids)
    assert relative(drafts(model, hidden, following)[-1].cpu(), tensors["prompt0.mtp_logits_last"]) < 5e-3


def check_acceptance(testdata, name, count):
    """Within 0.5 points of the measured share over all windows; a subset adds its own sampling error, three of them."""
    expected = json.loads((testdata / "demo" / "metrics.json").read_text())["variants"][name]["mtp_acceptance"]
    model = exl3_triton.load(testdata / "demo" / name, progress=False, mtp=True)
    windows = read_windows(testdata / "demo" / "val_windows.safetensors")
    share, positions = mtp_acceptance(model, windows[:count], progress=False)
    assert positions == len(windows[:count]) * 511
    sampling = 0.0 if count is None else 3 * (expected * (1 - expected) / positions) ** 0.5
    assert abs(share - expected) < 0.005 + sampling


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_mtp_acceptance_of_some_windows(testdata, name):
    check_acceptance(testdata, name, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_mtp_acceptance(testdata, name):
    check_acceptance(testdata, name, None)


def test_mtp_acceptance_needs_the_layer(demo):
    with pytest.raises(ValueError, match=r"without its next-token layer, required load\(\.\.\., mtp=True\)"):
        mtp_acceptance(exl3_triton.load(DEMO, progress=False), torch.zeros(1, 9, dtype=torch.long))


def test_trunk_and_draft_share_no_scratch(device, triton_backend):
    """Each role's arena is poisoned before the other runs; results do not change by a bit."""
    model = exl3_triton.load(DEMO, device=device, dtype=torch.float32, progress=False, mtp=True)
    model.plan_experts()
    trunk, draft = model.blocks[1].feed_forward, model.mtp.block.feed_forward
    assert isinstance(draft.experts[0], ExpertWeights)
    assert trunk.bound is model.blocks[-1].feed_forward.bound
    arenas = [layer.bound.arena for layer in (trunk, draft)]
    first, second = sorted((arena.data_ptr(), arena.numel()) for arena in arenas)
    assert first[0] + first[1] <= second[0]
    x = torch.randn(1, model.config.hidden_size, device=device)
    routes = torch.tensor([[5, 2, 8]], device=device, dtype=torch.int32), torch.tensor([[0.7, 0.3, 1.0]], device=device)
    with torch.inference_mode():
        expected = [layer.bound(x, layer.experts[0], *routes) for layer in (trunk, draft)]
        for layer, wanted, other in ((trunk, 0, 1), (draft, 1, 0)):
            arenas[other].fill_(0xFF)  # NaN as fp16 and fp32, -1 as an integer
            poisoned = arenas[other].clone()
            assert torch.equal(layer.bound(x, layer.experts[0], *routes), expected[wanted])
            assert torch.equal(arenas[other], poisoned)
    assert expected[0].norm() > 0
    assert expected[1].norm() > 0


@pytest.mark.gpu
def test_alternating_replays_share_no_scratch():
    """Captured apart and replayed in turns, each with the other's arena poisoned in between."""
    model = exl3_triton.load(DEMO, device="cuda", progress=False, mtp=True)
    layers = [model.blocks[1].feed_forward, model.mtp.block.feed_forward]
    x = torch.randn(4, model.config.hidden_size, device="cuda", dtype=torch.float16)
    with torch.inference_mode():
        expected = [layer(x) for layer in layers]
        graphs, results = [], []
        for layer in layers:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                results.append(layer(x))
        for _ in range(3):
            for which, other in ((0, 1), (1, 0)):
                layers[other].bound.arena.fill_(0xFF)
                graphs[which].replay()
                assert torch.equal(results[which], expected[which])
    assert min(each.norm() for each in expected) > 0


def test_new_cache_has_one_layer_with_index_keys(demo):
    cache = demo.mtp.new_cache(3)
    assert [list(each.shape) for each in cache.tensors] == [[3, 64, 160], [3, 64, 128]]


def random_mtp_layer(config, family):
    """Tensors of a next-token layer of an oracle: its last complete layer again, with the parts that only this layer has."""
    tensors = golden.read_tensors(DATA / "oracle" / family / "model.safetensors")
    complete = [
        layer
        for layer, kind in enumerate(config.layer_kinds)
        if kind == "sparse" and (not config.indexer_kinds or config.owns_indexer(layer))
    ]
    last, own = f"model.layers.{complete[-1]}.", f"model.layers.{config.num_layers}."
    layer = {own + name[len(last) :]: tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
    hidden = config.hidden_size
    for name in ("enorm", "hnorm", "shared_head.norm"):
        layer[f"{own}{name}.weight"] = 1 + 0.1 * torch.randn(hidden)
    layer[own + "eh_proj.weight"] = torch.randn(hidden, 2 * hidden) / hidden**0.5
    # published checkpoints repeat these two; they are not read
    layer[own + "embed_tokens.weight"] = torch.full((config.vocab_size, hidden), float("nan"))
    layer[own + "shared_head.head.weight"] = torch.full((config.vocab_size, hidden), float("nan"))
    return {**tensors, **layer}


def oracle_with_mtp(directory, family, change=None):
    source = DATA / "oracle" / family
    settings = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(settings))
    tensors = random_mtp_layer(ModelConfig.from_dir(directory), family)
    if change is not None:
        change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("family", FAMILIES)
def test_draft_of_every_family(tmp_path, family):
    """The layer is eh_proj, a layer of the family, and a norm: a model of that one layer, fed eh_proj's output, must agree.

    The trunk's layers are checked against transformers; here each family's last layer is the next-token layer, too.
    """
    path = oracle_with_mtp(tmp_path, family)
    model = exl3_triton.load(path, progress=False, mtp=True)
    c, tensors = model.config, golden.read_tensors(path / "model.safetensors")
    own = f"model.layers.{c.num_layers}."
    ids = torch.randint(0, c.vocab_size, (9,))
    hidden = trunk_states(model, ids)
    following = torch.cat([ids[1:], torch.tensor([3])])
    actual = drafts(model, hidden, following)
    embedded = rms(tensors["model.embed_tokens.weight"][following], tensors[own + "enorm.weight"], c.rms_norm_eps)
    stated = rms(hidden, tensors[own + "hnorm.weight"], c.rms_norm_eps)
    joined = torch.cat([embedded, stated], -1) @ tensors[own + "eh_proj.weight"].T

    # one layer whose "embedding" is eh_proj's output: token i stands for position i
    layer = {name.replace(own, "model.layers.0."): tensor for name, tensor in tensors.items() if name.startswith(own)}
    apart = ("enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens")
    layer = {name: tensor for name, tensor in layer.items() if name.split(".")[3] not in apart}
    layer["model.norm.weight"] = tensors[own + "shared_head.norm.weight"]
    layer["model.embed_tokens.weight"] = joined
    layer["lm_head.weight"] = tensors["lm_head.weight"][: len(joined)]
    settings = json.loads((path / "config.json").read_text())
    settings |= {"num_hidden_layers": 1, "vocab_size": len(joined), "num_nextn_predict_layers": 0, "first_k_dense_replace": 0}
    settings = {
        key: value for key, value in settings.items() if key not in ("mlp_layer_types", "indexer_types", "layer_types")
    }
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_text(json.dumps(settings))
    save_file(layer, alone / "model.safetensors")
    expected = exl3_triton.load(alone, progress=False).logits(torch.arange(len(joined)))
    assert expected.abs().max() > 0.1
    assert (actual[:, : len(joined)] - expected).abs().max() < 2e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v2"}, "model_type 'deepseek_v2' has no next-token layer; required: deepseek_v3"),
        ({"num_mtp_layers": 0}, "num_nextn_predict_layers = 0, required 1"),
        ({"num_mtp_layers": 2}, "num_nextn_predict_layers = 2, required 1"),
    ],
)
def test_check_mtp_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        check_mtp(replace(ModelConfig.from_dir(DEMO), **changes))


def test_load_reports_missing_and_unexpected_mtp_tensors(tmp_path):
    def change(tensors):
        tensors.pop("model.layers.3.eh_proj.weight")
        tensors["model.layers.3.extra.weight"] = torch.zeros(3)

    path = oracle_with_mtp(tmp_path, "deepseek_v3", change)
    with pytest.raises(FormatError, match=r"1 missing: layers\.3\.eh_proj\.weight; 1 unexpected: layers\.3\.extra\.weight"):
        exl3_triton.load(path, progress=False, mtp=True)
    assert exl3_triton.load(path, progress=False).mtp is None
