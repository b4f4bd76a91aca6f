"""Tensors as rows for kernels: a contiguous innermost axis, and outside of it at most two axes of rows, strided as they like.

A kernel finds row r of a tensor by `row_at`, from four numbers: address, rows in a group, bytes from group to group, bytes
from row to row. Tensors whose outer axes do not merge into two (no model has such) are copied first, by `as_rows`."""

# mypy: allow-untyped-defs
from __future__ import annotations

from torch import Tensor

from narrowgate.simd.cpu import inline
from narrowgate.simd.cpu_threads import threads
from narrowgate.strides import merged

SMALL = 1 << 15  # values: below it, waking a second thread costs more than it brings

Rows = tuple[int, int, int, int]  # address, rows in a group, bytes from group to group, bytes from row to row


@inline
def row_at(rows, r):
    """The address of row r."""
    if rows[1] == 1:
        return rows[0] + r * rows[2]
    return rows[0] + r // rows[1] * rows[2] + r % rows[1] * rows[3]


def rows(t: Tensor) -> Rows | None:
    """t [..., n] as rows; None where its axes do not merge into two."""
    size = t.element_size()
    if t.dim() == 2:
        return t.data_ptr(), 1, t.stride(0) * size, 0
    if t.is_contiguous():
        return t.data_ptr(), 1, t.shape[-1] * size if t.dim() else 0, 0
    axes = merged(t.shape[:-1], t.stride()[:-1])
    if len(axes) > 2:
        return None
    if len(axes) < 2:
        return t.data_ptr(), 1, (axes[0][1] if axes else 0) * size, 0
    return t.data_ptr(), axes[1][0], axes[0][1] * size, axes[1][1] * size


def as_rows(t: Tensor) -> tuple[Tensor, Rows]:
    """(t, or a contiguous copy of it which must be kept alive, its rows)."""
    found = rows(t)
    if found is None:
        t = t.contiguous()
        found = t.data_ptr(), 1, t.shape[-1] * t.element_size(), 0
    return t, found


def team(values: int) -> int:
    """Threads for a call that touches so many values."""
    return 1 if values < SMALL else threads()
