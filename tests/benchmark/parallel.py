"""Cost of all-reduces, and how a GLM-5.2 stack scales: `torchrun --nproc-per-node 2 tests/benchmark/parallel.py --out FILE`.

    --layers N      of the stack, random weights (default: 8, of which 3 are dense)
    --context N     positions that a decoded token attends to (default: 4096)

Rows: microseconds of one all-reduce of fp32 [rows, 6144] in a CUDA graph; of decode steps (graph) and prefill for the stack on
one GPU ("whole"), for one rank's part of it without its partners ("part": the same work, no communication), and for all ranks
together ("ranks"). scaling = whole / ranks; communication = ranks - part, per layer. Rank 0 prints.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics

import torch

from exl3_triton import RankGroup, ops
from exl3_triton.model.cache import Batch, pages_for
from exl3_triton.model.config import ModelConfig
from exl3_triton.model.dummy import dummy_model, first_layers, one_rank
from exl3_triton.timing import header


def graph_of(step):
    """A function that replays `step`; other threads watch over communicators meanwhile."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


def microseconds(run, repeats: int) -> float:
    """Median of single runs. The count is the same on every rank, or they would wait for each other."""
    times = []
    for _ in range(repeats + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times[5:])


def all_reduces(group: RankGroup) -> list[dict]:
    rows = []
    for count in (1, 4, 16, 64, 512, 2048):
        x = torch.zeros(count, 6144, device=group.device)

        def step(x=x):
            for _ in range(20):
                ops.all_reduce(x, group.name)

        us = microseconds(graph_of(step), 20) / 20
        rows.append({"what": "all_reduce", "rows": count, "bytes": x.nbytes, "us": round(us, 2)})
    return rows


def stack(model, context: int) -> list[dict]:
    """Decode steps of 1, 8 and 32 sequences at `context`, and 2048 new tokens."""
    rows, pages = [], pages_for(context)
    with torch.inference_mode():
        for batch in (1, 8, 32):
            cache = model.new_cache(1 + batch * pages)
            table = 1 + torch.arange(batch * pages, dtype=torch.int32, device=model.device).view(batch, pages)
            tokens = torch.zeros(batch, dtype=torch.int64, device=model.device)
            positions = torch.full_like(tokens, context - 1)
            slots = table[:, -1].long() * 64 + 63

            def step(state=(tokens, positions, slots, table, cache)):
                return model.decode_step(*state, context)

            rows.append({"what": "decode", "rows": batch, "us": round(microseconds(graph_of(step), 50), 1)})
            del cache
        tokens = torch.randint(0, 1000, (2048,), device=model.device)
        prompt, cache = Batch.of_sequence(tokens, 0, range(1, 33)), model.new_cache(33)
        rows.append({"what": "prefill", "rows": 2048, "us": round(microseconds(lambda: model(prompt, cache), 10), 1)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    config = first_layers(ModelConfig.preset("glm-5.2"), arguments.layers)
    # measuring one GPU alone lets the others wait longer than a hanging rank may
    with RankGroup.from_env(timeout=600) as group, torch.inference_mode():
        size, options = group.shard.size, {"device": group.device, "max_context": max(4096, arguments.context)}
        rows = all_reduces(group)
        found: dict[str, list[dict]] = {}
        for name, sizes, group_of in (
            ("whole", config, None),
            ("part", one_rank(config, size)[0], None),
            ("ranks", config, group),
        ):
            if group_of is not None or group.rank == 0:
                model = dummy_model(sizes, group=group_of, **options)
                found[name] = stack(model, arguments.context)
                del model
                torch.cuda.empty_cache()
            group.barrier()
        if group.rank:
            return
        for whole, part, ranks in zip(found["whole"], found["part"], found["ranks"], strict=True):
            row = {"what": ranks["what"], "rows": ranks["rows"], "ranks": size, "layers": arguments.layers}
            row |= {f"{name}_us": each["us"] for name, each in (("whole", whole), ("part", part), ("ranks", ranks))}
            row |= {"scaling": round(whole["us"] / ranks["us"], 3)}
            rows.append(row | {"communication_us_per_layer": round((ranks["us"] - part["us"]) / arguments.layers, 2)})
        for row in rows:
            print(json.dumps(row), flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps({"header": header(group.device), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
