"""`exl3-triton verify`: every kind of damage is found and named, and a sound checkpoint is called sound."""

import hashlib
import json

import pytest
import torch
from fabricate import Fabricated
from safetensors.torch import load_file, save_file
from test_rank_sliced import fabricate

from exl3_triton import FormatError, cli, load
from exl3_triton.model.checkpoint import TensorReader
from exl3_triton.model.inspect import inspect_checkpoint
from exl3_triton.model.manifest import MANIFEST
from exl3_triton.model.verify import verify_checkpoint


def write(fabricated, directory, manifest=True, shards=1):
    path = fabricated.write(directory, shards)
    if manifest:
        files = sorted(file for file in path.iterdir() if file.name != MANIFEST)
        lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
        (path / MANIFEST).write_text("".join(lines))
    return path


def problems(path):
    return "\n".join(verify_checkpoint(path, progress=False).problems)


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("make", [Fabricated, fabricate, lambda: Fabricated(quantized=False)])
def test_sound_checkpoints(tmp_path, make, manifest):
    fabricated = make()
    report = verify_checkpoint(write(fabricated, tmp_path, manifest, shards=2), progress=False)
    assert report.problems == report.notes == ()
    assert report.sound
    assert report.hashed == (4 if manifest else None)  # config, index, two shards
    assert report.tensors == len(fabricated.tensors)
    assert report.bytes == sum(tensor.nbytes for tensor in fabricated.tensors.values())


def test_sample_checkpoints(testdata):
    for folder in (path for path in sorted((testdata / "demo").iterdir()) if path.is_dir()):
        assert verify_checkpoint(folder, progress=False).problems == ()


def test_every_single_missing_tensor_is_found(tmp_path, monkeypatch):
    """By load, inspect and verify, whichever tensor of the checkpoint it is; `load` reads no weight."""
    config = {"mlp_layer_types": ["dense", "sparse"], "indexer_types": ["full", "shared"], "num_hidden_layers": 2}
    config |= {"moe_intermediate_size": 256, "n_routed_experts": 2, "num_nextn_predict_layers": 0}
    small = Fabricated(quantized=False, **config).rank_slice(2)
    path = small.write(tmp_path)
    load(path, progress=False)
    assert inspect_checkpoint(path)["runs"]
    assert len(small.matching(".rank")) == 48
    for name in list(small.tensors):
        save_file({other: tensor for other, tensor in small.tensors.items() if other != name}, path / "model.safetensors")
        short = name.removeprefix("model.")
        with monkeypatch.context() as patch:
            patch.setattr(TensorReader, "read", lambda *_: pytest.fail("a weight was read"))
            with pytest.raises(FormatError, match=short.replace(".", r"\.")):
                load(path, progress=False)
        report = inspect_checkpoint(path)
        assert not report["runs"]
        assert report["rank_sliced"]["complete"] == (".rank" not in name)
        assert short in "\n".join(report["problems"])
        assert short in problems(path)


def test_missing_tensor_that_the_index_lists(tmp_path):
    path = write(fabricate(), tmp_path, manifest=False, shards=2)
    shard = path / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    name = next(name for name in tensors if ".rank1." in name)
    del tensors[name]
    save_file(tensors, shard)
    assert problems(path) == f"model.safetensors.index.json lists tensors that are in no shard: {name}"
    with pytest.raises(FormatError, match=name):
        load(path, progress=False)


def test_content_that_is_not_the_hashed_one(tmp_path):
    path = write(fabricate(), tmp_path)
    weights = path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-9] ^= 1  # a bit of some tensor: no other check can see it
    weights.write_bytes(content)
    assert problems(path).startswith("model.safetensors: found SHA-256 ")
    assert f"required {(path / MANIFEST).read_text().split()[-2]} (MANIFEST.sha256)" in problems(path)


def test_manifest_and_files_that_do_not_match(tmp_path):
    path = write(fabricate(), tmp_path)
    manifest = path / MANIFEST
    lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text(lines[0] + "0" * 64 + "  gone.json\n")
    assert problems(path).splitlines() == [
        "gone.json: listed in MANIFEST.sha256, but not there",
        "model.safetensors: not listed in MANIFEST.sha256",
    ]


def test_load_checks_hashes_where_it_is_asked_to(tmp_path, monkeypatch):
    path = write(fabricate(), tmp_path, shards=2)
    load(path, check_hashes=True, progress=False)
    monkeypatch.setattr(TensorReader, "read", lambda *_: pytest.fail("a weight was read"))
    shard = path / "model-00002-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(FormatError, match="model-00002-of-00002.safetensors: found SHA-256"):
        load(path, check_hashes=True, progress=False)
    lines = (path / MANIFEST).read_text().splitlines(keepends=True)
    (path / MANIFEST).write_text("".join(line for line in lines if "model-0000" not in line))
    with pytest.raises(FormatError, match="model-00001-of-00002.safetensors: not listed in MANIFEST.sha256; model-00002"):
        load(path, check_hashes=True, progress=False)
    (path / MANIFEST).unlink()
    with pytest.raises(FormatError, match="found no MANIFEST.sha256"):
        load(path, check_hashes=True, progress=False)


@pytest.mark.parametrize("line", ["nonsense", "00  config.json", "0" * 64 + "  ../config.json", "0" * 64 + "  /etc/passwd"])
def test_malformed_manifest(tmp_path, line):
    path = write(Fabricated(), tmp_path)
    (path / MANIFEST).write_text(f"{line}\n")
    assert "line 1: found '" in problems(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.2.mlp.experts.3.up_proj.rank1.suh", "model.layers.1.mlp.gate.weight"],
)
def test_values_that_are_not_finite(tmp_path, name, value):
    sliced = fabricate()
    sliced.tensors[name].view(-1)[-1] = value
    assert problems(write(sliced, tmp_path)) == f"{name}: found NaN or infinity, required finite values"


@pytest.mark.parametrize("layer", [1, 3])
def test_marker_of_any_rank(tmp_path, layer):
    sliced = fabricate()
    name = f"model.layers.{layer}.mlp.experts.0.gate_proj.rank1.mcg"
    sliced.tensors[name] = torch.tensor(5, dtype=torch.int32)
    assert f"{name}: found 0x5, required 0xcbac1fed (marker of codebook mcg)" in problems(write(sliced, tmp_path))


def test_unknown_family_is_held_against_its_own_description(tmp_path):
    sliced = fabricate()
    sliced.config["model_type"] = "glm5_next"
    report = verify_checkpoint(write(sliced, tmp_path / "sound"), progress=False)
    assert report.sound
    assert "not held against a model" in report.notes[0]
    name = "layers.2.mlp.experts.1.down_proj.rank1.suh"
    del sliced.tensors[f"model.{name}"]
    assert name in problems(write(sliced, tmp_path / "damaged"))


def test_exit_codes(tmp_path, capsys):
    path = write(fabricate(), tmp_path / "sound")
    assert cli.main(["verify", str(path)]) == 0
    assert capsys.readouterr().out.endswith("2 files hashed: sound\n")
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text())) + " ")
    assert cli.main(["verify", str(path)]) == 1
    assert "config.json: found SHA-256" in capsys.readouterr().out
    (path / "model.safetensors").write_bytes(b"\0" * 4)
    assert cli.main(["verify", str(path)]) == 1
    assert "truncated safetensors file" in capsys.readouterr().out
    assert cli.main(["verify", str(tmp_path / "nothing")]) == 2
    assert "no config.json" in capsys.readouterr().err
