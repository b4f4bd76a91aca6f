"""The gates as one kernel, sixteen heads at a time, in float32 by the functions of `simd.cpu_math`. post_conv and the packed
step call `decay_lanes` and `sigmoid` too, so that fused equals composed."""

# mypy: allow-untyped-defs
from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
from numba import types
from torch import Tensor

from narrowgate.simd import cpu as simd
from narrowgate.simd import cpu_math as math
from narrowgate.simd.cpu import inline
from narrowgate.simd.cpu_compile import compiled
from narrowgate.simd.cpu_rows import team
from narrowgate.simd.cpu_threads import parallel
from narrowgate.simd.cpu_values import KINDS, load_first, size_of

TASK = 1 << 11  # values of a task


@inline
def decay_lanes(a, dt_bias, factor, negated):
    """softplus(a + dt_bias) * factor, where factor is -exp(A_log) or already so (`negated`)."""
    if not negated:
        factor = simd.sub(simd.splat(np.float32(0.0)), math.exp(factor))
    return simd.mul(math.softplus(simd.add(a, dt_bias)), factor)


@inline
def gate_row(a, b, kind, b_kind, heads, A_log, A_kind, dt_bias, dt_kind, negated, g, beta):
    """One token: g and, unless `beta` is 0, beta of all heads, float32."""
    for i in range(0, heads, 16):
        n = min(heads - i, 16)
        x, dt = load_first(kind, a + i * size_of(kind), n), load_first(dt_kind, dt_bias + i * size_of(dt_kind), n)
        factor = load_first(A_kind, A_log + i * size_of(A_kind), n)
        simd.store_first_f32(g + i * 4, decay_lanes(x, dt, factor, negated), n)
        if beta != 0:
            simd.store_first_f32(beta + i * 4, math.sigmoid(load_first(b_kind, b + i * size_of(b_kind), n)), n)


@numba.njit
def task(
    index, a, a_stride, kind, b, b_stride, b_kind, tokens, heads, per_task, A_log, A_kind, dt_bias, dt_kind, negated, g, beta
):  # fmt: skip
    for t in range(index * per_task, min((index + 1) * per_task, tokens)):
        into = beta + t * heads * 4 if beta != 0 else 0
        gate_row(
            a + t * a_stride,
            b + t * b_stride,
            kind,
            b_kind,
            heads,
            A_log,
            A_kind,
            dt_bias,
            dt_kind,
            negated,
            g + t * heads * 4,
            into,
        )


def gates(
    a, a_stride, kind, b, b_stride, b_kind, tokens, heads, per_task, A_log, A_kind, dt_bias, dt_kind, negated, g, beta, team
):  # fmt: skip
    arguments = (
        a,
        a_stride,
        kind,
        b,
        b_stride,
        b_kind,
        tokens,
        heads,
        per_task,
        A_log,
        A_kind,
        dt_bias,
        dt_kind,
        negated,
        g,
        beta,
    )
    parallel(task, arguments, (tokens + per_task - 1) // per_task, team)


@functools.cache
def kernel() -> Any:
    return compiled(gates, (types.int64,) * 17, "")


def _run(a: Tensor, b: Tensor | None, factor: Tensor, dt_bias: Tensor, negated: int, g: Tensor, beta: Tensor | None) -> None:
    tokens, heads = a.shape
    if tokens * heads == 0:
        return
    size = a.element_size()
    other = (0, 0, 0) if b is None else (b.data_ptr(), b.stride(0) * b.element_size(), KINDS[b.dtype])
    kernel()(
        a.data_ptr(), a.stride(0) * size, KINDS[a.dtype], *other, tokens, heads, max(1, TASK // heads),
        factor.data_ptr(), KINDS[factor.dtype], dt_bias.data_ptr(), KINDS[dt_bias.dtype], negated,
        g.data_ptr(), 0 if beta is None else beta.data_ptr(), team(16 * tokens * heads),
    )  # fmt: skip


def gdn_gate(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, out: tuple[Tensor, Tensor]) -> None:
    _run(a, b, A_log, dt_bias, 0, out[0], out[1])


def gdn_decay(alpha: Tensor, dt_bias: Tensor, neg_a: Tensor, *, out: Tensor) -> None:
    _run(alpha, None, neg_a, dt_bias, 1, out, None)
