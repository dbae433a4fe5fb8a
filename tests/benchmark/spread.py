"""How much decode times differ between fresh processes: `python tests/benchmark/spread.py --out spread.json`.

Each process draws its own weights and times, as `exl3-triton bench` does, a decode step of one sequence at 4k tokens through
8 layers of GLM-5.2 at TP4 (3-bit MCG), and, as `measure.py` does, one row of a 6144 x 12288 matrix and one token of the
experts alone. The spread is (largest - smallest) / median. Exit status 1 where one exceeds --percent.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

import torch
from measure import LINEAR, MOE, measure_linear, measure_moe
from timing import header

from exl3_triton.bench import Bench, fill_cache, open_model
from exl3_triton.format import Codebook
from exl3_triton.model.cache import pages_for

CASE = {"bits": 3, "codebook": "mcg", "m": 1}


def times() -> dict[str, float]:
    """us of the step and of the two ops in this process."""
    limits = {"hbm_read_gbps": 1.0, "matmul_tflops": 1.0, "sms": 1, "clock_ghz": 1.0}  # what is derived from them is not used
    model, facts = open_model(
        "glm-5.2", max_context=4096, device="cuda", dummy=True, bits=3, codebook=Codebook.MCG, layers=8, rank_of=4
    )
    cache = model.new_cache(pages_for(4096) + 1)
    fill_cache(cache, model.config)
    step, _ = Bench(model, cache, facts, limits | {"device": ""}).decode(1, 4096)
    k, n = LINEAR["ffn_up"]
    experts, hidden, inner, top = MOE["glm52_tp4"]
    linear = measure_linear(CASE | {"k": k, "n": n}, limits)
    moe = measure_moe(CASE | {"E": experts, "H": hidden, "I": inner, "top": top}, limits)
    return {"decode_step": step["us"], "linear": linear["us"], "moe": moe["us"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--percent", type=float, default=3.0, help="largest spread that passes (default 3)")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure", file=sys.stderr)
        return 2
    if arguments.child:
        print(json.dumps(times()))
        return 0
    found = []
    for _ in range(arguments.processes):
        done = subprocess.run([sys.executable, __file__, "--child"], capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(found[-1], flush=True)
    rows = []
    for op in found[0]:
        us = [each[op] for each in found]
        spread = 100 * (max(us) - min(us)) / statistics.median(us)
        rows.append({"op": op, "us": us, "spread_percent": round(spread, 2)})
        print(f"{op}: {min(us)} to {max(us)} us, spread {spread:.2f} %", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps({"header": header("cuda"), "rows": rows}, indent=1))
    return int(any(row["spread_percent"] > arguments.percent for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
