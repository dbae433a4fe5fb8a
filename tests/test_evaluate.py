"""Perplexity and comparison: against plain arithmetic in float64, and the stored figures of the demo checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import exl3_triton
from exl3_triton import evaluate
from exl3_triton.evaluate import compare, cut_windows, perplexity, read_windows
from exl3_triton.model.tokenizer import Tokenizer

DEMO = Path(exl3_triton.__file__).parent / "demo"


@pytest.fixture(scope="module")
def model():
    return exl3_triton.load(DEMO, progress=False)


def windows_of(model, count, width):
    torch.manual_seed(count * width)
    return torch.randint(10, model.config.vocab_size, (count, width), dtype=torch.int32)


@pytest.mark.parametrize("width", [3, 40, 130])
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_perplexity_matches_float64(model, width, batch_size):
    windows = windows_of(model, 3, width)
    losses = []
    for window in windows.long():
        logprobs = model.logits(window[:-1]).double().log_softmax(1)
        losses += [-logprobs[i - 1, window[i]].item() for i in range(2, width)]
    found = perplexity(model, windows, batch_size=batch_size, progress=False)
    assert found.tokens == len(losses) == 3 * (width - 2)
    # fp32 logits of the same model, summed in another order
    assert found.loss == pytest.approx(math.fsum(losses) / len(losses), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss))


def test_perplexity_in_small_pieces(model, monkeypatch):
    windows = windows_of(model, 2, 50)
    whole = perplexity(model, windows, progress=False)
    monkeypatch.setattr(evaluate, "LOGITS_BUDGET", 7 * model.config.vocab_size)
    pieces = perplexity(model, windows, progress=False)
    assert pieces.tokens == whole.tokens
    assert pieces.loss == pytest.approx(whole.loss, rel=1e-6)


def test_compare_matches_float64(model):
    other = exl3_triton.load(DEMO, overrides={"index_topk": 8, "routed_scaling_factor": 2.0}, progress=False)
    windows = windows_of(model, 2, 60)
    kl, agree = [], []
    for window in windows.long():
        p = model.logits(window[:-1]).double().log_softmax(1)[1:]
        q = other.logits(window[:-1]).double().log_softmax(1)[1:]
        kl += (q.exp() * (q - p)).sum(1).tolist()
        agree += (p.argmax(1) == q.argmax(1)).tolist()
    found = compare(model, other, windows, progress=False)
    assert found.mean_kl == pytest.approx(math.fsum(kl) / len(kl), rel=1e-4)
    assert found.mean_kl > 0.01
    assert found.top1_agreement == pytest.approx(sum(agree) / len(agree), abs=1 / len(agree))
    assert found.model == perplexity(model, windows, progress=False)
    assert found.other == perplexity(other, windows, progress=False)
    same = compare(model, model, windows, progress=False)
    assert abs(same.mean_kl) < 1e-6
    assert same.top1_agreement == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo-exl3-3.0bpw-mcg", "demo-exl3-mixed-mul1"])
def test_compare_matches_stored_figures(testdata, name):
    stored = json.loads((testdata / "demo" / "metrics.json").read_text())["variants"]
    windows = read_windows(testdata / "demo" / "val_windows.safetensors")
    loaded = [exl3_triton.load(testdata / "demo" / folder, progress=False) for folder in (name, "demo-bf16")]
    found = compare(*loaded, windows, progress=False)
    assert found.model.tokens == stored[name]["val_tokens"]
    assert found.model.perplexity == pytest.approx(stored[name]["val_ppl"], rel=0.005)
    assert found.other.perplexity == pytest.approx(stored["demo-bf16"]["val_ppl"], rel=0.005)
    assert found.mean_kl == pytest.approx(stored[name]["mean_kld_vs_bf16"], rel=0.02)
    assert found.top1_agreement == pytest.approx(stored[name]["top1_agreement_vs_bf16"], rel=0.02)


def test_cut_windows_matches_stored_windows(testdata):
    stored = read_windows(testdata / "demo" / "val_windows.safetensors")
    windows, _ = cut_windows(Tokenizer.from_dir(DEMO), (testdata / "demo" / "val.txt").read_text(), 512)
    # the stored windows are a selection of all
    cut = [tuple(row) for row in windows.tolist()]
    where = [cut.index(tuple(row)) for row in stored.tolist()]
    assert where == sorted(where)
    assert len(where) == 96


def test_cut_windows():
    tokenizer = Tokenizer.from_dir(DEMO)
    ids = tokenizer.encode("And it came to pass in those days. " * 20, add_prefix=False)
    text = tokenizer.decode(ids)
    windows, left = cut_windows(tokenizer, text, 31)
    assert windows.shape == (len(ids) // 30, 32)
    assert left == len(ids) % 30
    assert (windows[:, :2] == torch.tensor(tokenizer.prefix_ids)).all()
    assert windows[:, 2:].flatten().tolist() == ids[: len(ids) - left]
    short, left = cut_windows(tokenizer, text, 4000)
    assert short.tolist() == [[*tokenizer.prefix_ids, *ids]]
    assert left == 0


@pytest.mark.parametrize(
    ("text", "context", "match"), [("", 8, "text: found 0 tokens"), ("some words", 1, "context: found 1")]
)
def test_cut_windows_refuses(text, context, match):
    with pytest.raises(ValueError, match=match):
        cut_windows(Tokenizer.from_dir(DEMO), text, context)


@pytest.mark.parametrize(
    ("windows", "match"),
    [
        (torch.zeros(0, 9, dtype=torch.int64), r"windows: found torch.int64 \(0, 9\)"),
        (torch.zeros(9, dtype=torch.int64), "windows: found"),
        (torch.zeros(2, 9), "windows: found torch.float32"),
        (torch.zeros(2, 2, dtype=torch.int64), "windows: found 2 tokens each, required at least 3"),
        (torch.zeros(1, 4098, dtype=torch.int64), "windows: found 4098 tokens each, the model allows a context of 4096"),
        (torch.tensor([[1, 2, 4096]]), "windows: found token ids 1 to 4096, the vocabulary has ids 0 to 4095"),
        (torch.tensor([[1, 2, -1]]), "windows: found token ids -1 to 2"),
    ],
)
def test_perplexity_refuses(model, windows, match):
    with pytest.raises(ValueError, match=match):
        perplexity(model, windows, progress=False)


def test_perplexity_refuses_batch_size(model):
    with pytest.raises(ValueError, match="batch_size: found 0"):
        perplexity(model, windows_of(model, 1, 9), batch_size=0, progress=False)


def test_read_windows(tmp_path):
    file = tmp_path / "w.safetensors"
    tensor = torch.arange(6).reshape(2, 3)
    save_file({"windows": tensor}, file)
    assert torch.equal(read_windows(file), tensor)
    save_file({"other": tensor}, file)
    with pytest.raises(ValueError, match="required one named 'windows'"):
        read_windows(file)
    file.write_bytes(b"not safetensors at all")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        read_windows(file)
