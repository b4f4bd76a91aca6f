"""The elementwise steps as one kernel: the step and the dtypes are data. Math in float32 lanes, one rounding at the end.

A task is a run of rows; which step is asked for is decided once a row, so the loops are plain."""

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
from narrowgate.simd.cpu_rows import Rows, as_rows, row_at, rows, team
from narrowgate.simd.cpu_threads import parallel
from narrowgate.simd.cpu_values import KINDS, copy_bytes, load_first, size_of, store_first

SILU, SILU_MUL, RELU2, SCALE, CONVERT = range(5)
TASK = 1 << 13  # values of a task


@inline
def apply(step, value, second, factor):
    """One vector; `second` is what silu_mul multiplies by."""
    if step == SILU:
        return math.silu(value)
    if step == SILU_MUL:
        return simd.mul(math.silu(value), second)
    if step == RELU2:
        positive = simd.maximum(simd.splat(np.float32(0.0)), value)
        return simd.mul(positive, positive)
    if step == SCALE:
        return simd.mul(value, factor)
    return value


@inline
def walk(step, source, kind, to, out_kind, width, factor):
    """A row of `width` results."""
    bytes_in, bytes_out = size_of(kind), size_of(out_kind)
    for i in range(0, width, 16):
        count = min(width - i, 16)
        value = load_first(kind, source + i * bytes_in, count)
        second = load_first(kind, source + (width + i) * bytes_in, count) if step == SILU_MUL else value
        store_first(out_kind, to + i * bytes_out, apply(step, value, second, factor), count)


@numba.njit
def task(index, step, x, kind, out, out_kind, count, width, per_task, s):
    factor = simd.splat(s)
    for r in range(index * per_task, min((index + 1) * per_task, count)):
        source, to = row_at(x, r), row_at(out, r)
        if step == SILU:
            walk(SILU, source, kind, to, out_kind, width, factor)
        elif step == SILU_MUL:
            walk(SILU_MUL, source, kind, to, out_kind, width, factor)
        elif step == RELU2:
            walk(RELU2, source, kind, to, out_kind, width, factor)
        elif step == CONVERT and kind == out_kind:
            copy_bytes(to, source, width * size_of(kind))
        else:
            walk(SCALE if step == SCALE else CONVERT, source, kind, to, out_kind, width, factor)


def elementwise(step, x, kind, out, out_kind, count, width, per_task, s, team):
    parallel(task, (step, x, kind, out, out_kind, count, width, per_task, s), (count + per_task - 1) // per_task, team)


@functools.cache
def kernel() -> Any:
    word, four = types.int64, types.UniTuple(types.int64, 4)
    return compiled(elementwise, (word, four, word, four, word, word, word, word, types.float32, word), "")


def _run(step: int, x: Tensor, out: Tensor, s: float = 0.0) -> None:
    if out.numel() == 0:
        return
    into = rows(out)
    if into is None:
        dense = torch.empty(out.shape, dtype=out.dtype)
        _run(step, x, dense, s)
        out.copy_(dense)
        return
    x, source = as_rows(x)
    width = out.shape[-1] if out.dim() else 1
    count = out.numel() // width
    if count == 1 and width > TASK and step != SILU_MUL:  # one long row: as many short ones
        source, into, count, width = _cut(source, into, x, out, width)
    kernel()(
        step, source, KINDS[x.dtype], into, KINDS[out.dtype], count, width, max(1, TASK // width), s, team(count * width)
    )  # fmt: skip


def _cut(source: Rows, into: Rows, x: Tensor, out: Tensor, width: int) -> tuple[Rows, Rows, int, int]:
    """A long row as rows of the largest power of two that divides it, up to TASK values."""
    short = min(TASK, width & -width)
    if short < 64:
        return source, into, 1, width
    return (
        (source[0], 1, short * x.element_size(), 0), (into[0], 1, short * out.element_size(), 0), width // short, short
    )  # fmt: skip


def silu(x: Tensor, *, out: Tensor) -> None:
    _run(SILU, x, out)


def silu_mul(x: Tensor, *, out: Tensor) -> None:
    _run(SILU_MUL, x, out)


def relu2(x: Tensor, *, out: Tensor) -> None:
    _run(RELU2, x, out)


def scale(x: Tensor, s: float, *, out: Tensor) -> None:
    _run(SCALE, x, out, s)


def convert(x: Tensor, dtype: torch.dtype, *, out: Tensor) -> None:
    _run(CONVERT, x, out)
