"""The chunk form's first kernel: what each chunk needs of itself, before any state is known.

A program takes a chunk and a key head, and for each value head inverts I + L, L_ij = beta_i exp(G_i - G_j) (k_i . k_j) below the
diagonal. Diagonal blocks are inverted and merged two by two, D - D M D, up to 16 by masks, then block by block: that is forward
substitution by blocks, as stable as it is, and all of it products. It leaves A = (I + L)^-1 diag(beta), P = scale q k^T under
its decays, and the decays. Rows that belong to no live sequence get their zeros here."""

# mypy: allow-untyped-defs
import triton
import triton.language as tl

from narrowgate.ops.gated_delta_rule.gpu_chunk_rows import find, slot_of
from narrowgate.tile.gpu_math import bound, round_to

GONE = tl.constexpr(-1e4)  # exp of it is 0; sums and differences of it are finite


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
    _s0, s1 = _pairs(strength)
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
    n, first, end = find(cu_seqlens, row, N, T, C)
    if first < end:
        tokens = first + tl.arange(0, C)
        live = tokens < end
        if slot_of(state_indices, n, N, SLOTS) < 0:
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
                later, early = (
                    _rows(k, first + by1 + 32, k_t, end, d, K, OPERAND),
                    _rows(k, first + by1, k_t, end, d, K, OPERAND),
                )
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
