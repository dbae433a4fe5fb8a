"""Page-blocked fp8 caches: the indexer's keys, keys and values of GQA; and what `KVCache.allocate` makes of a format."""

import copy
import functools
import math
import struct
from pathlib import Path

import pytest
import torch
from paged import paged
from rounding import rounding
from test_gqa import exact_attention
from test_indexer import exact_scores
from test_kv_cache import POSITIONS, SLOTS
from test_kv_format import E4M3, nearest, single
from test_rope import make_table

import exl3_triton
from exl3_triton import reference
from exl3_triton.evaluate import compare, read_windows
from exl3_triton.kv_format import head_planes, pack_heads, unpack_heads
from exl3_triton.model.cache import Batch, KVCache
from exl3_triton.ops.gqa import gqa_attention, gqa_kv_write
from exl3_triton.ops.indexer import index_select
from exl3_triton.ops.kv_cache import index_k_write


def test_page_layout_against_an_independent_packer():
    """A page of index keys: 64 * 128 bytes of e4m3, then 64 fp32 scales."""
    rows = torch.randn(64, 128) * torch.exp(torch.randn(64, 1))
    rows[5] = 0
    scales = [max(single(max(map(abs, row)) / 448), 2.0**-126) for row in rows.tolist()]
    values = [nearest(single(x / scale), E4M3) for row, scale in zip(rows.tolist(), scales) for x in row]
    cache = torch.zeros(2, 64, 132, dtype=torch.uint8)
    for plane, packed in zip(head_planes(cache), pack_heads(rows)):
        plane[1] = packed
    assert bytes(cache[1].flatten().tolist()) == bytes(values) + struct.pack("64f", *scales)
    assert (cache[0] == 0).all()
    assert ((unpack_heads(cache)[1] - rows).abs() <= rows.abs().amax(1, keepdim=True) * 2.0**-4).all()


def packed_pages(cache):
    """Float pages [pages, 64, .., D] as an fp8 cache, and as what it stands for."""
    packed = torch.zeros(*cache.shape[:-1], cache.shape[-1] + 4, dtype=torch.uint8)
    unwritten = cache.isnan()
    for plane, values in zip(head_planes(packed), pack_heads(cache.nan_to_num(0.0)), strict=True):
        plane.copy_(values)
    head_planes(packed)[0][unwritten] = 255  # NaN
    return packed, unpack_heads(packed)


def near(got, want):
    """Equal but for values within a rounding of a tie between two codes."""
    assert want.abs().max() > 0.5
    assert ((got - want).abs() > 1e-5 * want.abs().max()).float().mean() < 0.005


def hadamard(dim):
    """float64 [dim, dim]: signs by bit counts, in blocks of the largest power of two that divides `dim`, at most 128."""
    size = math.gcd(dim, 128)
    signs = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return torch.block_diag(*[torch.tensor(signs, dtype=torch.float64) / size**0.5] * (dim // size))


@pytest.mark.parametrize("dim", [128, 256, 64, 40, 96, 36])
def test_index_keys_in_fp8_are_the_others_rotated(dim):
    """What is stored is the key that is stored in floats, times the Hadamard matrix, within the rounding of e4m3."""
    k, weight, bias = torch.randn(7, dim), torch.randn(dim), torch.randn(dim)
    k[:, 3] *= 50  # an outlier, which sets the scale of what is not rotated
    place = (torch.tensor(POSITIONS), torch.tensor(SLOTS), make_table(100, 8, "cpu"))
    floats, packed = torch.zeros(3, 64, dim), torch.zeros(3, 64, dim + 4, dtype=torch.uint8)
    for cache in (floats, packed):
        reference.index_k_write(k, weight, bias, 1e-6, *place, cache, False)
    want = floats.double() @ hadamard(dim)
    assert want.abs().max() > 0.5
    assert ((unpack_heads(packed) - want).abs() <= 2.0**-4 * want.abs() + 2.0**-10 / 448 * want.abs().max() + 1e-6).all()


@pytest.mark.parametrize(("dim", "width"), [(128, 64), (40, 40), (96, 12), (36, 8)])
@pytest.mark.parametrize("interleaved", [True, False])
def test_index_k_write_in_fp8(dim, width, interleaved, device, triton_backend):
    k, weight, bias = torch.randn(7, dim, device=device), torch.randn(dim, device=device), torch.randn(dim, device=device)
    positions, slots = torch.tensor(POSITIONS, device=device), torch.tensor(SLOTS, device=device)
    cache = torch.zeros(3, 64, dim + 4, dtype=torch.uint8, device=device)
    want = cache.clone()
    args = (k, weight, bias, 1e-6, positions, slots, make_table(100, width, device))
    index_k_write(*args, cache, interleaved=interleaved)
    reference.index_k_write(*args, want, interleaved)
    near(unpack_heads(cache).cpu(), unpack_heads(want).cpu())


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "width", "value", "turned"), [(2, 32, 32, 16), (8, 128, 128, 64), (3, 24, 40, 24)])
def test_gqa_kv_write_in_fp8(heads, width, value, turned, norm, device, triton_backend):
    k, v = torch.randn(7, heads, width, device=device), torch.randn(7, heads, value, device=device)
    weight = torch.randn(width, device=device) if norm else None
    positions, slots = torch.tensor(POSITIONS, device=device), torch.tensor(SLOTS, device=device)
    caches = [torch.zeros(3, 64, heads, each + 4, dtype=torch.uint8, device=device) for each in (width, value)]
    want = [cache.clone() for cache in caches]
    args = (k, v, weight, 1e-5, positions, slots, make_table(100, turned, device))
    gqa_kv_write(*args, *caches, interleaved=False)
    reference.gqa_kv_write(*args, *want, False)
    for got, expected in zip(caches, want):
        near(unpack_heads(got).cpu(), unpack_heads(expected).cpu())


@pytest.mark.parametrize("backend", ["kernels", "reference"])
@pytest.mark.parametrize(("heads", "dim"), [(16, 128), (16, 40), (5, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_index_select_from_fp8(dtype, heads, dim, backend, device, request):
    """Against the scores of queries and keys before they are rotated, which cancels. 16 bits: the rotated query is rounded."""
    if backend == "kernels":
        request.getfixturevalue("triton_backend")
    batch = paged([200, 90], [2, 1], dim, torch.float32, "cpu")
    packed, floats = packed_pages(batch.cache)
    floats = floats.double() @ hadamard(dim)
    place = (batch.block_table, batch.sequence, batch.positions)
    table = batch.block_table.long()
    contexts = [floats[table[b]].flatten(0, 1)[: len(each)].double() for b, each in enumerate(batch.contexts)]
    q, weights = torch.randn(3, heads, dim).to(dtype), torch.randn(3, heads)
    if dtype == torch.float16:
        q[0, 0] = 40000  # a rotated value is then larger than fp16 holds
    slack = 1e-5 if dtype == torch.float32 else 2 * rounding(dtype)
    out = index_select(
        q.to(device), weights.to(device), packed.to(device), *(x.to(device) for x in place), topk=20, max_context=200
    ).cpu()
    for t in range(3):
        scores = exact_scores(q, weights, batch._replace(contexts=contexts), t)
        left = torch.ones(len(scores), dtype=torch.bool)
        left[out[t].long()] = False
        assert out[t].diff().min() > 0
        assert scores[out[t].long()].min() >= scores[left].max() - slack * scores.abs().max()


@pytest.mark.parametrize("backend", ["kernels", "reference"])
@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gqa_attention_from_fp8(dtype, prefill, backend, device, request):
    if backend == "kernels":
        request.getfixturevalue("triton_backend")
    heads, kv_heads, width, value = shape = (6, 2, 16, 24)
    batch = paged([200, 40], [3, 40], kv_heads * (width + value), torch.float32, "cpu", padding=1)
    caches = batch.cache.split([kv_heads * width, kv_heads * value], dim=-1)
    (k_cache, keys), (v_cache, values) = (packed_pages(each.unflatten(-1, (kv_heads, -1)).contiguous()) for each in caches)
    floats, table = torch.cat([keys.flatten(2), values.flatten(2)], dim=-1), batch.block_table.long()
    contexts = [floats[table[b]].flatten(0, 1)[: len(each)].double() for b, each in enumerate(batch.contexts)]
    q = torch.randn(len(batch.positions), heads, width).to(dtype)
    place = (x.to(device) for x in (batch.block_table, batch.sequence, batch.positions))
    out, lse = gqa_attention(
        q.to(device), k_cache.to(device), v_cache.to(device), *place, scale=0.2, max_context=200, prefill=prefill
    )
    want, want_lse = exact_attention(shape, batch._replace(contexts=contexts), q, 0.2)
    slack = 1e-5 if dtype == torch.float32 else 3 * rounding(dtype)  # 16 bits: probabilities and the result
    assert (out.double().cpu() - want).abs().max() <= slack * max(each.abs().max() for each in contexts)
    torch.testing.assert_close(lse.double().cpu(), want_lse, rtol=1e-4, atol=1e-3)


@pytest.fixture(scope="module")
def demo():
    return exl3_triton.load(Path(exl3_triton.__file__).parent / "demo", device="cpu", progress=False)


def test_allocation_in_every_format(demo):
    """The demo: six layers of 128 + 32, two indexers of 64, fp32 where nothing is packed."""
    c = demo.config
    owners = sum(c.owns_indexer(layer) for layer in range(c.num_layers))
    widths = {"bf16": 4 * 160, "fp8": 196, "nvfp4": 152, "nvfp4-fp8rope": 120}
    for kv, width in widths.items():
        index = 4 * c.index_head_dim if kv == "bf16" else c.index_head_dim + 4
        cache = demo.new_cache(3, kv=kv)
        assert cache.bytes_per_token == c.num_layers * width + owners * index
        assert cache.tokens_per_gib == (1 << 30) // cache.bytes_per_token
        assert all(tensor.shape[:2] == (3, 64) for tensor in cache.tensors)
    meta = KVCache.allocate(c, 2, dtype=torch.bfloat16, device=torch.device("meta"), kv="fp8", index_kv="bf16")
    assert meta.bytes_per_token == c.num_layers * 196 + owners * 2 * c.index_head_dim


def test_allocation_refuses_what_it_does_not_take(demo):
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    with pytest.raises(ValueError, match="kv='int8': required one of bf16, fp8, nvfp4, nvfp4-fp8rope"):
        KVCache.allocate(demo.config, 2, kv="int8", **options)
    with pytest.raises(ValueError, match="index_kv='nvfp4'"):
        KVCache.allocate(demo.config, 2, kv="fp8", index_kv="nvfp4", **options)
    with pytest.raises(ValueError, match=r"latent_scales: found 1 with kv='nvfp4', required one for each of \d+ layers"):
        KVCache.allocate(demo.config, 2, kv="nvfp4", latent_scales=[1.0], **options)
    with pytest.raises(ValueError, match="latent_scales: .* a NVFP4 format"):
        KVCache.allocate(demo.config, 2, kv="fp8", latent_scales=[1.0] * demo.config.num_layers, **options)


@pytest.mark.parametrize(("kv", "bound"), [("fp8", 0.003), ("nvfp4", 0.015), ("nvfp4-fp8rope", 0.02)])
def test_divergence_of_the_demo(kv, bound, demo, testdata):
    """KL(cache in floats || packed) in nats a token; more than none, or nothing was packed."""
    windows = read_windows(testdata / "demo" / "val_windows.safetensors")[:2]
    packed = copy.copy(demo)
    packed.new_cache = functools.partial(demo.new_cache, kv=kv)
    found = compare(packed, demo, windows, progress=False)
    assert 1e-5 < found.mean_kl < bound
    assert found.top1_agreement > 0.9


def test_layers_keep_their_scales(demo):
    scales = [0.5 + layer for layer in range(demo.config.num_layers)]
    cache = KVCache.allocate(demo.config, 2, dtype=torch.float32, device=torch.device("cpu"), kv="nvfp4", latent_scales=scales)
    assert [layer.latent_scale for layer in cache.layers] == scales
    tokens = torch.arange(10, 30)
    batch = Batch.of_sequence(tokens, 0, [1])
    hidden = demo(batch, cache)
    assert hidden.isfinite().all()
    row = demo(batch, demo.new_cache(2, kv="nvfp4"))
    assert not torch.equal(hidden, row)
    torch.testing.assert_close(hidden, row, rtol=0, atol=0.5 * row.abs().max().item())
