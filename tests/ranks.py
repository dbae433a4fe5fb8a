"""Starts ranks as torchrun would, for tests: on gloo and a CPU, or on NCCL and a GPU each."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import random
import signal
import socket
import sys
import time

import torch
from safetensors.torch import load_file, save_file

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "exl3_triton.model.runner"])  # ranks are forked with these imported already


class Ranks:
    """`size` processes of one job; those not in `started` never come. What they write goes to files in `directory`."""

    def __init__(self, job, path, size: int, directory: pathlib.Path, *, timeout: float = 60, started=None, device="cpu"):
        directory.mkdir(exist_ok=True)
        self.directory, self.end = directory, time.monotonic() + 240
        environment = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        self.processes = {}
        for rank in range(size) if started is None else started:
            mine = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            arguments = (job, path, directory, timeout, mine, device)
            self.processes[rank] = _context.Process(target=_rank, args=arguments, daemon=True)
            self.processes[rank].start()

    def wait(self) -> dict[int, tuple[int | None, str, str]]:
        """Of each rank: exit code, stdout, stderr. Kills what has not ended in time; its code is None."""
        codes = {}
        for rank, process in self.processes.items():
            process.join(max(0.0, self.end - time.monotonic()))
            codes[rank] = process.exitcode
        self.kill()
        files = {rank: [self.directory / f"{rank}.{kind}" for kind in ("out", "err")] for rank in codes}
        return {rank: (codes[rank], *(file.read_text() for file in files[rank])) for rank in codes}

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()


def _free_port() -> int:
    """Below the range from which outgoing connections take theirs."""
    while True:
        port = random.randrange(15000, 30000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def _rank(job, path, directory: pathlib.Path, timeout: float, environment: dict[str, str], device: str) -> None:
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(directory / f"{environment['RANK']}.{kind}", os.O_WRONLY | os.O_CREAT), number)
    if (directory / "stdin").exists():  # all ranks share the launcher's; only one of them may read it
        shared = directory / ("stdin" if environment["RANK"] == "0" else "nothing")
        sys.stdin = shared.open()
    os.environ.update(environment)
    torch.set_num_threads(1)
    run(job, path, directory, timeout, device)
    sys.stdout.flush()


def logits_of(directory: pathlib.Path, group) -> None:
    """Logits and generated tokens of every checkpoint in inputs.safetensors, "path|option" -> tokens, by every rank."""
    from exl3_triton import LLM, SamplingParams, load

    for name, tokens in load_file(directory / "inputs.safetensors").items():
        path, _, option = name.partition("|")
        experts = option == "experts"
        model = load(path, group=group, expert_parallel=experts, progress=False, mtp=option == "mtp")
        found = {"logits": model.logits(tokens), "least": torch.tensor(group.least(10 - group.rank))}
        llm = LLM(model, max_batch=2, speculate=2 if option == "mtp" else 0)
        # no seed: rank 0 draws them
        random = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.95, ignore_eos=True)
        for kind, params in (("greedy", SamplingParams(max_tokens=8, ignore_eos=True)), ("sampled", random)):
            outputs = list(llm.generate([tokens[:9].tolist(), tokens[:5].tolist()], params))
            for prompt in (0, 1):
                found[f"{kind}{prompt}"] = torch.tensor([each.token_id for each in outputs if each.index == prompt])
        label = pathlib.Path(path).name + option
        save_file(
            {key: value.cpu().contiguous() for key, value in found.items()}, directory / f"{label}.{group.rank}.safetensors"
        )
        print(f"{label}: {model.partition.describe()}")


def run(job: str, path: pathlib.Path, directory: pathlib.Path, timeout: float, device: str) -> None:
    """One rank of a job: "cli", "bench", "logits", or a call of the model, a way to fail, and another call."""
    from exl3_triton import RankGroup, cli, load

    if job == "cli":
        options = ["--device", device, "--max-tokens", "6", "--rank-timeout", str(timeout)]
        sys.exit(cli.main(["generate", str(path), "--prompt", "-", *options]))

    if job == "bench":
        sizes = ["--context", "32", "--batch", "1,2", "--prefill", "40", "--chunk", "32", "--repeats", "3"]
        options = ["--device", device, "--rank-timeout", str(timeout), "--output", str(directory / "rows.json")]
        sys.exit(cli.main(["bench", str(path), *sizes, *options, *(directory / "options").read_text().split()]))

    with RankGroup.from_env(device, timeout=timeout) as group:
        if job == "logits":
            logits_of(directory, group)
            return
        model = load(path, group=group, progress=False)
        tokens = torch.arange(5, device=group.device)
        model.logits(tokens)
        if job == "kill" and group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if job == "raise" and group.rank == 1:
            raise FloatingPointError("something broke here")
        if job == "hang" and group.rank == 1:
            model.norm.add = lambda *_: time.sleep(600)
        if job == "idle" and group.rank == 0:
            time.sleep(1.5 * timeout)
        if job == "disagree":
            group.agree("prompts", group.rank)
        model.logits(tokens)
        print("done")
