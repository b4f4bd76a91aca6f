"""Checks that many operators share. Each raises InputError with the operator's name, what was expected and what was got.

Shapes, dtypes, strides and devices only; values of indices are looked at in `check_values` functions, where that
costs no sync."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.errors import InputError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INDICES = (torch.int32, torch.int64)


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


def device(op: str, first: Tensor, **others: Tensor | None) -> None:
    for name, t in others.items():
        if t is not None and t.device != first.device:
            raise InputError(f"{op}: expected {name} on {first.device}, got {t.device}")
