"""Prefill of the gated delta rule on the GPU, 64 tokens at a time. The derivation is in this folder's README.

`solve_kernel` works on all chunks at once, `carry_kernel` from chunk to chunk; with A, P and the decays from the first,

    u = A v - A (into K S^T)    o = scale into Q S^T + P u    S = last S + (rest u)^T K

where into_i = exp(G_i) decays from the chunk's start to token i, rest_i = exp(G_C - G_i) from there to its end, last = exp(G_C).
bfloat16 inputs are multiplied as they are, and so are rounded copies of the state, u and A; float32 inputs are multiplied
as six products of bfloat16 (relative error about 2^-22 of the sum of magnitudes), float16 as three (2^-16). Sums are float32."""

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
    refine: str  # of the inverse's residual
    join: str  # of products of a state and a run's matrix
    run: int  # tokens that a program of the carry takes at most; 0: a whole sequence


RUN = 2048


def choose(dtypes: set[torch.dtype], heads: int, keys: int, values: int) -> Config:
    """By dtypes and heads only, so that a sequence's bits depend on nothing but itself."""
    block_v = min(64, max(16, triton.next_power_of_2(values)))
    run = RUN if keys <= 128 and heads * triton.cdiv(values, block_v) <= 32 else 0
    exact, fine = ("ieee", "ieee") if INTERPRETED.value else ("bf16x6", "bf16x3")
    if dtypes == {torch.bfloat16}:
        return Config(64, block_v, 4, 4, 3 if keys <= 128 else 1, "ieee", fine, exact, run)
    precision = exact if torch.float32 in dtypes else fine  # a float16 is two bfloat16 exactly
    return Config(64 if keys <= 128 else 16, block_v if keys <= 128 else 16, 4, 4, 1, precision, precision, exact, run)


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
    rows = T // c.chunk + N + 1
    A = torch.empty(rows, HV, c.chunk, c.chunk, dtype=dtype, device=q.device)
    P = torch.empty_like(A)
    decays = torch.empty(rows, HV, 2, c.chunk, dtype=torch.float32, device=q.device)
    if has_initial_state is not None and has_initial_state.dtype == torch.bool:
        has_initial_state = has_initial_state.view(torch.int8)
    operand = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]
    slots, ratio, blocks = state.shape[0], HV // HK, triton.cdiv(V, c.block_v)
    sizes = {"K": K, "BK": max(16, triton.next_power_of_2(K)), "BV": c.block_v, "enable_fp_fusion": True}
    products = {"C": c.chunk, "OPERAND": operand, "PRECISION": c.precision}
    solve_kernel[(rows * HV,)](
        q, k, g, beta, cu_seqlens, state_indices, A, P, decays, out, scale, T, N, slots, ratio, HV, V,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), g.stride(0), beta.stride(0), out.stride(0), out.stride(1),
        **sizes, **products, REFINE=c.refine, num_warps=c.solve_warps, num_stages=1,
    )  # fmt: skip
    run = c.run if c.run < T else 0  # no sequence is longer: then one run is all of it
    runs = torch.empty(T // run + N if run else 0, HV, V + K, K, dtype=torch.float32, device=q.device)

    def carry(programs: int, run: int, alone: bool) -> None:
        carry_kernel[(programs,)](
            q, k, v, cu_seqlens, state_indices, has_initial_state, A, P, decays, state, out, runs, scale, T, N, slots, ratio, HV,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0), out.stride(1),
            *state.stride()[:3], V=V, RUN=run, ALONE=alone, STAGES=c.stages, **sizes, **products,
            num_warps=c.carry_warps, num_stages=c.stages,
        )  # fmt: skip

    if not run:
        carry(N * HV * blocks, 0, False)
        return
    carry(len(runs) * HV * (blocks + triton.cdiv(K, c.block_v)), run, True)
    join_kernel[(N * HV * triton.cdiv(V, 16),)](
        cu_seqlens, state_indices, has_initial_state, state, runs, T, N, slots, HV, *state.stride()[:3],
        V=V, RUN=run, PRECISION=c.join, **{**sizes, "BV": 16}, num_warps=4, num_stages=1,
    )  # fmt: skip
    carry(len(runs) * HV * blocks, run, False)
