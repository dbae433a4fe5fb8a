import json
import os
import pathlib
import shutil
import subprocess
import sys

import golden
import pytest
import torch
import torch._dynamo.testing
from moe_data import make_experts, make_routes

from exl3_triton import reference
from exl3_triton.format import Codebook
from exl3_triton.ops._dispatch import override_backend
from exl3_triton.ops.moe import _moe_op, _moe_unplanned_op, expert_tensors, moe
from exl3_triton.ops.tuning import Device
from exl3_triton.plan import DispatchPolicy, MoeSpec, plan_moe

MCG3 = [(6, Codebook.MCG)]
MIXED = [(4, 1), (6, 1), (8, 1), (6, 2), (5, 2), (4, 0)]  # (2K, codebook)
DECODE = DispatchPolicy(block_m=8)
PREFILL = DispatchPolicy(max_m=1, prefill_block_m=64)  # two rows and more take the prefill plan
# Relative Frobenius error against float64: the rotated input and the activation are rounded to fp16 (an RMS of at most
# 2^-11 / sqrt(3) of a row's values each, the first entering through gate and up), in prefill also down's result: measured
# 3.0e-4 to 4.6e-4.
TOLERANCE = 2**-10


def bound_moe(experts, top_k, max_tokens, policy=DECODE, block_m=None):
    """A plan over scratch that is full of NaN (0xFF): what a run reads without having written it shows."""
    plan = plan_moe(MoeSpec.of(experts, top_k), max_tokens=max_tokens, policy=policy, block_m=block_m)
    return plan.bind(plan.new_arena(experts.device).fill_(255))


def exact(x, experts, ids, weights, limit=None):
    return reference.moe(x.double(), experts, ids, weights.double(), limit)


def assert_close(got, want, tolerance=TOLERANCE):
    """One rounding of the output's dtype (the interpreter cuts bf16 off: a whole step) on top of `tolerance`."""
    assert got.isfinite().all()
    assert want.norm() > 0
    rounding = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}[got.dtype]
    assert (got.double() - want).norm() / want.norm() < tolerance + rounding


@pytest.mark.parametrize(("tokens", "dtype"), [(1, torch.bfloat16), (3, torch.float16), (17, torch.float32)])
@pytest.mark.parametrize("policy", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_moe_against_float64(tokens, dtype, policy, device, triton_backend):
    experts = make_experts(6, 256, 128, MCG3, device=device)
    x = torch.randn(tokens, 256, device=device).to(dtype)
    ids, weights = make_routes(tokens, 2, 6, device)
    got = bound_moe(experts, 2, 17, policy)(x, experts, ids, weights)
    assert got.dtype == dtype
    assert_close(got, exact(x, experts, ids, weights))


@pytest.mark.parametrize("name", ["moe.mcg.3.", "moe.mul1.4."])
@pytest.mark.parametrize("m", [1, 4, pytest.param(40, marks=pytest.mark.gpu)])
def test_moe_golden(name, m, device, triton_backend):
    loaded = golden.experts(name)
    if loaded is None:
        pytest.skip(f"no golden file with {name}: set EXL3_TRITON_TESTDATA")
    experts, tensors = loaded
    experts = experts.to(device)
    x, ids, weights, want = (tensors[f"{key}{m}"].to(device) for key in ("x", "sel", "rw", "y"))
    got = moe(x, experts, ids, weights.float(), out_dtype=torch.float32)
    assert want.norm() > 0
    assert (got - want).norm() / want.norm() < 2e-3  # the golden outputs themselves are about 1e-3 from float64
    assert_close(got, exact(x, experts, ids, weights))


@pytest.mark.parametrize("policy", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_moe_with_a_rate_and_codebook_per_expert_and_projection(policy, device, triton_backend):
    experts = make_experts(6, 128, 128, MIXED, device=device)
    x = torch.randn(6, 128, device=device)
    ids = torch.stack([torch.arange(6), torch.arange(6).roll(1)], 1).to(device)
    weights = torch.rand(6, 2, device=device) + 0.1
    assert_close(bound_moe(experts, 2, 8, policy)(x, experts, ids, weights), exact(x, experts, ids, weights))


@pytest.mark.parametrize("family", ["sm_90", "cuda"])
@pytest.mark.parametrize(("block_m", "tokens"), [(8, 9), (16, 17), (32, 5), (32, 33), (48, 35), (64, 20), (64, 65), (128, 5)])
def test_moe_in_other_blocks(block_m, tokens, family, device, triton_backend, monkeypatch):
    """All rows at one expert: a second block, the second part of a block of 48, and few rows of many; the tiles of both."""
    monkeypatch.setattr(sys.modules["exl3_triton.ops.moe"], "device_of", lambda _: Device(family, 132))
    experts = make_experts(2, 128, 128, MCG3, device=device)
    x = torch.randn(tokens, 128, device=device)
    ids, weights = torch.ones(tokens, 1, dtype=torch.int32, device=device), torch.rand(tokens, 1, device=device)
    bound = bound_moe(experts, 1, tokens, DispatchPolicy(max_m=65), block_m)
    assert bound.plan.regimes[0].block_m == block_m
    assert_close(bound(x, experts, ids, weights), exact(x, experts, ids, weights))


def test_moe_ignores_padding_and_illegal_ids(device, triton_backend):
    experts = make_experts(4, 128, 128, MCG3, device=device)
    x = torch.randn(4, 128, device=device)
    ids = torch.tensor([[-1, 2], [4, 2**40], [1, -7], [-1, -1]], device=device)
    weights = torch.rand(4, 2, device=device)
    weights[3] = float("nan")  # of a padding token
    for policy in (DECODE, PREFILL):
        bound = bound_moe(experts, 2, 4, policy)
        got = bound(x, experts, ids, weights)
        want = exact(x[:3], experts, ids[:3], weights[:3])
        assert_close(got[[0, 2]], want[[0, 2]])
        assert (got[[1, 3]] == 0).all()
        assert (bound(x, experts, torch.full_like(ids, -1), weights) == 0).all()


def test_moe_in_parts_of_k_that_differ(device, triton_backend):
    """Nine blocks of 128 inputs in two parts, five and four, of gate and up, and of down."""
    experts = make_experts(2, 1152, 1152, MIXED[1:2], device=device)
    x = torch.randn(2, 1152, device=device, dtype=torch.float16)
    ids, weights = make_routes(2, 1, 2, device)
    bound = bound_moe(experts, 1, 2)
    (regime,) = bound.plan.regimes
    assert (regime.split, regime.down_split) == (2, 2)
    assert_close(bound(x, experts, ids, weights, out=torch.empty(2, 1152, device=device)), exact(x, experts, ids, weights))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_moe_expert_map(dtype, device, triton_backend):
    """Global ids through a map: 5 of 9 experts are here; illegal ids and indices add nothing."""
    experts = make_experts(5, 128, 128, MIXED[:3], device=device)
    x = torch.randn(6, 128, device=device)
    expert_map = torch.tensor([-1, 3, -1, 0, 4, 2, -1, 1, 7], dtype=dtype, device=device)
    ids, weights = make_routes(6, 3, 9, device, torch.int64)
    ids[2, 1] = 9
    ids[3, 0] = -1
    local = torch.where((ids >= 0) & (ids < 9), expert_map[ids.clamp(0, 8)].long(), -1)
    local = torch.where(local < 5, local, -1)
    want = exact(x, experts, local, weights)
    for policy in (DECODE, PREFILL):
        bound = bound_moe(experts, 3, 6, policy)
        got = bound(x, experts, ids, weights, expert_map=expert_map)
        assert_close(got, want)
        assert torch.equal(got, bound(x, experts, local, weights))
    with override_backend("auto"):
        assert_close(moe(x, experts, ids, weights, expert_map=expert_map), want)
    reference_path = bound_moe(experts, 3, 6, DispatchPolicy(max_m=1, prefill=False))
    assert_close(reference_path(x, experts, ids, weights, expert_map=expert_map), want)


def test_moe_with_a_shared_expert_as_one_more_id(device, triton_backend):
    experts = make_experts(5, 128, 128, MCG3, device=device)
    x = torch.randn(4, 128, device=device)
    ids, weights = make_routes(4, 2, 4, device)
    shared = torch.full_like(ids[:, :1], 4), torch.ones_like(weights[:, :1])
    routed = exact(x, experts, ids, weights)
    always = exact(x, experts, *shared)
    got = bound_moe(experts, 3, 4)(x, experts, torch.cat([ids, shared[0]], 1), torch.cat([weights, shared[1]], 1))
    assert_close(got, routed + always)


def test_moe_of_no_tokens(device, triton_backend):
    experts = make_experts(2, 128, 128, MCG3, device=device)
    ids, weights = make_routes(0, 2, 2, device)
    x = torch.empty(0, 128, device=device, dtype=torch.bfloat16)
    for got in (moe(x, experts, ids, weights), bound_moe(experts, 2, 4)(x, experts, ids, weights)):
        assert got.shape == (0, 128)
        assert got.dtype == torch.bfloat16


@pytest.mark.parametrize("policy", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_moe_row_does_not_depend_on_the_others(policy, device, triton_backend):
    """Within a plan, whatever the number of rows and whatever the arena held before."""
    experts = make_experts(4, 256, 128, MIXED[:3], device=device)
    x = torch.randn(9, 256, device=device, dtype=torch.float16)
    ids, weights = make_routes(9, 2, 4, device)
    bound = bound_moe(experts, 2, 16, policy)
    together = bound(x, experts, ids, weights).clone()
    for rows in ([4], [0, 8], [6, 5, 4, 3]) if policy is DECODE else ([8, 0], [6, 5, 4, 3]):
        assert torch.equal(bound(x[rows], experts, ids[rows], weights[rows]), together[rows])


def test_moe_repeats_bit_for_bit_and_takes_both_id_types(device, triton_backend):
    experts = make_experts(4, 128, 128, MCG3, device=device)
    x = torch.randn(5, 128, device=device, dtype=torch.bfloat16)
    ids, weights = make_routes(5, 2, 4, device)
    bound = bound_moe(experts, 2, 8)
    first = bound(x, experts, ids, weights)
    assert first.norm() > 0
    for _ in range(2 if device == "cpu" else 200):
        assert torch.equal(bound(x, experts, ids, weights), first)
    assert torch.equal(bound(x, experts, ids.long(), weights), first)
    assert torch.equal(moe(x, experts, ids.long(), weights, plan=bound.plan, arena=bound.arena), first)


@pytest.mark.parametrize("policy", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_moe_sums_beyond_fp16(policy, device, triton_backend):
    """Field report N01: weighted sums beyond 65504 must come out finite; rows of other sizes are scaled on their own."""
    experts = make_experts(3, 128, 128, MCG3, gain=2e4, device=device)
    x = torch.randn(4, 128, device=device) * torch.tensor([[1.0], [1e5], [1e-5], [0.0]], device=device)
    ids, weights = make_routes(4, 2, 3, device)
    got = bound_moe(experts, 2, 4, policy)(x, experts, ids, weights)
    want = exact(x, experts, ids, weights)
    assert want.abs().max() > 1e6
    assert_close(got, want)
    for row in range(3):
        assert_close(got[row], want[row])
    assert (got[3] == 0).all()
    assert bound_moe(experts, 2, 4, policy)(x.bfloat16(), experts, ids, weights).isfinite().all()


def test_moe_of_padded_sizes_and_shared_scales(device, triton_backend):
    """Logical sizes below the stored ones; suh of gate and up, and svh of down, shared by all experts (stride 0)."""
    experts = make_experts(4, 200, 96, MIXED[:2], shared=True, device=device)
    assert experts.gate.suh.shape == (1, 256)
    x = torch.randn(5, 200, device=device)
    ids, weights = make_routes(5, 3, 4, device)
    for policy in (DECODE, PREFILL):
        assert_close(bound_moe(experts, 3, 8, policy)(x, experts, ids, weights), exact(x, experts, ids, weights))


def test_moe_limit(device, triton_backend):
    experts = make_experts(3, 128, 128, MCG3, device=device)
    x = 4 * torch.randn(3, 128, device=device)
    ids, weights = make_routes(3, 2, 3, device)
    got = moe(x, experts, ids, weights, limit=0.5)
    # gate and up err by what they were before the clamp, the result is what is left of them: 0.7e-3 to 1.0e-3
    assert_close(got, exact(x, experts, ids, weights, 0.5), 2 * TOLERANCE)
    assert (got - moe(x, experts, ids, weights)).norm() > 0.1 * got.norm()


def test_moe_in_slices_beyond_the_capacity(device, triton_backend):
    experts = make_experts(3, 128, 128, MCG3, device=device)
    x = torch.randn(7, 128, device=device)
    ids, weights = make_routes(7, 2, 3, device)
    whole = bound_moe(experts, 2, 7, PREFILL)(x, experts, ids, weights)
    sliced = bound_moe(experts, 2, 7, DispatchPolicy(max_m=1, prefill_block_m=64, prefill_capacity=3))
    assert len(sliced.plan.schedule.slices(7)) == 3
    assert torch.equal(sliced(x, experts, ids, weights), whole)
    with pytest.raises(ValueError, match=r"8 rows.*max_tokens=7"):
        sliced(torch.cat([x, x[:1]]), experts, torch.cat([ids, ids[:1]]), torch.cat([weights, weights[:1]]))


def test_moe_outside_of_the_windows_takes_the_reference_path(device, triton_backend):
    experts = make_experts(3, 128, 128, MCG3, device=device)
    x = torch.randn(5, 128, device=device, dtype=torch.float16)
    ids, weights = make_routes(5, 2, 3, device)
    bound = bound_moe(experts, 2, 8, DispatchPolicy(min_m=2, max_m=3, prefill=False, prefill_chunk=2))
    for rows in (1, 5):
        assert [regime for _, _, regime in bound.plan.schedule.slices(rows)] == [None] * (-(-rows // 2))
        got = bound(x[:rows], experts, ids[:rows], weights[:rows])
        want = reference.moe(x[:rows], experts, ids[:rows], weights[:rows])
        torch.testing.assert_close(got, want.to(got.dtype))


def test_moe_writes_to_out_and_reads_strided_rows(device, triton_backend):
    experts = make_experts(3, 128, 128, MCG3, device=device)
    x = torch.randn(3, 300, device=device, dtype=torch.float16)[:, 3:131]
    ids, weights = make_routes(3, 2, 3, device)
    bound = bound_moe(experts, 2, 4)
    out = torch.full((3, 128), float("nan"), device=device)
    assert bound(x, experts, ids, weights, out=out) is out
    assert_close(out, exact(x, experts, ids, weights))
    with pytest.raises(ValueError, match="out is"):
        bound(x, experts, ids, weights, out=out[:, ::2])


def test_moe_on_the_cpu_is_the_reference():
    experts = make_experts(3, 128, 128, MIXED)
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    ids, weights = make_routes(4, 2, 3)
    want = reference.moe(x, experts, ids, weights).bfloat16()
    assert want.norm() > 0
    assert torch.equal(moe(x, experts, ids, weights), want)
    assert torch.equal(bound_moe(experts, 2, 4)(x, experts, ids, weights), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 129)}, "129"),
        ({"x": torch.zeros(2, 128, dtype=torch.float64)}, "float64"),
        ({"topk_ids": torch.zeros(2, 2)}, "float32"),
        ({"topk_ids": torch.zeros(3, 2, dtype=torch.int32)}, r"\[3, 2\]"),
        ({"topk_weights": torch.zeros(2, 3)}, r"\[2, 3\]"),
        ({"limit": 0.0}, "limit=0.0"),
        ({"expert_map": torch.zeros(4)}, r"expert_map is torch.float32 \[4\]"),
        ({"arena": torch.zeros(4, dtype=torch.uint8)}, "arena without plan"),
    ],
)
def test_moe_refuses(change, message):
    good = {"x": torch.zeros(2, 128), "topk_ids": torch.zeros(2, 2, dtype=torch.int32), "topk_weights": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match=message):
        moe(experts=make_experts(2, 128, 128, MCG3), **{**good, **change})


def test_moe_opcheck(device):
    experts = make_experts(3, 128, 128, MCG3, device=device)
    plan = plan_moe(MoeSpec.of(experts, 2), max_tokens=4, policy=DECODE)
    x = torch.randn(3, 128, device=device)
    ids, weights = make_routes(3, 2, 3, device)
    tensors = [expert_tensors(projection) for projection in experts.projections]
    sides = (*tensors, *(list(projection.formats) for projection in experts.projections), experts.intermediate_size)
    with override_backend("auto"):
        torch.library.opcheck(_moe_unplanned_op, (x, ids, weights, *sides, None, None, torch.float32))
        arena = plan.new_arena(device).zero_()
        torch.library.opcheck(_moe_op, (x, ids, weights, arena, *sides, plan.schedule.encode(), 7.0, None, torch.bfloat16))


class Block(torch.nn.Module):
    def __init__(self, experts, bound):
        super().__init__()
        self.experts, self.bound = experts, bound

    def forward(self, x, ids, weights):
        if self.bound is None:
            return x + moe(2 * x, self.experts, ids, weights)
        return x + self.bound(2 * x, self.experts, ids, weights)


@pytest.mark.parametrize("planned", [False, True])
def test_moe_compiles_whole_and_once_for_all_row_counts(planned, device):
    experts = make_experts(3, 128, 128, MCG3, device=device)
    block = Block(experts, bound_moe(experts, 2, 64) if planned else None)
    torch._dynamo.reset()
    inductor = device == "cuda" or shutil.which("g++") or shutil.which("clang++")
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor" if inductor else "aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (5, 2, 17, 40):
        x = torch.randn(tokens, 128, device=device)
        ids, weights = make_routes(tokens, 2, 3, device)
        assert_close(compiled(x, ids, weights), block(x, ids, weights).double(), 1e-5)
    assert counter.frame_count == 1


def compiled_kernels(blocks, *targets):
    """Audit reports of all that a call launches for GLM-5.2 at TP4 (hidden 6144, intermediate 512, 256 experts, top-8)."""
    pytest.importorskip("triton")
    tests = pathlib.Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tests.parent), str(tests), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(tests / "compile_moe.py"), blocks, *targets]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    reports = [json.loads(line) for line in run.stdout.splitlines()]
    assert {report["kernel"] for report in reports} == {"prologue", "expert_gemm", "activation", "combine", "logits", "select"}
    return reports


@pytest.mark.parametrize(
    ("blocks", "targets"),
    [
        ("8,64", ["sm_120"]),
        pytest.param("8,16,32,48,64,128", ["sm_80", "sm_90", "sm_120"], marks=pytest.mark.slow),
        pytest.param("8,64", ["sm_86", "sm_89", "sm_121"], marks=pytest.mark.slow),
    ],
)
def test_moe_and_router_fit_without_spills(blocks, targets):
    """At most 99 KiB of shared memory, no spill in the loop, decoded weights that stay in their registers up to 32 rows."""
    for report in compiled_kernels(blocks, *targets):
        what = {key: report[key] for key in ("target", "kernel", "labels", "shared", "registers", "spills")}
        assert report["shared"] <= 99 * 1024, what
        assert not {"STL", "LDL"} & set(report["loop"]), what
        assert report["spills"] <= 16, what  # outside of the loop ptxas trades a register or two for occupancy
        if report["kernel"] == "logits":  # a loop with a matrix instruction would be TF32
            assert not any("MMA" in opcode for opcode in report["loop"]), what
        if report["kernel"] == "expert_gemm":
            assert report["loop_shuffles"] == 0, what
            if (rows := report["labels"]["block_m"]) <= 32:
                assert report["loop_stored_bytes"] <= 2 * 128 * rows, what  # BLOCK_K = 128 inputs of each row, nothing else


@pytest.mark.slow
def test_moe_and_router_compile_for_other_targets():
    for report in compiled_kernels("8,64", "sm_100", "gfx942", "gfx1100", "gfx1201"):
        assert report["shared"] <= 64 * 1024
        if report["kernel"] == "logits":
            assert not any("MMA" in opcode for opcode in report["loop"])


# On a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "intermediate", "num_experts"), [(6144, 512, 16), (4096, 1408, 8), (1024, 2048, 32)])
def test_moe_at_size(hidden, intermediate, num_experts):
    experts = make_experts(num_experts, hidden, intermediate, MCG3, device="cuda")
    x = torch.randn(200, hidden, device="cuda", dtype=torch.bfloat16)
    ids, weights = make_routes(200, 8, num_experts, "cuda")
    want = exact(x, experts, ids, weights)
    for block_m in (None, 8, 16, 32, 48, 64, 128):
        bound = bound_moe(experts, 8, 200, DispatchPolicy(), block_m)
        for tokens in (1, 31, 200):
            out = torch.empty(tokens, hidden, device="cuda")
            bound(x[:tokens], experts, ids[:tokens], weights[:tokens], out=out)
            assert_close(out, want[:tokens])


@pytest.mark.gpu
def test_moe_with_distinct_rotations_and_many_rows_an_expert():
    experts = make_experts(4, 512, 256, MIXED, device="cuda")
    x = torch.randn(600, 512, device="cuda", dtype=torch.bfloat16)
    ids, weights = make_routes(600, 2, 4, "cuda")
    for block_m in (None, 16, 48, 128):
        bound = bound_moe(experts, 2, 600, DispatchPolicy(), block_m)
        out = bound(x, experts, ids, weights, out=torch.empty(600, 512, device="cuda"))
        assert_close(out, exact(x, experts, ids, weights))


@pytest.mark.gpu
@pytest.mark.parametrize("max_tokens", [32, 512])
def test_moe_rows_of_a_batch_equal_their_own_runs(max_tokens):
    experts = make_experts(32, 1024, 512, MIXED[:3], device="cuda")
    x = torch.randn(max_tokens, 1024, device="cuda", dtype=torch.bfloat16)
    ids, weights = make_routes(max_tokens, 4, 32, "cuda")
    block_m = 8 if max_tokens == 32 else 64
    bound = bound_moe(experts, 4, max_tokens, DispatchPolicy(), block_m)
    together = bound(x, experts, ids, weights).clone()
    for tokens in (1, 2, 3, 7, 16, 31):
        assert torch.equal(bound(x[:tokens], experts, ids[:tokens], weights[:tokens]), together[:tokens])
    for row in range(0, max_tokens, max_tokens // 16):
        part = slice(row, row + 1)
        assert torch.equal(bound(x[part], experts, ids[part], weights[part]), together[part])


@pytest.mark.gpu
def test_moe_in_a_graph_with_changing_inputs():
    """Three plans with an arena each, captured below capacity and beyond the decode window: 1,002 replays, alternately."""
    experts = make_experts(16, 1024, 512, MIXED[:3], device="cuda")
    graphs = []
    for tokens in (3, 32, 300):
        bound = bound_moe(experts, 4, 512, DispatchPolicy())
        x = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
        ids, weights = make_routes(tokens, 4, 16, "cuda", torch.int64)
        bound(x, experts, ids, weights)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = bound(x, experts, ids, weights)
        graphs.append((graph, bound, x, ids, weights, y))
    for step in range(334):
        for graph, _, x, ids, weights, _ in graphs:
            x.normal_()
            new_ids, new_weights = make_routes(x.shape[0], 4, 16, "cuda", torch.int64)
            ids.copy_(torch.where(torch.rand_like(new_weights) < 0.2, -1, new_ids))
            weights.copy_(new_weights)
            graph.replay()
        if step % 10 == 0:
            for _, bound, x, ids, weights, y in graphs:
                replayed = y.clone()
                assert torch.equal(bound(x, experts, ids, weights), replayed)


@pytest.mark.gpu
def test_moe_reference_path_refuses_a_capture():
    experts = make_experts(2, 128, 128, MCG3, device="cuda")
    bound = bound_moe(experts, 2, 64, DispatchPolicy(prefill=False))
    x = torch.randn(40, 128, device="cuda")
    ids, weights = make_routes(40, 2, 2, "cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="EXL3_TRITON_MAX_M"), torch.cuda.graph(graph):
        bound(x, experts, ids, weights)
    with pytest.raises(RuntimeError, match="replan"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        bound.plan.replan(128)


@pytest.mark.gpu
def test_moe_refuses_to_be_captured_cold():
    experts = make_experts(2, 128, 384, MCG3, device="cuda")  # sizes that no other test has launched
    bound = bound_moe(experts, 2, 32)
    x = torch.randn(3, 128, device="cuda")
    ids, weights = make_routes(3, 2, 2, "cuda")
    out = torch.empty_like(x)
    with pytest.raises(RuntimeError, match="warmup"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        bound(x, experts, ids, weights, out=out)
    want = bound(x, experts, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound(x, experts, ids, weights, out=out)
    graph.replay()
    assert torch.equal(out, want)


@pytest.mark.gpu
def test_moe_of_target_and_draft_replayed_alternately():
    """Two roles with an arena each, all layers of a role over one: 500 alternating replays equal eager runs."""
    roles = []
    for hidden, tokens in ((512, 4), (256, 3)):
        experts = make_experts(8, hidden, 256, MIXED[:3], device="cuda")
        bound = bound_moe(experts, 2, 32)
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        ids, weights = make_routes(tokens, 2, 8, "cuda")
        call = lambda bound=bound, x=x, experts=experts, ids=ids, weights=weights: bound(
            bound(x, experts, ids, weights), experts, ids, weights
        )
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call()
        roles.append((graph, x, call, y))
    for step in range(500):
        for graph, x, _, _ in roles:
            x.normal_()
            graph.replay()
        if step % 25 == 0:
            for _, _, call, y in roles:
                replayed = y.clone()
                assert replayed.norm() > 0
                assert torch.equal(call(), replayed)


@pytest.mark.gpu
def test_moe_weights_beyond_two_to_the_31st_element():
    experts = make_experts(3, 256, 128, MIXED[:3], device="cuda")
    far = []
    for projection in experts.projections:
        gap = 2**31 + 4096
        words = torch.empty(gap + projection.words.numel(), dtype=torch.int16, device="cuda")
        words[gap:] = projection.words
        layout = tuple((offset + gap, twice_bits, codebook) for offset, twice_bits, codebook in projection.layout)
        table = torch.tensor(layout, device="cuda")
        far.append(type(projection)(words, layout, table, projection.suh, projection.svh))
    moved = type(experts)(*far, experts.hidden_size, experts.intermediate_size)
    x = torch.randn(5, 256, device="cuda")
    ids, weights = make_routes(5, 2, 3, "cuda")
    near = moe(x, experts, ids, weights)
    assert near.norm() > 0
    assert torch.equal(moe(x, moved, ids, weights), near)
