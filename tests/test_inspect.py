import json
import time

import pytest
import torch
from fabricate import Fabricated, large_checkpoint

from exl3_triton import Codebook, FormatError
from exl3_triton.model.checkpoint import TensorReader
from exl3_triton.model.inspect import format_report, inspect_checkpoint


@pytest.fixture(autouse=True)
def _no_data_is_read(monkeypatch):
    monkeypatch.setattr(TensorReader, "read", lambda *_: pytest.fail("tensor data was read"))


def test_inspect_counts_every_byte_and_weight(tmp_path):
    fabricated = Fabricated()
    report = inspect_checkpoint(fabricated.write(tmp_path, shards=3))
    assert report["runs"]
    assert report["problems"] == []
    assert report["files"] == 3
    assert report["tensors"] == len(fabricated.tensors)
    assert report["bytes"] == sum(tensor.nbytes for tensor in fabricated.tensors.values())
    assert sum(each["bytes"] for each in report["classes"].values()) == report["bytes"]
    overhead = (".suh", ".svh", ".mcg")
    weights = {name: tensor.numel() for name, tensor in fabricated.tensors.items() if not name.endswith(overhead)}
    assert report["parameters"] == sum(size * 16 // 3 if name.endswith(".trellis") else size for name, size in weights.items())
    # 3 bits, plus two fp16 vectors of 128 and a 4-byte marker for each 128 x 128 matrix
    assert report["classes"]["routed experts"]["bits_per_weight"] == pytest.approx(3 + (2 * 128 * 16 + 32) / 128**2, abs=1e-3)
    assert report["classes"]["routed experts"]["rates"] == {"3": 24}
    assert report["codebooks"] == ["mcg"]
    assert set(report["quantized"]) == {
        "attention", "dense mlp", "routed experts", "shared experts", "indexer", "lm_head", "mtp"
    }  # fmt: skip
    assert report["unquantized"] == ["embedding", "other"]
    json.dumps(report)


def test_inspect_memory(tmp_path):
    fabricated = Fabricated(quantized=False, dtype=torch.bfloat16)
    report = inspect_checkpoint(fabricated.write(tmp_path))
    trunk = {name: tensor for name, tensor in fabricated.tensors.items() if ".layers.3." not in name}
    wide = (".e_score_correction_bias", ".weights_proj.weight")
    expected = sum(tensor.numel() * (4 if name.endswith(wide) else 2) for name, tensor in trunk.items())
    assert report["memory"]["weight_bytes_per_rank"] == expected
    assert report["memory"]["mtp_weight_bytes_per_rank"] > 0
    # three layers of 64 latent + 16 rope, two indexers of 32, two bytes each
    assert report["memory"]["kv_bytes_per_token"] == 3 * 80 * 2 + 2 * 32 * 2


def test_inspect_mixed_rates(tmp_path):
    fabricated = Fabricated(bits=2.5, codebook=Codebook.MUL1)
    report = inspect_checkpoint(fabricated.write(tmp_path))
    assert report["classes"]["attention"]["rates"] == {"2.5": 12}
    assert report["classes"]["lm_head"]["codebooks"] == {"mul1": 1}
    assert "EXL3 mul1 (2.5 bit x 24)" in format_report(report)


def test_inspect_names_what_keeps_it_from_running(tmp_path):
    fabricated = Fabricated()
    fabricated.tensors["model.layers.1.mlp.experts.2.up_proj.mcg"] = torch.tensor(7, dtype=torch.int32)
    report = inspect_checkpoint(fabricated.write(tmp_path))
    assert not report["runs"]
    assert "layers.1.mlp.experts.2.up_proj.mcg: found 0x7" in report["problems"][0]
    assert "runs at tp=1: no" in format_report(report)


def test_inspect_unsupported_family(tmp_path):
    report = inspect_checkpoint(Fabricated(model_type="glm5_next").write(tmp_path))
    assert not report["supported"]
    assert not report["runs"]
    assert "linear attention" in report["problems"][0]
    assert report["classes"]["routed experts"]["quantized_matrices"] == 24
    assert "glm5_next (not supported)" in format_report(report)


def test_inspect_tensor_parallel_rules(tmp_path):
    path = Fabricated(num_attention_heads=6, moe_intermediate_size=256).write(tmp_path)
    problems = "\n".join(inspect_checkpoint(path, tp=2)["problems"])
    assert "layers.0.mlp.gate_proj.trellis: 200 features cannot be divided over tp = 2" in problems
    assert "layers.0.self_attn.q_b_proj.trellis: 288 features" in problems
    assert ".mlp.experts." not in problems  # 256 is two blocks of 128
    problems = "\n".join(inspect_checkpoint(path, tp=4)["problems"])
    assert "num_attention_heads = 6 is not divisible by tp = 4" in problems
    assert "layers.1.mlp.experts.0.down_proj.trellis: 256 features cannot be divided over tp = 4" in problems
    with pytest.raises(ValueError, match="tp: found 0"):
        inspect_checkpoint(path, tp=0)


def test_inspect_memory_shrinks_with_tensor_parallelism(tmp_path):
    path = Fabricated(quantized=False).write(tmp_path)
    one, two = (inspect_checkpoint(path, tp=tp)["memory"] for tp in (1, 2))
    assert one["weight_bytes_per_rank"] / 2 < two["weight_bytes_per_rank"] < one["weight_bytes_per_rank"]
    assert one["kv_bytes_per_token"] == two["kv_bytes_per_token"]  # every rank holds the whole cache


def test_inspect_rank_sliced(testdata):
    path = testdata / "demo" / "demo-tr3-tp2"
    report = inspect_checkpoint(path, tp=2)
    assert report["rank_sliced"]["complete"]
    assert (report["rank_sliced"]["tp"], report["rank_sliced"]["ranks"]) == (2, [0, 1])
    assert report["classes"]["routed experts"]["rates"] == {"3": 2 * 3 * 8 * 4}
    assert "rank-sliced for tp=2, per_expert_v1: layers 1..5, 960 tensors, complete" in format_report(report)
    plain = inspect_checkpoint(testdata / "demo" / "demo-bf16")
    assert report["parameters"] == plain["parameters"]
    assert "slices for tp = 2, which tp = 4 does not divide" in inspect_checkpoint(path, tp=4)["problems"][0]


def test_inspect_every_sample_checkpoint(testdata):
    for folder in [path for room in ("demo", "oracle") for path in sorted((testdata / room).iterdir()) if path.is_dir()]:
        report = inspect_checkpoint(folder)
        assert format_report(report)
        assert report["runs"], report["problems"]


def test_inspect_directory_that_is_not_a_checkpoint(tmp_path):
    with pytest.raises(FormatError, match=r"no config\.json"):
        inspect_checkpoint(tmp_path)


@pytest.mark.slow
def test_inspect_300000_tensors_in_under_5_seconds(tmp_path):
    count = large_checkpoint(tmp_path)
    assert count > 298_000
    start = time.process_time()  # not slowed by what else the machine does
    report = inspect_checkpoint(tmp_path)
    assert time.process_time() - start < 5
    assert report["runs"], report["problems"]
    assert report["tensors"] == count
