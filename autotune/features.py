"""What the predictor knows of a compiled kernel: its resources, and the instructions of its main loops, read from SASS."""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .audit import _BRANCH_TARGET, _INSTRUCTION, _LABEL, _disassemble

_ALU = ("LOP3", "SHF", "SHL", "PRMT", "IADD", "ISETP", "SEL", "SGXT", "BMSK", "LEA", "IMNMX", "VABS", "PLOP3", "FSETP", "IABS")
_FMA = ("IMAD", "FFMA", "FMUL", "FADD", "IDP", "I2FP")
_HALF = ("HADD2", "HMUL2", "HFMA2", "F2FP")
_MEMORY = ("LDG", "STG", "LDS", "STS", "LDSM", "STSM", "LDL", "STL", "SHFL", "LDC")
_WIDTHS = {"64": 2, "128": 4}


@dataclass(frozen=True)
class Step:
    """One pass of the main loop, instructions of a warp by pipe; memory in accesses of 128 bytes."""

    total: int
    alu: int
    fma: int
    half: int
    memory: int
    spilled: int


def step_of(loop: Mapping[str, int]) -> Step:
    """Opcodes of a loop, sorted by the pipe that runs them."""
    counts = dict.fromkeys(("alu", "fma", "half", "memory", "spilled"), 0)
    for opcode, count in loop.items():
        name, *modifiers = opcode.split(".")
        if name.startswith(_ALU):
            counts["alu"] += count
        elif name.startswith(_FMA):
            counts["fma"] += count
        elif name.startswith(_HALF):
            counts["half"] += count
        elif name in _MEMORY:
            counts["memory"] += count * max((_WIDTHS.get(part, 1) for part in modifiers), default=1)
            counts["spilled"] += count if name in ("LDL", "STL") else 0
    return Step(sum(loop.values()), **counts)


@dataclass(frozen=True)
class Features:
    """A compiled kernel. Counts are static, a warp's instructions.

    registers: a thread; shared: bytes a block; spills: instructions on local memory in the whole kernel; loops: the innermost
    loops that hold a matrix instruction, in the order of the code, opcode with its modifiers -> count; outside: instructions
    that are in none of them.
    """

    registers: int
    shared: int
    warps: int
    spills: int
    loops: tuple[dict[str, int], ...]
    outside: int

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """One pass of each loop."""
        return tuple(step_of(loop) for loop in self.loops)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"loops": list(self.loops)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Features:
        return cls(**values | {"loops": tuple(values["loops"])})


def matrix_loops(sass: str) -> tuple[list[dict[str, int]], int, int]:
    """(loops, instructions outside of them, instructions on local memory) of a disassembled kernel; see `Features`."""
    code: list[str] = []
    labels: dict[str, int] = {}
    regions: list[tuple[int, int]] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.search(line):
            code.append(found[1])
            goal = _BRANCH_TARGET.search(found[2])
            if found[1].startswith("BRA") and goal and goal[1] in labels:
                start = labels[goal[1]]
                if any("MMA" in opcode for opcode in code[start:]):
                    regions.append((start, len(code)))
    innermost = [r for r in regions if not any(r != other and r[0] <= other[0] and other[1] <= r[1] for other in regions)]
    loops = [dict(collections.Counter(code[start:end]).most_common()) for start, end in innermost]
    outside = len(code) - sum(end - start for start, end in innermost)
    return loops, outside, sum(opcode.startswith(("STL", "LDL")) for opcode in code)


def features_of(compiled: Any) -> Features:
    """The features of one of Triton's CompiledKernels for an NVIDIA GPU."""
    sass, registers = _disassemble(compiled.asm["cubin"])
    loops, outside, spills = matrix_loops(sass)
    return Features(registers, compiled.metadata.shared, compiled.metadata.num_warps, spills, tuple(loops), outside)
