"""Fits the predictor to measurements of `autotune calibrate`, and says how good it is on problems that it was not fitted to.

    python -m autotune fit --data calibration.json              # prints the validation, writes autotune/parameters.json
    python -m autotune plot --data calibration.json --out docs/figures

Problems, not candidates, are held out: every second (op, sizes, format), in their order. A group is a problem, its range of
rows and a row count; a candidate is ranked within its group. Needs the extra `calibrate`.
"""

from __future__ import annotations

import collections
import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

from .features import Features
from .machine import MACHINES, Machine
from .pool import Task
from .predictor import FITTED, VERSION, Parameters, predict_us
from .problems import Format, LinearProblem, MoeProblem, Problem
from .rank import form_of, geometric_mean
from .tune import config_of


class Sample(NamedTuple):
    """One measurement."""

    problem: Problem
    rows: int
    m: int
    config: Any
    us: float
    features: list[Features]

    def predicted(self, machine: Machine, parameters: Parameters) -> float:
        return predict_us(self.problem, self.config, self.m, self.features, machine, parameters)


class Group(NamedTuple):
    """Candidates of one problem at one row count, in the order of the file: the rules' choice first."""

    name: str
    held_out: bool
    samples: list[Sample]


class Score(NamedTuple):
    """How a group's predicted order compares with the measured one. regret: time of the predicted best over the best time."""

    spearman: float
    regret: float
    error: float  # geometric mean of |predicted / measured|, as a factor


def read(path: Path) -> list[Group]:
    """The groups of a calibration file with at least four candidates."""
    found: dict[tuple[Problem, int, int], list[Sample]] = collections.defaultdict(list)
    samples: list[Sample] = []
    forms: dict[Task, list[Features]] = {}
    for row in json.loads(path.read_text())["rows"]:
        values = dict(row["problem"])
        op, format = values.pop("op"), Format.parse(values.pop("format"))
        problem = (LinearProblem if op == "linear" else MoeProblem)(**values, format=format)
        config = None if row["config"] is None else config_of(op, row["config"])
        features = [Features.from_json(each) for each in row["features"]]
        sample = Sample(problem, row["rows"], row["m"], config, row["us"], features)
        samples.append(sample)
        if config is not None and all(each.loops for each in features):
            forms.setdefault(form_of(Task(problem, row["rows"], config)), features)
    for sample in samples:  # a program of a single step has no loop: its form has, at other sizes
        if sample.config is not None:
            form = form_of(Task(sample.problem, sample.rows, sample.config))
            if form not in forms:
                continue
            sample = sample._replace(features=forms[form])
        found[sample.problem, sample.rows, sample.m].append(sample)
    problems = list(dict.fromkeys(problem for problem, _, _ in found))
    held_out = {p for kind in (LinearProblem, MoeProblem) for p in [each for each in problems if isinstance(each, kind)][1::2]}
    return [
        Group(f"{problem}, m = {m}", problem in held_out, samples)
        for (problem, _, m), samples in found.items()
        if len(samples) >= 4
    ]


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    for place, i in enumerate(order):
        ranks[i] = place
    for value in set(values):  # ties share the mean of their places
        equal = [i for i, each in enumerate(values) if each == value]
        mean = statistics.mean(ranks[i] for i in equal)
        for i in equal:
            ranks[i] = mean
    return ranks


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; 0 where either side is constant."""
    ranks = _ranks(a), _ranks(b)
    if min(len(set(each)) for each in ranks) == 1:
        return 0.0
    return statistics.correlation(*ranks)


def score(group: Group, machine: Machine, parameters: Parameters) -> Score:
    predicted = [sample.predicted(machine, parameters) for sample in group.samples]
    measured = [sample.us for sample in group.samples]
    chosen = measured[predicted.index(min(predicted))]
    error = geometric_mean(math.exp(abs(math.log(p / t))) for p, t in zip(predicted, measured))
    return Score(spearman(predicted, measured), chosen / min(measured), error)


def loss(groups: Sequence[Group], machine: Machine, parameters: Parameters) -> float:
    """Squared logarithmic errors: within a group fully, of a group's mean by a fifth; good candidates weigh more."""
    total = 0.0
    for group in groups:
        logs = [math.log(sample.predicted(machine, parameters) / sample.us) for sample in group.samples]
        best = min(sample.us for sample in group.samples)
        weights = [(best / sample.us) ** 1.5 for sample in group.samples]
        mean = sum(w * x for w, x in zip(weights, logs)) / sum(weights)
        spread = sum(w * (x - mean) ** 2 for w, x in zip(weights, logs)) / sum(weights)
        total += spread + 0.2 * mean**2
    return total / len(groups)


def fit(groups: Sequence[Group], machine: Machine, rounds: int, seed: int = 0) -> Parameters:
    """Parameters with the least loss: Nelder-Mead over their logarithms, started again near the best point so far."""
    import numpy as np
    from scipy.optimize import minimize

    names = [field.name for field in fields(Parameters)]
    generator = random.Random(seed)
    build = lambda logs: Parameters(**dict(zip(names, (math.exp(x) for x in logs), strict=True)))
    start = np.log([getattr(Parameters(), name) for name in names])
    objective = lambda logs: loss(groups, machine, build(logs)) + 1e-4 * sum(x * x for x in logs - start)
    best = start
    for turn in range(rounds):
        first = best if turn == 0 else best + np.array([generator.gauss(0, 0.4) for _ in names])
        found = minimize(objective, first, method="Nelder-Mead", options={"maxfev": 150 * len(names), "fatol": 1e-5})
        if objective(found.x) < objective(best):
            best = found.x
    return build(best)


def report(groups: Sequence[Group], machine: Machine, parameters: Parameters) -> dict[str, Any]:
    """Prints every group's score; returns the summary of the held-out ones."""
    summary: dict[str, Any] = {}
    for held_out in (False, True):
        scores = []
        for group in groups:
            if group.held_out == held_out:
                scores.append(score(group, machine, parameters))
                kind = "held out" if held_out else "fitted"
                print(f"{kind:9}{group.name:60}{len(group.samples):3} candidates  spearman {scores[-1].spearman:5.2f}  "
                      f"regret {scores[-1].regret:.3f}  error x{scores[-1].error:.2f}")  # fmt: skip
        if scores:
            summary["held_out" if held_out else "fitted"] = {
                "groups": len(scores),
                "candidates": sum(len(group.samples) for group in groups if group.held_out == held_out),
                "median_spearman": round(statistics.median(each.spearman for each in scores), 3),
                "median_regret": round(statistics.median(each.regret for each in scores), 3),
                "worst_regret": round(max(each.regret for each in scores), 3),
                "median_error": round(statistics.median(each.error for each in scores), 3),
            }
    return summary


def main(args: Any) -> int:
    """Fit to half of the problems, validate on the others, write the parameters."""
    machine = MACHINES[args.machine]
    groups = read(args.data)
    parameters = Parameters(**json.loads(FITTED.read_text())["parameters"])
    if args.rounds:
        parameters = fit([group for group in groups if not group.held_out], machine, args.rounds)
    summary = report(groups, machine, parameters)
    print(json.dumps(summary, indent=1))
    if args.rounds:
        header = json.loads(args.data.read_text())["header"]
        facts = {name: header[name] for name in ("device", "date", "torch", "triton", "driver")}
        rounded = {name: float(f"{value:.4g}") for name, value in asdict(parameters).items()}
        content = {"version": VERSION, "fitted": facts | summary, "parameters": rounded}
        FITTED.write_text(json.dumps(content, indent=1) + "\n")
    return 0


def plot(args: Any) -> int:
    """Predicted against measured times, one PNG for each op."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    machine = MACHINES[args.machine]
    parameters = Parameters(**json.loads(FITTED.read_text())["parameters"])
    args.out.mkdir(parents=True, exist_ok=True)
    groups = read(args.data)
    for op in ("linear", "moe"):
        figure, axes = pyplot.subplots(figsize=(7, 6), dpi=110)
        for held_out, marker in ((False, "."), (True, "x")):
            samples = [s for g in groups if g.held_out == held_out for s in g.samples if s.problem.op == op]
            if samples:
                predicted = [sample.predicted(machine, parameters) for sample in samples]
                label = f"{'held out' if held_out else 'fitted'} ({len(samples)} measurements)"
                axes.scatter([sample.us for sample in samples], predicted, marker=marker, s=28, linewidths=1, label=label)
        ends = axes.get_xlim()
        axes.plot(ends, ends, color="grey", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="measured, us", ylabel="predicted, us", title=f"{op} on {machine.device}")
        axes.legend()
        figure.tight_layout()
        figure.savefig(args.out / f"predicted_{op}.png")
        print(args.out / f"predicted_{op}.png")
    return 0


def add_commands(commands: Any) -> None:
    for name, run, text in (("fit", main, "fit the predictor and validate it"), ("plot", plot, "predicted against measured")):
        parser = commands.add_parser(name, help=text, description=run.__doc__)
        parser.add_argument("--data", type=Path, required=True, help="what `calibrate` wrote")
        parser.add_argument("--machine", choices=sorted(MACHINES), default="h200")
        parser.set_defaults(run=run)
        if name == "fit":
            parser.add_argument("--rounds", type=int, default=3, help="starts of the optimizer; 0: validate only (default 3)")
        else:
            parser.add_argument("--out", type=Path, default=Path("docs/figures"))
