"""Memory: what the formulas say against what is allocated, and how the cache is sized and refused."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from fabricate import CONFIG, GQA, Fabricated

import exl3_triton
from exl3_triton import LLM, plan
from exl3_triton.format import Codebook
from exl3_triton.model import memory
from exl3_triton.model.cache import Batch, KVCache
from exl3_triton.model.checkpoint import TensorReader
from exl3_triton.model.config import ModelConfig
from exl3_triton.model.dummy import dummy_model
from exl3_triton.model.memory import GIB, Needs, Pass, arena_bytes, cache_page_bytes, cache_pages, scratch_bytes, weight_bytes
from exl3_triton.ops._dispatch import override_backend
from exl3_triton.ops.tuning import Device

CPU = torch.device("cpu")
MLA = {**CONFIG, "max_position_embeddings": 1024, "index_topk": 64}
DENSE = {
    **{key: value for key, value in MLA.items() if not key.startswith("index") and key != "model_type"},
    "model_type": "deepseek_v3",
}  # fmt: skip
FAMILIES = pytest.mark.parametrize("family", [MLA, DENSE, GQA], ids=["sparse", "latent", "grouped"])
DEMO = exl3_triton.__path__[0] + "/demo"


def model_of(family, **options):
    return dummy_model(ModelConfig.from_dict({**family, "max_position_embeddings": 1024}), max_context=1024, **options)


@FAMILIES
def test_weight_bytes(family):
    """Every storage of the model once; the same for sizes alone."""
    model = model_of(family, bits=2.5, codebook=Codebook.MUL1)
    tensors = list(model.buffers())
    for block in model.blocks:
        for experts in getattr(block.feed_forward, "experts", ()):
            tensors += [t for p in experts.projections for t in vars(p).values() if isinstance(t, torch.Tensor)]
    held = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
    assert weight_bytes(model) == held > 1e5
    sizes = model_of(family, bits=2.5, codebook=Codebook.MUL1, device="meta", dtype=torch.float32)
    assert weight_bytes(sizes) == held


@FAMILIES
def test_arena_and_page_bytes(family):
    model = model_of(family)
    sizes = model_of(family, device="meta", dtype=torch.float32)
    model.plan_experts()
    arenas = {block.feed_forward.bound.arena.data_ptr(): block.feed_forward.bound.arena for block in list(model.blocks)[1:]}
    assert arena_bytes(sizes) == sum(arena.nbytes for arena in arenas.values()) > 0
    assert cache_page_bytes(sizes, "bf16") == model.new_cache(5).nbytes // 5


def test_page_bytes_of_a_draft():
    model = model_of(MLA, mtp=True)
    both = model.new_cache(5).nbytes + model.mtp.new_cache(5).nbytes
    assert cache_page_bytes(model, "bf16") == both // 5
    assert cache_page_bytes(dummy_model(ModelConfig.preset("glm-4.5-air"), device="meta", max_context=64), "fp8") == (
        46 * 64 * 2 * 8 * (128 + 4)
    )


def peak_of(run):
    """Most bytes that tensors held at once during `run`, beyond what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = most = 0
    for _, change in changes:
        held += change
        most = max(most, held)
    return most


@pytest.fixture
def without_kernels(monkeypatch):
    """Launchers allocate as on a GPU, kernels do nothing: only sizes count here."""
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="needs Triton")
    monkeypatch.setattr(interpreter.InterpretedFunction, "run", lambda *arguments, **options: None)
    with override_backend("triton"):
        yield


def passes():
    for rows, context in ((1, 1), (40, 40), (200, 200), (200, 900), (255, 255)):
        yield pytest.param(Pass(rows, 1, 1, context, True, CPU), id=f"prefill {rows} of {context}")
    for rows, context in ((1, 30), (1, 1000), (5, 300), (64, 500), (65, 500)):
        yield pytest.param(Pass(rows, rows, rows, context, False, CPU), id=f"decode {rows} at {context}")


@FAMILIES
@pytest.mark.parametrize("work", list(passes()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_scratch_bounds_what_is_allocated(without_kernels, family, work, dtype):
    """The bound holds, and is no more than half as large again (and 16 KiB of small tensors)."""
    model = model_of(family, dtype=dtype)
    model.plan_experts()
    pages = 16
    cache = model.new_cache(1 + pages)
    each = work.rows // work.sequences
    table = torch.arange(1, 1 + pages, dtype=torch.int32).expand(work.sequences, pages).contiguous()
    positions = torch.arange(work.context - each, work.context).repeat(work.sequences)
    sequence = torch.arange(work.sequences, dtype=torch.int32).repeat_interleave(each)
    tokens = torch.zeros(work.rows, dtype=torch.int64)
    batch = Batch(tokens, positions, positions, table, sequence, max_context=work.context, prefill=work.prefill)

    @torch.inference_mode()
    def run():
        hidden = model(batch, cache)
        model.compute_logits(hidden[: work.heads])

    run()
    peak, bound = peak_of(run), scratch_bytes(model, work)
    assert peak > 4 * work.rows * model.config.hidden_size
    assert peak <= bound + (1 << 14)
    assert bound <= 1.5 * peak + (1 << 14)


def glm(device="meta", **options):
    return dummy_model(replace(ModelConfig.preset("glm-4.5-air")), device=device, max_context=8192, **options)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 100 GiB, 96 of them free, by its numbers alone; returns a dict in which they can be changed."""
    found = {"free": 96 * GIB, "total": 100 * GIB}
    monkeypatch.setattr(memory, "device_memory", lambda device: (found["free"], found["total"]))
    return found


OPTIONS = {"cache_tokens": None, "context": 8192, "max_batch": 16, "gpu_memory": 0.9, "kv": "bf16", "chunk": 512}


def needs_of(model, device=CPU, **options):
    sizes = {"kv": "bf16", "chunk": 512, "max_batch": 16, "max_context": 8192, **options}
    return Needs.of(model, device, **sizes)


@pytest.fixture
def host_is_a_gpu(monkeypatch):
    """Launch parameters of `cuda` tensors as they are on a CPU: there is no GPU to ask."""
    for module in (memory, plan):
        monkeypatch.setattr(module, "device_of", lambda device: Device("host", 4))
    return torch.device("cuda")


def test_cache_takes_what_is_left(gpu, host_is_a_gpu):
    """In use in the end: weights, arenas, scratch, the pages, the reserved one, and what others had before."""
    model = glm(dtype=torch.float16)
    needs = needs_of(model, host_is_a_gpu)
    assert needs.weights == pytest.approx(106.9e9 * 3 / 8, rel=0.05)
    assert needs.page == 46 * 64 * 4096
    pages = cache_pages(model, host_is_a_gpu, **{**OPTIONS, "max_batch": 64})
    assert pages < 64 * 128
    needs = needs_of(model, host_is_a_gpu, max_batch=64)
    used = 4 * GIB + needs.weights + needs.arenas + needs.scratch + (pages + 1) * needs.page
    assert 0 <= 90 * GIB - used < needs.page
    # no more than max_batch full contexts
    assert cache_pages(model, host_is_a_gpu, **{**OPTIONS, "max_batch": 2}) == 2 * 128
    # half of the fraction, and what another process took, are gone
    assert cache_pages(model, host_is_a_gpu, **{**OPTIONS, "max_batch": 64, "gpu_memory": 0.8}) < pages
    gpu["free"] -= 10 * GIB
    assert pages - cache_pages(model, host_is_a_gpu, **{**OPTIONS, "max_batch": 64}) == pytest.approx(
        10 * GIB / needs.page, abs=1
    )


def test_a_cache_that_does_not_fit_is_refused(gpu, host_is_a_gpu):
    model = glm(dtype=torch.float16)
    assert cache_pages(model, host_is_a_gpu, **{**OPTIONS, "cache_tokens": 1000}) == 16
    with pytest.raises(ValueError, match="cache_tokens") as error:
        cache_pages(model, host_is_a_gpu, **{**OPTIONS, "cache_tokens": 1 << 20})
    message = str(error.value)
    assert "cache_tokens: 1048576 tokens take 184.00 GiB; beside weights 38." in message
    assert "(5696 a GiB) with gpu_memory=0.9: 100.00 GiB in all, 96.00 GiB free before loading" in message
    room = int(message.split("room for ")[1].split()[0])
    assert cache_pages(model, host_is_a_gpu, **{**OPTIONS, "cache_tokens": room}) == room // 64
    gpu["free"] = 40 * GIB
    with pytest.raises(ValueError, match=r"not one page of 64 tokens fits; .* room for 0 tokens"):
        cache_pages(model, host_is_a_gpu, **OPTIONS)


def test_llm_refuses_before_weights_are_read(tmp_path, monkeypatch):
    """The policy is asked with the headers' sizes; what it raises ends the loading."""
    path = Fabricated().write(tmp_path)
    monkeypatch.setattr(TensorReader, "read", lambda *_: pytest.fail("tensor data was read"))

    def pages(model, device, **options):
        assert model.device.type == "meta"
        assert weight_bytes(model) > 0
        raise ValueError("cache_tokens: too many")

    monkeypatch.setattr("exl3_triton.model.runner.cache_pages", pages)
    with pytest.raises(ValueError, match="cache_tokens: too many"):
        LLM(path, cache_tokens=1 << 30, progress=False)


def test_llm_on_a_cpu_has_one_context():
    llm = LLM(DEMO, progress=False, max_context=300)
    assert llm.cache.num_pages == 1 + 5
    assert f"{llm.cache.tokens_per_gib} tokens a GiB of cache, 320 in all" in llm.describe()
    assert LLM(DEMO, progress=False, max_context=300, cache_tokens=1000).cache.num_pages == 1 + 16


@pytest.mark.parametrize("fraction", [0, 1.1, -1])
def test_llm_refuses_a_fraction_out_of_range(fraction):
    with pytest.raises(ValueError, match=f"gpu_memory: found {fraction}, required a number above 0 and at most 1"):
        LLM(DEMO, gpu_memory=fraction)


def test_tokens_a_gib_are_those_of_a_cache():
    config = ModelConfig.from_dict(GQA)
    cache = KVCache.allocate(config, 9, dtype=torch.float16, device=CPU)
    model = dummy_model(config, dtype=torch.float16, max_context=64)
    assert GIB // cache_page_bytes(model, "bf16") * 64 == pytest.approx(cache.tokens_per_gib, rel=1e-3)


def gpu_peak(run):
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["glm-4.5-air", "glm-5.2", "deepseek-v3"])
@pytest.mark.parametrize(
    ("rows", "context", "prefill"), [(2048, 2048, True), (2048, 8192, True), (8, 8192, False), (64, 4096, False)]
)
def test_scratch_of_published_sizes_on_a_gpu(name, rows, context, prefill):
    """One dense and one sparse layer of the real widths: the bound holds, within a factor of two and 32 MiB of libraries."""
    config = ModelConfig.preset(name)
    kinds = {"layer_kinds": ("dense", "sparse"), "indexer_kinds": config.indexer_kinds[:2], "num_experts": 32, "n_group": 1}
    config = replace(config, num_layers=2, topk_group=1, **kinds)
    model = dummy_model(config, device="cuda", max_context=8192)
    assert weight_bytes(model) <= torch.cuda.memory_allocated()
    sequences = 1 if prefill else rows
    each, pages = rows // sequences, context // 64
    cache = model.new_cache(1 + sequences * pages)
    table = 1 + torch.arange(sequences * pages, dtype=torch.int32, device="cuda").view(sequences, pages)
    positions = torch.arange(context - each, context, device="cuda").repeat(sequences)
    sequence = torch.arange(sequences, dtype=torch.int32, device="cuda").repeat_interleave(each)
    slots = table[sequence.long(), positions // 64].long() * 64 + positions % 64
    tokens = torch.zeros(rows, dtype=torch.int64, device="cuda")
    batch = Batch(tokens, positions, slots, table, sequence, max_context=context, prefill=prefill)
    heads = 1 if prefill else rows

    @torch.inference_mode()
    def run():
        model.compute_logits(model(batch, cache)[-heads:])

    run()
    peak = gpu_peak(run)
    bound = scratch_bytes(model, Pass(rows, sequences, heads, context, prefill, torch.device("cuda")))
    assert peak <= bound + (32 << 20)
    assert bound <= 2 * peak + (32 << 20)


@pytest.mark.gpu
def test_llm_on_a_gpu_stays_within_its_fraction():
    """The demo with a cache of what is left: allocated in the end no more than half of the card, and it generates."""
    llm = LLM(DEMO, device="cuda", progress=False, gpu_memory=0.5, max_batch=4)
    assert llm.cache.num_pages - 1 <= 4 * -(-llm.max_context // 64)
    list(
        llm.generate(
            ["In the beginning"] * 4, exl3_triton.SamplingParams(max_tokens=32, temperature=1.0, top_p=0.9, logprobs=2)
        )
    )
    free, total = torch.cuda.mem_get_info()
    assert total - free <= 0.5 * total
    with pytest.raises(ValueError, match=r"cache_tokens: 10000000000 tokens take"):
        LLM(DEMO, device="cuda", progress=False, cache_tokens=10_000_000_000)
