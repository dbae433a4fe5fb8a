"""The program: what goes to stdout and stderr, exit codes, interruption."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import exl3_triton
from exl3_triton.cli import main
from exl3_triton.model.runner import LLM
from exl3_triton.model.sampling import SamplingParams

DEMO = Path(exl3_triton.__file__).parent / "demo"
PROMPT = "In the beginning God created the heaven"


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    """The outputs that these tests expect are the CPU's; the program would choose a GPU where there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="module")
def llm():
    return LLM(DEMO, progress=False)


def text_of(llm, prompt, chat=False, **options):
    return "".join(output.text for output in llm.generate(prompt, SamplingParams(**options), chat=chat))


def start(*arguments, **options):
    """The program in a process of its own, as a terminal would start it (Ctrl-C not ignored)."""
    command = [sys.executable, "-m", "exl3_triton", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(DEMO.parents[1]), "PYTHONUNBUFFERED": ""}
    restore = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, preexec_fn=restore, **{**pipes, **options})


def test_generate(llm, capsys):
    assert main(["generate", "--prompt", PROMPT, "--max-tokens", "20"]) == 0
    out, err = capsys.readouterr()
    assert out == text_of(llm, PROMPT, max_tokens=20)
    assert out.strip()
    assert "device cpu, activations float32, cache float32, kernels: reference (torch)" in err
    assert "20 tokens in" in err


def test_generate_options(llm, capsys):
    options = ["--temperature", "0.9", "--seed", "3", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.01"]
    options += ["--repetition-penalty", "1.1", "--max-tokens", "30"]
    assert main(["generate", str(DEMO), "--prompt", PROMPT, *options]) == 0
    sampled = capsys.readouterr().out
    params = {"temperature": 0.9, "seed": 3, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
    assert sampled == text_of(llm, PROMPT, max_tokens=30, **params)
    assert sampled != text_of(llm, PROMPT, max_tokens=30)
    stop = sampled[20:24]
    assert main(["generate", str(DEMO), "--prompt", PROMPT, *options, "--stop", "never in there", "--stop", stop]) == 0
    assert capsys.readouterr().out == sampled[: sampled.index(stop)]


def test_generate_with_a_packed_cache(llm, capsys):
    assert main(["generate", "--prompt", PROMPT, "--max-tokens", "12", "--kv", "fp8"]) == 0
    out, err = capsys.readouterr()
    packed = LLM(DEMO, progress=False, kv="fp8")
    assert out == text_of(packed, PROMPT, max_tokens=12)
    assert out.strip()
    assert f"cache packed as fp8, {packed.cache.tokens_per_gib} tokens a GiB of cache" in err
    # 5 layers of 128 latents and 32 rope values, 3 of them with index keys of 128: 4736 bytes in fp32, 1376 packed
    assert packed.cache.tokens_per_gib > 2.5 * llm.cache.tokens_per_gib


def test_generate_speculate(llm, capsys):
    assert main(["generate", "--prompt", PROMPT, "--max-tokens", "20", "--speculate", "2"]) == 0
    out, err = capsys.readouterr()
    assert out == text_of(llm, PROMPT, max_tokens=20)
    counts = re.search(r"speculation: (\d+) of (\d+) drafts accepted \((.*) %\), (.*) tokens a step", err)
    accepted, proposed = int(counts[1]), int(counts[2])
    assert 0 < accepted <= proposed
    assert float(counts[3]) == pytest.approx(100 * accepted / proposed, abs=0.1)
    # the first token comes from the prompt
    assert float(counts[4]) == pytest.approx(19 / (19 - accepted), abs=0.01)


@pytest.mark.parametrize("as_file", [False, True], ids=["text", "file"])
def test_generate_json_schema(tmp_path, capsys, as_file):
    pytest.importorskip("llguidance", reason="needs the extra `grammar` (llguidance)")
    properties = {"age": {"type": "integer", "minimum": 1, "maximum": 999}}
    schema = json.dumps({"type": "object", "properties": properties, "required": ["age"], "additionalProperties": False})
    if as_file:
        (tmp_path / "schema.json").write_text(schema)
        schema = str(tmp_path / "schema.json")
    assert main(["generate", "--prompt", PROMPT, "--json-schema", schema, "--speculate", "1"]) == 0
    out, err = capsys.readouterr()
    assert 1 <= json.loads(out)["age"] <= 999
    assert "finish reason: stop" in err


def test_generate_echo_stdin_and_logprobs(llm, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n"))
    assert main(["generate", "--prompt", "-", "--echo", "--max-tokens", "3", "--logprobs", "2"]) == 0
    out, err = capsys.readouterr()
    assert out == PROMPT + text_of(llm, PROMPT, max_tokens=3)
    lines = [line for line in err.splitlines() if line.endswith("]") and "[" in line and "loading" not in line]
    first = next(iter(llm.generate(PROMPT, SamplingParams(max_tokens=1, logprobs=2))))
    assert len(lines) == 3
    assert lines[0].startswith(f"{first.token_id} '")
    assert f"{first.logprobs.logprob:.4f}  [" in lines[0]


def test_generate_chat(llm, capsys):
    message = "Elizabeth walked to the window, and saw"
    assert main(["generate", "--prompt", message, "--chat", "--max-tokens", "12", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert out == text_of(llm, message, chat=True, max_tokens=12)
    assert out != text_of(llm, message, max_tokens=12)


def test_chat(llm, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello there\n\nAnd then?\n/reset\nHello there\n/exit\nignored\n"))
    assert main(["chat", "--max-tokens", "8", "--system", "Speak."]) == 0
    system = [{"role": "system", "content": "Speak."}]
    first = [*system, {"role": "user", "content": "Hello there"}]
    reply = text_of(llm, first, chat=True, max_tokens=8)
    second = [*first, {"role": "assistant", "content": reply}, {"role": "user", "content": "And then?"}]
    out, err = capsys.readouterr()
    assert out == reply + "\n" + text_of(llm, second, chat=True, max_tokens=8) + "\n" + reply + "\n"
    assert err.count("8 tokens in") == 3


def test_chat_goes_on_after_a_turn_that_does_not_fit(llm, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("word " * 5000 + "\nHello\n"))
    assert main(["chat", "--max-tokens", "4"]) == 0
    out, err = capsys.readouterr()
    assert "but the context holds 4096" in err
    assert out == text_of(llm, "Hello", chat=True, max_tokens=4) + "\n"


def test_eval_windows(tmp_path, capsys):
    torch.manual_seed(0)
    file = tmp_path / "w.safetensors"
    save_file({"windows": torch.randint(10, 4096, (3, 20), dtype=torch.int32)}, file)
    command = ["eval", str(DEMO), "--windows", str(file), "--against", str(DEMO), "--limit", "2", "--batch", "2"]
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["windows"] == 2
    assert result["context"] == 19
    assert result["tokens"] == 2 * 18
    assert result["perplexity"] == result["against_perplexity"] > 100
    assert abs(result["mean_kl"]) < 1e-6
    assert result["top1_agreement"] == 1
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert f"perplexity      {result['perplexity']:.4f}" in out
    assert "top-1 agreement 100.00 %" in out
    assert err.count("kernels: reference (torch)") == 2


def test_eval_text(tmp_path, capsys):
    file = tmp_path / "text.txt"
    file.write_text(
        "And it came to pass, as they still went on, and talked, that, behold, there appeared a chariot of fire. " * 3
    )
    assert main(["eval", "--text", str(file), "--context", "32", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["context"] == 32
    assert result["tokens"] == result["windows"] * 31
    assert 1 < result["perplexity"] < 200
    assert "fill no window" in err


def test_inspect(capsys):
    assert main(["inspect", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["runs"] is True
    assert "glm_moe_dsa" in json.dumps(report)
    assert main(["inspect", str(DEMO)]) == 0
    assert "glm_moe_dsa" in capsys.readouterr().out
    assert main(["inspect", str(DEMO), "--tp", "8"]) == 0
    assert "whole on every rank: attention, heads (1 x 4 for 8 ranks)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["generate", "--prompt", ""], "--prompt: empty"),
        (["generate", "--prompt", "x", "--max-tokens", "0"], "max_tokens: found 0, required an integer >= 1"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "temperature: found -1.0"),
        (["generate", "--prompt", "x", "--top-p", "2"], "top_p: found 2.0"),
        (["generate", "--prompt", "x", "--stop", ""], "stop: found ''"),
        (["generate", "--prompt", "x", "--speculate", "6"], "speculate: found 6, required an integer from 1 to 5"),
        (["generate", "--prompt", "x", "--kv", "int4"], "kv='int4': required one of bf16, fp8, nvfp4, nvfp4-fp8rope"),
        (["generate", "--prompt", "x", "--json-schema", "{"], "json_schema: not valid JSON"),
        (["generate", "--prompt", "x", "--json-schema", "no/such/file"], "No such file"),
        (["generate", "no/such/directory", "--prompt", "x"], "no/such/directory"),
        (["generate", "--prompt", "word " * 5000], "but the context holds 4096"),
        (["eval", "--text", "no/such/file"], "No such file"),
        (["eval", "--windows", "no/such/file"], "No such file"),
        (["eval", "--windows", "x", "--context", "5"], "--context: the windows of --windows have their size already"),
        (["eval", "--text", "x", "--limit", "0"], "--limit: found 0"),
        (["inspect", "--tp", "0"], "--tp: found 0"),
        (["inspect", "no/such/directory"], "no/such/directory"),
    ],
)
def test_errors_are_one_line(arguments, match, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert match in errors[0]
    assert "Traceback" not in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_device_that_is_not_there(capsys):
    assert main(["generate", "--prompt", "x", "--device", "cuda"]) == 2
    assert "error: --device: found cuda, but torch sees no GPU" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["generate"], ["eval"], ["eval", "--text", "a", "--windows", "b"]])
def test_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert "usage: exl3-triton" in capsys.readouterr().err


def test_help_needs_no_torch():
    code = "import sys; from exl3_triton.cli import main\ntry: main(['generate', '--help'])\nfinally: "
    code += "assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": str(DEMO.parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "--max-tokens" in done.stdout


ENDLESS = ("generate", "--prompt", PROMPT, "--temperature", "2", "--seed", "1", "--max-tokens", "4000")


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_generate_ends_cleanly_on_ctrl_c():
    process = start(*ENDLESS)
    assert process.stdout.read(1)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert b"interrupted" in err


@pytest.mark.skipif(os.name != "posix", reason="closes a pipe early")
def test_generate_ends_when_the_reader_goes():
    process = start(*ENDLESS)
    assert process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 141
    assert b"Traceback" not in err
    assert b"Exception" not in err


@pytest.mark.skipif(os.name != "posix", reason="starts a process with POSIX signals")
def test_generate_prints_while_it_generates():
    process = start(*ENDLESS[:-1], "60")
    first = process.stdout.read(1)
    assert first
    assert process.poll() is None
    rest, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert len(rest) > 100
    assert b"kernels:" in err


def test_generate_with_a_cache_of_given_size(capsys):
    assert main(["generate", "--prompt", PROMPT, "--max-tokens", "3", "--cache-tokens", "200"]) == 0
    assert "tokens a GiB of cache, 256 in all" in capsys.readouterr().err
    assert main(["generate", "--prompt", PROMPT, "--gpu-memory", "2"]) == 2
    assert "gpu_memory: found 2.0, required a number above 0 and at most 1" in capsys.readouterr().err
