import math

import pytest
import torch
from paged import paged
from rounding import EPS, rounding
from test_kv_cache import POSITIONS, SLOTS, check_rows
from test_rope import expected as roped
from test_rope import make_table

from exl3_triton.ops import gqa
from exl3_triton.ops._dispatch import override_backend
from exl3_triton.ops.attention import SplitPlan
from exl3_triton.ops.gqa import (
    GroupedTile,
    _gqa_attention_op,
    _gqa_kv_write_op,
    _launch_gqa_decode,
    _launch_gqa_prefill,
    gqa_attention,
    gqa_kv_write,
)

# Triton's interpreter multiplies the bits of bf16, so bf16 products are tested on a GPU only
DTYPES = list(EPS)
SMALL = (6, 2, 16, 16)  # H, KV, D, V
UNEVEN = (4, 4, 24, 40)
GLM = (96, 8, 128, 128)
WIDE = (40, 2, 256, 256)


def on_gpu(*cases):
    return [pytest.param(*case, marks=pytest.mark.gpu) for case in cases]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("dtype", "cache_dtype"), [(d, d) for d in EPS] + [(torch.float32, torch.float16)])
@pytest.mark.parametrize(
    ("heads", "width", "value", "turned"), [(2, 32, 32, 16), (8, 128, 128, 64), (3, 24, 40, 24), (20, 96, 8, 12)]
)
def test_gqa_kv_write(heads, width, value, turned, dtype, cache_dtype, interleaved, norm, device, triton_backend):
    kv = torch.randn(7, heads * (width + value) + 3).to(dtype).to(device)
    k = kv[:, : heads * width].view(7, heads, width) if heads != 3 else kv[:, : heads * width].reshape(7, heads, width)
    v = torch.randn(7, value, heads).to(dtype).to(device).transpose(1, 2)
    weight = torch.randn(width).to(device) if norm else None
    positions, slots = torch.tensor(POSITIONS, device=device), torch.tensor(SLOTS, device=device)
    k_cache = torch.randn(3, 64, heads, width).to(cache_dtype).to(device)
    v_cache = torch.randn(3, 64, heads, value).to(cache_dtype).to(device)
    before = k_cache.clone(), v_cache.clone()
    table = make_table(100, turned, device)
    assert gqa_kv_write(k, v, weight, 1e-5, positions, slots, table, k_cache, v_cache, interleaved=interleaved) is None
    exact = k.double().cpu()
    if weight is not None:
        exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double().cpu()
    exact = roped(exact, positions, turned, interleaved, 0)
    check_rows(k_cache.flatten(2), before[0].flatten(2), exact.flatten(1))
    check_rows(v_cache.flatten(2), before[1].flatten(2), v.double().cpu().flatten(1))


def case(shape, lengths, queries, dtype, device, padding=0):
    """(batch, q, k_cache, v_cache, contexts [(keys, values)] in float64)."""
    heads, kv_heads, width, value = shape
    batch = paged(lengths, queries, kv_heads * (width + value), dtype, device, padding=padding)
    k_cache, v_cache = batch.cache.split([kv_heads * width, kv_heads * value], dim=-1)
    k_cache, v_cache = (each.unflatten(-1, (kv_heads, -1)).contiguous() for each in (k_cache, v_cache))
    q = torch.randn(len(batch.positions), heads, width + 8).to(dtype).to(device)[..., :width]
    return batch, q, k_cache, v_cache


def exact_attention(shape, batch, q, scale):
    """Softmax attention in float64, one token and head at a time."""
    heads, kv_heads, width, value = shape
    out, lse = torch.zeros(len(q), heads, value).double(), torch.full((len(q), heads), -math.inf).double()
    for t, position in enumerate(batch.positions.tolist()):
        rows = batch.contexts[int(batch.sequence[t])][: position + 1]
        for h in range(heads if position >= 0 else 0):
            kv = h // (heads // kv_heads)
            keys = rows[:, kv * width : (kv + 1) * width]
            values = rows[:, kv_heads * width :][:, kv * value : (kv + 1) * value]
            scores = keys @ q[t, h].double().cpu() * scale
            lse[t, h] = scores.logsumexp(-1)
            out[t, h] = scores.softmax(-1) @ values
    return out, lse


def check(got, exact, batch):
    """fp32: sums of up to a thousand products. 16 bits: probabilities and the result are rounded once each."""
    (out, lse), (want, want_lse) = got, exact
    assert want.abs().max() > 0.01
    size = max(context.abs().max() for context in batch.contexts)
    slack = 1e-5 if out.dtype == torch.float32 else rounding(out.dtype) * 2.5 + 1e-5
    assert lse.dtype == torch.float32
    assert (out.double().cpu() - want).abs().max() <= slack * size
    torch.testing.assert_close(lse.double().cpu(), want_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize(
    ("shape", "lengths", "queries"),
    [
        (SMALL, [1, 64, 65], [1, 1, 3]),
        (SMALL, [300, 3], [2, 3]),
        (SMALL, [200, 9, 90], [7, 9, 40]),
        (UNEVEN, [130, 31], [1, 31]),
        ((24, 2, 128, 128), [150], [2]),
        (WIDE, [70], [2]),
        *on_gpu(
            (GLM, [5000, 17, 1024], [1, 4, 2]),
            (GLM, [700, 333], [300, 333]),
            (GLM, [300] * 70, [1] * 70),
            (WIDE, [900], [200]),
        ),
    ],
)
def test_gqa_attention(shape, lengths, queries, prefill, dtype, device, triton_backend):
    batch, q, k_cache, v_cache = case(shape, lengths, queries, dtype, device, padding=2)
    place, scale = (batch.block_table, batch.sequence, batch.positions), shape[2] ** -0.5
    got = gqa_attention(q, k_cache, v_cache, *place, scale=scale, max_context=batch.max_context, prefill=prefill)
    assert got[0].dtype == dtype
    check(got, exact_attention(shape, batch, q, scale), batch)
    assert (got[0][-2:] == 0).all()
    assert (got[1][-2:] == -math.inf).all()


def test_gqa_attention_of_the_reference():
    batch, q, k_cache, v_cache = case(SMALL, [70, 9], [3, 9], torch.float32, "cpu", padding=1)
    place = (batch.block_table, batch.sequence, batch.positions)
    got = gqa_attention(q, k_cache, v_cache, *place, scale=0.25, max_context=70)
    check(got, exact_attention(SMALL, batch, q, 0.25), batch)


@pytest.mark.parametrize("most", [1, 2, 7, 128])
def test_gqa_decode_with_any_number_of_ranges(most, device, triton_backend):
    batch, q, k_cache, v_cache = case(SMALL, [513, 40], [1, 1], torch.float32, device)
    args = (q, k_cache, v_cache, batch.block_table, batch.sequence, batch.positions, 0.2, 513)
    got = _launch_gqa_decode(*args, plan=SplitPlan(64, most, min(most, 9)))
    check(got, exact_attention(SMALL, batch, q, 0.2), batch)


@pytest.mark.parametrize("tile", [GroupedTile(16, 64, 4, 1), GroupedTile(32, 16, 4, 1), GroupedTile(64, 32, 4, 2)])
def test_gqa_attention_with_any_tile(tile, device, triton_backend):
    shape = (20, 1, 16, 16)
    batch, q, k_cache, v_cache = case(shape, [100, 70], [7, 3], torch.float16, device, padding=3)
    args = (q, k_cache, v_cache, batch.block_table, batch.sequence, batch.positions, 0.2)
    exact = exact_attention(shape, batch, q, 0.2)
    check(_launch_gqa_decode(*args, 100, tile=tile), exact, batch)
    check(_launch_gqa_prefill(*args, tile=tile), exact, batch)


@pytest.mark.parametrize("prefill", [False, True])
def test_gqa_attention_of_mixed_dtypes(prefill, device, triton_backend):
    batch, _, k_cache, v_cache = case(SMALL, [100], [2], torch.float16, device)
    q = torch.randn(2, 6, 16, device=device)
    place = (batch.block_table, batch.sequence, batch.positions)
    got = gqa_attention(q, k_cache, v_cache, *place, scale=0.2, max_context=100, prefill=prefill)
    assert got[0].dtype == torch.float32
    check(got, exact_attention(SMALL, batch, q, 0.2), batch)


def test_gqa_decode_token_does_not_depend_on_the_others(device, triton_backend, monkeypatch):
    """Bit for bit: alone, in a batch, under a larger max_context, and with so little scratch that tokens go one by one."""
    batch, q, k_cache, v_cache = case(SMALL, [300, 900, 64], [2, 1, 1], torch.float16, device)

    def run(tokens, max_context):
        place = (batch.block_table, batch.sequence[tokens], batch.positions[tokens])
        return gqa_attention(q[tokens], k_cache, v_cache, *place, scale=0.3, max_context=max_context)

    together = run(slice(0, 4), 900)
    for t in range(4):
        alone = run(slice(t, t + 1), int(batch.positions[t]) + 1)
        assert torch.equal(together[0][t], alone[0][0])
        assert torch.equal(together[1][t], alone[1][0])
    assert torch.equal(together[0], run(slice(0, 4), 100_000)[0])
    monkeypatch.setattr(gqa, "SCRATCH_BYTES", 1)
    one_by_one = run(slice(0, 4), 900)
    assert torch.equal(together[0], one_by_one[0])
    assert torch.equal(together[1], one_by_one[1])


def test_gqa_prefill_row_does_not_depend_on_the_others(device, triton_backend, monkeypatch):
    """Bit for bit: one sequence alone, after another (its rows lie elsewhere in the tiles), its last token alone."""
    batch, q, k_cache, v_cache = case(SMALL, [37, 150], [37, 100], torch.float16, device)

    def run(tokens, max_context):
        place = (batch.block_table, batch.sequence[tokens], batch.positions[tokens])
        return gqa_attention(q[tokens], k_cache, v_cache, *place, scale=0.25, max_context=max_context, prefill=True)

    together = run(slice(0, 137), 200)
    for part, context in ((slice(37, 137), 150), (slice(136, 137), 150), (slice(0, 5), 37)):
        alone = run(part, context)
        assert torch.equal(together[0][part], alone[0])
        assert torch.equal(together[1][part], alone[1])
    monkeypatch.setattr(gqa, "_MAX_GRID", 1)
    assert torch.equal(together[0], run(slice(0, 137), 200)[0])


@pytest.mark.parametrize("tokens", [1, 65])
def test_gqa_drift_between_prefill_and_decoding(tokens, device, triton_backend):
    """Only the order of fp32 additions differs."""
    batch, q, k_cache, v_cache = case((2, 1, 16, 16), [140], [tokens], torch.float32, device)
    args = (q, k_cache, v_cache, batch.block_table, batch.sequence, batch.positions)
    decoded = gqa_attention(*args, scale=0.2, max_context=140)
    prefilled = gqa_attention(*args, scale=0.2, max_context=140, prefill=True)
    torch.testing.assert_close(decoded, prefilled, rtol=1e-5, atol=1e-5)


def test_gqa_of_no_tokens(device, triton_backend):
    batch, q, k_cache, v_cache = case(SMALL, [5], [0], torch.float16, device)
    place = (batch.block_table, batch.sequence, batch.positions)
    for prefill in (False, True):
        out, lse = gqa_attention(q, k_cache, v_cache, *place, scale=1.0, max_context=5, prefill=prefill)
        assert (out.shape, lse.shape) == ((0, 6, 16), (0, 6))
    before = k_cache.clone()
    gqa_kv_write(
        q[:, :2],
        q[:, :2],
        None,
        1e-5,
        batch.positions,
        batch.positions,
        make_table(4, 8, device),
        k_cache,
        v_cache,
        interleaved=False,
    )
    assert torch.equal(before.isnan(), k_cache.isnan())


def test_gqa_write_past_the_cache_is_skipped(device, triton_backend):
    storage = torch.randn(2, 4, 64, 2, 16, device=device)
    before = storage.clone()
    k, slots, positions = (
        torch.randn(2, 2, 16, device=device),
        torch.tensor([64, 65], device=device),
        torch.tensor([0, 1], device=device),
    )
    gqa_kv_write(
        k, k, None, 1e-5, positions, slots, make_table(4, 8, device), storage[0, :1], storage[1, :1], interleaved=False
    )
    assert torch.equal(storage, before)


def test_gqa_refuses_what_it_does_not_take():
    batch, q, k_cache, v_cache = case(SMALL, [5], [2], torch.float32, "cpu")
    place, limits = (batch.block_table, batch.sequence, batch.positions), {"scale": 1.0, "max_context": 5}
    with pytest.raises(ValueError, match=r"q \[2, 5, 16\].*H a multiple of KV"):
        gqa_attention(q[:, :5], k_cache, v_cache, *place, **limits)
    with pytest.raises(ValueError, match=r"v_cache is torch.float32 \[\d, 64, 1, 16\].*same first three sizes"):
        gqa_attention(q, k_cache, v_cache[:, :, :1].contiguous(), *place, **limits)
    with pytest.raises(ValueError, match="k_cache is .* required contiguous"):
        gqa_attention(q, k_cache.transpose(2, 3).contiguous().transpose(2, 3), v_cache, *place, **limits)
    with pytest.raises(ValueError, match="k_cache is torch.float32"):
        gqa_attention(q, k_cache.flatten(2), v_cache, *place, **limits)
    with pytest.raises(ValueError, match="v_cache is torch.float64"):
        gqa_attention(q, k_cache, v_cache.double(), *place, **limits)
    with pytest.raises(ValueError, match="positions is torch.int32"):
        gqa_attention(q, k_cache, v_cache, *place[:2], batch.positions.int(), **limits)
    with pytest.raises(ValueError, match="max_context=0"):
        gqa_attention(q, k_cache, v_cache, *place, scale=1.0, max_context=0)

    table = make_table(4, 8)

    def write(k=q[:, :2], v=q[:, :2], weight=None, table=table, caches=(k_cache, v_cache), slots=batch.positions):
        gqa_kv_write(k, v, weight, 1e-5, batch.positions, slots, table, *caches, interleaved=False)

    with pytest.raises(ValueError, match=r"required \[T, KV, D\], \[T, KV, V\]"):
        write(v=q[:, :1])
    with pytest.raises(ValueError, match=r"R <= D"):
        write(table=make_table(4, 32))
    with pytest.raises(ValueError, match=r"weight \[8\]: required \[16\]"):
        write(weight=torch.ones(8))
    with pytest.raises(ValueError, match="required heads of 16 and 16, as k and v"):
        write(caches=(k_cache, torch.zeros(*v_cache.shape[:3], 8)))
    with pytest.raises(ValueError, match=r"k_cache is .*key-value heads"):
        write(k=q[:, :3], v=q[:, :3])
    with pytest.raises(ValueError, match="slots is torch.int32"):
        write(slots=batch.positions.int())


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_gqa_ops_are_sound_custom_ops(backend, device):
    batch, q, k_cache, v_cache = case(SMALL, [70, 9], [1, 1], torch.float32, device)
    place = (batch.block_table, batch.sequence, batch.positions)
    slots, weight = torch.tensor([65, -1], device=device), torch.randn(16, device=device)
    kept = (make_table(100, 8, device), k_cache.nan_to_num(1.0), v_cache.nan_to_num(1.0))
    with override_backend(backend):
        for prefill in (False, True):
            torch.library.opcheck(_gqa_attention_op, (q, k_cache, v_cache, *place, 0.2, 70, prefill))
        for norm in (weight, None):
            torch.library.opcheck(_gqa_kv_write_op, (q[:, :2], q[:, 2:4], norm, 1e-6, batch.positions, slots, *kept, False))
