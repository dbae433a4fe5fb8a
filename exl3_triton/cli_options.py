"""The options of the program `exl3-triton` (cli.py)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

DEMO = Path(__file__).parent / "demo"
DTYPES = ("float32", "bfloat16", "float16")


def program_parser(commands: Mapping[str, Callable[[argparse.Namespace], int]]) -> argparse.ArgumentParser:
    """The program's options; `commands` has, by name, what becomes `run` of the parsed arguments."""
    parser = argparse.ArgumentParser(
        prog="exl3-triton", description="EXL3 inference for GLM and DeepSeek mixture-of-experts models."
    )
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    generate = subparsers.add_parser("generate", help="continue a prompt", description="Print the continuation of a prompt.")
    _model_argument(generate)
    generate.add_argument(
        "--prompt", required=True, metavar="TEXT", help="the text to continue; - reads stdin (one final newline is dropped)"
    )
    generate.add_argument(
        "--chat", action="store_true", help="the prompt is a user's message for the chat template, not raw text"
    )
    generate.add_argument("--echo", action="store_true", help="print the prompt, too")
    _sampling_arguments(generate)
    generate.add_argument(
        "--logprobs", type=int, metavar="N", help="list each token's log-probability and the N best, on stderr"
    )
    generate.add_argument(
        "--json-schema", metavar="JSON", help="the text is JSON that this schema allows: its text, or a file (extra `grammar`)"
    )
    _load_arguments(generate)
    _speculate_argument(generate)
    _kv_argument(generate)
    _cache_arguments(generate)
    _graphs_argument(generate)
    generate.set_defaults(run=commands["generate"])

    chat = subparsers.add_parser(
        "chat",
        help="talk in a terminal",
        description="Several turns in a terminal; /reset starts anew, /exit or end of input ends.",
    )
    _model_argument(chat)
    chat.add_argument("--system", metavar="TEXT", help="system message in front of the conversation")
    _sampling_arguments(chat)
    _load_arguments(chat)
    _speculate_argument(chat)
    _kv_argument(chat)
    _cache_arguments(chat)
    _graphs_argument(chat)
    chat.set_defaults(run=commands["chat"])

    evaluate = subparsers.add_parser(
        "eval",
        help="perplexity, divergence from another model",
        description="Perplexity on text; with --against also the divergence.",
    )
    _model_argument(evaluate)
    source = evaluate.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text, cut into windows of --context tokens")
    source.add_argument(
        "--windows", type=Path, metavar="FILE", help="safetensors file with integer `windows` [N, context + 1]"
    )
    evaluate.add_argument(
        "--against", type=Path, metavar="OTHER", help="a second checkpoint: mean KL(OTHER || MODEL), top-1 agreement"
    )
    evaluate.add_argument("--context", type=int, metavar="N", help="tokens per window of --text (default: 512)")
    evaluate.add_argument("--limit", type=int, metavar="N", help="only the first N windows")
    evaluate.add_argument("--batch", type=int, default=4, metavar="N", help="windows fed together (default: 4)")
    evaluate.add_argument("--json", action="store_true", help="print JSON")
    _load_arguments(evaluate)
    evaluate.set_defaults(run=commands["eval"])

    inspect = subparsers.add_parser(
        "inspect",
        help="what a checkpoint is, from its headers",
        description="Report on a checkpoint without reading its weights.",
    )
    _model_argument(inspect)
    inspect.add_argument(
        "--tp", type=int, default=1, metavar="N", help="would it run on N tensor-parallel ranks? (default: 1)"
    )
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=commands["inspect"])

    cut = subparsers.add_parser(
        "slice",
        help="cut the experts of an EXL3 checkpoint for tensor parallelism",
        description="Write a rank-sliced copy: routed experts in slices for T ranks, lossless; call again to resume.",
    )
    cut.add_argument("source", type=Path, metavar="SRC", help="a plain EXL3 checkpoint")
    cut.add_argument("destination", type=Path, metavar="DST", help="a new directory, or an unfinished copy")
    cut.add_argument("--tp", type=int, required=True, metavar="T", help="number of slices")
    cut.set_defaults(run=commands["slice"])

    verify = subparsers.add_parser(
        "verify",
        help="read a checkpoint whole: hashes, completeness, finite values",
        description="Exit code 0: sound; 1: something is wrong, each thing on a line; 2: not a checkpoint.",
    )
    verify.add_argument("model", type=Path, metavar="DIR", help="checkpoint directory")
    verify.set_defaults(run=commands["verify"])

    bench = subparsers.add_parser(
        "bench",
        help="speed of prefill and decode steps",
        description="Time decode steps and prefill, on a checkpoint or on random weights of a known geometry.",
    )
    _bench_arguments(bench)
    bench.set_defaults(run=commands["bench"])
    return parser


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=str(DEMO),
        metavar="MODEL",
        help="checkpoint directory (default: the embedded demo); a preset or a config.json, which get random weights",
    )
    parser.add_argument("--dummy", action="store_true", help="random weights also for a checkpoint directory")
    parser.add_argument("--bits", type=float, metavar="K", help="of random weights: 1..8, 1.5, 2.5, 3.5 (default: 3)")
    parser.add_argument("--codebook", choices=("mcg", "mul1", "3inst"), help="of random weights (default: mcg)")
    parser.add_argument("--layers", type=int, metavar="N", help="random weights for the first N layers only")
    parser.add_argument("--rank-of", type=int, metavar="T", help="random weights of one of T tensor-parallel ranks")
    parser.add_argument("--experts-only", action="store_true", help="only the routed experts are quantized")
    parser.add_argument("--context", type=_sizes, metavar="N,...", help="contexts of decode steps, 64k is 65536 (default: 4k)")
    parser.add_argument("--batch", type=_sizes, default=(1,), metavar="N,...", help="sequences of a decode step (default: 1)")
    parser.add_argument("--prefill", type=_sizes, metavar="N,...", help="lengths of prompts (default: 4k, without --context)")
    parser.add_argument("--chunk", type=int, default=2048, metavar="N", help="tokens of a prompt fed at once (default: 2048)")
    parser.add_argument("--repeats", type=int, default=50, metavar="N", help="decode steps timed (default: 50)")
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel of a decode step from the host")
    parser.add_argument("--profile", action="store_true", help="kernels and gaps of the decode steps at batch 1 (GPU)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--append", action="store_true", help="keep the rows that are in --output already")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a PNG (extra `plot`)")
    _load_arguments(parser)
    _kv_argument(parser)


def _sizes(text: str) -> tuple[int, ...]:
    """ "4k,65536" as integers."""
    try:
        return tuple(int(part[:-1]) << 10 if part[-1:] in "kK" else int(part) for part in text.split(",") if part)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: required integers with commas between them, 64k is 65536") from None


def _model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", type=Path, default=DEMO, metavar="MODEL", help="checkpoint directory (default: the embedded demo)"
    )


def _load_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU, else cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="activations (default: the device's)")
    parser.add_argument(
        "--expert-parallel",
        action="store_true",
        help="under torchrun: divide the routed experts over the ranks by number, not by width",
    )
    parser.add_argument(
        "--rank-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="under torchrun: seconds within which all ranks end after one died or hangs (default: 60)",
    )


def _speculate_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--speculate",
        type=int,
        default=0,
        metavar="N",
        help="tokens drafted a step by the next-token layer, 1..5 (default: 0)",
    )


def _graphs_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-graphs", dest="graphs", action="store_const", const=False, help="decode without CUDA graphs, to compare"
    )


def _kv_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv",
        default="bf16",
        metavar="FORMAT",
        help="cache: bf16 (the activations' type; default), fp8, and for MLA nvfp4 or nvfp4-fp8rope",
    )


def _cache_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-tokens", type=int, metavar="N", help="positions in the cache (default: one context; on a GPU what is left)"
    )
    parser.add_argument(
        "--gpu-memory", type=float, default=0.9, metavar="F", help="part of the GPU's memory that may be in use (default: 0.9)"
    )


def _sampling_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, metavar="S", help="makes sampling repeatable")
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample among the K most probable tokens (default: 0, all)"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="among the most probable ones that reach P (default: 1, all)"
    )
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="among those at least P times as probable as the best (default: 0)",
    )
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="default: 1, off")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
