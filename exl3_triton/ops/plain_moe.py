"""Unquantized routed experts: for reference checkpoints and tests. Quantized experts go through `ops.moe`."""

import torch
from torch import Tensor

from .. import reference
from ._dispatch import call


def _plain_moe_body(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("plain_moe: unquantized experts are visited one by one, which a CUDA graph cannot capture")
    routed = torch.zeros(*topk_ids.shape, down.shape[1], dtype=torch.float32, device=x.device)
    for e in topk_ids.unique().tolist():
        if e < 0:
            continue
        token, slot = torch.where(topk_ids == e)
        rows = x[token].to(gate.dtype)
        act = reference.swiglu(rows @ gate[e].T, rows @ up[e].T).to(down.dtype)
        routed[token, slot] = (act @ down[e].T).float()
    return (routed * topk_weights.float()[..., None]).sum(1)


_plain_moe_op = torch.library.custom_op("exl3_triton::plain_moe", _plain_moe_body, mutates_args=())


@_plain_moe_op.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], down.shape[1], dtype=torch.float32)


def plain_moe(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """Sum over k of topk_weights * down[e] (silu(gate[e] x) * up[e] x), e = topk_ids.

    x [T, hidden]; gate, up [E, intermediate, hidden]; down [E, hidden, intermediate]; topk_ids int [T, k] in 0..E-1, or
    negative for nothing; topk_weights [T, k] -> fp32 [T, hidden]. Computes in the weights' dtype, sums in fp32. Raises
    ValueError on shapes.
    """
    if x.dim() != 2 or gate.dim() != 3 or x.shape[1] != gate.shape[2] or topk_ids.shape != topk_weights.shape:
        found = f"x {list(x.shape)}, gate {list(gate.shape)}, ids {list(topk_ids.shape)}, weights {list(topk_weights.shape)}"
        required = "x [T, hidden], gate [E, intermediate, hidden], ids and weights [T, k]"
        raise ValueError(f"plain_moe: found {found}; required {required}")
    return call(_plain_moe_op, _plain_moe_body, x, gate, up, down, topk_ids, topk_weights)
