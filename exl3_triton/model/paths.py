"""Which kernels a model runs on a device, with their block sizes: the line that generation begins with."""

from __future__ import annotations

from .. import tables
from ..ops.attention_tuning import select_decode, select_grouped_decode, select_grouped_prefill, select_prefill
from ..ops.tuning import Device, device_of, regimes
from .layers import Exl3Linear, PlainExperts
from .moe import RIDING_ROWS, MoE
from .transformer import Transformer


def kernel_paths(model: Transformer, device: Device | None = None) -> str:
    """One line: where launch parameters come from, and per op the blocks by number of rows. device: default the model's."""
    device = device or device_of(model.device)
    tuned = []
    if device.name:
        found = {op: len(tables.entries_for(op, *device[2:], device.processors)) for op in tables.KEYS}
        tuned = [f"{count} tuned entries for {op}" for op, count in found.items() if count]
    parts = [", ".join([f"rules of {device.family}", *tuned])]
    if any(isinstance(module, Exl3Linear) for module in model.modules()):
        blocks = [f"{each.block_m} to {each.rows}" for each in regimes(device.family) if each.rows < 1 << 20]
        last = regimes(device.family)[-1]
        above = "above decoded once for torch.mm" if last.rows < 1 << 20 else f"above {last.block_m}"
        parts.append(f"linear blocks of {', '.join(blocks)} rows, {above}")
    plans = model.expert_plans()
    if plans:
        blocks = [f"{each.block_m} to {each.rows}" for each in plans[0][0][1].regimes]
        parts.append(f"expert blocks of {', '.join(blocks)} tokens")
        if any(isinstance(module, MoE) and module.joined for module in model.modules()):
            parts.append(f"the shared expert among them up to {RIDING_ROWS}")
    if any(isinstance(module, PlainExperts) for module in model.modules()):
        parts.append("unquantized experts one by one")
    return "; ".join([*parts, _attention(model, device)])


def _attention(model: Transformer, device: Device) -> str:
    c, dtype = model.config, model.dtype
    if c.kv_lora_rank:
        widths, keys = (c.kv_lora_rank, c.qk_rope_head_dim), model.max_context
        decode, _ = select_decode(c.num_heads, *widths, dtype, device, "bf16", 1, keys, sparse=False)
        prefill = select_prefill(c.num_heads, c.head_dim, c.v_head_dim, dtype, device)
        selected = f", {c.index_topk} selected positions above {c.index_topk}" if c.indexer_kinds else ""
        tiles = f"{decode.heads} heads x {decode.keys} keys, prefill {prefill.queries} queries x {prefill.keys} keys"
        return f"MLA decode {tiles}{selected}"
    sizes = (c.num_heads, c.num_kv_heads, c.head_dim, c.v_head_dim)
    decoding, _ = select_grouped_decode(sizes, dtype, device, "bf16", 1, model.max_context)
    feeding = select_grouped_prefill(sizes, dtype, device, "bf16")
    return f"GQA decode {decoding.rows} heads x {decoding.keys} keys, prefill {feeding.rows} queries x {feeding.keys} keys"
