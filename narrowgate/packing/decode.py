"""The one reference decode: codes and scales to float32, in the order that every implementation promises.

value = decode(code), minus the zero point, times each scale innermost first, plus the offset (its factors multiplied left
to right first). Every step is one float32 rounding, nothing is fused; the caller rounds once more to the dtype it wants.
Exactness of each step: element codes decode exactly, so a kernel that follows the same order gives the same bits.
`rows` bounds memory: rows are decoded independently, a caller may take any slice of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from narrowgate.errors import InputError
from narrowgate.formats import element
from narrowgate.packing.layout import row_count
from narrowgate.packing.operand import DENSE, parse
from narrowgate.packing.registry import layout
from narrowgate.packing.scale import Scale
from narrowgate.packing.tensor import PackedTensor
from narrowgate.packing.words import look_up_nibbles

RUNS = ("words@1", "fp6_bytes@1", "rows@1", "bytes@1", "lanes16@1")
"""The layouts whose rows decode_cpu.py reads: runs of bits, codes a byte apart, words apart. Any other is decoded here."""


def rows_refusal(described: str) -> tuple[str, ...]:
    """Why the CPU's kernel cannot read rows of an operand of this description; empty where it can."""
    where = RUNS[0] if described == DENSE else parse(described)["layout"]
    return () if where in RUNS else (f"rows of the layout {where}",)


def decode(w: PackedTensor) -> Tensor:
    """All values of `w` as float32 [shape].

    >>> from narrowgate.packing import pack
    >>> decode(pack(torch.tensor([[1, 2, 3, 15]]), "int4")).tolist()
    [[1.0, 2.0, 3.0, -1.0]]
    """
    return decode_rows(w, 0, row_count(w.shape)).view(w.shape)


def decode_rows(w: PackedTensor, start: int, stop: int) -> Tensor:
    """Rows [start, stop) as float32 [stop - start, K]; rows are the leading axes taken together (E*N of [E, N, K]).

    Any cut is legal, inside a scale block too. Raises InputError for bounds outside the tensor.
    """
    rows = row_count(w.shape)
    if not 0 <= start <= stop <= rows:
        raise InputError(f"decode_rows: expected 0 <= start <= stop <= {rows}, got [{start}, {stop})")
    kind, width = element(w.element), w.shape[-1]
    if kind.bits == 4 and w.layout == "words@1":
        values = look_up_nibbles(w.data, _table(w), start * width, stop * width).view(stop - start, width)
    else:
        values = _decode_codes(w, layout(w.layout).unpack_rows(w.data, kind.bits, w.shape, start, stop))
    return _scaled(w, values, slice(start, stop))


def gather_rows(w: PackedTensor, index: Tensor) -> Tensor:
    """Rows by number, in any order and with repeats, as float32 [len(index), K]: what an embedding reads.

    index: int64 [n], every entry a row of the tensor (the caller has checked).
    """
    codes = layout(w.layout).gather_rows(w.data, element(w.element).bits, w.shape, index)
    return _scaled(w, _decode_codes(w, codes), index)


def _decode_codes(w: PackedTensor, codes: Tensor) -> Tensor:
    """float32 values of codes, in their shape, before any scale."""
    kind = element(w.element)
    if w.codebook is None and kind.bits > 8:
        return kind.decode(codes)
    return _table(w).index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def _table(w: PackedTensor) -> Tensor:
    """The float32 value of every code: the codebook's, or the element's own."""
    return decode_table(w.element, w.device) if w.codebook is None else w.codebook.view(torch.float32)


def _scaled(w: PackedTensor, values: Tensor, rows: slice | Tensor) -> Tensor:
    """Zero point, scales and offset applied in place to values [n, K] of the rows that `rows` names."""
    if values.numel() == 0:
        return values
    if w.zero_points is not None:
        values = _in_blocks(values, w.zero_points, w.shape, rows, torch.Tensor.sub_)
    for scale in w.scales:
        values = _in_blocks(values, scale, w.shape, rows, torch.Tensor.mul_)
    if w.offset:
        added = torch.ones_like(values)
        for scale in w.offset:  # 1 * x is x, so the first factor is taken as it is
            added = _in_blocks(added, scale, w.shape, rows, torch.Tensor.mul_)
        values.add_(added)
    return values


@lru_cache(maxsize=64)
def decode_table(name: str, device: torch.device) -> Tensor:
    return element(name).decode(torch.arange(2 ** element(name).bits)).to(device)


Change = Callable[[Tensor, Tensor], Tensor]


def _in_blocks(values: Tensor, scale: Scale, shape: tuple[int, ...], rows: slice | Tensor, apply: Change) -> Tensor:
    """apply(values, scale) in place, each scale over its own columns; the last block of a row may be short."""
    factors = scale_rows(scale, shape, rows)  # [rows or 1, blocks]
    width, block = values.shape[1], min(scale.block[-1], values.shape[1])
    whole = width // block * block
    apply(values[:, :whole].unflatten(1, (-1, block)), factors[:, : whole // block, None])
    if whole < width:
        apply(values[:, whole:], factors[:, whole // block :])
    return values


def scale_rows(scale: Scale, shape: tuple[int, ...], rows: slice | Tensor) -> Tensor:
    """float32 [rows or 1, blocks of a row]: the scales that those rows meet."""
    grid = scale.grid(shape)
    record, chosen = element(scale.element), layout(scale.layout)
    if row_count(grid) == 1:
        return record.decode(chosen.unpack_rows(scale.data, record.bits, grid, 0, 1))
    if grid[:-1] == shape[:-1]:
        if isinstance(rows, slice):
            return record.decode(chosen.unpack_rows(scale.data, record.bits, grid, rows.start, rows.stop))
        return record.decode(chosen.gather_rows(scale.data, record.bits, grid, rows))
    codes = chosen.unpack_rows(scale.data, record.bits, grid, 0, row_count(grid))
    row = torch.arange(rows.start, rows.stop, device=scale.data.device) if isinstance(rows, slice) else rows
    index = torch.zeros_like(row)
    stride_rows, stride_grid = 1, 1
    for extent, block, cells in zip(reversed(shape[:-1]), reversed(scale.block[:-1]), reversed(grid[:-1]), strict=True):
        index += row // stride_rows % extent // block * stride_grid
        stride_rows *= extent
        stride_grid *= cells
    return record.decode(codes.index_select(0, index))
