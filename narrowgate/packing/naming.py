"""Which scheme of the catalogue a packed tensor is, found from what it stores.

The name is not carried along: a tensor built by `pack`, loaded from a foreign file or cut from another one has the same
claim to it. Layouts do not count; element, scale elements, blocks, zero point and codebook do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowgate.formats import codebook, scheme, schemes
from narrowgate.formats.schemes import ROW, TENSOR, ScaleSpec, Scheme

if TYPE_CHECKING:
    from narrowgate.packing.tensor import PackedTensor


def scheme_of(w: PackedTensor) -> str | None:
    """The first scheme of the catalogue that `w` matches, or None."""
    return next((name for name in schemes() if _matches(w, scheme(name))), None)


def _matches(w: PackedTensor, record: Scheme) -> bool:
    if w.element != record.element or w.offset or len(w.scales) != len(record.scales):
        return False
    for scale, spec in zip(w.scales, record.scales, strict=True):
        if scale.element != spec.element or not _block_matches(scale.block, spec, w.shape):
            return False
    table = w.codebook_values()
    if table is None or record.codebook is None:
        return table is None and record.codebook is None and _zero_point_matches(w, record)
    if w.device.type == "meta":  # shapes alone: take the table's word for it
        return _zero_point_matches(w, record)
    return _zero_point_matches(w, record) and torch.equal(table.cpu(), codebook(record.codebook))


def _block_matches(block: tuple[int, ...], spec: ScaleSpec, shape: tuple[int, ...]) -> bool:
    if spec.span == TENSOR:  # a factor for each row, or for each matrix of a stack, is a finer grain of the same level
        return block[-1] >= shape[-1]
    if spec.span == ROW:
        return block[-1] >= shape[-1] and all(extent == 1 for extent in block[:-1])
    return block == spec.block(shape)


def _zero_point_matches(w: PackedTensor, record: Scheme) -> bool:
    zero = w.zero_points
    if zero is None or record.zero_point is None:
        return zero is None and record.zero_point is None
    values = zero.values(w.shape)
    return values.numel() <= 1 and (values.device.type == "meta" or bool((values == record.zero_point).all()))
