"""Random experts and routes for the tests of the mixture of experts."""

from __future__ import annotations

import torch

from exl3_triton.format import ExpertProjection, ExpertWeights, padded_size


def _scales(rows: int, width: int, mean: float) -> torch.Tensor:
    signs = torch.randint(0, 2, (rows, width)) * 2 - 1
    return (signs * mean * (0.5 + torch.rand(rows, width))).half()


def make_projection(formats, inputs, outputs, *, shared_suh=False, shared_svh=False, gain=1.0):
    """Experts of the given (2K, codebook) pairs: any bits are a valid trellis; outputs of the inputs' size times gain."""
    sizes = {"shared_suh": shared_suh, "shared_svh": shared_svh}
    projection = ExpertProjection.allocate(formats, padded_size(inputs), padded_size(outputs), device="cpu", **sizes)
    projection.words.copy_(torch.randint(-(2**15), 2**15, projection.words.shape, dtype=torch.int16))
    projection.suh.copy_(_scales(*projection.suh.shape, 0.8 / inputs**0.5))
    projection.svh.copy_(_scales(*projection.svh.shape, gain))
    return projection


def make_experts(num_experts, hidden, intermediate, formats, *, shared=False, gain=1.0, device="cpu"):
    """Experts whose (2K, codebook) cycle through `formats`, starting elsewhere in each projection; gate and up differ."""
    cycles = [[formats[(e + start) % len(formats)] for e in range(num_experts)] for start in range(3)]
    gate = make_projection(cycles[0], hidden, intermediate, shared_suh=shared)
    up = make_projection(cycles[1], hidden, intermediate, shared_suh=shared)
    down = make_projection(cycles[2], intermediate, hidden, shared_svh=shared, gain=gain)
    return ExpertWeights(gate, up, down, hidden, intermediate).to(device)


def make_routes(tokens, top_k, num_experts, device="cpu", dtype=torch.int32):
    """(ids [T, k] without repetition in a row, weights fp32 [T, k])."""
    ids = torch.rand(tokens, num_experts, device=device).topk(top_k).indices.to(dtype)
    return ids, torch.rand(tokens, top_k, device=device) + 0.1
