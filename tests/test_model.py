"""The whole model on the CPU against transformers' logits: tiny unquantized models, and the quantized demo."""

from __future__ import annotations

import golden
import pytest
import torch
from safetensors.torch import save_file
from torch._dynamo.testing import CompileCounterWithBackend

import exl3_triton
from exl3_triton.model.cache import PAGE, Batch, PageAllocator, pages_for

DATA = golden.DATA.parent
FAMILIES = (
    "deepseek_v2",
    "deepseek_v2_grouped_yarn",
    "deepseek_v2_lite",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
)
DEMO = exl3_triton.__path__[0] + "/demo"


def relative(actual, expected):
    assert expected.double().norm() > 0
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.fixture(scope="module")
def oracles():
    """Family -> (model, input ids [2, 48], logits [2, 48, vocab])."""
    found = {}
    for family in FAMILIES:
        tensors = golden.read_tensors(DATA / "oracle" / family / "logits.safetensors")
        found[family] = (exl3_triton.load(DATA / "oracle" / family, progress=False), tensors["input_ids"], tensors["logits"])
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [48, 16, 7, 1], ids=["prefill", "chunks of 16", "chunks of 7", "token by token"])
def test_forward_agrees_with_transformers(oracles, family, chunk):
    """2e-5 of logits of size 3 is 30 roundings of fp32 (2^-24): a few per layer."""
    model, input_ids, expected = oracles[family]
    for ids, logits in zip(input_ids, expected):
        cache, pages = model.new_cache(4), [2, 3]
        for start in range(0, len(ids), chunk):
            batch = Batch.of_sequence(ids[start : start + chunk], start, pages, prefill=chunk > 1)
            with torch.inference_mode():
                actual = model.compute_logits(model(batch, cache))
            assert (actual - logits[start : start + chunk]).abs().max() < 2e-5
    assert expected.abs().max() > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_step_compiles_to_one_graph(oracles, family):
    """48 steps of two sequences: transformers' logits, one graph, no recompile."""
    model, input_ids, expected = oracles[family]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    step = torch.compile(model.decode_step, fullgraph=True, backend=counter)
    table = torch.tensor([[1], [2]], dtype=torch.int32)
    cache = model.new_cache(3)
    with torch.inference_mode():
        for i in range(input_ids.shape[1]):
            positions = torch.full((2,), i)
            logits = step(input_ids[:, i].clone(), positions, table[:, 0] * PAGE + positions, table, cache, PAGE)
            assert (logits - expected[:, i]).abs().max() < 2e-5
    assert counter.frame_count == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_of_a_flat_batch_equals_each_sequence_alone(oracles, family):
    """Sequences of different lengths in one batch, in scattered pages, with padding rows among them."""
    model, input_ids, expected = oracles[family]
    allocator, lengths = PageAllocator(8), (48, 31)
    sequences = []
    for ids, length in zip(input_ids, lengths):
        pages = allocator.allocate(pages_for(length) + 1)[::-1]
        sequences.append(Batch.of_sequence(ids[:length], 0, pages))
    padding = torch.full((3,), -1)
    batch = Batch(
        tokens=torch.cat([sequences[0].tokens, torch.zeros(3, dtype=torch.long), sequences[1].tokens]),
        positions=torch.cat([sequences[0].positions, padding, sequences[1].positions]),
        slots=torch.cat([sequences[0].slots, padding, sequences[1].slots]),
        block_table=torch.cat([s.block_table for s in sequences]),
        sequence=torch.cat([sequences[0].sequence, torch.zeros(3, dtype=torch.int32), sequences[1].sequence + 1]),
        max_context=48,
        prefill=True,
    )
    with torch.inference_mode():
        logits = model.compute_logits(model(batch, model.new_cache(8)))
    assert (logits[:48] - expected[0]).abs().max() < 2e-5
    assert (logits[51:] - expected[1, :31]).abs().max() < 2e-5


@pytest.mark.parametrize("family", ["deepseek_v2_grouped_yarn", "deepseek_v32", "glm4_moe"])
def test_forward_through_the_triton_kernels(family, device, triton_backend):
    """A prefill past index_topk = 8, then two tokens one by one; fp32 products on every path."""
    tensors = golden.read_tensors(DATA / "oracle" / family / "logits.safetensors")
    model = exl3_triton.load(DATA / "oracle" / family, device=device, dtype=torch.float32, progress=False)
    ids, expected = tensors["input_ids"][1].to(device), tensors["logits"][1]
    cache = model.new_cache(3)
    for start, end in ((0, 12), (12, 13), (13, 14)):
        batch = Batch.of_sequence(ids[start:end], start, [2], prefill=start == 0)
        with torch.inference_mode():
            actual = model.compute_logits(model(batch, cache))
        assert (actual.cpu() - expected[start:end]).abs().max() < 2e-5


BF16 = {
    "deepseek_v2": (1e-3, 0.94),
    "deepseek_v2_grouped_yarn": (0.06, 0.85),
    "deepseek_v2_lite": (2e-3, 0.94),
    "deepseek_v3": (4e-3, 0.90),
    "deepseek_v32": (0.06, 0.80),
    "glm4_moe": (0.01, 0.94),
    "glm4_moe_lite": (0.02, 0.88),
    "glm_moe_dsa": (0.15, 0.55),
}
"""Family -> most nats of KL(transformers in fp32 || ours in bf16) a position, least share of equal best tokens.

The reference kernels on a CPU in bf16 reach 7e-5, 0.019, 3e-4, 8e-4, 0.018, 3e-5, 0.004, 0.049 and 0.98, 0.92, 0.98, 0.95,
0.89, 0.97, 0.94, 0.67: the weights are random, so rounding moves experts and, at an index_topk of 8 of 48, index choices. On
an H200 glm4_moe reached 0.002, an expert that moved; its bound was 2e-4 before.
"""


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_divergence_in_bf16_on_a_gpu(family):
    """Whole prompts as one prefill, then the second half again token by token; 96 positions each."""
    tensors = golden.read_tensors(DATA / "oracle" / family / "logits.safetensors")
    model = exl3_triton.load(DATA / "oracle" / family, device="cuda", dtype=torch.bfloat16, progress=False)
    divergence, equal = [], []
    for ids, expected in zip(tensors["input_ids"].cuda(), tensors["logits"].cuda().double()):
        cache, pages = model.new_cache(3), [1]
        half = len(ids) // 2
        for start, end in ((0, len(ids)), *((i, i + 1) for i in range(half, len(ids)))):
            with torch.inference_mode():
                batch = Batch.of_sequence(ids[start:end], start, pages, prefill=start == 0)
                actual = model.compute_logits(model(batch, cache)).double()
            p, q = expected[start:end].log_softmax(-1), actual.log_softmax(-1)
            divergence.append((p.exp() * (p - q)).sum(-1))
            equal.append(p.argmax(-1) == q.argmax(-1))
    most, least = BF16[family]
    assert 0 < torch.cat(divergence).mean() < most
    assert torch.cat(equal).double().mean() > least


@pytest.mark.parametrize("family", FAMILIES)
def test_new_cache_has_what_the_family_needs(oracles, family):
    """Latent rows and an index key where a layer owns an indexer, or keys and values of every key-value head."""
    cache = oracles[family][0].new_cache(3)
    shapes = [[list(t.shape) for t in vars(layer).values() if t is not None] for layer in cache.layers]
    if family == "glm4_moe":
        assert shapes == [[[3, 64, 2, 32]] * 2] * 3
    else:
        own = {"glm_moe_dsa": (0, 1, 2, 6), "deepseek_v32": (0, 1, 2)}.get(family, ())
        assert shapes == [[[3, 64, 40]] + [[3, 64, 16]] * (layer in own) for layer in range(len(shapes))]
    assert cache.num_pages == 3
    assert cache.nbytes == 4 * sum(t.numel() for t in cache.tensors)


def changed_oracle(directory, family, change):
    """A copy of an oracle whose tensors `change` may alter."""
    source = DATA / "oracle" / family
    tensors = golden.read_tensors(source / "model.safetensors")
    change(tensors)
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_load_leaves_mtp_layers_aside(tmp_path, family):
    def change(tensors):
        tensors["model.layers.3.enorm.weight"] = torch.randn(64)
        tensors["model.layers.3.shared_head.head.weight"] = torch.randn(128, 64)

    path = changed_oracle(tmp_path, family, change)
    tensors = golden.read_tensors(DATA / "oracle" / family / "logits.safetensors")
    actual = exl3_triton.load(path, progress=False).logits(tensors["input_ids"][0])
    assert (actual - tensors["logits"][0]).abs().max() < 2e-5
    with pytest.raises(ValueError, match=r"2 unexpected: layers\.3\.enorm"):
        exl3_triton.load(path, progress=False, overrides={"num_nextn_predict_layers": 0})


def test_load_holds_biases_against_the_config(tmp_path):
    path = changed_oracle(tmp_path, "glm4_moe", lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias"))
    with pytest.raises(
        ValueError, match=r"layers\.1\.self_attn\.k_proj\.bias: found none, required one .*attention_bias is true"
    ):
        exl3_triton.load(path, progress=False)
    with pytest.raises(
        ValueError, match=r"layers\.0\.self_attn\.q_proj\.bias: found one, required none .*attention_bias is false"
    ):
        exl3_triton.load(path, progress=False, overrides={"attention_bias": False})


def checkpoints(testdata):
    return [testdata / "demo" / name for name in ("demo-exl3-3.0bpw-mcg", "demo-exl3-mixed-mul1")]


def check_golden(model, tensors, infix=""):
    """1e-3 relative on the last token; top-1 wherever the golden's two best are more than 0.03 apart."""
    for prompt in range(4):
        key = f"prompt{prompt}.{infix}"
        if f"{key}top1" not in tensors:
            continue
        logits = model.logits(tensors[f"prompt{prompt}.input_ids"])
        assert relative(logits[-1], tensors[f"{key}logits_last"]) < 1e-3
        clear = tensors[f"prompt{prompt}.margin"] > 0.03
        if infix:  # the stored margins belong to the dense attention: take this model's own
            best = logits.topk(2).values
            clear = best[:, 0] - best[:, 1] > 0.03
        assert clear.sum() > 5
        assert torch.equal(logits.argmax(-1)[clear], tensors[f"{key}top1"][clear])


@pytest.mark.parametrize("topk", [None, 64])
def test_logits_of_the_embedded_demo(topk):
    tensors = golden.read_tensors(DATA / "demo" / "golden.safetensors")
    model = exl3_triton.load(DEMO, progress=False, overrides={"index_topk": topk} if topk else None)
    check_golden(model, tensors, "topk64." if topk else "")


@pytest.mark.parametrize("topk", [None, 64])
@pytest.mark.parametrize("index", [0, 1], ids=["mcg", "mixed mul1"])
def test_logits_of_the_demo_checkpoints(testdata, index, topk):
    path = checkpoints(testdata)[index]
    model = exl3_triton.load(path, progress=False, overrides={"index_topk": topk} if topk else None)
    check_golden(model, golden.read_tensors(path / "golden.safetensors"), "topk64." if topk else "")


def test_logits_refuses_bad_tokens():
    model = exl3_triton.load(DATA / "oracle" / "glm_moe_dsa", progress=False, max_context=32)
    for bad in (torch.tensor([], dtype=torch.long), torch.zeros(33, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)):
        with pytest.raises(ValueError, match="1 <= T <= 32"):
            model.logits(bad)
    with pytest.raises(ValueError, match=r"0\.\.127"):
        model.logits(torch.tensor([1, 128]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.int8}, "dtype.*int8"),
        ({"max_context": 0}, "max_context.*0"),
        ({"max_context": 4097}, "max_context.*4097"),
    ],
)
def test_load_refuses_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        exl3_triton.load(DEMO, progress=False, **options)


def test_page_allocator():
    allocator = PageAllocator(4)
    assert allocator.allocate(2) == [1, 2]
    with pytest.raises(ValueError, match="2 pages of 64 tokens wanted, 1 free"):
        allocator.allocate(2)
    allocator.free([1])
    assert allocator.available == 2
    with pytest.raises(ValueError, match="page 1 freed"):
        allocator.free([1])
