"""The gated delta rule token after token, in one kernel: single steps, whole sequences, drafts, and steps from packed rows.

A task is one sequence, one value head and up to ROWS rows of its state, which stay in the first caches while the task walks
the sequence's tokens. For each token and each row r of the state (K values):

    s = sum_k (decay * S[r, k]) * k[k]          one pass over the row
    S[r, k] = decay * S[r, k] + ((v[r] - s) * beta) * k[k],  o[r] = sum_k S[r, k] * q[k]          and another

with every product and sum rounded apart. Lane i of a sum adds k = i, i + 16, ...; then the lanes are added pairwise. So the
order depends on K alone, and the four forms give the same bits for the same token, whatever the batch, the slots, the
threads. Four rows go at a time, so that their sums overlap, but each is read from end to end before the next: taken in turns
their lines came in an order that the processor's prefetcher gave up on, at a third of the speed (README). The state is read from
one place and written to another (the same one, but for drafts), in its own dtype: rounding after each token is what
single steps would do, and the output comes from the unrounded values."""

# mypy: allow-untyped-defs
from __future__ import annotations

import numba
import numpy as np

from narrowgate.ops.gated_delta_rule.op import CPU_KEYS
from narrowgate.ops.gates.cpu import decay_lanes
from narrowgate.ops.norms.cpu import sum_of_squares
from narrowgate.simd import cpu as simd
from narrowgate.simd import cpu_math as math
from narrowgate.simd.cpu import inline
from narrowgate.simd.cpu_threads import parallel
from narrowgate.simd.cpu_values import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    NONE,
    clear_bytes,
    load_first,
    read_index,
    read_value,
    size_of,
    store_first,
    write_value,
)

ROWS = 64  # rows of the state in a task
STEPS, SEQUENCES, DRAFTS, PACKED = range(4)
assert 4 * CPU_KEYS == 8192  # the scratch of a key
_ZERO = np.float32(0.0)


@inline
def read_row(kind, source, n, decay, k):
    """The sum of decay * S * k over a row, in lanes."""
    size, sums = size_of(kind), simd.splat(_ZERO)
    for i in range(0, n, 16):
        value = simd.mul(load_first(kind, source + i * size, n - i), decay)
        sums = simd.add(sums, simd.mul(value, simd.load_f32(k + 4 * i)))
    return sums


@inline
def write_row(kind, source, to, n, decay, missing, k, q):
    """A row written; its output, in lanes. `missing`: what it lacks along k."""
    size, sums = size_of(kind), simd.splat(_ZERO)
    for i in range(0, n, 16):
        value = simd.mul(load_first(kind, source + i * size, n - i), decay)
        value = simd.add(value, simd.mul(missing, simd.load_f32(k + 4 * i)))
        store_first(kind, to + i * size, value, n - i)
        sums = simd.add(sums, simd.mul(value, simd.load_f32(q + 4 * i)))
    return sums


@inline
def missing_of(value, sums, beta):
    return simd.splat((simd.read_f32(value) - simd.total(sums)) * beta)


@inline
def advance(kind, source, stride, to, to_stride, rows, n, decay, beta, k, q, values, outputs):
    """One token of `rows` rows; values: float32 v, outputs: float32 o."""
    fours = rows // 4 * 4
    for r in range(0, fours, 4):
        at, v, o, into = source + r * stride, values + 4 * r, outputs + 4 * r, to + r * to_stride
        a = read_row(kind, at, n, decay, k)
        b = read_row(kind, at + stride, n, decay, k)
        c = read_row(kind, at + 2 * stride, n, decay, k)
        d = read_row(kind, at + 3 * stride, n, decay, k)
        a, b, c, d = missing_of(v, a, beta), missing_of(v + 4, b, beta), missing_of(v + 8, c, beta), missing_of(v + 12, d, beta)
        simd.write_f32(o, simd.total(write_row(kind, at, into, n, decay, a, k, q)))
        simd.write_f32(o + 4, simd.total(write_row(kind, at + stride, into + to_stride, n, decay, b, k, q)))
        simd.write_f32(o + 8, simd.total(write_row(kind, at + 2 * stride, into + 2 * to_stride, n, decay, c, k, q)))
        simd.write_f32(o + 12, simd.total(write_row(kind, at + 3 * stride, into + 3 * to_stride, n, decay, d, k, q)))
    for r in range(fours, rows):
        at = source + r * stride
        missing = missing_of(values + 4 * r, read_row(kind, at, n, decay, k), beta)
        sums = write_row(kind, at, to + r * to_stride, n, decay, missing, k, q)
        simd.write_f32(outputs + 4 * r, simd.total(sums))


@inline
def times(kind, source, n, factor, into):
    """float32 of a row times a number, zeros up to whole vectors."""
    lanes, size = simd.splat(factor), size_of(kind)
    for i in range(0, n, 16):
        simd.store_f32(into + 4 * i, simd.mul(load_first(kind, source + i * size, n - i), lanes))


@inline
def inverse_norm(kind, source, n):
    return np.float32(1.0) / simd.lane0(simd.sqrt(simd.splat(sum_of_squares(kind, source, n) + np.float32(1e-6))))


@inline
def put(kind, to, count, outputs):
    """Outputs, rounded once."""
    for i in range(0, count, 16):
        store_first(kind, to + i * size_of(kind), simd.load_f32(outputs + 4 * i), min(count - i, 16))


@numba.njit
def task(index, mode, q, k, v, a, b, per_head, out, state, sizes, cu, indices, flags, accepted, workspace, scale, round_beta):
    """q, k, v, out: (address, token stride, head stride, kind); a, b (g and beta, or the raw gates): (address, token stride,
    kind); per_head: A_log and dt_bias, (address, kind) each; state: (address, slot, head and row stride, kind); sizes:
    (tokens, Hk, Hv, K, V, slots, columns of indices); cu, indices, flags, accepted: (address, bytes an entry)."""
    tokens, key_heads, heads, n, width, slots, columns = sizes
    blocks = (width + ROWS - 1) // ROWS
    i, h, first = index // (blocks * heads), index // blocks % heads, index % blocks * ROWS
    rows, key_head, kind = min(width - first, ROWS), h // (heads // key_heads), state[4]
    start, end = i, i + 1
    if mode != STEPS and mode != PACKED:
        start, end = 0, tokens
        if cu[1] != NONE:
            start, end = read_index(cu[0], cu[1], i), read_index(cu[0], cu[1], i + 1)
    slot = i
    if mode == DRAFTS:
        if start == end:
            return
        slot = read_index(indices[0], indices[1], i * columns + read_index(accepted[0], accepted[1], i) - 1)
    elif indices[1] != NONE:
        slot = read_index(indices[0], indices[1], i)
    outputs, values, keys, queries = simd.scratch(256), simd.scratch(256), simd.scratch(8192), simd.scratch(8192)
    to_out = out[0] + h * out[2] + first * size_of(out[3])
    if slot < 0 or slot >= slots:
        for r in range(0, ROWS, 16):
            simd.store_f32(outputs + 4 * r, simd.splat(_ZERO))
        for t in range(start, end):
            put(out[3], to_out + t * out[1], rows, outputs)
        return
    inside = h * state[2] + first * state[3]
    source, stride = state[0] + slot * state[1] + inside, state[3]
    if flags[1] != NONE and read_index(flags[0], flags[1], i) == 0:
        for r in range(rows):
            clear_bytes(source + r * stride, n * size_of(kind))
    for t in range(start, end):
        at_q, at_k = q[0] + t * q[1] + key_head * q[2], k[0] + t * k[1] + key_head * k[2]
        if mode == PACKED:
            times(q[3], at_q, n, inverse_norm(q[3], at_q, n) * scale, queries)
            times(k[3], at_k, n, inverse_norm(k[3], at_k, n), keys)
            x = read_value(a[2], a[0] + t * a[1] + h * size_of(a[2]))
            A_log = read_value(per_head[1], per_head[0] + h * size_of(per_head[1]))
            bias = read_value(per_head[3], per_head[2] + h * size_of(per_head[3]))
            g = decay_lanes(simd.splat(x), simd.splat(bias), simd.splat(A_log), 0)
            beta = simd.lane0(math.sigmoid(simd.splat(read_value(b[2], b[0] + t * b[1] + h * size_of(b[2])))))
            if round_beta:
                write_value(b[2], outputs, beta)
                beta = read_value(b[2], outputs)
        else:
            times(q[3], at_q, n, scale, queries)
            times(k[3], at_k, n, np.float32(1.0), keys)
            g = simd.splat(simd.read_f32(a[0] + t * a[1] + 4 * h))
            beta = simd.read_f32(b[0] + t * b[1] + 4 * h)
        times(v[3], v[0] + t * v[1] + h * v[2] + first * size_of(v[3]), rows, np.float32(1.0), values)
        decay, to, to_stride = math.exp(g), source, stride
        if mode == DRAFTS:
            slot = read_index(indices[0], indices[1], i * columns + t - start)
            to, to_stride = state[0] + slot * state[1] + inside, state[3]
            if slot < 0 or slot >= slots:  # no snapshot is wanted: the state goes on in the workspace
                to_stride = n * size_of(kind)
                to = workspace + ((i * heads + h) * width + first) * to_stride
        if kind == FLOAT32:
            advance(FLOAT32, source, stride, to, to_stride, rows, n, decay, beta, keys, queries, values, outputs)
        elif kind == BFLOAT16:
            advance(BFLOAT16, source, stride, to, to_stride, rows, n, decay, beta, keys, queries, values, outputs)
        else:
            advance(FLOAT16, source, stride, to, to_stride, rows, n, decay, beta, keys, queries, values, outputs)
        put(out[3], to_out + t * out[1], rows, outputs)
        source, stride = to, to_stride


def delta_rule(
    mode, q, k, v, a, b, per_head, out, state, sizes, count, cu, indices, flags, accepted, workspace, scale, round_beta, team
):  # fmt: skip
    arguments = (mode, q, k, v, a, b, per_head, out, state, sizes, cu, indices, flags, accepted, workspace, scale, round_beta)
    parallel(task, arguments, count * sizes[2] * ((sizes[4] + ROWS - 1) // ROWS), team)
