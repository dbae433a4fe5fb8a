import pytest
import torch
from rounding import EPS, rounding
from test_rope import expected as roped
from test_rope import make_table

from exl3_triton.ops._dispatch import override_backend
from exl3_triton.ops.kv_cache import _index_k_write_op, _mla_kv_write_op, index_k_write, mla_kv_write

SLOTS = [70, -1, 64, 191, 3, -1, 128]
POSITIONS = [5, 0, 99, 42, 1, -1, 7]


def check_rows(cache, before, exact):
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            before.view(-1, before.shape[-1])[slot] = float("nan")
            row, want = cache.view(-1, cache.shape[-1])[slot].double().cpu(), exact[token]
            # one rounding to the cache's dtype after a few in fp32, at values of a row's size
            assert ((row - want).abs() <= rounding(cache.dtype) * want.abs() + 2**-20 * want.abs().max()).all()
    untouched = ~before.isnan()
    assert untouched.any()
    assert torch.equal(cache[untouched], before[untouched])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("dtype", "cache_dtype"), [(d, d) for d in EPS] + [(torch.bfloat16, torch.float16)])
@pytest.mark.parametrize(("latent", "width"), [(32, 8), (128, 32), (512, 64), (24, 12)])
def test_mla_kv_write(latent, width, dtype, cache_dtype, interleaved, device, triton_backend):
    kv = torch.randn(7, latent + width + 5).to(dtype).to(device)[:, : latent + width]
    weight = torch.randn(latent).to(device)
    positions, slots = torch.tensor(POSITIONS, device=device), torch.tensor(SLOTS, device=device)
    cache = torch.randn(3, 64, latent + width).to(cache_dtype).to(device)
    before = cache.clone()
    assert (
        mla_kv_write(kv, weight, 1e-6, positions, slots, make_table(100, width, device), cache, interleaved=interleaved)
        is None
    )
    x = kv.double().cpu()
    exact = x[:, :latent] / (x[:, :latent].square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double().cpu()
    key = roped(kv[:, None, latent:], positions, width, interleaved, 0)[:, 0]
    check_rows(cache, before, torch.cat([exact, key], dim=-1))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", list(EPS))
@pytest.mark.parametrize(("dim", "width"), [(16, 8), (128, 64), (40, 40), (96, 12)])
def test_index_k_write(dim, width, dtype, interleaved, device, triton_backend):
    k = (torch.randn(7, dim) * 2 + 1).to(dtype).to(device)
    weight, bias = torch.randn(dim).to(device), torch.randn(dim).to(dtype).to(device)
    positions, slots = torch.tensor(POSITIONS, device=device), torch.tensor(SLOTS, device=device)
    cache = torch.randn(3, 64, dim).to(dtype).to(device)
    before = cache.clone()
    assert (
        index_k_write(k, weight, bias, 1e-6, positions, slots, make_table(100, width, device), cache, interleaved=interleaved)
        is None
    )
    x = k.double().cpu()
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double().cpu() + bias.double().cpu()
    check_rows(cache, before, roped(x[:, None], positions, width, interleaved, 0)[:, 0])


def test_writes_past_the_cache_are_skipped(device, triton_backend):
    storage = torch.randn(4, 64, 24, device=device)
    before = storage.clone()
    slots, positions = torch.tensor([64, 65], device=device), torch.tensor([0, 1], device=device)
    table = make_table(4, 8, device)
    mla_kv_write(
        torch.randn(2, 24, device=device),
        torch.ones(16, device=device),
        1e-6,
        positions,
        slots,
        table,
        storage[:1],
        interleaved=True,
    )
    ones = torch.ones(24, device=device)
    index_k_write(torch.randn(2, 24, device=device), ones, ones, 1e-6, positions, slots, table, storage[:1], interleaved=True)
    assert torch.equal(storage, before)


def test_writes_refuse_what_they_do_not_take():
    kv, weight, positions, table = torch.randn(2, 24), torch.ones(16), torch.arange(2), make_table(4, 8)
    cache = torch.zeros(2, 64, 24)
    with pytest.raises(ValueError, match=r"cache is torch.float32 \[2, 64, 20\]: required floats \[pages, 64, 24\]"):
        mla_kv_write(kv, weight, 1e-6, positions, positions, table, torch.zeros(2, 64, 20), interleaved=True)
    with pytest.raises(ValueError, match="written in place"):
        mla_kv_write(kv, weight, 1e-6, positions, positions, table, torch.zeros(24, 64, 2).permute(2, 1, 0), interleaved=True)
    with pytest.raises(ValueError, match="slots is torch.int32"):
        mla_kv_write(kv, weight, 1e-6, positions, positions.int(), table, cache, interleaved=True)
    with pytest.raises(ValueError, match=r"required \[T, C \+ R\]"):
        mla_kv_write(kv, weight[:8], 1e-6, positions, positions, table, cache, interleaved=True)
    with pytest.raises(ValueError, match=r"required \[T, D\]"):
        index_k_write(kv, weight, weight, 1e-6, positions, positions, table, cache, interleaved=True)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_writes_are_sound_custom_ops(backend, device):
    positions = torch.tensor([3, 0], device=device)
    slots, table, cache = (
        torch.tensor([65, -1], device=device),
        make_table(4, 8, device),
        torch.randn(2, 64, 24, device=device),
    )
    kv, weight = torch.randn(2, 24, device=device), torch.randn(24, device=device)
    with override_backend(backend):
        torch.library.opcheck(_mla_kv_write_op, (kv, weight[:16], 1e-6, positions, slots, table, cache, True, None))
        torch.library.opcheck(_index_k_write_op, (kv, weight, weight, 1e-6, positions, slots, table, cache, False))
