"""What the compiler made of a kernel, for GPUs that need not be there: memory, registers, spills, instructions of the main
loop.

    python -m autotune audit --targets sm_90,sm_120 --formats mcg.2,mcg.3,mul1.2.5 --rows 1,16,64
    python -m autotune audit --layouts        # every decode layout on every target: what `ops/layout.py` chooses from
    python -m autotune audit --json ...       # one JSON object a line

Registers and instructions come from the disassembled machine code (the tools in Triton's package), the rest from Triton's
stages. A decoded weight should go from the codebook's arithmetic into the matrix instruction without leaving its thread, so
the main loop must have no shuffle and must store no more bytes to shared memory than the activations take.

Not under TRITON_INTERPRET=1, which replaces kernels by Python functions at import.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from exl3_triton.format import TWICE_BITS, Codebook
from exl3_triton.ops._dispatch import OVERLAP_ROWS
from exl3_triton.ops.decode_once import _FOLD_REGISTERS, _FOLD_WARPS, _fold_kernel, _rotate_and_decode_kernel
from exl3_triton.ops.hadamard import _rotate_input_kernel
from exl3_triton.ops.layout import WORD_ORDER, layout_variant_for
from exl3_triton.ops.linear_kernels import product_kernel, reduce_kernel
from exl3_triton.ops.modes import MODES, PARTS
from exl3_triton.ops.trellis import DEQUANTIZE_WARPS, _dequantize_kernel
from exl3_triton.ops.tuning import Device, LinearConfig, programs_and_parts, select_linear

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121", "gfx942", "gfx1100", "gfx1201")
PROCESSORS = 132  # multiprocessors that share a product's work evenly, where a config says so
SHARED_LIMIT = 99 * 1024  # bytes that a block may use on sm_86, 89 and 120; the smallest of the targets

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)")
_LABEL = re.compile(r"^\s*(\.L_x?_?\w+):")
_BRANCH_TARGET = re.compile(r"`\((\.L\w+)\)")


def target(name: str) -> GPUTarget:
    """ "sm_120" or "gfx942" as Triton's target. Raises ValueError for other names."""
    if match := re.fullmatch(r"sm_(\d+)", name):
        return GPUTarget("cuda", int(match[1]), 32)
    if re.fullmatch(r"gfx\w+", name):
        return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)
    raise ValueError(f"target {name!r}: required sm_NN or gfxNNN")


@dataclass(frozen=True)
class AuditReport:
    """One compiled kernel. Counts are static: instructions in the code, not executions.

    shared: bytes a block. registers: a thread, None where unknown. spills: instructions that store to or load from local
    memory (AMD: spilled registers). shuffles: in the whole kernel. loop: opcode -> count in one pass of the innermost loop
    with a matrix instruction (NVIDIA; empty where there is none). loop_shuffles, loop_stored_bytes: shuffles, and bytes
    that a block writes to shared memory, in that loop. local_allocs, convert_layouts: operations of that name in TTGIR.
    """

    kernel: str
    target: str
    triton: str
    shared: int
    registers: int | None
    spills: int
    shuffles: int
    local_allocs: int
    convert_layouts: int
    loop: dict[str, int] = field(default_factory=dict)
    loop_shuffles: int = 0
    loop_stored_bytes: int = 0
    labels: dict[str, Any] = field(default_factory=dict)
    weights_per_thread: int = 0
    activation_bytes: int = 0

    @property
    def loop_instructions(self) -> int:
        return sum(self.loop.values())

    @property
    def instructions_per_weight(self) -> float:
        """Instructions of the main loop for each weight that a thread decodes in it; 0 where the kernel decodes none."""
        return self.loop_instructions / self.weights_per_thread if self.weights_per_thread else 0.0

    @property
    def weight_bytes_stored(self) -> int:
        """Bytes that one pass of the main loop stores to shared memory beyond the block's activations."""
        return max(0, self.loop_stored_bytes - self.activation_bytes)


def _walk(signature: Mapping[str, Any]) -> Iterable[tuple[tuple[int, ...], str]]:
    for i, kind in enumerate(signature.values()):
        if isinstance(kind, tuple):
            yield from (((i, j), inner) for j, inner in enumerate(kind))
        else:
            yield (i,), kind


def compile_for(
    kernel: Any, signature: Mapping[str, Any], constexprs: Mapping[str, Any], gpu: GPUTarget, options: Mapping[str, Any]
) -> Any:
    """Compile a jit kernel for `gpu`. signature: argument -> "*fp16", "i32", ..., a tuple of those, for all but the
    constexprs.

    Pointers count as 16-byte aligned, as torch's allocations are. Returns Triton's CompiledKernel (not loaded on any device).
    """
    if not isinstance(kernel, triton.runtime.jit.JITFunction):
        raise RuntimeError("kernels were imported for the interpreter: run the audit in a process without TRITON_INTERPRET")
    full = {name: "constexpr" if name in constexprs else signature[name] for name in kernel.arg_names}
    aligned = {path: [["tt.divisibility", 16]] for path, kind in _walk(full) if kind.startswith("*")}
    source = ASTSource(fn=kernel, signature=full, constexprs=dict(constexprs), attrs=aligned)
    return triton.compile(source, target=gpu, options=dict(options))


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _disassemble(cubin: bytes) -> tuple[str, int]:
    """SASS, and registers a thread."""
    if cubin[0x31] == 121:  # the architecture in the ELF header: CUDA 12.8's tools refuse sm_121, whose code is that of sm_120
        cubin = cubin[:0x31] + bytes([120]) + cubin[0x32:]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
        sass = run([_tool("nvdisasm"), "-c", file.name]).stdout
        usage = run([_tool("cuobjdump"), "-res-usage", file.name]).stdout
    match = re.search(r"REG:(\d+)", usage)
    return sass, int(match[1]) if match else 0


def _main_loop(sass: str) -> list[tuple[str, str]]:
    """(opcode, operands) of the shortest backward-branch region that has a matrix instruction in it."""
    code: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    best: list[tuple[str, str]] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.search(line):
            code.append((found[1], found[2]))
            goal = _BRANCH_TARGET.search(found[2])
            if found[1].startswith("BRA") and goal and goal[1] in labels:
                region = code[labels[goal[1]] :]
                if any("MMA" in opcode for opcode, _ in region) and (not best or len(region) < len(best)):
                    best = region
    return best


def _stored_bytes(region: list[tuple[str, str]], threads: int) -> int:
    total = 0
    for opcode, _ in region:
        parts = opcode.split(".")
        if parts[0] == "STS":
            total += next(
                (int(p) // 8 for p in parts if p in ("64", "128")), {"U8": 1, "S8": 1, "U16": 2, "S16": 2}.get(parts[-1], 4)
            )
        elif parts[0] == "STSM":
            total += 4 * int(parts[-1]) if parts[-1].isdigit() else 4
        elif parts[0] == "STTM":
            total += 4
    return total * threads


def audit(
    kernel: Any,
    signature: Mapping[str, Any],
    constexprs: Mapping[str, Any],
    gpu: GPUTarget,
    options: Mapping[str, Any],
    **extra: Any,
) -> AuditReport:
    """Compile (see `compile_for`) and count. extra: `labels`, `weights_per_thread`, `activation_bytes` of the report."""
    compiled = compile_for(kernel, signature, constexprs, gpu, options)
    ttgir = compiled.asm["ttgir"]
    common = {
        "kernel": kernel.fn.__name__.strip("_").removesuffix("_kernel"),
        "target": f"sm_{gpu.arch}" if gpu.backend == "cuda" else str(gpu.arch),
        "triton": triton.__version__,
        "shared": compiled.metadata.shared,
        "local_allocs": len(re.findall(r"= ttg\.local_alloc", ttgir)),
        "convert_layouts": len(re.findall(r"= ttg\.convert_layout", ttgir)),
        **extra,
    }
    if gpu.backend != "cuda":
        code = compiled.asm["amdgcn"]
        numbers = {
            key: sum(map(int, re.findall(rf"\.{key}:\s+(\d+)", code)))
            for key in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
        }
        return AuditReport(
            registers=numbers["vgpr_count"],
            spills=numbers["vgpr_spill_count"] + numbers["sgpr_spill_count"],
            shuffles=len(re.findall(r"^\s+(?:ds_bpermute|ds_permute|v_permlane)", code, re.M)),
            **common,
        )
    sass, registers = _disassemble(compiled.asm["cubin"])
    opcodes = collections.Counter(match[1].split(".")[0] for match in _INSTRUCTION.finditer(sass))
    region = _main_loop(sass)
    return AuditReport(
        registers=registers,
        spills=opcodes["STL"] + opcodes["LDL"],
        shuffles=opcodes["SHFL"],
        loop=dict(collections.Counter(opcode.split(".")[0] for opcode, _ in region).most_common()),
        loop_shuffles=sum(opcode.startswith("SHFL") for opcode, _ in region),
        loop_stored_bytes=_stored_bytes(region, 32 * options.get("num_warps", 4)),
        **common,
    )


def audit_linear(
    gpu: GPUTarget,
    bits: float,
    codebook: Codebook,
    rows: int,
    *,
    k: int = 4096,
    n: int = 4096,
    split: int = 1,
    variant: int | None = None,
    mode: str = "exact",
) -> AuditReport:
    """The product kernel of `ops.linear` for one matrix [k, n], with the settings that a call of `rows` rows uses."""
    twice_bits = round(2 * bits)
    config = select_linear(rows, k, n // 128, Device(family_of(gpu), 1), twice_bits, int(codebook), mode)
    if config is None:
        raise ValueError(f"rows {rows}: the weights are decoded once there; audit the kernel `decode`")
    launch = product_launch(gpu, k, n, twice_bits, codebook, config._replace(split=split), rows, variant, mode)
    labels = {"bits": bits, "codebook": codebook.label, "rows": rows, "split": split, "variant": launch[2]["VARIANT"]}
    return audit(
        *launch,
        labels=labels | ({} if mode == "exact" else {"mode": mode}),
        weights_per_thread=128 * config.block_k // (32 * config.num_warps),
        activation_bytes=(2 if mode == "exact" else 4) * config.block_m * config.block_k,
    )


def product_launch(
    gpu: GPUTarget,
    k: int,
    n: int,
    twice_bits: int,
    codebook: Codebook,
    config: LinearConfig,
    rows: int,
    variant: int | None = None,
    mode: str = "exact",
) -> tuple[Any, dict[str, Any], dict[str, Any], GPUTarget, dict[str, Any]]:
    """The arguments of `compile_for` for the product of `ops.linear`: one matrix, calls of `rows` rows."""
    programs, split = programs_and_parts(config, k, n // 128, PROCESSORS)
    constants = {
        "K": k,
        "CLASSES": ((twice_bits, int(codebook), n, n, 0, 0, 1, 0),),
        "BLOCKS": n // 128,
        "BLOCK_M": config.block_m,
        "BLOCK_K": config.block_k,
        "SPLIT": split,
        "PROGRAMS": programs,
        "VARIANT": (layout_variant_for(gpu.backend, gpu.arch) if variant is None else variant)
        | (WORD_ORDER if PARTS[mode] > 1 else 0),
        "PREFETCH": config.prefetch,
        "STAGES": config.stages,
        "PARTS": PARTS[mode],
        "LOW": mode == "precise",
        "OVERLAP": overlaps(gpu) and rows <= OVERLAP_ROWS,
    }
    whole = mode == "int8"
    signature: dict[str, Any] = {
        "xh": "*i8" if whole else "*fp16",
        "exponents": "*i32",
        "affine": "*fp32" if whole else "*i32",
    }
    signature |= {"words": ("*i32",), "svh": ("*fp16",), "bias": ("*fp16",), "y": ("*bf16",)}
    signature |= {"partial": "*i32" if whole else "*fp32", "m": "i32"}
    options = {"num_warps": config.num_warps, "num_stages": 1, "maxnreg": config.registers}
    return product_kernel, signature, constants, gpu, options


def audit_reduce(gpu: GPUTarget, *, n: int = 4096, split: int = 8) -> AuditReport:
    """The kernel that adds the parts of a product split over k."""
    constants = {"CLASSES": ((6, 1, n, n, 1, 0, 1, 0),), "BLOCKS": n // 128, "SPLIT": split, "OVERLAP": overlaps(gpu)}
    constants |= {"STEPS": 32, "PROGRAMS": 0}
    signature: dict[str, Any] = {"exponents": "*i32", "affine": "*i32", "partial": "*fp32", "m": "i32"}
    signature |= {"svh": ("*fp16",), "bias": ("*fp16",), "y": ("*bf16",)}
    return audit(reduce_kernel, signature, constants, gpu, {"num_warps": 1}, labels={"split": split})


def audit_fold(gpu: GPUTarget, bits: float, codebook: Codebook) -> AuditReport:
    """The kernel that decodes a matrix once to its original basis; decoded weights are multiplied there, twice."""
    constants = {"N": 4096, "K": 4096, "TWICE_BITS": round(2 * bits), "CODEBOOK": int(codebook)}
    constants["VARIANT"] = layout_variant_for(gpu.backend, gpu.arch)
    signature = {"words": "*i32", "suh": "*fp16", "svh": "*fp16", "signs": "*fp16", "out": "*fp16", "first": "i32"}
    options = {"num_warps": _FOLD_WARPS} | ({"maxnreg": _FOLD_REGISTERS} if family_of(gpu) == "sm_90" else {})
    return audit(_fold_kernel, signature, constants, gpu, options, labels={"bits": bits, "codebook": codebook.label})


def audit_decode(gpu: GPUTarget, bits: float, codebook: Codebook) -> AuditReport:
    """The kernel that rotates many rows and decodes a matrix once for them."""
    constants = {"N": 4096, "D": 4096, "K": 4096, "BLOCKS": 32, "GROUPS": 8, "ALIGN": 8, "LOW": False}
    constants |= {"TWICE_BITS": round(2 * bits), "CODEBOOK": int(codebook)}
    constants["VARIANT"] = layout_variant_for(gpu.backend, gpu.arch)
    signature = {"x": "*bf16", "suh": "*fp16", "xh": "*fp16", "exponents": "*i32", "words": "*i32", "out": "*fp16"}
    signature |= {"stride": "i32", "rows": "i32", "m": "i32", "first": "i32"}
    labels = {"bits": bits, "codebook": codebook.label}
    return audit(_rotate_and_decode_kernel, signature, constants, gpu, {"num_warps": 4}, labels=labels)


def overlaps(gpu: GPUTarget) -> bool:
    """As `ops._dispatch.overlap` decides for few rows."""
    return gpu.backend == "cuda" and int(gpu.arch) >= 90


def family_of(gpu: GPUTarget) -> str:
    """The device family (`ops.tuning.Device`) of a target."""
    return "hip" if gpu.backend == "hip" else "sm_90" if gpu.arch == 90 else "cuda"


def audit_rotate_input(gpu: GPUTarget, *, k: int = 4096, matrices: int = 2) -> AuditReport:
    """The rotation of the activations, bf16 in."""
    variant = layout_variant_for(gpu.backend, gpu.arch)
    constants = {"D": k, "K": k, "GROUPS": 4, "ALIGN": 8, "VARIANT": variant, "LOW": False, "OVERLAP": overlaps(gpu)}
    signature = {"x": "*bf16", "suh": ("*fp16",) * matrices, "xh": "*fp16", "exponents": "*i32", "stride": "i32"}
    return audit(_rotate_input_kernel, signature, constants, gpu, {"num_warps": 4}, labels={"matrices": matrices})


def audit_dequantize(gpu: GPUTarget, bits: float, codebook: Codebook, *, rotated: bool) -> AuditReport:
    """`ops.dequantize`, in either basis."""
    variant = layout_variant_for(gpu.backend, gpu.arch)
    constants = {
        "N": 4096,
        "OUT": 4096,
        "TWICE_BITS": round(2 * bits),
        "CODEBOOK": int(codebook),
        "ROTATED": rotated,
        "VARIANT": variant,
    }
    signature = {"words": "*i32", "suh": "*fp16", "svh": "*fp16", "out": "*fp16", "in_features": "i32"}
    labels = {"bits": bits, "codebook": codebook.label, "rotated": rotated}
    return audit(_dequantize_kernel, signature, constants, gpu, {"num_warps": DEQUANTIZE_WARPS}, labels=labels)


def all_formats() -> list[tuple[float, Codebook]]:
    """Every pair of rate and codebook that exists: half rates are MUL1's alone."""
    pairs = ((twice_bits / 2, codebook) for twice_bits in TWICE_BITS for codebook in Codebook)
    return [(bits, codebook) for bits, codebook in pairs if bits == int(bits) or codebook is Codebook.MUL1]


def parse_format(text: str) -> tuple[float, Codebook]:
    """ "mul1.2.5" -> (2.5, MUL1). Raises ValueError for a pair that does not exist."""
    label, _, bits = text.partition(".")
    for candidate in all_formats():
        if (f"{candidate[0]:g}", candidate[1].label) == (bits, label):
            return candidate
    raise ValueError(f"format {text!r}: required codebook.bits, such as mcg.3 or mul1.2.5")


def _line(report: AuditReport) -> str:
    labels = " ".join(
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in report.labels.items()
    )
    top = " ".join(f"{opcode}:{count}" for opcode, count in list(report.loop.items())[:8])
    return (
        f"{report.target:8} {report.kernel:18} {labels:52} "
        f"shared {report.shared:6} regs {report.registers} spills {report.spills} "
        f"shuffles {report.loop_shuffles} (all {report.shuffles}) weight bytes stored {report.weight_bytes_stored} "
        f"instr/weight {report.instructions_per_weight:.2f}  {top}"
    )


def main(argv: list[str] | None = None) -> int:
    """Compile the kernels for the chosen targets, rates, codebooks and row counts, and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m autotune audit", description=main.__doc__)
    parser.add_argument("--targets", default=",".join(TARGETS), help="sm_NN or gfxNNN, comma-separated")
    parser.add_argument("--formats", default="mcg.3", help='codebook and bits a weight, such as mcg.3,mul1.2.5, or "all"')
    parser.add_argument("--rows", default="16", help="row counts of the linear kernel, comma-separated")
    parser.add_argument("--mode", default="exact", choices=MODES, help="of the linear kernel (default exact)")
    parser.add_argument("--split", type=int, default=1, help="parts of k of the linear kernel (default 1)")
    parser.add_argument(
        "--kernels", default="linear", help="of linear, reduce, rotate, decode, fold, dequantize, comma-separated"
    )
    parser.add_argument("--layouts", action="store_true", help="the linear kernel in all four decode layouts")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args(argv)
    formats = all_formats() if args.formats == "all" else [parse_format(text) for text in args.formats.split(",")]
    kernels = args.kernels.split(",")

    def reports() -> Iterable[AuditReport]:
        for gpu in map(target, args.targets.split(",")):
            if "rotate" in kernels:
                yield audit_rotate_input(gpu)
            if "reduce" in kernels:
                yield audit_reduce(gpu)
            for bits, codebook in formats:
                if "decode" in kernels:
                    yield audit_decode(gpu, bits, codebook)
                if "fold" in kernels:
                    yield audit_fold(gpu, bits, codebook)
                if "dequantize" in kernels:
                    yield from (audit_dequantize(gpu, bits, codebook, rotated=rotated) for rotated in (True, False))
                if "linear" in kernels:
                    for rows in map(int, args.rows.split(",")):
                        for variant in range(4) if args.layouts else (None,):
                            yield audit_linear(gpu, bits, codebook, rows, split=args.split, variant=variant, mode=args.mode)

    for report in reports():
        derived = {
            "instructions_per_weight": report.instructions_per_weight,
            "weight_bytes_stored": report.weight_bytes_stored,
        }
        print(json.dumps(asdict(report) | derived) if args.json else _line(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
