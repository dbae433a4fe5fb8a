"""`exl3-triton slice`: what it writes is the same model, an interruption costs nothing, and what cannot be cut is refused."""

import json
import shutil
from collections import namedtuple

import golden
import pytest
import torch
from fabricate import Fabricated, exl3_matrix
from safetensors.torch import load_file
from test_model import check_golden, relative
from test_rank_sliced import fabricate
from test_transfer import tensors_of

from exl3_triton import Codebook, FormatError, cli, load, reference
from exl3_triton.format import TrellisWeight
from exl3_triton.model import slicing
from exl3_triton.model.checkpoint import Checkpoint, TensorReader
from exl3_triton.model.manifest import MANIFEST
from exl3_triton.model.parallel import Shard
from exl3_triton.model.rank_sliced import RankSliced
from exl3_triton.model.slicing import PARTIAL, slice_checkpoint
from exl3_triton.model.verify import verify_checkpoint

EXPERTS = "model.layers.1.mlp.experts"


def plain(width=256, **options):
    return Fabricated(moe_intermediate_size=width, **options)


def run(fabricated, tmp_path, tp=2, shards=1):
    source = fabricated.write(tmp_path / "source", shards)
    return source, slice_checkpoint(source, tmp_path / "sliced", tp, progress=False)


def all_tensors(path):
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("tp", "width"), [(1, 96), (2, 256), (4, 512), (3, 768)])
def test_slices_are_parts_of_the_stored_matrices(tmp_path, tp, width):
    """Stored values and scales bit for bit; of a matrix cut along its outputs every slice has all input scales, and so on."""
    fabricated = plain(width)
    _, report = run(fabricated, tmp_path, tp, shards=3)
    assert (report.tp, report.layers, report.kept) == (tp, (1, 3), 0)
    tensors = all_tensors(tmp_path / "sliced")
    for projection in ("gate_proj", "up_proj", "down_proj"):
        for expert in range(4):
            name = f"{EXPERTS}.{expert}.{projection}"
            whole = TrellisWeight.from_tensors(fabricated.tensors, name)
            parts = [TrellisWeight.from_tensors(tensors, f"{name}.rank{rank}") for rank in range(tp)]
            decoded = [reference.decode(part.trellis, part.codebook) for part in parts]
            cut, kept = ("suh", "svh") if projection == "down_proj" else ("svh", "suh")
            stored = reference.decode(whole.trellis, whole.codebook)
            assert stored.norm() > 0
            assert torch.equal(torch.cat(decoded, dim=0 if cut == "suh" else 1), stored)
            assert torch.equal(torch.cat([getattr(part, cut) for part in parts]), getattr(whole, cut))
            assert all(torch.equal(getattr(part, kept), getattr(whole, kept)) for part in parts)
    others = {name: tensor for name, tensor in fabricated.tensors.items() if ".mlp.experts." not in name}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in others.items())


def test_logits_of_one_slice_are_those_of_the_source(tmp_path):
    source, _ = run(plain(96), tmp_path, tp=1)
    ids = torch.randint(0, 160, (17,))
    expected = load(source, progress=False).logits(ids)
    assert torch.equal(load(tmp_path / "sliced", progress=False).logits(ids), expected)


@pytest.mark.parametrize(("tp", "width"), [(2, 256), (4, 512)])
def test_logits_of_several_slices(tmp_path, tp, width):
    """Sums over the intermediate width in another order: 1e-5 is a hundred roundings of fp32."""
    source, _ = run(plain(width), tmp_path, tp, shards=2)
    ids = torch.randint(0, 160, (17,))
    expected = load(source, progress=False).logits(ids)
    model = load(tmp_path / "sliced", progress=False, mtp=True)
    assert len(model.mtp.block.feed_forward.experts) == tp
    assert relative(model.logits(ids), expected) < 1e-5


def test_a_process_gets_from_slices_what_it_would_have_cut_itself(tmp_path):
    """Every weight of a rank, bit for bit: what the ranks compute and add up is the same then."""
    source, _ = run(plain(512), tmp_path, tp=2)
    for rank in range(2):
        direct, sliced = (
            tensors_of(load(path, progress=False, shard=Shard(rank, 2))) for path in (source, tmp_path / "sliced")
        )
        assert direct.keys() == sliced.keys()
        assert sum(name.endswith(".words") for name in direct) == 2 * 3  # two layers, three projections
        for name, tensor in direct.items():
            if ".feed_forward.0." in name:  # the direct load has the shared expert behind the four routed ones
                assert 4 * len(tensor) == 5 * len(sliced[name])
                tensor = tensor[: len(sliced[name])]
            assert torch.equal(sliced[name], tensor), name


def test_slabs_are_read_in_few_runs(tmp_path, monkeypatch):
    """Files that `slice` wrote hold the experts of a slab back to back: one read for each of its three parts."""
    fabricated = plain()
    run(fabricated, tmp_path)
    read, original = [], TensorReader.read
    monkeypatch.setattr(TensorReader, "read", lambda self, info: (read.append(info), original(self, info))[1])
    model = load(tmp_path / "sliced", progress=False)
    expected = 2 * 2 * 3 * 3  # layers, ranks, projections, parts
    assert len([info for info in read if ".rank" in info.name]) == expected
    down = model.blocks[2].feed_forward.experts[1].down
    stored = all_tensors(tmp_path / "sliced")
    for expert in range(4):
        for part in ("trellis", "suh", "svh"):
            name = f"model.layers.2.mlp.experts.{expert}.down_proj.rank1.{part}"
            assert torch.equal(getattr(down.expert(expert), part), stored[name])


@pytest.mark.parametrize("name", ["demo-exl3-3.0bpw-mcg", "demo-exl3-mixed-mul1"])
def test_logits_of_the_sliced_demo(testdata, tmp_path, name):
    source = testdata / "demo" / name
    slice_checkpoint(source, tmp_path / "sliced", 2, progress=False)
    assert verify_checkpoint(tmp_path / "sliced", progress=False).problems == ()
    check_golden(load(tmp_path / "sliced", progress=False), golden.read_tensors(source / "golden.safetensors"))


def test_description_of_the_result(tmp_path):
    source, _ = run(plain(), tmp_path)
    section = json.loads((tmp_path / "sliced" / "config.json").read_text())["hybrid_tr3_tail"]
    assert section == fabricate().config["hybrid_tr3_tail"] | {"bits": 3.0, "tr3_tail_per_layer": 4}
    described = RankSliced.of(Checkpoint.open(tmp_path / "sliced"))
    assert (described.tp, list(described.layers), described.num_experts) == (2, [1, 2, 3], 4)
    assert json.loads((source / "config.json").read_text()).keys() == plain().config.keys()  # the source stays as it is


def test_rates_by_expert(tmp_path):
    fabricated = plain(codebook=Codebook.MUL1)
    rates = [2, 2.5, 4, 3]
    for name in fabricated.matching(".mlp.experts."):
        expert, projection = name.split(".")[5:7]
        prefix, sizes = name.rpartition(".")[0], (256, 128) if projection == "down_proj" else (128, 256)
        fabricated.tensors |= exl3_matrix(prefix, *sizes, rates[int(expert)], Codebook.MUL1)
    run(fabricated, tmp_path)
    section = json.loads((tmp_path / "sliced" / "config.json").read_text())["hybrid_tr3_tail"]
    assert (section["bits"], section["k_values"], section["codebook"]) == ("mixed", [2, 2.5, 3, 4], "mul1")
    assert json.loads((tmp_path / "sliced" / "tier_bitmap.json").read_text()) == {str(i): {"k": rates} for i in (1, 2, 3)}
    load(tmp_path / "sliced", progress=False)


def test_rates_by_projection(tmp_path):
    fabricated = plain()
    fabricated.tensors |= exl3_matrix(f"{EXPERTS}.2.up_proj", 128, 256, 5)
    run(fabricated, tmp_path)
    section = json.loads((tmp_path / "sliced" / "config.json").read_text())["hybrid_tr3_tail"]
    assert (section["bits"], section["k_values"]) == ("mixed_tensor", [3, 5])
    load(tmp_path / "sliced", progress=False)


def test_unquantized_next_token_layer_stays_whole(tmp_path):
    fabricated = plain()
    for name in fabricated.matching(".layers.3.mlp.experts."):
        del fabricated.tensors[name]
    unquantized = plain(quantized=False)
    fabricated.tensors |= {name: unquantized.tensors[name] for name in unquantized.matching(".layers.3.mlp.experts.")}
    _, report = run(fabricated, tmp_path)
    assert report.layers == (1, 2)
    load(tmp_path / "sliced", progress=False, mtp=True)


def test_names_inside_a_wrapper_and_other_files(tmp_path):
    fabricated = plain()
    fabricated.tensors = {f"language_model.{name}": tensor for name, tensor in fabricated.tensors.items()}
    fabricated.files["tokenizer_config.json"] = {"x": 1}
    storage = {name.rpartition(".")[0]: {} for name in fabricated.tensors if name.endswith(".trellis")}
    fabricated.files["quantization_config.json"] = {"bits": 3, "tensor_storage": storage}
    run(fabricated, tmp_path)
    kept = json.loads((tmp_path / "sliced" / "quantization_config.json").read_text())
    assert kept["bits"] == 3
    assert set(kept["tensor_storage"]) == {name for name in storage if ".mlp.experts." not in name}
    assert json.loads((tmp_path / "sliced" / "tokenizer_config.json").read_text()) == {"x": 1}
    assert verify_checkpoint(tmp_path / "sliced", progress=False).sound


@pytest.mark.parametrize("finished", [0, 1, 2])
def test_resume_after_an_interruption(tmp_path, monkeypatch, finished):
    source = plain().write(tmp_path / "source", shards=2)
    slice_checkpoint(source, tmp_path / "straight", 2, progress=False)
    write, calls = slicing._blocks, []

    def dies(view, piece):
        calls.append(piece.name)
        if ".layers." in piece.name and sum(name.endswith("experts.0.gate_proj.rank0.trellis") for name in calls) > finished:
            raise KeyboardInterrupt
        yield from write(view, piece)

    monkeypatch.setattr(slicing, "_blocks", dies)
    with pytest.raises(KeyboardInterrupt):
        slice_checkpoint(source, tmp_path / "sliced", 2, progress=False)
    monkeypatch.undo()
    with pytest.raises(FormatError, match=r"no config\.json"):
        Checkpoint.open(tmp_path / "sliced")
    assert list((tmp_path / "sliced").glob("*.tmp"))
    report = slice_checkpoint(source, tmp_path / "sliced", 2, progress=False)
    assert (report.kept, report.written) == (finished, 5 - finished)
    assert not list((tmp_path / "sliced").glob("*.tmp"))
    assert not (tmp_path / "sliced" / PARTIAL).exists()
    assert (tmp_path / "sliced" / MANIFEST).read_text() == (tmp_path / "straight" / MANIFEST).read_text()
    assert verify_checkpoint(tmp_path / "sliced", progress=False).sound


def unfinished(tmp_path, monkeypatch):
    source = plain().write(tmp_path / "source")
    monkeypatch.setattr(slicing, "_write_rest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        slice_checkpoint(source, tmp_path / "sliced", 2, progress=False)
    monkeypatch.undo()
    return source


def test_resume_writes_damaged_files_again(tmp_path, monkeypatch):
    source = unfinished(tmp_path, monkeypatch)
    (tmp_path / "sliced" / "model-layer-002.safetensors").write_bytes(b"short")
    (tmp_path / "sliced" / "model-layer-003.safetensors").unlink()
    with (tmp_path / "sliced" / PARTIAL).open("a") as partial:
        partial.write("0123")  # a line that was never finished
    report = slice_checkpoint(source, tmp_path / "sliced", 2, progress=False)
    assert (report.kept, report.written) == (2, 2)
    assert verify_checkpoint(tmp_path / "sliced", progress=False).sound


def test_resume_with_another_source_or_tp(tmp_path, monkeypatch):
    source = unfinished(tmp_path, monkeypatch)
    with pytest.raises(FormatError, match="unfinished copy of another checkpoint or another tp"):
        slice_checkpoint(source, tmp_path / "sliced", 1, progress=False)
    with pytest.raises(FormatError, match="unfinished copy of another checkpoint or another tp"):
        slice_checkpoint(plain().write(tmp_path / "other"), tmp_path / "sliced", 2, progress=False)


def test_destination_that_is_taken(tmp_path):
    source, _ = run(plain(), tmp_path)
    with pytest.raises(FormatError, match="found a finished copy, required a directory that is new"):
        slice_checkpoint(source, tmp_path / "sliced", 2, progress=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(FormatError, match="found other files, required a directory that is new"):
        slice_checkpoint(source, tmp_path / "other", 2, progress=False)
    with pytest.raises(FormatError, match="found a file, required a directory that is new"):
        slice_checkpoint(source, tmp_path / "other" / "notes.txt", 2, progress=False)
    with pytest.raises(FormatError, match="found the source"):
        slice_checkpoint(source, source, 2, progress=False)
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"


def test_no_space(tmp_path, monkeypatch):
    source = plain().write(tmp_path / "source")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 1000))
    with pytest.raises(FormatError, match=r"found 0\.0 GB free, required 0\.0 GB"):
        slice_checkpoint(source, tmp_path / "sliced", 2, progress=False)


def refuse(fabricated, tmp_path, match, tp=2):
    source = fabricated.write(tmp_path / "source")
    with pytest.raises(FormatError, match=match):
        slice_checkpoint(source, tmp_path / "sliced", tp, progress=False)
    assert not (tmp_path / "sliced").exists()


@pytest.mark.parametrize(("width", "tp"), [(96, 2), (192, 2), (256, 4), (1408, 2), (2176, 2), (768, 4), (256, 3)])
def test_widths_that_cannot_be_cut(tmp_path, width, tp):
    """1408 = 11 blocks (GLM-4.5-Air), 2176 = 17 blocks, 768 / 4 = 192 lies between blocks."""
    required = f"found {width}, which does not divide into {tp} parts .* required: a multiple of {128 * tp}"
    refuse(plain(width), tmp_path, f"moe_intermediate_size: {required}", tp)


def test_what_cannot_be_sliced(tmp_path):
    refuse(fabricate(), tmp_path, "found a rank-sliced checkpoint, required a plain EXL3 one")
    refuse(plain(quantized=False), tmp_path, r"layers\.1\.mlp\.experts: found unquantized experts, required EXL3")
    refuse(plain(codebook=Codebook.THREE_INST), tmp_path, "codebook 3inst, required mcg or mul1 throughout")
    dense = plain(mlp_layer_types=["dense"] * 3, first_k_dense_replace=3, num_nextn_predict_layers=0)
    refuse(dense, tmp_path, "found no routed experts")
    holes = plain(mlp_layer_types=["sparse", "dense", "sparse"])
    refuse(holes, tmp_path, r"found experts in layers \[0, 2, 3\], required a span without holes")


def test_experts_of_two_codebooks(tmp_path):
    fabricated = plain()
    del fabricated.tensors[f"{EXPERTS}.2.up_proj.mcg"]
    fabricated.tensors |= exl3_matrix(f"{EXPERTS}.2.up_proj", 128, 256, 3, Codebook.MUL1)
    refuse(fabricated, tmp_path, "found experts with codebook mcg, mul1, required mcg or mul1 throughout")


def test_legacy_signs(tmp_path):
    fabricated = plain()
    del fabricated.tensors[f"{EXPERTS}.2.up_proj.suh"]
    fabricated.tensors[f"{EXPERTS}.2.up_proj.su"] = torch.ones(8, dtype=torch.int16)
    refuse(
        fabricated, tmp_path, r"found legacy packed signs, required \.suh and \.svh: layers\.1\.mlp\.experts\.2\.up_proj\.su"
    )


def test_source_that_is_damaged(tmp_path):
    fabricated = plain()
    del fabricated.tensors["model.norm.weight"], fabricated.tensors[f"{EXPERTS}.2.up_proj.trellis"]
    refuse(fabricated, tmp_path, r"2 missing: layers\.1\.mlp\.experts\.2\.up_proj\.trellis, norm\.weight")


def test_command(tmp_path, capsys):
    source = plain().write(tmp_path / "source")
    assert cli.main(["slice", str(source), str(tmp_path / "sliced"), "--tp", "2"]) == 0
    assert "layers 1..3 in slices for tp=2; 4 files written" in capsys.readouterr().out
    assert cli.main(["slice", str(source), str(tmp_path / "more"), "--tp", "4"]) == 2
    assert "error: " in capsys.readouterr().err
    assert cli.main(["slice", str(source), str(tmp_path / "more"), "--tp", "0"]) == 2
    assert "--tp: found 0" in capsys.readouterr().err
