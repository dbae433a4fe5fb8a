"""Many prompts at once: they share decode steps and the pages of their common beginning, and stream as they come.

    python examples/batch.py [MODEL]

MODEL is a checkpoint directory; without one the embedded demo model runs, on the GPU if there is one.
"""

import sys
from pathlib import Path

import torch

import exl3_triton
from exl3_triton import LLM, SamplingParams

BEGINNING = (
    "And it came to pass in those days, when Jesus was come into the house, that the people were gathered together, and "
)
ENDINGS = ["the king said unto", "they went out of the city", "a certain man", "she answered and said", "the sons of"]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else Path(exl3_triton.__file__).parent / "demo"
    llm = LLM(model, device="cuda" if torch.cuda.is_available() else "cpu", cache_tokens=4096, prefill_chunk=256)
    prompts = [BEGINNING * 3 + ending for ending in ENDINGS]
    # greedy and sampled requests mix freely; a seed gives the same text in any batch
    params = [SamplingParams(max_tokens=24, temperature=0.8 * (i % 2), seed=i) for i in range(len(prompts))]
    texts = [""] * len(prompts)
    for output in llm.generate(prompts, params):  # one token of one prompt at a time, as it is chosen
        texts[output.index] += output.text
        if output.finish_reason is not None:
            print(f"[{output.index}, {output.finish_reason}] ...{ENDINGS[output.index]}{texts[output.index]!r}")
    counts = llm.scheduling
    print(f"{counts.prefilled} prompt tokens fed, {counts.reused} taken from the cache, {counts.pauses} pauses")


if __name__ == "__main__":
    main()
