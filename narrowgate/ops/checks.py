"""Checks that many operators share. Each raises InputError with the operator's name, what was expected and what was got.

Shapes, dtypes, strides and devices come first; the second half looks at VALUES of indices, and is called only where that
costs no sync (`dispatch.checks_values`)."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from narrowgate.dispatch import checks_values
from narrowgate.errors import InputError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INDICES = (torch.int32, torch.int64)
FLAGS = (torch.bool, torch.int8, torch.int32)


def expect(op: str, holds: bool, message: str) -> None:
    """`message` says what was expected and what was got."""
    if not holds:
        raise InputError(f"{op}: {message}")


def shape(op: str, name: str, t: Tensor, *dims: int | None) -> None:
    """None stands for any extent."""
    if t.ndim != len(dims) or any(d is not None and n != d for n, d in zip(t.shape, dims, strict=True)):
        want = "[" + ", ".join("*" if d is None else str(d) for d in dims) + "]"
        raise InputError(f"{op}: expected {name} of shape {want}, got {list(t.shape)}")


def dtype(op: str, name: str, t: Tensor, allowed: tuple[torch.dtype, ...] = FLOATS) -> None:
    if t.dtype not in allowed:
        want = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise InputError(f"{op}: expected {name} of dtype {want}, got {str(t.dtype).removeprefix('torch.')}")


def rows(op: str, name: str, t: Tensor) -> None:
    """Rows may be strided; the innermost axis is contiguous."""
    if t.ndim and t.shape[-1] > 1 and t.stride(-1) != 1:
        raise InputError(f"{op}: expected {name} with a contiguous last axis, got strides {list(t.stride())}")


def writable(op: str, name: str, t: Tensor) -> None:
    """What is changed in place has rows as above and no two elements in one place."""
    rows(op, name, t)
    if any(n > 1 and s == 0 for n, s in zip(t.shape, t.stride(), strict=True)):
        raise InputError(f"{op}: expected {name} without overlap, got strides {list(t.stride())}")


def device(op: str, first: Tensor, **others: Tensor | None) -> None:
    for name, t in others.items():
        if t is not None and t.device != first.device:
            raise InputError(f"{op}: expected {name} on {first.device}, got {t.device}")


def floats(op: str, **tensors: Tensor) -> None:
    """Each is float32, bfloat16 or float16, with contiguous rows."""
    for name, t in tensors.items():
        dtype(op, name, t)
        rows(op, name, t)


def index(op: str, name: str, t: Tensor | None, *dims: int | None, allowed: tuple[torch.dtype, ...] = INDICES) -> None:
    """An optional tensor of indices (or, with `allowed=FLAGS`, of flags)."""
    if t is not None:
        shape(op, name, t, *dims)
        dtype(op, name, t, allowed)


# ---- values


def offsets(op: str, cu_seqlens: Tensor | None, tokens: int) -> None:
    """Starts at 0, never falls, ends at most at `tokens`."""
    if cu_seqlens is None or not checks_values(cu_seqlens):
        return
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] > tokens:
        message = f"bad query_start_loc bounds: expected 0 first and at most {tokens} last, got {ends[0]} and {ends[-1]}"
        raise InputError(f"{op}: {message}")
    for i, (a, b) in enumerate(itertools.pairwise(ends)):
        if b < a:
            raise InputError(f"{op}: query_start_loc not monotonic: got {b} after {a} at {i + 1}")


def slots(op: str, indices: Tensor | None, count: int, name: str = "state_idx") -> None:
    """Below `count`, and no live slot twice. A negative index is no slot (SPEC D81)."""
    if indices is None or not checks_values(indices):
        return
    live = [i for i in indices.reshape(-1).tolist() if i >= 0]
    if live and max(live) >= count:
        raise InputError(f"{op}: {name} out of range: expected below {count}, got {max(live)}")
    if len(set(live)) < len(live):
        twice = next(i for i in live if live.count(i) > 1)
        raise InputError(f"{op}: duplicate live {name}: got {twice} more than once")


def selection(op: str, indices: Tensor, count: int, unique: bool) -> None:
    """Plain row indices: within 0..count-1, with no meaning for -1."""
    if not checks_values(indices):
        return
    wanted = indices.tolist()
    for i in wanted:
        if not 0 <= i < count:
            raise InputError(f"{op}: indices out of range: expected 0..{count - 1}, got {i}")
    if unique and len(set(wanted)) < len(wanted):
        raise InputError(f"{op}: duplicate indices: a row may be written once")
