"""The program `exl3-triton`: generate, chat, eval, inspect, bench.

Only results go to stdout (text as it is generated, reports); loading, the line that names device and kernels, and statistics
go to stderr. Exit codes: 0; 1 where `inspect` finds that the checkpoint will not run; 2 for bad input or options; 130 after
Ctrl-C; 141 when the reader of stdout went away; 3 where another rank failed. Under torchrun the ranks run one model
together, and rank 0 alone reads and prints.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cli_options import program_parser

if TYPE_CHECKING:
    import torch

    from .model.rank_group import RankGroup
    from .model.runner import LLM, Output
    from .model.sampling import SamplingParams


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with `argv` (default: the command line); returns the exit code."""
    # numpy is no dependency; torch says so at its import
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    argv = sys.argv[1:] if argv is None else argv
    arguments = program_parser(_COMMANDS).parse_args(argv)
    # as results record it: file names without the folders of a machine
    arguments.command = shlex.join(["exl3-triton", *(Path(each).name if Path(each).is_absolute() else each for each in argv)])
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a character that the terminal's encoding lacks is no reason to stop
        sys.stdout.reconfigure(errors="replace")
    group: RankGroup | None = None
    try:
        with contextlib.ExitStack() as stack:
            group = arguments.group = _join(arguments, stack)
            code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        _note("interrupted")
        return 130
    except BrokenPipeError:
        # the interpreter flushes stdout at exit; without this it would report the same error again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, FloatingPointError, ImportError, RuntimeError) as error:
        from .model.rank_group import RankError

        if isinstance(error, RuntimeError) and not isinstance(error, RankError):
            raise
        # the same mistake on all ranks is told once
        if group is None or group.rank == 0 or group.failed_first:
            rank = f"rank {_rank()}: " if _rank() else ""
            print(f"{rank}error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 3 if isinstance(error, RankError) else 2


def _rank() -> int:
    """This process's number among those that torchrun started."""
    return int(os.environ.get("RANK", "0")) if os.environ.get("WORLD_SIZE", "1") != "1" else 0


def _join(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> RankGroup | None:
    """The ranks that run this command together, where torchrun started several; only rank 0 has a stdout."""
    if "rank_timeout" not in arguments:
        return None
    from .model.rank_group import RankGroup, launched_ranks

    if launched_ranks() == 1:
        return None
    if arguments.device == "cuda":
        _device_and_dtype(arguments)
    if _rank():
        nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        stack.enter_context(contextlib.redirect_stdout(nowhere))
    return stack.enter_context(RankGroup.from_env(arguments.device, timeout=arguments.rank_timeout))


def _sampling_params(arguments: argparse.Namespace, logprobs: int | None = None) -> SamplingParams:
    from .model.sampling import SamplingParams

    return SamplingParams(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.seed,
        repetition_penalty=arguments.repetition_penalty,
        max_tokens=arguments.max_tokens,
        stop=arguments.stop,
        logprobs=logprobs,
        json_schema=_json_schema(getattr(arguments, "json_schema", None)),
    )


def _json_schema(value: str | None) -> str | None:
    """The text of --json-schema, or of the file that it names."""
    if value is None or value.lstrip().startswith("{"):
        return value
    return Path(value).read_text(encoding="utf-8")


def _device_and_dtype(arguments: argparse.Namespace) -> tuple[str, torch.dtype | None]:
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: found cuda, but torch sees no GPU; use cpu")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.group is not None:
        device = str(arguments.group.device)
    return device, getattr(torch, arguments.dtype) if arguments.dtype else None


def _open(arguments: argparse.Namespace) -> LLM:
    from .model.runner import LLM

    device, dtype = _device_and_dtype(arguments)
    names = ("speculate", "kv", "graphs", "cache_tokens", "gpu_memory", "group", "expert_parallel")
    options = {name: getattr(arguments, name) for name in names}
    llm = LLM(arguments.model, device=device, dtype=dtype, **options)
    _note(f"{arguments.model}: {llm.describe()}")
    return llm


def _generate(arguments: argparse.Namespace) -> int:
    params = _sampling_params(arguments, arguments.logprobs)
    prompt = arguments.prompt
    if prompt == "-":
        prompt = _from_rank_0(arguments, lambda: sys.stdin.read().removesuffix("\n"))
    if not prompt:
        raise ValueError("--prompt: empty")
    llm = _open(arguments)
    outputs = llm.generate(prompt, params, chat=arguments.chat)
    if arguments.echo:
        _print(prompt)
    _stream(llm, outputs)
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    params = _sampling_params(arguments)
    llm = _open(arguments)
    opening = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    messages = list(opening)
    while (line := _from_rank_0(arguments, _ask)) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(opening)
            continue
        if not line:
            continue
        turn = [*messages, {"role": "user", "content": line}]
        try:
            outputs = llm.generate(turn, params, chat=True)
        except ValueError as error:
            # most often a conversation that outgrew the context; the turn is not kept
            _note(f"error: {error}; /reset starts anew")
            continue
        reply = _stream(llm, outputs)
        _print("\n")
        messages = [*turn, {"role": "assistant", "content": reply}]
    return 0


def _from_rank_0(arguments: argparse.Namespace, read: Callable[[], Any]) -> Any:
    """What `read` gives on rank 0, which alone has the user's stdin; on all ranks."""
    group = arguments.group
    return read() if group is None else group.broadcast(read() if group.rank == 0 else None)


def _ask() -> str | None:
    """The user's next line, or None at the end of input."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() line editing)
        try:
            return input("> ").strip()
        except EOFError:
            return None
    line = sys.stdin.readline()
    return line.strip() if line else None


def _stream(llm: LLM, outputs: Iterator[Output]) -> str:
    """Print text as it comes; statistics, and log-probabilities where there are any, to stderr. Returns the text."""
    text, count, reason = "", 0, None
    start = time.perf_counter()
    try:
        for output in outputs:
            _print(output.text)
            text += output.text
            count += 1
            reason = output.finish_reason
            if output.logprobs is not None:
                _note(_logprob_line(llm, output))
    finally:
        seconds = time.perf_counter() - start
        # keeps the next line, or the shell's prompt, off the text; in a pipe the text stays as it is
        if sys.stdout.isatty():
            _print("\n")
    _note(f"{count} tokens in {seconds:.2f} s, prompt included; finish reason: {reason}")
    if (stats := llm.speculation) is not None:
        _note(
            f"speculation: {stats.accepted} of {stats.proposed} drafts accepted ({100 * stats.acceptance_rate:.1f} %),"
            f" {stats.mean_accepted_length:.2f} tokens a step"
        )
    return text


def _logprob_line(llm: LLM, output: Output) -> str:
    def show(token_id: int) -> str:
        return repr(llm.tokenizer.token_text(token_id)) if llm.tokenizer is not None else ""

    assert output.logprobs is not None
    top = ", ".join(f"{show(token)} {value:.4f}" for token, value in output.logprobs.top)
    return f"{output.token_id} {show(output.token_id)} {output.logprobs.logprob:.4f}" + (f"  [{top}]" if top else "")


def _eval(arguments: argparse.Namespace) -> int:
    for name in ("context", "limit", "batch"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name}: found {value}, required an integer >= 1")
    if arguments.context is not None and arguments.windows is not None:
        raise ValueError("--context: the windows of --windows have their size already; it acts on --text")
    from . import load
    from .evaluate import compare, cut_windows, perplexity, read_windows
    from .model.runner import describe
    from .model.tokenizer import Tokenizer

    if arguments.windows is not None:
        windows = read_windows(arguments.windows)
    else:
        text = arguments.text.read_text(encoding="utf-8")
        windows, left = cut_windows(Tokenizer.from_dir(arguments.model), text, arguments.context or 512)
        if left:
            _note(f"{arguments.text}: the last {left} tokens fill no window and are left out")
    windows = windows[: arguments.limit]
    device, dtype = _device_and_dtype(arguments)
    models = []
    for path in (arguments.model, arguments.against):
        if path is not None:
            ranks = {"group": arguments.group, "expert_parallel": arguments.expert_parallel}
            models.append(load(path, device=device, dtype=dtype, **ranks))
            _note(f"{path}: {describe(models[-1])}")

    result: dict[str, Any] = {"model": str(arguments.model), "windows": len(windows), "context": windows.shape[1] - 1}
    if arguments.against is None:
        one = perplexity(models[0], windows, batch_size=arguments.batch)
    else:
        both = compare(models[0], models[1], windows, batch_size=arguments.batch)
        one = both.model
    result |= {"tokens": one.tokens, "loss": one.loss, "perplexity": one.perplexity}
    if arguments.against is not None:
        result |= {"against": str(arguments.against), "against_perplexity": both.other.perplexity}
        result |= {"mean_kl": both.mean_kl, "top1_agreement": both.top1_agreement}
    _print((json.dumps(result, indent=2) if arguments.json else _table(result)) + "\n")
    return 0


def _table(result: dict[str, Any]) -> str:
    lines = [f"perplexity      {result['perplexity']:.4f}  ({result['tokens']} tokens, {result['loss']:.5f} nats each)"]
    if "against" in result:
        lines.append(f"  of {result['against']}: {result['against_perplexity']:.4f}")
        lines.append(f"mean KL         {result['mean_kl']:.5f} nats")
        lines.append(f"top-1 agreement {100 * result['top1_agreement']:.2f} %")
    return "\n".join(lines)


def _inspect(arguments: argparse.Namespace) -> int:
    if arguments.tp < 1:
        raise ValueError(f"--tp: found {arguments.tp}, required an integer >= 1")
    from .model.inspect import format_report, inspect_checkpoint

    report = inspect_checkpoint(arguments.model, tp=arguments.tp)
    _print((json.dumps(report, indent=2) if arguments.json else format_report(report)).rstrip("\n") + "\n")
    return 0 if report["runs"] else 1


def _slice(arguments: argparse.Namespace) -> int:
    if arguments.tp < 1:
        raise ValueError(f"--tp: found {arguments.tp}, required an integer >= 1")
    from .model.slicing import slice_checkpoint

    done = slice_checkpoint(arguments.source, arguments.destination, arguments.tp)
    kept = f", {done.kept} kept from an earlier run" if done.kept else ""
    _print(
        f"{arguments.destination}: layers {done.layers[0]}..{done.layers[1]} in slices for tp={done.tp}; "
        f"{done.written} files written ({done.bytes / 1e9:.2f} GB){kept}\n"
    )
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from .model.verify import verify_checkpoint

    report = verify_checkpoint(arguments.model)
    for note in report.notes:
        _note(note)
    for problem in report.problems:
        _print(f"{problem}\n")
    hashed = "no manifest" if report.hashed is None else f"{report.hashed} files hashed"
    state = "sound" if report.sound else f"{len(report.problems)} problems"
    _print(f"{report.path}: {report.tensors:,} tensors, {report.bytes / 1e9:.2f} GB, {hashed}: {state}\n")
    return 0 if report.sound else 1


def _bench(arguments: argparse.Namespace) -> int:
    from . import bench
    from .format import Codebook

    if arguments.append and arguments.output is None:
        raise ValueError("--append: acts on --output, which is not there")
    if arguments.plot is not None:
        bench.plot_backend()
    device, dtype = _device_and_dtype(arguments)
    result: dict[str, Any] = {"header": {}, "rows": [], "profiles": []}
    writes = arguments.output is not None and not _rank()
    if arguments.append and writes and arguments.output.exists():
        result = bench.read_results(arguments.output)
    contexts, prefills = arguments.context, arguments.prefill
    if contexts is None and prefills is None:
        contexts = prefills = (4096,)
    rows = []
    for kind, found in bench.run(
        arguments.model,
        contexts=contexts or (),
        batches=arguments.batch,
        prefills=prefills or (),
        device=device,
        dtype=dtype,
        kv=arguments.kv,
        graphs=not arguments.no_graphs,
        repeats=arguments.repeats,
        chunk=arguments.chunk,
        profile=arguments.profile,
        group=arguments.group,
        expert_parallel=arguments.expert_parallel,
        dummy=arguments.dummy,
        bits=arguments.bits,
        codebook=next((each for each in Codebook if each.label == arguments.codebook), None),
        layers=arguments.layers,
        rank_of=arguments.rank_of,
        experts_only=arguments.experts_only,
    ):
        if kind == "header":
            result["header"] = found | {"command": arguments.command}
            _note(f"{found['device']}: reads {found['hbm_read_gbps']} GB/s, multiplies {found['matmul_tflops']} TFLOP/s")
        elif kind == "profile":
            result["profiles"].append(found)
            _note(bench.profile_table(found))
        else:
            rows.append(found)
            result["rows"].append(found | {"command": arguments.command})
            _note(bench.table([found]).splitlines()[1])
        if writes:
            bench.save_results(arguments.output, result)
    _print(bench.table(rows) + "\n")
    if arguments.plot is not None and not _rank():
        bench.save_plot(rows, arguments.plot)
    return 0


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _note(text: str) -> None:
    if not _rank():
        print(text, file=sys.stderr, flush=True)


_COMMANDS = {
    "generate": _generate,
    "chat": _chat,
    "eval": _eval,
    "inspect": _inspect,
    "slice": _slice,
    "verify": _verify,
    "bench": _bench,
}
