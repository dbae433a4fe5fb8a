"""Plain against speculative decoding on this machine's GPU: `python tests/benchmark/speculate.py --out results.json`.

    --model PATH|PRESET   a checkpoint (default: the embedded demo), or a preset's geometry with random 3-bit weights
    --batch 1,8           sequences decoded together            --speculate 1,2,3,5    drafts a step
    --context N           tokens in the cache of each sequence  --bits K, --layers N   of a preset

Steps are CUDA graph replays, sampling included, greedy. A checkpoint's acceptance is what it reaches on its own text. On
random weights nothing would be accepted; since a step costs the same whatever is kept, tokens/s are given for every forced
number of accepted drafts. `speedup` is tokens a step, times a plain step's time over a speculative step's.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable

import torch
from timing import header, microseconds

import exl3_triton
from exl3_triton import LLM, SamplingParams
from exl3_triton.model.cache import Batch, pages_for
from exl3_triton.model.config import ModelConfig
from exl3_triton.model.dummy import dummy_model, first_layers
from exl3_triton.model.sampling import SamplingBatch, sample
from exl3_triton.model.speculate import Speculator
from exl3_triton.model.transformer import Transformer

DEMO = exl3_triton.__path__[0] + "/demo"
PROMPTS = ["In the beginning", "It is a truth universally acknowledged, that", "And Moses said unto", "She was"]


def open_model(name: str, bits: float, max_context: int, layers: int | None = None, device: str = "cuda") -> Transformer:
    if pathlib.Path(name).is_dir():
        return exl3_triton.load(name, device=device, mtp=True, max_context=max_context)
    config = ModelConfig.preset(name)
    config = config if layers is None else first_layers(config, layers)
    return dummy_model(config, device=device, max_context=max_context, mtp=True, bits=bits)


def step_of(model: Transformer, batch: int, drafts: int, context: int) -> Callable[[], None]:
    """One decode step of `batch` sequences; `drafts` 0 is plain decoding."""
    device = model.device
    each = pages_for(context + 64)
    limit, vocab = each * 64, model.config.vocab_size
    sampling = SamplingBatch.from_params([SamplingParams()] * batch, range(batch), device)
    table = 1 + torch.arange(batch * each, dtype=torch.int32, device=device).view(batch, each)
    cache = model.new_cache(1 + batch * each)
    tokens = torch.randint(0, vocab, (batch,), device=device)
    positions = torch.full((batch,), context, device=device)
    if drafts:
        sizes = {"num_pages": 1 + batch * each, "num_drafts": drafts, "max_batch": batch, "max_context": limit}
        speculator = Speculator(model, **sizes, vocab_size=vocab)
        speculator.load([None] * batch, [limit] * batch, sampling)
        speculator.drafted.fill_(drafts)

        def step() -> None:
            positions.fill_(context)  # every replay at the same length
            speculator.step(tokens, positions, table, cache)
    else:
        sequence = torch.arange(batch, dtype=torch.int32, device=device)

        def step() -> None:
            slots = table[:, context // 64].long() * 64 + context % 64
            flat = Batch(tokens, positions, slots, table, sequence, max_context=limit, prefill=False)
            logits = model.compute_logits(model(flat, cache))
            tokens.copy_(sample(logits, sampling, positions + 1).tokens.clamp(min=0))

    return step


@torch.inference_mode()
def step_microseconds(model: Transformer, batch: int, drafts: int, context: int) -> float:
    return microseconds([step_of(model, batch, drafts, context)])


def accepted_length(model: Transformer, name: str, drafts: int) -> float:
    """Mean tokens a step of greedy text from a checkpoint."""
    llm = LLM(model, tokenizer=LLM(name, progress=False).tokenizer, speculate=drafts)
    for _ in llm.generate(PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True)):
        pass
    assert llm.speculation is not None
    return llm.speculation.mean_accepted_length


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--speculate", default="1,2,3,5")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--bits", type=float, default=3)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    checkpoint = pathlib.Path(arguments.model).is_dir()
    if checkpoint and arguments.layers is not None:
        parser.error("--layers: acts on random weights, and --model is a checkpoint")
    model = open_model(arguments.model, arguments.bits, arguments.context + 128, arguments.layers)
    rows = []
    for batch in map(int, arguments.batch.split(",")):
        plain = step_microseconds(model, batch, 0, arguments.context)
        for drafts in map(int, arguments.speculate.split(",")):
            step = step_microseconds(model, batch, drafts, arguments.context)
            real = accepted_length(model, arguments.model, drafts) if checkpoint else None
            for length in [real] if real is not None else [1.0 + kept for kept in range(drafts + 1)]:
                rows.append(
                    {
                        "model": pathlib.Path(arguments.model).name,
                        "layers": model.config.num_layers,
                        "batch": batch,
                        "drafts": drafts,
                        "forced": not checkpoint,
                        "tokens_a_step": round(length, 3),
                        "plain_us": round(plain, 1),
                        "step_us": round(step, 1),
                        "plain_tokens_per_s": round(batch * 1e6 / plain, 1),
                        "tokens_per_s": round(batch * length * 1e6 / step, 1),
                        "speedup": round(length * plain / step, 3),
                    }
                )
                print(rows[-1], flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"header": header(), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
