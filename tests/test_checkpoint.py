import json
import shutil
import struct

import pytest
import torch
from fabricate import CONFIG, Fabricated, split_safetensors, write_index, write_raw
from safetensors.torch import save_file

from exl3_triton import FormatError
from exl3_triton.model.checkpoint import Checkpoint, TensorReader

SHARD = "model-00001-of-00003.safetensors"
OTHER = "model-00002-of-00003.safetensors"


@pytest.fixture(autouse=True)
def _no_data_is_read(monkeypatch, request):
    """Opening looks at headers alone: reading a tensor in one of these tests is a failure unless it says so."""
    if "reads_data" not in request.node.name:
        monkeypatch.setattr(TensorReader, "read", lambda *_: pytest.fail("tensor data was read"))


@pytest.fixture(scope="module")
def single_source(tmp_path_factory):
    return Fabricated().write(tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def sharded_source(tmp_path_factory):
    return Fabricated().write(tmp_path_factory.mktemp("sharded"), shards=3)


@pytest.fixture
def single(single_source, tmp_path):
    return shutil.copytree(single_source, tmp_path / "single")


@pytest.fixture
def sharded(sharded_source, tmp_path):
    return shutil.copytree(sharded_source, tmp_path / "sharded")


def refuse(path, match):
    with pytest.raises(FormatError, match=match):
        Checkpoint.open(path)


def weight_map(directory):
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


def change_header(path, change):
    header, data = split_safetensors(path)
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def first_tensor(header):
    """The tensor with data at the lowest offset, and the one after it."""
    ordered = sorted((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])
    return ordered[0], ordered[1]


def test_open_reads_headers(single, sharded_source):
    fabricated = Fabricated()
    for directory in (single, sharded_source):
        checkpoint = Checkpoint.open(str(directory))
        assert len(checkpoint.tensors) == len(fabricated.tensors)
        assert not checkpoint.rank_sliced
        for stored, tensor in fabricated.tensors.items():
            info = checkpoint.tensors[stored.removeprefix("model.")]
            assert (info.name, info.shape, info.torch_dtype) == (stored, tuple(tensor.shape), tensor.dtype)
            assert info.nbytes == tensor.nbytes


def test_reader_reads_data_of_every_shard(tmp_path):
    fabricated = Fabricated()
    checkpoint = Checkpoint.open(fabricated.write(tmp_path, shards=3))
    with checkpoint.reader() as reader:
        for info in checkpoint.tensors.values():
            assert torch.equal(reader.read(info), fabricated.tensors[info.name])
        markers = [info for info in checkpoint.tensors.values() if info.name.endswith(".mcg")]
        small = {info.name: raw for info, raw in reader.read_small(markers)}
    assert len(small) == len(markers) > 20
    assert set(small.values()) == {struct.pack("<I", 0xCBAC1FED)}


@pytest.mark.parametrize("padding", range(8))
def test_reader_reads_data_at_any_alignment(single, padding):
    before = Checkpoint.open(single)
    with before.reader() as reader:
        expected = {name: reader.read(info).clone() for name, info in before.tensors.items()}
    change_header(single / "model.safetensors", lambda header: header.update(__metadata__={"pad": "x" * padding}))
    after = Checkpoint.open(single)
    with after.reader() as reader:
        for name, info in after.tensors.items():
            tensor = reader.read(info)
            assert tensor.data_ptr() % tensor.element_size() == 0
            assert torch.equal(tensor, expected[name])


def test_directory_that_is_not_a_checkpoint(tmp_path, single):
    refuse(tmp_path / "absent", "found nothing, a checkpoint directory is required")
    refuse(single / "config.json", "found a file, a checkpoint directory is required")
    empty = tmp_path / "empty"
    empty.mkdir()
    refuse(empty, r"no config\.json")
    (empty / "config.json").write_text(json.dumps(CONFIG))
    refuse(empty, r"no \.safetensors file")
    save_file({"prompt": torch.arange(3)}, empty / "golden.safetensors")
    refuse(empty, "hold no weights")
    (empty / "config.json").write_text("{")
    refuse(empty, r"config\.json: malformed JSON")


def test_safetensors_files_beside_the_shards_are_left_alone(single, sharded):
    for directory in (single, sharded):
        save_file({"prompt0.logits": torch.rand(4)}, directory / "golden.safetensors")
        assert "prompt0.logits" not in Checkpoint.open(directory).tensors


@pytest.mark.parametrize("keep", [0, 7, 8, 9, 100, -1])
def test_truncated_safetensors(single, keep):
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refuse(single, "truncated")


def test_truncated_safetensors_in_the_data(single):
    path = single / "model.safetensors"
    _, data = split_safetensors(path)
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) - len(data) // 2])
    refuse(single, "truncated, .* ends at byte")


@pytest.mark.parametrize("header", [b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b""])
def test_malformed_safetensors_header(single, header):
    write_raw(single / "model.safetensors", header)
    refuse(single, "malformed safetensors header")


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {},
        {"dtype": "F16", "shape": [2]},
        {"dtype": "F16", "shape": [2], "data_offsets": [0]},
        {"dtype": "F16", "shape": [2], "data_offsets": ["0", "4"]},
        {"dtype": "F16", "shape": [-2], "data_offsets": [0, 4]},
        {"dtype": "F16", "shape": ["2"], "data_offsets": [0, 4]},
        {"dtype": "F16", "shape": [2.0], "data_offsets": [0, 4]},
        {"dtype": ["F16"], "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F16", "shape": [2], "data_offsets": [4, 0]},
        {"dtype": "F16", "shape": [2], "data_offsets": [-4, 0]},
    ],
)
def test_malformed_safetensors_entry(single, entry):
    write_raw(single / "model.safetensors", {"lm_head.weight": entry}, 4)
    refuse(single, r"malformed safetensors header, lm_head\.weight")


def test_malformed_safetensors_dtype_and_size(single):
    path = single / "model.safetensors"
    write_raw(path, {"lm_head.weight": {"dtype": "Q7", "shape": [2], "data_offsets": [0, 4]}}, 4)
    refuse(single, r"lm_head\.weight has the unknown dtype 'Q7'")
    write_raw(path, {"lm_head.weight": {"dtype": "F16", "shape": [3], "data_offsets": [0, 4]}}, 4)
    refuse(single, r"lm_head\.weight has 4 bytes, F16 \[3\] needs 6")
    write_raw(path, {"lm_head.weight": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}, 3)
    refuse(single, r"truncated, lm_head\.weight ends at byte 4 of the data, the file holds 3")
    write_raw(path, {"lm_head.weight": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}, 9)
    refuse(single, "5 bytes after the last tensor")


def test_malformed_safetensors_overlap_and_gap(single):
    half = {"dtype": "F16", "shape": [2]}
    for second, problem in (([2, 6], "overlaps"), ([6, 10], "leaves a gap")):
        header = {"norm.weight": {**half, "data_offsets": [0, 4]}, "lm_head.weight": {**half, "data_offsets": second}}
        write_raw(single / "model.safetensors", header, second[1])
        refuse(single, rf"lm_head\.weight {problem}")


def test_safetensors_with_empty_tensors_is_fine(single):
    save_file({"lm_head.weight": torch.rand(0, 4), "norm.weight": torch.rand(0)}, single / "model.safetensors")
    assert Checkpoint.open(single).tensors["lm_head.weight"].shape == (0, 4)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_malformed_index(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    refuse(sharded, r"model\.safetensors\.index\.json")


def test_shard_that_the_index_omits(sharded):
    kept = {name: file for name, file in weight_map(sharded).items() if file != OTHER}
    write_index(sharded, kept)
    refuse(sharded, f"omits shards that are on disk: {OTHER}")


def test_shard_that_the_index_omits_is_known_by_its_content(sharded):
    save_file({"model.layers.9.mlp.gate.weight": torch.rand(2, 2)}, sharded / "extra.safetensors")
    refuse(sharded, "omits shards that are on disk: extra.safetensors")


def test_index_entry_without_a_file(sharded):
    (sharded / OTHER).unlink()
    refuse(sharded, f"names files that are not there: {OTHER}")


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/model.safetensors", "sub/model.safetensors", "..", "", "..\\model.safetensors", "C:x"]
)
def test_weight_map_path_that_leaves_the_directory(sharded, file):
    mapping = weight_map(sharded)
    name = sorted(mapping)[3]
    (sharded / "sub").mkdir()
    for target in (sharded.parent, sharded / "sub"):
        shutil.copy(sharded / SHARD, target / "model.safetensors")  # the file that the path reaches is a good one
    write_index(sharded, {**mapping, name: file})
    refuse(sharded, "a file name inside the directory is required")


def test_index_puts_a_tensor_in_the_wrong_file(sharded):
    mapping = weight_map(sharded)
    name = next(name for name, file in mapping.items() if file == SHARD)
    write_index(sharded, {**mapping, name: OTHER})
    refuse(sharded, rf"{name} \(is in {SHARD}, index says {OTHER}\)")
    write_index(sharded, {key: file for key, file in mapping.items() if key != name})
    refuse(sharded, rf"{name} \(is in {SHARD}, index says nothing\)")
    write_index(sharded, {**mapping, "model.ghost.weight": SHARD})
    refuse(sharded, r"tensors that are in no shard: model\.ghost\.weight")


def test_shards_without_index_must_be_complete(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    assert len(Checkpoint.open(sharded).tensors) == len(Fabricated().tensors)
    (sharded / OTHER).unlink()
    refuse(sharded, f"shards are missing: {OTHER}")


def test_duplicate_tensors(sharded, single):
    name = next(name for name, file in weight_map(sharded).items() if file == SHARD)
    (sharded / "model.safetensors.index.json").unlink()
    save_file({name: torch.rand(2)}, sharded / "model-extra.safetensors")
    refuse(sharded, f"{name} in .*: stored twice")
    fabricated = Fabricated()
    fabricated.tensors["model.language_model.norm.weight"] = torch.rand(128)
    refuse(fabricated.write(single), r"norm\.weight in .*: stored twice")


def test_names_with_wrapper_prefixes(tmp_path):
    fabricated = Fabricated()
    plain = {name.removeprefix("model.") for name in fabricated.tensors}
    for index, prefix in enumerate(("", "model.", "model.language_model.", "language_model.model.", "language_model.")):
        renamed = Fabricated()
        renamed.tensors = {prefix + name.removeprefix("model."): tensor for name, tensor in fabricated.tensors.items()}
        assert set(Checkpoint.open(renamed.write(tmp_path / str(index))).tensors) == plain


def test_symlinked_shards_are_allowed(sharded, tmp_path):
    cache = tmp_path / "blobs"
    cache.mkdir()
    for number, path in enumerate(sorted(sharded.glob("*.safetensors"))):
        path.rename(cache / f"{number:064x}")
        path.symlink_to(cache / f"{number:064x}")
    assert len(Checkpoint.open(sharded).tensors) == len(Fabricated().tensors)
    (cache / f"{0:064x}").unlink()
    refuse(sharded, "files that are not there")


def test_quantization_configs_are_hints(single):
    assert Checkpoint.open(single).quantization_config is None
    hint = {"quant_method": "exl3", "bits": 9, "tensor_storage": {"lm_head": {"quant_format": "none"}}}
    (single / "quantization_config.json").write_text(json.dumps(hint))
    assert Checkpoint.open(single).quantization_config == {"quant_method": "exl3", "bits": 9}
    (single / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "fp8"}}))
    assert Checkpoint.open(single).quantization_config == {"quant_method": "fp8"}


def test_rank_sliced_checkpoints_are_recognised(testdata):
    checkpoint = Checkpoint.open(testdata / "demo" / "demo-tr3-tp2")
    assert checkpoint.rank_sliced
    assert checkpoint.ranks == (0, 1)
    assert checkpoint.rank_sliced_config["tp"] == 2


def test_every_sample_checkpoint_opens(testdata):
    folders = [path for room in ("demo", "oracle") for path in sorted((testdata / room).iterdir()) if path.is_dir()]
    assert len(folders) == 12
    for folder in folders:
        assert Checkpoint.open(folder).tensors
