"""What the compiler made of the grouped GEMM of `ops.moe`, for GPUs that need not be there, as a table.

    python -m autotune.moe --targets sm_120 --formats mcg.3,mul1.4 --blocks 8,16,32,64

The kernel that multiplies by gate and up of GLM-5.2's experts at TP4 (6144 x 512), with the tile that `tile_for` chooses.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from triton.backends.compiler import GPUTarget

from exl3_triton.format import Codebook, format_code
from exl3_triton.ops._dispatch import OVERLAP_ROWS
from exl3_triton.ops.layout import K_ORDER4, layout_variant_for
from exl3_triton.ops.moe_kernels import expert_gemm_kernel

from .audit import AuditReport, audit, family_of, overlaps, parse_format, target

tile_for = importlib.import_module("exl3_triton.ops.moe").tile_for  # by name, because `exl3_triton.ops.moe` is the op

_COLUMNS: tuple[str, ...] = ("target", "bits, codebook", "block_m", "BLOCK_K", "warps", "shared memory", "registers")
_COLUMNS += ("spills", "weight shuffles", "weight bytes stored", "instructions a weight")


def expert_gemm_launch(
    gpu: GPUTarget,
    k: int,
    n: int,
    twice_bits: int,
    codebook: Codebook,
    block_m: int,
    tile: Any,
    *,
    down: bool,
    split: int = 1,
    half: bool = False,
    rows: int = 1,
) -> tuple[Any, dict[str, Any], dict[str, Any], GPUTarget, dict[str, Any]]:
    """The arguments of `compile_for` for the product by gate and up, or by down, experts of one format, `rows` tokens."""
    variant = layout_variant_for(gpu.backend, gpu.arch)
    if block_m < 16 and gpu.backend == "cuda":
        variant |= layout_variant_for("cuda", 80) & K_ORDER4
    main, sides = 32 if block_m == 48 else block_m, 1 if down else 2
    constants = {
        "K_DIM": k, "N_DIM": n, "FORMATS": (format_code(twice_bits, int(codebook)),), "COUNT": sides, "OUT_COUNT": sides,
        "X_DIV": 1, "SPLIT": split, "HALF": half and down, "BLOCK_M": block_m, "SMALL_M": tile.small, "MAIN_M": main,
        "TAIL_M": block_m - main, "BLOCK_N": 128, "BLOCK_K": tile.block_k, "VARIANT": variant, "PREFETCH": bool(tile.prefetch),
        "PACKED_BEFORE": down, "OVERLAP": overlaps(gpu) and rows <= OVERLAP_ROWS,
    }  # fmt: skip
    signature = {"xh": "*fp16", "gate_words": "*i32", "gate_table": "*i64", "up_words": "*i32", "up_table": "*i64"}
    signature |= dict.fromkeys(("packed", "block_expert", "block_rows", "num_blocks", "half_exponent"), "*i32")
    signature |= {"out": "*fp16" if half and down else "*fp32", "routes": "i32", "first": "i32"}
    options = {"num_warps": tile.warps, "num_stages": 1} | ({"maxnreg": tile.registers} if tile.registers else {})
    return expert_gemm_kernel, signature, constants, gpu, options


def audit_expert_gemm(
    gpu: GPUTarget, bits: float, codebook: Codebook, block_m: int, *, k: int = 6144, n: int = 512
) -> AuditReport:
    """The grouped GEMM for gate and up, blocks of `block_m` rows, experts of one rate and codebook."""
    tile = tile_for(block_m, family_of(gpu))
    launch = expert_gemm_launch(gpu, k, n, round(2 * bits), codebook, block_m, tile, down=False)
    return audit(
        *launch,
        labels={"bits": bits, "codebook": codebook.label, "block_m": block_m, "block_k": tile.block_k, "warps": tile.warps},
        weights_per_thread=128 * tile.block_k // (32 * tile.warps),
        activation_bytes=2 * (tile.small or block_m) * tile.block_k,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Compile the grouped GEMM for the chosen targets, formats and blocks, and print a Markdown table."""
    parser = argparse.ArgumentParser(prog="python -m autotune.moe", description=main.__doc__)
    parser.add_argument("--targets", default="sm_120")
    parser.add_argument("--formats", default="mcg.3,mul1.4")
    parser.add_argument("--blocks", default="8,16,32,64")
    arguments = parser.parse_args(argv)
    print("| " + " | ".join(_COLUMNS) + " |\n" + "|---" * len(_COLUMNS) + "|")
    for gpu in map(target, arguments.targets.split(",")):
        for bits, codebook in map(parse_format, arguments.formats.split(",")):
            for block_m in map(int, arguments.blocks.split(",")):
                r = audit_expert_gemm(gpu, bits, codebook, block_m)
                cells = (
                    r.target, f"{bits:g} {codebook.label}", block_m, r.labels["block_k"], r.labels["warps"],
                    f"{r.shared} B", r.registers, r.spills, r.loop_shuffles, r.weight_bytes_stored,
                    f"{r.instructions_per_weight:.2f}",
                )  # fmt: skip
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
