"""Compiling candidates in parallel processes: on this machine's GPU, or for a target that need not be there."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from exl3_triton.ops.tuning import Device, LinearConfig

from .features import Features, features_of
from .problems import AttentionProblem, IndexerProblem, LinearProblem, MoeProblem, Problem
from .space import Config, MoeConfig


class Task(NamedTuple):
    """One candidate. rows: the range of rows that it is for (`Problem.SAMPLES`), or more than any for decoding once."""

    problem: Problem
    rows: int
    config: Config | None


def compile_on_gpu(task: Task) -> list[Features]:
    """Launch a candidate once at every row count at which it will be timed; see `bench.compile_here`."""
    from .bench import compile_here

    found: list[Features] = []
    if isinstance(task.problem, AttentionProblem | IndexerProblem):
        for m in task.problem.SAMPLES[task.rows]:
            _bench(task.problem, m, task.rows).calls(task.config)[0]()
        return found
    for m in task.problem.SAMPLES.get(task.rows, (task.rows,)):
        found = found or compile_here(_bench(task.problem, m, task.rows), task.config)
        if isinstance(task.problem, MoeProblem):
            _bench(task.problem, m, task.rows).calls(task.config)[0]()
    return found


@functools.lru_cache(maxsize=1)
def _bench(problem: Problem, m: int, rows: int) -> Any:
    from .bench import bench_of

    return bench_of(problem, m, rows, copies=1)


def compile_for_target(target_name: str, task: Task) -> list[Features]:
    """Compile a candidate's products for "sm_NN": the same as `bench.compile_here` on such a GPU, without the others."""
    from .attention import compile_attention
    from .audit import audit_decode, compile_for, family_of, product_launch, target
    from .moe import expert_gemm_launch

    gpu, problem, config = target(target_name), task.problem, task.config
    if isinstance(problem, AttentionProblem | IndexerProblem):
        found = features_of(compile_attention(problem, config, gpu, Device(family_of(gpu), 132)))
        if not found.loops:
            raise RuntimeError(f"{problem}, {config}: no loop with a matrix instruction")
        return [found]
    twice_bits, codebook = problem.format.twice_bits, problem.format.index
    if isinstance(problem, LinearProblem) and isinstance(config, LinearConfig):
        launch = product_launch(gpu, problem.k, problem.n, twice_bits, codebook, config, task.rows)
        return [features_of(compile_for(*launch))]
    if isinstance(problem, MoeProblem) and isinstance(config, MoeConfig):
        half = task.rows != min(problem.SAMPLES)
        sides = ((problem.hidden, problem.intermediate), (problem.intermediate, problem.hidden))
        splits = (config.split, config.down_split)
        launches = [
            expert_gemm_launch(
                gpu, *sides[i], twice_bits, codebook, config.block_m, config, down=bool(i), split=splits[i], half=half,
                rows=task.rows,
            )
            for i in (0, 1)
        ]  # fmt: skip
        return [features_of(compile_for(*launch)) for launch in launches]
    report = audit_decode(gpu, problem.format.bits, codebook)
    return [Features(report.registers or 0, report.shared, 4, report.spills, (), report.loop_instructions)]


def compile_all(
    tasks: Sequence[Task], work: Callable[[Task], list[Features]], jobs: int, seconds: float | None = None
) -> Iterator[tuple[Task, list[Features] | str]]:
    """(task, its features or what went wrong) as they come, in `jobs` processes; after `seconds` no further task is begun.

    A candidate that does not compile or does not fit is no error of the run.
    """
    if jobs <= 1:
        started = time.monotonic()
        for task in tasks:
            if seconds is not None and time.monotonic() - started > seconds:
                return
            yield task, _attempt(work, task)
        return
    pool = concurrent.futures.ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    futures = {pool.submit(_attempt, work, task): task for task in tasks}
    workers = list(pool._processes.values())
    try:
        for future in concurrent.futures.as_completed(futures, timeout=seconds):
            yield futures[future], future.result()
    except concurrent.futures.TimeoutError:
        pass
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:  # what has not come back by now never may
            worker.terminate()


def _attempt(work: Callable[[Task], list[Features]], task: Task) -> list[Features] | str:
    try:
        return work(task)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def default_jobs() -> int:
    """All processors but one."""
    return max(1, (os.cpu_count() or 2) - 1)
