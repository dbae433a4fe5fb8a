"""Mixture of experts over trellis weights: routed rows through gate, up, activation and down, in five or seven launches.

1. prologue: route packing, and x * suh rotated to fp16 (both projections; prefill: gate alone)
2. grouped GEMM: gate and up, fp32 sums in the rotated basis (prefill: gate, then 2b. rotation for up, 2c. GEMM for up, so that
   both share one buffer of rotated rows)
3. activation: output rotations, svh, silu(gate) * up, suh of down, rotation, fp16
4. grouped GEMM: down (decode: fp32; prefill: fp16 scaled by row and column tile)
5. combine: output rotation, svh, router weight, fp32 sum in slot order, one rounding

Nothing here reads data on the host, allocates by data, or changes with the number of rows: tiles and the split of k belong to
the regime (`Regime`), which the plan fixes. All scratch is one caller-owned arena, laid out by `arena_layout`.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..format import ExpertProjection, ExpertWeights
from ._args import check_float
from ._dispatch import call, device_guard, launchable, overlap, register_limit, use_triton
from ._triton import triton
from .layout import K_ORDER4, layout_variant, layout_variant_for
from .moe_kernels import activation_kernel, combine_kernel, expert_gemm_kernel, prologue_kernel
from .routes import experts_padded, id_chunk, max_blocks
from .trellis import trellis_words
from .tuning import device_of

if TYPE_CHECKING:
    from ..plan import MoePlan

BLOCKS_M = (8, 16, 32, 48, 64, 128)
"""Legal numbers of rows in a block of one expert; 48 runs as 32 + 16."""

ALIGNMENT = 256  # bytes; every view of the arena starts on a multiple
MAX_EXPERTS = 1024
MAX_TOP_K = 32
_BLOCK_N = 128


class Dims(NamedTuple):
    """Stored (128-padded) sizes of a layer's experts."""

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int


class Regime(NamedTuple):
    """How calls of up to `rows` tokens run: everything that the order of summation and the scratch depend on.

    The last five are a `Tile`; with block_k = 0 it is the device's, `tile_for`.
    """

    rows: int
    block_m: int
    split: int  # parts that k of gate and up is cut into, each summed on its own
    down_split: int  # the same for down; 1 where `half` is set
    sequential: int  # 1: gate and up go one after the other through one buffer of rotated rows
    half: int  # 1: down's results wait for the combination as scaled fp16, 0: as fp32
    block_k: int = 0
    warps: int = 0
    registers: int = 0
    small: int = 0
    prefetch: int = 0

    def tile(self, family: str) -> "Tile":
        """The grouped GEMM's tile on a device family of `tuning.Device`."""
        if self.block_k:
            return Tile(self.block_k, self.warps, self.registers or None, self.small, bool(self.prefetch))
        return tile_for(self.block_m, family)

    def blocks(self, dims: Dims) -> int:
        """Most blocks of `block_m` rows that any routing of `rows` tokens can need."""
        return max_blocks(self.rows * dims.top_k, dims.num_experts, self.block_m)


class View(NamedTuple):
    """One tensor in the arena."""

    offset: int  # bytes
    dtype: torch.dtype
    numel: int


class Scratch(NamedTuple):
    """What a call writes before it reads: one typed view each. See `arena_layout` for the sizes."""

    packed: Tensor
    block_expert: Tensor
    block_rows: Tensor
    num_blocks: Tensor
    x_exponent: Tensor
    act_exponent: Tensor
    half_exponent: Tensor
    raw: Tensor
    act: Tensor
    rotated: Tensor
    down: Tensor


def arena_layout(dims: Dims, regime: Regime) -> tuple[dict[str, View], int]:
    """The views of one regime's arena and its size in bytes.

    With R = rows * top_k routes, B = `Regime.blocks` blocks and every view rounded up to 256 bytes:
    packed 4 B block_m, block_expert 4 B, block_rows 4 B, num_blocks 4, x_exponent 8 R, act_exponent 4 R,
    half_exponent 4 R H/128 (half only), raw 8 R I split, act 2 R I, and one region that first holds the rotated input,
    2 R H (sequential) or 4 R H, and then down's results, 2 R H (half) or 4 R H down_split.
    """
    routes = regime.rows * dims.top_k
    blocks = regime.blocks(dims)
    hidden = routes * dims.hidden
    small = {"packed": blocks * regime.block_m, "block_expert": blocks, "block_rows": blocks, "num_blocks": 1}
    parts: dict[str, tuple[torch.dtype, int]] = {name: (torch.int32, numel) for name, numel in small.items()}
    parts["x_exponent"] = (torch.int32, 2 * routes)
    parts["act_exponent"] = (torch.int32, routes)
    parts["half_exponent"] = (torch.int32, hidden // _BLOCK_N if regime.half else 1)
    parts["raw"] = (torch.float32, 2 * routes * dims.intermediate * regime.split)
    parts["act"] = (torch.float16, routes * dims.intermediate)
    parts["rotated"] = (torch.float16, hidden if regime.sequential else 2 * hidden)
    views: dict[str, View] = {}
    offset = 0
    for name, (dtype, numel) in parts.items():
        views[name] = View(offset, dtype, numel)
        offset += -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    shared = views["rotated"].offset  # the rotated input is spent before down writes
    down = View(shared, torch.float16 if regime.half else torch.float32, hidden * regime.down_split)
    views["down"] = down
    return views, max(offset, shared + -(-down.numel * down.dtype.itemsize // ALIGNMENT) * ALIGNMENT)


def carve(arena: Tensor, dims: Dims, regime: Regime) -> Scratch:
    """The arena's typed views for one regime. Raises ValueError when it is too small, no uint8 vector, or misaligned."""
    views, size = arena_layout(dims, regime)
    if arena.dtype != torch.uint8 or arena.dim() != 1 or not arena.is_contiguous():
        raise ValueError(f"moe: arena is {arena.dtype} {list(arena.shape)}: required a contiguous uint8 vector")
    if arena.numel() < size:
        raise ValueError(f"moe: arena has {arena.numel()} bytes: required {size} for {regime.rows} rows (plan.arena_bytes)")
    if arena.data_ptr() % 16:
        raise ValueError(f"moe: arena starts at {arena.data_ptr():#x}: required alignment to 16 bytes")
    parts = {name: arena.narrow(0, view.offset, view.numel * view.dtype.itemsize) for name, view in views.items()}
    return Scratch(**{name: part.view(views[name].dtype) for name, part in parts.items()})


class Tile(NamedTuple):
    """Launch parameters of the grouped GEMM; BLOCK_N is 128 throughout."""

    block_k: int
    warps: int
    registers: int | None = None  # most a thread may use; what is left decides how many programs share a multiprocessor
    small: int = 0  # blocks of at most this many rows take a narrower matrix instruction; 0: there is one size
    prefetch: bool = False  # whether the next step's words and activations are loaded before the present one is decoded


def tile_for(block_m: int, family: str) -> Tile:
    """The tile for blocks of `block_m` rows on a device family of `tuning.Device`."""
    if family != "sm_90":
        return Tile(128, 4) if block_m <= 32 else Tile(64, 8)
    # fewest registers without spills in the loop: 8 rows take 80 without a limit, and spill with one
    if block_m == 8:
        return Tile(64, 4, prefetch=True)
    if block_m in (16, 48):  # 48 is two products a step, which cannot be loaded ahead
        return Tile(128, 4, 80)
    if block_m == 32:
        return Tile(64, 4, prefetch=True)
    return Tile(64, 8, 80, 32) if block_m == 64 else Tile(64, 8, 128, 64)


def _shared(vectors: Tensor) -> bool:
    return vectors.shape[0] == 1


def _variant(device: torch.device, block_m: int) -> int:
    """The decode layout for a block: with 8 rows sm_90 runs its predecessors' matrix instruction, in their order of k."""
    if block_m < 16 and device.type == "cuda" and not torch.version.hip:
        return layout_variant(device) | (layout_variant_for("cuda", 80) & K_ORDER4)
    return layout_variant(device)


class _Call(NamedTuple):
    """What all launches of one call share."""

    dims: Dims
    regime: Regime
    scratch: Scratch
    routes: int
    variant: int
    overlap: dict[str, Any]  # `_dispatch.overlap`

    def gemm(
        self, xh: Tensor, sides: list[list[Tensor]], formats: tuple[int, ...], out: Tensor, *,
        k: int, n: int, first: int = 0, out_count: int = 1, x_div: int = 1, split: int = 1, half: int = 0,
        packed_before: bool = False,
    ) -> None:  # fmt: skip
        """One grouped GEMM; `sides` are the projections (one, or gate and up) that share the rows `xh`."""
        dims, regime, s = self.dims, self.regime, self.scratch
        tile = regime.tile(device_of(xh.device).family)
        (words, table), (last_words, last_table) = ((trellis_words(side[0]), side[1]) for side in (sides[0], sides[-1]))
        main = 32 if regime.block_m == 48 else regime.block_m
        grid = (len(sides) * (n // _BLOCK_N) * split, max_blocks(self.routes, dims.num_experts, regime.block_m))
        expert_gemm_kernel[grid](
            xh, words, table, last_words, last_table, s.packed, s.block_expert, s.block_rows, s.num_blocks, out,
            s.half_exponent, self.routes, first, K_DIM=k, N_DIM=n, FORMATS=formats, COUNT=len(sides),
            OUT_COUNT=out_count, X_DIV=x_div, SPLIT=split, HALF=bool(half), BLOCK_M=regime.block_m, SMALL_M=tile.small,
            MAIN_M=main, TAIL_M=regime.block_m - main, BLOCK_N=_BLOCK_N, BLOCK_K=tile.block_k, VARIANT=self.variant,
            PREFETCH=tile.prefetch, PACKED_BEFORE=packed_before, num_warps=tile.warps, num_stages=1, **self.overlap,
            **register_limit(tile.registers),
        )  # fmt: skip


def _launch_moe(
    x: Tensor, ids: Tensor, weights: Tensor, gate: list[Tensor], up: list[Tensor], down: list[Tensor],
    formats: tuple[tuple[int, ...], ...], intermediate: int, dims: Dims, regime: Regime, s: Scratch, limit: float | None,
    expert_map: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """The launches for at most `regime.rows` tokens, contiguous tensors; see the module's docstring for their order."""
    tokens, width = x.shape
    routes = tokens * dims.top_k
    mapped = 0 if expert_map is None else expert_map.numel()
    where = ids if expert_map is None else expert_map  # a pointer that nobody reads where there is no map
    run = _Call(dims, regime, s, routes, _variant(x.device, regime.block_m), overlap(x.device, tokens))
    per_route = not (_shared(gate[2]) and _shared(up[2]))
    rows, x_div = (routes, 1) if per_route else (tokens, dims.top_k)
    chunk = min(16, triton.next_power_of_2(dims.hidden // 128))  # rotation blocks at a time
    parts = 1 if regime.half else triton.cdiv(dims.hidden // 128, chunk)

    def rotate(first: int, count: int) -> None:
        pack = first == 0
        prologue_kernel[(rows * count * parts + (dims.num_experts if pack else 0),)](
            x, gate[2], up[2], ids, where, routes, s.rotated, s.x_exponent, s.packed, s.block_expert, s.block_rows,
            s.num_blocks, PACK=pack, E_PAD=experts_padded(dims.num_experts), BLOCK_M=regime.block_m, CHUNK=id_chunk(routes),
            WIDTH=width, PADDED=dims.hidden, BLOCKS=chunk, PARTS=parts, E=dims.num_experts, MAPPED=mapped, TOP_K=dims.top_k,
            PER_ROUTE=per_route, FIRST=first, COUNT=count, GATE_SHARED=_shared(gate[2]), UP_SHARED=_shared(up[2]),
            VARIANT=run.variant, num_warps=4, **run.overlap,
        )  # fmt: skip

    with device_guard(x):
        wide: dict[str, Any] = {
            "k": dims.hidden,
            "n": dims.intermediate,
            "out_count": 2,
            "x_div": x_div,
            "split": regime.split,
        }
        if regime.sequential:
            for first, side in enumerate((gate, up)):
                rotate(first, 1)
                run.gemm(s.rotated, [side], formats[first], s.raw, first=first, **wide)
        else:
            rotate(0, 2)
            run.gemm(s.rotated, [gate, up], tuple(sorted({*formats[0], *formats[1]})), s.raw, **wide)
        activation_kernel[(routes,)](
            s.raw, s.x_exponent, gate[3], up[3], down[2], ids, where, s.act, s.act_exponent, routes, limit or 0.0,
            INNER=intermediate, MAPPED=mapped, I_PAD=dims.intermediate,
            BLOCKS=triton.next_power_of_2(dims.intermediate // 128), E=dims.num_experts, SPLIT=regime.split, X_DIV=x_div,
            GATE_SHARED=_shared(gate[3]), UP_SHARED=_shared(up[3]), DOWN_SHARED=_shared(down[2]), LIMITED=limit is not None,
            VARIANT=run.variant, num_warps=4, **run.overlap,
        )  # fmt: skip
        last: dict[str, Any] = {"k": dims.intermediate, "n": dims.hidden, "split": regime.down_split, "half": regime.half}
        run.gemm(s.act, [down], formats[2], s.down, packed_before=True, **last)
        blocks, warps = (8, 4) if regime.half else (2, 1)
        combine_kernel[(tokens, triton.cdiv(dims.hidden // 128, blocks))](
            s.down, s.half_exponent, s.act_exponent, down[3], ids, where, weights, out, H=width, H_PAD=dims.hidden,
            BLOCKS=blocks, E=dims.num_experts, MAPPED=mapped, TOP_K=dims.top_k, SPLIT=regime.down_split,
            SHARED=_shared(down[3]), HALF=bool(regime.half), num_warps=warps, **run.overlap,
        )  # fmt: skip


class Schedule(NamedTuple):
    """Which rows run how: the part of a plan that a run needs, as integers that a custom op can carry (`encode`).

    max_tokens: most rows of a call. decode: serves min_rows .. decode.rows; prefill: regimes in ascending order of rows, which
    serve more than decode takes, in slices of at most what the last one takes. Rows that neither serves take the reference
    path, `chunk` rows at a time.
    """

    max_tokens: int
    min_rows: int
    chunk: int
    decode: Regime | None
    prefill: tuple[Regime, ...]

    @property
    def regimes(self) -> tuple[Regime, ...]:
        """All regimes, in ascending order of rows."""
        return self.prefill if self.decode is None else (self.decode, *self.prefill)

    def encode(self) -> list[int]:
        """As a flat list of integers."""
        decode = self.decode or Regime(0, 0, 0, 0, 0, 0)
        return [self.max_tokens, self.min_rows, self.chunk, *decode, *(value for regime in self.prefill for value in regime)]

    @classmethod
    def decode_ints(cls, values: list[int]) -> "Schedule":
        """The inverse of `encode`."""
        size = len(Regime._fields)
        decode, *prefill = (Regime(*values[at : at + size]) for at in range(3, len(values), size))
        max_tokens, min_rows, chunk = values[:3]
        return cls(max_tokens, min_rows, chunk, decode if decode.rows else None, tuple(prefill))

    def slices(self, tokens: int) -> list[tuple[int, int, Regime | None]]:
        """(start, end, regime) for a call of `tokens` rows, None for the reference path; ValueError above max_tokens."""
        if tokens > self.max_tokens:
            raise ValueError(
                f"moe: {tokens} rows, the plan was made for at most max_tokens={self.max_tokens}: `replan` grows it"
            )
        if self.decode is not None and self.min_rows <= tokens <= self.decode.rows:
            return [(0, tokens, self.decode)]
        if not self.prefill or tokens < self.min_rows:
            return [(start, min(start + self.chunk, tokens), None) for start in range(0, tokens, self.chunk)]
        step = self.prefill[-1].rows
        slices = [(start, min(start + step, tokens)) for start in range(0, tokens, step)]
        return [(start, end, next(r for r in self.prefill if end - start <= r.rows)) for start, end in slices]


def _projection(tensors: list[Tensor]) -> ExpertProjection:
    layout = tuple((offset, twice_bits, codebook) for offset, twice_bits, codebook in tensors[1].tolist())
    return ExpertProjection(tensors[0], layout, tensors[1], tensors[2], tensors[3])


def _refuse_capture(tokens: int) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"moe: {tokens} rows fall outside of the plan's windows, and the reference path that serves them cannot run in a "
            "CUDA graph capture: widen EXL3_TRITON_MIN_M/EXL3_TRITON_MAX_M or leave EXL3_TRITON_PREFILL on"
        )


_launched: set[tuple] = set()  # the kinds of calls whose kernels this process has compiled and loaded


def _refuse_cold_capture(x: Tensor) -> None:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"moe: the first call of its kind ({x.shape[0]} rows of {x.dtype}) came inside a CUDA graph capture, where "
            "kernels can be neither compiled nor loaded: call `exl3_triton.warmup`, or make the same call, before it"
        )


def _local_ids(ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """Global ids to local ones, -1 where there is none."""
    if expert_map is None:
        return ids
    legal = (ids >= 0) & (ids < expert_map.numel())
    return torch.where(legal, expert_map[torch.where(legal, ids, 0).long()], -1)


def run_moe(
    x: Tensor, ids: Tensor, weights: Tensor, gate: list[Tensor], up: list[Tensor], down: list[Tensor],
    formats: tuple[tuple[int, ...], ...], intermediate: int, schedule: Schedule, scratch: dict[Regime, Scratch],
    limit: float | None, expert_map: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """Runs a call over prepared scratch, slice after slice; every argument is checked already. `out` [T, H] is written."""
    dims = Dims(gate[2].shape[1], gate[3].shape[1], gate[1].shape[0], ids.shape[1])
    slices = schedule.slices(x.shape[0])
    if slices and slices[0][2] is None:
        _refuse_capture(x.shape[0])
        experts = ExpertWeights(_projection(gate), _projection(up), _projection(down), x.shape[1], intermediate)
        for start, end, _ in slices:
            part = slice(start, end)
            local = _local_ids(ids[part], expert_map)
            out[part] = reference.moe(x[part], experts, local, weights[part], limit).to(out.dtype)
        return
    x, ids, weights = launchable(x), launchable(ids), launchable(weights)
    mapped = 0 if expert_map is None else expert_map.numel()
    shared = tuple(_shared(side[i]) for side in (gate, up, down) for i in (2, 3))
    kind = (x.device, x.dtype, ids.dtype, out.dtype, x.shape[1], intermediate, formats, dims, limit is None, mapped, shared)
    for start, end, regime in slices:
        assert regime is not None
        key = (*kind, *regime[1:], id_chunk((end - start) * dims.top_k), overlap(x.device, end - start)["OVERLAP"])
        if key not in _launched:
            _refuse_cold_capture(x)
            _launched.add(key)
        rows, row_ids, row_weights, results = (tensor[start:end] for tensor in (x, ids, weights, out))
        _launch_moe(
            rows, row_ids, row_weights, gate, up, down, formats, intermediate, dims, regime, scratch[regime], limit,
            expert_map, results,
        )  # fmt: skip


def _on_cpu(
    x: Tensor, ids: Tensor, weights: Tensor, gate: list[Tensor], up: list[Tensor], down: list[Tensor], intermediate: int,
    limit: float | None, expert_map: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    experts = ExpertWeights(_projection(gate), _projection(up), _projection(down), x.shape[1], intermediate)
    return reference.moe(x, experts, _local_ids(ids, expert_map), weights, limit).to(out_dtype)


def _moe_body(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    arena: Tensor,
    gate: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    gate_formats: list[int],
    up_formats: list[int],
    down_formats: list[int],
    intermediate: int,
    schedule: list[int],
    limit: float | None,
    expert_map: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    plan = Schedule.decode_ints(schedule)
    plan.slices(x.shape[0])
    if not use_triton(x):
        return _on_cpu(x, topk_ids, topk_weights, gate, up, down, intermediate, limit, expert_map, out_dtype)
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    dims = Dims(gate[2].shape[1], gate[3].shape[1], gate[1].shape[0], topk_ids.shape[1])
    scratch = {regime: carve(arena, dims, regime) for _, _, regime in plan.slices(x.shape[0]) if regime is not None}
    formats = (tuple(gate_formats), tuple(up_formats), tuple(down_formats))
    run_moe(x, topk_ids, topk_weights.float(), gate, up, down, formats, intermediate, plan, scratch, limit, expert_map, out)
    return out


def _moe_unplanned_body(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    gate_formats: list[int],
    up_formats: list[int],
    down_formats: list[int],
    intermediate: int,
    limit: float | None,
    expert_map: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    if not use_triton(x):
        return _on_cpu(x, topk_ids, topk_weights, gate, up, down, intermediate, limit, expert_map, out_dtype)
    from ..plan import default_schedule  # plans know ops, not the other way round, but for this default

    dims = Dims(gate[2].shape[1], gate[3].shape[1], gate[1].shape[0], topk_ids.shape[1])
    plan = default_schedule(dims, x.shape[0], max(*gate_formats, *up_formats, *down_formats), device_of(x.device))
    size = max((arena_layout(dims, regime)[1] for regime in plan.regimes), default=0)
    arena = torch.empty(size, dtype=torch.uint8, device=x.device)
    sides = (gate, up, down, gate_formats, up_formats, down_formats)
    return _moe_body(x, topk_ids, topk_weights, arena, *sides, intermediate, plan.encode(), limit, expert_map, out_dtype)


_moe_op = torch.library.custom_op("exl3_triton::moe", _moe_body, mutates_args=("arena",))
_moe_unplanned_op = torch.library.custom_op("exl3_triton::moe_unplanned", _moe_unplanned_body, mutates_args=())


@_moe_op.register_fake
def _(
    x, topk_ids, topk_weights, arena, gate, up, down, gate_formats, up_formats, down_formats, intermediate, schedule, limit,
    expert_map, out_dtype,
):  # fmt: skip
    return x.new_empty(x.shape, dtype=out_dtype)


@_moe_unplanned_op.register_fake
def _(
    x, topk_ids, topk_weights, gate, up, down, gate_formats, up_formats, down_formats, intermediate, limit, expert_map,
    out_dtype,
):  # fmt: skip
    return x.new_empty(x.shape, dtype=out_dtype)


def check_call(
    x: Tensor, experts: ExpertWeights, topk_ids: Tensor, topk_weights: Tensor, limit: float | None, expert_map: Tensor | None
) -> None:
    """Raises ValueError for shapes, dtypes or devices that `moe` does not take; reads no data."""
    check_float("moe", x=x, topk_weights=topk_weights)
    if x.dim() != 2 or x.shape[1] != experts.hidden_size:
        raise ValueError(f"moe: x is {list(x.shape)}: required [T, {experts.hidden_size}]")
    ids = f"topk_ids is {topk_ids.dtype} {list(topk_ids.shape)} on {topk_ids.device}"
    if topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0] or topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"moe: {ids}: required int32 or int64 [{x.shape[0]}, k]")
    if topk_weights.shape != topk_ids.shape:
        raise ValueError(f"moe: {ids}, topk_weights is {list(topk_weights.shape)}: required equal shapes")
    if not 1 <= topk_ids.shape[1] <= MAX_TOP_K or experts.num_experts > MAX_EXPERTS:
        required = f"k in 1..{MAX_TOP_K}, at most {MAX_EXPERTS} experts"
        raise ValueError(f"moe: {ids} for {experts.num_experts} experts: required {required}")
    if not x.device == topk_ids.device == experts.device:
        raise ValueError(f"moe: {ids}, experts on {experts.device}: required {x.device}, as x")
    if limit is not None and not 0 < limit < math.inf:
        raise ValueError(f"moe: limit={limit}: required a positive number or None")
    if expert_map is not None and (
        expert_map.dim() != 1
        or expert_map.dtype not in (torch.int32, torch.int64)
        or not expert_map.is_contiguous()
        or expert_map.device != x.device
    ):
        found = f"{expert_map.dtype} {list(expert_map.shape)} on {expert_map.device}"
        raise ValueError(f"moe: expert_map is {found}: required a contiguous int32 or int64 vector on {x.device}")


def expert_tensors(projection: ExpertProjection) -> list[Tensor]:
    """A projection as the tensors that the op takes."""
    return [projection.words, projection.table, projection.suh, projection.svh]


def _sides(experts: ExpertWeights) -> tuple[list[Tensor] | list[int], ...]:
    gate, up, down = experts.projections
    tensors = [expert_tensors(projection) for projection in (gate, up, down)]
    return (*tensors, list(gate.formats), list(up.formats), list(down.formats))


def call_planned(
    x: Tensor, experts: ExpertWeights, topk_ids: Tensor, topk_weights: Tensor, arena: Tensor, schedule: list[int],
    limit: float | None, expert_map: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The op on checked arguments."""
    arguments = (*_sides(experts), experts.intermediate_size, schedule, limit, expert_map, out_dtype)
    return call(_moe_op, _moe_body, x, topk_ids, topk_weights, arena, *arguments)


def moe(
    x: Tensor,
    experts: ExpertWeights,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    plan: "MoePlan | None" = None,
    arena: Tensor | None = None,
    limit: float | None = None,
    expert_map: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Sum over slots of topk_weights * down(silu(gate(x)) * up(x)), experts by topk_ids: [T, H] in `out_dtype` (default x's).

    x: [T, H] fp16, bf16 or fp32; topk_ids: int32 or int64 [T, k], k <= 32: -1 and all ids outside of 0..E-1 add nothing;
    topk_weights: floats [T, k], used in fp32; experts: rates and codebooks free per expert and projection, E <= 1024.
    expert_map: int32 or int64 [global experts]: topk_ids are global, the map holds the index of each among `experts`, -1 for
    one that is not here (another rank's). An expert of the same sizes that every token takes (a shared one) is one more id
    in every row of topk_ids, with weight 1.
    limit: clamps gate from above to it and up to +-limit before the activation. plan: sizes, windows and capacity
    (`exl3_triton.plan.plan_moe`), default one for about T rows; arena: uint8 scratch of plan.arena_bytes, default allocated by
    this call. T beyond the prefill capacity of the plan runs in slices. Rotations, sums and router weights are fp32, products
    fp16 x fp16, activations fp16 under a power-of-two scale a row; a row's result does not depend on a window's other rows.
    Raises ValueError for shapes and dtypes outside of this, a plan for other sizes, or T above plan.max_tokens.
    """
    check_call(x, experts, topk_ids, topk_weights, limit, expert_map)
    if plan is not None:
        plan.check(experts, topk_ids.shape[1])
    elif arena is not None:
        raise ValueError("moe: arena without plan: required the plan whose arena_bytes it was sized by")
    if plan is None:
        arguments = (*_sides(experts), experts.intermediate_size, limit, expert_map, out_dtype or x.dtype)
        return call(_moe_unplanned_op, _moe_unplanned_body, x, topk_ids, topk_weights, *arguments)
    if arena is None:
        arena = torch.empty(plan.arena_bytes, dtype=torch.uint8, device=x.device)
    schedule = plan.schedule.encode()
    return call_planned(x, experts, topk_ids, topk_weights, arena, schedule, limit, expert_map, out_dtype or x.dtype)
