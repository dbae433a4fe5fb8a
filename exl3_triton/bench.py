"""Speed of whole models on the device at hand: decode steps and prefill, against the limits that the same run measures.

A decode step is `Transformer.decode_step`, on a GPU a replay of its CUDA graph: one token for each of `batch` sequences whose
caches are full of random rows, everything from the embedding to the logits, no sampling. Prefill is one sequence fed in
chunks, all of them timed together, and its last token's logits. `limit_fraction` is the sum over the ops of what each takes at
least (`model.costs`) at the rates of reading a large tensor and of a plain fp16 matrix product (`timing`) and of decoding at
the card's clock, over the time; `roofline_fraction` leaves decoding out. Ranks of a group make the same calls equally often,
on the same tokens and pages; each has rows of its own, with the limits of its own part.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .format import Codebook
from .kv_format import PAGE, head_planes, latent_format, pack_heads, pack_latents
from .model.cache import Batch, GroupedCache, KVCache, LatentCache, pages_for
from .model.checkpoint import read_json_object
from .model.config import ModelConfig
from .model.costs import Cost, Work, head_costs, limit_us, pass_costs
from .model.dummy import dummy_model, first_layers, one_rank
from .model.layers import Exl3Linear, PlainExperts
from .model.memory import cache_pages
from .model.moe import MoE
from .model.rank_group import RankGroup
from .model.transformer import Transformer, choose_dtype, load
from .timing import captured, durations, header

LANES = 128  # of a multiprocessor: instructions a clock for one thread each
LONG_GAP = 3.0  # microseconds without any kernel that count as a gap of the device
PASS_SECONDS = 10.0  # a pass of prefill is repeated only while this is not over
_COLUMNS = ("op", "model", "layers", "bits", "batch", "context", "us", "us_per_layer", "tokens_per_s", "limit_fraction")


def read_config(target: str | Path) -> ModelConfig:
    """The config of a preset, a config.json or a checkpoint directory. Raises ValueError naming the presets."""
    path = Path(target)
    if str(target) in ModelConfig.presets():
        return ModelConfig.preset(str(target))
    if path.is_dir():
        return ModelConfig.from_dir(path)
    if path.suffix == ".json":
        return ModelConfig.from_dict(read_json_object(path))
    known = ", ".join(ModelConfig.presets())
    raise ValueError(f"{target}: required a checkpoint directory, a config.json, or a preset ({known})")


def open_model(
    target: str | Path,
    *,
    max_context: int,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    dummy: bool = False,
    bits: float | None = None,
    codebook: Codebook | None = None,
    layers: int | None = None,
    rank_of: int | None = None,
    experts_only: bool = False,
    check: Callable[[Transformer], object] | None = None,
    group: RankGroup | None = None,
    expert_parallel: bool = False,
) -> tuple[Transformer, dict[str, Any]]:
    """The model to measure, and what identifies it in a row: model, layers, bits, codebook, rank_of, with a group its ranks.

    A checkpoint directory is loaded, unless `dummy`; everything else gets random weights, which bits .. experts_only describe.
    check, group, expert_parallel: as in `load`. Raises ValueError as `read_config`, `load` and `dummy_model` do, for those
    five on real weights, and for rank_of with a group.
    """
    path = Path(target)
    config = read_config(target)
    name = path.stem if path.suffix == ".json" else path.name
    together: dict[str, Any] = {"group": group, "expert_parallel": expert_parallel}
    ranks_of: dict[str, Any] = {} if group is None else {"ranks": group.shard.size, "expert_parallel": expert_parallel}
    if group is None and expert_parallel:
        raise ValueError("--expert-parallel: found one rank, required several to divide the experts over")
    if group is not None and rank_of is not None:
        raise ValueError("--rank-of: one part without its partners, and these are ranks that run a model together")
    if path.is_dir() and not dummy:
        wrong = {
            "bits": bits,
            "codebook": codebook,
            "layers": layers,
            "rank-of": rank_of,
            "experts-only": experts_only or None,
        }
        for option, value in wrong.items():
            if value is not None:
                raise ValueError(f"--{option}: acts on random weights, and {target} is a checkpoint; add --dummy")
        model = load(path, device=device, dtype=dtype, max_context=max_context, check=check, **together)
        facts = {"model": name, "layers": config.num_layers, **stored_formats(model), "rank_of": 1, "dummy": False}
        return model, facts | ranks_of
    ranks = 1 if rank_of is None else rank_of
    config, whole = one_rank(config if layers is None else first_layers(config, layers), ranks)
    weights: dict[str, Any] = {
        "dtype": choose_dtype(torch.device(device), dtype),
        "max_context": max_context,
        "bits": 3 if bits is None else bits,
        "codebook": Codebook.MCG if codebook is None else codebook,
        "experts_only": experts_only,
    }
    if check is not None:
        shard = None if group is None else group.shard
        check(dummy_model(config, device="meta", shard=shard, expert_parallel=expert_parallel, **weights))
    model = dummy_model(config, device=device, **together, **weights)
    facts = {"model": name, "layers": config.num_layers, **stored_formats(model), "rank_of": ranks, "dummy": True}
    facts |= ranks_of
    return model, facts | ({"whole": list(whole)} if whole else {}) | ({"experts_only": True} if experts_only else {})


def stored_formats(model: Transformer) -> dict[str, Any]:
    """Mean K of all quantized matrices but the output head, and their codebooks; None where nothing is quantized."""
    words, weights, codebooks = 0, 0, set()
    for module in model.blocks.modules():
        if isinstance(module, Exl3Linear):
            words += module.trellis.numel()
            weights += module.weight.padded_in * module.weight.padded_out
            codebooks.add(module.codebook.label)
        elif isinstance(module, MoE) and not isinstance(module.experts, PlainExperts):
            for each in (projection for part in module.experts for projection in part.projections):
                words += each.words.numel()
                weights += each.num_experts * each.padded_in * each.padded_out
                codebooks |= {Codebook(codebook).label for _, _, codebook in each.layout}
    bits = round(16 * words / weights, 2) if weights else None
    return {"bits": int(bits) if bits == int(bits or 0) else bits, "codebook": "+".join(sorted(codebooks)) or None}


def fill_cache(cache: KVCache, config: ModelConfig) -> None:
    """Random rows in every page; packed formats repeat a few, which does not make them cheaper to read."""
    for layer in cache.layers:
        heads = [layer.keys, layer.values] if isinstance(layer, GroupedCache) else []
        if isinstance(layer, LatentCache):
            heads = [] if layer.index_keys is None else [layer.index_keys]
            rows, latent, rope = layer.rows, config.kv_lora_rank, config.qk_rope_head_dim
            if rows.dtype == torch.uint8:
                kv = latent_format(rows.shape[-1], latent, rope)
                assert kv is not None
                some = torch.randn(PAGE, latent + rope, device=rows.device)
                rows.copy_(pack_latents(some, latent, kv, layer.latent_scale))
            else:
                rows.normal_()
        for tensor in heads:
            if tensor.dtype == torch.uint8:
                values, scales = head_planes(tensor)
                packed, scale = pack_heads(torch.randn(values.shape[1:], device=tensor.device))
                values.copy_(packed)
                scales.copy_(scale)
            else:
                tensor.normal_()


@dataclass(frozen=True)
class Bench:
    """A model with a cache of random rows, and how to measure it.

    facts: what every row repeats. limits: a `timing.header`. graphs: decode steps are replays of a CUDA graph, on a GPU.
    repeats: decode steps that a median is taken of. chunk: tokens of prefill fed at once.
    """

    model: Transformer
    cache: KVCache
    facts: Mapping[str, Any]
    limits: Mapping[str, Any]
    graphs: bool = True
    repeats: int = 50
    chunk: int = 2048

    @property
    def captures(self) -> bool:
        return self.graphs and self.model.device.type == "cuda"

    def _pages(self, sequences: int, context: int) -> torch.Tensor:
        """A block table int32 [sequences, pages] of pages in random order."""
        each, available = pages_for(context), self.cache.num_pages - 1
        if sequences * each > available:
            raise ValueError(f"{sequences} sequences of {context} tokens: the cache has {available} pages of {PAGE}")
        order = 1 + torch.randperm(available, device=self.model.device)[: sequences * each]
        return order.to(torch.int32).view(sequences, each)

    @torch.inference_mode()
    def decode(self, batch: int, context: int, *, profile: bool = False) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The row of one decode step, and with `profile` (on a GPU) what its kernels took."""
        model, device, at = self.model, self.model.device, context - 1
        table = self._pages(batch, context)
        tokens = torch.randint(0, model.config.vocab_size, (batch,), device=device)
        positions = torch.full((batch,), at, device=device)
        slots = table[:, at // PAGE].long() * PAGE + at % PAGE
        bound = table.shape[1] * PAGE
        hidden = torch.randn(batch, model.config.hidden_size, device=device, dtype=model.dtype)
        step = self._runner(lambda: model.decode_step(tokens, positions, slots, table, self.cache, bound))
        head = self._runner(lambda: model.compute_logits(hidden))
        us, head_us = (statistics.median(self._durations(run, self.repeats)) for run in (step, head))
        costs = [*pass_costs(model, self.cache, Work(batch, 1, at, prefill=False)), *head_costs(model, batch)]
        row = self._row("decode_step", batch, context, us, head_us, batch, costs)
        return row | {"graphs": self.captures}, profile_kernels(step) if profile else None

    @torch.inference_mode()
    def prefill(self, context: int) -> dict[str, Any]:
        """The row of one sequence's prefill: the median of as many passes as `PASS_SECONDS` allow, at least one."""
        model, device = self.model, self.model.device
        table = self._pages(1, context)
        tokens = torch.randint(0, model.config.vocab_size, (context,), device=device)
        batches, costs = [], head_costs(model, 1)
        for start in range(0, context, self.chunk):
            end = min(start + self.chunk, context)
            positions = torch.arange(start, end, device=device)
            slots = table[0].long()[positions // PAGE] * PAGE + positions % PAGE
            sequence = torch.zeros(end - start, dtype=torch.int32, device=device)
            batches.append(Batch(tokens[start:end], positions, slots, table, sequence, max_context=end, prefill=True))
            costs += pass_costs(model, self.cache, Work(1, end - start, start, prefill=True))

        def head() -> torch.Tensor:
            return model.compute_logits(last)

        for batch in (batches[0], batches[len(batches) // 2], batches[-1]):  # compiles what the pass needs
            last = model(batch, self.cache)[-1:]
        head()

        def run() -> None:
            nonlocal last
            for batch in batches:
                last = model(batch, self.cache)[-1:]
            head()

        times = self._durations(run, self.repeats, warmup_seconds=0, budget=PASS_SECONDS)
        head_us = statistics.median(self._durations(head, 5, warmup_seconds=0))
        row = self._row("prefill", 1, context, statistics.median(times), head_us, context, costs)
        return row | {"chunk": self.chunk, "passes": len(times)}

    def _durations(
        self, run: Callable[[], Any], repeats: int, *, warmup_seconds: float = 0.1, budget: float = 30.0
    ) -> list[float]:
        """`timing.durations`; of ranks, which have clocks of their own, by numbers of runs that they agree on."""
        group, device = self.model.group, self.model.device
        if group is None:
            return durations(run, device, repeats=repeats, warmup_seconds=warmup_seconds, budget=budget)
        fixed: dict[str, Any] = {"warmup_seconds": 0, "budget": math.inf}
        (us,) = durations(run, device, repeats=1, **fixed)
        if warm := group.least(int(warmup_seconds * 1e6 / us)):
            durations(run, device, repeats=warm, **fixed)
        return durations(run, device, repeats=max(1, group.least(min(repeats, int(budget * 1e6 / us)))), **fixed)

    def _runner(self, call: Callable[[], Any]) -> Callable[[], Any]:
        if self.captures:
            return captured([call])
        call()
        return call

    def _row(
        self, op: str, batch: int, context: int, us: float, head_us: float, tokens: int, costs: Iterable[Cost]
    ) -> dict[str, Any]:
        costs, limits = list(costs), self.limits
        rates = {"gbps": limits["hbm_read_gbps"], "tflops": limits["matmul_tflops"]}
        instructions = limits.get("sms", 0) * LANES * limits.get("clock_ghz", 0) * 1e9
        limit = limit_us(costs, **rates, instructions=instructions or math.inf)
        return {
            "op": op,
            **self.facts,
            "batch": batch,
            "context": context,
            "us": round(us, 1),
            "us_per_layer": round((us - head_us) / self.facts["layers"], 2),
            "head_us": round(head_us, 1),
            "tokens_per_s": round(tokens * 1e6 / us, 1),
            "limit_us": round(limit, 1),
            "limit_fraction": round(limit / us, 3),
            "roofline_fraction": round(limit_us(costs, **rates) / us, 3),
            "device": limits["device"],
            "hbm_read_gbps": limits["hbm_read_gbps"],
            "matmul_tflops": limits["matmul_tflops"],
        }


def run(
    target: str | Path,
    *,
    contexts: Sequence[int],
    batches: Sequence[int],
    prefills: Sequence[int],
    device: torch.device | str,
    kv: str = "bf16",
    graphs: bool = True,
    repeats: int = 50,
    chunk: int = 2048,
    profile: bool = False,
    group: RankGroup | None = None,
    **options: Any,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure a model; yields ("header", ...), and as they come ("row", ...) and, with `profile`, ("profile", ...).

    contexts, batches: every pair of them is one row of decoding. prefills: lengths of prompts. profile: of every decode step
    at batch 1, a GPU only. group: the ranks that measure together. options: as in `open_model`. Raises ValueError before any
    work.
    """
    sizes = {"context": contexts, "batch": batches, "prefill": prefills, "repeats": [repeats], "chunk": [chunk]}
    for name, values in sizes.items():
        for value in values:
            if value < 1:
                raise ValueError(f"--{name}: found {value}, required integers >= 1")
    if not (contexts or prefills):
        raise ValueError("--context, --prefill: both empty, nothing to measure")
    if profile and torch.device(device).type != "cuda":
        raise ValueError("--profile: shows kernels and gaps of a GPU, and this is a CPU")
    longest, limit = max(*contexts, *prefills, 1), read_config(target).max_position_embeddings
    if longest > limit:
        raise ValueError(f"--context, --prefill: found {longest}, {target} has at most {limit} positions")
    pages = max([pages_for(context) * max(batches, default=1) for context in contexts] + [pages_for(p) for p in prefills])

    def check(sizes: Transformer) -> None:
        """Refuse what does not fit on the device."""
        cache_pages(
            sizes,
            torch.device(device),
            cache_tokens=pages * PAGE,
            context=longest,
            max_batch=max(batches, default=1),
            gpu_memory=1.0,
            kv=kv,
            chunk=chunk,
        )

    if group is not None:  # tokens, pages and states: of the same model on every rank
        torch.manual_seed(0)
    limits = header(device)
    yield "header", limits
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    positions = min(pages_for(longest) * PAGE, limit)
    model, facts = open_model(target, device=device, max_context=positions, check=check, group=group, **options)
    cache = model.new_cache(pages + 1, kv=kv)
    fill_cache(cache, model.config)
    bench = Bench(model, cache, facts | {"kv": kv}, limits, graphs=graphs, repeats=repeats, chunk=chunk)
    for context in contexts:
        for batch in batches:
            row, kernels = bench.decode(batch, context, profile=profile and batch == 1)
            if kernels is not None:
                row["gap_fraction"] = kernels["gap_fraction"]
                yield "profile", {key: row[key] for key in ("op", "model", "layers", "batch", "context")} | kernels
            yield "row", row
    for context in prefills:
        yield "row", bench.prefill(context)


def profile_kernels(run: Callable[[], Any]) -> dict[str, Any]:
    """What the GPU does during one call of `run`, by `torch.profiler`; `summarise` has the keys."""
    activity = torch.profiler.ProfilerActivity.CUDA
    for _ in range(2):  # the first one sets the profiler up
        with torch.profiler.profile(activities=[activity]) as profiler:
            run()
            torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return summarise((event.name, event.time_range.start, event.time_range.end) for event in events)


def summarise(events: Iterable[tuple[str, float, float]]) -> dict[str, Any]:
    """Kernel (name, start, end) in microseconds, in any order and overlapping or not, as totals.

    Keys: span_us from the first start to the last end; gaps, gap_us and gap_fraction: the stretches of more than `LONG_GAP`
    in which nothing ran, their sum, and its share of the span; kernels: {name, calls, us}, the longest total first; a kernel
    that was launched early and waits for the one before counts as running. Raises ValueError where there are no events.
    """
    ordered = sorted(events, key=lambda event: event[1])
    if not ordered:
        raise ValueError("profile: the profiler has seen no kernel")
    gaps, end = [], ordered[0][2]
    totals: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for name, start, stop in ordered:
        if start - end > LONG_GAP:
            gaps.append(start - end)
        end = max(end, stop)
        totals[name] += stop - start
        calls[name] += 1
    span = end - ordered[0][1]
    return {
        "span_us": round(span, 1),
        "gaps": len(gaps),
        "gap_us": round(sum(gaps), 1),
        "gap_fraction": round(sum(gaps) / span, 4),
        "kernels": [
            {"name": name, "calls": calls[name], "us": round(us, 1)}
            for name, us in sorted(totals.items(), key=lambda item: -item[1])
        ],
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows for a terminal, one a line."""
    cells = [[column.replace("_", " ") for column in _COLUMNS]]
    cells += [
        [f"{row[column]:.0%}" if column == "limit_fraction" else str(row[column]) for column in _COLUMNS] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def profile_table(profile: Mapping[str, Any], most: int = 20) -> str:
    """The kernels that took longest, and the gaps."""
    lines = [f"{each['us']:10.1f} us {each['calls']:6} x  {each['name'][:90]}" for each in profile["kernels"][:most]]
    rest = profile["kernels"][most:]
    if rest:
        lines.append(f"{sum(each['us'] for each in rest):10.1f} us {sum(each['calls'] for each in rest):6} x  others")
    gaps = f"{profile['gaps']} gaps longer than {LONG_GAP:g} us: {profile['gap_us']} us, {profile['gap_fraction']:.1%} of it"
    return "\n".join([f"one step under the profiler: {profile['span_us']} us; {gaps}", *lines])


def read_results(path: Path) -> dict[str, Any]:
    """A result file as `--output` writes it: header, rows, profiles."""
    found = read_json_object(path)
    if not isinstance(found.get("rows"), list):
        raise ValueError(f"{path}: no list of rows in it, not a result of bench")
    return {"profiles": [], **found}


def save_plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Tokens a second over the context, a line for each model, op and batch, as a PNG; raises as `plot_backend`."""
    figure = plot_backend()(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        label = f"{row['model']} ({row['layers']} layers) {row['op']}"
        label += f", batch {row['batch']}" if row["op"] == "decode_step" else ""
        lines.setdefault(label, []).append((row["context"], row["tokens_per_s"]))
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel="tokens/s", title=rows[0]["device"])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xticks(sorted({row["context"] for row in rows}), minor=False)
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=150)


def plot_backend() -> Any:
    """Matplotlib's `Figure`. Raises ImportError that says what to install."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("--plot: needs matplotlib, which is not installed (pip install 'exl3-triton[plot]')") from None
    return Figure


def save_results(path: Path, result: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
