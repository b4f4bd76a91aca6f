"""The product that is held bit for bit: one rounded product and one rounded addition for each k, in order of k, never fused.

`matmul` decodes its operands exactly (a slice of k at a time) and sums here, so that its result equals the reference's and
"dequantize, then multiply" bit for bit (SPEC A37). Lanes are columns of b; four rows of a share each load."""

# mypy: allow-untyped-defs
from __future__ import annotations

import numba

from narrowgate.simd import cpu as simd
from narrowgate.simd.cpu import inline
from narrowgate.simd.cpu_threads import parallel


@inline
def _step(total, a, column):
    return simd.add(total, simd.mul(simd.splat_at(a), column))


@numba.njit
def _columns(task, a, a_stride, m, depth, b, b_stride, n, c, c_stride):
    first = task * 16
    count = min(16, n - first)
    for row in range(0, m, 4):
        # Beyond the last row the last one is computed again, and stored again with the same bits.
        r1, r2, r3 = min(row + 1, m - 1), min(row + 2, m - 1), min(row + 3, m - 1)
        into = c + first * 4
        t0 = simd.load_first_f32(into + row * c_stride, count)
        t1 = simd.load_first_f32(into + r1 * c_stride, count)
        t2 = simd.load_first_f32(into + r2 * c_stride, count)
        t3 = simd.load_first_f32(into + r3 * c_stride, count)
        for k in range(depth):
            column = simd.load_first_f32(b + k * b_stride + first * 4, count)
            t0 = _step(t0, a + row * a_stride + k * 4, column)
            t1 = _step(t1, a + r1 * a_stride + k * 4, column)
            t2 = _step(t2, a + r2 * a_stride + k * 4, column)
            t3 = _step(t3, a + r3 * a_stride + k * 4, column)
        simd.store_first_f32(into + row * c_stride, t0, count)
        simd.store_first_f32(into + r1 * c_stride, t1, count)
        simd.store_first_f32(into + r2 * c_stride, t2, count)
        simd.store_first_f32(into + r3 * c_stride, t3, count)


def ordered_product(a, a_stride, m, depth, b, b_stride, n, c, c_stride, team):
    """c [m, n] += a [m, depth] b [depth, n], all float32; strides in bytes."""
    parallel(_columns, (a, a_stride, m, depth, b, b_stride, n, c, c_stride), (n + 15) // 16, team)
