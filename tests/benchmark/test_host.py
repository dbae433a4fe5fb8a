"""pytest-benchmark: what a call costs the host, and what the reference path costs on a CPU. `make bench`."""

from __future__ import annotations

import pytest
import torch

import exl3_triton
from exl3_triton import ops, reference
from exl3_triton.format import Codebook, TrellisWeight
from exl3_triton.model.cache import Batch

DEMO = exl3_triton.__path__[0] + "/demo"


def random_weight(k, n, bits, codebook, device="cpu"):
    trellis = torch.randint(-(1 << 15), 1 << 15, (k // 16, n // 16, int(16 * bits)), dtype=torch.int16, device=device)
    suh, svh = (torch.randn(size, device=device).half() for size in (k, n))
    return TrellisWeight(trellis, suh, svh, codebook)


@pytest.mark.parametrize(("bits", "codebook"), [(3, Codebook.MCG), (2.5, Codebook.MUL1)], ids=["mcg.3", "mul1.2.5"])
def test_decode_on_the_cpu(benchmark, bits, codebook):
    weight = random_weight(512, 512, bits, codebook)
    decoded = benchmark(reference.decode, weight.trellis, codebook)
    assert decoded.abs().max() > 1


def test_linear_on_the_cpu(benchmark):
    weight = random_weight(512, 512, 3, Codebook.MCG)
    x = torch.randn(1, 512)
    assert benchmark(ops.linear, x, weight).abs().max() > 0


def test_decode_step_of_the_demo_on_the_cpu(benchmark):
    model = exl3_triton.load(DEMO, progress=False)
    cache = model.new_cache(3)
    batch = Batch.of_sequence(torch.tensor([5]), 20, [1, 2], prefill=False, max_context=64)

    @torch.inference_mode()
    def step():
        return model.compute_logits(model(batch, cache))

    assert benchmark(step).shape == (1, model.config.vocab_size)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16])
def test_linear_call_overhead_on_a_gpu(benchmark, m):
    """Host time of an eager call: the kernels of this small matrix take less, so the queue never fills."""
    weight = random_weight(512, 512, 3, Codebook.MCG, "cuda")
    x = torch.randn(m, 512, device="cuda", dtype=torch.float16)
    ops.linear(x, weight)
    torch.cuda.synchronize()
    benchmark.pedantic(ops.linear, (x, weight), rounds=200, warmup_rounds=20)
