"""The activations as the exact product reads them: float32 [ceil(M / tokens), width, tokens], missing rows and columns zero.

A kernel of its own, since torch takes four operations for it, each of which costs as much as a small product."""

# mypy: allow-untyped-defs
from __future__ import annotations

import numba

from narrowgate.simd import cpu as simd
from narrowgate.simd.cpu_threads import parallel
from narrowgate.simd.cpu_values import load_first, size_of

COLUMNS = 512  # of a task


@numba.njit
def _task(index, x, kind, stride, rows, k, width, tokens, parts, into):
    group, first = index // parts, index % parts * COLUMNS
    lines, size = simd.scratch(512), size_of(kind)
    for start in range(first, min(first + COLUMNS, width), 16):
        for t in range(tokens):
            row = group * tokens + t
            count = max(min(k - start, 16), 0) if row < rows else 0
            simd.store_f32(lines + t * 64, load_first(kind, x + row * stride + start * size, count))
        to = into + (group * width + start) * tokens * 4
        for i in range(min(16, width - start)):
            for t in range(tokens):
                simd.write_i32(to + (i * tokens + t) * 4, simd.read_i32(lines + t * 64 + i * 4))


def stage(x, kind, stride, rows, k, width, tokens, into, team):
    """x [rows, k] of a dtype (number of simd/cpu_values.py), `stride` bytes from row to row."""
    parts = (width + COLUMNS - 1) // COLUMNS
    groups = (rows + tokens - 1) // tokens
    parallel(_task, (x, kind, stride, rows, k, width, tokens, parts, into), groups * parts, team)
