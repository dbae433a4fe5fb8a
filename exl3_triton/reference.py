"""What every op means, in plain torch: the specification, the CPU kernels, and what the tests measure the GPU kernels with.

Shapes: T tokens of several sequences laid flat; H heads; C, R, N, V the widths of MLA's latent, rope, non-rope and value
parts; a cache is [pages, 64, width]. Everything computes in float32, or in float64 where the input is float64.
`docs/format.md` explains the trellis; DeepSeek-V2 (arXiv:2405.04434) MLA; DeepSeek-V3.2 (arXiv:2512.02556) the indexer.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .format import HADAMARD, TILE, Codebook, ExpertWeights, TrellisWeight
from .kv_format import PAGE, head_planes, latent_format, pack_heads, pack_latents, unpack_heads, unpack_latents

_gpu_rounding: contextvars.ContextVar[bool] = contextvars.ContextVar("gpu_rounding", default=False)


@contextlib.contextmanager
def gpu_rounding() -> Iterator[None]:
    """Within the block `linear` and `moe` round rotated activations to fp16 where the GPU kernels do."""
    token = _gpu_rounding.set(True)
    try:
        yield
    finally:
        _gpu_rounding.reset(token)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


# The trellis ----------------------------------------------------------------------------------------------------------


@functools.cache
def codebook_values(codebook: Codebook, rounded: bool = True) -> Tensor:
    """fp16 [65536]: the weight that each 16-bit trellis state stands for; fp32, not `rounded`: before its rounding to fp16."""
    state = torch.arange(1 << 16, dtype=torch.int64)
    if codebook is Codebook.MUL1:
        product = state * 0x83DCD12D & 0xFFFFFFFF
        byte_sum = torch.stack([product >> shift & 0xFF for shift in (0, 8, 16, 24)]).sum(0)
        scale, offset = torch.tensor([0x1EEE, 0xC931 - 0x10000], dtype=torch.int16).view(torch.float16).double()
        values = (1024 + byte_sum).double() * scale + offset  # exact, in fp32 too
        return values.to(torch.float16 if rounded else torch.float32)
    product = state * 89226354 + 64248484 if codebook is Codebook.THREE_INST else state * 0xCBAC1FED
    product = (product & 0x8FFF8FFF) ^ 0x3B603B60
    halves = torch.stack([product & 0xFFFF, product >> 16 & 0xFFFF]).to(torch.uint16).view(torch.float16)
    return halves[0] + halves[1] if rounded else halves[0].float() + halves[1].float()


@functools.cache
def tile_position() -> tuple[Tensor, Tensor]:
    """(row, column) in the 16x16 tile of the ring positions t = 0..255: the order of m16n8k16 matrix fragments."""
    t = torch.arange(256)
    lane, j = t // 8, t % 8
    row = 2 * (lane & 3) + (j & 1) + 8 * (j >> 1 & 1)
    column = (lane >> 2) + 8 * (j >> 2)
    return row, column


def trellis_states(trellis: Tensor) -> Tensor:
    """int64 [..., 256] states of trellis int16 [..., 16K]: state t is the 16 ring bits that end with symbol t's."""
    twice_bits = trellis.shape[-1] // 8
    num_words = 4 * twice_bits
    words = trellis.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    end = (torch.arange(1, 257, device=trellis.device) * twice_bits) // 2  # one past symbol t's last bit
    last = (end - 1) >> 5
    first = ((end - 16 + 32 * num_words) >> 5) % num_words  # the ring wraps at the tile's edge
    return ((words[..., first] << 32 | words[..., last]) >> (32 * (last + 1) - end)) & 0xFFFF


def decode(trellis: Tensor, codebook: Codebook, rounded: bool = True) -> Tensor:
    """fp16 [in, out]: the stored (rotated-basis) weights of trellis int16 [in/16, out/16, 16K], bit-exact.

    rounded=False: fp32, the codebook's values before their rounding to fp16, which no mode but "split" and "int8" uses.
    """
    rows, columns, _ = trellis.shape
    values = codebook_values(codebook, rounded).to(trellis.device)
    row, column = (index.to(trellis.device) for index in tile_position())
    weight = torch.empty(rows, TILE, columns, TILE, dtype=values.dtype, device=trellis.device)
    for band in range(rows):  # a band of tiles at a time bounds the int64 scratch
        weight[band, row, :, column] = values[trellis_states(trellis[band])].T
    return weight.view(rows * TILE, columns * TILE)


@functools.cache
def hadamard_matrix(size: int = HADAMARD) -> Tensor:
    """float64 [size, size], a power of two: H[i, j] = (-1)^popcount(i & j) / sqrt(size); symmetric and its own inverse."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / size**0.5


def rotate(x: Tensor, size: int = HADAMARD) -> Tensor:
    """The normalised Hadamard transform of every `size` consecutive elements of the last dimension."""
    x = _wide(x)
    blocks = rearrange(x, "... (block width) -> ... block width", width=size)
    return rearrange(blocks @ hadamard_matrix(size).to(x), "... block width -> ... (block width)")


def rotate_index(x: Tensor) -> Tensor:
    """Index keys and their queries [.., D], as they are where keys are stored in fp8: `rotate` in blocks of the largest power
    of two that divides D, at most 128.
    """
    return rotate(x, min(HADAMARD, x.shape[-1] & -x.shape[-1]))


def dense_weight(weight: TrellisWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """[in, out] of the logical sizes, in the original basis: diag(suh) P W_rotated P diag(svh), computed in `dtype`."""
    inner = decode(weight.trellis, weight.codebook).to(dtype)
    full = rotate(rotate(inner).T).T * weight.suh.to(dtype)[:, None] * weight.svh.to(dtype)
    return full[: weight.in_features, : weight.out_features]


class _DenseCache:
    """Decoded fp32 weights of the CPU path, kept as long as the trellis tensor they came from lives, up to a byte budget."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.entries: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def get(self, storage: Tensor, index: int, make: Callable[[], Tensor]) -> Tensor:
        version = None if storage.is_inference() else storage._version
        kept = self.entries.get(storage)
        if kept is None or kept[0] != version:
            kept = (version, {})
            self.entries[storage] = kept
        if index in kept[1]:
            return kept[1][index]
        dense = make().contiguous()
        in_use = sum(tensor.nbytes for _, by_index in self.entries.values() for tensor in by_index.values())
        if in_use + dense.nbytes <= self.max_bytes:
            kept[1][index] = dense
        return dense


_dense_cache = _DenseCache(max_bytes=8 << 30)


def dequantize(weight: TrellisWeight, rotated: bool) -> Tensor:
    """fp16: the stored values [in_padded, out_padded] (`rotated`), or the matrix in the original basis [in, out]."""
    return decode(weight.trellis, weight.codebook) if rotated else dense_weight(weight).to(torch.float16)


def round_rows(x: Tensor) -> Tensor:
    """x [..., n] rounded to fp16 under a power-of-two scale a row, as the kernels feed the matrix units, and scaled back."""
    amax = x.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    scale = torch.exp2(13 - torch.floor(torch.log2(amax)))
    return (x * scale).to(torch.float16).to(x.dtype) / scale


def int8_rows(x: Tensor) -> Tensor:
    """x [..., n] rounded to the 255 steps of int8, one scale a row: a 127th of its largest magnitude."""
    step = x.abs().amax(-1, keepdim=True).clamp_min(1e-35) / 127
    return torch.floor(x / step + 0.5) * step


def _matmul(x: Tensor, weight: TrellisWeight, storage: Tensor, index: int, mode: str = "exact") -> Tensor:
    x = _wide(x)
    approximate = mode in ("split", "int8")
    if approximate or (_gpu_rounding.get() and mode == "exact"):
        inner = rotate(F.pad(x, (0, weight.padded_in - x.shape[-1])) * weight.suh.to(x))
        if _gpu_rounding.get() or mode == "int8":
            inner = round_rows(inner)
        if mode == "int8":
            inner = int8_rows(inner)
        inner = inner @ decode(weight.trellis, weight.codebook, rounded=not approximate).to(x.dtype)
        return (rotate(inner) * weight.svh.to(x))[..., : weight.out_features]
    if x.dtype == torch.float64:
        return x @ dense_weight(weight, x.dtype)
    return x @ _dense_cache.get(storage, index, lambda: dense_weight(weight))


def linear(x: Tensor, weight: TrellisWeight, mode: str = "exact") -> Tensor:
    """x [..., in] -> [..., out]: y = rotate(rotate(x * suh) @ W_rotated) * svh + bias, in float32 or float64.

    mode: "exact"; "precise", the same without `gpu_rounding`; "split", weights that are not rounded to fp16; "int8", those
    and rotated activations rounded by `int8_rows`.
    """
    y = _matmul(x, weight, weight.trellis, 0, mode)
    return y if weight.bias is None else y + weight.bias[: weight.out_features].to(y)


# Mixture of experts ---------------------------------------------------------------------------------------------------


def swiglu(gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    """silu(gate) * up in float32 or float64; with a limit, gate is clamped from above and up on both sides before."""
    gate, up = _wide(gate), _wide(up)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def moe(x: Tensor, experts: ExpertWeights, topk_ids: Tensor, topk_weights: Tensor, limit: float | None = None) -> Tensor:
    """x [T, hidden], ids, weights [T, k] -> [T, hidden]: sum over k of weight * expert(x); ids outside 0..E-1 add nothing."""
    x = _wide(x)
    width = experts.intermediate_size
    routed = torch.zeros(*topk_ids.shape, experts.hidden_size, dtype=x.dtype, device=x.device)
    for e in topk_ids.unique().tolist():
        if not 0 <= e < experts.num_experts:
            continue
        token, slot = torch.where(topk_ids == e)
        gate, up, down = ((projection.expert(e), projection.words) for projection in experts.projections)
        hidden = F.pad(x[token], (0, gate[0].padded_in - x.shape[1]))
        act = swiglu(_matmul(hidden, *gate, e)[:, :width], _matmul(hidden, *up, e)[:, :width], limit)
        act = F.pad(act, (0, down[0].padded_in - width))
        routed[token, slot] = _matmul(act, *down, e)[:, : experts.hidden_size]
    valid = (topk_ids >= 0) & (topk_ids < experts.num_experts)
    weights = torch.where(valid, topk_weights, 0).to(x.dtype)  # whatever stands beside an ignored id, also NaN
    return einsum(routed, weights, "token slot hidden, token slot -> token hidden")


def router(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str = "sigmoid",
    n_group: int = 1,
    topk_group: int = 1,
    norm_topk_prob: bool = True,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """x [T, hidden], weight [E, hidden], bias [E] -> (weights [T, k], ids int32 [T, k]), best first, lowest id on ties.

    sigmoid (DeepSeek-V3): the bias takes part in choosing only; a group counts as the sum of its two best; experts of
    groups that lose become -inf. softmax (DeepSeek-V2): a group counts as its best; losers become 0.
    """
    x = _wide(x)
    logits = x @ weight.to(x.dtype).T
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    choice = scores if bias is None else scores + bias.to(x.dtype)
    if n_group > 1:
        groups = rearrange(choice, "token (group member) -> token group member", group=n_group)
        best = groups.topk(min(2 if scoring == "sigmoid" else 1, groups.shape[-1]), dim=-1).values.sum(-1)
        keep = best.sort(dim=-1, descending=True, stable=True).indices[:, :topk_group]
        lost = torch.ones_like(best, dtype=torch.bool).scatter(1, keep, False)
        groups = groups.masked_fill(lost[..., None], float("-inf") if scoring == "sigmoid" else 0.0)
        choice = rearrange(groups, "token group member -> token (group member)")
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling, ids.to(torch.int32)


# Norms, rope, cache writes --------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    x = _wide(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def rope(x: Tensor, positions: Tensor, table: Tensor, interleaved: bool, start: int = 0) -> Tensor:
    """x [T, heads, D]: dimensions start..start+R-1 rotated by their token's position, the rest copied.

    table [L, R]: cos of R/2 frequencies, then sin. Pairs are (0,1), (2,3).. (interleaved) or (j, j + R/2) (half-split);
    the result keeps the input's layout. Tokens at negative positions (padding) are rotated as position 0.
    """
    x = _wide(x)
    width = table.shape[1]
    cos, sin = (part[:, None] for part in table.to(x.dtype)[positions.clamp_min(0)].chunk(2, dim=-1))
    turned = x[..., start : start + width]
    layout = "token head (freq pair)" if interleaved else "token head (pair freq)"
    a, b = rearrange(turned, f"{layout} -> pair token head freq", pair=2)
    turned = rearrange(torch.stack([a * cos - b * sin, b * cos + a * sin]), f"pair token head freq -> {layout}")
    return torch.cat([x[..., :start], turned, x[..., start + width :]], dim=-1)


def _store(rows: Tensor, slots: Tensor, cache: Tensor) -> None:
    live = slots >= 0
    cache.view(-1, cache.shape[-1])[slots[live]] = rows[live].to(cache.dtype)


def _store_heads(rows: Tensor, slots: Tensor, cache: Tensor) -> None:
    """rows [T, ..., D] into a page-blocked cache of bytes [pages, 64, ..., D + 4]."""
    live = slots >= 0
    page, row = slots[live] // PAGE, slots[live] % PAGE
    for plane, packed in zip(head_planes(cache), pack_heads(rows[live]), strict=True):
        plane[page, row] = packed


def mla_kv_write(
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
    """kv [T, C + R] -> cache rows `slots`: the latent normalised, the key's rope part turned. Slots below 0 are skipped."""
    width = weight.shape[0]
    latent, key = _wide(kv).split([width, kv.shape[1] - width], dim=-1)
    key = rope(key[:, None], positions, table, interleaved)[:, 0]
    rows = torch.cat([rms_norm(latent, weight, eps), key], dim=-1)
    if cache.dtype == torch.uint8:
        kv_format = latent_format(cache.shape[-1], width, kv.shape[1] - width)
        assert kv_format is not None
        rows = pack_latents(rows, width, kv_format, latent_scale)
    _store(rows, slots, cache)


def index_k_write(
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
    """k [T, D] -> cache rows `slots`: LayerNorm, then rope on the first R dimensions, in fp8 then `rotate_index`. Slots
    below 0 are skipped.
    """
    k = _wide(k)
    k = F.layer_norm(k, k.shape[-1:], weight.to(k.dtype), bias.to(k.dtype), eps)
    rows = rope(k[:, None], positions, table, interleaved)[:, 0]
    if cache.dtype == torch.uint8:
        _store_heads(rotate_index(rows), slots, cache)
    else:
        _store(rows, slots, cache)


def gqa_kv_write(
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    eps: float,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    interleaved: bool,
) -> None:
    """k [T, heads, D], v [T, heads, V] -> cache rows `slots`: keys RMS-normalised per head (where `weight` [D] is given), then
    rope on their first R dimensions; values as they are. Slots below 0 are skipped.
    """
    k = rope(_wide(k) if weight is None else rms_norm(k, weight, eps), positions, table, interleaved)
    for rows, cache in ((k, k_cache), (_wide(v), v_cache)):
        if cache.dtype == torch.uint8:
            _store_heads(rows, slots, cache)
        else:
            _store(rows.flatten(1), slots, cache.flatten(2))


# Attention ------------------------------------------------------------------------------------------------------------


def head_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H, A], weight [H, A, B] -> [T, H, B]: MLA's absorb (W_UK) and unfold (W_UV) products."""
    x = _wide(x)
    return einsum(x, weight.to(x.dtype), "token head a, head a b -> token head b")


def _contexts(
    cache: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    dtype: torch.dtype,
    latent: tuple[int, int, float | None] | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Per sequence of the batch: (its tokens' indices, its cache rows [n, width], positions <= own mask [tokens, n]).

    latent: (C, R, the layer's latent scale) of packed latents.
    """
    for b in sequence.unique().tolist():
        tokens = torch.where((sequence == b) & (positions >= 0))[0]
        if tokens.numel() == 0:
            continue
        n = int(positions[tokens].max()) + 1
        pages = block_table[b, : -(-n // PAGE)].long()
        rows = cache[pages]
        if latent is not None:
            rows = unpack_latents(rows, *latent)
        elif rows.dtype == torch.uint8:
            rows = unpack_heads(rows)
        rows = rows.flatten(0, 1).flatten(1)[:n].to(dtype)
        yield tokens, rows, torch.arange(n, device=rows.device) <= positions[tokens, None]


def mla_decode(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    selected: Tensor | None,
    scale: float,
    latent_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Absorbed MLA: queries in the latent space attend the cache rows themselves, one key-value head for all.

    q_latent [T, H, C], q_rope [T, H, R], selected int32 [T, S] positions (-1: none) or None for all up to the token's own
    -> (o [T, H, C], lse [T, H]); tokens at negative positions give o = 0, lse = -inf.
    """
    query = torch.cat([_wide(q_latent), _wide(q_rope)], dim=-1)
    out = torch.zeros(q_latent.shape, dtype=query.dtype, device=query.device)
    lse = torch.full(q_latent.shape[:2], float("-inf"), dtype=query.dtype, device=query.device)
    sizes = (q_latent.shape[2], q_rope.shape[2], latent_scale) if cache.dtype == torch.uint8 else None
    for tokens, rows, mask in _contexts(cache, block_table, sequence, positions, query.dtype, sizes):
        if selected is not None:
            chosen = selected[tokens].long()
            width = mask.shape[1]
            kept = torch.zeros(len(tokens), width + 1, dtype=torch.bool, device=mask.device)
            kept.scatter_(1, torch.where((chosen >= 0) & (chosen < width), chosen, width), True)
            mask = mask & kept[:, :width]
        scores = einsum(query[tokens], rows, "token head d, key d -> token head key") * scale
        scores = scores.masked_fill(~mask[:, None], float("-inf"))
        lse[tokens] = scores.logsumexp(-1)
        share = (scores - lse[tokens, :, None]).exp().nan_to_num(0.0)  # no key at all: 0, not 0 / 0
        out[tokens] = einsum(share, rows[:, : out.shape[-1]], "token head key, key c -> token head c")
    return out, lse


def mla_prefill(
    q: Tensor,
    cache: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    scale: float,
    latent_scale: float | None = None,
) -> Tensor:
    """Expanded MLA: keys and values are unfolded per head from the cached latents. q [T, H, N + R] -> o [T, H, V].

    w_uk [H, N, C], w_uv [H, V, C]. Fewer operations than the absorbed form when a context serves many queries.
    """
    q = _wide(q)
    out = torch.zeros(*q.shape[:2], w_uv.shape[1], dtype=q.dtype, device=q.device)
    nope, latent = w_uk.shape[1], w_uk.shape[2]
    sizes = (latent, q.shape[2] - nope, latent_scale) if cache.dtype == torch.uint8 else None
    for tokens, rows, mask in _contexts(cache, block_table, sequence, positions, q.dtype, sizes):
        keys = einsum(rows[:, :latent], w_uk.to(q.dtype), "key c, head n c -> head key n")
        values = einsum(rows[:, :latent], w_uv.to(q.dtype), "key c, head v c -> head key v")
        scores = einsum(q[tokens, :, :nope], keys, "token head n, head key n -> token head key")
        scores = scores + einsum(q[tokens, :, nope:], rows[:, latent:], "token head r, key r -> token head key")
        scores = (scores * scale).masked_fill(~mask[:, None], float("-inf"))
        out[tokens] = einsum(scores.softmax(-1), values, "token head key, head key v -> token head v")
    return out


def gqa_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    positions: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Grouped attention: query head h attends key-value head h // (H / KV). q [T, H, D], caches [pages, 64, KV, D or V]
    -> (o [T, H, V], lse [T, H]); tokens at negative positions give o = 0, lse = -inf.
    """
    q = _wide(q)
    heads, kv_heads = q.shape[1], k_cache.shape[2]
    value = v_cache.shape[3] - 4 * (v_cache.dtype == torch.uint8)
    out = torch.zeros(*q.shape[:2], value, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=q.dtype, device=q.device)
    place = (block_table, sequence, positions, q.dtype)
    contexts = zip(_contexts(k_cache, *place), _contexts(v_cache, *place))
    for (tokens, keys, mask), (_, values, _) in contexts:
        query = rearrange(q[tokens], "token (kv group) d -> token kv group d", group=heads // kv_heads)
        keys, values = (rearrange(rows, "key (kv d) -> key kv d", kv=kv_heads) for rows in (keys, values))
        scores = einsum(query, keys, "token kv group d, key kv d -> token kv group key") * scale
        scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
        lse[tokens] = scores.logsumexp(-1).flatten(1)
        o = einsum(scores.softmax(-1), values, "token kv group key, key kv v -> token kv group v")
        out[tokens] = rearrange(o, "token kv group v -> token (kv group) v")
    return out, lse


def index_select(
    q: Tensor, weights: Tensor, cache: Tensor, block_table: Tensor, sequence: Tensor, positions: Tensor, topk: int
) -> Tensor:
    """The lightning indexer: for each token the `topk` positions that its sparse attention may see.

    q [T, heads, D], weights [T, heads], cache [pages, 64, D] -> int32 [T, topk], ascending, padded with -1 at the end.
    score(s) = sum over heads of weight * relu(q . k_s); on ties the lowest position wins. Keys in fp8 meet queries rotated as
    they are.
    """
    q = rotate_index(q) if cache.dtype == torch.uint8 else _wide(q)
    out = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
    for tokens, keys, mask in _contexts(cache, block_table, sequence, positions, q.dtype):
        heads = einsum(q[tokens], keys, "token head d, key d -> token head key").relu()
        scores = einsum(heads, weights[tokens].to(q.dtype), "token head key, token head -> token key")
        scores = scores.masked_fill(~mask | scores.isnan(), float("-inf"))
        best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
        outside = keys.shape[0]
        best = torch.where(mask.gather(1, best), best, outside).sort(dim=-1).values
        out[tokens, : best.shape[1]] = torch.where(best < outside, best, -1).to(torch.int32)
    return out
