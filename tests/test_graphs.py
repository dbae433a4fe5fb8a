"""CUDA graphs of the decode step: the same outputs as without, whatever joins and leaves; nothing waits, nothing grows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exl3_triton
from exl3_triton import LLM
from exl3_triton.model.graphs import DecodeGraphs, buckets, use_graphs
from exl3_triton.model.layers import PlainExperts
from exl3_triton.model.sampling import SamplingBatch, SamplingParams
from exl3_triton.model.tokenizer import Tokenizer

DEMO = exl3_triton.__path__[0] + "/demo"
PROMPTS = ["In the beginning", "It is a truth universally acknowledged, that", "And Moses said unto", "The", "Call me"]
MIXED = [
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, seed=3),
    SamplingParams(max_tokens=33, repetition_penalty=1.3, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=21, temperature=1.1, seed=8, ignore_eos=True),
    SamplingParams(max_tokens=1),
]


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (2, [1, 2]), (16, [1, 2, 4, 8, 16]), (24, [1, 2, 4, 8, 16, 24])])
def test_buckets(most, sizes):
    assert buckets(most) == sizes


class Anything(nn.Module):
    def __init__(self, device, *children):
        super().__init__()
        self.device, self.parts = torch.device(device), nn.ModuleList(children)


def test_graphs_are_refused_where_they_cannot_be():
    plain = PlainExperts(*(torch.empty(1, 1, 1) for _ in range(3)))
    assert not use_graphs(Anything("cpu"), None)
    assert use_graphs(Anything("cuda"), None)
    assert not use_graphs(Anything("cuda"), False)
    assert not use_graphs(Anything("cuda", plain), None)
    with pytest.raises(ValueError, match="graphs=True: the model is on cpu, CUDA graphs need a GPU"):
        use_graphs(Anything("cpu"), True)
    with pytest.raises(ValueError, match="graphs=True: the experts are unquantized"):
        use_graphs(Anything("cuda", plain), True)
    with pytest.raises(ValueError, match="graphs=True"):
        LLM(DEMO, progress=False, graphs=True)


def test_sampling_buffers_keep_their_addresses():
    """Rows are written in place, and the rows behind them become neutral again."""
    batch = SamplingBatch.buffers(4, "cpu")
    addresses = [value.data_ptr() for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    batch.load(MIXED[1:4], [3, 4, 8])
    assert batch.kind == (True, True, True, 2)
    batch.load(MIXED[:1], [1])
    assert batch.kind == (False, False, False, None)
    want = SamplingBatch.from_params([MIXED[0], *[SamplingParams()] * 3], [1, 0, 0, 0])
    for name, value in vars(want).items():
        assert torch.equal(getattr(batch, name), value) if isinstance(value, torch.Tensor) else getattr(batch, name) == value
    assert [value.data_ptr() for value in vars(batch).values() if isinstance(value, torch.Tensor)] == addresses
    assert torch.equal(batch.head(2).temperature, batch.temperature[:2])


def texts(llm: LLM, params):
    outputs = list(llm.generate(PROMPTS, params))
    return [[(o.token_id, o.logprobs, o.finish_reason) for o in outputs if o.index == i] for i in range(len(PROMPTS))]


@pytest.mark.gpu
@pytest.mark.parametrize("speculate", [0, 3])
def test_outputs_equal_those_without_graphs(speculate):
    """Bit for bit: a bucket's kernels are those of its rows, and padding rows change nothing."""
    model = exl3_triton.load(DEMO, device="cuda", progress=False, mtp=speculate > 0)
    tokenizer = Tokenizer.from_dir(DEMO)
    options = {"max_batch": 4, "speculate": speculate, "cache_tokens": 1024, "tokenizer": tokenizer}
    eager, graphed = LLM(model, graphs=False, **options), LLM(model, graphs=True, **options)
    assert "CUDA graphs" in graphed.describe()
    assert "CUDA graphs" not in eager.describe()
    for params in (SamplingParams(max_tokens=50, ignore_eos=True), MIXED):
        want = texts(eager, params)
        assert texts(graphed, params) == want
        assert sum(map(len, want)) > 50
    if speculate:
        assert graphed.speculation == eager.speculation


@pytest.mark.gpu
def test_recording_never_waits_for_the_device(monkeypatch):
    record, recorded = DecodeGraphs._record, []

    def strict(self, key, step):
        torch.cuda.set_sync_debug_mode("error")
        try:
            record(self, key, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        recorded.append(key)

    monkeypatch.setattr(DecodeGraphs, "_record", strict)
    llm = LLM(DEMO, device="cuda", progress=False, max_batch=4)
    texts(llm, MIXED)
    assert recorded
    assert len(llm._graphs) == len(recorded) * 3  # 1, 2 and 4 rows


@pytest.mark.gpu
def test_memory_is_constant_over_a_thousand_tokens():
    llm = LLM(DEMO, device="cuda", progress=False, max_context=1100, max_batch=2)
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    used = []
    for count, _ in enumerate(llm.generate("In the beginning", params)):
        if count % 100 == 99:
            used.append(torch.cuda.memory_allocated())
    assert count == 999
    assert len(set(used)) == 1


@pytest.mark.gpu
@pytest.mark.slow
def test_memory_is_constant_over_ten_thousand_steps():
    llm = LLM(DEMO, device="cuda", progress=False, max_context=600, max_batch=4)
    used = []
    for _ in range(20):
        assert len(list(llm.generate(["The king"] * 2, SamplingParams(max_tokens=500, ignore_eos=True)))) == 1000
        used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len(set(used[2:])) == 1
