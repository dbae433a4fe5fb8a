"""The tuner without a GPU: problems, the search space, correctness checks in the interpreter, the predictor."""

import pytest
import torch

pytest.importorskip("triton")

from autotune.bench import TOLERANCE, LinearBench, MoeBench
from autotune.problems import Format, LinearProblem, MoeProblem, model_problems, parse_shape
from autotune.space import MoeConfig, space
from exl3_triton.ops.tuning import Device, LinearConfig

MCG3 = Format.parse("mcg.3")
H200 = Device("sm_90", 132)


def test_problems_of_a_preset():
    problems = model_problems("glm-5.2-tp4", [MCG3])
    assert MoeProblem(256, 6144, 512, 8, MCG3) in problems
    for k, n in ((6144, 2688), (2048, 4096), (4096, 6144), (6144, 6144), (3072, 6144), (6144, 38784)):
        assert LinearProblem(k, n, MCG3) in problems
    assert {problem.op for problem in model_problems("glm-4.5-air", [MCG3], ("moe",))} == {"moe"}
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


@pytest.mark.parametrize("device", [H200, Device("cuda", 188)])
def test_space_begins_with_the_rules_choice_and_has_no_doubles(device):
    for problem in model_problems("glm-5.2-tp4", [MCG3]):
        for rows in problem.SAMPLES:
            found = space(problem, rows, device)
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
    [(32, MoeConfig(8, 2, 1, 64, 4, prefetch=1)), (64, MoeConfig(16, 1, 1, 128, 4, 80)), (4096, MoeConfig(32, 1, 1, 64, 8))],
)
def test_bench_of_experts_checks_against_the_reference(rows, config, triton_backend):
    torch.manual_seed(1)
    bench = MoeBench(MoeProblem(4, 256, 128, 2, MCG3), 5, rows, device="cpu")
    bound = bench.bind(config)
    assert bound.plan.schedule.slices(5)[0][2].block_k == config.block_k
    want = bench.want()
    assert want.norm() > 0
    assert bench.error(config, want) < TOLERANCE
