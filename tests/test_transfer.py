"""Weights on their way to a device: what arrives, and how much memory it takes."""

from types import SimpleNamespace

import pytest
import torch
from test_rank_sliced import LAYOUTS, fabricate

from exl3_triton import load
from exl3_triton.format import ExpertWeights
from exl3_triton.model import transfer
from exl3_triton.model.transfer import Uploader


class Pretended(Uploader):
    """The way to a GPU with CPU tensors in its place: buffers are packed and sent as they would be."""

    def __init__(self, monkeypatch, staging_bytes):
        super().__init__(torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(wait_stream=lambda _: None))
        self._bytes, self.sent = staging_bytes, []

    def _prepare(self):
        self._buffers = [torch.zeros(self._bytes, dtype=torch.uint8) for _ in range(2)]

    def _next_buffer(self, dtype):
        self._turn ^= 1
        return self._buffers[self._turn].view(dtype)

    def _send(self, target, staged):
        self.sent.append(staged.nbytes)
        target.copy_(staged)


SOURCES = {
    "small ones": [torch.arange(12.0), torch.arange(20.0).view(4, 5), torch.tensor(7.0)],
    "larger than a buffer": [torch.arange(1000.0), torch.arange(600.0).view(3, 200)],
    "a cut by columns": [torch.arange(4096.0).view(16, 4, 64)[:, 1:3]],
    "a cut by columns of long rows": [torch.arange(4096.0).view(2, 2048)[:, 1024:]],
    "transposed": [torch.arange(600.0).view(20, 30).T],
    "half precision": [torch.arange(333).half(), torch.arange(40).bfloat16()],
}


@pytest.mark.parametrize("staging_bytes", [256, 4096])
@pytest.mark.parametrize("sources", SOURCES.values(), ids=SOURCES)
def test_fill_writes_all_elements_in_order(monkeypatch, sources, staging_bytes):
    expected = torch.cat([source.reshape(-1).float() for source in sources])
    target = torch.empty(expected.numel())
    Uploader(torch.device("cpu")).fill(target, sources)
    assert torch.equal(target, expected)
    target = torch.empty(expected.numel())
    uploader = Pretended(monkeypatch, staging_bytes)
    uploader.fill(target, sources)
    assert torch.equal(target, expected)
    assert sum(uploader.sent) == target.nbytes
    assert max(uploader.sent) <= staging_bytes


def test_place_on_the_cpu_copies_only_what_it_must():
    uploader, source = Uploader(torch.device("cpu")), torch.arange(24.0).view(4, 6)
    assert uploader.place(source) is source
    assert uploader.place(source, torch.float16).dtype == torch.float16
    cut = uploader.place(source[:, 2:4])
    assert cut.is_contiguous()
    assert torch.equal(cut, source[:, 2:4])


def tensors_of(model):
    """Everything that was loaded, by name."""
    found = dict(model.named_buffers())
    for name, module in model.named_modules():
        for rank, experts in enumerate(getattr(module, "experts", None) or ()):
            assert isinstance(experts, ExpertWeights)
            for projection, slab in zip(("gate", "up", "down"), experts.projections, strict=True):
                found |= {
                    f"{name}.{rank}.{projection}.{part}": getattr(slab, part) for part in ("words", "table", "suh", "svh")
                }
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("staging_bytes", [8192, 64 << 20])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_load_on_a_gpu_brings_the_same_bytes(tmp_path, monkeypatch, layout, staging_bytes):
    monkeypatch.setattr(transfer, "STAGING_BYTES", staging_bytes)
    path = fabricate(**layout).write(tmp_path, shards=3)
    models = [load(path, device=device, dtype=torch.float16, progress=False, mtp=True) for device in ("cpu", "cuda")]
    expected, found = (tensors_of(model) for model in models)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].cpu(), tensor), name


@pytest.mark.gpu
def test_load_takes_no_device_memory_but_what_stays(tmp_path):
    """Slabs are filled in place: the peak is within 2 % of what remains."""
    sliced = fabricate(2, 1024, bits=4)
    sliced.config["n_routed_experts"] = 64
    for name in sliced.matching(".mlp.gate."):
        sliced.tensors[name] = torch.cat([sliced.tensors[name]] * 16)
    path = sliced.rank_slice(2, bits=4).write(tmp_path)
    load(path, device="cuda", progress=False)  # what torch allocates once
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load(path, device="cuda", progress=False)
    kept, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    assert kept > 2 * 3 * 64 * 128 * 1024 // 2  # two layers, three projections, 64 experts of 4 bits
    assert peak <= 1.02 * kept
    assert model.device.type == "cuda"
