"""Which differences between two ways of computing the same tokens are ties."""

from __future__ import annotations

import torch


@torch.inference_mode()
def moved_by_rounding(model, ids: list[int], draws: int = 16) -> float:
    """How far noise of one rounding, in the model's dtype, of the embedding and of every sublayer moves a logit behind `ids`.

    A router's near-tie turns rounding into another expert: on the demo in fp16 that moves logits by up to 4, where they
    otherwise move by 0.01.
    """
    tokens, embedding = torch.tensor(ids), model.embedding
    plain, kept, moved = model.logits(tokens)[-1], embedding.clone(), 0.0
    step = torch.finfo(model.dtype).eps / 2

    def noise(tensor):
        return tensor * (1 + step * torch.randn_like(tensor))

    def noisy(_module, _inputs, output):  # attention returns its selection of positions as well
        return (noise(output[0]), *output[1:]) if isinstance(output, tuple) else noise(output)

    parts = [part for block in model.blocks for part in (block.attention, block.feed_forward)]
    hooks = [part.register_forward_hook(noisy) for part in parts]
    try:
        for _ in range(draws):
            embedding.copy_(kept.float() * (1 + step * torch.randn(kept.shape, device=kept.device)))
            moved = max(moved, (model.logits(tokens)[-1] - plain).abs().max().item())
    finally:
        embedding.copy_(kept)
        for hook in hooks:
            hook.remove()
    return moved
