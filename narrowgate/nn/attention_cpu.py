"""One decoding step of gated attention on the CPU: rotate, remember, attend, gate, in one call for all sequences.

A sequence's past is read in chunks of 128 keys that start at multiples of 128: a task takes one chunk and one key head, for all query
heads that share it, so each key and value is read once. It leaves a sum, a maximum and a sum of weights, and a second round joins the
chunks in order. Nothing depends on the threads, on the other sequences or on the size of a buffer. Math in float32.

    score[s] = (q * D^-0.5) . k[s], fma in 16 lanes, the lanes added pairwise
    part = sum exp(score[s] - m) v[s], fma, s ascending;   y = sum_c exp(m_c - M) part_c / sum_c exp(m_c - M) l_c * sigmoid(gate)"""

# mypy: allow-untyped-defs
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from narrowgate.simd import cpu as simd
from narrowgate.simd import cpu_math as math
from narrowgate.simd.cpu_compile import compiled
from narrowgate.simd.cpu_rows import SMALL
from narrowgate.simd.cpu_threads import parallel, threads
from narrowgate.simd.cpu_values import FLOAT32, KINDS, load_first, read_value, size_of, store_first, write_value

CHUNK = 128  # keys of a task
HEADS = 16  # query heads that may share a key head
DIM = 512  # values of a head
_LOW = np.float32(-np.inf)


@numba.njit
def _rotated(x, kind, cos, sin, dim, half, factor, into):
    """A head as float32, its first 2 * half values rotated (each product and sum rounded apart), all times `factor`."""
    size = size_of(kind)
    for i in range(half):
        first, second = read_value(kind, x + i * size), read_value(kind, x + (half + i) * size)
        c, s = simd.read_f32(cos + 4 * i), simd.read_f32(sin + 4 * i)
        simd.write_f32(into + 4 * i, (first * c - second * s) * factor)
        simd.write_f32(into + 4 * (half + i), (second * c + first * s) * factor)
    for i in range(2 * half, dim):
        simd.write_f32(into + 4 * i, read_value(kind, x + i * size) * factor)


@numba.njit
def _remember(k, v, kind, from_kind, cos, sin, dim, half, keys, values):
    """The new key, rotated, and the new value of a head to their places."""
    line = simd.scratch(2112)
    _rotated(k, from_kind, cos, sin, dim, half, np.float32(1.0), line)
    for i in range(dim):
        write_value(kind, keys + i * size_of(kind), simd.read_f32(line + 4 * i))
        write_value(kind, values + i * size_of(kind), read_value(from_kind, v + i * size_of(from_kind)))


@numba.njit
def _line(source, kind, dim, into):
    """The address of a key or value as float32 with zeros up to whole sixteens: where it is, or `into`, which is filled."""
    if kind == FLOAT32 and dim % 16 == 0:
        return source
    for i in range(0, dim, 16):
        simd.store_f32(into + 4 * i, load_first(kind, source + i * size_of(kind), dim - i))
    return into


@numba.njit
def _dots(queries, line, width, heads, scores):
    """scores[h][0] of one key, for all heads; four heads share what is read of it."""
    whole = heads // 4 * 4
    for h in range(0, whole, 4):
        q = queries + h * width * 4
        a = b = c = d = simd.splat(np.float32(0.0))
        for i in range(0, width, 16):
            k = simd.load_f32(line + 4 * i)
            a = simd.fma(simd.load_f32(q + 4 * i), k, a)
            b = simd.fma(simd.load_f32(q + 4 * (width + i)), k, b)
            c = simd.fma(simd.load_f32(q + 4 * (2 * width + i)), k, c)
            d = simd.fma(simd.load_f32(q + 4 * (3 * width + i)), k, d)
        simd.write_f32(scores + h * CHUNK * 4, simd.total(a))
        simd.write_f32(scores + (h + 1) * CHUNK * 4, simd.total(b))
        simd.write_f32(scores + (h + 2) * CHUNK * 4, simd.total(c))
        simd.write_f32(scores + (h + 3) * CHUNK * 4, simd.total(d))
    for h in range(whole, heads):
        q, a = queries + h * width * 4, simd.splat(np.float32(0.0))
        for i in range(0, width, 16):
            a = simd.fma(simd.load_f32(q + 4 * i), simd.load_f32(line + 4 * i), a)
        simd.write_f32(scores + h * CHUNK * 4, simd.total(a))


@numba.njit
def _weights(scores, count, record):
    """exp(score - m) in place, zeros behind them; record: m, and the sum of the weights."""
    for i in range(count, (count + 15) // 16 * 16):
        simd.write_f32(scores + 4 * i, _LOW)
    top = simd.splat(_LOW)
    for i in range(0, count, 16):
        top = simd.maximum(top, simd.load_f32(scores + 4 * i))
    most, total = simd.largest(top), simd.splat(np.float32(0.0))
    for i in range(0, count, 16):
        weight = math.exp(simd.sub(simd.load_f32(scores + 4 * i), simd.splat(most)))
        simd.store_f32(scores + 4 * i, weight)
        total = simd.add(total, weight)
    simd.write_f32(record, most)
    simd.write_f32(record + 4, simd.total(total))


@numba.njit
def _add_four(weights, first, second, third, fourth, width, heads, sums):
    """sums[h] += weights[h][0 .. 3] times four values."""
    for h in range(heads):
        w, to = weights + h * CHUNK * 4, sums + h * width * 4
        a, b, c, d = simd.splat_at(w), simd.splat_at(w + 4), simd.splat_at(w + 8), simd.splat_at(w + 12)
        for i in range(0, width, 16):
            x = simd.fma(a, simd.load_f32(first + 4 * i), simd.load_f32(to + 4 * i))
            x = simd.fma(b, simd.load_f32(second + 4 * i), x)
            x = simd.fma(c, simd.load_f32(third + 4 * i), x)
            simd.store_f32(to + 4 * i, simd.fma(d, simd.load_f32(fourth + 4 * i), x))


@numba.njit
def _add_one(weights, line, width, heads, sums):
    for h in range(heads):
        a, to = simd.splat_at(weights + h * CHUNK * 4), sums + h * width * 4
        for i in range(0, width, 16):
            simd.store_f32(to + 4 * i, simd.fma(a, simd.load_f32(line + 4 * i), simd.load_f32(to + 4 * i)))


@numba.njit
def _chunk(task, kv_heads, group, dim, width, half, kind, from_kind, q, q_row, cos, sin, sequences, table, work, factor):
    """One chunk of one sequence and key head; table: int64 [sequences][buffer, tokens, first chunk]."""
    chunk, head = task // kv_heads, task % kv_heads
    i = 0
    while i + 1 < sequences and simd.read_u64(table + (i + 1) * 24 + 16) <= chunk:
        i += 1
    buffer, tokens = simd.read_u64(table + i * 24), simd.read_u64(table + i * 24 + 8)
    first = (chunk - simd.read_u64(table + i * 24 + 16)) * CHUNK
    count, size = min(CHUNK, tokens - first), size_of(kind)
    queries, scores, lines = simd.scratch(32768), simd.scratch(8192), simd.scratch(8192)
    for h in range(group):
        source = q + i * q_row + (head * group + h) * dim * size_of(from_kind)
        for j in range(dim, width):
            simd.write_f32(queries + (h * width + j) * 4, np.float32(0.0))
        _rotated(source, from_kind, cos + i * half * 4, sin + i * half * 4, dim, half, factor, queries + h * width * 4)
    step = 2 * kv_heads * dim * size
    keys = buffer + first * step + head * dim * size
    values, sums = keys + kv_heads * dim * size, work + task * group * (width + 16) * 4
    for s in range(count):
        simd.prefetch(keys + (s + 4) * step)
        _dots(queries, _line(keys + s * step, kind, dim, lines), width, group, scores + 4 * s)
    for h in range(group):
        _weights(scores + h * CHUNK * 4, count, sums + (group * width + h * 16) * 4)
        for j in range(0, width, 16):
            simd.store_f32(sums + (h * width + j) * 4, simd.splat(np.float32(0.0)))
    whole = count // 4 * 4
    for s in range(0, whole, 4):
        at = values + s * step
        a, b = _line(at, kind, dim, lines), _line(at + step, kind, dim, lines + 2048)
        c, d = _line(at + 2 * step, kind, dim, lines + 4096), _line(at + 3 * step, kind, dim, lines + 6144)
        _add_four(scores + 4 * s, a, b, c, d, width, group, sums)
    for s in range(whole, count):
        _add_one(scores + 4 * s, _line(values + s * step, kind, dim, lines), width, group, sums)


@numba.njit
def _join(task, kv_heads, group, dim, width, gate, gate_kind, gate_row, gate_head, table, work, out, kind):
    """One query head of one sequence: its chunks in order, the gate, the rounding."""
    heads = kv_heads * group
    i, h = task // heads, task % heads
    tokens, first = simd.read_u64(table + i * 24 + 8), simd.read_u64(table + i * 24 + 16)
    chunks, sums, record = (tokens + CHUNK - 1) // CHUNK, simd.scratch(2048), group * (width + 16) * 4
    base = work + (first * kv_heads + h // group) * record
    part, last = base + h % group * width * 4, base + (group * width + h % group * 16) * 4
    most, total = _LOW, np.float32(0.0)
    for c in range(chunks):
        most = max(most, simd.read_f32(last + c * kv_heads * record))
    for j in range(0, width, 16):
        simd.store_f32(sums + 4 * j, simd.splat(np.float32(0.0)))
    for c in range(chunks):
        at = c * kv_heads * record
        factor = math.exp(simd.splat(simd.read_f32(last + at) - most))
        total = total + simd.lane0(factor) * simd.read_f32(last + at + 4)
        for j in range(0, width, 16):
            simd.store_f32(sums + 4 * j, simd.fma(factor, simd.load_f32(part + at + 4 * j), simd.load_f32(sums + 4 * j)))
    source, to = gate + i * gate_row + h * gate_head, out + (i * heads + h) * dim * size_of(kind)
    for j in range(0, dim, 16):
        y = simd.div(simd.load_f32(sums + 4 * j), simd.splat(total))
        y = simd.mul(y, math.sigmoid(load_first(gate_kind, source + j * size_of(gate_kind), dim - j)))
        store_first(kind, to + j * size_of(kind), y, dim - j)


def attend_step(
    sequences, kv_heads, group, dim, half, kind, from_kind, q, q_row, gate, gate_row, gate_head, k, k_row, v, v_row, cos, sin, table,
    chunks, work, out, factor, team,
):  # fmt: skip
    width, size = (dim + 15) // 16 * 16, size_of(kind)
    for i in range(sequences):
        place = simd.read_u64(table + i * 24) + (simd.read_u64(table + i * 24 + 8) - 1) * 2 * kv_heads * dim * size
        for h in range(kv_heads):
            keys, step = place + h * dim * size, h * dim * size_of(from_kind)
            _remember(
                k + i * k_row + step, v + i * v_row + step, kind, from_kind, cos + i * half * 4, sin + i * half * 4, dim, half, keys,
                keys + kv_heads * dim * size,
            )  # fmt: skip
    given = (kv_heads, group, dim, width, half, kind, from_kind, q, q_row, cos, sin, sequences, table, work, factor)
    parallel(_chunk, given, chunks * kv_heads, team)
    joined = (kv_heads, group, dim, width, gate, from_kind, gate_row, gate_head, table, work, out, kind)
    parallel(_join, joined, sequences * kv_heads * group, team)


@functools.cache
def _kernel() -> Any:
    word = types.int64
    return compiled(attend_step, (word,) * 22 + (types.float32, word), "")


def takes(q: Tensor, k: Tensor) -> bool:
    """Whether the kernel serves heads of these shapes, q [n, H, D], k [n, Hkv, D]."""
    return q.shape[1] // k.shape[1] <= HEADS and q.shape[2] <= DIM and q.dtype == k.dtype and q.dtype in KINDS


def step(
    q: Tensor, gate: Tensor, k: Tensor, v: Tensor, buffers: Sequence[Tensor], past: Sequence[int], cos: Tensor, sin: Tensor
) -> Tensor:
    """One new token each of n sequences: q, gate [n, H, D], k, v [n, Hkv, D], rotary angles [n, 1, rotary/2]; `buffers`
    [tokens, 2, Hkv, D] with room for one more than the `past` tokens that they hold. Returns [n, H, D] in k's dtype."""
    (n, heads, dim), kv_heads = q.shape, k.shape[1]
    group, size = heads // kv_heads, q.element_size()
    q, k, v = (t if t.stride()[1:] == (dim, 1) else t.contiguous() for t in (q, k, v))
    gate = (gate if gate.stride(2) == 1 else gate.contiguous()).to(q.dtype)
    described, chunks = [], 0
    for buffer, seen in zip(buffers, past, strict=True):
        described += [buffer.data_ptr(), seen + 1, chunks]
        chunks += -(-(seen + 1) // CHUNK)
    table = torch.tensor(described, dtype=torch.int64)
    out = q.new_empty(n, heads, dim)
    work = q.new_empty(chunks * kv_heads * group * (-(-dim // 16) * 16 + 16), dtype=torch.float32)
    values = 2 * chunks * CHUNK * kv_heads * dim
    _kernel()(
        n, kv_heads, group, dim, cos.shape[-1], KINDS[buffers[0].dtype], KINDS[q.dtype], q.data_ptr(), q.stride(0) * size,
        gate.data_ptr(), gate.stride(0) * size, gate.stride(1) * size, k.data_ptr(), k.stride(0) * size, v.data_ptr(),
        v.stride(0) * size, cos.data_ptr(), sin.data_ptr(), table.data_ptr(), chunks, work.data_ptr(), out.data_ptr(), dim**-0.5,
        threads() if values > SMALL else 1,
    )  # fmt: skip
    return out
