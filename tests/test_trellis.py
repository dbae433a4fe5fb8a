"""Tile decode and `dequantize`: bit for bit against ExLlamaV3's tensors and the reference, for each rate, codebook, layout."""

import pytest
import torch
from golden import matrices

from exl3_triton import reference
from exl3_triton.format import TWICE_BITS, Codebook, TrellisWeight
from exl3_triton.ops.trellis import (
    NVIDIA,
    _decode_pair_ptx,
    _decode_state,
    decode_tiles,
    dequantize,
    k_order,
    k_position,
    layout_variant,
    tile_address,
    trellis_words,
)

triton = pytest.importorskip("triton")
tl = triton.language

FORMATS = [(t / 2, c) for t in TWICE_BITS for c in Codebook if t % 2 == 0 or c is Codebook.MUL1]
not_on_amd = pytest.mark.skipif(torch.version.hip is not None, reason="PTX")
format_id = lambda value: value.label if isinstance(value, Codebook) else f"{value:g}"


def random_weight(bits, codebook, rows, columns, device="cpu", in_features=0, out_features=0):
    trellis = torch.randint(-(2**15), 2**15, (rows // 16, columns // 16, round(16 * bits)), dtype=torch.int16)
    suh = (torch.randn(rows).sign() * (0.02 + 0.02 * torch.rand(rows))).half()
    svh = (torch.randn(columns).sign() * (0.5 + torch.rand(columns))).half()
    return TrellisWeight(trellis, suh, svh, codebook, None, in_features, out_features).to(device)


def same_bits(a, b):
    return torch.equal(a.cpu().view(torch.int16), b.cpu().view(torch.int16))


@triton.jit
def _states_kernel(out, CODEBOOK: tl.constexpr, BLOCK: tl.constexpr, VARIANT: tl.constexpr):
    state = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state = state.to(tl.uint32)
    if VARIANT:  # the window between other bits, twice
        value, twin = _decode_pair_ptx(0xA5000000 | (state << 8) | 0x5A, 8, 8, CODEBOOK)
        value = tl.where(value == twin, value, 65504.0)
    else:
        value = _decode_state(state, CODEBOOK)
    tl.store(out + tl.cast(state, tl.int32), value)


@triton.jit
def _tiles_kernel(
    words, out, kt0, nt0, K: tl.constexpr, N: tl.constexpr, TWICE_BITS: tl.constexpr, CODEBOOK: tl.constexpr, KT: tl.constexpr,
    NT: tl.constexpr, VARIANT: tl.constexpr,
):  # fmt: skip
    """The program's KT x NT tiles of a [K, N] matrix, beginning at tile (kt0, nt0) of it."""
    kt = kt0 + tl.program_id(0) * KT
    nt = nt0 + tl.program_id(1) * NT
    tile = tile_address(words, kt, nt, N // 16, TWICE_BITS)
    w = decode_tiles(tile, N // 16 * 4 * TWICE_BITS, TWICE_BITS, CODEBOOK, KT, NT, VARIANT)
    k = kt * 16 + k_order(KT * 16, VARIANT)
    n = nt * 16 + tl.arange(0, NT * 16)
    tl.store(out + k[None, :] * N + n[:, None], w)


@triton.jit
def _order_kernel(out, back, VARIANT: tl.constexpr):
    k = k_order(64, VARIANT)
    tl.store(out + tl.arange(0, 64), k)
    tl.store(back + tl.arange(0, 64), k_position(k, VARIANT))


@pytest.mark.parametrize("variant", [0, pytest.param(NVIDIA, marks=[pytest.mark.gpu, not_on_amd])])
@pytest.mark.parametrize("codebook", Codebook, ids=format_id)
def test_decode_state_gives_every_value_of_the_codebook(device, codebook, variant):
    out = torch.empty(1 << 16, dtype=torch.float16, device=device)
    _states_kernel[(16,)](out, int(codebook), 4096, variant)
    assert same_bits(out, reference.codebook_values(codebook))


@pytest.mark.parametrize("golden", matrices(), ids=lambda golden: golden.prefix)
def test_dequantize_matches_exllamav3_bit_for_bit(device, triton_backend, golden):
    stored = golden.tensors()["weight_rotated"]
    assert stored.abs().max() > 1
    assert same_bits(dequantize(golden.weight(device), rotated=True), stored)


@pytest.mark.parametrize("variant", range(4))
@pytest.mark.parametrize(("bits", "codebook"), FORMATS, ids=format_id)
def test_decode_tiles_matches_the_reference_in_every_layout(device, bits, codebook, variant):
    weight = random_weight(bits, codebook, 128, 128)
    words = trellis_words(weight.trellis.to(device))
    out = torch.empty(128, 128, dtype=torch.float16, device=device)
    _tiles_kernel[(2, 1)](words, out, 0, 0, 128, 128, weight.twice_bits, int(codebook), 4, 8, variant)
    assert same_bits(out, reference.decode(weight.trellis, codebook))


@pytest.mark.parametrize(("kt", "nt"), [(1, 1), (2, 16), (8, 4)])
def test_decode_tiles_takes_any_block_of_tiles(device, kt, nt):
    weight = random_weight(3, Codebook.MCG, 128, 256)
    out = torch.zeros(128, 256, dtype=torch.float16, device=device)
    skipped = 1 if kt == 1 else 0
    grid = (8 // kt - skipped, 16 // nt)
    _tiles_kernel[grid](
        trellis_words(weight.trellis.to(device)), out, skipped, 0, 128, 256, 6, 1, kt, nt, layout_variant(out.device)
    )
    assert same_bits(out[16 * skipped :], reference.decode(weight.trellis, Codebook.MCG)[16 * skipped :])
    assert not out[: 16 * skipped].any()


@pytest.mark.parametrize("variant", range(4))
def test_k_position_inverts_k_order(device, variant):
    order, back = (torch.empty(64, dtype=torch.int32, device=device) for _ in range(2))
    _order_kernel[(1,)](order, back, variant)
    assert sorted(order.tolist()) == list(range(64))
    assert back.tolist() == list(range(64))
    if variant & 2:
        assert order[:16].tolist() == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]


def test_trellis_words_views_without_a_copy_where_it_can():
    data = torch.randint(-(2**15), 2**15, (1 + 4 * 48,), dtype=torch.int16)
    even, odd = data[:-1], data[1:]
    assert trellis_words(even).data_ptr() == data.data_ptr()
    assert torch.equal(trellis_words(odd).view(torch.int16), odd)


@pytest.mark.parametrize(
    ("rows", "columns", "in_features", "out_features"), [(128, 128, 0, 0), (256, 384, 200, 300), (128, 256, 1, 129)]
)
@pytest.mark.parametrize(
    ("bits", "codebook"), [(3, Codebook.MCG), (2.5, Codebook.MUL1), (7, Codebook.THREE_INST)], ids=format_id
)
def test_dequantize_in_the_original_basis(device, triton_backend, bits, codebook, rows, columns, in_features, out_features):
    weight = random_weight(bits, codebook, rows, columns, device, in_features, out_features)
    got = dequantize(weight).cpu().double()
    cpu = weight.to("cpu")
    exact = reference.dense_weight(cpu, torch.float64)
    assert got.shape == exact.shape == (in_features or rows, out_features or columns)
    # 14 butterfly stages in fp32 on values of at most 128 * 4 (normalised sums of 128 x 128 weights below 4), one rounding
    scale = (cpu.suh.double().abs()[:, None] * cpu.svh.double().abs())[: exact.shape[0], : exact.shape[1]]
    bound = exact.abs() * 2**-11 + scale * 512 * 14 * 2**-24 + 2**-25
    assert exact.abs().max() > 0.02
    assert ((got - exact).abs() <= bound).all()


@pytest.mark.parametrize("rotated", [False, True])
def test_dequantize_on_the_cpu_is_the_reference(rotated):
    weight = random_weight(4, Codebook.MUL1, 128, 256, in_features=100, out_features=256)
    assert torch.equal(dequantize(weight, rotated=rotated), reference.dequantize(weight, rotated))
    assert dequantize(weight, rotated=rotated).shape == ((128, 256) if rotated else (100, 256))


def test_dequantize_passes_opcheck(device):
    weight = random_weight(3, Codebook.MCG, 128, 128, device, 100, 128)
    op = torch.ops.exl3_triton.dequantize.default
    torch.library.opcheck(op, (weight.trellis, weight.suh, weight.svh, int(weight.codebook), 100, 128, False))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [pytest.param(v, marks=not_on_amd if v & NVIDIA else ()) for v in range(16)])
@pytest.mark.parametrize(("bits", "codebook"), FORMATS, ids=format_id)
def test_decode_tiles_of_large_matrices(bits, codebook, variant):
    weight = random_weight(bits, codebook, 1024, 2048)
    out = torch.empty(1024, 2048, dtype=torch.float16, device="cuda")
    _tiles_kernel[(8, 16)](
        trellis_words(weight.trellis.cuda()), out, 0, 0, 1024, 2048, weight.twice_bits, int(codebook), 8, 8, variant
    )
    assert same_bits(out, reference.decode(weight.trellis, codebook))


@pytest.mark.gpu
def test_dequantize_reads_past_two_to_the_31_words():
    """Tiles at the end of a stack of 8-bit matrices whose words are more than 2^31 apart from the first one's."""
    columns = 2048
    rows = 2**31 // (columns // 16 * 64) * 16 + 128
    weight = random_weight(8, Codebook.MCG, 128, columns)
    words = torch.empty(rows // 16 * (columns // 16) * 64, dtype=torch.int32, device="cuda")
    words[-weight.trellis.numel() // 2 :] = trellis_words(weight.trellis.cuda())
    out = torch.empty(128, columns, dtype=torch.float16, device="cuda")
    base = out.view(-1)
    last = rows // 16 - 8
    _far_kernel[(1, columns // 128)](words, base, last, columns, layout_variant(out.device))
    assert same_bits(out, reference.decode(weight.trellis, Codebook.MCG))


@triton.jit
def _far_kernel(words, out, kt, N: tl.constexpr, VARIANT: tl.constexpr):
    w = decode_tiles(tile_address(words, kt, tl.program_id(1) * 8, N // 16, 16), N // 16 * 64, 16, 1, 8, 8, VARIANT)
    n = tl.program_id(1) * 128 + tl.arange(0, 128)
    tl.store(out + k_order(128, VARIANT)[None, :] * N + n[:, None], w)
