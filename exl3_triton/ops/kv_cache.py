"""Writes into the paged caches: MLA's latent and rope key, and the indexer's key. Normalise, rotate, store, in one launch
each.
"""

import torch
from torch import Tensor

from .. import reference
from ..kv_format import GROUP_FP8, GROUP_NVFP4, PAGE
from ._args import as_rows, block, check_float, check_index, check_index_keys, check_latents, check_table, stored_format
from ._dispatch import call, device_guard, launchable, overlap, use_triton
from ._triton import start_next, tl, triton, wait_previous
from .hadamard import rotate_rows, rotation_bits
from .packed import E4M3_MAX, TINY, e2m1_encode, e4m3_decode, e4m3_encode, head_plane
from .rope import rope_factors, rope_pair


@triton.jit(do_not_specialize=["length", "slots_end"], do_not_specialize_on_alignment=["positions", "slots"])
def _mla_kv_write_kernel(
    kv, weight, positions, slots, table, cache, length, slots_end, kv_stride, eps,
    C: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_previous(OVERLAP)
    start_next(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < slots_end):
        source = kv + token * kv_stride
        target = cache + slot * (C + 2 * HALF)
        c = tl.arange(0, BLOCK_C)
        latent = tl.load(source + c, mask=c < C, other=0.0).to(tl.float32)
        inverse = 1.0 / tl.sqrt(tl.sum(latent * latent, axis=0) / C + eps)
        latent = latent * inverse * tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
        tl.store(target + c, latent.to(cache.dtype.element_ty), mask=c < C)
        pair = tl.arange(0, BLOCK_PAIRS)
        cos, sin = rope_factors(table, tl.load(positions + token), length, pair, HALF)
        first, second = rope_pair(pair, HALF, INTERLEAVED)
        a = tl.load(source + C + first, mask=pair < HALF, other=0.0).to(tl.float32)
        b = tl.load(source + C + second, mask=pair < HALF, other=0.0).to(tl.float32)
        tl.store(target + C + first, (a * cos - b * sin).to(cache.dtype.element_ty), mask=pair < HALF)
        tl.store(target + C + second, (b * cos + a * sin).to(cache.dtype.element_ty), mask=pair < HALF)


@triton.jit(do_not_specialize=["length", "slots_end"], do_not_specialize_on_alignment=["positions", "slots"])
def _mla_packed_write_kernel(
    kv, weight, positions, slots, table, cache, length, slots_end, kv_stride, eps, latent_scale,
    C: tl.constexpr, HALF: tl.constexpr, KV: tl.constexpr, WIDTH: tl.constexpr, OWN: tl.constexpr, INTERLEAVED: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A token's row in a packed format, layouts as in `kv_format`. GROUP: values that share a scale; OWN: no layer's scale."""
    wait_previous(OVERLAP)
    start_next(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < slots_end):
        source = kv + token * kv_stride
        target = cache + slot * WIDTH
        g = tl.arange(0, GROUPS)
        i = g[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]  # pairs of neighbours: the halves of a NVFP4 byte
        inside = i < C // 2
        even = tl.load(source + 2 * i, mask=inside, other=0.0).to(tl.float32)
        odd = tl.load(source + 2 * i + 1, mask=inside, other=0.0).to(tl.float32)
        squares = tl.sum(tl.sum(even * even + odd * odd, axis=1), axis=0)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(squares / C + eps))
        even = even * inverse * tl.load(weight + 2 * i, mask=inside, other=0.0).to(tl.float32)
        odd = odd * inverse * tl.load(weight + 2 * i + 1, mask=inside, other=0.0).to(tl.float32)
        largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1)
        if KV == "fp8":
            scale = tl.maximum(tl.div_rn(largest, E4M3_MAX), TINY)
            scales = (target + C).to(tl.pointer_type(tl.float32), bitcast=True)
            tl.store(scales + g, scale, mask=g < (C + GROUP - 1) // GROUP)
            by = tl.broadcast_to(scale[:, None], even.shape)
            tl.store(target + 2 * i, e4m3_encode(tl.div_rn(even, by)).to(tl.uint8), mask=inside)
            tl.store(target + 2 * i + 1, e4m3_encode(tl.div_rn(odd, by)).to(tl.uint8), mask=inside)
        else:
            header = (target + (C // 2 + C // 16)).to(tl.pointer_type(tl.float32), bitcast=True)
            words = tl.arange(0, 4)
            own = tl.div_rn(tl.max(largest, axis=0), 6.0 * E4M3_MAX)
            if OWN:
                whole = tl.where(own > 0.0, own, 1.0)
            else:
                whole = latent_scale
                own = own * 0.0
            tl.store(header + words, tl.where(words == 1, own, 0.0), mask=(words > 0) | (KV == "nvfp4"))
            sixth = tl.div_rn(largest, tl.full(largest.shape, 6.0, tl.float32))
            codes = e4m3_encode(tl.div_rn(sixth, tl.full(largest.shape, 1.0, tl.float32) * whole))
            tl.store(target + C // 2 + g, codes.to(tl.uint8), mask=g < C // GROUP)
            by = e4m3_decode(codes.to(tl.uint8), False) * whole
            by = tl.broadcast_to(by[:, None], even.shape)
            some = by > 0.0
            by = tl.where(some, by, 1.0)
            low = e2m1_encode(tl.where(some, tl.div_rn(even, by), 0.0))
            high = e2m1_encode(tl.where(some, tl.div_rn(odd, by), 0.0))
            tl.store(target + i, (low | high << 4).to(tl.uint8), mask=inside)
        pair = tl.arange(0, BLOCK_PAIRS)
        cos, sin = rope_factors(table, tl.load(positions + token), length, pair, HALF)
        first, second = rope_pair(pair, HALF, INTERLEAVED)
        a = tl.load(source + C + first, mask=pair < HALF, other=0.0).to(tl.float32)
        b = tl.load(source + C + second, mask=pair < HALF, other=0.0).to(tl.float32)
        x = tl.where(pair < HALF, a * cos - b * sin, 0.0)
        y = tl.where(pair < HALF, b * cos + a * sin, 0.0)
        if KV == "nvfp4-fp8rope":
            scale = tl.maximum(tl.div_rn(tl.max(tl.maximum(tl.abs(x), tl.abs(y)), axis=0), E4M3_MAX), TINY)
            tl.store((target + (C // 2 + C // 16)).to(tl.pointer_type(tl.float32), bitcast=True), scale)
            by = tl.full(x.shape, 1.0, tl.float32) * scale
            tl.store(target + (WIDTH - 2 * HALF) + first, e4m3_encode(tl.div_rn(x, by)).to(tl.uint8), mask=pair < HALF)
            tl.store(target + (WIDTH - 2 * HALF) + second, e4m3_encode(tl.div_rn(y, by)).to(tl.uint8), mask=pair < HALF)
        else:
            turned = (target + (WIDTH - 4 * HALF)).to(tl.pointer_type(tl.bfloat16), bitcast=True)
            tl.store(turned + first, x.to(tl.bfloat16), mask=pair < HALF)
            tl.store(turned + second, y.to(tl.bfloat16), mask=pair < HALF)


def _launch_mla_kv_write(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    cache: Tensor,
    interleaved: bool,
    latent_scale: float | None = None,
) -> None:
    if kv.shape[0] == 0:
        return
    kv, weight = as_rows(kv), launchable(weight)
    latent, half = weight.shape[0], table.shape[1] // 2
    if cache.dtype == torch.uint8:
        packed = stored_format(cache, latent, 2 * half)
        group = GROUP_FP8 if packed == "fp8" else GROUP_NVFP4
        own = latent_scale is None and packed == "nvfp4-fp8rope"
        with device_guard(kv):
            _mla_packed_write_kernel[(kv.shape[0],)](
                kv, weight, positions.contiguous(), slots.contiguous(), launchable(table), cache,
                table.shape[0], cache.shape[0] * PAGE, kv.stride(0), eps, 1.0 if latent_scale is None else latent_scale,
                C=latent, HALF=half, KV=packed, WIDTH=cache.shape[2], OWN=own, INTERLEAVED=interleaved,
                GROUP=group, GROUPS=block(-(-latent // group), 1), BLOCK_PAIRS=block(half, 1), num_warps=4,
                **overlap(kv.device, kv.shape[0]),
            )  # fmt: skip
        return
    with device_guard(kv):
        _mla_kv_write_kernel[(kv.shape[0],)](
            kv, weight, positions.contiguous(), slots.contiguous(), launchable(table), cache,
            table.shape[0], cache.shape[0] * cache.shape[1], kv.stride(0), eps,
            C=latent, HALF=half, INTERLEAVED=interleaved, BLOCK_C=block(latent), BLOCK_PAIRS=block(half, 1), num_warps=4,
            **overlap(kv.device, kv.shape[0]),
        )  # fmt: skip


def _mla_kv_write_body(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    cache: Tensor,
    interleaved: bool,
    latent_scale: float | None,
) -> None:
    write = _launch_mla_kv_write if use_triton(kv) else reference.mla_kv_write
    write(kv, weight, eps, positions, slots, table, cache, interleaved, latent_scale)


_mla_kv_write_op = torch.library.custom_op("exl3_triton::mla_kv_write", _mla_kv_write_body, mutates_args=("cache",))


@_mla_kv_write_op.register_fake
def _(kv, weight, eps, positions, slots, table, cache, interleaved, latent_scale):
    return None


def mla_kv_write(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    cache: Tensor,
    *,
    interleaved: bool,
    latent_scale: float | None = None,
) -> None:
    """Stores each token's MLA cache row: the first C values RMS-normalised (fp32), the last R rotated by the token's position.

    kv: [T, C + R] fp16, bf16 or fp32; weight: [C]; positions, slots: int64 [T], slot = page * 64 + row in the page, negative:
    the token is skipped; table: fp32 [L, R] as in `rope`; cache: [pages, 64, C + R], contiguous, written (rounded once to its
    dtype), or uint8 [pages, 64, bytes] in a packed format of `kv_format`, which the bytes tell. latent_scale: NVFP4's, of the
    layer; None: 1, or where the format has one, the token's own. Two tokens of one call must not share a slot. On a GPU a slot
    past the cache is skipped too. Raises ValueError for other shapes, dtypes or devices.
    """
    op = "mla_kv_write"
    check_float(op, kv=kv, weight=weight)
    check_table(op, table, kv.device)
    if kv.dim() != 2 or weight.dim() != 1 or kv.shape[1] != weight.shape[0] + table.shape[1]:
        raise ValueError(
            f"{op}: kv {list(kv.shape)}, weight {list(weight.shape)}, table {list(table.shape)}: "
            "required [T, C + R], [C], [L, R]"
        )
    check_latents(op, cache, weight.shape[0], table.shape[1], kv.device, written=True)
    if latent_scale is not None and not latent_scale > 0:
        raise ValueError(f"{op}: latent_scale={latent_scale}: required > 0, or None")
    check_index(op, "positions", positions, torch.int64, (kv.shape[0],), kv.device)
    check_index(op, "slots", slots, torch.int64, (kv.shape[0],), kv.device)
    place = (positions, slots, table, cache)
    call(_mla_kv_write_op, _mla_kv_write_body, kv, weight, float(eps), *place, interleaved, latent_scale)


@triton.jit
def _layer_norm(source, weight, bias, d, mean, inverse, D: tl.constexpr):
    x = (tl.load(source + d, mask=d < D, other=0.0).to(tl.float32) - mean) * inverse
    x = x * tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    return x + tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["length", "slots_end"], do_not_specialize_on_alignment=["positions", "slots"])
def _index_k_write_kernel(
    k, weight, bias, positions, slots, table, cache, length, slots_end, k_stride, eps,
    D: tl.constexpr, HALF: tl.constexpr, FP8: tl.constexpr, BITS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A token's key; in fp8 in blocks of 2^BITS multiplied by the Hadamard matrix, after all else."""
    wait_previous(OVERLAP)
    start_next(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < slots_end):
        source = k + token * k_stride
        d = tl.arange(0, BLOCK_D)
        values = tl.load(source + d, mask=d < D, other=0.0).to(tl.float32)
        mean = tl.sum(values, axis=0) / D
        centred = tl.where(d < D, values - mean, 0.0)
        inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / D + eps)
        pair, other = d // 2, d ^ 1  # a dimension's pair and the other dimension of it
        if not INTERLEAVED:
            pair, other = tl.where(d < HALF, d, d - HALF), tl.where(d < HALF, d + HALF, d - HALF)
        x = _layer_norm(source, weight, bias, d, mean, inverse, D)
        y = _layer_norm(source, weight, bias, tl.where(d < 2 * HALF, other, d), mean, inverse, D)
        cos, sin = rope_factors(table, tl.load(positions + token), length, pair, HALF)
        x = tl.where(d < 2 * HALF, x * cos + tl.where(d < other, -y, y) * sin, x)
        if FP8:
            x = tl.reshape(rotate_rows(tl.reshape(x, (BLOCK_D >> BITS, 1 << BITS)), BLOCK_D >> BITS, BITS), (BLOCK_D,))
            target, scales = head_plane(cache, slot, 1, D)
            scale = tl.maximum(tl.max(tl.abs(x), axis=0) / E4M3_MAX, TINY)
            tl.store(scales, scale)
            x = e4m3_encode(x / scale)
        else:
            target = cache + slot * D
        tl.store(target + d, x.to(cache.dtype.element_ty), mask=d < D)


def _launch_index_k_write(
    k: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    cache: Tensor,
    interleaved: bool,
) -> None:
    if k.shape[0] == 0:
        return
    k, weight, bias = as_rows(k), launchable(weight), launchable(bias)
    width, half = k.shape[1], table.shape[1] // 2
    with device_guard(k):
        _index_k_write_kernel[(k.shape[0],)](
            k, weight, bias, positions.contiguous(), slots.contiguous(), launchable(table), cache,
            table.shape[0], cache.shape[0] * cache.shape[1], k.stride(0), eps,
            D=width, HALF=half, FP8=cache.dtype == torch.uint8, BITS=rotation_bits(width), INTERLEAVED=interleaved,
            BLOCK_D=block(width), num_warps=1, **overlap(k.device, k.shape[0]),
        )  # fmt: skip


def _index_k_write_body(
    k: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    cache: Tensor,
    interleaved: bool,
) -> None:
    if use_triton(k):
        _launch_index_k_write(k, weight, bias, eps, positions, slots, table, cache, interleaved)
    else:
        reference.index_k_write(k, weight, bias, eps, positions, slots, table, cache, interleaved)


_index_k_write_op = torch.library.custom_op("exl3_triton::index_k_write", _index_k_write_body, mutates_args=("cache",))


@_index_k_write_op.register_fake
def _(k, weight, bias, eps, positions, slots, table, cache, interleaved):
    return None


def index_k_write(
    k: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    cache: Tensor,
    *,
    interleaved: bool,
) -> None:
    """Stores each token's indexer key: LayerNorm with bias (fp32), then rope on the first R dimensions; in fp8 then rotated.

    k: [T, Di] fp16, bf16 or fp32; weight, bias: [Di]; positions, slots: int64 [T], negative slots are skipped; table: fp32 [L,
    R], R <= Di; cache: [pages, 64, Di], contiguous, written (rounded once to its dtype), or uint8 [pages, 64, Di + 4], fp8 as
    in `kv_format`, multiplied by a Hadamard matrix as there. interleaved as in `rope` (GLM: true, DeepSeek-V3.2: false). Two
    tokens of one call must not share a slot. On a GPU a slot past the cache is skipped too. Raises ValueError for other
    shapes, dtypes or devices.
    """
    op = "index_k_write"
    check_float(op, k=k, weight=weight, bias=bias)
    check_table(op, table, k.device)
    if k.dim() != 2 or not tuple(weight.shape) == tuple(bias.shape) == (k.shape[1],) or table.shape[1] > k.shape[1]:
        raise ValueError(
            f"{op}: k {list(k.shape)}, weight {list(weight.shape)}, bias {list(bias.shape)}, table {list(table.shape)}: "
            "required [T, D], [D], [D], [L, R <= D]"
        )
    check_index_keys(op, cache, k.shape[1], k.device, written=True)
    check_index(op, "positions", positions, torch.int64, (k.shape[0],), k.device)
    check_index(op, "slots", slots, torch.int64, (k.shape[0],), k.device)
    call(_index_k_write_op, _index_k_write_body, k, weight, bias, float(eps), positions, slots, table, cache, interleaved)
