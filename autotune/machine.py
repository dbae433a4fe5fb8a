"""What the predictor knows of GPUs. Rates are per multiprocessor (SM) and clock.

Sources: [1] CUDA C++ Programming Guide 13, "Arithmetic Instructions" and "Technical Specifications per Compute Capability";
[2] NVIDIA H100 whitepaper and H200 data sheet; [3] NVIDIA RTX Blackwell whitepaper (GB202: INT32 on all 128 lanes; half-rate
FP32 accumulation on GeForce); [4] data sheets of RTX PRO 6000 Blackwell and DGX Spark; [5] measured with
`python tests/benchmark/measure.py` (H200, 2026-12-01: `hbm_read_gbps`); [6] DRAM: nine tenths of the data sheet's rate where
nobody has measured it, for the RTX PRO 6000 1.5 TB/s as its users measured. Rates of L2 are estimates.
"""

from __future__ import annotations

from dataclasses import dataclass

REGISTERS = 65536  # of a multiprocessor, in every NVIDIA architecture since sm_80


@dataclass(frozen=True)
class Machine:
    """device: as torch names it (a prefix of it for cards with variants). capability, processors: of the whole GPU."""

    device: str
    capability: tuple[int, int]
    processors: int
    clock_ghz: float  # under load
    dram_gbps: float  # readable
    l2_gbps: float
    shared_memory: int  # bytes of an SM
    warps: int
    blocks: int
    alu: int  # lanes for integer addition, logic and shifts
    fma: int  # lanes for integer multiplication
    half: int  # lanes for fp16 pairs
    tensor: int  # FLOP, fp16 products into fp32

    def resident(self, registers: int, shared: int, warps: int) -> int:
        """Programs that a multiprocessor runs at once. registers: of a thread; shared: bytes of a program."""
        by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
        by_shared = self.shared_memory // (shared + 1024)
        return max(1, min(by_registers, by_shared, self.warps // warps, self.blocks))

    @property
    def target(self) -> str:
        """As `audit.target` takes it."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def code(self) -> str:
        """The target whose code stands for it: that of sm_121 is sm_120's."""
        return "sm_120" if self.capability == (12, 1) else self.target

    @property
    def family(self) -> str:
        """Of `ops.tuning.Device`."""
        return "sm_90" if self.capability == (9, 0) else "cuda"


_KIB = 1024
MACHINES = {
    "h200": Machine("NVIDIA H200", (9, 0), 132, 1.75, 4400, 7000, 228 * _KIB, 64, 32, 64, 64, 128, 4096),  # [1, 2, 5]
    "b200": Machine("NVIDIA B200", (10, 0), 148, 1.8, 7200, 10000, 228 * _KIB, 64, 32, 64, 64, 128, 8192),  # [1, 6]
    "rtx-pro-6000": Machine(
        "NVIDIA RTX PRO 6000 Blackwell", (12, 0), 188, 2.4, 1500, 6000, 100 * _KIB, 48, 24, 128, 64, 64, 1024
    ),  # [1, 3, 4, 6]
    "rtx-5090": Machine("NVIDIA GeForce RTX 5090", (12, 0), 170, 2.4, 1610, 5500, 100 * _KIB, 48, 24, 128, 64, 64, 512),
    "gb10": Machine("NVIDIA GB10", (12, 1), 48, 2.4, 245, 1500, 100 * _KIB, 48, 24, 128, 64, 64, 1024),  # [1, 4, 6]
}
"""By the name that `--machine` takes; `--arch sm_NN` means all of that compute capability."""


def machines_of(arch: str) -> list[Machine]:
    """ "sm_120" or a name of MACHINES. Raises ValueError for others."""
    if arch in MACHINES:
        return [MACHINES[arch]]
    found = [machine for machine in MACHINES.values() if machine.target == arch]
    if not found:
        known = ", ".join([*MACHINES, *sorted({machine.target for machine in MACHINES.values()})])
        raise ValueError(f"arch {arch!r}: required one of {known}")
    return found
