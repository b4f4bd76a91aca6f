"""Prefill of the gated delta rule on the GPU, 64 tokens at a time. The derivation is in this folder's README.

The solve works on all chunks at once, the carry from chunk to chunk; with A, P and the decays from the first,

    w = into K S^T    u = A (v - w)    o = scale into Q S^T + P A (v - w)    S <- last S + (rest u)^T K

where into_i = exp(G_i) decays from the chunk's start to token i, rest_i = exp(G_C - G_i) from there to its end, last = exp(G_C).
What goes from one to the other is rest A and, under it, P A, so that one product gives what is written and what is read.

bfloat16 inputs are multiplied as they are, and so are rounded copies of the state, w, rest u, A and P A; float32 and float16
inputs as float32, 16 tokens at a time. Sums are float32."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgate.ops.gated_delta_rule.gpu_chunk_carry import carry_kernel, join_kernel
from narrowgate.ops.gated_delta_rule.gpu_chunk_solve import solve_kernel
from narrowgate.tile.gpu_math import INTERPRETED


class Config(NamedTuple):
    """Tiles of the kernels for a dtype and head sizes."""

    chunk: int
    block_v: int
    solve_warps: int
    carry_warps: int
    stages: int
    precision: str  # of products in the carry
    run: int  # tokens after which a walk may be cut
    join: str = ""  # walk all runs at once and join them, with products of this precision; else cut where the past has decayed


RUN, JOINED_RUN = 1024, 2048
OPERANDS = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def choose(dtypes: set[torch.dtype], heads: int, keys: int, values: int) -> Config:
    """By dtypes and heads only, so that a sequence's bits depend on nothing but itself."""
    few = keys <= 128 and heads * triton.cdiv(values, 64) <= 32
    cut = (JOINED_RUN, "ieee" if INTERPRETED.value else "bf16x6") if few else (RUN, "")
    if dtypes != {torch.bfloat16}:
        return Config(16, 16, 4, 4, 1, "ieee", *cut)
    block_v = min(64, max(16, triton.next_power_of_2(values)))
    return Config(64, block_v, 4, 4, 3 if keys <= 128 else 1, "ieee", *cut)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor | None, *,
    scale: float, state_indices: Tensor | None = None, has_initial_state: Tensor | None = None, out: Tensor,
    config: Config | None = None,
) -> None:  # fmt: skip
    (T, HK, K), (_, HV, V) = q.shape, v.shape
    N = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if K == 0 or HV * V == 0:
        out.zero_()
        return
    dtypes = {q.dtype, k.dtype, v.dtype}
    dtype = torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32
    c = config or choose(dtypes, HV, K, V)
    rows, parts = T // c.chunk + N + 1, T // c.run + N
    join = c.join if c.run < T else ""
    long = T // c.run + 1 if c.run < T else 0  # sequences of several runs: one at most begins in each stretch of a run's length
    AP = torch.empty(rows, HV, 2 * c.chunk, c.chunk, dtype=dtype, device=q.device)
    decays = torch.empty(rows, HV, 2, c.chunk, dtype=torch.float32, device=q.device)
    before = torch.empty(long, HV, V, K, dtype=torch.float32, device=q.device)
    runs = torch.empty(parts if join else 0, HV, V + K, K, dtype=torch.float32, device=q.device)
    if has_initial_state is not None and has_initial_state.dtype == torch.bool:
        has_initial_state = has_initial_state.view(torch.int8)
    BK, blocks = max(16, triton.next_power_of_2(K)), triton.cdiv(V, c.block_v)
    counts = T, N, state.shape[0], HV // HK, HV, K, V
    strides = [t.stride(i) for t in (q, k, v, out) for i in (0, 1)]
    slot = state.stride()[:3]
    whole = dtype == torch.bfloat16 and K == BK and V % c.block_v == 0 and _aligned(q, k, v, out, state)
    solve, walk, joining = (kernels[0 if whole else 1] for kernels in (solve_kernel, carry_kernel, join_kernel))
    shared = {"BK": BK, "C": c.chunk, "RUN": c.run, "WHOLE": whole, "OPERAND": OPERANDS[dtype], "enable_fp_fusion": True}
    solve[(rows * HV,)](
        q, k, g, beta, cu_seqlens, state_indices, AP, decays, state, before, out, scale, *counts,
        *strides[:4], g.stride(0), beta.stride(0), *slot, *strides[6:],
        **shared, BV=c.block_v, PRECISION=c.precision, num_warps=c.solve_warps, num_stages=1,
    )  # fmt: skip

    def carry(blocks: int, mode: str) -> None:
        walk[(parts * HV * blocks,)](
            q, k, v, cu_seqlens, state_indices, has_initial_state, AP, decays, state, before, out, runs, *counts, *strides, *slot,
            **shared, BV=c.block_v, PRECISION=c.precision, WALK=mode, STAGES=c.stages, num_warps=c.carry_warps, num_stages=c.stages,
        )  # fmt: skip

    if join:
        carry(blocks + triton.cdiv(K, c.block_v), "alone")
        joining[(N * HV * triton.cdiv(V, 16),)](
            cu_seqlens, state_indices, has_initial_state, state, runs, *counts, *slot,
            BK=BK, BV=16, RUN=c.run, PRECISION=join, enable_fp_fusion=True, num_warps=4, num_stages=1,
        )  # fmt: skip
    carry(blocks, "joined" if join else "cut")


def _aligned(*tensors: Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes, in the form in which Triton sees it."""
    return all(t.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in t.stride()[:-1]) for t in tensors)
