"""Measures `load` from the page cache onto a GPU: `python tests/benchmark/load_speed.py --out results.json`.

    --layers N        layers of routed experts, 3.66 GB each (default: 5)
    --directory DIR   where the checkpoint goes (default: a temporary directory)
    --tp T            slices; all of them are loaded into this GPU (default: 4)
    --order O         of tensors in the files: "name" (default), as published checkpoints have it, or "slab", as `slice` has

A rank-sliced checkpoint of GLM-5.2's sizes whose files are holes, but for headers and codebook markers: it takes no space on
disk, and once read it lies in the page cache like any other. Reported: GB/s of the second and third load, and of a plain copy
out of pinned memory; the device's peak over what stays; the host's peak of memory that is no page cache.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
import threading
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from fabricate import Fabricated, write_headers_only, write_index

from exl3_triton import load
from exl3_triton.model.checkpoint import Checkpoint
from exl3_triton.timing import header

PRESET = pathlib.Path(__file__).parents[2] / "exl3_triton" / "model" / "presets" / "glm-5.2.json"
CODES = {torch.int16: "I16", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32"}


def slab_order(name: str) -> tuple:
    """Sorts the tensors of a file in the order in which a loader fills its slabs."""
    parts = name.split(".")
    if ".rank" not in name:
        return (name,)
    return ("~", parts[7], parts[6], parts[8], int(parts[5]))


def write(directory: pathlib.Path, layers: int, tp: int, order: str = "name") -> int:
    """The checkpoint: one dense layer and `layers` of experts, one file a layer; returns its bytes."""

    def sizes(layers: int) -> dict:
        kinds = {"mlp_layer_types": ["dense"] + ["sparse"] * layers, "indexer_types": ["full"] + ["shared"] * layers}
        return {"num_hidden_layers": layers + 1, "num_nextn_predict_layers": 0, "first_k_dense_replace": 1, **kinds}

    with torch.device("meta"):
        model = Fabricated(quantized=False, **json.loads(PRESET.read_text()) | sizes(1)).rank_slice(tp)
    config = model.config | sizes(layers)
    config["hybrid_tr3_tail"]["moe_layers"] = [1, layers]
    (directory / "config.json").write_text(json.dumps(config))
    files: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for name, tensor in model.tensors.items():
        layer = name.split(".")[2] if ".layers." in name else "rest"
        for copy in range(1, layers + 1) if layer == "1" else (layer,):
            copied = name.replace(".layers.1.", f".layers.{copy}.")
            files.setdefault(f"model-layer-{copy}.safetensors", {})[copied] = (CODES[tensor.dtype], tuple(tensor.shape))
    for file, tensors in files.items():
        names = sorted(tensors, key=slab_order if order == "slab" else None)
        write_headers_only(directory / file, {name: tensors[name] for name in names})
    write_index(directory, {name: file for file, tensors in files.items() for name in tensors})
    return sum(info.nbytes for info in Checkpoint.open(directory).tensors.values())


class HostPeak:
    """The largest anonymous memory of this process (page cache and mapped files are none) while a block runs."""

    def __enter__(self) -> HostPeak:
        self.before = self.peak = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


def pinned_gbps(count: int = 1 << 30) -> float:
    """GB/s of copying one pinned buffer to the device, the best of five."""
    source, target = (
        torch.zeros(count, dtype=torch.uint8, pin_memory=True),
        torch.empty(count, dtype=torch.uint8, device="cuda"),
    )
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, count / (time.perf_counter() - start) / 1e9)
    return best


def measure(directory: pathlib.Path, total: int) -> list[dict]:
    rows = []
    for run in range(3):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        with HostPeak() as host:
            start = time.perf_counter()
            Checkpoint.open(directory)
            headers = time.perf_counter() - start
            model = load(directory, device="cuda", max_context=4096, progress=run == 0)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start - headers
        kept, peak = torch.cuda.memory_allocated() - held, torch.cuda.max_memory_allocated() - held
        row = {"run": run, "cache": "cold" if run == 0 else "page cache", "seconds": round(seconds, 2)}
        row |= {"gbps": round(total / seconds / 1e9, 2), "headers_seconds": round(headers, 2)}
        row |= {"device_peak_over_kept": round(peak / kept, 4), "host_peak_gib": round((host.peak - host.before) / 2**30, 2)}
        print(row, flush=True)
        rows.append(row)
        del model
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--order", choices=("name", "slab"), default="name")
    parser.add_argument("--directory", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or pathlib.Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        total = write(directory, arguments.layers, arguments.tp, arguments.order)
        pinned = pinned_gbps()
        print(f"{total / 1e9:.2f} GB; a plain pinned copy: {pinned:.1f} GB/s", flush=True)
        rows = measure(directory, total)
    for row in rows:
        row |= {
            "order": arguments.order,
            "bytes": total,
            "pinned_gbps": round(pinned, 1),
            "of_pinned": round(row["gbps"] / pinned, 3),
        }
    if arguments.out:
        arguments.out.write_text(json.dumps({"header": header(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
