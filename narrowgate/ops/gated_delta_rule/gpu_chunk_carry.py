"""The chunk form's second kernel, which takes the state from chunk to chunk and forms the outputs on the way, and its helper.

Nothing of a chunk's state, nor what its tokens write, goes to memory. The products are of the transposes: u^T and o^T
[V, tokens], S [V, K]. Each is a left operand or a result whose rows are V, so the chain from chunk to chunk stays in registers.

A long sequence of few heads would keep few multiprocessors busy. It is cut into runs: all runs are walked at once from nothing
and from the identity, `join_kernel` takes the state through them, and all are walked again with their outputs."""

# mypy: allow-untyped-defs
import triton
import triton.language as tl

from narrowgate.ops.gated_delta_rule.gpu_chunk_rows import clamped, find, slot_of
from narrowgate.tile.gpu_math import bound, round_to


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
    values_end: tl.constexpr = (V + BV - 1) // BV
    blocks: tl.constexpr = values_end + (K + BV - 1) // BV if ALONE else values_end
    program = tl.program_id(0).to(tl.int64)
    block, head, row = program % blocks, program // blocks % HV, program // blocks // HV
    if RUN:
        n, first, end = find(cu_seqlens, row, N, T, RUN)
    else:
        n = row.to(tl.int32)
        first, end = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64) + T
        if cu_seqlens is not None:
            first, end = clamped(cu_seqlens, n, T), clamped(cu_seqlens, n + 1, T)
    slot = slot_of(state_indices, n, N, SLOTS)
    start = first
    stop = end
    if RUN:
        start = tl.full((), 0, tl.int64)
        if cu_seqlens is not None:
            start = clamped(cu_seqlens, tl.minimum(n, N - 1), T)
        stop = tl.minimum(end, first + RUN)
    here = (stop < end) if ALONE else (first < end) | (first == start)
    if here & (slot >= 0):
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
                S = tl.load(mine, mask=keep & (first == start), other=0.0) + tl.load(
                    before, mask=inside & (first > start), other=0.0
                )
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
            values = tl.load(v + tokens[:, None] * v_t + rows[None, :], mask=seen, other=0.0).to(OPERAND)
            square = (at + offset * HV) * (C * C) + i[:, None] * C + i[None, :]
            solved = tl.load(A + square)
            line = decays + (at + offset * HV) * (2 * C)
            into, rest, last = tl.load(line + i), tl.load(line + C + i), tl.load(line + C - 1)
            held = round_to(S, OPERAND)
            read = into[None, :] * tl.dot(held, tl.trans(keys), input_precision=PRECISION)
            u = tl.dot(tl.trans(values), tl.trans(solved), input_precision=PRECISION)
            u = tl.dot(round_to(-read, OPERAND), tl.trans(solved), u, input_precision=PRECISION)
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
        start, end = clamped(cu_seqlens, n, T), clamped(cu_seqlens, n + 1, T)
    slot = slot_of(state_indices, n, N, SLOTS)
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
