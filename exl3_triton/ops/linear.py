"""y = rotate(rotate(x * suh) W_rotated) * svh + bias over EXL3 matrices.

Up to a few hundred rows the weights are decoded inside the product, in three launches at most: the rotation of the
activations (`hadamard.launch_rotate_input`), the product, and, where it is split over k, a reduction. The last one writes y:
output rotation, svh, the row's power of two, bias and the cast in one place. With more rows the weights are decoded once
into fp16 scratch and `torch.mm` does the product (`_decode_once`).

The product has weights as its first operand and tokens as its second, so the decoded tile never leaves registers and a few
tokens cost a small instruction. A program owns 128 output features (a rotation block) of BLOCK_M tokens. Matrices of one
call share the launch; those equal in format and size ("a class") share code, the others get a branch of their own with
every size a constant.

The split over k depends on the matrices, the device and the regime (`tuning.regimes`), not on the number of rows: a row gives
the same bits in any batch of its regime.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import reference
from ..format import Codebook, TrellisWeight
from ._args import FLOATS, as_rows
from ._dispatch import call, device_guard, overlap, use_triton
from ._triton import start_next, tl, triton, wait_previous
from .hadamard import launch_rotate_input, rotate_columns, rotate_rows, scale_by_power
from .layout import WORD_ORDER, layout_variant
from .modes import PARTS, check_mode, launch_quantize_rows, raw_product
from .trellis import decode_tiles, decode_words, load_tiles, tile_address, trellis_words
from .tuning import LinearConfig, device_of, programs_and_parts, select_linear

SCRATCH_ELEMENTS = 1 << 27  # fp16 weights that `_decode_once` holds at a time: 256 MiB
_FINISH_ROWS = 4  # 4096 rows of 6144 x 12288 as a whole: 1044 us with 4 and one warp, 1122 with 8, on an H200


@dataclass(frozen=True)
class _Class:
    """Matrices of a launch that share code: equal in rate, codebook and sizes, neighbours in the launch's order."""

    twice_bits: int
    codebook: int
    padded_out: int
    out_features: int
    has_bias: bool
    first: int  # index of the first matrix
    count: int
    block: int  # the launch's first block of 128 output features that belongs to the class

    @property
    def constants(self) -> tuple[int, ...]:
        return (
            self.twice_bits,
            self.codebook,
            self.padded_out,
            self.out_features,
            int(self.has_bias),
            self.first,
            self.count,
            self.block,
        )


@triton.jit
def _write_output(
    acc,
    exponents,
    affine,
    svh,
    bias,
    y,
    matrix,
    rows,
    m,
    column,
    COUNT: tl.constexpr,
    OUT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Accumulators [128, BLOCK_M] of one matrix of COUNT -> y[rows, column..column+127]."""
    n = column + tl.arange(0, 128)
    live = rows < m
    raw = raw_product(acc, affine, (matrix * m + rows)[None, :], live[None, :], COUNT * m)
    result = rotate_columns(raw, BLOCK_M) * tl.load(svh + n).to(tl.float32)[:, None]
    exponent = tl.load(exponents + matrix * m + rows, mask=live, other=0)
    result = scale_by_power(result, exponent[None, :])
    if BIAS:
        result += tl.load(bias + n).to(tl.float32)[:, None]
    at = rows.to(tl.int64)[None, :] * OUT + n[:, None]
    tl.store(y + at, result.to(y.dtype.element_ty), mask=live[None, :] & (n < OUT)[:, None])


@triton.jit
def _pick(pointers, index, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """pointers[FIRST + index] for an index known at run time only."""
    chosen = pointers[FIRST]
    for i in tl.static_range(1, COUNT):
        if index == i:
            chosen = pointers[FIRST + i]
    return chosen


@triton.jit
def _load_rows(x, live, low, LOW: tl.constexpr):
    """A block of activations, and with LOW the block of their low parts, `low` elements further on."""
    high = tl.load(x, mask=live, other=0)
    if LOW:
        blocks = (high, tl.load(x + low, mask=live, other=0))
    else:
        blocks = (high,)  # type: ignore[assignment]
    return blocks


@triton.jit
def _multiply(w, blocks, acc):
    for i in tl.static_range(len(blocks) - 1, -1, -1):  # low parts first
        acc = tl.dot(w, blocks[i], acc, out_dtype=acc.dtype)
    return acc


@triton.jit
def _sum_steps(
    tile,
    x_block,
    live,
    low,
    steps,
    ROW_WORDS: tl.constexpr,
    TWICE_BITS: tl.constexpr,
    CODEBOOK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VARIANT: tl.constexpr,
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    LOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Raw sums [128, BLOCK_M] over `steps` (at least one) blocks of BLOCK_K inputs, from the words at `tile` and the
    activations at `x_block` on.

    STAGES > 1: words of the next step are loaded ahead into registers, activations STAGES - 1 steps ahead into shared memory;
    the product of one step then runs while the next step's weights are decoded.
    """
    acc = tl.zeros((128, BLOCK_M), tl.int32 if PARTS == 4 else tl.float32)
    if STAGES > 1:
        raw = load_tiles(tile, ROW_WORDS, TWICE_BITS, BLOCK_K // 16, 8, VARIANT)
        wait_previous(OVERLAP)
        for i in tl.range(steps, num_stages=STAGES):
            x = _load_rows(x_block, live, low, LOW)
            tile += tl.where(i + 1 < steps, BLOCK_K // 16 * ROW_WORDS, 0)  # the last step loads its own words again
            raw_next = load_tiles(tile, ROW_WORDS, TWICE_BITS, BLOCK_K // 16, 8, VARIANT)
            w = decode_words(raw, TWICE_BITS, CODEBOOK, BLOCK_K // 16, 8, VARIANT, PARTS)
            acc = _multiply(w, x, acc)
            raw = raw_next
            x_block += BLOCK_K
    elif PREFETCH:
        raw = load_tiles(tile, ROW_WORDS, TWICE_BITS, BLOCK_K // 16, 8, VARIANT)
        wait_previous(OVERLAP)
        x = _load_rows(x_block, live, low, LOW)
        for _ in range(1, steps):
            tile += BLOCK_K // 16 * ROW_WORDS
            x_block += BLOCK_K
            raw_next = load_tiles(tile, ROW_WORDS, TWICE_BITS, BLOCK_K // 16, 8, VARIANT)
            x_next = _load_rows(x_block, live, low, LOW)
            w = decode_words(raw, TWICE_BITS, CODEBOOK, BLOCK_K // 16, 8, VARIANT, PARTS)
            acc = _multiply(w, x, acc)
            raw = raw_next
            x = x_next
        w = decode_words(raw, TWICE_BITS, CODEBOOK, BLOCK_K // 16, 8, VARIANT, PARTS)
        acc = _multiply(w, x, acc)
    else:
        wait_previous(OVERLAP)
        for _ in range(steps):
            x = _load_rows(x_block, live, low, LOW)
            w = decode_tiles(tile, ROW_WORDS, TWICE_BITS, CODEBOOK, BLOCK_K // 16, 8, VARIANT, PARTS)
            acc = _multiply(w, x, acc)
            tile += BLOCK_K // 16 * ROW_WORDS
            x_block += BLOCK_K
    return acc


@triton.jit
def _owner(unit, UNITS: tl.constexpr, PROGRAMS: tl.constexpr):
    """The program that owns a unit of work, where PROGRAMS share UNITS in order and the first ones have one more: see
    `tuning.owner_of`.
    """
    EACH: tl.constexpr = UNITS // PROGRAMS
    LONGER: tl.constexpr = UNITS % PROGRAMS
    return tl.where(unit < LONGER * (EACH + 1), unit // (EACH + 1), (unit - LONGER) // EACH)


@triton.jit
def _product_part(
    xh,
    exponents,
    affine,
    words,
    svh,
    bias,
    y,
    partial,
    m,
    block,
    part,
    first,
    steps,
    last,
    K: tl.constexpr,
    CLASSES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
    VARIANT: tl.constexpr,
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    LOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`steps` blocks of k from `first` on, of one output block: to y where WHOLE, else to partial [.., BLOCKS, m, 128] at
    `part`. last: whether the program does nothing afterwards.
    """
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = (rows < m)[None, :]
    low = tl.cast(m, tl.int64) * (len(words) * K)
    for c in tl.static_range(len(CLASSES)):
        if block >= CLASSES[c][7] and block < CLASSES[c][7] + CLASSES[c][6] * (CLASSES[c][2] // 128):
            blocks_each: tl.constexpr = CLASSES[c][2] // 128
            row_words: tl.constexpr = CLASSES[c][2] // 16 * 4 * CLASSES[c][0]
            index = (block - CLASSES[c][7]) // blocks_each
            column = (block - CLASSES[c][7]) % blocks_each
            matrix = CLASSES[c][5] + index
            tile = _pick(words, index, CLASSES[c][5], CLASSES[c][6])
            tile += (first * (BLOCK_K // 16)).to(tl.int64) * row_words + column * (8 * 4 * CLASSES[c][0])
            at = (matrix * m + rows).to(tl.int64)[None, :] * K + (tl.arange(0, BLOCK_K * PARTS) // PARTS)[:, None]
            acc = _sum_steps(
                tile,
                xh + first * BLOCK_K + at,
                live,
                low,
                steps,
                row_words,
                CLASSES[c][0],
                CLASSES[c][1],
                BLOCK_M,
                BLOCK_K,
                VARIANT,
                PREFETCH,
                STAGES,
                PARTS,
                LOW,
                OVERLAP,
            )
            if last:
                start_next(OVERLAP)
            if WHOLE:
                _write_output(
                    acc,
                    exponents,
                    affine,
                    _pick(svh, index, CLASSES[c][5], CLASSES[c][6]),
                    _pick(bias, index, CLASSES[c][5], CLASSES[c][6]),
                    _pick(y, index, CLASSES[c][5], CLASSES[c][6]),
                    matrix,
                    rows,
                    m,
                    column * 128,
                    len(words),
                    CLASSES[c][3],
                    CLASSES[c][4],
                    BLOCK_M,
                )
            else:
                n = tl.arange(0, 128)[:, None]
                at = ((part * BLOCKS + block).to(tl.int64) * m + rows.to(tl.int64)[None, :]) * 128 + n
                tl.store(partial + at, acc, mask=live)


@triton.jit(do_not_specialize=["m"])
def _product_kernel(
    xh,
    exponents,
    affine,
    words,
    svh,
    bias,
    y,
    partial,
    m,
    K: tl.constexpr,
    CLASSES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    VARIANT: tl.constexpr,
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    LOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Raw sums go to partial [SPLIT, BLOCKS, m, 128], with SPLIT 1 and no PROGRAMS the finished values to y.

    PROGRAMS 0: program (output block, part of k, token block). Else program (index of PROGRAMS, 0, token block): all steps of
    all output blocks in a row, each program an equal range of them, which may begin and end within a block; SPLIT is then the
    most programs that meet in one block.
    PARTS: of `decode_words`, each meeting the same activation. LOW: activations are [2, matrices, m, K], high and low parts.
    """
    ALL: tl.constexpr = K // BLOCK_K
    if PROGRAMS:
        program = tl.program_id(0)
        UNITS: tl.constexpr = BLOCKS * ALL
        EACH: tl.constexpr = UNITS // PROGRAMS
        LONGER: tl.constexpr = UNITS % PROGRAMS
        begin = program * EACH + tl.minimum(program, LONGER)
        end = (program + 1) * EACH + tl.minimum(program + 1, LONGER)
        last_block = (end - 1) // ALL
        for block in tl.range(begin // ALL, last_block + 1, disable_licm=True):
            first = tl.maximum(begin - block * ALL, 0)
            _product_part(
                xh,
                exponents,
                affine,
                words,
                svh,
                bias,
                y,
                partial,
                m,
                block,
                program - _owner(block * ALL, UNITS, PROGRAMS),
                first,
                tl.minimum(end - block * ALL, ALL) - first,
                block == last_block,
                K,
                CLASSES,
                BLOCKS,
                BLOCK_M,
                BLOCK_K,
                False,
                VARIANT,
                PREFETCH,
                STAGES,
                PARTS,
                LOW,
                OVERLAP,
            )
    else:
        STEPS: tl.constexpr = (ALL + SPLIT - 1) // SPLIT
        part = tl.program_id(1)
        first = part * STEPS
        _product_part(
            xh,
            exponents,
            affine,
            words,
            svh,
            bias,
            y,
            partial,
            m,
            tl.program_id(0),
            part,
            first,
            STEPS if ALL % SPLIT == 0 else tl.minimum(STEPS, ALL - first),
            True,
            K,
            CLASSES,
            BLOCKS,
            BLOCK_M,
            BLOCK_K,
            SPLIT == 1,
            VARIANT,
            PREFETCH,
            STAGES,
            PARTS,
            LOW,
            OVERLAP,
        )


@triton.jit
def _finish_rows(acc, exponents, svh, bias, y, rows, live, column, OUT: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr):
    """Raw products fp32 [ROWS, 128] -> y[rows, column]; rows and live [ROWS, 1], column [1, 128]."""
    result = rotate_rows(acc, ROWS) * tl.load(svh + column).to(tl.float32)
    result = scale_by_power(result, tl.load(exponents + rows, mask=live, other=0))
    if BIAS:
        result += tl.load(bias + column).to(tl.float32)
    tl.store(y + rows.to(tl.int64) * OUT + column, result.to(y.dtype.element_ty), mask=live & (column < OUT))


@triton.jit(do_not_specialize=["m"])
def _reduce_kernel(
    exponents,
    affine,
    svh,
    bias,
    y,
    partial,
    m,
    CLASSES: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPLIT: tl.constexpr,
    STEPS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (output block, row): the parts of k added in their order, then y. STEPS: of k, where PROGRAMS share them."""
    block = tl.program_id(0)
    row = tl.program_id(1) + tl.zeros((1, 1), tl.int32)
    n = tl.arange(0, 128)[None, :]
    part = partial + (block.to(tl.int64) * m + row) * 128 + n
    wait_previous(OVERLAP)
    start_next(OVERLAP)
    acc = tl.zeros((1, 128), partial.dtype.element_ty)
    if PROGRAMS:
        first = _owner(block * STEPS, BLOCKS * STEPS, PROGRAMS)
        parts = _owner(block * STEPS + STEPS - 1, BLOCKS * STEPS, PROGRAMS) - first + 1
    for i in tl.static_range(SPLIT):  # unrolled: all loads in flight at once
        if PROGRAMS:
            acc += tl.load(part, mask=i + tl.zeros((1, 128), tl.int32) < parts, other=0)  # the others were never written
        else:
            acc += tl.load(part)
        part += (BLOCKS * m).to(tl.int64) * 128
    for c in tl.static_range(len(CLASSES)):
        if block >= CLASSES[c][7] and block < CLASSES[c][7] + CLASSES[c][6] * (CLASSES[c][2] // 128):
            blocks_each: tl.constexpr = CLASSES[c][2] // 128
            index = (block - CLASSES[c][7]) // blocks_each
            _finish_rows(
                raw_product(acc, affine, (CLASSES[c][5] + index) * m + row, row < m, len(svh) * m),
                exponents + (CLASSES[c][5] + index) * m,
                _pick(svh, index, CLASSES[c][5], CLASSES[c][6]),
                _pick(bias, index, CLASSES[c][5], CLASSES[c][6]),
                _pick(y, index, CLASSES[c][5], CLASSES[c][6]),
                row,
                row < m,
                (block - CLASSES[c][7]) % blocks_each * 128 + n,
                CLASSES[c][3],
                CLASSES[c][4],
                1,
            )


@triton.jit
def _decode_kernel(
    words,
    out,
    first,
    N: tl.constexpr,
    K: tl.constexpr,
    TWICE_BITS: tl.constexpr,
    CODEBOOK: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """Program (128 output features from feature 128 `first` on, 128 inputs): W^T [n, k] as stored, k in the order of
    `k_order`.
    """
    block = tl.program_id(0)
    kb = tl.program_id(1)
    tile = tile_address(words, kb * 8, (first + block) * 8, N // 16, TWICE_BITS)
    w = decode_tiles(tile, N // 4 * TWICE_BITS, TWICE_BITS, CODEBOOK, 8, 8, VARIANT)
    n = block * 128 + tl.arange(0, 128)
    tl.store(out + n.to(tl.int64)[:, None] * K + (kb * 128 + tl.arange(0, 128))[None, :], w)


@triton.jit(do_not_specialize=["m", "first", "width"])
def _finish_kernel(raw, exponents, svh, bias, y, m, first, width, OUT: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr):
    """Program (128 output features from feature 128 `first` on, ROWS rows) of raw products [m, width]."""
    n = tl.program_id(0) * 128 + tl.arange(0, 128)[None, :]
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    live = rows < m
    acc = tl.load(raw + rows.to(tl.int64) * width + n, mask=live, other=0.0)
    _finish_rows(acc, exponents, svh, bias, y, rows, live, first * 128 + n, OUT, BIAS, ROWS)


def _wide_product(x: Tensor, w: Tensor) -> Tensor:
    """x w in fp32 from fp16 operands."""
    if x.is_cuda:
        return torch.mm(x, w, out_dtype=torch.float32)
    return x.float() @ w.float()  # the interpreter's host has no fp16 product with fp32 results


def _decode_once(
    xh: Tensor, exponents: Tensor, trellis: Tensor, svh: Tensor, bias: Tensor | None, codebook: int, y: Tensor
) -> None:
    """One matrix for many rows: W_rotated into fp16 scratch, `torch.mm` into fp32, then the output's end.

    xh fp16 [m, K], or [2, m, K] with low parts, exponents int32 [m], y [m, out_features]. Scratch: at most SCRATCH_ELEMENTS
    fp16 weights (or 128 columns of them) and fp32 [m, as many columns] (twice with low parts), for one slice of the columns at
    a time.
    """
    m, k = xh.shape[-2:]
    columns = trellis.shape[1] * 16
    width = min(columns, max(128, SCRATCH_ELEMENTS // k // 128 * 128))
    weights = torch.empty((width, k), dtype=torch.float16, device=xh.device)
    rows = _FINISH_ROWS
    for start in range(0, columns, width):
        size = min(width, columns - start)
        _decode_kernel[(size // 128, k // 128)](
            trellis_words(trellis),
            weights,
            start // 128,
            N=columns,
            K=k,
            TWICE_BITS=trellis.shape[2] // 8,
            CODEBOOK=codebook,
            VARIANT=layout_variant(xh.device),
            num_warps=4,
        )
        raw, *low = (_wide_product(part, weights[:size].t()) for part in (xh if xh.dim() == 3 else xh[None]))
        if low:
            raw += low[0]
        _finish_kernel[(size // 128, triton.cdiv(m, rows))](
            raw,
            exponents,
            svh,
            svh if bias is None else bias,
            y,
            m,
            start // 128,
            size,
            OUT=y.shape[-1],
            BIAS=bias is not None,
            ROWS=rows,
            num_warps=1,
        )


def _launch_linears(
    x: Tensor,
    trellises: Sequence[Tensor],
    suh: Sequence[Tensor],
    svh: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    codebooks: Sequence[int],
    out_features: Sequence[int],
    out_dtype: torch.dtype,
    config: LinearConfig | None = None,
    mode: str = "exact",
) -> list[Tensor]:
    outputs = [torch.empty((*x.shape[:-1], features), dtype=out_dtype, device=x.device) for features in out_features]
    if x.numel() == 0:
        return outputs
    x = as_rows(x)
    m = x.shape[0]
    keys = [
        (t.shape[2] // 8, codebook, t.shape[1] * 16, features, bias is not None)
        for t, codebook, features, bias in zip(trellises, codebooks, out_features, biases)
    ]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    classes: list[_Class] = []
    blocks = 0
    for key in sorted(set(keys)):
        classes.append(_Class(*key, first=sum(c.count for c in classes), count=keys.count(key), block=blocks))
        blocks += classes[-1].count * (classes[-1].padded_out // 128)
    padded_in = trellises[0].shape[0] * 16
    if config is None:
        highest = max((c.twice_bits, c.codebook) for c in classes)
        config = select_linear(m, padded_in, blocks, device_of(x.device), *highest, mode)
    constants = tuple(c.constants for c in classes)
    parts = PARTS[mode] if config else 1
    variant = layout_variant(x.device) | (WORD_ORDER if parts > 1 else 0)
    with device_guard(x):
        xh, exponents = launch_rotate_input(x, [suh[i] for i in order], padded_in, variant, low=mode == "precise")
        if config is None:
            for place, i in enumerate(order):
                y = outputs[i].view(m, out_features[i])
                _decode_once(xh[..., place, :, :], exponents[place], trellises[i], svh[i], biases[i], codebooks[i], y)
            return outputs
        xh, affine = launch_quantize_rows(xh) if mode == "int8" else (xh, exponents)
        token_blocks = triton.cdiv(m, config.block_m)
        partial = exponents
        programs, split = programs_and_parts(config, padded_in, blocks, device_of(x.device).processors)
        if programs or split > 1:
            shape = (split, blocks, m, 128)
            partial = torch.empty(shape, dtype=torch.int32 if mode == "int8" else torch.float32, device=x.device)
        ends = (
            tuple(svh[i] for i in order),
            tuple(svh[i] if biases[i] is None else biases[i] for i in order),  # a matrix without bias never reads it
            tuple(outputs[i] for i in order),
            partial,
            m,
        )
        _product_kernel[(programs, 1, token_blocks) if programs else (blocks, split, token_blocks)](
            xh,
            exponents,
            affine,
            tuple(trellis_words(trellises[i]) for i in order),
            *ends,
            K=padded_in,
            CLASSES=constants,
            BLOCKS=blocks,
            BLOCK_M=config.block_m,
            BLOCK_K=config.block_k,
            SPLIT=split,
            PROGRAMS=programs,
            VARIANT=variant,
            PREFETCH=config.prefetch,
            STAGES=config.stages,
            PARTS=parts,
            LOW=mode == "precise",
            num_warps=config.num_warps,
            num_stages=1,
            maxnreg=config.registers,
            **overlap(x.device, m),
        )
        if programs or split > 1:
            _reduce_kernel[(blocks, m)](
                exponents,
                affine,
                *ends,
                CLASSES=constants,
                BLOCKS=blocks,
                SPLIT=split,
                STEPS=padded_in // config.block_k,
                PROGRAMS=programs,
                num_warps=1,
                **overlap(x.device, m),
            )
    return outputs


def _linears_body(
    x: Tensor,
    trellises: Sequence[Tensor],
    suh: Sequence[Tensor],
    svh: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    codebooks: Sequence[int],
    out_features: Sequence[int],
    out_dtype: torch.dtype,
    mode: str = "exact",
) -> list[Tensor]:
    if use_triton(x):
        return _launch_linears(x, trellises, suh, svh, biases, codebooks, out_features, out_dtype, mode=mode)
    weights = (
        TrellisWeight(t, u, v, Codebook(codebook), bias, x.shape[-1], features)
        for t, u, v, bias, codebook, features in zip(trellises, suh, svh, biases, codebooks, out_features)
    )
    return [reference.linear(x, w, mode).to(out_dtype) for w in weights]


def _linear_body(
    x: Tensor,
    trellis: Tensor,
    suh: Tensor,
    svh: Tensor,
    bias: Tensor | None,
    codebook: int,
    out_features: int,
    out_dtype: torch.dtype,
    mode: str = "exact",
) -> Tensor:
    return _linears_body(x, [trellis], [suh], [svh], [bias], [codebook], [out_features], out_dtype, mode)[0]


_linears_op = torch.library.custom_op("exl3_triton::linears", _linears_body, mutates_args=())
_linear_op = torch.library.custom_op("exl3_triton::linear", _linear_body, mutates_args=())


@_linears_op.register_fake
def _(x, trellises, suh, svh, biases, codebooks, out_features, out_dtype, mode="exact"):
    return [x.new_empty((*x.shape[:-1], features), dtype=out_dtype) for features in out_features]


@_linear_op.register_fake
def _(x, trellis, suh, svh, bias, codebook, out_features, out_dtype, mode="exact"):
    return x.new_empty((*x.shape[:-1], out_features), dtype=out_dtype)


def _check(op: str, x: Tensor, w: TrellisWeight, out_dtype: torch.dtype) -> None:
    if x.dtype not in FLOATS:
        raise ValueError(f"{op}: x is {x.dtype}: required float16, bfloat16 or float32")
    if out_dtype not in FLOATS:
        raise ValueError(f"{op}: out_dtype={out_dtype}: required float16, bfloat16 or float32")
    if x.dim() == 0 or x.shape[-1] != w.in_features:
        raise ValueError(f"{op}: x is {list(x.shape)}: required [..., {w.in_features}], the matrix's input features")
    if x.device != w.device:
        raise ValueError(f"{op}: x on {x.device}: required {w.device}, as the matrix")


def linear(x: Tensor, w: TrellisWeight, *, out_dtype: torch.dtype | None = None, mode: str = "exact") -> Tensor:
    """x W + bias for one EXL3 matrix.

    x: [..., in_features] fp16, bf16 or fp32, any leading shape (also empty) and any strides. Returns [..., out_features],
    contiguous, in `out_dtype` (default: that of x). Weights are exact; the rotated activations are rounded to fp16 once,
    under a power of two a row, so any finite x gives a right result wherever that fits `out_dtype`. Sums are fp32, rounded
    once. mode, with the error of y before its rounding to `out_dtype`, relative in the root mean square, as measured with the
    kernels in Triton's interpreter at 2048 inputs (on a CPU "exact" and "precise" are the same fp32 product):

        exact    2.0e-4, the rounding of the activations
        precise  2e-7: exact weights, activations as two fp16 values each; twice the matrix products
        split    MCG and 3INST only, 3.0e-4: weights are their two summands, not rounded to fp16; as exact where weights are
                 decoded once (more than 255 rows)
        int8     MUL1 only, 8.3e-3: activations rounded to int8 with one scale a row, weights not rounded to fp16, sums in
                 int32; at most 32768 input features

    Raises ValueError for another dtype, width, device or mode, and for a codebook that the mode does not know.
    """
    out_dtype = out_dtype or x.dtype
    _check("linear", x, w, out_dtype)
    check_mode("linear", mode, [w])
    sizes = (int(w.codebook), w.out_features)
    return call(_linear_op, _linear_body, x, w.trellis, w.suh, w.svh, w.bias, *sizes, out_dtype, mode)


def linears(
    x: Tensor, weights: Sequence[TrellisWeight], *, out_dtype: torch.dtype | None = None, mode: str = "exact"
) -> list[Tensor]:
    """[linear(x, w) for w in weights] in one launch: projections that share an input, such as q, k and v, or gate and up.

    x: [..., in_features]; rates, codebooks and output sizes of the matrices may differ, their input size must not. Raises
    ValueError as `linear` does, or for an empty list.
    """
    out_dtype = out_dtype or x.dtype
    if not weights:
        raise ValueError("linears: no matrices: required at least one")
    for w in weights:
        _check("linears", x, w, out_dtype)
    check_mode("linears", mode, weights)
    return call(
        _linears_op,
        _linears_body,
        x,
        [w.trellis for w in weights],
        [w.suh for w in weights],
        [w.svh for w in weights],
        [w.bias for w in weights],
        [int(w.codebook) for w in weights],
        [w.out_features for w in weights],
        out_dtype,
        mode,
    )
