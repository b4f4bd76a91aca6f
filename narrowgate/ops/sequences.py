"""Where sequences begin and end, and which state slots they own, as references read it.

Operators check these values on the CPU and raise. On a GPU nobody looks: there a bad offset is clamped and a bad slot is
no slot, and so it is here, so that a reference on GPU tensors obeys the same contract (it synchronises; kernels do not)."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

Span = tuple[int, int]


def spans(cu_seqlens: Tensor | None, tokens: int) -> list[Span]:
    """[start, end) of each sequence, clamped to the tokens that exist. None is one sequence."""
    if cu_seqlens is None:
        return [(0, tokens)]
    ends = [min(max(e, 0), tokens) for e in cu_seqlens.tolist()]
    return [(a, max(a, b)) for a, b in itertools.pairwise(ends)]


def count(cu_seqlens: Tensor | None) -> int:
    return 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1


def live_slots(indices: Tensor | None, n: int, slots: int) -> list[int | None]:
    """The slot of each of n rows; None where it has none."""
    if indices is None:
        return list(range(n))
    return [i if 0 <= i < slots else None for i in indices.tolist()]


def live_mask(indices: Tensor, slots: int) -> Tensor:
    return (indices >= 0) & (indices < slots)


def flags(has_initial_state: Tensor | None, n: int) -> list[bool]:
    return [True] * n if has_initial_state is None else has_initial_state.to(torch.bool).tolist()
