"""Measures attention and the indexer on this machine's GPU: `python tests/benchmark/attention.py --out results.json`.

    --match TEXTS   only problems whose name contains one of these texts, comma-separated
    --sweep         every candidate configuration of each problem, checked on a small problem first, and the best one
    --jobs N        compile (and check) in N processes first

The measuring process is a child: where a candidate crashes it, another one goes on with the next.

Paged caches of random numbers with pages in random order, all sequences at full context. Times are medians of CUDA graph
replays over distinct caches of more than 260 MB. `limit_fraction`: the larger of bytes that must be read over the HBM read
rate and FLOPs over the rate of `torch.matmul`, both measured in the same run, over the time. FLOPs of prefill: the causal half
of both products.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from timing import copies_for, header, limit_fraction, microseconds
from torch import Tensor

from exl3_triton import reference
from exl3_triton.kv_format import head_planes, pack_heads, pack_latents, unpack_heads
from exl3_triton.ops import attention, indexer, prefill
from exl3_triton.ops.attention import DecodeTile, SplitPlan
from exl3_triton.ops.prefill import PrefillTile

gqa = importlib.import_module("exl3_triton.ops.gqa")
GroupedTile = gqa.GroupedTile

LATENT, ROPE, INDEX, TOPK, PAGE = 512, 64, 128, 2048, 64
KV_HEADS, HEAD = 8, 128
WIDTHS = {"deepseek_v3": (128, 128), "glm_moe_dsa": (192, 256)}  # of the part without rope, of a value
SCALE = 0.08
Candidate = dict[str, Any]


class Problem(NamedTuple):
    op: str
    family: str
    heads: int
    context: int
    batch: int
    kv: str = "bf16"

    @property
    def name(self) -> str:
        return f"{self.op}.{self.family}.h{self.heads}.c{self.context}.b{self.batch}.{self.kv}"


class Work(NamedTuple):
    """Calls over distinct data, the least bytes and operations of one, and its results beside those of the reference."""

    calls: list[Callable[[], Any]]
    nbytes: float
    flops: float
    expected: Callable[[], Tensor]


PROBLEMS = [
    *(Problem("mla_decode", "glm_moe_dsa", heads, 65536, batch) for heads in (16, 64) for batch in (1, 16)),
    *(Problem("gqa_decode", "glm4_moe", 96, 65536, batch) for batch in (1, 16)),
    *(Problem("index_scores", "glm_moe_dsa", 32, 131072, batch) for batch in (1, 16)),
    *(Problem("index_selection", "glm_moe_dsa", 32, 131072, batch) for batch in (1, 16)),
    *(Problem("sparse_decode", "glm_moe_dsa", heads, 131072, batch) for heads in (16, 64) for batch in (1, 16)),
    *(Problem("mla_prefill", family, 16, context, 1) for family in WIDTHS for context in (8192, 32768)),
    *(Problem("gqa_prefill", "glm4_moe", 96, context, 1) for context in (8192, 32768)),
    *(Problem("mla_decode", "glm_moe_dsa", heads, 65536, batch, "fp8") for heads in (16, 64) for batch in (1, 16)),
    *(Problem("mla_decode", "glm_moe_dsa", 16, 65536, 16, kv) for kv in ("nvfp4", "nvfp4-fp8rope")),
    Problem("gqa_decode", "glm4_moe", 96, 65536, 16, "fp8"),
    Problem("index_scores", "glm_moe_dsa", 32, 131072, 16, "fp8"),
]


def pages_of(problem: Problem) -> int:
    return problem.batch * -(-problem.context // PAGE)


def place(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Block table with pages in random order, sequence and position of each token: the last of each, or of prefill all."""
    count = pages_of(problem)
    table = torch.randperm(count, device="cuda").int().view(problem.batch, -1)
    tokens = problem.context if problem.op.endswith("prefill") else 1
    sequence = torch.arange(problem.batch, device="cuda").repeat_interleave(tokens).int()
    positions = torch.arange(problem.context - tokens, problem.context, device="cuda").repeat(problem.batch)
    return table, sequence, positions


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(scale)


def latent_cache(problem: Problem) -> Tensor:
    """Random rows of MLA; packed ones are the same for each sequence, though not in memory."""
    if problem.kv == "bf16":
        return random(pages_of(problem), PAGE, LATENT + ROPE)
    rows = torch.randn(pages_of(problem) // problem.batch, PAGE, LATENT + ROPE, device="cuda")
    return pack_latents(rows, LATENT, problem.kv).repeat(problem.batch, 1, 1)


def head_cache(problem: Problem, *row: int) -> Tensor:
    """Random index keys, or keys or values of GQA."""
    if problem.kv == "bf16":
        return random(pages_of(problem), PAGE, *row)
    pages = pages_of(problem) // problem.batch
    cache = torch.empty(pages, PAGE, *row[:-1], row[-1] + 4, dtype=torch.uint8, device="cuda")
    for plane, packed in zip(head_planes(cache), pack_heads(torch.randn(pages, PAGE, *row, device="cuda")), strict=True):
        plane.copy_(packed)
    return cache.repeat(problem.batch, *(1 for _ in cache.shape[1:]))


def stored(cache: Tensor) -> Tensor:
    """As the reference takes it."""
    return cache if cache.dtype == torch.uint8 else cache.float()


def copies(problem: Problem, nbytes: float, small: bool) -> int:
    return 1 if small else copies_for(int(nbytes))


def split(candidate: Candidate, keys: int) -> SplitPlan | None:
    """A candidate's plan for contexts of `keys`."""
    if "most" not in candidate:
        return None
    least = candidate.get("least", 128)
    return SplitPlan(least, candidate["most"], min(-(-keys // least), candidate["most"]))


def mla_decode(problem: Problem, candidate: Candidate, small: bool) -> Work:
    table, sequence, positions = place(problem)
    rows = problem.batch * problem.context
    first = latent_cache(problem)
    nbytes = rows * first.shape[-1] * first.itemsize
    caches = [first] + [first.clone() for _ in range(copies(problem, nbytes, small) - 1)]
    q, qr = random(problem.batch, problem.heads, LATENT), random(problem.batch, problem.heads, ROPE)
    plan = split(candidate, problem.context)
    options = {"tile": candidate.get("tile"), "plan": plan}
    rest = (table, sequence, positions, None, SCALE)
    calls = [
        lambda c=cache: attention._launch_mla_decode(q, qr, c, *rest, problem.context, **options)[0]  # type: ignore[misc]
        for cache in caches
    ]
    flops = 2 * rows * problem.heads * (2 * LATENT + ROPE)
    return Work(calls, nbytes, flops, lambda: reference.mla_decode(q.float(), qr.float(), stored(first), *rest)[0])


def sparse_decode(problem: Problem, candidate: Candidate, small: bool) -> Work:
    table, sequence, positions = place(problem)
    chosen = min(TOPK, problem.context // 2)
    nbytes = problem.batch * chosen * (LATENT + ROPE) * 2
    count = copies(problem, nbytes, small)
    cache = random(pages_of(problem), PAGE, LATENT + ROPE)
    q, qr = random(problem.batch, problem.heads, LATENT), random(problem.batch, problem.heads, ROPE)
    picks = [
        torch.rand(problem.batch, problem.context, device="cuda").topk(chosen).indices.sort().values.int()
        for _ in range(min(count, 64))
    ]
    plan = split({"least": 64} | candidate, chosen)
    options = {"tile": candidate.get("tile"), "plan": plan}
    calls = [
        lambda s=selected: attention._launch_mla_decode(  # type: ignore[misc]
            q, qr, cache, table, sequence, positions, s, SCALE, problem.context, **options
        )[0]
        for selected in picks
    ]
    flops = 2 * problem.batch * chosen * problem.heads * (2 * LATENT + ROPE)

    def expected() -> Tensor:
        place = (table, sequence, positions, picks[0])
        return reference.mla_decode(q.float(), qr.float(), cache.float(), *place, SCALE)[0]

    return Work(calls, nbytes, flops, expected)


def gqa_decode(problem: Problem, candidate: Candidate, small: bool) -> Work:
    where = place(problem)
    rows = problem.batch * problem.context
    k, v = (head_cache(problem, KV_HEADS, HEAD) for _ in range(2))
    nbytes = 2 * rows * KV_HEADS * k.shape[-1] * k.itemsize
    caches = [(k, v)] + [(k.clone(), v.clone()) for _ in range(copies(problem, nbytes, small) - 1)]
    q = random(problem.batch, problem.heads, HEAD)
    options = {"tile": candidate.get("tile"), "plan": split(candidate, problem.context)}
    calls = [
        lambda c=cache: gqa._launch_gqa_decode(q, *c, *where, SCALE, problem.context, **options)[0]  # type: ignore[misc]
        for cache in caches
    ]
    flops = 4 * rows * problem.heads * HEAD
    return Work(calls, nbytes, flops, lambda: reference.gqa_attention(q.float(), stored(k), stored(v), *where, SCALE)[0])


def index_scores(problem: Problem, candidate: Candidate, small: bool) -> Work:
    table, sequence, positions = place(problem)
    rows = problem.batch * problem.context
    first = head_cache(problem, INDEX)
    nbytes = rows * first.shape[-1] * first.itemsize
    caches = [first] + [first.clone() for _ in range(copies(problem, nbytes, small) - 1)]
    q, weights = random(problem.batch, problem.heads, INDEX), torch.randn(problem.batch, problem.heads, device="cuda")
    scores = torch.empty(problem.batch, problem.context, device="cuda")

    def run(cache: Tensor) -> Tensor:
        tile = candidate.get("tile")
        queries = indexer._rotate_queries(q) if cache.dtype == torch.uint8 else q
        indexer._launch_scores(queries, weights, cache, table, sequence, positions, 0, scores, tile)
        return scores

    def expected() -> Tensor:
        floats = reference.rotate_index(unpack_heads(first)) if first.dtype == torch.uint8 else first  # back: its own inverse
        keys = floats[table.long()].flatten(1, 2)[:, : problem.context].float()
        return torch.einsum("bhs,bh->bs", torch.einsum("bhd,bsd->bhs", q.float(), keys).relu(), weights)

    calls = [lambda c=cache: run(c) for cache in caches]  # type: ignore[misc]
    return Work(calls, nbytes, 2 * rows * problem.heads * INDEX, expected)


def index_selection(problem: Problem, candidate: Candidate, small: bool) -> Work:
    positions = place(problem)[2]
    topk = min(TOPK, problem.context // 2)
    nbytes = problem.batch * problem.context * 4
    count = 1 if small else min(64, copies_for(nbytes))
    rows = [torch.randn(problem.batch, problem.context, device="cuda") for _ in range(count)]
    out = torch.empty(problem.batch, topk, device="cuda", dtype=torch.int32)

    def run(scores: Tensor) -> Tensor:
        indexer._select_rows(scores, positions, 0, topk, out)
        return out

    calls = [lambda s=scores: run(s) for scores in rows]  # type: ignore[misc]
    return Work(calls, nbytes, 0, lambda: rows[0].topk(topk).indices.sort().values)


def mla_prefill(problem: Problem, candidate: Candidate, small: bool) -> Work:
    where = place(problem)
    nope, value = WIDTHS[problem.family]
    cache, heads = random(pages_of(problem), PAGE, LATENT + ROPE), problem.heads
    q = random(problem.context, heads, nope + ROPE)
    w_uk, w_uv = random(heads, nope, LATENT, scale=LATENT**-0.5), random(heads, value, LATENT, scale=LATENT**-0.5)
    args, tile = (q, cache, w_uk, w_uv), candidate.get("tile")
    flops = problem.context**2 * heads * (nope + ROPE + value)
    calls = [lambda: prefill._launch_mla_prefill(*args, *where, SCALE, problem.context, tile=tile)]
    return Work(calls, cache.nbytes, flops, lambda: reference.mla_prefill(*(x.float() for x in args), *where, SCALE))


def gqa_prefill(problem: Problem, candidate: Candidate, small: bool) -> Work:
    where = place(problem)
    shape = (pages_of(problem), PAGE, KV_HEADS, HEAD)
    args, tile = (random(problem.context, problem.heads, HEAD), random(*shape), random(*shape)), candidate.get("tile")
    flops = 2 * problem.context**2 * problem.heads * HEAD
    calls = [lambda: gqa._launch_gqa_prefill(*args, *where, SCALE, tile=tile)[0]]
    nbytes = args[1].nbytes * 2
    return Work(calls, nbytes, flops, lambda: reference.gqa_attention(*(x.float() for x in args), *where, SCALE)[0])


BUILDERS = {
    builder.__name__: builder
    for builder in (
        mla_decode, sparse_decode, gqa_decode, index_scores, index_selection, mla_prefill, gqa_prefill,
    )
}  # fmt: skip


def candidates(problem: Problem) -> list[Candidate]:
    """Configurations to try; the first, an empty one, is what the launcher chooses."""
    few = problem.heads <= 16
    tiles: list[tuple[int, ...]]
    plans: list[tuple[tuple[int, ...], int]]
    if problem.op == "mla_decode":
        if problem.kv == "fp8":
            plans = [((16, 32, 4, 3), 128), ((16, 64, 8, 3), 128)]
            plans += [
                ((*tile, 1, True), m) for tile in ((16, 32, 4, 3), (16, 64, 8, 3), (32, 32, 8, 3)) for m in (64, 128, 256)
            ]
        elif problem.kv != "bf16":
            plans = [((16, 32, 8, 2), 128), ((16, 32, 4, 2), 128)]
        elif few:
            plans = [((16, 32, 4, 3), 128), ((16, 64, 8, 3), 128), ((16, 64, 8, 3), 64), ((16, 64, 8, 3), 256)]
        else:
            plans = [((64, 32, 4, 3, 2), 64), ((64, 32, 4, 3, 2), 128), ((64, 32, 4, 4, 2), 64), ((32, 32, 8, 3), 64)]
            plans += [((64, 64, 4, 2, 2), 64), ((64, 64, 4, 2, 2), 128), ((64, 32, 8, 3, 2), 64), ((64, 32, 4, 3, 2), 32)]
            plans += [((32, 32, 8, 3), 128), ((64, 64, 8, 2), 128), ((16, 64, 8, 3), 64)]
        return [{}] + [{"tile": DecodeTile(*tile), "most": m} for tile, m in plans]  # type: ignore[arg-type]
    if problem.op == "sparse_decode":
        tiles = [(16, 32, 4, 3), (16, 64, 8, 3)] if few else [(16, 32, 4, 3), (32, 32, 8, 3), (64, 32, 4, 3, 2)]
        return [{}] + [{"tile": DecodeTile(*tile), "most": m} for tile in tiles for m in (16, 32)]  # type: ignore[arg-type]
    if problem.op == "mla_prefill" and problem.context == 8192 and problem.family == "glm_moe_dsa":
        tiles = [(128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2)]
        return [{}] + [{"tile": PrefillTile(*tile)} for tile in tiles]
    if problem.op == "gqa_prefill" and problem.context == 8192:
        tiles = [(128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3)]
        return [{}] + [{"tile": GroupedTile(*tile)} for tile in tiles]
    return [{}]


def label(candidate: Candidate) -> str:
    parts = [f"{key} {','.join(str(int(x)) for x in value) if key == 'tile' else value}" for key, value in candidate.items()]
    return " ".join(parts) or "default"


def check(problem: Problem, candidate: Candidate) -> str:
    """Compiles the candidate, compares it with the reference on a small problem: an empty string, or what is wrong."""
    small = problem._replace(context=400 if problem.op.endswith("prefill") else 1337, batch=min(problem.batch, 2))
    try:
        work = BUILDERS[problem.op](small, candidate, True)
        got, want = work.calls[0](), work.expected()
        torch.cuda.synchronize()
    except Exception as error:  # a candidate that does not fit the card
        return f"{type(error).__name__}: {' '.join(str(error).split())[:110]}"
    if not got.is_floating_point():
        return "" if torch.equal(got.long(), want.long()) else "another selection"
    error = ((got - want).abs().max() / want.abs().max()).item()
    return "" if error < 0.02 else f"off by {error:.3g} of the largest value"


def kernels() -> dict[Any, tuple[str, Any]]:
    """Every kernel that this process has compiled or loaded, by a key of its own."""
    found = {}
    for module in (attention, gqa, indexer, prefill):
        for name, kernel in vars(module).items():
            caches = getattr(kernel, "device_caches", None) if name.endswith("_kernel") else None
            for key, compiled in (caches[torch.cuda.current_device()][0] if caches else {}).items():
                found[name, key] = name.strip("_").removesuffix("_kernel"), compiled
    return found


def resources(before: dict[Any, tuple[str, Any]]) -> str:
    """Registers / spilled / shared bytes of the kernels that came since."""
    new = (value for key, value in kernels().items() if key not in before)
    parts = (
        f"{name} {getattr(compiled, 'n_regs', '-')}/{getattr(compiled, 'n_spills', '-')}/{compiled.metadata.shared}"
        for name, compiled in new
        if name not in ("combine", "bounds")
    )
    return ", ".join(dict.fromkeys(parts))


def measure(problem: Problem, candidate: Candidate, limits: dict[str, Any], *, replays: int) -> dict[str, Any]:
    work = BUILDERS[problem.op](problem, candidate, False)
    us = microseconds(work.calls, replays=replays, warmup_seconds=0.1 if replays > 10 else 0.03)
    bound = {"weight_bytes": work.nbytes, "flops": work.flops, "weights_decoded": 0, "limits": limits}
    return {
        **problem._asdict(),
        "us": round(us, 2),
        "gbps": round(work.nbytes / us / 1e3, 1),
        "tflops": round(work.flops / us / 1e6, 1),
        "limit_fraction": round(limit_fraction(us, **bound), 3),
    }


def describe(row: dict[str, Any]) -> str:
    return f"{row['us']:9.1f} us {row['gbps']:7.0f} GB/s {row['tflops']:6.1f} TFLOP/s limit {row['limit_fraction']:.2f}"


def run(todo: list[tuple[Problem, Candidate]], arguments: argparse.Namespace) -> None:
    """Measures from --start on; after each candidate the file --state says how far it is, and has the rows so far."""
    state = json.loads(arguments.state.read_text())
    limits = state["header"] = state["header"] or header()
    if not state["next"]:
        print(limits, flush=True)
    for number, (problem, candidate) in list(enumerate(todo))[state["next"] :]:
        state["next"] = number + 1
        arguments.state.write_text(json.dumps(state))
        line = f"{problem.name:42} {label(candidate):30}"
        before = kernels()
        wrong = check(problem, candidate)
        used = resources(before)
        torch.cuda.empty_cache()
        if wrong:
            print(f"{line} {wrong} [{used}]", flush=True)
            continue
        row = measure(problem, candidate, limits, replays=7 if arguments.sweep else 20)
        print(f"{line} {describe(row)} [{used}]", flush=True)
        if not candidate:
            state["rows"].append(row)
        state["times"].append((problem.name, label(candidate), row["us"]))
        arguments.state.write_text(json.dumps(state))
        if arguments.out:
            arguments.out.write_text(json.dumps({"header": limits, "rows": state["rows"]}, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--compile", default="", metavar="I/N", help=argparse.SUPPRESS)  # what --jobs starts
    parser.add_argument("--state", type=pathlib.Path, help=argparse.SUPPRESS)  # the measuring child's
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure", file=sys.stderr)
        return 2
    problems = [problem for problem in PROBLEMS if any(text in problem.name for text in arguments.match.split(","))]
    todo = [(problem, c) for problem in problems for c in (candidates(problem) if arguments.sweep else [{}])]
    if arguments.compile:
        part, parts = map(int, arguments.compile.split("/"))
        once = {(*problem._replace(context=0, batch=0), label(c)): (problem, c) for problem, c in todo}
        for problem, candidate in list(once.values())[part::parts]:
            check(problem, candidate)
        return 0
    if arguments.state:
        at = sys.argv.index("--state")
        del sys.argv[at : at + 2]  # the result names the command that was given
        run(todo, arguments)
        return 0
    again = [sys.executable, *sys.argv]
    workers = [subprocess.Popen([*again, "--compile", f"{part}/{arguments.jobs}"]) for part in range(arguments.jobs)]
    for worker in workers:
        worker.wait()  # one that fails leaves its candidates to be compiled below
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "state.json"
        path.write_text(json.dumps({"next": 0, "header": None, "rows": [], "times": []}))
        while True:
            code = subprocess.run([*again, "--state", str(path)], check=False).returncode
            state = json.loads(path.read_text())
            if code == 0 or not state["next"]:
                break
            problem, candidate = todo[state["next"] - 1]
            print(f"{problem.name:42} {label(candidate):30} crashed", flush=True)
    for problem in problems if arguments.sweep else []:
        times = [(us, name) for problem_name, name, us in state["times"] if problem_name == problem.name]
        if times:
            print(f"{problem.name:42} best: {min(times)[1]} {min(times)[0]:.1f} us", flush=True)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
