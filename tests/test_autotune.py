"""The tuner without a GPU: problems, the search space, correctness checks in the interpreter, the predictor."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from autotune import fit, tune
from autotune.__main__ import main as cli
from autotune.attention import AttentionConfig, attention_work, rule_attention
from autotune.attention_bench import AttentionBench, ScoreBench
from autotune.bench import TOLERANCE, LinearBench, MoeBench
from autotune.calibrate import row
from autotune.features import Features, matrix_loops, step_of
from autotune.machine import MACHINES, machines_of
from autotune.pool import Task, compile_all
from autotune.predictor import expected_blocks, fitted, predict_us
from autotune.problems import (
    AttentionProblem,
    Format,
    IndexerProblem,
    LinearProblem,
    MoeProblem,
    model_problems,
    parse_attention,
    parse_shape,
)
from autotune.rank import Ranked, form_of, rank
from autotune.space import MoeConfig, space
from exl3_triton import tables
from exl3_triton.ops.attention_tuning import ScoreTile
from exl3_triton.ops.tuning import Device, LinearConfig, select_linear

ROOT = pathlib.Path(__file__).parents[1]

MCG3 = Format.parse("mcg.3")
H200 = Device("sm_90", 132)


def test_problems_of_a_preset():
    problems = model_problems("glm-5.2-tp4", [MCG3])
    assert MoeProblem(256, 6144, 512, 8, MCG3) in problems
    for k, n in ((6144, 2688), (2048, 4096), (4096, 6144), (6144, 6144), (3072, 6144), (6144, 38784)):
        assert LinearProblem(k, n, MCG3) in problems
    assert {problem.op for problem in model_problems("glm-4.5-air", [MCG3], ("moe",))} == {"moe"}
    assert AttentionProblem("mla_sparse_decode", 16, 1, 576, 512, "bf16") in problems
    assert AttentionProblem("mla_prefill", 16, 16, 256, 256, "bf16") in problems
    assert IndexerProblem(32, 128, "bf16") in problems
    cached = model_problems("glm-5.2-tp4", [MCG3], ("attention", "indexer"), ("fp8", "nvfp4"))
    assert {(p.op, getattr(p, "kind", ""), p.kv) for p in cached} == {
        ("attention", "mla_decode", "fp8"), ("attention", "mla_sparse_decode", "fp8"), ("indexer", "", "fp8"),
        ("attention", "mla_decode", "nvfp4"), ("attention", "mla_sparse_decode", "nvfp4"),
    }  # fmt: skip
    grouped = {AttentionProblem(kind, 96, 8, 128, 128, "fp8") for kind in ("gqa_decode", "gqa_prefill")}
    assert set(model_problems("glm-4.5-air", [], kv=("fp8",))) == grouped
    with pytest.raises(ValueError, match="glm-9"):
        model_problems("glm-9", [MCG3])
    with pytest.raises(ValueError, match="num_heads=64"):
        model_problems("glm-5.2-tp3", [MCG3])


def test_shapes_by_hand():
    assert parse_shape("6144x500", MCG3) == LinearProblem(6144, 512, MCG3)
    assert parse_shape("256x6144x512x8", MCG3) == MoeProblem(256, 6144, 512, 8, MCG3)
    for text in ("6144", "6144x", "a x b", "8x128x128x9", "1x2x3"):
        with pytest.raises(ValueError, match="required KxN"):
            parse_shape(text, MCG3)


def test_attention_by_hand():
    assert parse_attention("mla_decode:16x1x576x512", "nvfp4") == AttentionProblem("mla_decode", 16, 1, 576, 512, "nvfp4")
    assert parse_attention("indexer:32x128", "fp8") == IndexerProblem(32, 128, "fp8")
    for text in ("gqa:8x2x64x64", "gqa_decode:8x2x64", "gqa_decode:8x2x64x0", "indexer:32", "mla_decode", ":1x1x1x1"):
        with pytest.raises(ValueError, match="required mla_decode | .*HEADSxKV_HEADSxWIDTHxVALUE, or indexer:HEADSxWIDTH"):
            parse_attention(text, "bf16")
    for text, kv in (("gqa_decode:8x2x64x64", "nvfp4"), ("indexer:32x128", "nvfp4"), ("mla_prefill:8x8x256x256", "fp8")):
        with pytest.raises(ValueError, match=f"kv '{kv}': required one of bf16"):
            parse_attention(text, kv)
    with pytest.raises(ValueError, match="a multiple of the 3 key-value heads"):
        parse_attention("gqa_decode:8x3x64x64", "bf16")


@pytest.mark.parametrize("device", [H200, Device("cuda", 188)])
def test_space_begins_with_the_rules_choice_and_has_no_doubles(device):
    some = [each for kv in ("bf16", "nvfp4") for each in model_problems("glm-4.5-air", [], kv=(kv,))]
    for problem in model_problems("glm-5.2-tp4", [MCG3], kv=("bf16", "fp8", "nvfp4")) + some:
        for rows in problem.SAMPLES:
            found = space(problem, rows, device)
            if isinstance(problem, AttentionProblem):
                assert found[0] == rule_attention(problem, rows, device)
            assert len(found) > 3
            assert len(set(found)) == len(found)
            if isinstance(problem, LinearProblem):
                for config in found:
                    steps = problem.k // config.block_k
                    assert problem.k % config.block_k == 0
                    per_part = -(-steps // config.split)
                    assert (config.split - 1) * per_part < steps  # no empty part
        with pytest.raises(ValueError, match="rows 17"):
            space(problem, 17, device)


@pytest.mark.parametrize("config", [LinearConfig(16, 64, 2, 4, None, True), LinearConfig(32, 128, 1, 4, 80)])
def test_bench_of_a_linear_checks_against_the_reference(config, triton_backend):
    bench = LinearBench(LinearProblem(256, 128, MCG3), 3, copies=1, device="cpu")
    want = bench.want()
    assert want.norm() > 0
    assert bench.error(config, want) < TOLERANCE
    assert bench.error(config, want + want.norm() / 100) > TOLERANCE


@pytest.mark.parametrize(
    ("rows", "config"),
    [(32, MoeConfig(8, 2, 1, 64, 4, prefetch=1)), (64, MoeConfig(16, 1, 1, 128, 4, 80)), (4096, MoeConfig(16, 1, 1, 64, 8))],
)
def test_bench_of_experts_checks_against_the_reference(rows, config, triton_backend):
    torch.manual_seed(1)
    bench = MoeBench(MoeProblem(2, 128, 128, 1, MCG3), 3, rows, device="cpu")
    bound = bench.bind(config)
    assert bound.plan.schedule.slices(3)[0][2].block_k == config.block_k
    want = bench.want()
    assert want.norm() > 0
    assert bench.error(config, want) < TOLERANCE


SMALL = [
    (AttentionProblem("mla_decode", 5, 1, 48, 32, "bf16"), 2, AttentionConfig(16, 32, 4, 2, most=3)),
    (AttentionProblem("mla_decode", 5, 1, 80, 64, "fp8"), 2, AttentionConfig(16, 32, 4, 2, words=True, most=2)),
    (AttentionProblem("mla_decode", 5, 1, 80, 64, "nvfp4"), 1, AttentionConfig(16, 16, 4, 1, most=1)),
    (AttentionProblem("mla_sparse_decode", 5, 1, 48, 32, "bf16"), 3, AttentionConfig(16, 16, 4, 1, most=4)),
    (AttentionProblem("mla_prefill", 2, 2, 96, 32, "bf16"), 128, AttentionConfig(32, 32, 4, 1)),
    (AttentionProblem("gqa_decode", 6, 2, 32, 16, "bf16"), 2, AttentionConfig(16, 32, 4, 1, most=2)),
    (AttentionProblem("gqa_prefill", 6, 2, 32, 16, "fp8"), 128, AttentionConfig(32, 32, 4, 1)),
    (IndexerProblem(4, 32, "bf16"), 2, ScoreTile(32, 64, 4, 1)),
    (IndexerProblem(4, 64, "fp8"), 2, ScoreTile(64, 128, 4, 2)),
]


@pytest.mark.parametrize(("problem", "m", "config"), SMALL)
def test_bench_of_attention_checks_against_the_reference(problem, m, config, triton_backend, monkeypatch):
    monkeypatch.setattr(AttentionProblem, "SELECTED", 40)
    for kind in (AttentionProblem, IndexerProblem):
        monkeypatch.setattr(kind, "context", lambda self, m: 128)
    bench = (ScoreBench if isinstance(problem, IndexerProblem) else AttentionBench)(problem, m, copies=1, device="cpu")
    want = bench.want()
    assert want.norm() > 0
    assert bench.error(config, want) < 2 * bench.tolerance  # the interpreter cuts bf16 off, which errs twice as far
    assert bench.error(config, want + want.norm() / 10) > 2 * bench.tolerance


SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E.128 R4, [R2] ;
        /*0020*/               @P0 LOP3.LUT R5, R4, 0xff, RZ, 0xc0, !PT ;
        /*0030*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0040*/              @!P1 BRA `(.L_x_1) ;
        /*0050*/                   STL [R1], R4 ;
.L_x_2:
        /*0060*/                   IADD3 R2, R2, 1, RZ ;
        /*0070*/                   BRA `(.L_x_2) ;
"""


def test_features_of_a_disassembled_loop():
    loops, outside, spills = matrix_loops(SASS)
    assert loops == [{"LDG.E.128": 1, "LOP3.LUT": 1, "HMMA.16816.F32": 1, "BRA": 1}]
    assert (outside, spills) == (4, 1)
    step = step_of(loops[0] | {"IMAD.SHL.U32": 3, "HADD2": 2, "LDL": 5})
    assert (step.total, step.alu, step.fma, step.half, step.memory, step.spilled) == (14, 1, 3, 2, 4 + 5, 5)


@pytest.mark.parametrize(
    ("m", "top_k", "experts", "block_m", "small"), [(1, 8, 256, 8, 0), (40, 4, 16, 8, 3), (300, 2, 8, 64, 32)]
)
def test_expected_blocks_are_those_of_random_routes(m, top_k, experts, block_m, small):
    generator = torch.Generator().manual_seed(0)
    counts = torch.stack([
        torch.rand(m, experts, generator=generator).topk(top_k).indices.flatten().bincount(minlength=experts)
        for _ in range(300)
    ])  # fmt: skip
    rest = counts % block_m
    few = ((rest > 0) & (rest <= small)).sum(1).double().mean()
    large = (counts // block_m + (rest > small)).sum(1).double().mean()
    hit = (counts > 0).sum(1).double().mean()
    expected = [hit.item(), large.item(), few.item()]
    assert list(expected_blocks(m, top_k, experts, block_m, small)) == pytest.approx(expected, rel=0.03, abs=0.05)


def code(registers=80, spills=0, instructions=400):
    return Features(
        registers, 8192, 4, spills, ({"LOP3.LUT": instructions, "IMAD": instructions, "LDG.E": 32, "HMMA": 32},), 800
    )


def test_predicted_times_obey_the_bounds():
    config, problem = LinearConfig(16, 128, 8, 4, 80), LinearProblem(6144, 12288, MCG3)
    for machine in MACHINES.values():
        us = predict_us(problem, config, 1, [code()], machine)
        assert us > 6144 * 12288 * 3 / 8 / machine.dram_gbps / 1e3
        assert us < predict_us(problem, config, 1, [code(instructions=4000)], machine)
        assert us < predict_us(problem, config._replace(block_m=16), 64, [code()], machine)
        assert predict_us(problem, None, 4096, [code()], machine) > predict_us(problem, None, 512, [code()], machine)
    moe, tile = MoeProblem(256, 6144, 512, 8, MCG3), MoeConfig(8, 4, 1, 128, 4)
    times = [predict_us(moe, tile, m, [code(), code()], MACHINES["h200"]) for m in (1, 8, 32)]
    assert times == sorted(times)


def test_predicted_times_of_attention_obey_the_bounds():
    config = AttentionConfig(16, 32, 4, 3, most=128)
    for machine in MACHINES.values():
        for kind, kv in (("mla_decode", "bf16"), ("mla_decode", "fp8"), ("mla_sparse_decode", "bf16")):
            problem = AttentionProblem(kind, 16, 1, 576, 512, kv)
            us = predict_us(problem, config, 16, [code()], machine)
            assert us > attention_work(problem, 16)[0] / machine.dram_gbps / 1e3
            assert us < predict_us(problem, config, 16, [code(instructions=4000)], machine)
        prefill = AttentionProblem("mla_prefill", 16, 16, 256, 256, "bf16")
        us = predict_us(prefill, AttentionConfig(64, 32, 8, 2), 8192, [code()], machine)
        assert us > attention_work(prefill, 8192)[1] / (machine.tensor * machine.processors * machine.clock_ghz * 1e3)
        scores = IndexerProblem(32, 128, "bf16")
        times = [predict_us(scores, ScoreTile(64, 512, 4, 4), m, [code()], machine) for m in (1, 16)]
        assert times[0] < times[1]
    assert attention_work(AttentionProblem("mla_decode", 16, 1, 576, 512, "fp8"), 1) == (65536 * 656, 2 * 65536 * 16 * 1088)
    assert attention_work(AttentionProblem("gqa_decode", 96, 8, 128, 128, "fp8"), 1)[0] == 65536 * 8 * 264


def test_machines_by_architecture():
    assert {machine.target for machine in machines_of("sm_120")} == {"sm_120"}
    assert machines_of("gb10") == [MACHINES["gb10"]]
    with pytest.raises(ValueError, match="sm_99"):
        machines_of("sm_99")


def test_rank_leaves_out_what_spills_and_what_did_not_compile():
    problem, machine = LinearProblem(6144, 12288, MCG3), MACHINES["rtx-pro-6000"]
    candidates = space(problem, 16, Device("cuda", machine.processors))
    forms = {form_of(Task(problem, 16, config)): [code()] for config in candidates}
    everything, rule = rank(problem, 16, machine, forms)
    assert len(everything) == len(candidates)
    assert rule is not None
    assert rule.config == candidates[0] == select_linear(16, 6144, 96, Device("cuda", machine.processors))
    assert everything == sorted(everything, key=lambda ranked: ranked.score)
    bad = form_of(Task(problem, 16, everything[0].config))
    assert bad not in {
        form_of(Task(problem, 16, each.config))
        for each in rank(problem, 16, machine, forms | {bad: [code(spills=1)]})[0]
        if each != rule
    }
    del forms[bad]
    assert everything[0] not in rank(problem, 16, machine, forms)[0]


def test_an_entry_keeps_the_rules_choice_unless_clearly_slower():
    rule, better, close = (
        Ranked(LinearConfig(16, 64, split, 4), {1: us, 16: us}) for split, us in ((1, 100.0), (2, 90.0), (3, 99.0))
    )
    versions = {"date": "2026-12-01", "torch": "2", "triton": "3", "driver": "5"}
    entry = tune.entry_of([rule, better, close], rule, "measured", versions)
    assert entry.config["split"] == 2
    assert entry.evidence["runner_up"]["config"]["split"] == 3
    assert entry.evidence["rule_us"] == {"1": 100.0, "16": 100.0}
    assert tune.entry_of([rule, close], rule, "measured", versions).config["split"] == 1
    key = tune.key_of(LinearProblem(6144, 128, MCG3), 16)
    tables._check_entry("linear", dict(zip(tables.KEYS["linear"], key)) | {"config": entry.config, "evidence": entry.evidence})
    attention = AttentionProblem("gqa_decode", 96, 8, 128, 128, "fp8"), 64
    for problem, rows in (
        (LinearProblem(6144, 128, MCG3), 16), (MoeProblem(4, 128, 256, 2, MCG3), 64), attention,
        (IndexerProblem(32, 128, "bf16"), 8192),
    ):  # fmt: skip
        assert tune.problem_of(problem.op, tune.key_of(problem, rows)) == (problem, rows)


@pytest.fixture
def card(monkeypatch):
    """`tune.measure` on a GPU that is not there: compiling works, a candidate takes 100 us over its split."""
    from exl3_triton import timing
    from exl3_triton.ops import tuning

    versions = {"torch": "2", "triton": "3", "driver": "5"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(timing, "header", lambda device: {"device": "Test Card"} | versions)
    monkeypatch.setattr(tuning, "device_of", lambda device: Device("cuda", 100, "Test Card", (12, 9)))
    monkeypatch.setattr(tune, "compile_all", lambda tasks, work, jobs, seconds: [(task, [code()]) for task in tasks])
    configs = [LinearConfig(16, 64, split, 4) for split in (1, 2, 3)]
    monkeypatch.setattr(tune, "_plan", lambda todo, device, count, jobs: dict.fromkeys(todo, configs[:count]))

    def measured(problem, rows, configs):
        ranked = [Ranked(config, dict.fromkeys(problem.SAMPLES[rows], 100.0 / config.split)) for config in configs]
        return ranked[:-1], {str(configs[-1]): "wrong: relative error 1"}

    monkeypatch.setattr(tune, "measure_entry", measured)
    return measured


def measure(out, *options):
    return cli(["measure", "--shape", "6144x128", "--formats", "mcg.3", "--out", str(out), *options])


def test_measure_goes_on_where_it_was_stopped(card, tmp_path, monkeypatch, capsys):
    assert measure(tmp_path, "--budget", "0") == 1
    path = tmp_path / "linear" / "Test_Card.json"
    assert not tables.load(path, "linear").entries

    def stopped(problem, rows, configs):
        if rows == 64:
            raise KeyboardInterrupt
        return card(problem, rows, configs)

    monkeypatch.setattr(tune, "measure_entry", stopped)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path)
    assert sorted(key[-1] for key in tables.load(path, "linear").entries) == [16, 32]
    monkeypatch.setattr(tune, "measure_entry", card)
    assert measure(tmp_path) == 0
    out = capsys.readouterr()
    assert "2 of 4 entries are there already" in out.err
    assert "relative error 1" in out.err
    entries = tables.load(path, "linear").entries
    assert sorted(key[-1] for key in entries) == [16, 32, 64, 255]
    for entry in entries.values():
        assert entry.config["split"] == 2  # 3 was wrong
        assert entry.evidence["driver"] == "5"
        assert entry.evidence["gbps"]
    assert len(path.with_suffix(".jsonl").read_text().splitlines()) == 4
    before = path.stat().st_mtime_ns
    assert measure(tmp_path) == 0
    assert path.stat().st_mtime_ns == before
    assert measure(tmp_path, "--again", "--rows", "16") == 0


def test_verify_takes_a_percentage_and_finds_what_is_wrong(card, tmp_path, monkeypatch, capsys):
    assert measure(tmp_path) == 0
    path = str(tmp_path / "linear" / "Test_Card.json")

    def verify(factor, failed, *options):
        def measured(problem, rows, configs):
            (config,) = configs
            assert config.split == 2
            us = dict.fromkeys(problem.SAMPLES[rows], factor * 50.0)
            return ([], {str(config): failed}) if failed and rows == 32 else ([Ranked(config, us)], {})

        monkeypatch.setattr(tune, "measure_entry", measured)
        code = cli(["verify", "--ops", "linear", "--table", path, *options])
        return code, capsys.readouterr().out

    capsys.readouterr()
    assert verify(1.0, "")[0] == 0
    assert verify(1.09, "")[0] == 0
    code, out = verify(1.2, "")
    assert code == 1
    assert out.count("+20.0 %") == 4
    assert verify(1.2, "", "--percent", "25")[0] == 0
    assert verify(1.2, "", "--percent", "15")[0] == 1
    code, out = verify(1.0, "wrong: relative error 1")
    assert code == 1
    assert out.count("relative error 1") == 1
    assert "32 rows" in out


def test_measure_refuses_a_damaged_table_and_a_bad_folder_before_any_work(card, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune, "_plan", lambda *_: pytest.fail("worked"))
    path = tmp_path / "linear" / "Test_Card.json"
    path.parent.mkdir()
    path.write_text("{")
    assert measure(tmp_path) == 2
    assert str(path) in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert measure(tmp_path / "file") == 2
    assert "cannot be written" in capsys.readouterr().err


def refuse_some(task):
    if task.rows == 32:
        raise RuntimeError("does not fit")
    return [code()]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_candidate_that_fails_does_not_end_the_run(jobs):
    tasks = [Task(LinearProblem(128, 128, MCG3), rows, None) for rows in (16, 32, 64)]
    found = {task.rows: result for task, result in compile_all(tasks, refuse_some, jobs)}
    assert found == {16: [code()], 32: "RuntimeError: does not fit", 64: [code()]}


def test_validation_of_the_predictor(tmp_path, capsys):
    rows = []
    for n in (1024, 2048, 4096, 8192):
        problem = LinearProblem(6144, n, MCG3)
        for split in (1, 2, 4, 6, 12):
            config, machine = LinearConfig(16, 128, split, 4, 80), MACHINES["h200"]
            us = predict_us(problem, config, 1, [code()], machine) * 1.1
            rows.append(row(Task(problem, 16, config), 1, us, 1e-4, [code()]))
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"header": {}, "rows": rows}))
    groups = fit.read(data)
    assert [group.held_out for group in groups] == [False, True, False, True]
    assert len(groups[0].samples) == 5
    summary = fit.report(groups, MACHINES["h200"], fitted())
    assert summary["held_out"]["median_spearman"] == 1
    assert summary["held_out"]["worst_regret"] == 1
    assert summary["fitted"]["median_error"] == pytest.approx(1.1, abs=0.01)
    assert "held out" in capsys.readouterr().out
    assert fit.spearman([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert fit.spearman([1, 2, 3], [5, 5, 5]) == 0
    assert fit.spearman([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1)


def test_predictor_ranks_problems_it_was_not_fitted_to():
    groups = [group for group in fit.read(ROOT / "tests/benchmark/results/h200_calibration.json") if group.held_out]
    summary = fit.report(groups, MACHINES["h200"], fitted())["held_out"]
    assert summary["candidates"] >= 100
    assert summary["median_spearman"] >= 0.8
    assert summary["median_regret"] <= 1.05
    assert summary["worst_regret"] <= 1.4


def run_autotune(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "autotune", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)


def test_commands_refuse_what_they_do_not_know(tmp_path, capsys):
    for arguments, message in (
        (("predict", "--preset", "glm-9"), "glm-9"),
        (("predict",), "--preset or --shape"),
        (("predict", "--shape", "128x128", "--arch", "sm_77"), "sm_77"),
        (("predict", "--shape", "128x128", "--ops", "rope"), "rope"),
        (("predict", "--preset", "glm-5.2", "--kv", "int4"), "--kv int4: required bf16, fp8, nvfp4, nvfp4-fp8rope"),
        (("compare", str(tmp_path / "no.json"), str(tmp_path / "no.json")), "no.json"),
    ):
        assert cli(list(arguments)) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "shape", "rows", "title"),
    [
        ("linear", "512x256", "16", "512 x 256, mcg.3, 16 rows"),
        ("attention", "gqa_decode:96x8x128x128", "64", "gqa_decode of 96 heads, 8 stored, 128 and 128 wide, bf16, 64 rows"),
        ("indexer", "indexer:32x128", "8192", "index scores of 32 heads, 128 wide, bf16, 8192 rows"),
    ],
)
def test_predict_twice_changes_nothing(op, shape, rows, title, tmp_path):
    arguments = ["predict", "--shape", shape, "--rows", rows, "--formats", "mcg.3", "--kv", "bf16", "--arch", "sm_120"]
    arguments += ["--jobs", "2"]
    first = run_autotune(*arguments, "--out", str(tmp_path))
    assert first.returncode == 0, first.stderr
    paths = sorted(tmp_path.glob(f"{op}/*.json"))
    assert [path.name for path in paths] == ["NVIDIA_GeForce_RTX_5090.json", "NVIDIA_RTX_PRO_6000_Blackwell.json"]
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in paths]
    assert run_autotune(*arguments, "--out", str(tmp_path)).returncode == 0
    assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in paths] == before
    done = run_autotune("compare", "--op", op, *map(str, paths))
    assert done.returncode == 0
    assert title in done.stdout
