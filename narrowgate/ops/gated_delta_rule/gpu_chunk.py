"""Prefill of the gated delta rule on the GPU, 64 tokens at a time. The derivation is in this folder's README.

Two kernels. `solve_kernel`, a program a chunk and key head, inverts each value head's triangular system and leaves in memory
four things: A = (I + L)^-1 diag(beta), P = scale q k^T under its decays, and the decays themselves. `carry_kernel`, a
program a sequence, value head and block of V, walks the chunks with its rows of the state in registers and forms the output
on the way, so neither a chunk's state nor what its tokens write goes to memory:

    u = A (v - into K S^T)    o = scale into Q S^T + P u    S = last S + (rest u)^T K

It works on the transposes: u^T, o^T [V, tokens] and S [V, K] are all left operands or results of products whose rows are V, so
the chain from chunk to chunk stays in registers.

Where a chunk's four things lie needs no table: sequence n's chunk c has row start // 64 + n + c, which no two chunks share. A
program finds its sequence by bisection of cu_seqlens; nothing is read on the host. Left out: splitting V of more than ..."""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgate.tile.gpu_math import INTERPRETED, bound, round_to

GONE = tl.constexpr(-1e4)  # exp of it is 0; sums and differences of it are finite


@triton.jit
def _offset(cu_seqlens, n, T):
    """cu_seqlens[n] within the tokens that exist."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int64), 0), T)


@triton.jit
def _slot(state_indices, n, N, SLOTS):
    """The state slot of sequence n, or -1. Sequence N stands for the rows after the last sequence."""
    slot = n.to(tl.int64)
    if state_indices is not None:
        slot = tl.load(state_indices + n, mask=n < N, other=-1).to(tl.int64)
    return tl.where((n < N) & (slot >= 0) & (slot < SLOTS), slot, -1)


@triton.jit
def _find(cu_seqlens, row, N, T, C: tl.constexpr):
    """(sequence, chunk in it, first token, end) of a row of the workspace; sequence N is what lies after the last one."""
    low, end = tl.full((), 0, tl.int32), tl.full((), 0, tl.int64) + T
    if cu_seqlens is None:
        low = tl.where((row > 0) & (row * C >= T), 1, 0)  # one sequence, and nothing after it
        start = end * low
    else:
        high = tl.full((), 0, tl.int32) + N
        while low < high:
            middle = (low + high + 1) // 2
            below = _offset(cu_seqlens, middle, T) // C + middle <= row
            low = tl.where(below, middle, low)
            high = tl.where(below, high, middle - 1)
        start = _offset(cu_seqlens, low, T)
        if low < N:
            end = _offset(cu_seqlens, low + 1, T)
    chunk = row - (start // C + low)
    return low, start + chunk * C, end


@triton.jit
def _pairs(x):
    """[2 B, s] -> the even and the odd rows, [B, s] each."""
    return tl.split(tl.trans(tl.reshape(x, [x.shape[0] // 2, 2, x.shape[1]]), 0, 2, 1))


@triton.jit
def _invert(L, PRECISION: tl.constexpr):
    """(I + L)^-1 of strictly lower L [B, 16, 16]: inverses of diagonal blocks, merged two by two. With D block-diagonal and M
    the part of L that joins the pairs, D - D M D inverts the pairs: forward substitution by blocks, and as stable."""
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    D = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, L, 0.0)
    for level in tl.static_range(1, 4):
        M = tl.where((i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level), L, 0.0)
        D -= tl.dot(tl.dot(D, M, input_precision=PRECISION), D, input_precision=PRECISION)
    return D


@triton.jit
def _beside(a, b):
    """[B, s, s] twice -> [B, s, 2 s]."""
    return tl.reshape(tl.trans(tl.join(a, b), 0, 1, 3, 2), [a.shape[0], a.shape[1], 2 * a.shape[2]])


@triton.jit
def _merge(D, M, PRECISION: tl.constexpr):
    """Inverses D [2 B, s, s] of diagonal blocks and what joins them, M [B, s, s] -> inverses [B, 2 s, 2 s]."""
    B: tl.constexpr = M.shape[0]
    s: tl.constexpr = M.shape[1]
    first, second = tl.split(tl.trans(tl.reshape(D, [B, 2, s, s]), 0, 2, 3, 1))
    joint = -tl.dot(tl.dot(second, M, input_precision=PRECISION), first, input_precision=PRECISION)
    both = tl.join(_beside(first, tl.zeros_like(first)), _beside(joint, second))  # [B, s, 2 s, 2]
    return tl.reshape(tl.trans(both, 0, 3, 1, 2), [B, 2 * s, 2 * s])


@triton.jit
def _rows(x, tokens, stride, end, d, K: tl.constexpr, OPERAND: tl.constexpr):
    """Rows [B, s] of x as [B, s, BK]."""
    inside = (tokens < end)[:, :, None] & (d < K)[None, None, :]
    return tl.load(x + tokens[:, :, None] * stride + d[None, None, :], mask=inside, other=0.0).to(OPERAND)


@triton.jit
def _outer(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, tl.trans(b, 0, 2, 1), input_precision=PRECISION)


@triton.jit
def _link(overlap, strength, high, low, high0, low0, DIAGONAL: tl.constexpr):
    """Blocks [B, s, s] of L: rows' strength and running sums [B, s], columns' running sums [B, s]."""
    between = (high[:, :, None] - high0[:, None, :]) + (low[:, :, None] - low0[:, None, :])
    if DIAGONAL:
        i = tl.arange(0, high.shape[1])
        between = tl.where(i[None, :, None] > i[None, None, :], between, float("-inf"))
    return strength[:, :, None] * overlap * tl.exp(between)


@triton.jit
def _joint(overlap, strength, high, low):
    """What joins pairs of blocks, [B, s, s], from strengths and running sums [2 B, s]."""
    h0, h1 = _pairs(high)
    l0, l1 = _pairs(low)
    s0, s1 = _pairs(strength)
    return _link(overlap, s1, h1, l1, h0, l0, False)


@triton.jit
def solve_kernel(
    q, k, g, beta, cu_seqlens, state_indices, A, P, decays, out, scale,
    T, N, SLOTS, RATIO, HK, V, q_t, q_h, k_t, k_h, g_t, beta_t, out_t, out_h,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    MERGE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row, hk = program // HK, program % HK
    n, first, end = _find(cu_seqlens, row, N, T, C)
    if first < end:
        tokens = first + tl.arange(0, C)
        live = tokens < end
        if _slot(state_indices, n, N, SLOTS) < 0:
            columns = tl.arange(0, BV)
            for h in range(bound(RATIO)):
                for v in range(0, bound(V), BV):
                    where = out + tokens[:, None] * out_t + (hk * RATIO + h) * out_h + v + columns[None, :]
                    tl.store(where, tl.zeros([C, BV], out.dtype.element_ty), mask=live[:, None] & (v + columns < V)[None, :])
        else:
            d, i = tl.arange(0, BK), tl.arange(0, C)
            k += hk * k_h
            q += hk * q_h
            b4: tl.constexpr = C // 16
            by4 = tl.arange(0, b4)[:, None] * 16 + tl.arange(0, 16)[None, :]
            keys = _rows(k, first + by4, k_t, end, d, K, OPERAND)
            overlap = _outer(keys, keys, PRECISION)
            if b4 >= 2:
                by2 = tl.arange(0, b4 // 2)[:, None] * 32 + tl.arange(0, 16)[None, :]
                odd, even = _rows(k, first + by2 + 16, k_t, end, d, K, OPERAND), _rows(k, first + by2, k_t, end, d, K, OPERAND)
                overlap2 = _outer(odd, even, PRECISION)
            if b4 == 4:
                by1 = tl.arange(0, 1)[:, None] + tl.arange(0, 32)[None, :]
                later, early = _rows(k, first + by1 + 32, k_t, end, d, K, OPERAND), _rows(k, first + by1, k_t, end, d, K, OPERAND)
                overlap1 = _outer(later, early, PRECISION)
            inside = live[:, None] & (d < K)[None, :]
            all_keys = tl.load(k + tokens[:, None] * k_t + d[None, :], mask=inside, other=0.0).to(OPERAND)
            queries = tl.load(q + tokens[:, None] * q_t + d[None, :], mask=inside, other=0.0).to(OPERAND)
            reads = tl.dot(queries, tl.trans(all_keys), input_precision=PRECISION) * scale
            for h in range(bound(RATIO)):
                head = hk * RATIO + h
                # Running sums in float64, and as a float32 pair: after one token of -90 plain float32 differences lose 4 digits.
                steps = tl.load(g + tokens * g_t + head, mask=live, other=0.0).to(tl.float64)
                total = tl.cumsum(tl.maximum(steps, GONE), axis=0)
                last = tl.sum(tl.where(i == C - 1, total, 0.0), axis=0)
                high = total.to(tl.float32)
                low = (total - high.to(tl.float64)).to(tl.float32)
                strength = tl.load(beta + tokens * beta_t + head, mask=live, other=0.0)
                high4, low4, strength4 = tl.reshape(high, [b4, 16]), tl.reshape(low, [b4, 16]), tl.reshape(strength, [b4, 16])
                D = _invert(_link(overlap, strength4, high4, low4, high4, low4, True), MERGE)
                if b4 >= 2:
                    D = _merge(D, _joint(overlap2, strength4, high4, low4), MERGE)
                if b4 == 4:
                    high2, low2, strength2 = tl.reshape(high, [2, 32]), tl.reshape(low, [2, 32]), tl.reshape(strength, [2, 32])
                    D = _merge(D, _joint(overlap1, strength2, high2, low2), MERGE)
                at = row * (HK * RATIO) + head
                square = at * (C * C) + i[:, None] * C + i[None, :]
                tl.store(A + square, round_to(tl.reshape(D, [C, C]) * strength[None, :], OPERAND))
                between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
                between = tl.exp(tl.where(i[:, None] >= i[None, :], between, float("-inf")))
                tl.store(P + square, round_to(reads * between, OPERAND))
                line = at * (2 * C) + i
                tl.store(decays + line, tl.exp(high))
                tl.store(decays + line + C, tl.exp((last - total).to(tl.float32)))


@triton.jit
def carry_kernel(
    q, k, v, cu_seqlens, state_indices, has_initial_state, A, P, decays, state, out, runs, scale,
    T, N, SLOTS, RATIO, HV, q_t, q_h, k_t, k_h, v_t, v_h, out_t, out_h, state_s, state_h, state_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, RUN: tl.constexpr,
    ALONE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walk one run of one sequence (all of it if RUN is 0) with BV rows of one head's state, and write outputs and the last state.

    ALONE: walk a run that is not a sequence's last from a zero state, and from the identity without values, no output. That gives
    what the run itself leaves, and the matrix by which it changes what it starts from: the rows of runs [rows, HV, V + K, K]."""
    if ALONE:
        blocks: tl.constexpr = (V + BV - 1) // BV + (K + BV - 1) // BV
    else:
        blocks: tl.constexpr = (V + BV - 1) // BV
    values_end: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0).to(tl.int64)
    block, head, row = program % blocks, program // blocks % HV, program // blocks // HV
    if RUN:
        n, first, end = _find(cu_seqlens, row, N, T, RUN)
    else:
        n = row.to(tl.int32)
        first, end = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64) + T
        if cu_seqlens is not None:
            first, end = _offset(cu_seqlens, n, T), _offset(cu_seqlens, n + 1, T)
    slot = _slot(state_indices, n, N, SLOTS)
    start = first
    stop = end
    if RUN:
        start = tl.full((), 0, tl.int64)
        if cu_seqlens is not None:
            start = _offset(cu_seqlens, tl.minimum(n, N - 1), T)
        stop = tl.minimum(end, first + RUN)
    if ALONE:
        here = (slot >= 0) & (stop < end)
    else:
        here = (slot >= 0) & ((first < end) | (first == start))
    if here:
        d, i = tl.arange(0, BK), tl.arange(0, C)
        rows = block * BV + tl.arange(0, BV)
        inside = (rows < V)[:, None] & (d < K)[None, :]
        mine = state + slot * state_s + head * state_h + rows[:, None] * state_v + d[None, :]
        if ALONE:
            shown = (block < values_end) & (rows < V)
            unit = rows - values_end * BV
            S = tl.where((block >= values_end) & (unit[:, None] == d[None, :]), 1.0, 0.0)
            stored = tl.where(block < values_end, rows, V + unit)
            inside = ((block < values_end) & (rows < V) | (block >= values_end) & (unit < K))[:, None] & (d < K)[None, :]
            mine = runs + ((row * HV + head) * (V + K) + stored[:, None]) * K + d[None, :]
        else:
            shown = rows < V
            keep = inside
            if has_initial_state is not None:
                keep = inside & (tl.load(has_initial_state + n) != 0)
            if RUN:  # a later run starts from where the run before it has been taken, see `join_kernel`
                before = runs + (((row - 1) * HV + head) * (V + K) + rows[:, None]) * K + d[None, :]
                S = tl.load(mine, mask=keep & (first == start), other=0.0) + tl.load(before, mask=inside & (first > start), other=0.0)
            else:
                S = tl.load(mine, mask=keep, other=0.0)
        q += head // RATIO * q_h
        k += head // RATIO * k_h
        v += head * v_h
        out += head * out_h
        at = (start // C + n + (first - start) // C) * HV + head
        for chunk in tl.range(0, bound(tl.cdiv(tl.maximum(stop - first, 0), C).to(tl.int32)), num_stages=STAGES):
            offset = chunk * tl.full((), 1, tl.int64)
            tokens = first + offset * C + i
            live = tokens < end
            filled = live[:, None] & (d < K)[None, :]
            seen = live[:, None] & shown[None, :]
            keys = tl.load(k + tokens[:, None] * k_t + d[None, :], mask=filled, other=0.0).to(OPERAND)
            values = tl.load(v + tokens[:, None] * v_t + rows[None, :], mask=seen, other=0.0)
            square = (at + offset * HV) * (C * C) + i[:, None] * C + i[None, :]
            solved = tl.load(A + square)
            line = decays + (at + offset * HV) * (2 * C)
            into, rest, last = tl.load(line + i), tl.load(line + C + i), tl.load(line + C - 1)
            held = round_to(S, OPERAND)
            missing = tl.trans(values).to(tl.float32) - into[None, :] * tl.dot(held, tl.trans(keys), input_precision=PRECISION)
            u = tl.dot(round_to(missing, OPERAND), tl.trans(solved), input_precision=PRECISION)
            if not ALONE:
                queries = tl.load(q + tokens[:, None] * q_t + d[None, :], mask=filled, other=0.0).to(OPERAND)
                mixed = tl.load(P + square)
                o = (into * scale)[None, :] * tl.dot(held, tl.trans(queries), input_precision=PRECISION)
                o = tl.dot(round_to(u, OPERAND), tl.trans(mixed), o, input_precision=PRECISION)
                tl.store(out + tokens[:, None] * out_t + rows[None, :], round_to(tl.trans(o), out.dtype.element_ty), mask=seen)
            S = tl.dot(round_to(u * rest[None, :], OPERAND), keys, S * last, input_precision=PRECISION)
        if ALONE:
            tl.store(mine, S, mask=inside)
        else:
            tl.store(mine, S, mask=inside & (stop == end))


@triton.jit
def join_kernel(
    cu_seqlens, state_indices, has_initial_state, state, runs, T, N, SLOTS, HV, state_s, state_h, state_v,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, RUN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the state through the runs of a sequence: S <- S M + what the run left, which the row of `runs` then holds instead."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0).to(tl.int64)
    block, head, n = program % blocks, program // blocks % HV, (program // blocks // HV).to(tl.int32)
    start, end = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64) + T
    if cu_seqlens is not None:
        start, end = _offset(cu_seqlens, n, T), _offset(cu_seqlens, n + 1, T)
    slot = _slot(state_indices, n, N, SLOTS)
    if (slot >= 0) & (end - start > RUN):
        rows, d = block * BV + tl.arange(0, BV), tl.arange(0, BK)
        inside = (rows < V)[:, None] & (d < K)[None, :]
        keep = inside
        if has_initial_state is not None:
            keep = inside & (tl.load(has_initial_state + n) != 0)
        S = tl.load(state + slot * state_s + head * state_h + rows[:, None] * state_v + d[None, :], mask=keep, other=0.0)
        at = runs + ((start // RUN + n) * HV + head) * ((V + K) * K)
        for run in range(0, bound(((end - start - 1) // RUN).to(tl.int32))):
            where = at + run * (HV * ((V + K) * K)).to(tl.int64)
            M = tl.load(where + (V + d[:, None]) * K + d[None, :], mask=(d < K)[:, None] & (d < K)[None, :], other=0.0)
            left = where + rows[:, None] * K + d[None, :]
            S = tl.dot(S, M, tl.load(left, mask=inside, other=0.0), input_precision=PRECISION)
            tl.store(left, S, mask=inside)


class Config(NamedTuple):
    """Tiles of the kernels for a dtype and head sizes."""

    chunk: int
    block_v: int
    solve_warps: int
    carry_warps: int
    stages: int
    precision: str  # of products in the carry
    merge: str  # of products in the inverse
    join: str  # of products of a state and a run's matrix
    run: int  # tokens that a program of the carry takes at most; 0: a whole sequence


RUN = 2048


def choose(dtypes: set[torch.dtype], heads: int, keys: int, values: int) -> Config:
    """By dtypes and heads only, so that a sequence's bits depend on nothing but itself."""
    block_v = min(64, max(16, triton.next_power_of_2(values)))
    run = RUN if keys <= 128 and heads * triton.cdiv(values, block_v) <= 32 else 0
    exact, fine = ("ieee", "ieee") if INTERPRETED.value else ("bf16x6", "bf16x3")
    if dtypes == {torch.bfloat16}:
        return Config(64, block_v, 4, 4, 2 if keys <= 128 else 1, "ieee", fine, exact, run)
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
    solve_kernel[(rows * HK,)](
        q, k, g, beta, cu_seqlens, state_indices, A, P, decays, out, scale, T, N, slots, ratio, HK, V,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), g.stride(0), beta.stride(0), out.stride(0), out.stride(1),
        **sizes, **products, MERGE=c.merge, num_warps=c.solve_warps, num_stages=1,
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
