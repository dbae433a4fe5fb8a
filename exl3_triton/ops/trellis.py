"""Trellis tiles decoded straight into the registers of a matrix instruction's first operand.

A tile is a ring of 128 * twice_bits bits in 4 * twice_bits words of 32 bits, most significant bit first; weight t of 256 is
a function of the 16 ring bits that end at bit S(t) = (t + 1) * twice_bits // 2 (which covers integer and half-integer rates
alike). Lane l of 32 owns the weights t = 8l .. 8l + 7, which lie at k = 2 (l % 4) + {0, 1, 8, 9} and n = l // 4 + {0, 8}:
the fragment order of m16n8k16. So a lane loads the two words that hold a run of its windows, one funnel shift per 32 bits
of it, and all other shifts are constants. Nothing is gathered per weight, and with the right order of dimensions
(`layout_variant`) the decoded values already are the operand's fragments.

Kernels take `words`, the trellis seen as int32, and build W^T [n, k] as the FIRST operand: `tl.dot(decode_tiles(...),
x_transposed, acc)`.
"""

import torch
from torch import Tensor

from .. import reference
from ..format import HADAMARD, Codebook, TrellisWeight
from ._dispatch import call, device_guard, use_triton
from ._triton import tl, triton
from .hadamard import rotate_columns, rotate_rows
from .layout import K_ORDER4, LANES_FIRST, NVIDIA, WORD_ORDER, k_order, k_position, layout_variant, layout_variant_for

__all__ = [
    "K_ORDER4",
    "LANES_FIRST",
    "NVIDIA",
    "WORD_ORDER",
    "decode_tiles",
    "dequantize",
    "k_order",
    "k_position",
    "layout_variant",
    "layout_variant_for",
    "tile_address",
    "trellis_words",
]


DEQUANTIZE_WARPS = 8


def trellis_words(trellis: Tensor) -> Tensor:
    """int16 trellis data (any shape, contiguous) as the int32 words that `decode_tiles` reads, flat and without a copy.

    Copies only where the storage offset is odd, which no 32-bit view can start at.
    """
    flat = trellis.reshape(-1)
    return (flat.clone() if flat.storage_offset() % 2 else flat).view(torch.int32)


@triton.jit
def _codeword(state, CODEBOOK: tl.constexpr):
    """uint32 (16 bits used) -> uint32: the two fp16 values whose sum is a weight of 3INST or MCG; of MUL1 the four bytes that
    are summed, each less 128 as int8.
    """
    if CODEBOOK == 2:
        x = (state * 0x83DCD12D) ^ 0x80808080
    else:
        if CODEBOOK == 0:
            x = state * 89226354 + 64248484
        else:
            x = state * 0xCBAC1FED
        x = (x & 0x8FFF8FFF) ^ 0x3B603B60
    return x


@triton.jit
def _half_of(word, HIGH: tl.constexpr):
    return (word >> (16 * HIGH)).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _byte_of(word, INDEX: tl.constexpr):
    return (word >> (8 * INDEX)).to(tl.uint8).to(tl.int8, bitcast=True)


@triton.jit
def _decode_state(state, CODEBOOK: tl.constexpr):
    """uint32 (16 bits used) -> fp16 weight, bit-exact. 0: 3INST, 1: MCG, 2: MUL1."""
    if CODEBOOK == 2:
        x = state * 0x83DCD12D
        pairs = (x & 0x00FF00FF) + ((x >> 8) & 0x00FF00FF)
        total = (pairs * 0x00010001) >> 16
        # 1024 + total as fp32 bits; the product and the sum are exact in fp32 (contracted or not), so the cast rounds once
        h = ((total << 13) + 0x44800000).to(tl.float32, bitcast=True)
        value = (h * 0.00676727294921875 - 10.3828125).to(tl.float16)
    else:
        x = _codeword(state, CODEBOOK)
        value = _half_of(x, 0) + _half_of(x, 1)
    return value


@triton.jit
def _load_run(tile_words, lane, FIRST: tl.constexpr, LAST: tl.constexpr, TWICE_BITS: tl.constexpr):
    """The two words that hold the ring bits of a lane's windows FIRST..LAST."""
    end = lane * (4 * TWICE_BITS) + ((LAST + 1) * TWICE_BITS) // 2
    start = lane * (4 * TWICE_BITS) + ((FIRST + 1) * TWICE_BITS) // 2 - 16
    i0 = tl.where(start < 0, 4 * TWICE_BITS - 1, start // 32)  # the tile is a ring
    return tl.load(tile_words + i0), tl.load(tile_words + (end - 1) // 32)


@triton.jit
def _run_bits(words, lane, LAST: tl.constexpr, TWICE_BITS: tl.constexpr):
    """A run's 64 bits, and the right shift that brings window LAST to bit 0."""
    bits = (words[0].to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | words[1].to(tl.uint32, bitcast=True).to(tl.uint64)
    if TWICE_BITS % 8 == 0 and ((LAST + 1) * TWICE_BITS // 2) % 32 == 0:
        shift: tl.constexpr = 0
    else:
        end = lane * (4 * TWICE_BITS) + ((LAST + 1) * TWICE_BITS) // 2
        shift = (32 * ((end - 1) // 32 + 1) - end).to(tl.uint64)
    return bits, shift


@triton.jit
def _decode_pair_ptx(funnel, S0: tl.constexpr, S1: tl.constexpr, CODEBOOK: tl.constexpr):
    """The two weights whose windows begin at bits S0 and S1 of `funnel`, in PTX: the same bits as `_decode_state`.

    A window is taken by a left shift, which the integer multiplier does, and one right shift; a mask would be a second
    instruction of the busier pipe. Both halves of a register are added without being unpacked, and weights are packed once.
    """
    if CODEBOOK == 2:
        pair = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            shl.b32 a, $2, $3;
            shl.b32 b, $2, $4;
            shr.u32 a, a, 16;
            shr.u32 b, b, 16;
            mul.lo.u32 a, a, 0x83DCD12D;
            mul.lo.u32 b, b, 0x83DCD12D;
            dp4a.u32.u32 a, a, 0x01010101, 0x6400;
            dp4a.u32.u32 b, b, 0x01010101, 0x6400;
            prmt.b32 a, a, b, 0x5410;
            fma.rn.f16x2 a, a, $5, $6;
            mov.b32 {$0, $1}, a;
            }""",
            "=h,=h,r,r,r,r,r",
            [funnel, 16 - S0, 16 - S1, 0x1EEE1EEE, 0xC931C931],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    elif CODEBOOK == 1:
        pair = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            .reg .b16 al, ah, bl, bh;
            shl.b32 a, $2, $3;
            shl.b32 b, $2, $4;
            shr.u32 a, a, 16;
            shr.u32 b, b, 16;
            mul.lo.u32 a, a, 0xCBAC1FED;
            mul.lo.u32 b, b, 0xCBAC1FED;
            lop3.b32 a, a, 0x8FFF8FFF, 0x3B603B60, 0x6A;
            lop3.b32 b, b, 0x8FFF8FFF, 0x3B603B60, 0x6A;
            mov.b32 {al, ah}, a;
            mov.b32 {bl, bh}, b;
            add.rn.f16 $0, al, ah;
            add.rn.f16 $1, bl, bh;
            }""",
            "=h,=h,r,r,r",
            [funnel, 16 - S0, 16 - S1],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    else:
        pair = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b;
            .reg .b16 al, ah, bl, bh;
            shl.b32 a, $2, $3;
            shl.b32 b, $2, $4;
            shr.u32 a, a, 16;
            shr.u32 b, b, 16;
            mad.lo.u32 a, a, 89226354, 64248484;
            mad.lo.u32 b, b, 89226354, 64248484;
            lop3.b32 a, a, 0x8FFF8FFF, 0x3B603B60, 0x6A;
            lop3.b32 b, b, 0x8FFF8FFF, 0x3B603B60, 0x6A;
            mov.b32 {al, ah}, a;
            mov.b32 {bl, bh}, b;
            add.rn.f16 $0, al, ah;
            add.rn.f16 $1, bl, bh;
            }""",
            "=h,=h,r,r,r",
            [funnel, 16 - S0, 16 - S1],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    return pair


@triton.jit
def _decode_pair(
    bits,
    shift,
    J: tl.constexpr,
    LAST: tl.constexpr,
    CHUNK: tl.constexpr,
    TWICE_BITS: tl.constexpr,
    CODEBOOK: tl.constexpr,
    VARIANT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Weights J and J + 1 of a lane, with PARTS > 1 their codewords, from the pair whose lowest window is LAST; windows of one
    CHUNK share a funnel shift.
    """
    CHUNK_LAST: tl.constexpr = J // CHUNK * CHUNK + CHUNK - 1
    END: tl.constexpr = ((CHUNK_LAST + 1) * TWICE_BITS) // 2
    OUTER: tl.constexpr = ((LAST + 1) * TWICE_BITS) // 2 - END
    S0: tl.constexpr = END - ((J + 1) * TWICE_BITS) // 2
    S1: tl.constexpr = END - ((J + 2) * TWICE_BITS) // 2
    funnel = (bits >> (shift + OUTER)).to(tl.uint32)
    if PARTS > 1:
        first = _codeword((funnel >> S0) & 0xFFFF, CODEBOOK)
        second = _codeword((funnel >> S1) & 0xFFFF, CODEBOOK)
    elif VARIANT & (4 if CODEBOOK == 2 else 8):
        first, second = _decode_pair_ptx(funnel, S0, S1, CODEBOOK)
    else:
        first = _decode_state((funnel >> S0) & 0xFFFF, CODEBOOK)
        second = _decode_state((funnel >> S1) & 0xFFFF, CODEBOOK)
    return first, second


@triton.jit
def _join_runs(d0, d1, d2, d3):
    return tl.join(tl.join(d0, d1), tl.join(d2, d3))


@triton.jit
def _lanes(VARIANT: tl.constexpr):
    """Lane numbers, along the two axes of a decode tensor that stand for lanes."""
    if VARIANT & 1:
        lane = tl.arange(0, 8)[None, :, None, None] * 4 + tl.arange(0, 4)[:, None, None, None]
    else:
        lane = tl.arange(0, 8)[None, None, :, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    return lane


@triton.jit
def load_tiles(
    tile_words,
    row_words,
    TWICE_BITS: tl.constexpr,
    KT: tl.constexpr,
    NT: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """The words of KT x NT neighbouring tiles as each lane needs them: what `decode_words` takes.

    tile_words: pointer to int32, the first word of tile (kt0, nt0) (see `tile_address`). row_words: words from one row of
    tiles to the next, out / 16 * 4 * TWICE_BITS; a constexpr lets every load of the block share one base address. KT and NT
    are powers of two.
    """
    if VARIANT & 1:
        nt = tl.arange(0, NT)[None, None, :, None]
        kt = tl.arange(0, KT)[None, None, None, :]
    else:
        kt = tl.arange(0, KT)[:, None, None, None]
        nt = tl.arange(0, NT)[None, :, None, None]
    lane = _lanes(VARIANT)
    tiles = tile_words + kt * row_words + nt * (4 * TWICE_BITS)
    # a pair of words holds all eight windows of every lane up to 3 bits and at 4, four at most other rates, two at 7
    if TWICE_BITS <= 6 or TWICE_BITS == 8:
        words = (_load_run(tiles, lane, 0, 7, TWICE_BITS),)
    elif TWICE_BITS != 14:
        words = (_load_run(tiles, lane, 0, 3, TWICE_BITS), _load_run(tiles, lane, 4, 7, TWICE_BITS))  # type: ignore[assignment]
    else:
        words = (  # type: ignore[assignment]
            _load_run(tiles, lane, 0, 1, TWICE_BITS),
            _load_run(tiles, lane, 2, 3, TWICE_BITS),
            _load_run(tiles, lane, 4, 5, TWICE_BITS),
            _load_run(tiles, lane, 6, 7, TWICE_BITS),
        )
    return words


@triton.jit
def decode_words(
    words,
    TWICE_BITS: tl.constexpr,
    CODEBOOK: tl.constexpr,
    KT: tl.constexpr,
    NT: tl.constexpr,
    VARIANT: tl.constexpr,
    PARTS: tl.constexpr = 1,
):
    """KT x NT tiles from `load_tiles` -> W^T, fp16 [16 NT, 16 KT], with k in the order of `k_order`.

    PARTS: instead of each weight its PARTS summands (`_codeword`), side by side along k: 2, fp16, for 3INST and MCG; 4, int8,
    for MUL1. VARIANT has WORD_ORDER then.
    """
    # windows that one run holds, and windows that one 32-bit funnel result holds
    RUN: tl.constexpr = 8 // len(words)
    CHUNK: tl.constexpr = 8 if TWICE_BITS <= 4 else (4 if TWICE_BITS <= 10 else 2)
    STEP: tl.constexpr = RUN if RUN < CHUNK else CHUNK
    B: tl.constexpr = TWICE_BITS
    C: tl.constexpr = CODEBOOK
    V: tl.constexpr = VARIANT
    # windows 0..1, 2..3, 4..5 and 6..7 come out of these runs, whose lowest windows are LAST1, LAST3, LAST5 and 7
    LAST1: tl.constexpr = RUN - 1
    LAST3: tl.constexpr = 7 if RUN == 8 else 3
    LAST5: tl.constexpr = 5 if RUN == 2 else 7
    lane = _lanes(VARIANT)
    p1, s1 = _run_bits(words[0], lane, LAST1, B)
    p3, s3 = _run_bits(words[2 // RUN], lane, LAST3, B)
    p5, s5 = _run_bits(words[4 // RUN], lane, LAST5, B)
    p7, s7 = _run_bits(words[6 // RUN], lane, 7, B)
    # window j = 4 jn + 2 j8 + j1 sits at k = 2 (l % 4) + 8 j8 + j1, n = l // 4 + 8 jn; the joins append j1, j8, jn as
    # dimensions 4, 5, 6
    d0, d1 = _decode_pair(p1, s1, 0, LAST1, STEP, B, C, V, PARTS)
    d2, d3 = _decode_pair(p3, s3, 2, LAST3, STEP, B, C, V, PARTS)
    d4, d5 = _decode_pair(p5, s5, 4, LAST5, STEP, B, C, V, PARTS)
    d6, d7 = _decode_pair(p7, s7, 6, 7, STEP, B, C, V, PARTS)
    d = tl.join(_join_runs(d0, d1, d2, d3), _join_runs(d4, d5, d6, d7))
    if PARTS == 2:
        d = tl.join(_half_of(d, 0), _half_of(d, 1))
        if VARIANT & 1:
            d = tl.permute(d, (2, 6, 1, 3, 4, 0, 5, 7)) if VARIANT & 2 else tl.permute(d, (2, 6, 1, 3, 4, 5, 0, 7))
        else:
            d = tl.permute(d, (1, 6, 2, 0, 4, 3, 5, 7)) if VARIANT & 2 else tl.permute(d, (1, 6, 2, 0, 4, 5, 3, 7))
    elif PARTS == 4:
        d = _join_runs(_byte_of(d, 0), _byte_of(d, 1), _byte_of(d, 2), _byte_of(d, 3))
        if VARIANT & 1:
            d = tl.permute(d, (2, 6, 1, 3, 4, 0, 5, 8, 7)) if VARIANT & 2 else tl.permute(d, (2, 6, 1, 3, 4, 5, 0, 8, 7))
        else:
            d = tl.permute(d, (1, 6, 2, 0, 4, 3, 5, 8, 7)) if VARIANT & 2 else tl.permute(d, (1, 6, 2, 0, 4, 5, 3, 8, 7))
    elif VARIANT & 1:
        d = tl.permute(d, (2, 6, 1, 3, 0, 5, 4)) if VARIANT & 2 else tl.permute(d, (2, 6, 1, 3, 5, 0, 4))
    else:
        d = tl.permute(d, (1, 6, 2, 0, 3, 5, 4)) if VARIANT & 2 else tl.permute(d, (1, 6, 2, 0, 5, 3, 4))
    return tl.reshape(d, (NT * 16, KT * 16 * PARTS))


@triton.jit
def decode_tiles(
    tile_words,
    row_words,
    TWICE_BITS: tl.constexpr,
    CODEBOOK: tl.constexpr,
    KT: tl.constexpr,
    NT: tl.constexpr,
    VARIANT: tl.constexpr,
    PARTS: tl.constexpr = 1,
):
    """KT x NT neighbouring tiles -> W^T, fp16 [16 NT, 16 KT]: `load_tiles`, then `decode_words`."""
    words = load_tiles(tile_words, row_words, TWICE_BITS, KT, NT, VARIANT)
    return decode_words(words, TWICE_BITS, CODEBOOK, KT, NT, VARIANT, PARTS)


@triton.jit
def tile_address(words, kt, nt, n_tiles_n, TWICE_BITS: tl.constexpr):
    """Pointer to the first word of tile (kt, nt) of a matrix that starts at `words` and is n_tiles_n tiles wide; safe past
    2^31 words.
    """
    return words + (tl.cast(kt, tl.int64) * n_tiles_n + nt) * (4 * TWICE_BITS)


@triton.jit(do_not_specialize=["in_features"])
def _dequantize_kernel(
    words,
    suh,
    svh,
    out,
    in_features,
    N: tl.constexpr,
    OUT: tl.constexpr,
    TWICE_BITS: tl.constexpr,
    CODEBOOK: tl.constexpr,
    ROTATED: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """Program (128 input features, 128 output features); `out` is row-major with OUT columns, the trellis has N."""
    kb = tl.program_id(0)
    nb = tl.program_id(1)
    w = decode_tiles(
        tile_address(words, kb * 8, nb * 8, N // 16, TWICE_BITS), N // 4 * TWICE_BITS, TWICE_BITS, CODEBOOK, 8, 8, VARIANT & 13
    )
    k = kb * 128 + tl.arange(0, 128)
    n = nb * 128 + tl.arange(0, 128)
    at = k.to(tl.int64)[None, :] * OUT + n[:, None]
    if ROTATED:
        tl.store(out + at, w)
    else:
        full = rotate_columns(rotate_rows(w.to(tl.float32), 128), 128)
        full = full * tl.load(suh + k).to(tl.float32)[None, :] * tl.load(svh + n).to(tl.float32)[:, None]
        tl.store(out + at, full.to(tl.float16), mask=(k < in_features)[None, :] & (n < OUT)[:, None])


def _launch_dequantize(
    trellis: Tensor, suh: Tensor, svh: Tensor, codebook: int, in_features: int, out_features: int, rotated: bool
) -> Tensor:
    rows, columns = trellis.shape[0] * 16, trellis.shape[1] * 16
    out = torch.empty((in_features, out_features), dtype=torch.float16, device=trellis.device)
    with device_guard(trellis):
        _dequantize_kernel[(rows // HADAMARD, columns // HADAMARD)](
            trellis_words(trellis),
            suh,
            svh,
            out,
            in_features,
            N=columns,
            OUT=out_features,
            TWICE_BITS=trellis.shape[2] // 8,
            CODEBOOK=codebook,
            ROTATED=rotated,
            VARIANT=layout_variant(trellis.device),
            num_warps=DEQUANTIZE_WARPS,
        )
    return out


def _dequantize_body(
    trellis: Tensor, suh: Tensor, svh: Tensor, codebook: int, in_features: int, out_features: int, rotated: bool
) -> Tensor:
    if use_triton(trellis):
        return _launch_dequantize(trellis, suh, svh, codebook, in_features, out_features, rotated)
    if rotated:
        return reference.decode(trellis, Codebook(codebook))
    weight = TrellisWeight(trellis, suh, svh, Codebook(codebook), None, in_features, out_features)
    return reference.dequantize(weight, False).contiguous()


_dequantize_op = torch.library.custom_op("exl3_triton::dequantize", _dequantize_body, mutates_args=())


@_dequantize_op.register_fake
def _(trellis, suh, svh, codebook, in_features, out_features, rotated):
    return trellis.new_empty((in_features, out_features), dtype=torch.float16)


def dequantize(w: TrellisWeight, *, rotated: bool = False) -> Tensor:
    """The matrix as fp16, row-major.

    rotated=True: the stored values W_rotated, [padded_in, padded_out], bit-exact on every device. rotated=False: the matrix
    in the original basis, diag(suh) P W_rotated P diag(svh), [in_features, out_features], computed in fp32 and rounded
    once.
    """
    sizes = (w.padded_in, w.padded_out) if rotated else (w.in_features, w.out_features)
    return call(_dequantize_op, _dequantize_body, w.trellis, w.suh, w.svh, int(w.codebook), *sizes, rotated)
