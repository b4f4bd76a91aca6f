"""The chunk form's first kernel: what each chunk needs of itself, before any state is known.

A program takes a chunk and a value head and inverts I + L, L_ij = beta_i exp(G_i - G_j) (k_i . k_j) below the diagonal. It leaves
A = (I + L)^-1 diag(beta), P = scale q k^T under its decays, and the decays. Rows that belong to no live sequence get their
zeros here."""

# mypy: allow-untyped-defs
import triton
import triton.language as tl

from narrowgate.ops.gated_delta_rule.gpu_chunk_rows import find, kernels, slot_of
from narrowgate.tile.gpu_math import bound, round_to

GONE = tl.constexpr(-1e4)  # exp of it is 0; sums and differences of it are finite


@triton.jit
def _product(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(round_to(a, OPERAND), round_to(b, OPERAND), input_precision=PRECISION)


@triton.jit
def _invert(L, C: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 of a strictly lower L [C, C]: inverses of diagonal blocks, merged two by two. With D block-diagonal and
    M the part of L that joins the pairs, D - D M D inverts the pairs: forward substitution by blocks, as stable as it is.

    Products of 16-bit operands leave an error of 5e-4 to 8e-3; one Newton step D + D (I - (I + L) D), whose inner product is in
    precision is that of L as two operands, squares that."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    one = tl.where(i == j, 1.0, 0.0)
    D = one - tl.where(i // 2 == j // 2, L, 0.0)
    for level in tl.static_range(1, 6):
        if (1 << level) < C:
            M = tl.where((i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level), L, 0.0)
            D -= _product(_product(D, M, OPERAND, PRECISION), D, OPERAND, PRECISION)
    if OPERAND != tl.float32:  # noqa: SIM300
        near = round_to(D, OPERAND)
        high = round_to(L, OPERAND)
        product = tl.dot(round_to(L - high.to(tl.float32), OPERAND), near, input_precision=PRECISION)
        product = tl.dot(high, near, product, input_precision=PRECISION)
        D = near.to(tl.float32)
        D += tl.dot(near, round_to(one - D - product, OPERAND), input_precision=PRECISION)
    return D


@triton.jit
def _solve_kernel(
    q, k, g, beta, cu_seqlens, state_indices, AP, decays, state, before, out, scale,
    T, N, SLOTS, RATIO, HV, K, V, q_t, q_h, k_t, k_h, g_t, beta_t, state_s, state_h, state_v, out_t, out_h,
    WHOLE: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, RUN: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    if WHOLE:
        K = BK
    program = tl.program_id(0).to(tl.int64)
    row, head = program // HV, program % HV
    n, chunk, start, end = find(cu_seqlens, row, N, T, C)
    first = start + chunk * C
    if first < end:
        tokens = first + tl.arange(0, C)
        live = tokens < end
        slot = slot_of(state_indices, n, N, SLOTS)
        if slot < 0:
            columns = tl.arange(0, BV)
            for v in range(0, bound(V), BV):
                where = out + tokens[:, None] * out_t + head * out_h + v + columns[None, :]
                tl.store(where, tl.zeros([C, BV], out.dtype.element_ty), mask=live[:, None] & (v + columns < V)[None, :])
        else:
            i, j, d = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], tl.arange(0, BK)
            inside = live[:, None] & (d < K)[None, :]  # all loads stand ahead of the sums, which would hold them back
            steps = tl.load(g + tokens * g_t + head, mask=live, other=0.0).to(tl.float64)
            where = tokens[:, None] * k_t + head // RATIO * k_h + d[None, :]
            keys = tl.load(k + where, mask=inside, other=0.0).to(OPERAND)
            where = tokens[:, None] * q_t + head // RATIO * q_h + d[None, :]
            queries = tl.load(q + where, mask=inside, other=0.0).to(OPERAND)
            strength = tl.load(beta + tokens * beta_t + head, mask=live, other=0.0)
            if (chunk == 0) & (end - start > RUN):  # its last run may be done before its first one has read the state
                for v in range(0, bound(V), C):
                    rows = (v + tl.arange(0, C))[:, None]
                    there = (rows < V) & (d < K)
                    begin = tl.load(state + slot * state_s + head * state_h + rows * state_v + d, mask=there, other=0.0)
                    tl.store(before + ((start // RUN * HV + head) * V + rows) * K + d, begin, mask=there)
            # Running sums in float64, then as a float32 pair: after one token of -90 plain float32 differences lose 4 digits.
            total = tl.cumsum(tl.maximum(steps, GONE), axis=0)
            last = tl.sum(tl.where(tl.arange(0, C) == C - 1, total, 0.0), axis=0)
            high = total.to(tl.float32)
            low = (total - high.to(tl.float64)).to(tl.float32)
            line = decays + (row * HV + head) * (2 * C) + tl.arange(0, C)
            into = tl.exp(high)
            tl.store(line, into)
            tl.store(line + C, scale * into)
            rest = tl.exp((last - total).to(tl.float32))
            between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
            between = tl.exp(tl.where(i >= j, between, float("-inf")))
            mixed = round_to(tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale * between, OPERAND)
            overlap = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
            L = tl.where(i > j, strength[:, None] * overlap * between, 0.0)
            solved = _invert(L, C, OPERAND, PRECISION) * strength[None, :]
            square = AP + (row * HV + head) * (2 * C * C) + i * C + j
            tl.store(square, round_to(solved * rest[:, None], OPERAND))
            tl.store(square + C * C, round_to(tl.dot(mixed, round_to(solved, OPERAND), input_precision=PRECISION), OPERAND))


solve_kernel = kernels(_solve_kernel)
