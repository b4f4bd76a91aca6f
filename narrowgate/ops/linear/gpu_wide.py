"""x times a packed weight, for many rows of x: all warps share a tile of k, on the asynchronous tensor cores.

As in gpu_packed the weight is the left operand, in registers; a tile of 64 rows of x is the right one, in shared memory."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from narrowgate.ops.linear.gpu_packed import _factor, _finish, _less, _one_of, _part, _stored
from narrowgate.tile.gpu_math import INTERPRETED, bound


@triton.jit(do_not_specialize=["M", "N", "K", "units", "blocks"])
def wide_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, out_ptr, plan_ptr, M, N, K, units, blocks,
    stride_xm, stride_om, stride_on, matrix_w, matrix_s,
    A0: tl.constexpr, A1: tl.constexpr, A2: tl.constexpr, A3: tl.constexpr,
    ELEMENT: tl.constexpr, BITS: tl.constexpr, J: tl.constexpr, PARTS: tl.constexpr, PLANES: tl.constexpr,
    SCALE: tl.constexpr, GROUP: tl.constexpr, PER_ROW: tl.constexpr, ZERO: tl.constexpr, OUTER: tl.constexpr, BIAS: tl.constexpr,
    DTYPE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, TAIL: tl.constexpr,
    GROUPED: tl.constexpr,
):  # fmt: skip
    """As packed_kernel, for many rows of x: all warps share a tile of k, and no split of it."""
    tile_n, tile_m = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    start, end = tile_m * BM, M.to(tl.int64)
    if GROUPED:
        expert = tl.load(plan_ptr + tile_m * 3).to(tl.int64)
        start = tl.load(plan_ptr + tile_m * 3 + 1).to(tl.int64)
        end = tl.load(plan_ptr + tile_m * 3 + 2).to(tl.int64)
        if start >= end:
            return
        w_ptr += tl.maximum(expert, 0) * matrix_w
        if SCALE != "":
            scale_ptr += tl.maximum(expert, 0) * matrix_s
        if OUTER == 2:
            outer_ptr += tl.maximum(expert, 0) * N
    n = tile_n * BN + tl.arange(0, BN)
    m = start + tl.arange(0, BM)
    row = tl.minimum(n, N - 1)
    j = tl.arange(0, J)
    acc = tl.zeros((BN, BM), tl.float32)
    U: tl.constexpr = PARTS * J
    w_ptrs = w_ptr + row[:, None] * J + j[None, :]
    x_ptrs = x_ptr + tl.minimum(m, end - 1)[None, :] * stride_xm + j[:, None]
    one = tl.arange(0, 1)
    s0 = _stored(scale_ptr, one, 0, row, N, blocks, PER_ROW, U, GROUP)
    s1 = _stored(scale_ptr, one, 1, row, N, blocks, PER_ROW, U, GROUP)
    s2 = _stored(scale_ptr, one, 2, row, N, blocks, PER_ROW, U, GROUP)
    s3 = _stored(scale_ptr, one, 3, row, N, blocks, PER_ROW, U, GROUP)
    steps = units
    if GROUPED:
        steps = tl.where(expert < 0, 0, units)
    for unit in tl.range(0, bound(steps), num_stages=STAGES):
        ahead = one + (unit + 1)
        n0 = _stored(scale_ptr, ahead, 0, row, N, blocks, PER_ROW, U, GROUP)
        n1 = _stored(scale_ptr, ahead, 1, row, N, blocks, PER_ROW, U, GROUP)
        n2 = _stored(scale_ptr, ahead, 2, row, N, blocks, PER_ROW, U, GROUP)
        n3 = _stored(scale_ptr, ahead, 3, row, N, blocks, PER_ROW, U, GROUP)
        b0 = tl.load(w_ptrs)
        b1, b2 = b0, b0
        if PLANES == 3:
            b1 = tl.load(w_ptrs + N * J)
            b2 = tl.load(w_ptrs + N * J * 2)
        w_ptrs += N.to(tl.int64) * (PLANES * J)
        partial = acc if PER_ROW else tl.zeros((BN, BM), tl.float32)
        for p in tl.static_range(PARTS):
            own = b0
            if PLANES == 3 and p == 1:
                own = b1
            if PLANES == 3 and p == 2:
                own = b2
            v = _less(_part(own, b1, b2, A0, A1, A2, A3, ELEMENT, BITS, p, DTYPE), zero_ptr, ZERO)
            k = unit * U + p * J
            x = tl.load(x_ptrs + k, mask=k + j[:, None] < K, other=0.0) if TAIL else tl.load(x_ptrs + k)
            if INTERPRETED:
                x = x.to(tl.float32)
            partial = tl.dot(v, x, partial)
            if not PER_ROW and ((p + 1) * J % GROUP == 0 or p == PARTS - 1):
                code = _one_of(s0, s1, s2, s3, (p * J) // GROUP)
                acc += partial * tl.reshape(_factor(code, SCALE), (BN, 1))
                partial = tl.zeros((BN, BM), tl.float32)
        if PER_ROW:
            acc = partial
        s0, s1, s2, s3 = n0, n1, n2, n3
    if PER_ROW and SCALE != "":
        acc = acc * _factor(tl.load(scale_ptr + row), SCALE)[:, None]
    _finish(acc, n, m, N, end, outer_ptr, bias_ptr, out_ptr, stride_om, stride_on, OUTER, BIAS)
