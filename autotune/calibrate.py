"""Data for the predictor: many candidates of a few problems, good and bad, measured on this machine's GPU.

python -m autotune calibrate --out calibration.json --jobs 15 --seconds 220
python -m autotune calibrate --dry-run sm_90          # compiles the same candidates without a GPU
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from exl3_triton.ops.tuning import Device

from .features import Features
from .pool import Task, compile_all, compile_for_target, compile_on_gpu
from .problems import Format, LinearProblem, MoeProblem, Problem
from .space import Config, config_json, space

_MCG3, _MCG4, _MCG6, _MUL4 = (Format.parse(text) for text in ("mcg.3", "mcg.4", "mcg.6", "mul1.4"))
_GLM = MoeProblem(256, 6144, 512, 8, _MCG3)
PROBLEMS: list[tuple[Problem, int, int]] = [  # (problem, range of rows, how many candidates)
    (LinearProblem(6144, 12288, _MCG3), 16, 12),
    (LinearProblem(2048, 16384, _MCG4), 16, 10),
    (LinearProblem(6144, 512, _MCG3), 16, 8),
    (_GLM, 32, 9),
    (_GLM, 256, 7),
    (LinearProblem(12288, 6144, _MCG6), 16, 8),
    (LinearProblem(5120, 17408, _MUL4), 16, 8),
    (LinearProblem(6144, 12288, _MCG3), 32, 8),
    (LinearProblem(6144, 12288, _MCG3), 64, 8),
    (LinearProblem(6144, 12288, _MCG3), 255, 7),
    (_GLM, 1024, 7),
    (_GLM, 4096, 5),
    (LinearProblem(5120, 17408, _MUL4), 32, 7),
    (LinearProblem(2048, 16384, _MCG4), 64, 7),
    (LinearProblem(12288, 6144, _MCG6), 255, 6),
    (LinearProblem(6144, 12288, _MCG3), 512, 4),
    (MoeProblem(128, 4096, 1408, 8, _MUL4), 32, 8),
    (MoeProblem(128, 4096, 1408, 8, _MUL4), 256, 6),
    (MoeProblem(128, 4096, 1408, 8, _MUL4), 2048, 5),
    (MoeProblem(256, 7168, 256, 8, _MCG4), 32, 8),
    (MoeProblem(256, 7168, 256, 8, _MCG4), 512, 6),
    (LinearProblem(16384, 6144, _MCG4), 16, 7),
    (LinearProblem(16384, 6144, _MCG4), 64, 6),
    (LinearProblem(6144, 512, _MCG3), 32, 6),
    (LinearProblem(6144, 2688, _MCG3), 16, 8),
    (LinearProblem(6144, 2688, _MCG3), 255, 6),
]


def chosen(problem: Problem, rows: int, count: int, device: Device) -> list[Config | None]:
    """The rules' choice and candidates spread evenly over the space. Above the fused ranges also None: decoding once."""
    if isinstance(problem, LinearProblem) and rows not in problem.SAMPLES:
        return [None, *chosen(problem, max(problem.SAMPLES), count - 1, device)]
    everything = space(problem, rows, device)
    rest = everything[1:]
    step = max(1.0, len(rest) / (count - 1))
    return [everything[0], *(rest[int(i * step)] for i in range(min(count - 1, len(rest))))]


def tasks(device: Device) -> list[Task]:
    return [Task(p, rows, config) for p, rows, count in PROBLEMS for config in chosen(p, rows, count, device)]


def problem_json(problem: Problem) -> dict[str, Any]:
    assert isinstance(problem, LinearProblem | MoeProblem)
    return {"op": problem.op} | asdict(problem) | {"format": str(problem.format)}


def row(task: Task, m: int, us: float, error: float, features: list[Features]) -> dict[str, Any]:
    """One measurement, as the calibration file holds it."""
    return {
        "problem": problem_json(task.problem), "rows": task.rows, "m": m, "config": config_json(task.config),
        "us": round(us, 2), "error": error, "features": [each.to_json() for each in features],
    }  # fmt: skip


def _measure(group: list[tuple[Task, list[Features]]], m: int) -> Iterator[dict[str, Any]]:
    """Rows of one problem's candidates at m tokens: each checked, then all timed in turn."""
    from .bench import TOLERANCE, bench_of

    problem, rows = group[0][0].problem, group[0][0].rows
    bench = bench_of(problem, m, rows)
    want = bench.want()
    right, errors = [], []
    for task, features in group:
        try:
            error = bench.error(task.config, want)
        except Exception as failure:  # a candidate may not fit the card
            print(f"{problem}, {rows} rows, {task.config}: {type(failure).__name__}: {str(failure)[:120]}", file=sys.stderr)
            continue
        if error < TOLERANCE:
            right.append((task, features))
            errors.append(error)
        else:
            print(f"{problem}, {rows} rows, {task.config}: WRONG, error {error}", file=sys.stderr)
    times = bench.time([task.config for task, _ in right], rounds=9)
    for (task, features), error, us in zip(right, errors, times, strict=True):
        yield row(task, m, us, error, features)


def run(out: Path, jobs: int, seconds: float) -> int:
    """Compile for half of the time, measure in the other; the file is complete after every problem."""
    import torch

    from exl3_triton.ops.tuning import device_of
    from exl3_triton.timing import header

    started = time.monotonic()
    device = device_of(torch.device("cuda"))
    todo = tasks(device)
    compiled: dict[Task, list[Features]] = {}
    for task, result in tqdm(compile_all(todo, compile_on_gpu, jobs, 0.65 * seconds), total=len(todo), desc="compile"):
        if isinstance(result, str):
            print(f"{task}: {result}", file=sys.stderr)
        else:
            compiled[task] = result
    data: dict[str, Any] = {"header": header(), "rows": []}
    for problem, rows, _ in tqdm(PROBLEMS, desc="measure"):
        group = [(task, compiled[task]) for task in todo if (task.problem, task.rows) == (problem, rows) and task in compiled]
        if not group or time.monotonic() - started > seconds:
            continue
        for m in problem.SAMPLES.get(rows, (rows,)):
            torch.cuda.empty_cache()
            data["rows"] += _measure(group, m)
        out.write_text(json.dumps(data))
    print(f"{len(data['rows'])} measurements of {len(compiled)} candidates in {time.monotonic() - started:.0f} s: {out}")
    return 0


def dry_run(target_name: str, jobs: int, limit: int) -> int:
    """Compile (the first `limit` of) the candidates for a target and print what became of them."""
    todo = tasks(Device("sm_90" if target_name == "sm_90" else "cuda", 132))
    print(f"{len(todo)} candidates")
    for task, result in compile_all(todo[:limit], functools.partial(compile_for_target, target_name), jobs):
        if isinstance(result, str):
            print(f"{task}: {result}")
        else:
            found = ", ".join(f"{f.registers} registers, {f.spills} spills, {len(f.loops)} loops" for f in result)
            print(f"{task.problem}, {task.rows} rows, {task.config}: {found}")
    return 0


def add_arguments(parser: Any) -> None:
    parser.add_argument("--out", type=Path, default=Path("calibration.json"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=220.0, help="stop measuring after so long (default 220)")
    parser.add_argument("--dry-run", metavar="TARGET", help="compile for a target, without a GPU")
    parser.set_defaults(run=main)
    parser.add_argument("--limit", type=int, default=1 << 30, help="with --dry-run: only so many candidates")


def main(args: Any) -> int:
    if args.dry_run:
        return dry_run(args.dry_run, args.jobs, args.limit)
    return run(args.out, args.jobs, args.seconds)
