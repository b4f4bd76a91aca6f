"""Which sequence, and which part of it, a program of the chunk form's kernels works on: found on the device, without a table.

Sequences are cut at multiples of some length from their own start. Part c of sequence n has row start // length + n + c of a
workspace: no two parts share a row, there are T // length + N + 1 rows at most, and nobody on the host has to know a length."""

# mypy: allow-untyped-defs
from __future__ import annotations

import inspect
from typing import Any

import triton
import triton.language as tl

_COUNTS = {"T", "N", "SLOTS", "RATIO", "HV"}
_SMALL = {"g", "beta", "cu_seqlens", "state_indices", "has_initial_state"}


def kernels(function: Any) -> tuple[Any, Any]:
    """A function compiled in two ways: for what is aligned to 16 bytes, and once for whatever else there is. Triton compiles
    anew for an argument that is 1 or a multiple of 16; counts and small tensors gain nothing by it, so they never ask for it."""
    names = [n for n, p in inspect.signature(function.fn).parameters.items() if p.annotation is not tl.constexpr]
    counts, small = [n for n in names if n in _COUNTS], [n for n in names if n in _SMALL]
    aligned = triton.jit(function.fn, do_not_specialize=counts, do_not_specialize_on_alignment=small)
    return aligned, triton.jit(function.fn, do_not_specialize=names)


@triton.jit
def clamped(cu_seqlens, n, T):
    """cu_seqlens[n] within the tokens that exist."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int64), 0), T)


@triton.jit
def slot_of(state_indices, n, N, SLOTS):
    """The state slot of sequence n, or -1. Sequence N stands for the rows after the last sequence."""
    slot = n.to(tl.int64)
    if state_indices is not None:
        slot = tl.load(state_indices + n, mask=n < N, other=-1).to(tl.int64)
    return tl.where((n < N) & (slot >= 0) & (slot < SLOTS), slot, -1)


@triton.jit
def find(cu_seqlens, row, N, T, C: tl.constexpr):
    """(sequence, part of it, its first token, its end) of a row of the workspace; sequence N is what lies after the last one."""
    low, end = tl.full((), 0, tl.int32), tl.full((), 0, tl.int64) + T
    if cu_seqlens is None:
        low = tl.where((row > 0) & (row * C >= T), 1, 0)  # one sequence, and nothing after it
        start = end * low
    else:
        high = tl.full((), 0, tl.int32) + N
        while low < high:
            middle = (low + high + 1) // 2
            below = clamped(cu_seqlens, middle, T) // C + middle <= row
            low = tl.where(below, middle, low)
            high = tl.where(below, high, middle - 1)
        start = clamped(cu_seqlens, low, T)
        if low < N:
            end = clamped(cu_seqlens, low + 1, T)
    return low, row - (start // C + low), start, end
