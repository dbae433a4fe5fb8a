"""Rank-sliced checkpoints: every layout against the same weights stored whole, and every way in which a set can be wrong."""

import json

import golden
import pytest
import test_gpu
import torch
from fabricate import Fabricated, exl3_matrix
from test_model import check_golden, relative

from exl3_triton import Codebook, FormatError, load, reference
from exl3_triton.format import TrellisWeight
from exl3_triton.model.checkpoint import Checkpoint, TensorReader
from exl3_triton.model.inspect import format_report, inspect_checkpoint
from exl3_triton.model.parallel import Shard
from exl3_triton.model.rank_sliced import RankSliced
from exl3_triton.ops._dispatch import override_backend

PREFIX = "model.layers.1.mlp.experts"
LAYOUTS = {
    "uniform": {},
    "mul1": {"codebook": Codebook.MUL1, "bits": 2.5},
    "mixed by expert": {"bits": [3, 4, 2]},
    "mixed by projection": {"bits": {"gate_proj": 3, "up_proj": 4, "down_proj": 5}},
    "shared": {"shared_h": True},
    "shared, mixed": {"shared_h": True, "bits": [3, 4]},
}


def fabricate(tp=2, width=256, **layout):
    return Fabricated(moe_intermediate_size=width).rank_slice(tp, **layout)


def whole(sliced: Fabricated) -> Fabricated:
    """The same model with each expert as one unquantized matrix, decoded slice by slice in fp64."""
    plain = Fabricated(moe_intermediate_size=sliced.config["moe_intermediate_size"])
    plain.tensors = {name: tensor for name, tensor in sliced.tensors.items() if ".mlp.experts." not in name}
    for layer in range(1, 4):
        prefix = f"model.layers.{layer}.mlp.experts"
        for expert in range(4):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                slices = []
                for rank in range(sliced.config["hybrid_tr3_tail"]["tp"]):
                    name = f"{prefix}.{expert}.{projection}.rank{rank}"
                    parts = {key: tensor for key, tensor in sliced.tensors.items() if key.startswith(f"{name}.")}
                    for key, tensor in sliced.tensors.items():
                        if key.startswith(f"{prefix}.shared_h.{projection}.rank{rank}."):
                            parts[f"{name}.{key.rpartition('.')[2]}"] = tensor
                    slices.append(reference.dense_weight(TrellisWeight.from_tensors(parts, name), torch.float64))
                dense = torch.cat(slices, dim=0 if projection == "down_proj" else 1)
                plain.tensors[f"{prefix}.{expert}.{projection}.weight"] = dense.T.float().contiguous()
    return plain


def refuse(fabricated, tmp_path, monkeypatch, match):
    """`load` raises before the first byte of weights; `inspect` says the same."""
    path = fabricated.write(tmp_path / "checkpoint")
    monkeypatch.setattr(TensorReader, "read", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(FormatError, match=match) as error:
        load(path, progress=False)
    report = inspect_checkpoint(path)
    assert not report["runs"]
    assert str(error.value) in report["problems"]
    return str(error.value)


@pytest.mark.parametrize("topk", [None, 64])
def test_logits_of_the_rank_sliced_demo(testdata, topk):
    path = testdata / "demo" / "demo-tr3-tp2"
    model = load(path, progress=False, overrides={"index_topk": topk} if topk else None)
    assert [len(block.feed_forward.experts) for block in model.blocks if hasattr(block.feed_forward, "experts")] == [2] * 4
    check_golden(model, golden.read_tensors(path / "golden.safetensors"), "topk64." if topk else "")


@pytest.mark.gpu
@pytest.mark.parametrize("topk", [None, 64])
def test_logits_of_the_rank_sliced_demo_on_a_gpu(testdata, topk):
    path = testdata / "demo" / "demo-tr3-tp2"
    model = load(path, device="cuda", progress=False, overrides={"index_topk": topk} if topk else None)
    test_gpu.check_golden(model, golden.read_tensors(path / "golden.safetensors"), "topk64." if topk else "")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_logits_equal_those_of_whole_experts(tmp_path, layout):
    """Two fp32 evaluations of one sum in different orders: 1e-5 is a hundred roundings."""
    sliced = fabricate(**layout)
    ids = torch.randint(0, 160, (23,))
    expected = load(whole(sliced).write(tmp_path / "whole"), progress=False).logits(ids)
    actual = load(sliced.write(tmp_path / "sliced", shards=3), progress=False).logits(ids)
    assert relative(actual, expected) < 1e-5


@pytest.mark.parametrize(("tp", "width"), [(1, 128), (4, 512)])
def test_logits_of_other_counts_of_slices(tmp_path, tp, width):
    sliced = fabricate(tp, width)
    ids = torch.randint(0, 160, (9,))
    expected = load(whole(sliced).write(tmp_path / "whole"), progress=False).logits(ids)
    model = load(sliced.write(tmp_path / "sliced"), progress=False)
    assert [len(block.feed_forward.experts) for block in model.blocks[1:]] == [tp, tp]
    assert relative(model.logits(ids), expected) < 1e-5


def test_next_token_layer_is_sliced_too(tmp_path):
    model = load(fabricate().write(tmp_path), progress=False, mtp=True)
    assert [experts.intermediate_size for experts in model.mtp.block.feed_forward.experts] == [128, 128]


def test_unquantized_next_token_layer_behind_sliced_ones(tmp_path):
    """moe_layers ends before it, as in the first GLM-5.2 files."""
    sliced, plain = fabricate(), Fabricated(quantized=False, moe_intermediate_size=256)
    for name in sliced.matching(".layers.3."):
        del sliced.tensors[name]
    sliced.tensors |= {name: tensor for name, tensor in plain.tensors.items() if ".layers.3." in name}
    sliced.config["hybrid_tr3_tail"]["moe_layers"] = [1, 2]
    model = load(sliced.write(tmp_path), progress=False, mtp=True)
    assert len(model.blocks[1].feed_forward.experts) == 2


def test_slabs_hold_the_stored_bytes(tmp_path):
    sliced = fabricate(shared_h=True, bits=[3, 4])
    model = load(sliced.write(tmp_path), progress=False)
    for rank, experts in enumerate(model.blocks[1].feed_forward.experts):
        for projection, slab in zip(("gate_proj", "up_proj", "down_proj"), experts.projections, strict=True):
            names = [f"{PREFIX}.{expert}.{projection}.rank{rank}.trellis" for expert in range(4)]
            assert torch.equal(slab.words, torch.cat([sliced.tensors[name].flatten() for name in names]))
            shared, own = ("svh", "suh") if projection == "down_proj" else ("suh", "svh")
            stored = sliced.tensors[f"{PREFIX}.shared_h.{projection}.rank{rank}.{shared}"]
            assert torch.equal(getattr(slab, shared), stored[None])
            for expert in range(4):
                assert torch.equal(
                    getattr(slab, own)[expert], sliced.tensors[f"{PREFIX}.{expert}.{projection}.rank{rank}.{own}"]
                )


def test_layers_of_different_widths_share_one_arena(tmp_path, device):
    """The trunk's first layer in slices of 128, its second whole: a plan each, over the same memory. fp16 in the kernels."""
    sliced, plain = fabricate(), Fabricated(moe_intermediate_size=256)
    for name in sliced.matching(".layers.2.mlp.experts.") + sliced.matching(".layers.3.mlp.experts."):
        del sliced.tensors[name]
    sliced.tensors |= {
        name: t for name, t in plain.tensors.items() if ".layers.2.mlp.exp" in name or ".layers.3.mlp.exp" in name
    }
    sliced.config["hybrid_tr3_tail"]["moe_layers"] = [1, 1]
    sliced.config["num_experts_per_tok"] = 1
    path, x = sliced.write(tmp_path), torch.randn(1, 128)
    expected = [block.feed_forward(x) for block in load(path, progress=False).blocks[1:]]
    model = load(path, progress=False, device=device, dtype=torch.float32)
    model.plan_experts()
    layers = [block.feed_forward for block in model.blocks[1:]]
    assert layers[0].bound.arena is layers[1].bound.arena
    assert [layer.bound.plan.spec.intermediate for layer in layers] == [128, 256]
    with torch.inference_mode(), override_backend("triton"):
        for layer, wanted in zip(layers, expected):
            assert relative(layer(x.to(device)).cpu(), wanted) < 2e-3


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_single_missing_tensor_is_found(tmp_path, layout):
    """Deleted from the set, no tensor escapes: neither a marker, nor another rank's, nor the next-token layer's."""
    path = fabricate(**layout).write(tmp_path)
    checkpoint = Checkpoint.open(path)
    sliced = [name for name in checkpoint.tensors if ".rank" in name]
    assert len(sliced) == 3 * sum(1 for _ in RankSliced.of(checkpoint).names(1))
    for name in sliced:
        info = checkpoint.tensors.pop(name)
        with pytest.raises(FormatError, match=rf"1 of {len(sliced)} are missing: {name}$"):
            RankSliced.of(checkpoint)
        checkpoint.tensors[name] = info


@pytest.mark.parametrize("suffix", ["trellis", "suh", "svh", "mcg"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layer", [1, 3])
def test_missing_tensor(tmp_path, monkeypatch, layer, rank, suffix):
    sliced = fabricate()
    name = f"layers.{layer}.mlp.experts.2.up_proj.rank{rank}.{suffix}"
    del sliced.tensors[f"model.{name}"]
    refuse(sliced, tmp_path, monkeypatch, f"1 of 288 are missing: {name}")


def test_missing_shared_vector(tmp_path, monkeypatch):
    sliced = fabricate(shared_h=True)
    del sliced.tensors[f"{PREFIX}.shared_h.down_proj.rank1.svh"]
    refuse(sliced, tmp_path, monkeypatch, r"missing: layers\.1\.mlp\.experts\.shared_h\.down_proj\.rank1\.svh")


def test_missing_rank_and_missing_layer(tmp_path, monkeypatch):
    sliced = fabricate()
    for name in sliced.matching(".rank1."):
        del sliced.tensors[name]
    message = refuse(sliced, tmp_path, monkeypatch, "144 of 288 are missing: .* and 112 more")
    assert "rank0" not in message
    sliced = fabricate()
    for name in sliced.matching(".layers.2.mlp.experts."):
        del sliced.tensors[name]
    refuse(sliced, tmp_path, monkeypatch, r"96 of 288 are missing: layers\.2\.")


@pytest.mark.parametrize(
    "name",
    [
        f"{PREFIX}.2.up_proj.rank2.trellis",
        f"{PREFIX}.4.up_proj.rank0.trellis",
        f"{PREFIX}.2.up_proj.rank0.mul1",
        f"{PREFIX}.2.up_proj.rank0.bias",
        f"{PREFIX}.shared_h.up_proj.rank0.suh",
        "model.layers.0.mlp.experts.0.up_proj.rank0.suh",
    ],
)
def test_unexpected_tensor(tmp_path, monkeypatch, name):
    sliced = fabricate()
    sliced.tensors[name] = torch.ones(128, dtype=torch.float16)
    refuse(sliced, tmp_path, monkeypatch, f"1 are unexpected: {name[6:]}")


def test_experts_stored_twice(tmp_path, monkeypatch):
    sliced = fabricate()
    sliced.tensors |= exl3_matrix(f"{PREFIX}.2.up_proj", 128, 256)
    refuse(sliced, tmp_path, monkeypatch, r"unexpected: layers\.1\.mlp\.experts\.2\.up_proj\.mcg")


def section(change):
    sliced = fabricate(**({"bits": [3, 4]} if change.keys() & {"k_values", "bits_per_expert"} else {}))
    for key, value in change.items():
        sliced.config["hybrid_tr3_tail"].pop(key, None)
        if value is not None:
            sliced.config["hybrid_tr3_tail"][key] = value
    return sliced


@pytest.mark.parametrize(
    ("change", "match"),
    [
        *(
            ({key: None}, f"hybrid_tr3_tail: found no {key}, required bits, codebook, experts_per_layer, moe_layers")
            for key in ("bits", "codebook", "experts_per_layer", "moe_layers", "tensor_schema", "tp")
        ),
        ({"format": None}, "format: found None, required 'exl3-trellis'"),
        ({"format": "exl2"}, "format: found 'exl2', required 'exl3-trellis'"),
        ({"codebook": "3inst"}, "codebook: found '3inst', required 'mcg' or 'mul1'"),
        ({"codebook": ["mcg"]}, "codebook: found .'mcg'., required 'mcg' or 'mul1'"),
        ({"codebook": "mul1"}, "tensor_schema: found .*mcg}', required .*mul1}'"),
        ({"tensor_schema": "model.layers.{L}.{E}"}, "tensor_schema: found 'model.layers.{L}.{E}', required 'model"),
        ({"moe_layers": [3, 1]}, r"moe_layers: found \[3, 1\], required \[first, last\] with 0 <= first <= last"),
        ({"moe_layers": [-1, 1]}, r"moe_layers: found \[-1, 1\]"),
        ({"moe_layers": [1]}, r"moe_layers: found \[1\]"),
        ({"moe_layers": [1.0, 3]}, r"moe_layers: found \[1.0, 3\]"),
        ({"moe_layers": [False, 3]}, r"moe_layers: found \[False, 3\]"),
        ({"moe_layers": "1-3"}, r"moe_layers: found '1-3'"),
        ({"tp": 0}, "tp: found 0, required a positive integer"),
        ({"tp": 2.0}, "tp: found 2.0, required a positive integer"),
        ({"experts_per_layer": "4"}, "experts_per_layer: found '4', required a positive integer"),
        ({"tr3_tail_per_layer": 3}, "tr3_tail_per_layer: found 3, required 4 .*no hybrids"),
        ({"bits": 0}, r"bits: found 0, required K in 1\.\.8"),
        ({"bits": 3.2}, r"bits: found 3\.2"),
        ({"bits": 2.5}, r"bits: found 2\.5, required K in 1\.\.8, or with mul1"),
        ({"bits": True}, "bits: found True"),
        ({"bits": "3"}, "bits: found '3'"),
        ({"bits": [3]}, r"bits: found \[3\]"),
        ({"rotation_layout": "implicit_magic"}, "rotation_layout: found 'implicit_magic', required 'per_expert_v1'"),
        ({"rotation_layout": "shared_h_v1"}, "shared_h_tensor_schema: found None, required 'model"),
        ({"shared_h_tensor_schema": "x"}, "shared_h_tensor_schema: found 'x', required None"),
        ({"k_values": None}, "k_values: found None, required a list"),
        ({"k_values": []}, r"k_values: found \[\], required a list"),
        ({"k_values": [3, 3.5]}, r"k_values: found 3\.5, required K in"),
        ({"k_values": [3, True]}, r"k_values: found True, required K in"),
        ({"k_values": [3]}, r"tier_bitmap\.json: layer 1: k: found K = 4, required one of k_values, \[3\]"),
        ({"bits_per_expert": 4}, "bits_per_expert: found 4, required 'FILE.json:FIELD'"),
        ({"bits_per_expert": "tier_bitmap.json"}, "bits_per_expert: found 'tier_bitmap.json', required 'FILE"),
        ({"bits_per_expert": "../tier_bitmap.json:k"}, "bits_per_expert: found '../tier_bitmap.json:k'"),
        ({"bits_per_expert": "absent.json:k"}, r"absent\.json: cannot be read"),
        ({"bits_per_expert": "tier_bitmap.json:q"}, r"tier_bitmap\.json: layer 1: q: found None, required a list of 4"),
    ],
    ids=str,
)  # fmt: skip
def test_metadata(tmp_path, monkeypatch, change, match):
    refuse(section(change), tmp_path, monkeypatch, match)


@pytest.mark.parametrize(
    ("record", "match"),
    [
        (None, "layer 2: found None, required an object with 'k'"),
        ({"k": [3, 4, 3]}, "layer 2: k: found 3 entries, required a list of 4 rates"),
        ({"k": [3, 4, 3, "4"]}, "layer 2: k: found '4', required K in"),
        ({"k": [3, 4, 3, 5]}, "layer 2: k: found K = 5, required one of k_values"),
        ({"k": [3, 4, 4, 3]}, r"layers\.2\.mlp\.experts\.2\.gate_proj\.rank0\.trellis: found K = 3 .*required K = 4"),
        ({"tail_tr3": [0, 1, 2]}, "layer 2: k: found None, required a list of 4 rates"),
    ],
)
def test_rates_by_expert(tmp_path, monkeypatch, record, match):
    sliced = fabricate(bits=[3, 4])
    sliced.files["tier_bitmap.json"].pop("2")
    if record is not None:
        sliced.files["tier_bitmap.json"]["2"] = record
    refuse(sliced, tmp_path, monkeypatch, match)


def test_rates_by_expert_in_the_shorthand_of_overlays(tmp_path):
    sliced = fabricate()
    sliced.config["hybrid_tr3_tail"] |= {"bits": "mixed", "k_values": [3], "bits_per_expert": "tier_bitmap.json:k"}
    sliced.files["tier_bitmap.json"] = {str(layer): {"tail_tr3": [0, 1, 2, 3]} for layer in (1, 2, 3)}
    load(sliced.write(tmp_path), progress=False)


def test_rate_that_is_not_the_declared_one(tmp_path, monkeypatch):
    sliced, name = fabricate(), f"{PREFIX}.3.down_proj.rank1"
    sliced.tensors |= exl3_matrix(name, 128, 128, 4)
    refuse(sliced, tmp_path, monkeypatch, rf"{name[6:]}\.trellis: found I16 \[8, 8, 64\], required I16 \[8, 8, 48\]")
    sliced.tensors |= exl3_matrix(name.replace("rank1", "rank0"), 128, 128, 4)
    refuse(sliced, tmp_path, monkeypatch, r"rank0\.trellis: found K = 4 \(last dimension 64\), required K = 3 .*declares it")
    mixed = fabricate(bits={"gate_proj": 3, "up_proj": 4, "down_proj": 5})
    mixed.config["hybrid_tr3_tail"]["k_values"] = [3, 4]
    refuse(mixed, tmp_path, monkeypatch, r"down_proj\.rank0\.trellis: found K = 5 .*required K = 3 or 4")


@pytest.mark.parametrize("suffix", ["trellis", "suh", "svh", "mcg"])
def test_ranks_that_differ(tmp_path, monkeypatch, suffix):
    sliced, name = fabricate(), f"{PREFIX}.3.gate_proj.rank1.{suffix}"
    sliced.tensors[name] = sliced.tensors[name].float()
    refuse(sliced, tmp_path, monkeypatch, rf"{name[6:]}: found F32 .*, required .*slices are alike on all ranks")


@pytest.mark.parametrize(
    ("suffix", "wrong", "match"),
    [
        ("trellis", torch.ones(8, 8, 48, dtype=torch.int32), r"trellis: found torch\.int32, required torch\.int16"),
        ("trellis", torch.ones(64, 48, dtype=torch.int16), r"trellis: found shape \[64, 48\]"),
        ("trellis", torch.ones(16, 8, 48, dtype=torch.int16), r"trellis: found in = 256 for a logical size of 128"),
        ("trellis", torch.ones(8, 4, 48, dtype=torch.int16), r"trellis: found out = 64, required a positive multiple of 128"),
        ("suh", torch.ones(64, dtype=torch.float16), r"suh: found shape \[64\], required \[128\]"),
        ("svh", torch.ones(128, dtype=torch.float32), r"svh: found torch\.float32, required torch\.float16"),
        ("mcg", torch.ones(2, dtype=torch.int32), r"mcg: found shape \[2\], required a scalar"),
        ("mcg", torch.ones((), dtype=torch.int16), r"mcg: found torch\.int16, required a 32-bit pattern"),
    ],
)
def test_geometry(tmp_path, monkeypatch, suffix, wrong, match):
    sliced = fabricate()
    for rank in range(2):
        sliced.tensors[f"{PREFIX}.3.gate_proj.rank{rank}.{suffix}"] = wrong.clone()
        if match.startswith("trellis: found in"):
            sliced.tensors[f"{PREFIX}.3.gate_proj.rank{rank}.suh"] = torch.ones(256, dtype=torch.float16)
    refuse(sliced, tmp_path, monkeypatch, match)


def test_shared_vector_of_wrong_width(tmp_path, monkeypatch):
    sliced = fabricate(shared_h=True)
    for rank in range(2):
        sliced.tensors[f"{PREFIX}.shared_h.up_proj.rank{rank}.suh"] = torch.ones(256, dtype=torch.float16)
    refuse(sliced, tmp_path, monkeypatch, r"experts\.shared_h\.up_proj\.rank0\.suh: found shape \[256\], required \[128\]")


@pytest.mark.parametrize("rank", [0, 1])
def test_values_of_marker_and_scales(tmp_path, monkeypatch, rank):
    monkeypatch.setattr(TensorReader, "read", lambda *_: pytest.fail("a weight was read"))
    sliced = fabricate()
    sliced.tensors[f"{PREFIX}.3.gate_proj.rank{rank}.mcg"] = torch.tensor(7, dtype=torch.int32)
    with pytest.raises(FormatError, match=rf"gate_proj\.rank{rank}\.mcg: found 0x7, required 0xcbac1fed"):
        load(sliced.write(tmp_path), progress=False)
    sliced = fabricate(shared_h=True)
    for name in (f"{PREFIX}.3.gate_proj.rank{rank}.svh", f"{PREFIX}.shared_h.gate_proj.rank{rank}.suh"):
        before = sliced.tensors[name].clone()
        sliced.tensors[name][5] = float("inf")
        with pytest.raises(FormatError, match=rf"{name[6:]}: found NaN or infinity"):
            load(sliced.write(tmp_path), progress=False)
        sliced.tensors[name] = before


def test_expert_count_of_the_model(tmp_path, monkeypatch):
    sliced = fabricate()
    sliced.config["n_routed_experts"] = 8
    for name in sliced.matching(".mlp.gate."):
        sliced.tensors[name] = torch.cat([sliced.tensors[name]] * 2)
    refuse(sliced, tmp_path, monkeypatch, r"found 4 experts \(config.json: hybrid_tr3_tail.experts_per_layer\), required 8")


@pytest.mark.parametrize(("tp", "width"), [(2, 192), (3, 256), (4, 384)])
def test_slices_off_the_rotation_blocks(tmp_path, monkeypatch, tp, width):
    """192 / 2 = 96 and 384 / 4 = 96 would be padded, 256 / 3 is no integer: no such slices exist."""
    sliced = fabricate(tp, width)
    refuse(
        sliced, tmp_path, monkeypatch, f"found slices for tp = {tp} of an intermediate size of {width}, required slices of a"
    )


def test_layers_that_are_not_there(tmp_path, monkeypatch):
    sliced = fabricate()
    sliced.config["hybrid_tr3_tail"]["moe_layers"] = [1, 4]
    refuse(sliced, tmp_path, monkeypatch, r"96 of 384 are missing: layers\.4\.")
    for name in sliced.matching(".layers.3.mlp.experts"):
        sliced.tensors[name.replace(".3.mlp", ".4.mlp")] = sliced.tensors[name].clone()
    refuse(sliced, tmp_path, monkeypatch, r"96 unexpected: layers\.4\.")


def test_sliced_names_without_a_description(tmp_path, monkeypatch):
    sliced = fabricate()
    del sliced.config["hybrid_tr3_tail"]
    refuse(sliced, tmp_path, monkeypatch, "config.json has no hybrid_tr3_tail, but tensors are named for ranks 0, 1")


def test_description_without_slices(tmp_path, monkeypatch):
    plain = Fabricated(moe_intermediate_size=256)
    plain.config["hybrid_tr3_tail"] = fabricate().config["hybrid_tr3_tail"]
    refuse(plain, tmp_path, monkeypatch, "288 of 288 are missing")


def test_description_inside_text_config(tmp_path):
    sliced = fabricate()
    sliced.config = {"model_type": "wrapper", "text_config": sliced.config}
    checkpoint = Checkpoint.open(sliced.write(tmp_path))
    assert RankSliced.of(checkpoint).tp == 2


@pytest.mark.parametrize(
    ("tp", "size", "expected"),
    [
        (4, 1, [(0, 1, 2, 3)]),
        (4, 2, [(0, 1), (2, 3)]),
        (4, 4, [(0,), (1,), (2,), (3,)]),
        (6, 3, [(0, 1), (2, 3), (4, 5)]),
    ],
)
def test_slices_of_a_process(tmp_path, tp, size, expected):
    sliced = RankSliced.of(Checkpoint.open(fabricate(tp, 128 * tp).write(tmp_path)))
    assert [sliced.local(rank, size) for rank in range(size)] == expected


@pytest.mark.parametrize("size", [3, 8])
def test_processes_that_do_not_divide_the_slices(tmp_path, size):
    sliced = RankSliced.of(Checkpoint.open(fabricate(4, 512).write(tmp_path)))
    with pytest.raises(FormatError, match=f"tp: found {size} processes, required a divisor of 4 .*cannot be cut again"):
        sliced.local(0, size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_load_of_a_process(tmp_path, monkeypatch, size):
    """A process reads its own slices and no other's, and refuses an incomplete set whichever rank's tensor is missing."""
    sliced = fabricate(4, 512)
    path, read = sliced.write(tmp_path / "whole"), []
    original = TensorReader.read
    monkeypatch.setattr(TensorReader, "read", lambda self, info: (read.append(info.name), original(self, info))[1])
    for rank in range(size):
        read.clear()
        model = load(path, progress=False, shard=Shard(rank, size))
        stored = range(rank * 4 // size, (rank + 1) * 4 // size)
        assert {name.split(".rank")[1].split(".")[0] for name in read if ".rank" in name} == {str(each) for each in stored}
        experts = model.blocks[1].feed_forward.experts
        for each, number in zip(experts, stored, strict=True):
            trellis = sliced.tensors[f"{PREFIX}.2.down_proj.rank{number}.trellis"]
            assert torch.equal(each.down.expert(2).trellis, trellis)
    del sliced.tensors[f"{PREFIX}.2.down_proj.rank3.suh"]
    path = sliced.write(tmp_path / "damaged")
    for rank in range(size):
        with pytest.raises(FormatError, match=r"missing: layers\.1\.mlp\.experts\.2\.down_proj\.rank3\.suh"):
            load(path, progress=False, shard=Shard(rank, size))


def test_load_of_a_process_that_is_one_too_many(tmp_path):
    path = fabricate(2, 256).write(tmp_path)
    for size in (3, 4):
        with pytest.raises(FormatError, match=f"tp: found {size} processes, required a divisor of 2"):
            load(path, progress=False, shard=Shard(0, size))
    with pytest.raises(FormatError, match="stored in slices by width, required whole ones to divide by expert"):
        load(path, progress=False, shard=Shard(0, 2), expert_parallel=True)


def test_plain_checkpoints_are_not_rank_sliced(tmp_path):
    assert RankSliced.of(Checkpoint.open(Fabricated().write(tmp_path))) is None


def test_inspect_tells_the_layout(tmp_path):
    path = fabricate(shared_h=True, bits=[3, 4]).write(tmp_path)
    report = inspect_checkpoint(path, tp=1)
    assert report["runs"], report["problems"]
    json.dumps(report)
    assert report["rank_sliced"] == {
        "tp": 2, "ranks": [0, 1], "layers": [1, 3], "experts": 4, "codebook": "mcg", "rates": [3, 4], "layout": "shared_h_v1",
        "tensors": 234, "missing": 0, "complete": True,
    }  # fmt: skip
    assert "rank-sliced for tp=2, shared_h_v1: layers 1..3, 234 tensors, complete" in format_report(report)
