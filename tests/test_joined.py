"""A shared expert stored behind the routed ones: what joins, and that it gives the sum of both however it runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_moe import TOLERANCE

import exl3_triton
from exl3_triton import reference
from exl3_triton.model.config import ModelConfig
from exl3_triton.model.dummy import dummy_model
from exl3_triton.model.memory import weight_bytes
from exl3_triton.model.moe import RIDING_ROWS
from exl3_triton.model.parallel import Shard

DEMO = exl3_triton.__path__[0] + "/demo"


def exact(moe, x):
    """The layer in float64 from the decoded matrices: routed experts by themselves, and the shared one added."""
    c, x = moe.config, x.double()
    bias = None if moe.correction_bias is None else moe.correction_bias.cpu()
    rule = (c.experts_per_token, c.scoring, c.n_group, c.topk_group, c.norm_topk_prob, c.routed_scaling_factor)
    weights, ids = reference.router(x.float(), moe.gate.cpu(), bias, *rule)
    matrices = [[p.expert(e).to("cpu") for p in moe.experts[0].projections] for e in range(c.num_experts)]

    def run(rows, gate, up, down):
        gated = torch.nn.functional.silu(reference.linear(rows, gate)) * reference.linear(rows, up)
        return reference.linear(gated, down)

    total = run(x, *(layer.weight.to("cpu") for layer in (moe.shared.gate, moe.shared.up, moe.shared.down)))
    for row in range(len(x)):
        for weight, expert in zip(weights[row].double(), ids[row].tolist()):
            total[row] += weight * run(x[row], *matrices[expert])
    return total


@pytest.fixture(scope="module")
def layer():
    return exl3_triton.load(DEMO, progress=False).blocks[1].feed_forward


@pytest.mark.parametrize("rows", [1, 5, RIDING_ROWS, RIDING_ROWS + 1])
def test_riding_and_separate_give_the_sum_of_both(layer, rows):
    assert layer.joined
    assert layer.experts[0].num_experts == layer.config.num_experts + 1
    x = torch.randn(rows, layer.config.hidden_size)
    want = exact(layer, x)
    with torch.inference_mode():
        got = layer(x)
    assert want.norm() > 0
    assert (got - want).norm() / want.norm() < 1e-5  # fp32 sums of 256 and 384 terms


def test_riding_through_the_kernels(device, triton_backend):
    """The tolerance of `ops.moe` itself."""
    model = exl3_triton.load(DEMO, device=device, dtype=torch.float16, progress=False)
    moe = model.blocks[1].feed_forward
    for rows in (1, 4, RIDING_ROWS + 1):
        x = torch.randn(rows, moe.config.hidden_size).half()
        want = exact(moe, x)
        with torch.inference_mode():
            got = moe(x.to(device)).double().cpu()
            alone = torch.cat([moe(x[i : i + 1].to(device)) for i in range(rows)]).double().cpu()
        assert (got - want).norm() / want.norm() < TOLERANCE
        if rows <= RIDING_ROWS:
            assert torch.equal(got, alone)


def test_the_joined_expert_is_stored_once(layer):
    """Its layer by itself sees the slabs' memory, and sizes count it once."""
    slabs = layer.experts[0].projections
    for linear, slab in zip((layer.shared.gate, layer.shared.up, layer.shared.down), slabs):
        last = slab.expert(slab.num_experts - 1)
        assert linear.weight.trellis.data_ptr() == last.trellis.data_ptr()
        assert linear.weight.foldable
    model = exl3_triton.load(DEMO, progress=False)
    distinct = {}
    for module in model.modules():
        for tensor in module.buffers(recurse=False):
            distinct[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        for slices in [getattr(module, "experts", ())] if isinstance(getattr(module, "experts", None), tuple) else []:
            for each in slices:
                for slab in each.projections:
                    for tensor in (slab.words, slab.table, slab.suh, slab.svh):
                        distinct[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert weight_bytes(model) == pytest.approx(sum(distinct.values()), rel=1e-3)  # buffers are views of mapped files


@pytest.mark.parametrize(
    ("changes", "options", "joined"),
    [
        ({}, {}, True),
        ({"num_shared_experts": 2}, {}, False),  # of another width
        ({}, {"experts_only": True}, False),  # not quantized
        ({}, {"shard": Shard(0, 2)}, True),
        ({}, {"shard": Shard(0, 2), "expert_parallel": True}, False),
    ],
)
def test_what_joins(changes, options, joined):
    config = replace(ModelConfig.from_dir(DEMO), **changes)
    model = dummy_model(config, device="meta", max_context=64, bits=3, **options)
    for block in model.blocks[1:]:
        moe = block.feed_forward
        assert moe.joined == joined
        assert moe.experts[0].num_experts == len(moe.experts[0].gate.layout)
        assert moe.shared is not None
