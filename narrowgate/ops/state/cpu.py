"""Rows in and out of caches as one kernel: which side the indices name, the dtypes (or plain bytes) and the flags are data."""

# mypy: allow-untyped-defs
from __future__ import annotations

import functools
import math
from typing import Any

import numba
import numpy as np
from numba import types
from torch import Tensor

from narrowgate.simd import cpu as simd
from narrowgate.simd.cpu_compile import compiled
from narrowgate.simd.cpu_rows import row_at, team
from narrowgate.simd.cpu_threads import parallel
from narrowgate.simd.cpu_values import KINDS, NONE, copy_bytes, load_first, optional, read_index, size_of, store_first
from narrowgate.strides import merged

GATHER, SCATTER = range(2)
BYTES = -1  # the kind of rows that are copied as they are


@numba.njit
def task(index, way, source, kind, to, to_kind, inner, width, indices, flags):
    """source, to: (address, bytes from slot to slot, rows in a group, bytes from group to group, from row to row); inner: rows
    of a slot; width: values (or bytes) of a row."""
    named = read_index(indices[0], indices[1], index)
    row, into = (named, index) if way == GATHER else (index, named)
    fresh = flags[1] != NONE and read_index(flags[0], flags[1], index) == 0
    rows_in = (source[0] + row * source[1], source[2], source[3], source[4])
    rows_out = (to[0] + into * to[1], to[2], to[3], to[4])
    for r in range(inner):
        from_row, to_row = row_at(rows_in, r), row_at(rows_out, r)
        if fresh:
            for i in range(0, width, 16):
                store_first(to_kind, to_row + i * size_of(to_kind), simd.splat(np.float32(0.0)), min(width - i, 16))
        elif kind == BYTES:
            copy_bytes(to_row, from_row, width)
        elif kind == to_kind:
            copy_bytes(to_row, from_row, width * size_of(kind))
        else:
            for i in range(0, width, 16):
                value = load_first(kind, from_row + i * size_of(kind), width - i)
                store_first(to_kind, to_row + i * size_of(to_kind), value, min(width - i, 16))


def move_rows(way, source, kind, to, to_kind, inner, width, count, indices, flags, team):
    parallel(task, (way, source, kind, to, to_kind, inner, width, indices, flags), count, team)


@functools.cache
def kernel() -> Any:
    word, two, five = types.int64, types.UniTuple(types.int64, 2), types.UniTuple(types.int64, 5)
    return compiled(move_rows, (word, five, word, five, word, word, word, word, two, two, word), "")


def _dense(t: Tensor) -> bool:
    """Whether a slot's values lie side by side."""
    return t.dim() == 2 or (math.prod(t.shape[1:]) == 0 or merged(t.shape[1:], t.stride()[1:]) in ([], [(t[0].numel(), 1)]))


def _slots(t: Tensor, dense: bool) -> tuple[int, int, int, int, int]:
    size = t.element_size()
    slot = t.stride(0) * size
    if dense:
        return t.data_ptr(), slot, 1, 0, 0
    axes = [(1, 0), (1, 0), *merged(t.shape[1:-1], t.stride()[1:-1])][-2:]
    return t.data_ptr(), slot, axes[1][0], axes[0][1] * size, axes[1][1] * size


def _run(way: int, source: Tensor, to: Tensor, indices: Tensor, flags: Tensor | None = None, as_bytes: bool = False) -> None:
    count, values = indices.shape[0], math.prod(source.shape[1:])
    if count * values == 0:
        return
    dense = _dense(source) and _dense(to)
    width = values if dense else source.shape[-1]
    kinds = (BYTES, BYTES) if as_bytes else (KINDS[source.dtype], KINDS[to.dtype])
    kept = [None if t is None else t.contiguous() for t in (indices, flags)]
    kernel()(
        way, _slots(source, dense), kinds[0], _slots(to, dense), kinds[1], values // width,
        width * source.element_size() if as_bytes else width, count, *map(optional, kept), team(count * values),
    )  # fmt: skip


def gather_state(cache: Tensor, indices: Tensor, has_initial_state: Tensor | None = None, *, out: Tensor) -> None:
    _run(GATHER, cache, out, indices, has_initial_state)


def scatter_state(cache: Tensor, rows: Tensor, indices: Tensor) -> None:
    _run(SCATTER, rows, cache, indices)


def select_rows(x: Tensor, indices: Tensor, *, out: Tensor) -> None:
    _run(GATHER, x, out, indices, as_bytes=True)


def copy_rows(dst: Tensor, src: Tensor, indices: Tensor) -> None:
    _run(SCATTER, src, dst, indices, as_bytes=True)
