"""Tensor parallelism: which rank holds what, the cuts in the loader, and ranks that run together over gloo."""

from __future__ import annotations

import contextlib
import json
import types

import golden
import pytest
import torch
import torch.distributed as dist
from fabricate import Fabricated
from ranks import Ranks
from safetensors.torch import load_file, save_file

from exl3_triton import LLM, SamplingParams, cli, cli_options, load, ops
from exl3_triton.format import FormatError
from exl3_triton.model.checkpoint import Checkpoint
from exl3_triton.model.config import ModelConfig
from exl3_triton.model.loader import WeightSource
from exl3_triton.model.parallel import UNJOINED, Partition, Shard
from exl3_triton.model.rank_group import RankGroup
from exl3_triton.ops.collective import register_group

U = 2.0**-24  # unit roundoff of fp32
# Cutting changes nothing but the order of fp32 sums. So do the kernels of other libraries: this is the tolerance to which the
# models' logits are held against those of transformers.
LOGITS = 2e-5
SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 6,  # over four ranks: 2, 2, 1, 1
    "qk_nope_head_dim": 96,
    "qk_rope_head_dim": 32,
    "v_head_dim": 128,
    "intermediate_size": 600,  # 4.7 blocks of 128: 3 and 2, or 2, 1, 1 and a short one
    "moe_intermediate_size": 512,
    "vocab_size": 1100,
    "index_topk": 64,  # more than the tests' positions: near-ties of index scores are tested elsewhere
}


def fabricated(**options) -> Fabricated:
    return Fabricated(**{**SIZES, **options})


def parts(config, size, **options):
    return [Partition.of(config, Shard(rank, size), **options) for rank in range(size)]


def test_blocks_that_ranks_do_not_divide_go_to_the_first_ones():
    assert [len(Shard(rank, 4).part(1002 * 128, 128)) // 128 for rank in range(4)] == [251, 251, 250, 250]
    assert [Shard(rank, 3).part(600, 128) for rank in range(3)] == [range(256), range(256, 512), range(512, 600)]
    assert [len(Shard(rank, 3).part(2)) for rank in range(3)] == [1, 1, 0]


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_shard_is_one_of_its_partners(rank, size):
    with pytest.raises(ValueError, match=f"rank {rank} of {size}, required 0 <= rank < size"):
        Shard(rank, size)


@pytest.mark.parametrize("name", ModelConfig.presets())
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_parts_are_disjoint_whole_and_on_blocks(name, size, expert_parallel):
    config = ModelConfig.preset(name)
    found = parts(config, size, expert_parallel=expert_parallel and size > 1)
    totals = {
        "heads": (config.num_heads, config.head_dim),
        "kv_heads": (config.num_kv_heads, config.head_dim),
        "dense": (config.intermediate_size, 1),
        "moe": (config.moe_intermediate_size, 1),
        "shared": (config.moe_intermediate_size * config.num_shared_experts, 1),
        "experts": (config.num_experts, 128),
        "vocab": (config.vocab_size, 1),
    }
    for field, (count, width) in totals.items():
        ranges = [getattr(part, field) for part in found]
        if len(set(ranges)) > 1:
            assert [i for part in ranges for i in part] == list(range(count)), field
            assert all(part.start * width % 128 == 0 for part in ranges), field
        else:
            assert set(ranges) == {range(count)}, field
    assert found[0].whole == ()  # every published model of these sizes can be cut so


def test_glm_air_is_cut_by_width_or_by_expert():
    """1408 is 11 blocks: four ranks have 3, 3, 3 and 2."""
    config = ModelConfig.preset("glm-4.5-air")
    assert config.moe_intermediate_size == 1408
    assert [len(part.moe) for part in parts(config, 4)] == [384, 384, 384, 256]
    by_expert = parts(config, 4, expert_parallel=True)
    assert [(len(part.experts), len(part.moe)) for part in by_expert] == [(32, 1408)] * 4


def test_what_cannot_be_cut_is_whole_and_said_so():
    config = ModelConfig.from_dict(Fabricated().config)  # 2 heads of 48, 200 and 96 features
    found = Partition.of(config, Shard(1, 4))
    assert (found.heads, found.dense, found.moe, found.experts) == (range(2), range(200), range(96), range(4))
    assert found.whole == (
        "attention, heads (1 x 8 for 4 ranks)",
        "dense MLPs (2 x 128 for 4 ranks)",
        "routed experts (1 x 128 for 4 ranks)",
        "shared experts (1 x 128 for 4 ranks)",
        "head (2 x 128 for 4 ranks)",
    )
    assert found.describe().endswith(", ".join(found.whole))


def matrix(layer) -> torch.Tensor:
    """A linear layer's weights, fp32 [in, out], without padding."""
    if hasattr(layer, "trellis"):
        return ops.dequantize(layer.weight)[: layer.in_features, : layer.out_features].float()
    return layer.weight.T.float()


def pieces(path, size, **options):
    return [load(path, shard=Shard(rank, size), progress=False, **options) for rank in range(size)]


@pytest.mark.parametrize("quantized", [True, False], ids=["exl3", "plain"])
@pytest.mark.parametrize("size", [2, 4])
def test_cut_matrices_are_the_parts_of_the_whole(tmp_path, quantized, size):
    path = fabricated(quantized=quantized).write(tmp_path)
    whole, cut = load(path, progress=False), pieces(path, size)

    def check(dim, pick):
        """dim: 0 for cut inputs, 1 for outputs."""
        found, expected = [pick(model) for model in cut], pick(whole)
        if isinstance(expected, torch.Tensor):
            assert torch.equal(torch.cat(found, 1 - dim), expected)
            return
        assert torch.equal(torch.cat([each.trellis for each in found], dim), expected.trellis)
        for axis, name in enumerate(("suh", "svh")):
            vectors = [getattr(each, name) for each in found]
            assert torch.equal(torch.cat(vectors) if axis == dim else vectors[-1], getattr(expected, name))

    def linear(layer):
        return layer.weight  # of either kind

    def expert(experts, name, index):
        return getattr(experts[0], name).expert(index) if quantized else getattr(experts, name)[index]

    check(1, lambda model: linear(model.lm_head))
    check(1, lambda model: linear(model.blocks[0].attention.q_b))
    check(0, lambda model: linear(model.blocks[0].attention.o))
    for name, dim in (("gate", 1), ("up", 1), ("down", 0)):
        check(dim, lambda model: linear(getattr(model.blocks[0].feed_forward, name)))  # noqa: B023
        check(dim, lambda model: linear(getattr(model.blocks[1].feed_forward.shared, name)))  # noqa: B023
        for index in range(4):
            check(dim, lambda model: expert(model.blocks[1].feed_forward.experts, name, index))  # noqa: B023
    for name in ("w_uk", "w_uv"):
        joined = torch.cat([getattr(model.blocks[1].attention, name) for model in cut])
        assert torch.equal(joined, getattr(whole.blocks[1].attention, name))
    assert torch.equal(cut[0].embedding, whole.embedding)


def test_by_expert_a_rank_has_some_of_the_experts(tmp_path):
    path = fabricated().write(tmp_path)
    whole, cut = load(path, progress=False), pieces(path, 3, expert_parallel=True)
    layers = [model.blocks[1].feed_forward for model in cut]
    assert [layer.experts[0].num_experts for layer in layers] == [2, 1, 1]
    assert [layer.expert_map.tolist() for layer in layers] == [[0, 1, -1, -1], [-1, -1, 0, -1], [-1, -1, -1, 0]]
    words = torch.cat([layer.experts[0].gate.words for layer in layers])
    whole_words = whole.blocks[1].feed_forward.experts[0].gate.words  # with the shared expert, which no rank has among its own
    assert whole.blocks[1].feed_forward.joined
    assert not any(layer.joined for layer in layers)
    assert torch.equal(words, whole_words[: len(words)])
    assert len(whole_words) == len(words) // 4 * 5


def test_a_rank_claims_only_its_bytes(tmp_path):
    path = fabricated().write(tmp_path)
    config = ModelConfig.from_dir(path)
    checkpoint = Checkpoint.open(path)

    def claimed(partition):
        from exl3_triton.model.transformer import Transformer

        with WeightSource(checkpoint, "meta", torch.float32, partition=partition) as source:
            Transformer(config, source, dtype=torch.float32, max_context=8)
            return source.claimed_bytes

    whole = claimed(None)
    for size in (2, 4):
        shares = [claimed(part) for part in parts(config, size)]
        assert max(shares) < 0.75 * whole if size == 2 else max(shares) < 0.5 * whole
        assert sum(shares) > whole  # norms, latents and the like are on every rank


def test_biases_are_cut_with_outputs_and_kept_once_with_inputs(tmp_path):
    model = fabricated()
    name = "model.layers.0.self_attn.o_proj"
    model.tensors[f"{name}.bias"] = torch.randn(128).half()
    name = "model.layers.0.mlp.gate_proj"
    model.tensors[f"{name}.bias"] = torch.randn(640).half()
    cut = pieces(model.write(tmp_path), 2)
    outs = [each.blocks[0].attention.o.bias for each in cut]
    assert outs[1] is None
    assert torch.equal(outs[0], model.tensors["model.layers.0.self_attn.o_proj.bias"])
    gates = torch.cat([each.blocks[0].feed_forward.gate.bias for each in cut])
    assert torch.equal(gates, model.tensors[f"{name}.bias"])


def test_a_cut_through_a_rotation_block_is_refused(tmp_path):
    checkpoint = Checkpoint.open(fabricated().write(tmp_path))
    with (
        WeightSource(checkpoint, "cpu", torch.float32) as source,
        pytest.raises(FormatError, match=r"features 0 to 64 of 600 \(out\), required multiples of 128"),
    ):
        source.linear("layers.0.mlp.gate_proj", 128, 600, outputs=range(64))


def test_a_damaged_matrix_is_refused_by_every_rank(tmp_path):
    model = fabricated()
    name = "model.layers.1.mlp.experts.3.down_proj"
    model.tensors[f"{name}.suh"] = model.tensors[f"{name}.suh"][:384].clone()
    path = model.write(tmp_path)
    for rank in range(2):
        for experts in (False, True):
            with pytest.raises(FormatError, match=r"experts.3.down_proj.suh: found shape \[384\]"):
                load(path, shard=Shard(rank, 2), expert_parallel=experts, progress=False)
    del model.tensors[f"{name}.suh"]
    path = model.write(tmp_path / "missing")
    for rank in range(2):
        with pytest.raises(FormatError, match=r"experts.3.down_proj.suh: missing"):
            load(path, shard=Shard(rank, 2), expert_parallel=True, progress=False)


def test_options_that_contradict_each_other_are_refused(tmp_path):
    path = fabricated().write(tmp_path)
    with pytest.raises(ValueError, match="expert_parallel: found one rank"):
        load(path, expert_parallel=True)
    with pytest.raises(ValueError, match="found a group and a shard"):
        load(path, group=types.SimpleNamespace(shard=Shard(0, 2)), shard=Shard(0, 2))


def test_a_part_without_its_partners_does_not_run(tmp_path):
    model = load(fabricated().write(tmp_path), shard=Shard(0, 2), progress=False)
    with pytest.raises(RuntimeError, match="no process group 'unjoined'"):
        model.logits(torch.arange(3))


@pytest.mark.parametrize("name", ["RANK", "MASTER_PORT"])
def test_joining_needs_the_launchers_environment(monkeypatch, name):
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=f"{name} not set in the environment; required: a start by torchrun"):
        RankGroup.from_env("cpu")


@pytest.fixture
def alone():
    """A group of one process, in which sums are what went in: the test adds the parts of several ranks itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = types.SimpleNamespace(process_group=dist.group.WORLD, collective=lambda _: contextlib.nullcontext())
    register_group(UNJOINED, group)
    yield
    register_group(UNJOINED, None)
    dist.destroy_process_group()


def mlp_bound(x, gate, up, down, parts):
    """Worst difference of two orders of summation of a gated MLP in fp32; x [T, H], matrices [in, out], all float64.

    |silu(g) u| <= |g| |u|, and g, u are sums of H terms with relative errors H U against the sums of absolute values; silu's
    slope is below 1.1. The sum behind has I terms and `parts` more.
    """
    size = (x.abs() @ gate.abs()) * (x.abs() @ up.abs())
    return 2 * (3 * gate.shape[0] + gate.shape[1] + parts + 8) * U * (size @ down.abs())


@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_an_mlp_add_up_within_the_derived_bound(tmp_path, alone, size):
    path = fabricated(quantized=False).write(tmp_path)
    whole, cut = load(path, progress=False), pieces(path, size)
    x = torch.randn(9, 128)
    feed = whole.blocks[0].feed_forward
    expected = feed(x)
    found = sum(model.blocks[0].feed_forward(x) for model in cut)
    gate, up, down = (matrix(getattr(feed, name)).double() for name in ("gate", "up", "down"))
    assert expected.abs().min() > 0
    assert ((found - expected).abs() <= mlp_bound(x.double(), gate, up, down, size)).all()


@pytest.mark.parametrize("quantized", [True, False], ids=["exl3", "plain"])
def test_by_expert_equals_by_width_within_the_derived_bound(tmp_path, alone, quantized):
    path = fabricated(quantized=quantized).write(tmp_path)
    x = torch.randn(9, 128)
    whole = load(path, progress=False).blocks[1].feed_forward
    by_width = sum(model.blocks[1].feed_forward(x) for model in pieces(path, 2))
    by_expert = sum(model.blocks[1].feed_forward(x) for model in pieces(path, 2, expert_parallel=True))
    expected = whole(x)
    bound = mlp_bound(x.double(), *(matrix(getattr(whole.shared, n)).double() for n in ("gate", "up", "down")), 2)
    for expert in range(4):  # every expert with the largest weight, whichever were chosen
        if quantized:
            each = [ops.dequantize(getattr(whole.experts[0], n).expert(expert)).double() for n in ("gate", "up", "down")]
        else:
            each = [getattr(whole.experts, n)[expert].T.double() for n in ("gate", "up", "down")]
        bound += 2.5 * mlp_bound(x.double(), *each, 2)
    assert expected.abs().min() > 0
    for found in (by_width, by_expert):
        assert ((found - expected).abs() <= bound).all()


def test_collectives_are_traced_and_checked(alone):
    x = torch.randn(3, 4)
    expected = x.clone()
    assert ops.all_reduce(x, None) is x
    assert ops.gather_columns(x, [4], None) is x
    torch.library.opcheck(torch.ops.exl3_triton.all_reduce, (x.clone(), UNJOINED))
    torch.library.opcheck(torch.ops.exl3_triton.gather_columns, (x.clone(), [4], UNJOINED))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x):
        return ops.gather_columns(ops.all_reduce(x * 2, UNJOINED) + 1, [4], UNJOINED)

    torch.testing.assert_close(step(x), expected * 2 + 1)
    with pytest.raises(ValueError, match="all_reduce: x is torch.float32 with strides"):
        ops.all_reduce(x.T, UNJOINED)
    with pytest.raises(ValueError, match=r"gather_columns: x is \[3, 4\]"):
        ops.gather_columns(x, [5, 3], UNJOINED)
    with pytest.raises(RuntimeError, match="no process group 'nobody'"):
        ops.all_reduce(x, "nobody")


def start_logits(directory, inputs, size):
    directory.mkdir(exist_ok=True)
    save_file({name: tokens.clone() for name, tokens in inputs.items()}, directory / "inputs.safetensors")
    return Ranks("logits", directory, size, directory)


def finish(ranks) -> dict[int, str]:
    results = ranks.wait()
    assert {code for code, _, _ in results.values()} == {0}, results
    return {rank: out for rank, (_, out, _) in results.items()}


def check_same_everywhere(directory, label, size, expected_logits):
    """The ranks' files are equal, and the logits those of one process; returns them."""
    found = [load_file(directory / f"{label}.{rank}.safetensors") for rank in range(size)]
    for other in found[1:]:
        for key, value in found[0].items():
            assert torch.equal(value, other[key]), (label, key)
    scale = float(expected_logits.abs().max())
    assert scale > 0
    torch.testing.assert_close(found[0]["logits"], expected_logits, rtol=0, atol=LOGITS * scale)
    return found[0]


def greedy(path, tokens, **options):
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    llm = LLM(path, progress=False, max_batch=2, **options)
    outputs = list(llm.generate([tokens[:9].tolist(), tokens[:5].tolist()], params))
    return [torch.tensor([each.token_id for each in outputs if each.index == prompt]) for prompt in (0, 1)]


GQA = {
    "model_type": "glm4_moe", "head_dim": 64, "num_key_value_heads": 4, "num_attention_heads": 8, "partial_rotary_factor": 0.5,
    "attention_bias": True, "use_qk_norm": True, "num_nextn_predict_layers": 0,
}  # fmt: skip


def grouped() -> Fabricated:
    """With grouped-query attention: biases, norms, and key-value heads that two ranks divide (a pair is a block of 128)."""
    made = fabricated(**GQA)
    c, hidden = made.config, made.config["hidden_size"]
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.self_attn"
        for name in made.matching(f"{prefix}."):
            del made.tensors[name]
        for letter, heads in (("q", 8), ("k", 4), ("v", 4)):
            made.linear(f"{prefix}.{letter}_proj", hidden, heads * 64)
            made.plain(f"{prefix}.{letter}_proj.bias", heads * 64, dtype=torch.float16)
        made.linear(f"{prefix}.o_proj", 8 * 64, hidden)
        made.plain(f"{prefix}.q_norm.weight", 64)
        made.plain(f"{prefix}.k_norm.weight", 64)
    return made


def test_ranks_compute_what_one_process_does(tmp_path):
    """One, two and four gloo ranks; by width and by expert; tokens equal on all ranks, also those that are sampled."""
    path = fabricated().write(tmp_path / "model")
    tokens = torch.randint(0, 1100, (40,))
    inputs = {str(path): tokens, f"{path}|experts": tokens, f"{path}|mtp": tokens}
    four = start_logits(tmp_path / "four", {str(path): tokens}, 4)
    gqa = grouped().write(tmp_path / "gqa")
    two = start_logits(tmp_path / "two", inputs | {str(gqa): tokens}, 2)
    whole = load(path, progress=False)
    expected = whole.logits(tokens)
    outputs = finish(two)
    assert "rank 1 of 2" in outputs[1]
    finish(four)
    alone = greedy(path, tokens)
    for directory, label, size in (
        ("two", "model", 2), ("two", "modelexperts", 2), ("two", "modelmtp", 2), ("four", "model", 4),
    ):  # fmt: skip
        found = check_same_everywhere(tmp_path / directory, label, size, expected)
        assert found["least"] == 11 - size
        for prompt in (0, 1):
            assert torch.equal(found[f"greedy{prompt}"], alone[prompt]), (directory, label)
    assert "gqa: rank 0 of 2" in outputs[0]
    check_same_everywhere(tmp_path / "two", "gqa", 2, load(gqa, progress=False).logits(tokens))


def test_two_ranks_reproduce_the_demos(tmp_path, testdata):
    """Attention of the demo cannot be cut and is on both ranks; its experts, dense layer and head are divided."""
    names = ("demo-exl3-3.0bpw-mcg", "demo-exl3-mixed-mul1", "demo-bf16", "demo-tr3-tp2")
    stored = {name: golden.read_tensors(testdata / "demo" / name / "golden.safetensors") for name in names}
    inputs = {str(testdata / "demo" / name): each["prompt2.input_ids"].long() for name, each in stored.items()}
    outputs = finish(start_logits(tmp_path, inputs, 2))
    for name, each in stored.items():
        assert f"{name}: rank 0 of 2" in outputs[0]
        assert "attention, heads (1 x 4 for 2 ranks)" in outputs[0]
        found = [load_file(tmp_path / f"{name}.{rank}.safetensors") for rank in (0, 1)]
        for key, value in found[0].items():
            assert torch.equal(value, found[1][key])
        last = each["prompt2.logits_last"].float()
        # the goldens are of the same weights in another library, see test_model.check_golden
        torch.testing.assert_close(found[0]["logits"][-1], last, rtol=0, atol=LOGITS * float(last.abs().max()))


def test_the_program_runs_on_ranks_and_rank_0_alone_reads_and_prints(tmp_path, capsys):
    (tmp_path / "wrong").mkdir()
    for directory in (tmp_path, tmp_path / "wrong"):
        (directory / "stdin").write_text("In the beginning")
        (directory / "nothing").write_text("not read by anyone")
    ranks = Ranks("cli", cli_options.DEMO, 2, tmp_path)
    wrong = Ranks("cli", tmp_path / "absent", 2, tmp_path / "wrong")
    assert cli.main(["generate", "--device", "cpu", "--prompt", "In the beginning", "--max-tokens", "6"]) == 0
    expected = capsys.readouterr().out
    found = ranks.wait()
    assert found[0][:2] == (0, expected), found
    assert "rank 0 of 2: whole on every rank: embedding" in found[0][2]
    assert found[1] == (0, "", "")
    found = wrong.wait()
    assert found[0][0] == 2
    assert "error: " in found[0][2]
    assert "absent" in found[0][2]


@pytest.mark.slow
def test_bench_runs_on_ranks_and_rank_0_alone_writes(tmp_path):
    """A checkpoint by width, random weights by expert, and what ranks refuse."""
    path = fabricated().write(tmp_path / "model")
    jobs = {"whole": "", "experts": "--dummy --expert-parallel", "part": "--dummy --rank-of 2"}
    found = {}
    for name, options in jobs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "options").write_text(options)
        found[name] = Ranks("bench", path, 2, tmp_path / name).wait()
    for name in ("whole", "experts"):
        assert [code for code, _, _ in found[name].values()] == [0, 0], found[name]
        assert "decode_step" in found[name][0][1]
        assert found[name][1][1:] == ("", "")
        rows = json.loads((tmp_path / name / "rows.json").read_text())["rows"]
        assert [(row["op"], row["batch"], row["ranks"]) for row in rows] == [
            ("decode_step", 1, 2), ("decode_step", 2, 2), ("prefill", 1, 2),
        ]  # fmt: skip
        assert all(row["expert_parallel"] == (name == "experts") and row["tokens_per_s"] > 0 for row in rows)
    assert found["part"][0][0] == 2
    assert "--rank-of: one part without its partners" in found["part"][0][2]


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    """Ranks that fail in every way, started together: most of the time they wait."""
    directory = tmp_path_factory.mktemp("failing")
    path = fabricated().write(directory / "model")
    timeouts = {"kill": 20, "raise": 20, "disagree": 20, "hang": 14}
    jobs = {job: Ranks(job, path, 2, directory / job, timeout=timeout) for job, timeout in timeouts.items()}
    jobs["absent"] = Ranks("logits", path, 2, directory / "absent", timeout=4, started=[0])
    yield jobs
    for ranks in jobs.values():
        ranks.kill()


@pytest.mark.parametrize(
    ("job", "code", "message"),
    [
        ("kill", 3, "rank 0 of 2 ends: rank 1 has given no sign of life"),
        ("raise", 3, "rank 0 of 2 ends: rank 1: something broke here"),
        ("hang", 3, "rank 0 of 2 ends: rank 1 hangs: others have been waiting for it"),
        ("absent", 1, "ranks: rank 1 of 2 has not come within 4 s"),
    ],
)
def test_a_rank_at_fault_ends_the_others_by_name(failing, job, code, message):
    found = failing[job].wait()
    assert found[0][0] == code, found
    assert message in found[0][2], found


def test_different_arguments_on_different_ranks_are_refused(failing):
    found = failing["disagree"].wait()
    assert "prompts: rank 1 has others than rank 0, required the same on all ranks" in found[1][2]
    assert found[0][0] == 3


@pytest.mark.slow
def test_rank_0_may_take_its_time_between_calls(tmp_path):
    results = Ranks("idle", fabricated().write(tmp_path / "model"), 2, tmp_path, timeout=10).wait()
    assert [(code, out) for code, out, _ in results.values()] == [(0, "done\n")] * 2


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", ["demo-exl3-3.0bpw-mcg", "demo-tr3-tp2"])
def test_two_gpus_reproduce_the_demos_by_nccl_and_graphs(tmp_path, testdata, name):
    """`LLM` decodes by CUDA graphs there; fp16 activations, held to what one GPU reaches (test_gpu)."""
    path = testdata / "demo" / name
    reference = golden.read_tensors(path / "golden.safetensors")
    tokens = reference["prompt2.input_ids"].long()
    save_file({f"{path}": tokens, f"{path}|mtp": tokens.clone()}, tmp_path / "inputs.safetensors")
    finish(Ranks("logits", path, 2, tmp_path, device="cuda"))
    last = reference["prompt2.logits_last"].float()
    for option in ("", "mtp"):
        found = [load_file(tmp_path / f"{name}{option}.{rank}.safetensors") for rank in (0, 1)]
        for key, value in found[0].items():
            assert torch.equal(value, found[1][key]), key
        torch.testing.assert_close(found[0]["logits"][-1], last, rtol=0, atol=4e-3 * float(last.abs().max()))


@pytest.mark.multi_gpu
@pytest.mark.parametrize(("job", "message"), [("kill", "rank 1 has given no sign of life"), ("hang", "rank 1 hangs")])
def test_a_gpu_rank_at_fault_ends_the_others_by_name(tmp_path, job, message):
    ranks = Ranks(job, fabricated().write(tmp_path / "model"), 2, tmp_path / job, timeout=30, device="cuda")
    found = ranks.wait()
    assert found[0][0] == 3, found
    assert message in found[0][2], found
