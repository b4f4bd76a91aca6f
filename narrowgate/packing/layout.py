"""What a layout is: a bijection between a tensor of codes and stored integers, as one record of four functions.

A layout knows field widths and shapes, never what a code means. The records live one a file beside their byte order;
registry.py lists them. Rows are the leading axes taken together: a tensor [E, N, K] has E*N rows of K codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from narrowgate.errors import InputError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """One byte order.

    pack(codes, bits) -> stored tensor; codes in `code_dtype(bits)`, contiguous, of any rank >= 1.
    unpack_rows(data, bits, shape, start, stop) -> codes [stop - start, shape[-1]] of those rows.
    storage_shape(shape, bits), storage_dtype(bits): of the stored tensor.
    view_rows(data, bits, shape, start, stop): storage of those rows as a view of `data`, or None where bits are shared.
    refusal(shape, bits): why this layout cannot hold such a tensor, or None.
    appendable: whether storage of rows [0, i) followed by storage of rows [i, n) is storage of [0, n) when i % 32 == 0.
    """

    name: str
    pack: Callable[[Tensor, int], Tensor]
    unpack_rows: Callable[[Tensor, int, Shape, int, int], Tensor]
    storage_shape: Callable[[Shape, int], Shape]
    storage_dtype: Callable[[int], torch.dtype]
    refusal: Callable[[Shape, int], str | None]
    view_rows: Callable[[Tensor, int, Shape, int, int], Tensor | None] | None = None
    appendable: bool = False

    def unpack(self, data: Tensor, bits: int, shape: Shape) -> Tensor:
        """All codes, in `shape`."""
        return self.unpack_rows(data, bits, shape, 0, row_count(shape)).reshape(shape)

    def gather_rows(self, data: Tensor, bits: int, shape: Shape, index: Tensor) -> Tensor:
        """Codes [len(index), shape[-1]] of the rows numbered by `index` (int64, inside the tensor)."""
        count, row_bits = row_count(shape), shape[-1] * bits
        if not self.appendable or row_bits % 8:  # rows share bytes, or are not runs of bytes at all
            rows = [self.unpack_rows(data, bits, shape, i, i + 1) for i in index.tolist()]
            return torch.cat(rows) if rows else data.new_empty((0, shape[-1]), dtype=code_dtype(bits))
        octets = data.reshape(-1).view(torch.uint8)[: count * row_bits // 8].view(count, row_bits // 8)
        taken = octets.index_select(0, index).reshape(-1)
        some = (len(index), shape[-1])
        storage, dtype = self.storage_shape(some, bits), self.storage_dtype(bits)
        missing = prod(storage) * dtype.itemsize - taken.numel()  # words@1 fills up its last word
        taken = torch.nn.functional.pad(taken, (0, missing)) if missing else taken
        return self.unpack_rows(taken.view(dtype).view(storage), bits, some, 0, len(index))

    def take_rows(self, data: Tensor, bits: int, shape: Shape, start: int, stop: int, taken: Shape) -> Tensor:
        """Storage of rows [start, stop) as a tensor of shape `taken`: a view if the layout can give one, else repacked."""
        view = self.view_rows(data, bits, shape, start, stop) if self.view_rows else None
        if view is not None:
            return view.view(self.storage_shape(taken, bits))
        codes = self.unpack_rows(data, bits, shape, start, stop).reshape(taken)
        return self.pack(codes.contiguous(), bits)

    def check(self, shape: Shape, bits: int, who: str) -> None:
        """Raise InputError if this layout cannot hold fields of `bits` bits in `shape`."""
        reason = self.refusal(shape, bits)
        if reason is not None:
            raise InputError(f"{who}: {reason}")


def row_count(shape: Shape) -> int:
    """Rows of a tensor: the product of all extents but the last."""
    return prod(shape[:-1])


def code_dtype(bits: int) -> torch.dtype:
    """The dtype of a tensor of `bits`-wide codes: uint8 up to 8 bits, int32 above."""
    return torch.uint8 if bits <= 8 else torch.int32


def as_codes(codes: Tensor, bits: int, who: str) -> Tensor:
    """Integer codes of any dtype as raw unsigned fields: contiguous, `code_dtype(bits)`, bits above the field dropped."""
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise InputError(f"{who}: expected integer codes, got {codes.dtype}")
    if bits < 8:
        codes = codes & ((1 << bits) - 1)
    elif bits == 16:
        codes = codes.to(torch.int32) & 0xFFFF
    if codes.dtype == torch.int8:
        codes = codes.view(torch.uint8)
    return codes.to(code_dtype(bits)).contiguous()


def row_major(data: Tensor, shape: Shape) -> Tensor:
    """Stored [..., units of one row] as [rows, units]; extents of 0 are fine."""
    return data.view(row_count(shape), data.shape[-1])


def view_row_major(data: Tensor, bits: int, shape: Shape, start: int, stop: int) -> Tensor | None:
    """`view_rows` of a layout that stores [..., units of one row]: a slice of whole rows."""
    return row_major(data, shape)[start:stop] if data.is_contiguous() else None
