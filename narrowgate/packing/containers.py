"""`bytes@1`: one code a byte in the values' own shape, for any element up to 8 bits; the bits above the field are zero.

The form that takes any K, and the one that a kernel reads fastest when memory does not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.packing.layout import Layout, Shape, row_major, view_row_major


def _unpack_rows(data: Tensor, bits: int, shape: Shape, start: int, stop: int) -> Tensor:
    return row_major(data, shape)[start:stop] & ((1 << bits) - 1)


def _refusal(shape: Shape, bits: int) -> str | None:
    return None if bits <= 8 else f"bytes@1 holds codes of up to 8 bits, got {bits}"


LAYOUT = Layout(
    name="bytes@1",
    pack=lambda codes, bits: codes.clone(),
    unpack_rows=_unpack_rows,
    storage_shape=lambda shape, bits: shape,
    storage_dtype=lambda bits: torch.uint8,
    refusal=_refusal,
    view_rows=view_row_major,
    appendable=True,
)
