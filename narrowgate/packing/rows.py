"""`rows@1`: one integer unit per element, in the grid's own shape: uint8 up to 8 bits, int16 for 16, int32 for 32.

The plain layout of scales, and of values whose width is a machine width (a bfloat16 weight is `data.view(torch.bfloat16)`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.packing.layout import Layout, Shape, row_major, view_row_major


def storage_dtype(bits: int) -> torch.dtype:
    """uint8, int16 or int32: the narrowest that holds the field."""
    if bits <= 8:
        return torch.uint8
    return torch.int16 if bits == 16 else torch.int32


def _pack(codes: Tensor, bits: int) -> Tensor:
    return codes.to(storage_dtype(bits), copy=True)


def _unpack_rows(data: Tensor, bits: int, shape: Shape, start: int, stop: int) -> Tensor:
    rows = row_major(data, shape)[start:stop]
    if bits <= 8:
        return rows & ((1 << bits) - 1)
    return rows.to(torch.int32) & 0xFFFF if bits == 16 else rows


def _refusal(shape: Shape, bits: int) -> str | None:
    return None if bits <= 8 or bits in (16, 32) else f"rows@1 holds fields of up to 8, 16 or 32 bits, got {bits}"


LAYOUT = Layout(
    name="rows@1",
    pack=_pack,
    unpack_rows=_unpack_rows,
    storage_shape=lambda shape, bits: shape,
    storage_dtype=storage_dtype,
    refusal=_refusal,
    view_rows=view_row_major,
    appendable=True,
)
