"""The benchmark of whole models: its arithmetic, and that it runs. Times are the CPU's and mean nothing."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fabricate import CONFIG, GQA, Fabricated

from exl3_triton import bench
from exl3_triton.cli import main
from exl3_triton.kv_format import unpack_heads, unpack_latents
from exl3_triton.model.config import ModelConfig
from exl3_triton.model.costs import Cost, Work, head_costs, limit_us, pass_costs
from exl3_triton.model.dummy import dummy_model

MLA = {**CONFIG, "max_position_embeddings": 512, "index_topk": 64}
WIDE = {**MLA, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 64}  # sizes that every packed format takes


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """The limits of a machine are not measured here."""
    limits = {"hbm_read_gbps": 10.0, "matmul_tflops": 0.1, "device": "a CPU", "command": ""}
    monkeypatch.setattr(bench, "header", lambda device: dict(limits))


def write_config(path, config):
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize("config", [MLA, GQA], ids=["mla", "gqa"])
def test_program_writes_rows(tmp_path, capsys, config):
    target, out = write_config(tmp_path / "tiny.json", config), tmp_path / "out.json"
    sizes = ["--context", "32,128", "--batch", "1,3", "--prefill", "100", "--chunk", "48", "--repeats", "2"]
    options = ["--layers", "2", "--bits", "2.5", "--codebook", "mul1", "--device", "cpu", "--output", str(out)]
    assert main(["bench", target, *sizes, *options]) == 0
    printed = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert result["header"]["command"].startswith("exl3-triton bench tiny.json --context 32,128")
    assert [(row["op"], row["batch"], row["context"]) for row in result["rows"]] == [
        ("decode_step", 1, 32), ("decode_step", 3, 32), ("decode_step", 1, 128), ("decode_step", 3, 128), ("prefill", 1, 100)
    ]  # fmt: skip
    for row in result["rows"]:
        assert (row["model"], row["layers"], row["bits"], row["codebook"], row["dummy"]) == ("tiny", 2, 2.5, "mul1", True)
        tokens = row["batch"] if row["op"] == "decode_step" else row["context"]
        assert row["tokens_per_s"] == pytest.approx(tokens * 1e6 / row["us"], abs=0.1, rel=1e-3)
        assert row["us_per_layer"] == pytest.approx((row["us"] - row["head_us"]) / 2, abs=0.1)
        assert row["limit_us"] > 0
        assert row["roofline_fraction"] == row["limit_fraction"]  # what a CPU needs to decode is not known
        assert row["limit_fraction"] == pytest.approx(row["limit_us"] / row["us"], abs=1e-3)
        assert row["device"] == "a CPU"
    assert len(printed.splitlines()) == 1 + len(result["rows"])
    assert "limit fraction" in printed

    assert (
        main(["bench", target, "--prefill", "64", "--repeats", "1", "--device", "cpu", "--output", str(out), "--append"]) == 0
    )
    rows = json.loads(out.read_text())["rows"]
    assert rows[:5] == result["rows"]
    assert (rows[5]["layers"], rows[5]["context"]) == (ModelConfig.from_dict(config).num_layers, 64)


def test_program_on_a_checkpoint_and_on_its_config(tmp_path, capsys):
    path = Fabricated().write(tmp_path / "checkpoint")
    arguments = ["bench", str(path), "--context", "32", "--repeats", "1", "--device", "cpu"]
    assert main(arguments) == 0
    assert main([*arguments, "--layers", "2"]) == 2
    assert "--layers: acts on random weights, and" in capsys.readouterr().err
    assert main([*arguments, "--dummy", "--layers", "2", "--kv", "bf16", "--no-graphs"]) == 0
    assert main([*arguments, "--dummy", "--experts-only"]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["glm-9"], "glm-9: required a checkpoint directory, a config.json, or a preset (deepseek-v2-lite, "),
        (["glm-5.2", "--context", "0"], "--context: found 0, required integers >= 1"),
        (["glm-4.5-air", "--context", "256k"], "found 262144, glm-4.5-air has at most 131072 positions"),
        (["glm-5.2", "--layers", "79"], "layers: found 79, required 1..78"),
        (["glm-5.2", "--layers", "1", "--bits", "1.5"], "bits: found 1.5 with codebook mcg"),
        (["glm-5.2", "--layers", "1", "--rank-of", "0"], "rank-of: found 0"),
        (["glm-5.2", "--profile"], "--profile: shows kernels and gaps of a GPU"),
        (["glm-5.2", "--layers", "1", "--expert-parallel"], "--expert-parallel: found one rank"),
        (["glm-5.2", "--append"], "--append: acts on --output"),
    ],
)
def test_program_refuses(capsys, options, message):
    assert main(["bench", *options, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_program_refuses_sizes_that_are_no_integers(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--context", "4q"])
    assert "'4q': required integers with commas between them" in capsys.readouterr().err


def test_plot_without_matplotlib(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["bench", "--plot", str(tmp_path / "x.png"), "--device", "cpu"]) == 2
    assert "pip install 'exl3-triton[plot]'" in capsys.readouterr().err


def test_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `plot` (matplotlib)")
    row = {"model": "m", "layers": 2, "op": "decode_step", "batch": 1, "context": 64, "tokens_per_s": 3.0, "device": "a CPU"}
    bench.save_plot([row, {**row, "context": 128}, {**row, "op": "prefill"}], tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("most", [None, 1, 5, 9, 100])
@pytest.mark.parametrize(("tokens", "past"), [(1, 0), (1, 8), (7, 0), (7, 5), (3, 20)])
def test_pairs_and_keys(most, tokens, past):
    """Counted one by one: token i of a sequence attends to past + i + 1 positions, or to `most` of them."""
    work = Work(3, tokens, past, prefill=True)
    seen = [past + i + 1 if most is None else min(past + i + 1, most) for i in range(tokens)]
    assert work.pairs(most) == 3 * sum(seen)
    assert work.keys(most) == 3 * min(past + tokens, sum(seen) if most else past + tokens)


def costs_of(config, work, **options):
    model = dummy_model(ModelConfig.from_dict(config), max_context=128, **options)
    cache = model.new_cache(3)
    return model, pass_costs(model, cache, work), head_costs(model, work.sequences)


def test_costs_of_a_grouped_model():
    """Counted by hand for GQA: 4 heads and 2 key-value heads of 64, 4 experts of 96, 2 a token; fp32, 3 bits."""
    work = Work(2, 1, 40, prefill=False)
    model, costs, head = costs_of(GQA, work)
    attention = [cost for cost in costs if cost.name == "attention"]
    assert attention == [Cost("attention", 82 * 2 * 2 * 64 * 4, 2 * 82 * 4 * 128)] * 2
    (experts,) = (cost for cost in costs if cost.name == "experts")
    expert = 3 * (128 * 128 * 3 / 8 + 2 * 128 * 2)  # padded to 128, with its scales
    assert experts.bytes == pytest.approx(4 * (1 - (1 - 2 / 4) ** 2) * expert)
    assert experts.flops == 2 * 2 * 2 * 3 * 128 * 96
    assert experts.decoded == 3 * 3 * 128 * 128  # 3 of 4 experts
    q = next(cost for cost in costs if cost.name == "q")
    assert q == Cost("q", 128 * 256 * 3 // 8 + 2 * (128 + 256 + 256) + 4, 2 * 2 * 128 * 256, 128 * 256)  # with bias and marker
    assert head == [Cost("0", model.lm_head.trellis.nbytes + 2 * (128 + 256) + 4, 2 * 2 * 128 * 160, 128 * 256)]
    assert {cost.name for cost in costs} >= {"gate", "up", "down", "router", "shared.down"}


def test_costs_of_latent_attention():
    """CONFIG's sizes: 2 heads, latents of 64 + 16, N = V = 32; an indexer of 4 heads of 32 in layers 0 and 1; topk 64."""
    absorb = 64 * (32 + 32)
    _, costs, _ = costs_of(MLA, Work(1, 1, 50, prefill=False))  # all of 51 positions are seen
    assert not [cost for cost in costs if cost.name in ("index scores", "wq_b", "weights_proj")]
    assert [cost.flops for cost in costs if cost.name == "attention"] == [2 * 51 * 2 * (2 * 64 + 16)] * 3
    assert next(cost for cost in costs if cost.name == "absorption") == Cost("absorption", 2 * absorb * 4, 2 * 2 * absorb)
    _, costs, _ = costs_of(MLA, Work(1, 1, 99, prefill=False))  # 64 of 100 are
    assert [cost for cost in costs if cost.name == "index scores"] == [
        Cost("index scores", 100 * 32 * 4, 2 * 100 * 4 * 32)
    ] * 2
    assert [cost.bytes for cost in costs if cost.name == "attention"] == [64 * 80 * 4] * 3
    assert len([cost for cost in costs if cost.name == "wk"]) == 2
    _, costs, _ = costs_of(MLA, Work(1, 8, 0, prefill=True))
    flops = 2 * 2 * (36 * (32 + 16 + 32) + 8 * absorb)
    assert next(cost for cost in costs if cost.name == "attention") == Cost("attention", 8 * 80 * 4 + 2 * absorb * 4, flops)


def test_every_weight_of_a_step_is_counted_once():
    """With so many tokens that every expert is reached: all bytes but embedding, norms and correction biases."""
    work = Work(1, 80, 0, prefill=False)
    model, costs, head = costs_of(MLA, work)
    cache = sum(cost.bytes for cost in costs if cost.name in ("attention", "index scores"))
    assert cache == 3 * 80 * 80 * 4 + 2 * 80 * 32 * 4  # rows of 80 in three layers, index keys of 32 in two
    experts = [block.feed_forward.experts for block in list(model.blocks)[1:]]
    held = sum(each.nbytes for (e,) in experts for p in e.projections for each in (p.words, p.suh, p.svh))
    apart = ("embedding", "rope_table", "correction_bias", "norm", "norm_weight", "norm_bias")
    apart += tuple(f"shared.{m}.{part}" for m in ("gate", "up", "down") for part in ("trellis", "suh", "svh"))  # in the slabs
    held += sum(b.nbytes for name, b in model.named_buffers() if not name.removesuffix(".weight").endswith(apart))
    assert sum(cost.bytes for cost in costs + head) - cache == pytest.approx(held, rel=1e-6)


def test_limit_is_the_sum_of_each_ops_own():
    costs = [Cost("memory", 1e6, 1e6), Cost("products", 1e3, 1e12)]
    assert limit_us(costs, gbps=1000, tflops=100) == pytest.approx(1 + 1e4)
    decoding = [Cost("few bits", 1e6, 1e6, 8e6), Cost("many bits", 1e6, 1e6, 1e6)]  # 5 instructions each, 10^13 a second
    assert limit_us(decoding, gbps=1000, tflops=100, instructions=1e13) == pytest.approx(4 + 1)


def test_summary_of_kernels():
    """Overlapping kernels, one gap of 10 us that counts and one of 2 that does not."""
    events = [("b", 12.0, 20.0), ("a", 0.0, 10.0), ("a", 15.0, 30.0), ("c", 40.0, 50.0)]
    found = bench.summarise(events)
    assert found == {
        "span_us": 50.0, "gaps": 1, "gap_us": 10.0, "gap_fraction": 0.2,
        "kernels": [
            {"name": "a", "calls": 2, "us": 25.0}, {"name": "c", "calls": 1, "us": 10.0}, {"name": "b", "calls": 1, "us": 8.0}
        ],
    }  # fmt: skip
    shown = bench.profile_table(found, most=1)
    assert "1 gaps longer than 3 us: 10.0 us, 20.0% of it" in shown
    assert "18.0 us      2 x  others" in shown
    with pytest.raises(ValueError, match="the profiler has seen no kernel"):
        bench.summarise([])


@pytest.mark.parametrize("kv", ["bf16", "fp8", "nvfp4", "nvfp4-fp8rope"])
def test_caches_are_filled_with_random_rows(kv):
    config = ModelConfig.from_dict(WIDE)
    model = dummy_model(config, max_context=64)
    cache = model.new_cache(3, kv=kv)
    bench.fill_cache(cache, config)
    for layer in cache.layers:
        rows = layer.rows if kv == "bf16" else unpack_latents(layer.rows, 512, 64)
        assert rows[1:].std() == pytest.approx(1, rel=0.1)
        if layer.index_keys is not None:
            keys = layer.index_keys if kv == "bf16" else unpack_heads(layer.index_keys)
            assert keys[1:].std() == pytest.approx(1, rel=0.1)


def test_grouped_caches_are_filled_with_random_rows():
    config = ModelConfig.from_dict(GQA)
    model = dummy_model(config, max_context=64)
    for kv in ("bf16", "fp8"):
        cache = model.new_cache(3, kv=kv)
        bench.fill_cache(cache, config)
        for layer in cache.layers:
            for each in (layer.keys, layer.values):
                values = each if kv == "bf16" else unpack_heads(each)
                assert values.std() == pytest.approx(1, rel=0.1)


def test_a_decode_step_sees_the_whole_context():
    """Changing a cached row far behind the token changes its logits: the step attends to what the row says."""
    config = ModelConfig.from_dict(GQA)
    model = dummy_model(config, max_context=256)
    cache = model.new_cache(4)
    bench.fill_cache(cache, config)
    seen = []
    model.decode_step = lambda *state, step=model.decode_step: seen.append((state, step(*state)))
    with torch.inference_mode():
        bench.Bench(model, cache, {"layers": 2}, bench.header("cpu"), repeats=1).decode(1, 129)
        (_, positions, slots, table, cache, bound), logits = seen[0]
        assert (int(positions), bound, table.shape[1]) == (128, 192, 3)
        assert slots.tolist() == [int(table[0, 2]) * 64]
        cache.layers[0].values[int(table[0, 0]), 0] += 5
        model.decode_step(*seen[0][0])
        assert not torch.equal(seen[-1][1], logits)


def test_what_does_not_fit_is_refused_before_weights_are_made(tmp_path, monkeypatch):
    """The check sees sizes on the meta device, and the cache that all rows need."""
    asked = []

    def pages(model, device, **options):
        asked.append((model.device.type, options["cache_tokens"], options["max_batch"], options["context"]))
        raise ValueError("cache_tokens: too many")

    monkeypatch.setattr(bench, "cache_pages", pages)
    config, path = write_config(tmp_path / "tiny.json", MLA), Fabricated().write(tmp_path / "checkpoint")
    for target in (config, path):
        with pytest.raises(ValueError, match="cache_tokens: too many"):
            list(bench.run(target, contexts=(20, 30), batches=(1, 4), prefills=(64,), device="cpu"))
    assert asked == [("meta", 4 * 64, 4, 64)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("config", [WIDE, {**GQA, "head_dim": 128}], ids=["mla", "gqa"])
@pytest.mark.parametrize("graphs", [True, False])
def test_bench_on_the_gpu(tmp_path, config, graphs):
    target, out = write_config(tmp_path / "tiny.json", config), tmp_path / "out.json"
    options = ["--context", "64,200", "--batch", "1,3", "--prefill", "200", "--chunk", "64", "--device", "cuda"]
    options += ["--profile", "--output", str(out)] + ([] if graphs else ["--no-graphs"])
    assert main(["bench", target, *options]) == 0
    result = json.loads(out.read_text())
    assert [row.get("graphs") for row in result["rows"]] == [graphs] * 4 + [None]
    assert len(result["profiles"]) == 2
    for profile in result["profiles"]:
        assert sum(kernel["us"] for kernel in profile["kernels"]) > 0
        assert any("product_kernel" in kernel["name"] for kernel in profile["kernels"])
        assert 0 <= profile["gap_fraction"] < 1


@pytest.mark.parametrize("drafts", [0, 1, 5])
def test_steps_that_speculate_py_times(drafts, monkeypatch):
    """The geometry of GLM-4.5-Air made small: two layers and the next-token layer, two sequences; replays give the same."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "benchmark"))
    speculate = importlib.import_module("speculate")
    sizes = {"num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 128, "intermediate_size": 256}
    sizes |= {"hidden_size": 256, "vocab_size": 512, "num_heads": 8, "num_kv_heads": 2}
    config = replace(ModelConfig.preset("glm-4.5-air"), **sizes)
    monkeypatch.setattr(ModelConfig, "preset", lambda name: config)
    model = speculate.open_model("glm-4.5-air", 3, 200, layers=2, device="cpu")
    assert len(model.blocks) == 2
    with torch.inference_mode():
        step = speculate.step_of(model, 2, drafts, 100)
        for _ in range(2):
            step()
