"""Packed cache rows on the device: e4m3 and e2m1 by integer arithmetic, the same bits on every GPU, and tiles of latents.

The layouts are those of `exl3_triton.kv_format`. Decoding goes through fp16: shifted into place the bits of an e4m3 or e2m1
value are a fp16 number, subnormal ones included, off by a power of two only. Hopper converts e4m3 by an instruction.
"""

from ._triton import tl, triton

E4M3_MAX = tl.constexpr(448.0)
TINY = tl.constexpr(2.0**-126)


@triton.jit
def e4m3_encode(x):
    """fp32 -> e4m3 as int32 0..255: to nearest, ties to even, saturating."""
    size = tl.minimum(tl.abs(x), E4M3_MAX)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # (127 - 7) << 3
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # units of 2^-9: the last place at 2^14
    code = tl.where(size < 0.015625, subnormal, normal)
    return code | tl.where(x < 0.0, 128, 0)


@triton.jit
def e4m3_decode(code, NATIVE: tl.constexpr):
    """e4m3 as uint8 -> fp32, exact."""
    if NATIVE:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = code.to(tl.int16)
        value = (((wide & 127) << 7) | ((wide & 128) << 8)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return value


@triton.jit
def e2m1_encode(x):
    """fp32 -> e2m1 as int32 0..15: to nearest, ties to even, saturating."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    return code | tl.where(x < 0.0, 8, 0)


@triton.jit
def e2m1_decode(code):
    """e2m1 in the low four bits of an int16 -> fp32, exact."""
    return (((code & 7) << 9) | ((code & 8) << 12)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def head_plane(cache, slot, HEADS: tl.constexpr, D: tl.constexpr):
    """(values, fp32 scales) of a page-blocked cache: pointers to head 0 of rows `slot`, [pages, 64, HEADS, D + 4] bytes."""
    page = cache + slot // 64 * (64 * HEADS * (D + 4))
    row = slot % 64 * HEADS
    return page + row * D, (page + 64 * HEADS * D).to(tl.pointer_type(tl.float32), bitcast=True) + row


@triton.jit
def latent_columns(
    cache, slot, valid, first, latent_scale, like,
    C: tl.constexpr, R: tl.constexpr, KV: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Columns first .. first + BLOCK_C - 1 of the latents in rows `slot` [BLOCK_N] of WIDTH bytes, in the dtype of `like`."""
    row = cache + slot * WIDTH
    if KV == "fp8":
        GROUP: tl.constexpr = 128 if BLOCK_C > 128 else BLOCK_C
        GROUPS: tl.constexpr = BLOCK_C // GROUP
        g = tl.arange(0, GROUPS)
        c = first + g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = valid[:, None, None] & (c < C)[None, :, :]
        codes = tl.load(row[:, None, None] + c[None, :, :], mask=inside, other=0)
        scales = (row + C).to(tl.pointer_type(tl.float32), bitcast=True)[:, None] + ((first + g * GROUP) // 128)[None, :]
        scale = tl.load(scales, mask=valid[:, None] & (first + g * GROUP < C)[None, :], other=0.0)
        values = (e4m3_decode(codes, NATIVE) * scale[:, :, None]).to(like.dtype)
    else:
        g = tl.arange(0, BLOCK_C // 16)
        c = first // 2 + g[:, None] * 8 + tl.arange(0, 8)[None, :]
        inside = valid[:, None, None] & (c < C // 2)[None, :, :]
        pairs = tl.load(row[:, None, None] + c[None, :, :], mask=inside, other=0).to(tl.int16)
        inside = valid[:, None] & (first // 16 + g < C // 16)[None, :]
        codes = tl.load(row[:, None] + (C // 2 + first // 16) + g[None, :], mask=inside, other=0)
        scale = e4m3_decode(codes, NATIVE)
        if KV == "nvfp4-fp8rope":
            own = tl.load((row + (C // 2 + C // 16 + 4)).to(tl.pointer_type(tl.float32), bitcast=True), mask=valid, other=0.0)
            scale *= tl.where(own > 0.0, own, latent_scale)[:, None]
        else:
            scale *= latent_scale
        low = e2m1_decode(pairs & 15) * scale[:, :, None]
        high = e2m1_decode(pairs >> 4) * scale[:, :, None]
        values = tl.join(low.to(like.dtype), high.to(like.dtype))
    return tl.reshape(values, (BLOCK_N, BLOCK_C))


@triton.jit
def rope_columns(
    cache, slot, valid, like, C: tl.constexpr, R: tl.constexpr, KV: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """The rope values [rows, BLOCK_R] of rows `slot`, in the dtype of `like`."""
    row = cache + slot * WIDTH
    r = tl.arange(0, BLOCK_R)
    inside = valid[:, None] & (r < R)[None, :]
    if KV == "nvfp4-fp8rope":
        codes = tl.load(row[:, None] + (WIDTH - R) + r[None, :], mask=inside, other=0)
        scale = tl.load((row + (C // 2 + C // 16)).to(tl.pointer_type(tl.float32), bitcast=True), mask=valid, other=0.0)
        values = e4m3_decode(codes, NATIVE) * scale[:, None]
    else:
        turned = (row + (WIDTH - 2 * R)).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        values = tl.load(turned[:, None] + r[None, :], mask=inside, other=0.0)
    return values.to(like.dtype)
