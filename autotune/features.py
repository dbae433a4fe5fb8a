"""What the predictor knows of a compiled kernel: its resources, and the instructions of its main loops, read from SASS."""

from __future__ import annotations

import collections
from dataclasses import asdict, dataclass
from typing import Any

from .audit import _BRANCH_TARGET, _INSTRUCTION, _LABEL, _disassemble


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
