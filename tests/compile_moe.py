"""Compile what `ops.moe` and `ops.router` launch, for GPUs that need not be there: run the launchers on meta tensors, record.

    python tests/compile_moe.py 8,64 sm_120 [sm_90 ...]      (blocks, targets) prints one JSON object a kernel

A process of its own, without TRITON_INTERPRET, which turns kernels into Python functions when they are defined.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from typing import Any

import torch

from autotune.audit import audit, target
from autotune.moe import family_of
from exl3_triton.format import Codebook
from exl3_triton.ops.layout import K_ORDER4, layout_variant_for
from exl3_triton.ops.tuning import Device
from exl3_triton.plan import DispatchPolicy, MoeSpec, plan_moe

# by name, because `exl3_triton.ops.moe` is the op
moe, router = (importlib.import_module(f"exl3_triton.ops.{name}") for name in ("moe", "router"))

TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
MIXED = ((4, Codebook.MCG), (6, Codebook.MCG), (8, Codebook.MCG))  # (2K, codebook): rates of one layer


class Recorder:
    """Stands in for a kernel in its module: a launch is compiled and audited, each specialisation once."""

    def __init__(self, kernel: Any, gpu: Any, found: dict[str, dict], labels: dict) -> None:
        self.kernel, self.gpu, self.found, self.labels = kernel, gpu, found, labels

    def __getitem__(self, grid: Any) -> Any:
        return self.compile

    def compile(self, *args: Any, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in kwargs}
        values = dict(zip(self.kernel.arg_names, args)) | kwargs
        constants = {p.name: values.pop(p.name) for p in self.kernel.params if p.is_constexpr}
        scalar = lambda value: "fp32" if isinstance(value, float) else "i32"
        kinds = {name: TYPES[v.dtype] if isinstance(v, torch.Tensor) else scalar(v) for name, v in values.items()}
        key = f"{self.kernel.fn.__name__} {constants} {kinds} {options}"
        if key not in self.found:
            report = audit(self.kernel, kinds, constants, self.gpu, options, labels=dict(self.labels))
            self.found[key] = asdict(report)


def record(module: Any, names: tuple[str, ...], gpu: Any, found: dict[str, dict], labels: dict) -> None:
    for name in names:
        kernel = getattr(module, name)
        kernel = kernel.kernel if isinstance(kernel, Recorder) else kernel
        setattr(module, name, Recorder(kernel, gpu, found, labels))


def meta_experts(spec: MoeSpec) -> list[list[torch.Tensor]]:
    """Per projection the tensors that the op takes, without memory."""
    hidden, intermediate, experts, _ = spec.dims
    new = lambda *shape, dtype=torch.float16: torch.empty(*shape, dtype=dtype, device="meta")
    sizes = ((hidden, intermediate), (hidden, intermediate), (intermediate, hidden))
    words, table = new(experts * hidden * intermediate // 2, dtype=torch.int16), new(experts, 3, dtype=torch.int64)
    return [[words, table, new(experts, k), new(experts, n)] for k, n in sizes]


def launch(spec: MoeSpec, formats: tuple[tuple[int, int], ...], block_m: int, tokens: int) -> None:
    plan = plan_moe(spec, max_tokens=tokens, block_m=block_m, policy=DispatchPolicy(max_m=64))
    (regime,) = plan.regimes
    scratch = moe.carve(torch.empty(plan.arena_bytes, dtype=torch.uint8, device="meta"), spec.dims, regime)
    x = torch.empty(tokens, spec.hidden, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(tokens, spec.top_k, dtype=torch.int32, device="meta")
    codes = tuple(sorted(4 * twice_bits + codebook for twice_bits, codebook in formats))
    gate, up, down = meta_experts(spec)
    sides = (gate, up, down, (codes,) * 3, spec.intermediate)
    moe._launch_moe(x, ids, ids.float(), *sides, spec.dims, regime, scratch, None, None, x)


def main() -> None:
    for name in sys.argv[2:]:
        gpu = target(name)
        found: dict[str, dict] = {}
        labels: dict[str, Any] = {}
        moe.device_of = lambda _, gpu=gpu: Device(family_of(gpu), 1)  # type: ignore[assignment]
        moe.overlap = lambda *_, gpu=gpu: {"OVERLAP": gpu.backend == "cuda" and gpu.arch >= 90}  # type: ignore[assignment]
        older_order = layout_variant_for("cuda", 80) & K_ORDER4 if gpu.backend == "cuda" else 0
        moe._variant = lambda _, block_m, gpu=gpu, older=older_order: (  # type: ignore[assignment]
            layout_variant_for(gpu.backend, gpu.arch) | (older if block_m < 16 else 0)
        )
        record(moe, ("prologue_kernel", "expert_gemm_kernel", "activation_kernel", "combine_kernel"), gpu, found, labels)
        record(router, ("_logits_kernel", "_select_kernel"), gpu, found, labels)
        uniform = MoeSpec(6144, 512, 256, 8, (3,), (Codebook.MCG,))  # GLM-5.2, one rank of four
        for formats in (MIXED[1:2], MIXED):
            for block_m in map(int, sys.argv[1].split(",")):
                labels.update(block_m=block_m, formats=len(formats))
                launch(uniform, formats, block_m, 32 if block_m <= 16 else 3072)
        labels.clear()
        for tokens in (1, 1000):
            x, weight = (torch.empty(n, 6144, dtype=torch.bfloat16, device="meta") for n in (tokens, 256))
            bias = torch.empty(256, device="meta")
            router._launch_router(x, weight.float(), bias, 8, "sigmoid", 8, 4, True, 2.5)
        for report in found.values():
            print(json.dumps(report))


if __name__ == "__main__":
    main()
