"""The chunk form's second kernel, which takes the state from chunk to chunk and forms the outputs on the way, and its helper.

Nothing of a chunk's state, nor what its tokens write, goes to memory. The products are of the transposes: u^T and o^T
[V, tokens], S [V, K]. Each is a left operand or a result whose rows are V, so the chain from chunk to chunk stays in registers.

A long sequence of few heads would keep few multiprocessors busy. It is cut into runs: all runs are walked at once from nothing
and from the identity, `join_kernel` takes the state through them, and all are walked again with their outputs."""

# mypy: allow-untyped-defs
import triton
import triton.language as tl

from narrowgate.ops.gated_delta_rule.gpu_chunk_rows import clamped, find, kernels, slot_of
from narrowgate.tile.gpu_math import bound, round_to


@triton.jit
def _halves(x):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def _beside(a, b):
    return tl.reshape(tl.permute(tl.join(a, b), [0, 2, 1]), [a.shape[0], 2 * a.shape[1]])


@triton.jit
def _needed(decays, part, start, end, n, head, HV, C: tl.constexpr, RUN: tl.constexpr):
    """How many chunks before a sequence's run `part` have to be walked until what came earlier has decayed below 2^-48; 0 if a
    whole run does not do."""
    back = tl.arange(0, RUN // C)
    rows = start // C + n + part * (RUN // C) - 1 - back
    there = (part > 0) & (start + part * RUN < end)
    left = tl.cumprod(tl.load(decays + (rows * HV + head) * (2 * C) + C - 1, mask=there, other=1.0), axis=0)
    short = tl.sum(tl.where(left < 2.0**-48, 0, 1), axis=0) + 1
    return tl.where(short <= RUN // C, short, 0)


@triton.jit
def _carry_kernel(
    q, k, v, cu_seqlens, state_indices, has_initial_state, AP, decays, state, before, out, runs,
    T, N, SLOTS, RATIO, HV, K, V, q_t, q_h, k_t, k_h, v_t, v_h, out_t, out_h, state_s, state_h, state_v,
    WHOLE: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, RUN: tl.constexpr,
    WALK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walk one run of one sequence with BV rows of one head's state, and write outputs and the last state.

    WALK "cut": a run starts from zero a few chunks early where everything older has decayed, and goes on where not.
    "alone": walk a run that is not a sequence's last from a zero state, and from the identity without values, no output. That gives
    what the run itself leaves, and the matrix by which it changes what it starts from: the rows of runs [rows, HV, V + K, K].
    "joined": start from what `join_kernel` has made of these."""
    ALONE: tl.constexpr = WALK == "alone"
    if WHOLE:
        K = BK
    values_end = (V + BV - 1) // BV
    blocks = values_end + (K + BV - 1) // BV if ALONE else values_end
    program = tl.program_id(0).to(tl.int64)
    block, head, row = program % blocks, program // blocks % HV, program // blocks // HV
    n, part, start, end = find(cu_seqlens, row, N, T, RUN)
    slot = slot_of(state_indices, n, N, SLOTS)
    first = start + part * RUN
    stop = tl.minimum(end, first + RUN)
    warm = 0
    here = (stop < end) if ALONE else (first < end) | (part == 0)
    if WALK == "cut":
        warm = _needed(decays, part, start, end, n, head, HV, C, RUN)
        here &= (part == 0) | (warm > 0)
    if here & (slot >= 0):
        if WALK == "cut":
            later = part + 1
            while (start + later * RUN < end) & (_needed(decays, later, start, end, n, head, HV, C, RUN) == 0):
                later += 1
            stop = tl.minimum(end, start + later * RUN)
        d, i, j = tl.arange(0, BK), tl.arange(0, C), tl.arange(0, 2 * C)
        rows = block * BV + tl.arange(0, BV)
        shown = (rows < V) | WHOLE
        inside = shown[:, None] & (d < K)[None, :]
        mine = state + slot * state_s + head * state_h + rows[:, None] * state_v + d[None, :]
        if ALONE:
            shown &= block < values_end
            unit = rows - values_end * BV
            S = tl.where((block >= values_end) & (unit[:, None] == d[None, :]), 1.0, 0.0)
            stored = tl.where(block < values_end, rows, V + unit)
            inside = (shown | (block >= values_end) & (unit < K))[:, None] & (d < K)[None, :]
            mine = runs + ((row * HV + head) * (V + K) + stored[:, None]) * K + d[None, :]
        else:
            keep = inside & (part == 0)
            if has_initial_state is not None:
                keep &= tl.load(has_initial_state + n) != 0
            kept = before + ((start // RUN * HV + head) * V + rows[:, None]) * K + d[None, :]
            long = end - start > RUN
            S = tl.load(mine, mask=keep & (long == 0), other=0.0) + tl.load(kept, mask=keep & long, other=0.0)
            if WALK == "joined":
                left = runs + (((row - 1) * HV + head) * (V + K) + rows[:, None]) * K + d[None, :]
                S += tl.load(left, mask=inside & (part > 0), other=0.0)
        q += head // RATIO * q_h
        k += head // RATIO * k_h
        v += head * v_h
        out += head * out_h
        early = first - warm * C
        at = (start // C + n + part * (RUN // C) - warm) * HV + head
        for chunk in tl.range(0, bound(tl.cdiv(tl.maximum(stop - early, 0), C).to(tl.int32)), num_stages=STAGES):
            offset = chunk * tl.full((), 1, tl.int64)
            tokens = early + offset * C + i
            live = tokens < end
            filled = live[:, None] & (d < K)[None, :]
            seen = live[:, None] & shown[None, :]
            keys = tl.load(k + tokens[:, None] * k_t + d[None, :], mask=filled, other=0.0).to(OPERAND)
            values = tl.load(v + tokens[:, None] * v_t + rows[None, :], mask=seen, other=0.0).to(OPERAND)
            both = AP + (at + offset * HV) * (2 * C * C) + j[:, None] * C + i[None, :]
            line = decays + (at + offset * HV) * (2 * C)
            into, last = tl.load(line + i), tl.load(line + C - 1)
            held = round_to(S, OPERAND)
            seen_by_keys = into[None, :] * tl.dot(held, tl.trans(keys), input_precision=PRECISION)
            if ALONE:
                solved = tl.load(AP + (at + offset * HV) * (2 * C * C) + i[:, None] * C + i[None, :])
                u = tl.dot(tl.trans(values), tl.trans(solved), input_precision=PRECISION)
                u = tl.dot(round_to(-seen_by_keys, OPERAND), tl.trans(solved), u, input_precision=PRECISION)
            else:
                queries = tl.load(q + tokens[:, None] * q_t + d[None, :], mask=filled, other=0.0).to(OPERAND)
                solved = tl.load(both)
                seen_by_queries = tl.load(line + C + i)[None, :] * tl.dot(held, tl.trans(queries), input_precision=PRECISION)
                uo = _beside(tl.zeros_like(seen_by_queries), seen_by_queries)
                uo = tl.dot(tl.trans(values), tl.trans(solved), uo, input_precision=PRECISION)
                uo = tl.dot(round_to(-seen_by_keys, OPERAND), tl.trans(solved), uo, input_precision=PRECISION)
                u, o = _halves(uo)
                seen &= (tokens >= first)[:, None]
                tl.store(out + tokens[:, None] * out_t + rows[None, :], round_to(tl.trans(o), out.dtype.element_ty), mask=seen)
            S = tl.dot(round_to(u, OPERAND), keys, S * last, input_precision=PRECISION)
        if ALONE:
            tl.store(mine, S, mask=inside)
        else:
            tl.store(mine, S, mask=inside & (stop == end))


@triton.jit
def _join_kernel(
    cu_seqlens, state_indices, has_initial_state, state, runs, T, N, SLOTS, RATIO, HV, K, V, state_s, state_h, state_v,
    BK: tl.constexpr, BV: tl.constexpr, RUN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the state through the runs of a sequence: S <- S M + what the run left, which the row of `runs` then holds instead."""
    blocks = (V + BV - 1) // BV
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
            where = at + run * (tl.full((), 0, tl.int64) + HV) * ((V + K) * K)
            M = tl.load(where + (V + d[:, None]) * K + d[None, :], mask=(d < K)[:, None] & (d < K)[None, :], other=0.0)
            left = where + rows[:, None] * K + d[None, :]
            S = tl.dot(S, M, tl.load(left, mask=inside, other=0.0), input_precision=PRECISION)
            tl.store(left, S, mask=inside)


carry_kernel, join_kernel = kernels(_carry_kernel), kernels(_join_kernel)
