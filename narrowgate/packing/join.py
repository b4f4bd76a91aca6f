"""Prepared matrices one under another, as one matrix: what lets projections of one input be one product.

In lanes sixteen rows stand side by side, so a matrix whose rows are a multiple of sixteen ends where the next may begin; the
parts are then views of the whole. In planes every unit of k has its own run of rows, so a part is no view: `cut_rows` gives it
back where something asks for it. Factors of a whole matrix become factors of its rows, which multiply the same sums.
Left out: other layouts, stacks of experts, zero points that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from narrowgate.packing.lanes import LANES
from narrowgate.packing.pages import on_large_pages
from narrowgate.packing.scale import Scale
from narrowgate.packing.tensor import PackedTensor

UNITS = "lanes16_units@1"
_BLOCKS = (UNITS, "columns@1")  # block scales of a row each


def join_rows(parts: Sequence[PackedTensor]) -> tuple[PackedTensor, list[PackedTensor] | None] | None:
    """(the parts as one matrix, the same parts as views of it where they are that), or None where they do not fit under one
    another.

    >>> import torch, narrowgate as ng
    >>> a, b = (ng.prepare(ng.quantize(torch.randn(n, 64), "mxfp4")) for n in (32, 5))
    >>> whole, views = join_rows([a, b])
    >>> whole.shape, torch.equal(whole.dequantize(), torch.cat([a.dequantize(), b.dequantize()])), ng.same_bits(views[1], b)
    ((37, 64), True, True)
    """
    if not _fit(parts):
        return None
    first, rows = parts[0], sum(p.shape[0] for p in parts)
    scales = []
    for level in zip(*(p.scales for p in parts), strict=True):
        if level[0].layout in _BLOCKS:
            scales.append(replace(level[0], data=torch.cat([s.data for s in level], 0 if level[0].layout == UNITS else -1)))
        else:
            data = torch.cat([s.data.expand(p.shape[0], 1) for s, p in zip(level, parts, strict=True)])
            scales.append(Scale(data, level[0].element, (1, first.shape[1])))
    zero = None if first.zero_points is None else replace(first.zero_points, block=(rows, first.shape[1]))
    lanes = first.layout == "lanes16@1"
    whole = replace(
        first,
        data=on_large_pages(torch.cat([p.data for p in parts])) if lanes else torch.cat([p.data for p in parts], 2),
        shape=(rows, first.shape[1]),
        scales=tuple(scales),
        zero_points=zero,
    )
    if not lanes:
        return whole, None
    views, start = [], 0
    for part in parts:
        stop = start + part.data.shape[0]
        kept = [_view(s, w, start, stop) for s, w in zip(part.scales, scales, strict=True)]
        views.append(replace(part, data=whole.data[start:stop], scales=tuple(kept)))
        start = stop
    return whole, views


def cut_rows(whole: PackedTensor, start: int, stop: int, factors: Sequence[Scale | None], zero: Scale | None) -> PackedTensor:
    """Rows [start, stop) of a joined matrix as the part that they were: with its own `factors` and zero point (of `own`)."""
    part = whole.rows(start, stop)
    scales = tuple(s if own is None else own for s, own in zip(part.scales, factors, strict=True))
    return replace(part, scales=scales, zero_points=zero)


def own(part: PackedTensor) -> tuple[tuple[Scale | None, ...], Scale | None]:
    """What `cut_rows` needs of a part beside the whole: its scales other than those of blocks, and its zero point."""
    return tuple(None if s.layout in _BLOCKS else s for s in part.scales), part.zero_points


def _view(scale: Scale, whole: Scale, start: int, stop: int) -> Scale:
    return replace(scale, data=whole.data[start:stop]) if scale.layout == UNITS else scale


def _fit(parts: Sequence[PackedTensor]) -> bool:
    first = parts[0]
    lanes = first.layout == "lanes16@1"
    if not lanes and not first.layout.startswith("planes"):
        return False
    if any(len(p.shape) != 2 or p.layout != first.layout or p.offset or p.device != first.device for p in parts):
        return False
    if any((lanes and p.shape[0] % LANES) or not p.shape[0] for p in parts[:-1]) or len({p.shape[1] for p in parts}) > 1:
        return False
    if any(p.element != first.element or len(p.scales) != len(first.scales) for p in parts):
        return False
    same = all(_equal(p.codebook, first.codebook) and _same_zero(p, first) for p in parts)
    return same and all(_level_fits(level, parts) for level in zip(*(p.scales for p in parts), strict=True))


def _level_fits(level: Sequence[Scale], parts: Sequence[PackedTensor]) -> bool:
    """Block scales of a row each, in lanes; or one factor a matrix or a row."""
    if len({(s.element, s.layout) for s in level}) > 1:
        return False
    if level[0].layout in _BLOCKS:
        return level[0].block[0] == 1 and len({s.block for s in level}) == 1
    return level[0].layout == "rows@1" and all(
        s.grid(p.shape) in ((1, 1), (p.shape[0], 1)) for s, p in zip(level, parts, strict=True)
    )


def _same_zero(a: PackedTensor, b: PackedTensor) -> bool:
    x, y = a.zero_points, b.zero_points
    if x is None or y is None:
        return x is y
    one = prod(x.grid(a.shape)) == prod(y.grid(b.shape)) == 1
    return one and x.element == y.element and torch.equal(x.data, y.data)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)
