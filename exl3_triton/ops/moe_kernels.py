"""The kernels of the grouped mixture of experts; `moe.py` launches them and says how they follow one another.

Rows are addressed by route (token * top_k + slot) throughout: the packed order lives in the GEMM's row list alone, so every
intermediate sits where its route says and the final sum over a token's slots runs in slot order.
"""

from ._triton import start_next, tl, triton, wait_previous
from .hadamard import exponent_of, power_of_two, rotate_rows, rotate_scaled, row_shift, scale_by_power
from .layout import k_position
from .routes import pack_expert, valid_expert
from .trellis import decode_tiles, decode_words, load_tiles, tile_address


@triton.jit
def _bound_of_row(x_row, suh, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCKS: tl.constexpr):
    """The largest exponent_of(x) + exponent_of(suh) of a row, BLOCKS rotation blocks at a time."""
    bound = tl.full((BLOCKS * 128,), -254, tl.int32)
    for start in tl.static_range(0, PADDED, BLOCKS * 128):
        k = start + tl.arange(0, BLOCKS * 128)
        value = tl.load(x_row + k, mask=k < WIDTH, other=0.0).to(tl.float32)
        scale = tl.load(suh + k, mask=k < WIDTH, other=0.0).to(tl.float32)
        bound = tl.maximum(bound, exponent_of(value) + exponent_of(scale))
    return tl.max(bound, axis=0)


@triton.jit
def _rotate_row(
    pid, x, suh_gate, suh_up, ids, expert_map, xh, x_exponent,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr, E: tl.constexpr,
    MAPPED: tl.constexpr, TOP_K: tl.constexpr, PER_ROUTE: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr,
    GATE_SHARED: tl.constexpr, UP_SHARED: tl.constexpr,
    VARIANT: tl.constexpr,
):  # fmt: skip
    """Part pid % PARTS of one (row, projection): xh = fp16(hadamard(x * suh) * scale), BLOCKS rotation blocks at a time.

    Rows are routes, or tokens where all experts share suh. Every part finds the row's scale on its own.
    """
    part = pid % PARTS
    pid = pid // PARTS
    row = (pid // COUNT).to(tl.int64)
    projection = FIRST + pid % COUNT
    token = row
    expert = row * 0
    if PER_ROUTE:
        token = row // TOP_K
        expert = valid_expert(ids, expert_map, row, True, E, MAPPED)
    if expert >= 0:
        if projection == 0:
            suh = suh_gate + (0 if GATE_SHARED else expert * PADDED)
        else:
            suh = suh_up + (0 if UP_SHARED else expert * PADDED)
        x_row = x + token * WIDTH
        shift = row_shift(_bound_of_row(x_row, suh, WIDTH, PADDED, BLOCKS))
        out = xh + (row * COUNT + pid % COUNT) * PADDED
        first = part * (BLOCKS * 128)
        for start in tl.static_range(0, PADDED, PARTS * BLOCKS * 128):
            columns = first + start + tl.arange(0, BLOCKS)[:, None] * 128 + tl.arange(0, 128)[None, :]
            mask = columns < PADDED
            value = tl.load(x_row + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
            scale = tl.load(suh + columns, mask=mask, other=0.0).to(tl.float32)
            tl.store(out + k_position(columns, VARIANT), rotate_scaled(value, scale, shift, BLOCKS), mask=mask)
        if part == 0:
            tl.store(x_exponent + row * 2 + projection, -shift)


@triton.jit(do_not_specialize=["routes"])
def prologue_kernel(
    x, suh_gate, suh_up, ids, expert_map, routes, xh, x_exponent, packed, block_expert, block_rows, num_blocks,
    PACK: tl.constexpr, E_PAD: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr, E: tl.constexpr,
    MAPPED: tl.constexpr, TOP_K: tl.constexpr, PER_ROUTE: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr,
    GATE_SHARED: tl.constexpr, UP_SHARED: tl.constexpr,
    VARIANT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Input rotations, and (PACK) the route packing in the first E programs: independent of each other, so one launch."""
    pid = tl.program_id(0)
    wait_previous(OVERLAP)
    start_next(OVERLAP)
    if PACK and pid < E:
        pack_expert(
            pid, ids, expert_map, routes, packed, block_expert, block_rows, num_blocks, E, MAPPED, E_PAD, BLOCK_M, CHUNK
        )
    else:
        _rotate_row(
            pid - (E if PACK else 0), x, suh_gate, suh_up, ids, expert_map, xh, x_exponent,
            WIDTH, PADDED, BLOCKS, PARTS, E, MAPPED, TOP_K, PER_ROUTE, FIRST, COUNT, GATE_SHARED, UP_SHARED, VARIANT,
        )  # fmt: skip


@triton.jit
def _multiply(
    acc, tail, x_rows, x_tail, words, k_tile, n_tile, steps,
    FORMAT: tl.constexpr, TILES_N: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TAIL_M: tl.constexpr, VARIANT: tl.constexpr,
    PREFETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """acc += W^T x^T over `steps` blocks of k from tile (k_tile, n_tile) on; a decoded tile serves all rows of the block."""
    TWICE_BITS: tl.constexpr = FORMAT // 4
    CODEBOOK: tl.constexpr = FORMAT % 4
    ROW_WORDS: tl.constexpr = TILES_N * 4 * TWICE_BITS
    tile_words = tile_address(words, k_tile, n_tile, TILES_N, TWICE_BITS)
    k = tl.arange(0, BLOCK_K)
    if PREFETCH:
        tl.static_assert(TAIL_M == 0, "a block in two parts cannot be loaded ahead")
        raw = load_tiles(tile_words, ROW_WORDS, TWICE_BITS, BLOCK_K // 16, BLOCK_N // 16, VARIANT)
        wait_previous(OVERLAP)
        x = tl.load(x_rows[None, :] + k[:, None])
        for step in range(1, steps):
            tile_words += BLOCK_K // 16 * ROW_WORDS
            raw_next = load_tiles(tile_words, ROW_WORDS, TWICE_BITS, BLOCK_K // 16, BLOCK_N // 16, VARIANT)
            x_next = tl.load(x_rows[None, :] + (step * BLOCK_K + k)[:, None])
            w = decode_words(raw, TWICE_BITS, CODEBOOK, BLOCK_K // 16, BLOCK_N // 16, VARIANT)
            acc = tl.dot(w, x, acc)
            raw = raw_next
            x = x_next
        w = decode_words(raw, TWICE_BITS, CODEBOOK, BLOCK_K // 16, BLOCK_N // 16, VARIANT)
        acc = tl.dot(w, x, acc)
    else:
        wait_previous(OVERLAP)
        for step in range(steps):
            at = (step * BLOCK_K + k)[:, None]
            w = decode_tiles(tile_words, ROW_WORDS, TWICE_BITS, CODEBOOK, BLOCK_K // 16, BLOCK_N // 16, VARIANT)
            acc = tl.dot(w, tl.load(x_rows[None, :] + at), acc)
            if TAIL_M > 0:
                tail = tl.dot(w, tl.load(x_tail[None, :] + at), tail)
            tile_words += BLOCK_K // 16 * ROW_WORDS
    return acc, tail


@triton.jit
def _block_routes(packed, block_rows, lanes):
    """(routes int64, which of them are real): lanes past the block's end repeat its last row, so that loads need no mask."""
    rows = tl.load(block_rows, volatile=True)
    return tl.load(packed + tl.minimum(lanes, rows - 1), volatile=True).to(tl.int64), lanes < rows


@triton.jit
def _store_result(
    acc, out, half_exponent, route, live, row_offset, n, tile,
    ROW: tl.constexpr, TILES: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """acc fp32 [BLOCK_N, rows] to the rows' places; HALF: as fp16 under a power-of-two scale per row and tile of columns."""
    at = (row_offset + route)[None, :] * ROW + n[:, None]
    if HALF:
        shift = tl.minimum(14 - exponent_of(tl.max(tl.abs(acc), axis=0)), 40)
        tl.store(out + at, (acc * power_of_two(shift)[None, :]).to(tl.float16), mask=live[None, :])
        tl.store(half_exponent + route * TILES + tile, -shift, mask=live)
    else:
        tl.store(out + at, acc, mask=live[None, :])


@triton.jit
def _block(
    xh, words, table, packed, block_rows, out, half_exponent, side, split, tile, n, row_offset,
    K_DIM: tl.constexpr, N_DIM: tl.constexpr, FORMATS: tl.constexpr, COUNT: tl.constexpr, OUT_COUNT: tl.constexpr,
    X_DIV: tl.constexpr, SPLIT: tl.constexpr, HALF: tl.constexpr, MAIN_M: tl.constexpr, TAIL_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VARIANT: tl.constexpr, PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One block of up to MAIN_M + TAIL_M rows of one expert, BLOCK_N of its outputs, one part of k."""
    TILES: tl.constexpr = N_DIM // BLOCK_N
    STEPS: tl.constexpr = (K_DIM // BLOCK_K + SPLIT - 1) // SPLIT  # of a part; the last one may be shorter
    offset = tl.load(table) // 2  # int16 -> int32 words
    lanes = tl.arange(0, MAIN_M)
    tail_lanes = MAIN_M + tl.arange(0, TAIL_M if TAIL_M > 0 else 1)
    start = split * (STEPS * BLOCK_K)
    route, _ = _block_routes(packed, block_rows, lanes)
    x_rows = xh + (route // X_DIV * COUNT + side) * K_DIM + start
    acc = tl.zeros((BLOCK_N, MAIN_M), tl.float32)
    if TAIL_M > 0:
        route, _ = _block_routes(packed, block_rows, tail_lanes)
        x_tail = xh + (route // X_DIV * COUNT + side) * K_DIM + start
        tail = tl.zeros((BLOCK_N, TAIL_M), tl.float32)
    else:
        x_tail = xh
        tail = 0.0
    if len(FORMATS) == 1:
        present = FORMATS[0]
    else:
        present = tl.load(table + 1) * 4 + tl.load(table + 2)
    for i in tl.static_range(len(FORMATS)):
        if present == FORMATS[i]:
            acc, tail = _multiply(
                acc, tail, x_rows, x_tail, words + offset, start // 16, tile * (BLOCK_N // 16),
                STEPS if K_DIM % (SPLIT * BLOCK_K) == 0 else tl.minimum(STEPS, K_DIM // BLOCK_K - split * STEPS),
                FORMATS[i], N_DIM // 16, BLOCK_N, BLOCK_K, TAIL_M, VARIANT, PREFETCH, OVERLAP,
            )  # fmt: skip
    start_next(OVERLAP)
    ROW: tl.constexpr = OUT_COUNT * N_DIM
    route, live = _block_routes(packed, block_rows, lanes)  # again, so that no register holds them through the loop
    _store_result(acc, out, half_exponent, route, live, row_offset, n, tile, ROW, TILES, HALF)
    if TAIL_M > 0:
        route, live = _block_routes(packed, block_rows, tail_lanes)
        _store_result(tail, out, half_exponent, route, live, row_offset, n, tile, ROW, TILES, HALF)


@triton.jit(do_not_specialize=["routes", "first"])
def expert_gemm_kernel(
    xh, gate_words, gate_table, up_words, up_table, packed, block_expert, block_rows, num_blocks, out, half_exponent, routes,
    first, K_DIM: tl.constexpr, N_DIM: tl.constexpr, FORMATS: tl.constexpr, COUNT: tl.constexpr,
    OUT_COUNT: tl.constexpr, X_DIV: tl.constexpr, SPLIT: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr,
    SMALL_M: tl.constexpr, MAIN_M: tl.constexpr, TAIL_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    VARIANT: tl.constexpr, PREFETCH: tl.constexpr, PACKED_BEFORE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grouped GEMM over packed routes in the rotated basis. Grid: (COUNT * N_DIM / BLOCK_N * SPLIT, blocks).

    xh fp16 [rows, COUNT, K_DIM], row = route // X_DIV; out [SPLIT, routes, OUT_COUNT, N_DIM] (fp32, or HALF). COUNT
    projections of one input (gate and up) share the launch; the first is number `first` of OUT_COUNT. FORMATS: the
    (4 * 2K + codebook) present, one branch each.
    A block of at most SMALL_M rows (0: none) runs as one of SMALL_M. PACKED_BEFORE: the packing is older than the kernel
    before this one, so it can be read while that one still runs (OVERLAP).
    """
    TILES: tl.constexpr = N_DIM // BLOCK_N
    block = tl.program_id(1)
    wait_previous(OVERLAP and not PACKED_BEFORE)
    if block >= tl.load(num_blocks):
        wait_previous(OVERLAP)  # no program may end before the kernel before this one: those behind it rely on that
        return
    pid = tl.program_id(0)
    tile = pid % TILES
    split = pid // TILES % SPLIT
    side = pid // (TILES * SPLIT)
    expert = tl.load(block_expert + block)
    if COUNT == 2:
        words = gate_words if side == 0 else up_words
        table = gate_table if side == 0 else up_table
    else:
        words = gate_words
        table = gate_table
    table += expert * 3
    packed += block * BLOCK_M
    block_rows += block
    n = (first + side) * N_DIM + tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_offset = split.to(tl.int64) * routes
    if SMALL_M > 0 and tl.load(block_rows) <= SMALL_M:
        _block(
            xh, words, table, packed, block_rows, out, half_exponent, side, split, tile, n, row_offset,
            K_DIM, N_DIM, FORMATS, COUNT, OUT_COUNT, X_DIV, SPLIT, HALF, SMALL_M, 0, BLOCK_N, BLOCK_K, VARIANT, PREFETCH,
            OVERLAP,
        )  # fmt: skip
    else:
        _block(
            xh, words, table, packed, block_rows, out, half_exponent, side, split, tile, n, row_offset,
            K_DIM, N_DIM, FORMATS, COUNT, OUT_COUNT, X_DIV, SPLIT, HALF, MAIN_M, TAIL_M, BLOCK_N, BLOCK_K, VARIANT, PREFETCH,
            OVERLAP,
        )  # fmt: skip


@triton.jit
def _unrotate(
    raw, exponent, scale, route, routes, projection, columns, mask,
    I_PAD: tl.constexpr, BLOCKS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Output side of gate or up for one route: the split sums in ascending order, rotation, scale, svh (`scale`)."""
    v = tl.zeros((BLOCKS, 128), tl.float32)
    for split in tl.static_range(SPLIT):
        at = ((split * routes.to(tl.int64) + route) * 2 + projection) * I_PAD
        v += tl.load(raw + at + columns, mask=mask, other=0.0)
    return scale_by_power(rotate_rows(v, BLOCKS), exponent) * scale.to(tl.float32)


@triton.jit(do_not_specialize=["routes"])
def activation_kernel(
    raw, x_exponent, gate_svh, up_svh, down_suh, ids, expert_map, act, act_exponent, routes, limit,
    INNER: tl.constexpr, I_PAD: tl.constexpr, BLOCKS: tl.constexpr, E: tl.constexpr, MAPPED: tl.constexpr, SPLIT: tl.constexpr,
    X_DIV: tl.constexpr, GATE_SHARED: tl.constexpr, UP_SHARED: tl.constexpr, DOWN_SHARED: tl.constexpr, LIMITED: tl.constexpr,
    VARIANT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One route: gate and up out of the rotated basis, silu(gate) * up in fp32, into down's rotated basis as scaled fp16."""
    route = tl.program_id(0).to(tl.int64)
    expert = valid_expert(ids, expert_map, route, True, E, MAPPED)  # ids are older than the kernel before this one
    columns = tl.arange(0, BLOCKS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = columns < I_PAD
    owned = mask & (expert >= 0)
    gate_scale = tl.load(gate_svh + (0 if GATE_SHARED else expert * I_PAD) + columns, mask=owned, other=0.0)
    up_scale = tl.load(up_svh + (0 if UP_SHARED else expert * I_PAD) + columns, mask=owned, other=0.0)
    scale = tl.load(down_suh + (0 if DOWN_SHARED else expert * I_PAD) + columns, mask=owned, other=0.0).to(tl.float32)
    wait_previous(OVERLAP)
    start_next(OVERLAP)
    if expert >= 0:
        exponents = x_exponent + route // X_DIV * 2
        g = _unrotate(raw, tl.load(exponents), gate_scale, route, routes, 0, columns, mask, I_PAD, BLOCKS, SPLIT)
        u = _unrotate(raw, tl.load(exponents + 1), up_scale, route, routes, 1, columns, mask, I_PAD, BLOCKS, SPLIT)
        if LIMITED:  # comparisons, so that a NaN stays one
            g = tl.where(g > limit, limit, g)
            u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        v = g / (1.0 + tl.exp(-g)) * u
        v = tl.where(columns < INNER, v, 0.0)
        bound = tl.where(mask, exponent_of(v) + exponent_of(scale), -254)
        shift = row_shift(tl.max(tl.max(bound, axis=1), axis=0))
        tl.store(act + route * I_PAD + k_position(columns, VARIANT), rotate_scaled(v, scale, shift, BLOCKS), mask=mask)
        tl.store(act_exponent + route, -shift)


@triton.jit
def combine_kernel(
    down, half_exponent, act_exponent, down_svh, ids, expert_map, weights, out,
    H: tl.constexpr, H_PAD: tl.constexpr, BLOCKS: tl.constexpr, E: tl.constexpr, MAPPED: tl.constexpr, TOP_K: tl.constexpr,
    SPLIT: tl.constexpr, SHARED: tl.constexpr, HALF: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[t] = fp32 sum, in slot order, of weight * svh * hadamard(down row), rounded once. Grid: (T, chunks of columns)."""
    token = tl.program_id(0).to(tl.int64)
    tiles = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    columns = tiles * 128 + tl.arange(0, 128)[None, :]
    mask = columns < H_PAD
    wait_previous(OVERLAP)
    start_next(OVERLAP)
    acc = tl.zeros((BLOCKS, 128), tl.float32)
    for slot in tl.static_range(TOP_K):
        route = token * TOP_K + slot
        expert = valid_expert(ids, expert_map, route, True, E, MAPPED)
        live = expert >= 0  # masks, not a branch: the loads of all slots are in flight together
        v = tl.load(down + route * H_PAD + columns, mask=mask & live, other=0.0).to(tl.float32)
        for part in tl.static_range(1, SPLIT):
            at = (part * tl.num_programs(0).to(tl.int64) * TOP_K + route) * H_PAD
            v += tl.load(down + at + columns, mask=mask & live, other=0.0)
        exponent = tl.load(act_exponent + route, mask=live, other=0)
        if HALF:
            exponent += tl.load(half_exponent + route * (H_PAD // 128) + tiles, mask=live & (tiles < H_PAD // 128), other=0)
        svh = down_svh + (0 if SHARED else expert * H_PAD)
        v = rotate_rows(scale_by_power(v, exponent), BLOCKS)
        v *= tl.load(svh + columns, mask=mask & live, other=0.0).to(tl.float32)
        acc += v * tl.load(weights + route, mask=live, other=0.0)
    tl.store(out + token * H + columns, acc.to(out.dtype.element_ty), mask=columns < H)
