"""What the strides of a tensor say about its rows, for kernels that address them themselves. Plain integers; no kernel is loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from narrowgate.errors import UnsupportedError

SPAN = 4  # neighbouring columns that one thread of a row's tile takes (gpu_sums.py)


def aligned(*tensors: torch.Tensor) -> bool:
    """Whether four columns of each row lie in one aligned piece of memory."""
    return all(t.data_ptr() % (SPAN * t.element_size()) == 0 and not any(s % SPAN for s in t.stride()[:-1]) for t in tensors)


def two_axes(t: torch.Tensor) -> tuple[int, int, int]:
    """(inner, stride_outer, stride_inner): the rows of `t`, all axes but the last, as two axes."""
    axes = merged(t.shape[:-1], t.stride()[:-1])
    if len(axes) > 2:
        raise UnsupportedError(scattered(t)[0])
    if len(axes) < 2:
        return 1, (axes[0][1] if axes else 0), 0  # an inner axis of 1 costs no division
    (_, outer), (inner, step) = axes
    return inner, outer, step


def scattered(*tensors: torch.Tensor) -> list[str]:
    """The reason to refuse rows that `two_axes` cannot name."""
    bad = next((t for t in tensors if len(merged(t.shape[:-1], t.stride()[:-1])) > 2), None)
    return [] if bad is None else [f"expected rows that lie as two strided axes at most, got strides {list(bad.stride())}"]


def merged(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """(extent, stride) of some axes, neighbours joined where one stride serves both; axes of extent 1 dropped."""
    axes: list[tuple[int, int]] = []
    for n, s in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if axes and axes[-1][1] == n * s:
            axes[-1] = (axes[-1][0] * n, s)
        else:
            axes.append((n, s))
    return axes
