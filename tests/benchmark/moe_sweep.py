"""Sweeps launch parameters of `ops.moe` on this machine's GPU: `python tests/benchmark/moe_sweep.py --jobs 15`.

    --match TEXT    only geometries whose name contains TEXT        --m 1,64    which row counts
    --quick         one candidate a row: what the plan and `tile_for` choose

A candidate is a block size, a split of k (decode) and a tile of the grouped GEMM. Each is compared with the reference on
some of its rows before it is timed; a wrong one is reported and not timed. Times: medians of CUDA graph replays over eight
route sets and weights of more than 260 MB, whole op and per kernel (profiler); registers, spills and shared memory as loaded.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from measure import CODEBOOKS, PEER, cases, random_experts
from timing import microseconds

from exl3_triton import reference
from exl3_triton.plan import DispatchPolicy, MoeSpec, plan_moe

moe = importlib.import_module("exl3_triton.ops.moe")  # by name, because `exl3_triton.ops.moe` is the op
Tile = moe.Tile

DEFAULT_M = (1, 8, 64, 256, 512, 1024, 4096)


@dataclass(frozen=True)
class Candidate:
    """What one timing runs with; None: as the plan chooses."""

    block_m: int | None = None
    tile: Any = None
    split: int | None = None


AHEAD = [Candidate(8, Tile(*size, None, 0, True)) for size in ((64, 4), (32, 4), (64, 8), (128, 8))]
OTHERS = {
    1: [*AHEAD, Candidate(8, None, 6), Candidate(8, None, 16), Candidate(8, AHEAD[0].tile, 16)],
    2: AHEAD,
    8: AHEAD,
    32: AHEAD,
    64: [Candidate(8)],
    256: [Candidate(32)],
    512: [Candidate(64), Candidate(32, Tile(128, 4, 80))],
    1024: [Candidate(64, Tile(128, 8, 128)), Candidate(128)],
    4096: [Candidate(128, Tile(64, 8, None, 64)), Candidate(128, Tile(32, 8, 128, 64)), Candidate(64)],
}


def candidates(m: int, quick: bool) -> list[Candidate]:
    """The plan's own choice first."""
    return [Candidate()] if quick else [Candidate(), *OTHERS.get(m, [])]


class Case:
    """One geometry: weights, rows, routes and what the reference says of a few rows."""

    def __init__(self, case: dict[str, Any], m: int):
        self.top_k, self.m = case["top"], m
        self.experts = random_experts(case["E"], case["H"], case["I"], case["bits"], CODEBOOKS[case["codebook"]])
        generator = torch.Generator("cuda").manual_seed(m)
        self.x = torch.randn(m, case["H"], device="cuda", dtype=torch.float16, generator=generator)
        self.routes = []
        for _ in range(8):
            ids = torch.rand(m, case["E"], device="cuda", generator=generator).topk(self.top_k).indices
            self.routes.append((ids, torch.rand(m, self.top_k, device="cuda", generator=generator)))
        self.rows = torch.linspace(0, m - 1, min(m, 3)).long().cuda()

    def want(self) -> torch.Tensor:
        ids, weights = self.routes[0]
        return reference.moe(self.x[self.rows].float(), self.experts, ids[self.rows], weights[self.rows], None)

    def bind(self, candidate: Candidate) -> Any:
        window = DispatchPolicy(max_m=32)
        plan = plan_moe(MoeSpec.of(self.experts, self.top_k), max_tokens=self.m, policy=window, block_m=candidate.block_m)
        schedule = plan.schedule
        if candidate.split and schedule.decode:
            schedule = schedule._replace(decode=schedule.decode._replace(split=candidate.split))
        if candidate.block_m and schedule.prefill and self.m <= 1024:
            schedule = schedule._replace(prefill=(schedule.prefill[0]._replace(sequential=0),))
        plan = type(plan)(plan.spec, schedule, plan.policy, plan.block_m)
        if candidate.tile:
            moe.tile_for = lambda *_: candidate.tile
        else:
            moe.tile_for = TILE_FOR
        return plan.bind(plan.new_arena("cuda"))


TILE_FOR = moe.tile_for


def kernels() -> str:
    """Registers, spills and shared memory of the grouped GEMM's latest compiled forms."""
    caches = moe.expert_gemm_kernel.device_caches.values()
    compiled = [kernel for cache in caches for kernel in cache[0].values()]
    return " ".join(f"{k.n_regs}r/{k.n_spills}s/{k.metadata.shared // 1024}K" for k in compiled)


def per_kernel(call: Any) -> str:
    """Microseconds of each kernel of one call, from the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times.setdefault(event.name.removesuffix("_kernel"), []).append(event.device_time)
    return " ".join(f"{name} {'+'.join(f'{t:.0f}' for t in found[: len(found) // 3])}" for name, found in times.items())


def run(case: dict[str, Any], m: int, candidate: Candidate, state: Case, want: torch.Tensor) -> tuple[float, str]:
    for cache in moe.expert_gemm_kernel.device_caches.values():
        cache[0].clear()
    bound = state.bind(candidate)
    out = torch.empty(m, case["H"], device="cuda", dtype=torch.float32)
    call = lambda r: bound(state.x, state.experts, *r, out=out)
    call(state.routes[0])
    error = ((out[state.rows] - want).norm() / want.norm()).item()
    if not error < 2e-3:
        return float("inf"), f"WRONG, error {error}"
    us = microseconds([lambda r=r: call(r) for r in state.routes], replays=8, warmup_seconds=0.03)  # type: ignore[misc]
    return us, f"[{kernels()}] {per_kernel(lambda: call(state.routes[0]))}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="glm52_tp4.3.mcg")
    parser.add_argument("--m", default=",".join(map(str, DEFAULT_M)))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--compile", default="", metavar="I/N", help=argparse.SUPPRESS)  # what --jobs starts
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure", file=sys.stderr)
        return 2
    peer = {}
    rows = json.loads(PEER.read_text())["rows"] if PEER.exists() else []
    for case in cases("moe", rows):
        peer[f"{case['name']}.{case['bits']}.{case['codebook']}", case["m"]] = case
    ms = [int(m) for m in arguments.m.split(",")]
    todo = [(name, m, case) for (name, m), case in peer.items() if arguments.match in name and m in ms]
    faulthandler.dump_traceback_later(30, repeat=True)
    if arguments.jobs and not arguments.compile:
        again = [sys.executable, *sys.argv, "--compile"]
        workers = [subprocess.Popen([*again, f"{part}/{arguments.jobs}"]) for part in range(arguments.jobs)]
        if any(worker.wait() for worker in workers):
            return 1
    part, parts = map(int, arguments.compile.split("/")) if arguments.compile else (0, 1)
    index = 0
    for name, m, case in todo:
        state, want = None, None
        best = float("inf")
        for candidate in candidates(m, arguments.quick):
            index += 1
            if arguments.compile:
                if index % parts == part:
                    started = time.perf_counter()
                    state = state or Case(case, m)
                    state.bind(candidate)(state.x, state.experts, *state.routes[0])
                    torch.cuda.synchronize()
                    print(f"compiled m {m} {candidate} in {time.perf_counter() - started:.0f} s", flush=True)
                continue
            if state is None:
                torch.cuda.empty_cache()
                state = Case(case, m)
                want = state.want()
            try:
                us, notes = run(case, m, candidate, state, want)
            except Exception as error:  # a candidate may not fit the card: say so and go on
                us, notes = float("inf"), f"{type(error).__name__}: {str(error)[:120]}"
            best = min(best, us)
            label = f"block {candidate.block_m} tile {tuple(candidate.tile or ())} split {candidate.split}"
            mark = "*" if us == best else " "
            ratio = case.get("peer_us", 0) / us
            print(f"{name} m {m:5} {label:48} {us:9.1f} us ratio {ratio:5.2f} {mark} {notes}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
