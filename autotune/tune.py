"""The commands that make and check tables: measure, predict, compare, verify."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from tqdm import tqdm

from exl3_triton import tables
from exl3_triton.ops.tuning import Device

from .attention import attention_work
from .machine import MACHINES, Machine, machines_of
from .pool import Task, compile_all, compile_on_gpu, default_jobs
from .predictor import VERSION
from .problems import (
    CACHED,
    PROBLEMS,
    AttentionProblem,
    Format,
    IndexerProblem,
    LinearProblem,
    Problem,
    model_problems,
    parse_attention,
    parse_shape,
)
from .rank import Ranked, compile_forms, geometric_mean, rank
from .space import CONFIGS, Config, config_json, space

ALL_OPS = ",".join(tables.KEYS)
GAIN = {"measured": 0.98, "predicted": 0.95}
"""A candidate replaces the rules' choice where its time is below this part of the choice's."""


def key_of(problem: Problem, rows: int) -> tables.Key:
    """The name of an entry in `exl3_triton.tables`."""
    parts = (getattr(problem, field.name) for field in dataclasses.fields(problem))
    return (*(each for part in parts for each in (astuple(part) if isinstance(part, Format) else (part,))), rows)


def problem_of(op: str, key: tables.Key) -> tuple[Problem, int]:
    """The inverse of `key_of`."""
    *sizes, rows = key
    if op not in CACHED:
        *sizes, codebook, bits = sizes
        sizes.append(Format(codebook, bits))
    return PROBLEMS[op](*sizes), rows


def config_of(op: str, config: Any) -> Config:
    return CONFIGS[op](**config)


def wanted(args: argparse.Namespace) -> list[tuple[Problem, int]]:
    """(problem, range of rows) as the command line asks for them. Raises ValueError for illegal names and shapes."""
    ops = tuple(args.ops.split(","))
    if unknown := set(ops) - set(tables.KEYS):
        raise ValueError(f"--ops {','.join(sorted(unknown))}: required {', '.join(tables.KEYS)}")
    formats, kv = [Format.parse(text) for text in args.formats.split(",")], tuple(args.kv.split(","))
    if unknown := set(kv) - set(tables.KV_FORMATS):
        raise ValueError(f"--kv {','.join(sorted(unknown))}: required {', '.join(tables.KV_FORMATS)}")
    problems: list[Problem] = []
    for name in args.preset:
        problems += model_problems(name, formats, ops, kv)
    for text in args.shape:
        problems += [parse_attention(text, each) for each in kv] if ":" in text else [parse_shape(text, f) for f in formats]
    if not problems:
        raise ValueError("nothing to tune: required --preset or --shape")
    only = {int(text) for text in args.rows.split(",") if text}
    return [(p, rows) for p in dict.fromkeys(problems) if p.op in ops for rows in p.SAMPLES if not only or rows in only]


def rates(problem: Problem, us: dict[int, float]) -> dict[str, Any]:
    """GB/s of weights or of the cache, and TFLOP/s, by rows, of a measured entry."""
    work = {m: _work(problem, m) for m in us}
    return {
        "gbps": {m: round(work[m][0] / t / 1e3, 1) for m, t in us.items()},
        "tflops": {m: round(work[m][1] / t / 1e6, 2) for m, t in us.items()},
    }


def _work(problem: Problem, m: int) -> tuple[float, float]:
    """(bytes of weights or of the cache that a call has to read, floating-point operations)."""
    if isinstance(problem, AttentionProblem | IndexerProblem):
        return attention_work(problem, m)
    if isinstance(problem, LinearProblem):
        return problem.k * problem.n * problem.format.bits / 8, 2 * m * problem.k * problem.n
    size = 3 * problem.hidden * problem.intermediate
    hit = problem.num_experts * (1 - (1 - problem.top_k / problem.num_experts) ** m)
    return hit * size * problem.format.bits / 8, 2 * m * problem.top_k * size


def entry_of(ranked: Sequence[Ranked], rule: Ranked | None, source: str, evidence: dict[str, Any]) -> tables.Entry:
    """The best candidate, or the rules' choice where the best is not clearly faster; the next best goes into the evidence."""
    order = sorted(ranked, key=lambda each: each.score)
    best = order[0]
    if rule is not None and best.score > GAIN[source] * rule.score:
        best = rule
    second = next((each for each in order if each.config != best.config), None)
    facts: dict[str, Any] = {"source": source, "us": best.us} | evidence
    if rule is not None:
        facts["rule_us"] = rule.us
    if second is not None:
        facts["runner_up"] = {"us": second.us, "config": config_json(second.config)}
    return tables.Entry(config_json(best.config) or {}, json.loads(json.dumps(facts)))


def predict(args: argparse.Namespace) -> int:
    """Write tables for GPUs that need not be there, from code compiled for them."""
    import triton

    todo = wanted(args)
    machines = machines_of(args.arch)
    if args.machine:
        machines = [MACHINES[args.machine]]
    for target in dict.fromkeys(machine.code for machine in machines):
        alike = [machine for machine in machines if machine.code == target]
        devices = [Device(machine.family, machine.processors) for machine in alike]
        candidates = [Task(p, rows, config) for device in devices for p, rows in todo for config in space(p, rows, device)]
        forms = compile_forms(candidates, target, args.jobs)
        for machine in alike:
            evidence = {"predictor": VERSION, "triton": triton.__version__}
            entries: dict[str, dict[tables.Key, tables.Entry]] = {op: {} for op in tables.KEYS}
            for problem, rows in todo:
                ranked, rule = rank(problem, rows, machine, forms)
                if ranked:
                    entries[problem.op][key_of(problem, rows)] = entry_of(ranked, rule, "predicted", evidence)
            for op, found in entries.items():
                if found:
                    table = tables.Table(op, machine.device, machine.capability, machine.processors, found)
                    print(f"{len(found)} entries: {tables.save(args.out, table)}")
    return 0


def _up_to_date(entry: tables.Entry | None, versions: dict[str, str]) -> bool:
    """Whether an entry was measured with the present torch, Triton and driver."""
    return entry is not None and all(entry.evidence.get(name) == value for name, value in versions.items())


def _machine_like(device: Device) -> Machine:
    """The machine that predictions for a device start from."""
    alike = [machine for machine in MACHINES.values() if machine.capability == device.capability]
    return min(alike or [MACHINES["h200"]], key=lambda machine: abs(machine.processors - device.processors))


def _plan(
    todo: Sequence[tuple[Problem, int]], device: Device, count: int, jobs: int
) -> dict[tuple[Problem, int], list[Config]]:
    """What to measure: the rules' choice, then the `count` - 1 that the predictor likes best."""
    machine = _machine_like(device)
    plain = device._replace(name="")
    forms = compile_forms([Task(p, rows, c) for p, rows in todo for c in space(p, rows, plain)], machine.code, jobs)
    found: dict[tuple[Problem, int], list[Config]] = {}
    for problem, rows in todo:
        ranked, _ = rank(problem, rows, machine, forms)
        first = space(problem, rows, plain)[0]
        found[problem, rows] = list(dict.fromkeys([first, *(each.config for each in ranked)]))[:count]
    return found


def measure_entry(problem: Problem, rows: int, configs: Sequence[Config]) -> tuple[list[Ranked], dict[str, str]]:
    """(what each right candidate took, why the others were left out) on the present GPU."""
    from .bench import bench_of

    times: dict[Config, dict[int, float]] = {config: {} for config in configs}
    failed: dict[str, str] = {}
    for m in problem.SAMPLES[rows]:
        bench = bench_of(problem, m, rows)
        want = bench.want()
        right: list[Config] = []
        for config in times:
            try:
                error = bench.error(config, want)
                failure = "" if error < bench.tolerance else f"wrong: relative error {error:.2g}"
            except Exception as exception:  # a candidate may not fit the card
                failure = f"{type(exception).__name__}: {str(exception)[:200]}"
            if failure:
                failed[str(config)] = failure
            else:
                right.append(config)
        if not right:
            return [], failed
        measured = dict(zip(right, bench.time(right), strict=True))
        times = {config: times[config] | {m: round(us, 2)} for config, us in measured.items()}
    return [Ranked(config, us) for config, us in times.items()], failed


def measure(args: argparse.Namespace) -> int:
    """Measure on the present GPU and write the user's table; entries that the table has for the present versions are kept."""
    import torch

    from exl3_triton.ops.tuning import device_of
    from exl3_triton.timing import header

    todo = wanted(args)
    if not torch.cuda.is_available():
        print("no GPU here: `predict` makes tables without one", file=sys.stderr)
        return 2
    started = time.monotonic()
    device = device_of(torch.device("cuda"))
    facts = header("cuda")
    present = {name: facts[name] for name in ("torch", "triton", "driver")}
    have: dict[str, Any] = {}
    for op in {problem.op for problem, _ in todo}:
        empty = tables.Table(op, device.name, device.capability, device.processors, {})
        path = tables.save(args.out, empty)  # refuses a damaged table or a folder that cannot be written before any work
        have[op] = tables.load(path, op).entries
    left = [
        (problem, rows)
        for problem, rows in todo
        if args.again or not _up_to_date(have[problem.op].get(key_of(problem, rows)), present)
    ]
    print(f"{len(todo) - len(left)} of {len(todo)} entries are there already", file=sys.stderr)
    configs = _plan(left, device, args.candidates, args.jobs)
    tasks = [Task(*each, config) for each, chosen in configs.items() for config in chosen]
    compiling = compile_all(tasks, compile_on_gpu, args.jobs, 0.6 * args.budget - (time.monotonic() - started))
    ready: set[Task] = set()
    for task, result in tqdm(compiling, total=len(tasks), desc="compile", disable=None):
        if not isinstance(result, str):
            ready.add(task)
    done = 0
    for (problem, rows), chosen in tqdm(configs.items(), desc="measure", disable=None):
        usable = [config for config in chosen if Task(problem, rows, config) in ready]
        if time.monotonic() - started > args.budget or chosen[0] not in usable:
            continue
        torch.cuda.empty_cache()
        ranked, failed = measure_entry(problem, rows, usable)
        for config, why in failed.items():
            print(f"{problem}, {rows} rows, {config}: {why}", file=sys.stderr)
        rule = next((each for each in ranked if each.config == chosen[0]), None)
        if not ranked:
            continue
        entry = entry_of(ranked, rule, "measured", {"date": time.strftime("%Y-%m-%d")} | present)
        times = {int(m): us for m, us in entry.evidence["us"].items()}
        entry = tables.Entry(entry.config, {**entry.evidence, **json.loads(json.dumps(rates(problem, times)))})
        found = {key_of(problem, rows): entry}
        path = tables.save(args.out, tables.Table(problem.op, device.name, device.capability, device.processors, found))
        _append(path.with_suffix(".jsonl"), problem, rows, ranked, present)
        done += 1
    print(f"{done} of {len(left)} entries measured in {time.monotonic() - started:.0f} s; run again for the rest")
    return 0 if done == len(left) else 1


def _append(path: Path, problem: Problem, rows: int, ranked: Sequence[Ranked], present: dict[str, str]) -> None:
    """One line of the journal: every candidate's times, for later looks at the space."""
    line = {"problem": str(problem), "rows": rows, "date": time.strftime("%Y-%m-%d")} | present
    line["candidates"] = [{"config": config_json(each.config), "us": each.us} for each in ranked]
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _read(text: str, op: str) -> tables.Table:
    """A table by its path, or by the device's name or file name among the user's and the shipped ones."""
    return tables.load(_path(text, op), op)


def _path(text: str, op: str) -> Path:
    path = Path(text)
    if path.is_file():
        return path
    name = tables.file_name(text.removesuffix(".json"))
    places = [folder / op / name for folder in (tables.user_directory(), tables.SHIPPED)]
    return next((place for place in places if place.is_file()), places[-1])


def compare(args: argparse.Namespace) -> int:
    """Print two tables side by side: times of the entries that both have, and where their choices differ."""
    first, second = (_read(text, args.op) for text in args.tables)
    print(f"{args.op}: {first.device} | {second.device}")
    same = differ = 0
    for key, entry in sorted(first.entries.items()):
        other = second.entries.get(key)
        if other is None:
            continue
        same += entry.config == other.config
        differ += entry.config != other.config
        problem, rows = problem_of(args.op, key)
        times = [geometric_mean(each.evidence["us"].values()) for each in (entry, other)]
        ratio = times[1] / times[0]
        changed = [f"{n} {v} | {other.config[n]}" for n, v in entry.config.items() if other.config[n] != v]
        print(f"{problem}, {rows} rows: {times[0]:.1f} | {times[1]:.1f} us ({ratio:.2f})  {', '.join(changed) or 'same'}")
    print(f"{same} choices are the same, {differ} differ; {len(first.entries)} | {len(second.entries)} entries")
    return 0


def verify(args: argparse.Namespace) -> int:
    """Check every entry of the present GPU's table: it compiles, is right and takes about its recorded time."""
    import torch

    from exl3_triton.ops.tuning import device_of

    if not torch.cuda.is_available():
        print("no GPU here: nothing to verify", file=sys.stderr)
        return 2
    device = device_of(torch.device("cuda"))
    bad = 0
    for op in args.ops.split(","):
        if not args.table and not _path(device.name, op).is_file():
            print(f"{op}: no table for {device.name}")
            continue
        table = _read(args.table or device.name, op)
        for key, entry in tqdm(sorted(table.entries.items()), desc=op, disable=None):
            problem, rows = problem_of(op, key)
            ranked, failed = measure_entry(problem, rows, [config_of(op, entry.config)])
            recorded = geometric_mean(entry.evidence["us"].values())
            slower = 0.0 if not ranked else 100 * (ranked[0].score / recorded - 1)
            what = "; ".join(failed.values()) or f"{ranked[0].score:.1f} us, recorded {recorded:.1f} ({slower:+.1f} %)"
            wrong = bool(failed) or (entry.evidence["source"] == "measured" and slower > args.percent)
            bad += wrong
            if wrong or args.all:
                print(f"{'BAD ' if wrong else ''}{problem}, {rows} rows: {what}", flush=True)
    print(f"{bad} entries are bad")
    return int(bad > 0)


def _problems(parser: argparse.ArgumentParser, out: Path) -> None:
    parser.add_argument("--preset", action="append", default=[], metavar="NAME[-tpN]", help="or a folder or config.json")
    parser.add_argument(
        "--shape", action="append", default=[], metavar="KxN | ExHxIxTOP_K | KIND:HEADSxKV_HEADSxWIDTHxVALUE | indexer:HxD",
        help=f"sizes by hand; KIND: {', '.join(tables.KINDS)}",
    )  # fmt: skip
    parser.add_argument("--formats", default="mcg.3,mcg.4", help="codebook and bits, comma-separated (default mcg.3,mcg.4)")
    parser.add_argument("--kv", default="bf16,fp8", help="formats of the cache for attention and indexer (default bf16,fp8)")
    parser.add_argument("--ops", default=ALL_OPS, help=f"of {ALL_OPS} (the default)")
    parser.add_argument("--rows", default="", help="only these ranges of rows, such as 16,32")
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="processes that compile")
    parser.add_argument("--out", type=Path, default=out, help=f"folder of tables (default {out})")


def add_commands(commands: Any) -> None:
    """The four commands, with `run` as the function that takes their arguments."""
    own = tables.user_directory()
    parser = commands.add_parser("measure", help="measure on the present GPU", description=measure.__doc__)
    _problems(parser, own)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds (default 600); a further run goes on")
    parser.add_argument("--candidates", type=int, default=8, help="how many to measure an entry (default 8)")
    parser.add_argument("--again", action="store_true", help="also entries that were measured with the present versions")
    parser.set_defaults(run=measure)
    parser = commands.add_parser("predict", help="predict for another GPU", description=predict.__doc__)
    _problems(parser, own)
    parser.add_argument("--arch", default="sm_120", help="sm_NN, or one of " + ", ".join(MACHINES))
    parser.add_argument("--machine", choices=sorted(MACHINES), help="only this GPU of the architecture")
    parser.set_defaults(run=predict)
    parser = commands.add_parser("compare", help="two tables side by side", description=compare.__doc__)
    parser.add_argument("tables", nargs=2, metavar="TABLE", help="a path, or a device's name")
    parser.add_argument("--op", default="linear", choices=sorted(tables.KEYS))
    parser.set_defaults(run=compare)
    parser = commands.add_parser("verify", help="check a table on its GPU", description=verify.__doc__)
    parser.add_argument("--table", default="", help="a path, or a device's name (default: the present GPU's)")
    parser.add_argument("--ops", default=ALL_OPS)
    parser.add_argument("--percent", type=float, default=10.0, help="how much slower than recorded is bad (default 10)")
    parser.add_argument("--all", action="store_true", help="print good entries too")
    parser.set_defaults(run=verify)
