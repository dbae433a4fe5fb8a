"""Writes the measured tables of docs/performance.md from the result files beside this: `python tests/benchmark/report.py`."""

from __future__ import annotations

import json
import pathlib
from typing import Any

HERE = pathlib.Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- begin {} -->", "<!-- end {} -->"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Microseconds (and the peer's time over ours) by matrix or layer, and by number of rows."""
    sizes = sorted({row["m"] for row in rows})
    groups: dict[tuple, dict[int, dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["name"], row["bits"], row["codebook"]), {})[row["m"]] = row
    lines = ["| shape, bits, codebook | " + " | ".join(f"m = {m}" for m in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    for (name, bits, codebook), by_size in groups.items():
        cells = [f"{by_size[m]['us']:.1f} ({by_size[m]['ratio']:.2f})" if m in by_size else "" for m in sizes]
        lines.append(f"| {name} {bits} {codebook} | " + " | ".join(cells) + " |")
    return lines


def attention_table(rows: list[dict[str, Any]]) -> list[str]:
    """One line a problem."""
    names = ("op", "family", "heads", "context", "batch", "kv", "us", "gbps", "tflops", "limit_fraction")
    lines = ["| " + " | ".join(names).replace("_", " ") + " |", "|---" * len(names) + "|"]
    return lines + ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows]


def model_table(rows: list[dict[str, Any]]) -> list[str]:
    """One line a measurement; `gaps`: the part of a profiled step in which nothing ran for more than 3 us."""
    names = ("op", "model", "rank_of", "layers", "bits", "batch", "context", "us", "us_per_layer", "tokens_per_s")
    head = [name.replace("_", " ") for name in names] + ["limit fraction", "roofline", "gaps"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        gaps = f"{row['gap_fraction']:.1%}" if "gap_fraction" in row else ""
        row = {**row, "model": f"{row['model']}, only experts quantized"} if row.get("experts_only") else row
        fractions = [f"{row['limit_fraction']:.3f}", f"{row['roofline_fraction']:.3f}"]
        lines.append("| " + " | ".join([*(str(row[name]) for name in names), *fractions, gaps]) + " |")
    return lines


TABLES = {"attention": attention_table, "model": model_table}


def section(op: str) -> list[str]:
    result = json.loads((HERE / "results" / f"h200_{op}.json").read_text())
    head = result["header"]
    limits = f"Same run: HBM read {head['hbm_read_gbps']:.0f} GB/s, fp16 `torch.matmul` {head['matmul_tflops']:.0f} TFLOP/s."
    ratios = [row["ratio"] for row in result["rows"] if "ratio" in row]
    if ratios:
        ahead = sum(ratio > 1 for ratio in ratios)
        limits += f" Ahead of the peer in {ahead} of {len(ratios)} rows (ratio {min(ratios):.2f} to {max(ratios):.2f})."
    commands = dict.fromkeys(row.get("command", head["command"]) for row in result["rows"])
    return [
        f"{head['device']}, {head['date']}, driver {head['driver']}, torch {head['torch']}, Triton {head['triton']}, Python "
        f"{head['python']}; {', '.join(f'`{command}`' for command in commands)}.",
        limits,
        "",
        *TABLES.get(op, table)(result["rows"]),
    ]


def main() -> None:
    text = PAGE.read_text()
    for op in ("linear", "moe", "attention", "model"):
        if not (HERE / "results" / f"h200_{op}.json").exists():
            continue
        begin, end = BEGIN.format(op), END.format(op)
        before, rest = text.split(begin)
        text = before + "\n".join([begin, *section(op), end]) + rest.split(end)[1]
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
