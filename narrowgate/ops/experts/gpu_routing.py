"""The parts of a mixture of experts on a GPU that are no product of packed weights: scores, choice, order and sum, a launch each.

`score` and `choose` give every token its experts. A few tokens are then multiplied where they are (`experts`, two more launches).
More of them are sorted: `sort` finds each pair's place among the pairs of its expert, `spread` copies the tokens there, and `mix`
adds what the experts gave, in the order of the weights, to the shared expert's part. Nothing waits for the host."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgate.ops.experts import gpu_experts_run
from narrowgate.ops.experts.gpu_experts_run import Experts
from narrowgate.tile.gpu_launch import follow, launch
from narrowgate.tile.gpu_math import bound, round_to

NEVER = tl.constexpr(-(2**31))  # below the bits of any probability


@triton.jit(do_not_specialize=["rows"])
def _score_kernel(x, router, gate, scores, rows, width, x_row, BLOCK: tl.constexpr, ROWS: tl.constexpr, FOLLOWS: tl.constexpr):
    """ROWS rows of the router's weight, then of the gate's (one), times one token: float32 sums of exact products."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < width
    at = router + n.to(tl.int64)[:, None] * width + k[None, :]
    w = tl.load(at, (n < rows)[:, None] & inside[None, :], other=0.0)
    own = tl.load(gate + tl.zeros([ROWS], tl.int32)[:, None] + k[None, :], (n == rows)[:, None] & inside[None, :], other=0.0)
    follow(FOLLOWS)  # no kernel writes a weight: only now x is read
    v = tl.load(x + t * x_row + k, inside, other=0.0).to(tl.float32)
    w = tl.where((n == rows)[:, None], own.to(tl.float32), w.to(tl.float32))
    tl.store(scores + t * (rows + 1) + n, tl.sum(w * v[None, :], 1), n <= rows)


@triton.jit
def _choose_kernel(
    logits, gate, weights, experts, counts, row, gate_row, COUNT: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr,
    PLACES: tl.constexpr, COUNTS: tl.constexpr, NORMALISE: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One token: softmax over all experts, then the heaviest one after the other; of equal ones the lower index. The last weight
    is the sigmoid of the shared expert's gate. Probabilities are compared as integers, which order them alike."""
    follow(FOLLOWS)
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, WIDTH)
    x = tl.load(logits + t * row + e, e < COUNT, other=float("-inf"))
    z = tl.load(gate + t * gate_row)
    x = tl.exp(x - tl.max(x, 0))
    all_of_them = tl.sum(x, 0)
    nothing = all_of_them - all_of_them  # NaN where a logit is, which a maximum passes over
    p = tl.where(e < COUNT, tl.div_rn(x, all_of_them), 0.0).to(tl.int32, bitcast=True)
    p = tl.where(e < COUNT, p, NEVER)
    k = tl.arange(0, PLACES)
    chosen = tl.zeros([PLACES], tl.int32)
    weight = tl.zeros([PLACES], tl.float32)
    total = 0.0
    for place in tl.static_range(TOP):
        best = tl.max(p, 0)
        index = tl.min(tl.where((p == best) & (e < COUNT), e, COUNT - 1), 0)
        heaviest = best.to(tl.float32, bitcast=True) + nothing
        chosen = tl.where(k == place, index, chosen)
        weight = tl.where(k == place, heaviest, weight)
        total += heaviest
        p = tl.where(e == index, NEVER, p)
    if NORMALISE:
        weight = tl.div_rn(weight, total)
    weight = tl.where(k == TOP, tl.div_rn(1.0, 1.0 + tl.exp(-z)), weight)
    tl.store(weights + t * (TOP + 1) + k, weight, k <= TOP)
    tl.store(experts + t * TOP + k, chosen, k < TOP)
    if COUNTS > 0:
        c = tl.arange(0, triton.next_power_of_2(COUNTS))
        tl.store(counts + t * COUNTS + c, tl.zeros_like(c), c < COUNTS)


@triton.jit(do_not_specialize=["pairs"])
def _sort_kernel(experts, places, sizes, pairs, BLOCK: tl.constexpr):
    """One expert: its size, and to each of its pairs in turn the next place after those of the experts before it."""
    e = tl.program_id(0)
    r = tl.arange(0, BLOCK)
    below = tl.zeros([BLOCK], tl.int32)
    mine = tl.zeros([BLOCK], tl.int32)
    for start in range(0, bound(pairs), BLOCK):
        v = tl.load(experts + start + r, start + r < pairs, other=0x7FFFFFFF)
        below += (v < e).to(tl.int32)
        mine += (v == e).to(tl.int32)
    place = tl.sum(below, 0)
    size = tl.sum(mine, 0)
    tl.store(sizes + e, size)
    end = place + size
    for start in range(0, bound(pairs), BLOCK):
        if place < end:
            own = tl.load(experts + start + r, start + r < pairs, other=0x7FFFFFFF) == e
            rank = tl.cumsum(own.to(tl.int32), 0)
            tl.store(places + start + r, place + rank - 1, own)
            place += tl.sum(own.to(tl.int32), 0)


@triton.jit
def _spread_kernel(x, places, rows, width, x_row, TOP: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(x + t * x_row + d, d < width)
    for k in tl.static_range(TOP):
        place = tl.load(places + t * TOP + k).to(tl.int64)
        tl.store(rows + place * width + d, own, d < width)


@triton.jit
def _mix_kernel(rows, weights, places, shared, out, width, TOP: tl.constexpr, BLOCK: tl.constexpr, FOLLOWS: tl.constexpr):
    follow(FOLLOWS)
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP):
        place = tl.load(places + t * TOP + k).to(tl.int64)
        total += tl.load(rows + place * width + d, inside, other=0.0).to(tl.float32) * tl.load(weights + t * (TOP + 1) + k)
    total += tl.load(shared + t * width + d, inside, other=0.0).to(tl.float32) * tl.load(weights + t * (TOP + 1) + TOP)
    tl.store(out + t * width + d, round_to(total, out.dtype.element_ty), inside)


def score(x: Tensor, router: Tensor, gate: Tensor) -> Tensor:
    """float32 [T, E + 1]: x [T, K] times the router's weight [E, K] and, last, the shared expert's gate [1, K]; T below 65536."""
    (tokens, width), experts, rows = x.shape, router.shape[0], 2
    scores = torch.empty(tokens, experts + 1, dtype=torch.float32, device=x.device)
    launch(
        _score_kernel, (triton.cdiv(experts + 1, rows), tokens), x, x, router, gate, scores, experts, width, x.stride(0),
        BLOCK=triton.next_power_of_2(width), ROWS=rows, num_warps=4, overlap=True,
    )  # fmt: skip
    return scores


def choose(logits: Tensor, gate: Tensor, top_k: int, normalise: bool, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits [T, E] float32, gate [T, 1] -> (weights float32 [T, top_k + 1], the last one the gate's sigmoid; experts int32
    [T, top_k], heaviest first). counts [T, any] is filled with zeros."""
    (tokens, experts), device = logits.shape, logits.device
    weights = torch.empty(tokens, top_k + 1, dtype=torch.float32, device=device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    launch(
        _choose_kernel, tokens, logits, logits, gate, weights, chosen, counts, logits.stride(0), gate.stride(0), COUNT=experts,
        WIDTH=triton.next_power_of_2(experts), TOP=top_k, PLACES=triton.next_power_of_2(top_k + 1),
        COUNTS=0 if counts is None else counts.shape[1], NORMALISE=normalise, num_warps=1, overlap=True,
    )  # fmt: skip
    return weights, chosen


def sort(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(int32 [T, top_k], the place of each pair of a token and an expert where all stand in order of expert, then of token;
    int32 [experts], how many each has)."""
    places = torch.empty_like(chosen)
    sizes = torch.empty(experts, dtype=torch.int32, device=chosen.device)
    pairs = chosen.numel()
    launch(_sort_kernel, experts, chosen, chosen, places, sizes, pairs, BLOCK=256 if pairs <= 256 else 1024, num_warps=4)
    return places, sizes


def spread(x: Tensor, places: Tensor) -> Tensor:
    """x [T, hidden] -> [T top_k, hidden], each token at its places."""
    (tokens, width), top_k = x.shape, places.shape[1]
    rows = torch.empty(tokens * top_k, width, dtype=x.dtype, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    launch(
        _spread_kernel, (tokens, triton.cdiv(width, 2048)), x, x, places, rows, width, x.stride(0), TOP=top_k, BLOCK=2048,
        num_warps=4,
    )  # fmt: skip
    return rows


def mix(rows: Tensor, weights: Tensor, places: Tensor, shared: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, hidden]: the sum of rows [T top_k, hidden] at `places` times `weights` [T, top_k + 1], plus shared [T, hidden] times the
    last of them, float32, rounded once."""
    (tokens, top_k), width = places.shape, rows.shape[1]
    out = torch.empty(tokens, width, dtype=dtype, device=rows.device)
    launch(
        _mix_kernel, (tokens, triton.cdiv(width, 256)), rows, rows, weights, places, shared, out, width, TOP=top_k, BLOCK=256,
        num_warps=2, overlap=True,
    )  # fmt: skip
    return out


def experts(
    e: Experts, x: Tensor, router: Tensor, gate: Tensor, top_k: int, normalise: bool, gate_up: list[Tensor], down: list[Tensor],
    own_gate_up: list[Tensor], own_down: list[Tensor],
) -> Tensor:  # fmt: skip
    """A whole block for a few tokens x [T, hidden], in four launches. router [E, hidden] and gate [1, hidden] are dense."""
    scores = score(x, router, gate)
    counts = torch.empty(x.shape[0], e.down.n // gpu_experts_run.ROWS, dtype=torch.int32, device=x.device)
    weights, chosen = choose(scores[:, :-1], scores[:, -1:], top_k, normalise, counts)
    return gpu_experts_run.run(e, x, chosen, weights, counts, gate_up, down, own_gate_up, own_down)
