"""The plain product on the GPU: dense operands of any strides, float32 sums in one order of k for every number of rows.

What the tuned kernels do not take ends here: float32 activations (IEEE products on the ordinary cores, never TF32), operands that
were decoded into a workspace, mixed dtypes, and every call that asks for `batch_invariant` on such an operand. Two operands of
one 16-bit dtype meet on the tensor cores, whose products are exact; anything else is widened to float32.

A grouped product is the same kernel under a schedule: a list of (expert, first row, end) written by the device itself, so that
the host never sees how many tokens an expert has."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgate.tile.gpu_math import INTERPRETED, bound, round_to

TILE = {True: (16, 64, 64), False: (32, 64, 16)}  # whether the operands are 16-bit: (rows, outputs, k) of a tile


@triton.jit(do_not_specialize=["experts", "tokens", "tiles"])
def _schedule_kernel(sizes_ptr, plan_ptr, experts, tokens, tiles, BLOCK_M: tl.constexpr, E: tl.constexpr, STEP: tl.constexpr):
    """plan[i] = (expert, first row, end) of the i-th tile; expert -1 for rows past the last group, first row = end past all."""
    e = tl.arange(0, E)
    sizes = tl.load(sizes_ptr + e, mask=e < experts, other=0).to(tl.int64)
    sizes = tl.maximum(sizes, 0)
    ends = tl.minimum(tl.cumsum(sizes, 0), tokens)
    ends = tl.where(e < experts, ends, tokens)  # lane `experts`, always there, takes the rows that belong to nobody
    starts = tl.where(e == 0, 0, tl.minimum(tl.cumsum(sizes, 0) - sizes, tokens))
    starts = tl.where(e > experts, tokens, starts)
    count = (ends - starts + BLOCK_M - 1) // BLOCK_M
    first = tl.cumsum(count, 0) - count
    i = tl.program_id(0) * STEP + tl.arange(0, STEP)
    mine = (first[None, :] <= i[:, None]) & (i[:, None] < (first + count)[None, :])  # at most one expert a tile
    start = tl.sum(tl.where(mine, starts[None, :] + (i[:, None] - first[None, :]) * BLOCK_M, 0), 1)
    end = tl.sum(tl.where(mine, ends[None, :], 0), 1)
    expert = tl.sum(tl.where(mine, e[None, :], 0), 1)
    known = i < tiles
    tl.store(plan_ptr + i * 3, tl.where(expert == experts, -1, expert).to(tl.int32), mask=known)
    tl.store(plan_ptr + i * 3 + 1, start.to(tl.int32), mask=known)
    tl.store(plan_ptr + i * 3 + 2, end.to(tl.int32), mask=known)


def schedule(group_sizes: Tensor, tokens: int, block_m: int) -> Tensor:
    """int32 [tiles, 3] on the device: as many tiles as there may be at most."""
    experts = group_sizes.numel()
    tiles = -(-tokens // block_m) + min(experts, tokens) + 1
    plan = torch.empty(tiles, 3, dtype=torch.int32, device=group_sizes.device)
    size = triton.next_power_of_2(experts + 1)
    step = 16
    _schedule_kernel[(-(-tiles // step),)](
        group_sizes, plan, experts, tokens, tiles, BLOCK_M=block_m, E=size, STEP=step, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return plan


@triton.jit(do_not_specialize=["M", "N", "K", "first_expert", "experts"])
def _dense_kernel(
    x_ptr, w_ptr, bias_ptr, total_ptr, out_ptr, plan_ptr, M, N, K, first_expert, experts,
    stride_xm, stride_xk, stride_we, stride_wn, stride_wk, stride_om, stride_on,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SHORT: tl.constexpr, BIAS: tl.constexpr, TOTAL: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    tile_n, tile_m = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    expert, start, end = 0, tile_m * BLOCK_M, M.to(tl.int64)
    if GROUPED:
        expert = tl.load(plan_ptr + tile_m * 3)
        start = tl.load(plan_ptr + tile_m * 3 + 1).to(tl.int64)
        end = tl.load(plan_ptr + tile_m * 3 + 2).to(tl.int64)
        nobody = (expert < 0) & (first_expert == 0)  # the first slice of experts also clears the rows of none
        if (start >= end) | (((expert < first_expert) | (expert >= first_expert + experts)) & (nobody == 0)):
            return
    m = start + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + m[:, None] * stride_xm
    w_ptrs = w_ptr + n[None, :] * stride_wn
    if GROUPED:
        w_ptrs += (tl.maximum(expert, first_expert) - first_expert).to(tl.int64) * stride_we
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    steps = tl.cdiv(K, BLOCK_K)
    if GROUPED:
        steps = tl.where(expert < 0, 0, steps)
    for step in range(bound(steps)):
        at = (step * BLOCK_K + k).to(tl.int64)
        x = tl.load(x_ptrs + at[None, :] * stride_xk, mask=(m[:, None] < end) & (at[None, :] < K), other=0.0)
        w = tl.load(w_ptrs + at[:, None] * stride_wk, mask=(n[None, :] < N) & (at[:, None] < K), other=0.0)
        if SHORT and not INTERPRETED:
            acc = tl.dot(x, w, acc)
        else:
            acc = tl.dot(x.to(tl.float32), w.to(tl.float32), acc, input_precision="ieee")
    inside = (m[:, None] < end) & (n[None, :] < N)
    at = m[:, None] * N + n[None, :]
    if TOTAL:
        acc += tl.load(total_ptr + at, mask=inside, other=0.0)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + m[:, None] * stride_om + n[None, :] * stride_on
    tl.store(out_ptrs, round_to(acc, out_ptr.dtype.element_ty), mask=inside)


def product(
    x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None = None, total: Tensor | None = None, *,
    plan: Tensor | None = None, first_expert: int = 0,
) -> None:  # fmt: skip
    """out [M, N] = x [M, K] w[N, K]^T (+ total, contiguous float32 [M, N]) (+ bias), any strides.

    With `plan` (of `block_m()` rows a tile): w [E', N, K] are the experts from `first_expert` on, and only their rows are written.
    """
    m, n, k = x.shape[0], w.shape[-2], w.shape[-1]
    if m == 0 or n == 0:
        return
    short = x.dtype == w.dtype and x.dtype != torch.float32
    block_m, block_n, block_k = TILE[short]
    if plan is not None:
        block_m = block_rows()
    tiles = -(-m // block_m) if plan is None else plan.shape[0]
    _dense_kernel[(-(-n // block_n), tiles)](
        x, w, bias, total, out, plan, m, n, k, first_expert, w.shape[0] if w.dim() == 3 else 1,
        x.stride(0), x.stride(1), w.stride(0) if w.dim() == 3 else 0, w.stride(-2), w.stride(-1), out.stride(0), out.stride(1),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, SHORT=short, BIAS=bias is not None, TOTAL=total is not None,
        GROUPED=plan is not None, num_warps=4, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip


def block_rows() -> int:
    """Rows of a tile of a grouped product."""
    return 16
