"""The norms as one kernel: which norm, weight, gate and the dtypes are data. Two walks over a row, which stays in the first cache.

The sum's order depends on the row's length alone: lane i adds the squares at i, i + 16, ..., then the lanes are added
pairwise (`simd.total`). Products and sums are rounded apart. post_conv and the packed step use the same functions."""

# mypy: allow-untyped-defs
from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from narrowgate.simd import cpu as simd
from narrowgate.simd import cpu_math as math
from narrowgate.simd.cpu import inline
from narrowgate.simd.cpu_compile import compiled
from narrowgate.simd.cpu_rows import as_rows, row_at, rows, team
from narrowgate.simd.cpu_threads import parallel
from narrowgate.simd.cpu_values import KINDS, load_first, size_of, store_first

UNGATED, SILU, SIGMOID = range(3)
TASK = 1 << 13  # values of a task


@inline
def sum_of_squares(kind, x, n):
    """Of a row of n values, as float32."""
    sums, size = simd.splat(np.float32(0.0)), size_of(kind)
    for i in range(0, n, 16):
        value = load_first(kind, x + i * size, n - i)
        sums = simd.add(sums, simd.mul(value, value))
    return simd.total(sums)


@inline
def l2_row(kind, x, out_kind, out, n, eps):
    """out = x / sqrt(sum(x^2) + eps)."""
    root = simd.sqrt(simd.splat(sum_of_squares(kind, x, n) + eps))
    size, out_size = size_of(kind), size_of(out_kind)
    for i in range(0, n, 16):
        store_first(out_kind, out + i * out_size, simd.div(load_first(kind, x + i * size, n - i), root), min(n - i, 16))


@inline
def rms_row(kind, x, out_kind, out, n, eps, weight, weight_kind, weight_bias, gate, gate_kind, activation):
    """out = x / sqrt(mean(x^2) + eps) * (weight + weight_bias) * act(gate); without weight or gate their factors are left out."""
    root = simd.sqrt(simd.splat(sum_of_squares(kind, x, n) / np.float32(n) + eps))
    size, out_size = size_of(kind), size_of(out_kind)
    for i in range(0, n, 16):
        value = simd.div(load_first(kind, x + i * size, n - i), root)
        if weight != 0:
            factor = load_first(weight_kind, weight + i * size_of(weight_kind), n - i)
            value = simd.mul(value, simd.add(factor, simd.splat(weight_bias)))
        if activation != UNGATED:
            z = load_first(gate_kind, gate + i * size_of(gate_kind), n - i)
            value = simd.mul(value, math.silu(z) if activation == SILU else math.sigmoid(z))
        store_first(out_kind, out + i * out_size, value, min(n - i, 16))


@numba.njit
def task(
    index, l2, x, kind, out, out_kind, count, n, per_task, eps, weight, weight_kind, weight_bias, gate, gate_kind, activation
):  # fmt: skip
    for r in range(index * per_task, min((index + 1) * per_task, count)):
        source, to = row_at(x, r), row_at(out, r)
        if l2:
            l2_row(kind, source, out_kind, to, n, eps)
        else:
            z = row_at(gate, r)
            rms_row(kind, source, out_kind, to, n, eps, weight, weight_kind, weight_bias, z, gate_kind, activation)


def norms(
    l2, x, kind, out, out_kind, count, n, per_task, eps, weight, weight_kind, weight_bias, gate, gate_kind, activation, team
):  # fmt: skip
    arguments = (
        l2, x, kind, out, out_kind, count, n, per_task, eps, weight, weight_kind, weight_bias, gate, gate_kind, activation
    )  # fmt: skip
    parallel(task, arguments, (count + per_task - 1) // per_task, team)


@functools.cache
def kernel() -> Any:
    word, four, real = types.int64, types.UniTuple(types.int64, 4), types.float32
    shape = (word, four, word, four, word, word, word, word, real, word, word, real, four, word, word, word)
    return compiled(norms, shape, "")


_NO_ROWS = (0, 1, 0, 0)


def _run(
    l2: int, x: Tensor, out: Tensor, eps: float, weight: Tensor | None = None, weight_bias: float = 0.0,
    gate: Tensor | None = None, activation: int = UNGATED,
) -> None:  # fmt: skip
    total = out.numel()
    if total == 0:
        return
    into = rows(out)
    if into is None:
        dense = torch.empty(out.shape, dtype=out.dtype)
        _run(l2, x, dense, eps, weight, weight_bias, gate, activation)
        out.copy_(dense)
        return
    n = out.shape[-1]
    count = total // n
    x, source = as_rows(x)
    beside, gate_kind = _NO_ROWS, 0
    if gate is not None:
        gate, beside = as_rows(gate)
        gate_kind = KINDS[gate.dtype]
    weight_at, weight_kind = (0, 0) if weight is None else (weight.data_ptr(), KINDS[weight.dtype])
    kernel()(
        l2, source, KINDS[x.dtype], into, KINDS[out.dtype], count, n, max(1, TASK // n), eps, weight_at, weight_kind, weight_bias,
        beside, gate_kind, activation, team(total),
    )  # fmt: skip


def l2_norm(x: Tensor, *, eps: float = 1e-6, out: Tensor) -> None:
    _run(1, x, out, eps)


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float, weight_bias: float = 0.0, out: Tensor) -> None:
    _run(0, x, out, eps, weight, weight_bias)


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, activation: str = "silu", out: Tensor) -> None:
    _run(0, x, out, eps, weight, 0.0, gate, SILU if activation == "silu" else SIGMOID)
