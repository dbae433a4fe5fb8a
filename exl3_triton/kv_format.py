"""How a cache row of MLA, an indexer's key and the heads of GQA are stored: in the model's dtype, or packed in bytes.

MLA, a row of C latents and R rope values, per token and layer (sources: the layouts of FlashMLA and vLLM, `fp8_ds_mla` and
`nvfp4_ds_mla`; C = 512, R = 64 give 656, 432 and 368 bytes):

    fp8             C e4m3; a fp32 scale for each 128 of them (amax / 448); R bf16
    nvfp4           C / 2 bytes of two e2m1, the even one low; an e4m3 scale for each 16 (amax / 6); 16 bytes of zeros; R bf16
    nvfp4-fp8rope   the same, but the 16 bytes begin with a fp32 scale of the rope values (amax / 448) and a fp32 scale s of
                    the token's latents (amax / (6 * 448)), 0 where the layer has a scale of its own; R e4m3

A latent is e2m1 * e4m3 scale * (s, or the layer's scale where s is 0). Index keys (D e4m3, one fp32 scale: D + 4 bytes a
token) and the heads of GQA (the same for each head) lie page-blocked: the 64 rows' values first, then their scales. An index
key is stored multiplied by the Hadamard matrix (128 x 128 over sqrt(128), as in DeepSeek's own fp8 path and in SGLang; other
D: in blocks of the largest power of two that divides D), which spreads its outliers; the queries are, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

KV_FORMATS = ("bf16", "fp8", "nvfp4", "nvfp4-fp8rope")
PAGE = 64
E4M3_MAX, E2M1_MAX = 448.0, 6.0
GROUP_FP8, GROUP_NVFP4, EXTRA_NVFP4 = 128, 16, 16  # values a scale, bytes of the header
TINY = 2.0**-126  # the least scale: the smallest normal fp32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def latent_bytes(kv: str, latent: int, rope: int) -> int:
    """Bytes of a packed row. Raises ValueError for "bf16", for other names, and for sizes that do not align."""
    if kv not in KV_FORMATS[1:]:
        raise ValueError(f"kv={kv!r}: required one of {', '.join(KV_FORMATS[1:])}")
    if latent % 64 or rope % 4:
        raise ValueError(f"kv={kv!r}: latent {latent}, rope {rope}: required multiples of 64 and of 4, so that scales align")
    if kv == "fp8":
        return latent + 4 * -(-latent // GROUP_FP8) + 2 * rope
    return latent // 2 + latent // GROUP_NVFP4 + EXTRA_NVFP4 + rope * (2 if kv == "nvfp4" else 1)


def latent_format(width: int, latent: int, rope: int) -> str | None:
    """The format whose rows have `width` bytes, None where none has. No two formats of one size have the same width."""
    if latent % 64 or rope % 4:
        return None
    return next((kv for kv in KV_FORMATS[1:] if latent_bytes(kv, latent, rope) == width), None)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _scaled_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., n] -> (e4m3 [..., n], fp32 scale [..., 1])."""
    scale = (x.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp(min=TINY)
    return _e4m3(x / scale), scale


def pack_latents(rows: Tensor, latent: int, kv: str, latent_scale: float | None = None) -> Tensor:
    """rows fp32 [..., C + R] -> uint8 [..., bytes]. latent_scale: of the layer (NVFP4 only); None: 1, or the token's own."""
    rows = rows.float()
    c, r = rows.split([latent, rows.shape[-1] - latent], dim=-1)
    if kv == "fp8":
        packed = [_scaled_e4m3(group) for group in c.split(GROUP_FP8, dim=-1)]
        values, scales = (torch.cat(each, dim=-1) for each in zip(*packed, strict=True))
        return torch.cat([_bytes(values), _bytes(scales), _bytes(r.bfloat16())], dim=-1)
    own = c.abs().amax(-1, keepdim=True) / (E2M1_MAX * E4M3_MAX)
    if kv == "nvfp4" or latent_scale is not None:
        own = torch.zeros_like(own)
    whole = torch.where(own > 0, own, latent_scale or 1.0)
    groups = c.unflatten(-1, (-1, GROUP_NVFP4))
    scales = _e4m3(groups.abs().amax(-1) / E2M1_MAX / whole)
    divisor = (scales.float() * whole)[..., None]
    x = torch.where(divisor > 0, groups / divisor, 0.0).flatten(-2)
    size = x.abs()
    code = (size > 0.25).int() + (size >= 0.75) + (size > 1.25) + (size >= 1.75) + (size > 2.5) + (size >= 3.5) + (size > 5)
    code = (code + 8 * (x < 0)).to(torch.uint8)
    parts = [code[..., 0::2] | code[..., 1::2] << 4, _bytes(scales)]
    if kv == "nvfp4":
        parts += [torch.zeros_like(parts[0][..., :EXTRA_NVFP4]), _bytes(r.bfloat16())]
    else:
        turned, turned_scale = _scaled_e4m3(r)
        header = torch.cat([turned_scale, own, torch.zeros_like(own), torch.zeros_like(own)], dim=-1)
        parts += [_bytes(header), _bytes(turned)]
    return torch.cat(parts, dim=-1)


def unpack_latents(packed: Tensor, latent: int, rope: int, latent_scale: float | None = None) -> Tensor:
    """uint8 [..., bytes] -> fp32 [..., C + R], the inverse of `pack_latents`; the format is known by its width."""
    kv = latent_format(packed.shape[-1], latent, rope)
    if kv == "fp8":
        groups = -(-latent // GROUP_FP8)
        values, scales, r = packed.split([latent, 4 * groups, 2 * rope], dim=-1)
        scales = scales.contiguous().view(torch.float32).repeat_interleave(GROUP_FP8, dim=-1)[..., :latent]
        c = values.contiguous().view(torch.float8_e4m3fn).float() * scales
    else:
        r_bytes = packed.shape[-1] - latent // 2 - latent // GROUP_NVFP4 - EXTRA_NVFP4
        codes, scales, header, r = packed.split([latent // 2, latent // GROUP_NVFP4, EXTRA_NVFP4, r_bytes], dim=-1)
        code = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).long()
        table = torch.tensor(_E2M1, device=packed.device)
        own = header.contiguous().view(torch.float32)
        whole = torch.where(own[..., 1:2] > 0, own[..., 1:2], latent_scale or 1.0)
        scales = scales.contiguous().view(torch.float8_e4m3fn).float().repeat_interleave(GROUP_NVFP4, dim=-1)
        c = table[code & 7] * torch.where(code > 7, -1.0, 1.0) * (scales * whole)
        if kv == "nvfp4-fp8rope":
            return torch.cat([c, r.contiguous().view(torch.float8_e4m3fn).float() * own[..., :1]], dim=-1)
    return torch.cat([c, r.contiguous().view(torch.bfloat16).float()], dim=-1)


def pack_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """x fp32 [..., D] -> (e4m3 as uint8 [..., D], fp32 scale [...]): index keys, and keys and values of GQA."""
    values, scale = _scaled_e4m3(x.float())
    return _bytes(values), scale[..., 0]


def head_planes(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a page-blocked cache uint8 [pages, 64, .., D + 4]: values [pages, 64, .., D], fp32 scales [pages, 64, ..]."""
    pages, width = cache.shape[0], cache.shape[-1] - 4
    flat = cache.view(pages, -1)
    count = flat.shape[1] // (width + 4)
    values = flat[:, : count * width].unflatten(1, (*cache.shape[1:-1], width))
    return values, flat[:, count * width :].view(torch.float32).unflatten(1, cache.shape[1:-1])


def unpack_heads(cache: Tensor) -> Tensor:
    """uint8 [pages, 64, ..., D + 4] -> fp32 [pages, 64, ..., D]."""
    values, scales = head_planes(cache)
    return values.contiguous().view(torch.float8_e4m3fn).float() * scales[..., None]
