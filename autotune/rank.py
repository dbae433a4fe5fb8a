"""Candidates of a problem in the order of their predicted time, from code compiled once per form and shared by all sizes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from tqdm import tqdm

from exl3_triton.ops.tuning import Device, LinearConfig

from .attention import AttentionConfig
from .features import Features
from .machine import Machine
from .pool import Task, compile_all, compile_for_target
from .predictor import Parameters, predict_us
from .problems import AttentionProblem, IndexerProblem, LinearProblem, MoeProblem, Problem
from .space import SHARED_LIMIT, Config, MoeConfig, space

_SPILLS = {"sm_90": 200}
"""Instructions on local memory up to which a form is a candidate: on an H200 some cost less than a lower occupancy."""


class Ranked(NamedTuple):
    config: Config
    us: dict[int, float]  # predicted, by rows

    @property
    def score(self) -> float:
        return geometric_mean(self.us.values())


def geometric_mean(values: Iterable[float]) -> float:
    """What candidates of a range of rows are compared by: every row count of it weighs the same."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def form_of(task: Task) -> Task:
    """A candidate with representative sizes: its main loop's code does not depend on the problem's."""
    problem, rows, config = task
    if isinstance(problem, AttentionProblem | IndexerProblem):
        most = min(2, config.most) if isinstance(config, AttentionConfig) else 0
        few = replace(config, most=most) if isinstance(config, AttentionConfig) else config
        return Task(problem, min(problem.SAMPLES), few)
    if isinstance(problem, LinearProblem) and isinstance(config, LinearConfig):
        return Task(LinearProblem(4096, 4096, problem.format), rows, config._replace(split=4))
    assert isinstance(config, MoeConfig)
    rows = rows if rows == min(MoeProblem.SAMPLES) else max(MoeProblem.SAMPLES)
    return Task(MoeProblem(64, 4096, 1024, 8, problem.format), rows, replace(config, split=1, down_split=1))


def compile_forms(candidates: Iterable[Task], target: str, jobs: int) -> dict[Task, list[Features]]:
    """Features of every form among the candidates that compiles; the compiler's cache makes a second run short."""
    forms = list(dict.fromkeys(form_of(task) for task in candidates))
    done = compile_all(forms, functools.partial(compile_for_target, target), jobs)
    progress = tqdm(done, total=len(forms), desc=f"compile for {target}", disable=None)
    return {form: result for form, result in progress if not isinstance(result, str)}


def rank(
    problem: Problem, rows: int, machine: Machine, forms: Mapping[Task, list[Features]], parameters: Parameters | None = None
) -> tuple[list[Ranked], Ranked | None]:
    """(candidates that fit, best first; the rules' choice, None where that does not compile)."""
    device = Device(machine.family, machine.processors)
    found: list[Ranked] = []
    first: Any = None
    for i, config in enumerate(space(problem, rows, device)):
        features = forms.get(form_of(Task(problem, rows, config)))
        if features is None:
            continue
        us = {m: round(predict_us(problem, config, m, features, machine, parameters), 2) for m in problem.SAMPLES[rows]}
        if i == 0:
            first = Ranked(config, us)
        spills = max(each.spills for each in features)
        limit = SHARED_LIMIT if problem.op in ("linear", "moe") else machine.shared_memory - 1024
        if i == 0 or (spills <= _SPILLS.get(machine.target, 0) and max(f.shared for f in features) <= limit):
            found.append(Ranked(config, us))
    return sorted(found, key=lambda ranked: ranked.score), first
