"""Packed caches: byte layouts against an independent packer, kernels against the reference, attention against float64."""

import struct

import pytest
import torch
from paged import paged
from rounding import rounding
from test_attention import check_decode, check_prefill, decode_exact, prefill_exact
from test_kv_cache import POSITIONS, SLOTS
from test_rope import make_table

from exl3_triton import reference
from exl3_triton.kv_format import KV_FORMATS, latent_bytes, latent_format, pack_latents, unpack_latents
from exl3_triton.ops._dispatch import override_backend
from exl3_triton.ops.attention import DecodeTile, SplitPlan, _launch_mla_decode, _mla_decode_op, mla_decode
from exl3_triton.ops.kv_cache import _mla_kv_write_op, mla_kv_write
from exl3_triton.ops.prefill import mla_prefill

PACKED = KV_FORMATS[1:]
E4M3 = [(m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)) for e in range(16) for m in range(8)][:127]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest(x, values):
    """Code of the nearest of ascending `values`, the even one of two; the sign above them."""
    size = abs(x)
    code = min(range(len(values)), key=lambda i: (abs(values[i] - size), i % 2))
    return code + (128 if len(values) > 8 else 8) * (x < 0)


def single(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def pack_row(row, latent, kv, latent_scale=None):
    """One row by the book, value by value: bytes."""
    c, r = row[:latent], row[latent:]
    out = bytearray()
    if kv == "fp8":
        scales = [max(single(max(map(abs, c[i : i + 128])) / 448), 2.0**-126) for i in range(0, latent, 128)]
        out += bytes(nearest(single(x / scales[i // 128]), E4M3) for i, x in enumerate(c))
        out += struct.pack(f"{len(scales)}f", *scales)
    else:
        own = single(max(map(abs, c)) / (6 * 448)) if kv == "nvfp4-fp8rope" and latent_scale is None else 0.0
        whole = own or latent_scale or 1.0
        groups = [c[i : i + 16] for i in range(0, latent, 16)]
        codes = [nearest(min(single(single(max(map(abs, g)) / 6) / single(whole)), 448.0), E4M3) for g in groups]
        by = [single(E4M3[code] * single(whole)) for code in codes]
        fours = [nearest(single(x / by[i // 16]), E2M1) if by[i // 16] else 0 for i, x in enumerate(c)]
        out += bytes(low | high << 4 for low, high in zip(fours[::2], fours[1::2]))
        out += bytes(codes)
        turned = max(single(max(map(abs, r)) / 448), 2.0**-126) if kv == "nvfp4-fp8rope" else 0.0
        out += struct.pack("4f", turned, own, 0.0, 0.0)
        if kv == "nvfp4-fp8rope":
            return bytes(out) + bytes(nearest(single(x / turned), E4M3) for x in r)
    return bytes(out) + bytes(torch.tensor(r).bfloat16().view(torch.uint8).tolist())


def rows_of(count, latent, rope, spread=2.0):
    """Rows of very different sizes, some groups all zero."""
    rows = torch.randn(count, latent + rope) * torch.exp(spread * torch.randn(count, 1))
    rows[0, :16] = 0
    rows[1, :latent] = 0
    return rows


@pytest.mark.parametrize(("kv", "glm", "demo"), [("fp8", 656, 196), ("nvfp4", 432, 152), ("nvfp4-fp8rope", 368, 120)])
def test_bytes_of_a_row(kv, glm, demo):
    assert (latent_bytes(kv, 512, 64), latent_bytes(kv, 128, 32)) == (glm, demo)
    assert (latent_format(glm, 512, 64), latent_format(demo, 128, 32)) == (kv, kv)
    assert latent_format(1152, 512, 64) is None
    with pytest.raises(ValueError, match="latent 24, rope 8: required multiples"):
        latent_bytes(kv, 24, 8)


def test_formats_of_one_size_differ_in_their_bytes():
    for latent in range(64, 1025, 64):
        for rope in range(4, 257, 4):
            assert len({latent_bytes(kv, latent, rope) for kv in PACKED}) == 3


@pytest.mark.parametrize("kv", PACKED)
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (128, 32), (64, 8)])
@pytest.mark.parametrize("latent_scale", [None, 0.37])
def test_layout_against_an_independent_packer(latent, rope, kv, latent_scale):
    rows = rows_of(5, latent, rope)
    packed = pack_latents(rows, latent, kv, latent_scale)
    assert packed.shape == (5, latent_bytes(kv, latent, rope))
    for row, got in zip(rows.tolist(), packed):
        assert bytes(got.tolist()) == pack_row(row, latent, kv, latent_scale)


@pytest.mark.parametrize("kv", PACKED)
def test_what_is_unpacked_is_near(kv):
    """Half a step: e4m3 has three bits after the point, e2m1 one, of scales that are off by half an e4m3 step themselves."""
    rows = rows_of(200, 512, 64, spread=0.5)
    back = unpack_latents(pack_latents(rows, 512, kv), 512, 64)
    step = {"fp8": 2.0**-4, "nvfp4": 0.2, "nvfp4-fp8rope": 0.2}[kv]
    largest = rows[:, :512].unflatten(-1, (-1, 128 if kv == "fp8" else 16)).abs().amax(-1, keepdim=True)
    error = (back - rows)[:, :512].unflatten(-1, (-1, largest.shape[-2] and 512 // largest.shape[-2])).abs()
    assert (error <= step * largest).all()
    turned = (back - rows)[:, 512:].abs()
    assert (turned <= (2.0**-4 if kv == "nvfp4-fp8rope" else 2.0**-8) * rows[:, 512:].abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("latent_scale", [None, 0.37])
@pytest.mark.parametrize("kv", PACKED)
@pytest.mark.parametrize(("latent", "width"), [(128, 32), (512, 64), (64, 12)])
def test_packed_write(latent, width, kv, latent_scale, interleaved, device, triton_backend):
    """The kernel's bytes beside those of the reference: equal but for values within fp32's rounding of a tie."""
    x = torch.randn(7, latent + width + 5).to(device)[:, : latent + width] * 3
    x[2, :latent] = 0
    weight = torch.randn(latent).to(device)
    positions, slots = torch.tensor(POSITIONS, device=device), torch.tensor(SLOTS, device=device)
    size = latent_bytes(kv, latent, width)
    cache = torch.randint(0, 255, (3, 64, size), device=device).to(torch.uint8)
    want = cache.clone()
    place = (positions, slots, make_table(100, width, device))
    assert mla_kv_write(x, weight, 1e-6, *place, cache, interleaved=interleaved, latent_scale=latent_scale) is None
    reference.mla_kv_write(x, weight, 1e-6, *place, want, interleaved, latent_scale)
    live = [slot for slot in SLOTS if slot >= 0]
    untouched = torch.ones(192, dtype=torch.bool)
    untouched[live] = False
    assert torch.equal(cache.view(192, -1)[untouched], want.view(192, -1)[untouched])
    got, want = (unpack_latents(each.view(192, -1)[live].cpu(), latent, width, latent_scale) for each in (cache, want))
    assert want.abs().max() > 1
    if kv != "nvfp4-fp8rope":  # the interpreter cuts bf16 off
        error = (got - want)[:, latent:].abs()
        assert (error <= 2 * rounding(torch.bfloat16) * want[:, latent:].abs()).all()
        got, want = got[:, :latent], want[:, :latent]
    assert ((got - want).abs() > 1e-5 * want.abs().max()).float().mean() < 0.005
    assert ((cache.view(192, -1)[live].cpu() != 0).any(1)).all()


def packed_batch(lengths, queries, latent, rope, kv, device, padding=0):
    """`paged`, packed: contexts are what the bytes stand for; rows that nothing wrote are NaN to every reader."""
    batch = paged(lengths, queries, latent + rope, torch.float32, device, padding=padding)
    cache = pack_latents(batch.cache.cpu().nan_to_num(0.0), latent, kv)
    cache[batch.cache.cpu().isnan().any(-1)] = 255
    contexts = [unpack_latents(pack_latents(context.float(), latent, kv), latent, rope).double() for context in batch.contexts]
    return batch._replace(cache=cache.to(device), contexts=contexts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kv", PACKED)
@pytest.mark.parametrize(("latent", "rope"), [(128, 32), (64, 8), pytest.param(512, 64, marks=pytest.mark.gpu)])
def test_decode_from_packed_rows(latent, rope, kv, dtype, device, triton_backend):
    batch = packed_batch([150, 40], [1, 2], latent, rope, kv, device, padding=1)
    q_latent, q_rope = (torch.randn(4, 5, width, device=device).to(dtype) for width in (latent, rope))
    selected = torch.tensor([[0, 3, 149], [1, -1, -1], [-1, -1, -1], [5, 6, 7]], dtype=torch.int32, device=device)
    place = (batch.cache, batch.block_table, batch.sequence, batch.positions)
    for chosen in (None, selected):
        got = mla_decode(q_latent, q_rope, *place, chosen, scale=0.1, max_context=150)
        # 16 bits: one rounding more, of the values that the bytes stand for
        exact = decode_exact(q_latent, q_rope, batch, chosen, 0.1)
        if dtype == torch.float32:
            check_decode(got, exact, batch, 0.1)
        else:
            size = max(context.abs().max() for context in batch.contexts)
            assert (got[0].double().cpu() - exact[0]).abs().max() <= 6 * rounding(dtype) * size
            torch.testing.assert_close(got[1].double().cpu(), exact[1], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("most", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("latent", "rope"), [(128, 32), (192, 8), (64, 8), pytest.param(512, 64, marks=pytest.mark.gpu)])
def test_decode_from_fp8_rows_as_words(latent, rope, dtype, most, device, triton_backend):
    """The form that reads four latents at a time, in one range and in several."""
    batch = packed_batch([150, 40], [1, 2], latent, rope, "fp8", device, padding=1)
    q_latent, q_rope = (torch.randn(4, 5, width, device=device).to(dtype) for width in (latent, rope))
    selected = torch.tensor([[0, 3, 149], [1, -1, -1], [-1, -1, -1], [5, 6, 7]], dtype=torch.int32, device=device)
    place = (batch.cache, batch.block_table, batch.sequence, batch.positions)
    options = {"tile": DecodeTile(16, 16, 4, 2, words=True), "plan": SplitPlan(32, most, min(5, most))}
    for chosen in (None, selected):
        got = _launch_mla_decode(q_latent, q_rope, *place, chosen, 0.1, 150, **options)
        exact = decode_exact(q_latent, q_rope, batch, chosen, 0.1)
        if dtype == torch.float32:
            check_decode(got, exact, batch, 0.1)
        else:  # as above
            size = max(context.abs().max() for context in batch.contexts)
            assert (got[0].double().cpu() - exact[0]).abs().max() <= 6 * rounding(dtype) * size
            torch.testing.assert_close(got[1].double().cpu(), exact[1], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("kv", PACKED)
def test_prefill_from_packed_rows(kv, device, triton_backend):
    batch = packed_batch([90, 20], [30, 20], 128, 32, kv, device)
    q = torch.randn(50, 4, 96, device=device)
    w_uk, w_uv = torch.randn(4, 64, 128, device=device) * 128**-0.5, torch.randn(4, 48, 128, device=device) * 128**-0.5
    out = mla_prefill(
        q, batch.cache, w_uk, w_uv, batch.block_table, batch.sequence, batch.positions, scale=0.1, max_context=90
    )
    check_prefill(out, prefill_exact(q, w_uk, w_uv, batch, 0.1))


@pytest.mark.parametrize("kv", PACKED)
def test_reference_reads_packed_rows(kv):
    batch = packed_batch([150, 40], [1, 2], 128, 32, kv, "cpu")
    q_latent, q_rope = torch.randn(3, 5, 128), torch.randn(3, 5, 32)
    place = (batch.cache, batch.block_table, batch.sequence, batch.positions)
    check_decode(
        mla_decode(q_latent, q_rope, *place, scale=0.1, max_context=150),
        decode_exact(q_latent, q_rope, batch, None, 0.1),
        batch,
        0.1,
    )
    w = torch.randn(5, 48, 128) * 128**-0.5
    q = torch.randn(3, 5, 80)
    check_prefill(
        mla_prefill(q, batch.cache, w, w, *place[1:], scale=0.1, max_context=150), prefill_exact(q, w, w, batch, 0.1)
    )


def test_packed_rows_refuse_what_they_do_not_take():
    batch = packed_batch([9], [2], 128, 32, "fp8", "cpu")
    q = torch.randn(2, 4, 160)
    place = (batch.block_table, batch.sequence, batch.positions)
    with pytest.raises(ValueError, match=r"cache is torch.uint8 \[\d, 64, 195\].*packed format of 128 \+ 32"):
        mla_decode(q[..., :128], q[..., 128:], batch.cache[..., :-1].contiguous(), *place, scale=1.0, max_context=9)
    slots, table = batch.positions, make_table(9, 32)
    with pytest.raises(ValueError, match="latent_scale=0: required > 0"):
        mla_kv_write(q[:, 0], torch.ones(128), 1e-6, slots, slots, table, batch.cache, interleaved=True, latent_scale=0)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_packed_ops_are_sound_custom_ops(backend, device):
    batch = packed_batch([70, 9], [1, 1], 64, 8, "nvfp4-fp8rope", device)
    q, weight, slots = (
        torch.randn(2, 4, 72, device=device),
        torch.ones(64, device=device),
        torch.tensor([65, -1], device=device),
    )
    place = (batch.block_table, batch.sequence, batch.positions)
    with override_backend(backend):
        torch.library.opcheck(_mla_decode_op, (q[..., :64], q[..., 64:], batch.cache, *place, None, 0.2, 70, None))
        args = (weight, 1e-6, batch.positions, slots, make_table(100, 8, device), batch.cache, True, 0.5)
        torch.library.opcheck(_mla_kv_write_op, (q[:, 0].contiguous(), *args))
