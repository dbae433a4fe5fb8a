"""Kernels of `linear` for few rows: the product, which decodes each weight on its way into the matrix instruction, and the sum
of its parts over k.
"""

from ._triton import start_next, tl, triton, wait_previous
from .decode_once import finish_rows
from .hadamard import rotate_columns, scale_by_power
from .modes import raw_product
from .trellis import decode_tiles, decode_words, load_tiles


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
def product_kernel(
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


@triton.jit(do_not_specialize=["m"])
def reduce_kernel(
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
            finish_rows(
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
