"""The router's choice and the experts' sum for a few tokens on a GPU, in one launch each: what would be thirty small operators.

`choose` gives every token its experts, sorts all (token, expert) pairs by expert, and counts them; `mix` adds what the experts
gave, weighted and in the order of the weights, to the shared expert's part. One program compares every pair with every other, so
there is a limit, FEW pairs; prompts use torch's operators."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgate.nn.mlp import FEW


@triton.jit
def _choose_kernel(
    logits, weights, experts, row, COUNT: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr, NORMALISE: tl.constexpr
):
    """One token: softmax over all experts, then the heaviest one after the other; of equal ones the lower index."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, WIDTH)
    x = tl.load(logits + t * row + e, e < COUNT, other=float("-inf"))
    x = tl.exp(x - tl.max(x, 0))
    all_of_them = tl.sum(x, 0)
    nothing = all_of_them - all_of_them  # NaN where a logit is, which a maximum passes over
    p = tl.where(e < COUNT, tl.div_rn(x, all_of_them), -1.0)
    total = 0.0
    for k in tl.static_range(TOP):
        best = tl.max(p, 0) + nothing
        index = tl.min(tl.where(p == best, e, COUNT - 1), 0)  # NaN equals nothing: some expert, lest a place be made up
        tl.store(weights + t * TOP + k, best)
        tl.store(experts + t * TOP + k, index)
        total += best
        p = tl.where(e == index, -1.0, p)
    if NORMALISE:
        tl.debug_barrier()
        for k in tl.static_range(TOP):
            at = weights + t * TOP + k
            tl.store(at, tl.div_rn(tl.load(at), total))


@triton.jit(do_not_specialize=["pairs"])
def _sort_kernel(
    experts, tokens, places, sizes, pairs, COUNT: tl.constexpr, TOP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """tokens [pairs] in order of their experts, places [pairs] where each pair went, sizes [COUNT]; each program some experts."""
    r = tl.arange(0, ROWS)
    mine = tl.load(experts + r, r < pairs, other=COUNT)
    if tl.program_id(0) == 0:
        before = (mine[None, :] < mine[:, None]) | ((mine[None, :] == mine[:, None]) & (r[None, :] < r[:, None]))
        place = tl.sum(before.to(tl.int32), 1)
        tl.store(tokens + place, r // TOP, r < pairs)
        tl.store(places + r, place, r < pairs)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sizes + e, tl.sum((mine[None, :] == e[:, None]).to(tl.int32), 1), e < COUNT)


@triton.jit(do_not_specialize=["width"])
def _mix_kernel(rows, weights, places, shared, gate, out, width, TOP: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP):
        place = tl.load(places + t * TOP + k).to(tl.int64)
        total += tl.load(rows + place * width + d, inside, other=0.0).to(tl.float32) * tl.load(weights + t * TOP + k)
    z = tl.load(gate + t)
    total += tl.load(shared + t * width + d, inside, other=0.0).to(tl.float32) * tl.div_rn(1.0, 1.0 + tl.exp(-z))
    tl.store(out + t * width + d, total.to(out.dtype.element_ty), inside)


def choose(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [T, E] float32 -> weights float32 [T, top_k]; the tokens [T top_k] sorted by expert; where each pair went; rows of
    each expert, int32 [E]. T top_k at most FEW."""
    (count, experts), device = logits.shape, logits.device
    pairs = count * top_k
    weights = torch.empty(count, top_k, dtype=torch.float32, device=device)
    chosen, tokens, places = torch.empty(3, pairs, dtype=torch.int32, device=device).unbind()
    sizes = torch.empty(experts, dtype=torch.int32, device=device)
    _choose_kernel[(count,)](
        logits, weights, chosen, logits.stride(0), COUNT=experts, WIDTH=triton.next_power_of_2(experts), TOP=top_k,
        NORMALISE=normalise, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    _sort_kernel[(triton.cdiv(experts, 64),)](
        chosen, tokens, places, sizes, pairs, COUNT=experts, TOP=top_k, ROWS=FEW, BLOCK=64, num_warps=8, enable_fp_fusion=False
    )
    return weights, tokens, places, sizes


def mix(rows: Tensor, weights: Tensor, places: Tensor, shared: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, hidden]: the sum of rows [T top_k, hidden] at `places` times `weights`, plus shared [T, hidden] times the sigmoid of gate
    [T, 1], float32, rounded once."""
    (count, top_k), width = weights.shape, rows.shape[1]
    out = torch.empty(count, width, dtype=dtype, device=rows.device)
    _mix_kernel[(triton.cdiv(width, 256), count)](
        rows, weights, places, shared, gate, out, width, TOP=top_k, BLOCK=256, num_warps=2, enable_fp_fusion=False
    )
    return out
