import itertools

import pytest
import torch
from moe_data import make_experts

from exl3_triton.format import Codebook
from exl3_triton.ops.moe import Regime, Schedule, moe
from exl3_triton.ops.tuning import Device
from exl3_triton.plan import DispatchPolicy, MoeSpec, plan_moe

GLM = MoeSpec(6144, 512, 256, 8, rates=(3,), codebooks=(Codebook.MCG,))  # GLM-5.2, one rank of four
SMALL = MoeSpec(128, 128, 4, 2, rates=(3,), codebooks=(Codebook.MCG,))
MIB = 1 << 20


def test_policy_defaults_and_environment():
    assert DispatchPolicy.from_env({}) == DispatchPolicy(1, 32, None, True, None, None, 128)
    environ = {
        "EXL3_TRITON_MIN_M": "2",
        "EXL3_TRITON_MAX_M": " 48 ",
        "EXL3_TRITON_BLOCK_M": "16",
        "EXL3_TRITON_PREFILL": "False",
        "EXL3_TRITON_PREFILL_BLOCK_M": "48",
        "EXL3_TRITON_PREFILL_CAPACITY": "1024",
        "EXL3_TRITON_PREFILL_CHUNK": "1",
    }
    assert DispatchPolicy.from_env(environ) == DispatchPolicy(2, 48, 16, False, 48, 1024, 1)
    blank = dict.fromkeys(environ, "  ")
    assert DispatchPolicy.from_env(blank) == DispatchPolicy()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MIN_M", "0"),
        ("MIN_M", "33"),  # above MAX_M
        ("MAX_M", "-1"),
        ("MAX_M", "many"),
        ("BLOCK_M", "12"),
        ("PREFILL", "yes"),
        ("PREFILL_BLOCK_M", "256"),
        ("PREFILL_CAPACITY", "0"),
        ("PREFILL_CHUNK", "1.5"),
    ],
)
def test_policy_refuses_naming_the_variable(name, value):
    with pytest.raises(ValueError, match=f"EXL3_TRITON_{name}={value!r}|EXL3_TRITON_{name}={value}"):
        DispatchPolicy.from_env({f"EXL3_TRITON_{name}": value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 0}, "hidden=0"),
        ({"top_k": 33}, "top_k=33"),
        ({"num_experts": 1025}, "num_experts=1025"),
        ({"rates": (3, 9)}, "9"),
        ({"rates": ()}, "rates"),
        ({"codebooks": ()}, "codebooks"),
    ],
)
def test_spec_refuses(change, message):
    good = {"hidden": 128, "intermediate": 128, "num_experts": 4, "top_k": 2, "rates": (3,), "codebooks": (Codebook.MCG,)}
    with pytest.raises(ValueError, match=message):
        MoeSpec(**{**good, **change})


def test_spec_of_experts():
    experts = make_experts(4, 200, 96, [(4, 1), (5, 2), (6, 0)])
    spec = MoeSpec.of(experts, 2)
    assert spec == MoeSpec(200, 96, 4, 2, (2, 2.5, 3), (Codebook.THREE_INST, Codebook.MCG, Codebook.MUL1))
    assert spec.dims == (256, 128, 4, 2)
    plan_moe(spec, max_tokens=8).check(experts, 2)


def test_plan_windows():
    policy = DispatchPolicy(min_m=2, max_m=32, prefill_block_m=64, prefill_capacity=128, prefill_chunk=50)
    plan = plan_moe(GLM, max_tokens=300, policy=policy)
    decode, prefill = plan.regimes
    assert (decode.rows, decode.block_m, prefill.rows, prefill.block_m) == (32, 8, 128, 64)
    assert plan.schedule.slices(2) == [(0, 2, decode)]
    assert plan.schedule.slices(32) == [(0, 32, decode)]
    assert plan.schedule.slices(33) == [(0, 33, prefill)]
    assert plan.schedule.slices(128) == [(0, 128, prefill)]
    assert plan.schedule.slices(129) == [(0, 128, prefill), (128, 129, prefill)]
    assert plan.schedule.slices(300) == [(0, 128, prefill), (128, 256, prefill), (256, 300, prefill)]
    assert plan.schedule.slices(1) == [(0, 1, None)]
    assert plan.schedule.slices(0) == []
    with pytest.raises(ValueError, match=r"301 rows.*max_tokens=300"):
        plan.schedule.slices(301)


def test_prefill_blocks_follow_the_rows_of_an_expert():
    """Twice the average of max_tokens * top_k / E rows, up to 128; a given block serves all."""
    plan = plan_moe(GLM, max_tokens=5000, policy=DispatchPolicy(prefill_capacity=4096))
    assert [(r.rows, r.block_m) for r in plan.schedule.prefill] == [(256, 16), (512, 32), (1024, 64), (4096, 128)]
    assert [r.sequential for r in plan.schedule.prefill] == [0, 0, 0, 1]
    chosen = {tokens: [r.block_m for _, _, r in plan.schedule.slices(tokens)] for tokens in (33, 256, 257, 1024, 1025, 5000)}
    assert chosen == {33: [16], 256: [16], 257: [32], 1024: [64], 1025: [128], 5000: [128, 64]}
    small = plan_moe(GLM, max_tokens=100, policy=DispatchPolicy())
    assert [(r.rows, r.block_m, r.sequential) for r in small.schedule.prefill] == [(100, 16, 1)]
    fixed = plan_moe(GLM, max_tokens=5000, policy=DispatchPolicy(prefill_block_m=48))
    assert [(r.rows, r.block_m) for r in fixed.schedule.prefill] == [(5000, 48)]


@pytest.mark.parametrize(
    ("sizes", "split", "down_split"),
    [((6144, 512, 256, 8), 12, 1), ((6144, 2048, 256, 8), 3, 2), ((4096, 1408, 128, 8), 4, 2), ((7168, 256, 256, 8), 14, 1)],
)
def test_decode_split_fills_one_wave(sizes, split, down_split):
    decode = plan_moe(MoeSpec(*sizes, (3,), (Codebook.MCG,)), max_tokens=32, policy=DispatchPolicy()).schedule.decode
    assert (decode.split, decode.down_split) == (split, down_split)


def test_plan_without_prefill_takes_the_reference_path_in_chunks():
    plan = plan_moe(GLM, max_tokens=200, policy=DispatchPolicy(prefill=False))
    assert len(plan.regimes) == 1
    assert plan.schedule.slices(200) == [(0, 128, None), (128, 200, None)]
    assert plan.arena_bytes == plan_moe(GLM, max_tokens=32, policy=DispatchPolicy()).arena_bytes


def test_plan_of_one_block():
    assert plan_moe(GLM, max_tokens=16, block_m=48, policy=DispatchPolicy()).regimes[0].block_m == 48
    plan = plan_moe(GLM, max_tokens=256, block_m=128, policy=DispatchPolicy())
    assert [(regime.rows, regime.block_m) for regime in plan.regimes] == [(256, 128)]
    assert plan.schedule.slices(1) == [(0, 1, plan.regimes[0])]
    for block_m in (0, 4, 12, 256):
        with pytest.raises(ValueError, match=f"block_m={block_m}"):
            plan_moe(GLM, max_tokens=16, block_m=block_m)


def test_plan_refuses_capacities():
    with pytest.raises(ValueError, match="max_tokens=0"):
        plan_moe(GLM, max_tokens=0)
    with pytest.raises(ValueError, match="EXL3_TRITON_PREFILL_CAPACITY=600"):
        plan_moe(GLM, max_tokens=512, policy=DispatchPolicy(prefill_capacity=600))


def test_replan():
    plan = plan_moe(GLM, max_tokens=64, block_m=16, policy=DispatchPolicy(max_m=8))
    larger = plan.replan(128)
    assert (larger.max_tokens, larger.spec, larger.policy, larger.block_m) == (128, plan.spec, plan.policy, 16)
    assert larger.arena_bytes > plan.arena_bytes


def test_schedule_survives_its_encoding():
    for schedule in (
        plan_moe(GLM, max_tokens=300, policy=DispatchPolicy()).schedule,
        Schedule(7, 2, 3, None, ()),
        Schedule(7, 2, 3, None, (Regime(7, 8, 2, 1, 1, 0),)),
    ):
        assert Schedule.decode_ints(schedule.encode()) == schedule


def test_arena_bytes_are_the_documented_formula():
    def up(size):
        return -(-size // 256) * 256

    policy = DispatchPolicy()
    for spec, rows in ((GLM, 3072), (GLM, 33), (MoeSpec(200, 96, 5, 2, (3,), (Codebook.MCG,)), 100)):
        plan = plan_moe(spec, max_tokens=rows, policy=policy)
        h, i, e, k = spec.dims
        sizes = []
        for regime in plan.regimes:
            r = regime.rows * k
            b = min(r, (r + e * (regime.block_m - 1)) // regime.block_m)
            terms = [4 * b * regime.block_m, 4 * b, 4 * b, 4, 8 * r, 4 * r]
            if regime == plan.schedule.decode:
                terms += [4, 8 * r * i * regime.split, 2 * r * i, 4 * r * h * regime.down_split]
            elif regime.rows < rows:
                continue
            else:
                terms += [r * h // 32, 8 * r * i, 2 * r * i, 2 * r * h]
            sizes.append(sum(map(up, terms)))
        assert plan.arena_bytes == max(sizes)


def test_arena_is_smaller_than_the_reference_systems():
    """Its published arenas for GLM-5.2 at TP4: 33.5 MiB for 32 rows in blocks of 8, 0.3125 MiB a row for prefill."""
    policy = DispatchPolicy()
    assert plan_moe(GLM, max_tokens=32, policy=policy).arena_bytes < 0.6 * 33.5 * MIB
    small, large = (plan_moe(GLM, max_tokens=rows, policy=policy).arena_bytes for rows in (1024, 4096))
    assert (large - small) / 3072 < 0.16 * MIB
    assert large < 0.16 * MIB * 4096


def test_bind_refuses_other_arenas():
    plan = plan_moe(SMALL, max_tokens=4, policy=DispatchPolicy())
    with pytest.raises(ValueError, match=f"{plan.arena_bytes - 1} bytes: required {plan.arena_bytes}"):
        plan.bind(torch.empty(plan.arena_bytes - 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="int8"):
        plan.bind(torch.empty(plan.arena_bytes, dtype=torch.int8))
    with pytest.raises(ValueError, match="alignment"):
        plan.bind(torch.empty(plan.arena_bytes + 3, dtype=torch.uint8)[3:])


def test_views_of_the_arena_are_aligned_and_apart():
    plan = plan_moe(GLM, max_tokens=40, policy=DispatchPolicy())
    arena = torch.empty(plan.arena_bytes + 256, dtype=torch.uint8)
    arena = arena[-arena.data_ptr() % 256 :][: plan.arena_bytes]
    for scratch in plan.bind(arena).scratch.values():
        views = {name: (view.data_ptr(), view.data_ptr() + view.nbytes) for name, view in scratch._asdict().items()}
        assert all(start % 256 == 0 for start, _ in views.values())
        spans = sorted(span for name, span in views.items() if name != "down")  # down reuses the rotated input's place
        assert all(end <= following for (_, end), (following, _) in itertools.pairwise(spans))
        assert views["down"][0] == views["rotated"][0]
        assert max(end for _, end in views.values()) <= arena.data_ptr() + plan.arena_bytes


def test_plan_refuses_other_experts():
    plan = plan_moe(SMALL, max_tokens=4, policy=DispatchPolicy())
    bound = plan.bind(plan.new_arena("cpu"))
    x, ids, weights = torch.randn(2, 128), torch.zeros(2, 2, dtype=torch.int32), torch.rand(2, 2)
    with pytest.raises(ValueError, match="K = 4 with mul1"):
        bound(x, make_experts(4, 128, 128, [(6, 1), (8, 2)]), ids, weights)
    with pytest.raises(ValueError, match="experts, top_k"):
        bound(x, make_experts(5, 128, 128, [(6, 1)]), ids, weights)
    with pytest.raises(ValueError, match="experts, top_k"):
        bound(x, make_experts(4, 128, 128, [(6, 1)]), ids[:, :1], weights[:, :1])
    with pytest.raises(ValueError, match=r"5 rows.*max_tokens=4"):
        moe(
            x[:1].expand(5, -1),
            make_experts(4, 128, 128, [(6, 1)]),
            ids[:1].expand(5, -1),
            weights[:1].expand(5, -1),
            plan=plan,
        )


def test_a_joined_expert_changes_no_choice_but_the_split():
    """Blocks and tables go by the routed experts; a token's work still is one wave."""
    device = Device("sm_90", 132, "NVIDIA H200", (9, 0))
    alone = plan_moe(MoeSpec(6144, 512, 256, 8, (3,), (Codebook.MCG,)), max_tokens=2048, device=device)
    spec = MoeSpec(6144, 512, 257, 9, (3,), (Codebook.MCG,), joined=True)
    together = plan_moe(spec, max_tokens=2048, device=device)
    assert [r.rows for r in together.regimes] == [r.rows for r in alone.regimes]
    assert [r.block_m for r in together.regimes] == [r.block_m for r in alone.regimes]
    assert (alone.regimes[0].split, together.regimes[0].split) == (12, 10)
    assert 9 * 8 * together.regimes[0].split <= 768
    assert spec.routed == (6144, 512, 256, 8)
    assert spec.dims == (6144, 512, 257, 9)
