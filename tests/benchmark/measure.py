"""Measures the ops on this machine's GPU and prints a table: `python tests/benchmark/measure.py --out results.json`.

    --op linear,moe      which ops                       --peer FILE    another library's times on the same card
    --m 1,16,64          which row counts                --match TEXT   only rows whose shape name contains TEXT
    --jobs N             compile in N processes first

Random trellis data, random activations, both rotations included. Times are medians of CUDA graph replays over distinct
weights of more than 260 MB. `ratio` is the peer's time over ours.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import torch
from timing import copies_for, header, limit_fraction, microseconds

from autotune.bench import random_experts, random_matrix
from exl3_triton import ops
from exl3_triton.format import Codebook
from exl3_triton.plan import MoeSpec, plan_moe

CODEBOOKS = {codebook.label: codebook for codebook in Codebook}
PEER = pathlib.Path(os.environ.get("EXL3_TRITON_TESTDATA", pathlib.Path(__file__).parents[3] / "shared"))
PEER = PEER / "peers" / "exllamav3_h200.json"
LINEAR = {
    "expert_up_tp4": (6144, 512),
    "ffn_up": (6144, 12288),
    "ffn_down": (12288, 6144),
    "q_b": (2048, 16384),
    "o": (16384, 6144),
    "qwen_up": (5120, 17408),
}
MOE = {"glm52_tp4": (256, 6144, 512, 8), "glm52_tp1": (256, 6144, 2048, 8), "glm45air_tp1": (128, 4096, 1408, 8)}


def measure_linear(case: dict[str, Any], limits: dict[str, Any] | None) -> dict[str, Any]:
    """One row: a matrix k x n at m rows of fp16 activations. Without limits: one call, which compiles what a row needs."""
    k, n, bits, m = case["k"], case["n"], case["bits"], case["m"]
    weight_bytes = k * n * bits / 8
    copies = copies_for(int(weight_bytes)) if limits else 1
    matrices = [random_matrix(k, n, bits, CODEBOOKS[case["codebook"]]) for _ in range(copies)]
    x = torch.randn(m, k, device="cuda", dtype=torch.float16)
    if limits is None:
        ops.linear(x, matrices[0])
        return {}
    us = microseconds([lambda w=w: ops.linear(x, w) for w in matrices])  # type: ignore[misc]
    flops = 2 * m * k * n
    return {
        "us": round(us, 2),
        "gbps": round(weight_bytes / us / 1e3, 1),
        "tflops": round(flops / us / 1e6, 2),
        "tera_weights_per_s": round(k * n / us / 1e6, 3),
        "limit_fraction": round(
            limit_fraction(us, weight_bytes=weight_bytes, flops=flops, weights_decoded=k * n, limits=limits), 3
        ),
    }


def measure_moe(case: dict[str, Any], limits: dict[str, Any] | None) -> dict[str, Any]:
    """One row: routed experts of a layer at m tokens, eight sets of random routes. Without limits: one call, to compile."""
    experts, hidden, inner, top_k = case["E"], case["H"], case["I"], case["top"]
    m, bits = case["m"], case["bits"]
    weights = random_experts(experts, hidden, inner, bits, CODEBOOKS[case["codebook"]])
    plan = plan_moe(MoeSpec.of(weights, top_k), max_tokens=m, device="cuda")
    bound = plan.bind(plan.new_arena("cuda"))
    x = torch.randn(m, hidden, device="cuda", dtype=torch.float16)
    out = torch.empty_like(x)
    routes = []
    for _ in range(8):
        ids = torch.rand(m, experts, device="cuda").topk(top_k).indices
        routes.append((ids, torch.rand(m, top_k, device="cuda")))
    if limits is None:
        bound(x, weights, *routes[0], out=out)
        return {}
    us = microseconds([lambda r=r: bound(x, weights, *r, out=out) for r in routes])  # type: ignore[misc]
    hit = sum(ids.unique().numel() for ids, _ in routes) / len(routes)
    decoded = hit * 3 * hidden * inner
    flops = 2 * m * top_k * 3 * hidden * inner
    return {
        "experts": hit,
        "us": round(us, 1),
        "gbps": round(decoded * bits / 8 / us / 1e3, 1),
        "tflops": round(flops / us / 1e6, 1),
        "tera_weights_per_s": round(decoded / us / 1e6, 3),
        "limit_fraction": round(
            limit_fraction(us, weight_bytes=decoded * bits / 8, flops=flops, weights_decoded=decoded, limits=limits), 3
        ),
    }


def cases(op: str, peer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What to measure: the peer's rows where its file is there, else 3- and 4-bit MCG at a range of row counts."""
    keys = ("op", "name", "k", "n", "E", "H", "I", "top", "bits", "codebook", "m")
    found = [{key: row[key] for key in keys if key in row} | {"peer_us": row["us"]} for row in peer if row["op"] == op]
    if found:
        return found
    rows = (1, 4, 16, 32, 64, 128, 512, 4096)
    variants = [(bits, m) for bits in (3, 4) for m in rows]
    if op == "linear":
        shapes = [{"name": name, "k": k, "n": n} for name, (k, n) in LINEAR.items()]
    else:
        shapes = [{"name": name, "E": e, "H": h, "I": i, "top": top} for name, (e, h, i, top) in MOE.items()]
    return [shape | {"op": op, "bits": bits, "codebook": "mcg", "m": m} for shape in shapes for bits, m in variants]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="linear,moe")
    parser.add_argument("--m", default="")
    parser.add_argument("--match", default="")
    parser.add_argument("--peer", type=pathlib.Path, default=PEER)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--compile", default="", metavar="I/N", help=argparse.SUPPRESS)  # what --jobs starts
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure", file=sys.stderr)
        return 2
    peer = json.loads(arguments.peer.read_text())["rows"] if arguments.peer.exists() else []
    wanted = {int(m) for m in arguments.m.split(",") if m}
    measures = {"linear": measure_linear, "moe": measure_moe}
    todo = []
    for op in arguments.op.split(","):
        for case in cases(op, peer):
            label = f"{case['name']}.{case['bits']}.{case['codebook']}"
            if arguments.match in label and (not wanted or case["m"] in wanted):
                todo.append((op, label, case))
    if arguments.compile:
        part, parts = map(int, arguments.compile.split("/"))
        for op, _, case in todo[part::parts]:
            measures[op](case, None)
        return 0
    if arguments.jobs:
        again = [sys.executable, *sys.argv, "--compile"]
        workers = [subprocess.Popen([*again, f"{part}/{arguments.jobs}"]) for part in range(arguments.jobs)]
        if any(worker.wait() for worker in workers):
            return 1
    result: dict[str, Any] = {"header": header(), "rows": []}
    print(result["header"], flush=True)
    for op, label, case in todo:
        torch.cuda.empty_cache()
        row = case | measures[op](case, result["header"])
        if "peer_us" in row:
            row["ratio"] = round(row["peer_us"] / row["us"], 2)
        result["rows"].append(row)
        print(
            f"{op:7}{label:22} m {row['m']:5} {row['us']:9.1f} us {row['gbps']:8.1f} GB/s {row['tflops']:7.1f} TFLOP/s "
            f"{row['tera_weights_per_s']:6.3f} Tw/s limit {row['limit_fraction']:.2f} ratio {row.get('ratio', '-')}",
            flush=True,
        )
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
