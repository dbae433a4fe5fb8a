"""Expert router: fp32 logits, scores, grouped top-k, weights.

Two launches. The logits are true fp32 (never TF32: a router picks another expert on a difference of 1e-4): 16-bit activations
and weights have exact products on the tensor cores, everything else is multiplied in fp32. They are summed over k in fixed
segments, each from zero, the segments then in ascending order; few tokens run one program a segment and many tokens all
segments in one program, so both give the same bits and a token's route does not depend on its batch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ._args import block, check_float
from ._dispatch import call, device_guard, launchable, overlap, use_triton
from ._triton import start_next, tl, triton, wait_previous

SEGMENT, SEGMENT_WIDE = 256, 128  # inputs summed by one chain of additions, as 16-bit and as fp32 products
MAX_EXPERTS = 512
MAX_TOP_K = 16
SPLIT_TOKENS = 64  # up to here one program a segment (parallelism), above it one program for all (no partial sums in memory)


@triton.jit(do_not_specialize=["tokens"])
def _logits_kernel(
    x, weight, logits, tokens,
    D: tl.constexpr, E: tl.constexpr, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """logits fp32 [D / (SEGMENT * SEGMENTS), T, E]: every program sums SEGMENTS segments of its [BLOCK_T, BLOCK_E] tile."""
    wait_previous(OVERLAP)
    start_next(OVERLAP)
    part = tl.program_id(2)
    rt = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    re = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    rd = tl.arange(0, BLOCK_D)
    rows = x + rt.to(tl.int64)[:, None] * D
    total = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for s in range(SEGMENTS):
        start = (part * SEGMENTS + s) * SEGMENT
        acc = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
        for d0 in range(0, SEGMENT, BLOCK_D):
            d = start + d0 + rd
            xs = tl.load(rows + d[None, :], mask=(rt < tokens)[:, None] & (d < D)[None, :], other=0.0)
            ws = tl.load(weight + re[None, :] * D + d[:, None], mask=(re < E)[None, :] & (d < D)[:, None], other=0.0)
            if WIDE:
                xs = xs.to(tl.float32)
                ws = ws.to(tl.float32)
            acc = tl.dot(xs, ws, acc, input_precision="ieee")
        total += acc
    out = logits + (part.to(tl.int64) * tokens + rt)[:, None] * E + re[None, :]
    tl.store(out, total, mask=(rt < tokens)[:, None] & (re < E)[None, :])


@triton.jit
def _lowest_argmax(values, lanes, SIZE: tl.constexpr):
    """(maximum, lowest index that has it) over axis 0."""
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, lanes, SIZE - 1), axis=0)


@triton.jit(do_not_specialize=["tokens"])
def _select_kernel(
    logits, bias, weights, ids, tokens, scaling,
    E: tl.constexpr, E_PAD: tl.constexpr, PARTS: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr,
    SOFTMAX: tl.constexpr, HAS_BIAS: tl.constexpr, N_GROUP: tl.constexpr, G_PAD: tl.constexpr, TOPK_GROUP: tl.constexpr,
    NORM: tl.constexpr, ALWAYS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token a program: sum the parts, score, drop the losing groups, pick TOP_K by repeated argmax. ALWAYS: the id of
    one more column, of weight 1, -2 without one.
    """
    wait_previous(OVERLAP)
    start_next(OVERLAP)
    LOSER: tl.constexpr = -3.0e38  # below every score, above -inf, which marks what is taken already
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, E_PAD)
    real = lanes < E
    logit = tl.zeros((E_PAD,), tl.float32)
    for part in tl.static_range(PARTS):  # unrolled: all loads in flight at once
        logit += tl.load(logits + (part * tokens.to(tl.int64) + token) * E + lanes, mask=real, other=0.0)
    if SOFTMAX:
        logit = tl.where(real, logit, float("-inf"))
        e = tl.exp(logit - tl.max(logit, axis=0))
        score = e / tl.sum(e, axis=0)
    else:
        score = 1.0 / (1.0 + tl.exp(-logit))
    choice = score
    if HAS_BIAS:
        choice += tl.load(bias + lanes, mask=real, other=0.0)
    choice = tl.where(choice == choice, choice, LOSER)  # a NaN must not leave the ids undefined
    choice = tl.where(real, choice, float("-inf"))
    if N_GROUP > 1:
        group = lanes // (E // N_GROUP)
        group_lanes = tl.arange(0, G_PAD)
        group_score = tl.full((G_PAD,), float("-inf"), tl.float32)
        for g in tl.static_range(N_GROUP):
            mine = tl.where(group == g, choice, float("-inf"))
            best, at = _lowest_argmax(mine, lanes, E_PAD)
            if not SOFTMAX and E // N_GROUP > 1:
                best += tl.max(tl.where(lanes == at, float("-inf"), mine), axis=0)
            group_score = tl.where(group_lanes == g, best, group_score)
        kept = lanes < 0
        for _ in tl.static_range(TOPK_GROUP):
            best, at = _lowest_argmax(group_score, group_lanes, G_PAD)
            kept = kept | (group == at)
            group_score = tl.where(group_lanes == at, float("-inf"), group_score)
        choice = tl.where(kept | (lanes >= E), choice, 0.0 if SOFTMAX else LOSER)
    slots = tl.arange(0, K_PAD)
    picked = tl.zeros((K_PAD,), tl.float32)
    picked_ids = tl.zeros((K_PAD,), tl.int32)
    total = 0.0
    for slot in tl.static_range(TOP_K):
        _, at = _lowest_argmax(choice, lanes, E_PAD)
        w = tl.sum(tl.where(lanes == at, score, 0.0), axis=0)
        total += w
        picked = tl.where(slots == slot, w, picked)
        picked_ids = tl.where(slots == slot, at, picked_ids)
        choice = tl.where(lanes == at, float("-inf"), choice)
    if NORM:
        picked = picked / (total + 1e-20)
    picked = picked * scaling
    COLUMNS: tl.constexpr = TOP_K + (1 if ALWAYS > -2 else 0)
    if ALWAYS > -2:
        picked = tl.where(slots == TOP_K, 1.0, picked)
        picked_ids = tl.where(slots == TOP_K, ALWAYS, picked_ids)
    tl.store(weights + token * COLUMNS + slots, picked, mask=slots < COLUMNS)
    tl.store(ids + token * COLUMNS + slots, picked_ids, mask=slots < COLUMNS)


def _launch_router(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    n_group: int,
    topk_group: int,
    norm: bool,
    scaling: float,
    always: int | None = None,
) -> tuple[Tensor, Tensor]:
    tokens, width = x.shape
    experts, columns = weight.shape[0], top_k + (always is not None)
    weights = torch.empty(tokens, columns, dtype=torch.float32, device=x.device)
    ids = torch.empty(tokens, columns, dtype=torch.int32, device=x.device)
    if tokens == 0:
        return weights, ids
    x, weight = launchable(x), launchable(weight)
    wide = x.dtype != weight.dtype or x.dtype == torch.float32
    segment = SEGMENT_WIDE if wide else SEGMENT
    segments = triton.cdiv(width, segment)
    split = tokens <= SPLIT_TOKENS
    parts = segments if split else 1
    # fp32: tiles from 64 x 64 on become TF32 on sm_100, "ieee" or not; 16 bits: fewer than 64 rows, one kind of instruction
    block_t, block_e = (16, 16 if wide else 32) if split else (32, 64)
    logits = torch.empty(parts, tokens, experts, dtype=torch.float32, device=x.device)
    with device_guard(x):
        _logits_kernel[(triton.cdiv(tokens, block_t), triton.cdiv(experts, block_e), parts)](
            x, weight, logits, tokens, D=width, E=experts, SEGMENT=segment, SEGMENTS=segments // parts,
            BLOCK_T=block_t, BLOCK_E=block_e, BLOCK_D=32 if wide else 64, WIDE=wide,
            num_warps=4, num_stages=3 if wide or not split else 4, **overlap(x.device, tokens),
        )  # fmt: skip
        _select_kernel[(tokens,)](
            logits, weights if bias is None else launchable(bias), weights, ids, tokens, scaling,
            E=experts, E_PAD=block(experts, 2), PARTS=parts, TOP_K=top_k, K_PAD=block(columns, 1),
            SOFTMAX=scoring == "softmax", HAS_BIAS=bias is not None, N_GROUP=n_group, G_PAD=block(n_group, 1),
            TOPK_GROUP=topk_group, NORM=norm, ALWAYS=-2 if always is None else always,
            num_warps=1 if experts <= 256 else 2, **overlap(x.device, tokens),
        )  # fmt: skip
    return weights, ids


def _router_body(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    n_group: int,
    topk_group: int,
    norm: bool,
    scaling: float,
    always: int | None = None,
) -> tuple[Tensor, Tensor]:
    if use_triton(x):
        return _launch_router(x, weight, bias, top_k, scoring, n_group, topk_group, norm, scaling, always)
    weights, ids = reference.router(x, weight, bias, top_k, scoring, n_group, topk_group, norm, scaling)
    if always is None:
        return weights, ids
    return F.pad(weights, (0, 1), value=1.0), F.pad(ids, (0, 1), value=always)


_router_op = torch.library.custom_op("exl3_triton::router", _router_body, mutates_args=())


@_router_op.register_fake
def _(x, weight, bias, top_k, scoring, n_group, topk_group, norm, scaling, always=None):
    shape = (x.shape[0], top_k + (always is not None))
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int32)


def router(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    top_k: int,
    scoring: str = "sigmoid",
    n_group: int = 1,
    topk_group: int = 1,
    norm_topk_prob: bool = True,
    scaling: float = 1.0,
    always: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Routing of every token: (weights fp32 [T, top_k], ids int32 [T, top_k]), in descending order of the choice score.

    x: [T, D] fp16, bf16 or fp32; weight: [E, D], E <= 512, top_k <= 16; bias: fp32 [E] or None, used for choosing only.
    scoring "sigmoid" (DeepSeek-V3, GLM): choose by sigmoid(logit) + bias; of n_group groups the topk_group with the largest
    sum of their two best stay. "softmax" (DeepSeek-V2): choose by the softmax, groups by their maximum, losing groups score 0.
    Weights are the scores without bias, divided by their sum + 1e-20 when norm_topk_prob, times scaling. Equal choice scores
    go to the lowest expert id. Logits are fp32 sums in an order that does not depend on T. always: None, or the id (-1: none)
    of one more column of weight 1, [T, top_k + 1], for a shared expert among the others.
    Raises ValueError for shapes, dtypes or options outside of this.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"router: x {list(x.shape)} and weight {list(weight.shape)}: required [T, D] and [E, D]")
    check_float("router", x=x, weight=weight, **({} if bias is None else {"bias": bias}))
    experts = weight.shape[0]
    if not 1 <= experts <= MAX_EXPERTS or not 1 <= top_k <= min(MAX_TOP_K, experts):
        required = f"1..{MAX_EXPERTS} experts and top_k in 1..{min(MAX_TOP_K, experts)}"
        raise ValueError(f"router: {experts} experts, top_k={top_k}: required {required}")
    if bias is not None and (bias.dtype != torch.float32 or tuple(bias.shape) != (experts,)):
        raise ValueError(f"router: bias {bias.dtype} {list(bias.shape)}: required torch.float32 [{experts}]")
    if scoring not in ("sigmoid", "softmax"):
        raise ValueError(f"router: scoring={scoring!r}: must be 'sigmoid' or 'softmax'")
    if n_group < 1 or experts % n_group or not 1 <= topk_group <= n_group:
        found = f"n_group={n_group}, topk_group={topk_group} over {experts} experts"
        raise ValueError(f"router: {found}: groups must divide the experts, topk_group <= n_group")
    if always is not None and always < -1:
        raise ValueError(f"router: always={always}: required None, an expert's id, or -1 for none")
    options = (top_k, scoring, n_group, topk_group, norm_topk_prob, float(scaling), always)
    return call(_router_op, _router_body, x, weight, bias, *options)
