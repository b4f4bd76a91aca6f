"""`Scale`: one level of factors (or zero points, or offsets) over blocks of a tensor's values.

A scale knows its element, its block extents and its layout; the tensor that it belongs to gives the shape, and the grid is
ceil(shape / block). What it is used for (factor, zero point, offset) is the place it holds in the PackedTensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgate.errors import InputError
from narrowgate.formats import element
from narrowgate.packing.layout import Layout, Shape, as_codes
from narrowgate.packing.registry import SCALE_LAYOUTS, layout


@dataclass(frozen=True, eq=False)
class Scale:
    """`data` (integers) holds one `element` for every block of `block` values (one extent per value axis), in `layout`."""

    data: Tensor
    element: str
    block: tuple[int, ...]
    layout: str = "rows@1"

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", tuple(int(extent) for extent in self.block))
        if element(self.element).kind == "index":
            raise InputError(f"Scale: expected an element with a value of its own, got {self.element}")
        if any(extent < 1 for extent in self.block):
            raise InputError(f"Scale: block extents must be positive, got {list(self.block)}")
        if self.layout not in SCALE_LAYOUTS:
            raise InputError(f"Scale: expected a layout among {', '.join(SCALE_LAYOUTS)}, got {self.layout!r}")

    @classmethod
    def from_codes(cls, codes: Tensor, name: str, block: Sequence[int], layout_name: str = "rows@1") -> Scale:
        """Pack raw codes [grid] of element `name` (any integer dtype) into a Scale."""
        bits = element(name).bits
        fields = as_codes(codes, bits, "Scale.from_codes")
        chosen = layout(layout_name)
        chosen.check(tuple(fields.shape), bits, "Scale.from_codes")
        return cls(chosen.pack(fields, bits), name, tuple(block), layout_name)

    @classmethod
    def from_values(cls, values: Tensor, name: str, block: Sequence[int], layout_name: str = "rows@1") -> Scale:
        """Encode float values [grid] that element `name` holds exactly; InputError for any other value.

        To round, choose how first: narrowgate.quantize.round_up (SPEC A40), or the element's own `encode`.
        """
        codes = element(name).encode(values)
        if not torch.equal(element(name).decode(codes), values.to(torch.float32)):
            raise InputError(f"Scale.from_values: some values are not exact in {name}; round them first, by a named rule")
        return cls.from_codes(codes, name, block, layout_name)

    @property
    def nbytes(self) -> int:
        """Stored bytes, padding included."""
        return self.data.numel() * self.data.element_size()

    def grid(self, shape: Sequence[int]) -> Shape:
        """The shape of the grid over values of `shape`: ceil(shape / block)."""
        return tuple(-(-extent // block) for extent, block in zip(shape, self.block, strict=True))

    def codes(self, shape: Sequence[int]) -> Tensor:
        """Raw codes in the grid's shape, for a tensor of `shape` values."""
        return layout(self.layout).unpack(self.data, element(self.element).bits, self.grid(shape))

    def values(self, shape: Sequence[int]) -> Tensor:
        """float32 values in the grid's shape, for a tensor of `shape` values."""
        return element(self.element).decode(self.codes(shape))

    def with_layout(self, name: str, shape: Sequence[int]) -> Scale:
        """The same factors in another layout."""
        return self if name == self.layout else Scale.from_codes(self.codes(shape), self.element, self.block, name)

    def to(self, device: torch.device | str) -> Scale:
        """The same scale on another device."""
        return Scale(self.data.to(device), self.element, self.block, self.layout)

    def check(self, shape: Shape, who: str) -> None:
        """Raise InputError unless this scale's rank, dtype and storage fit a tensor of `shape` values (SPEC A41)."""
        if len(self.block) != len(shape):
            raise InputError(
                f"{who}: a scale has one block extent for each axis of the values and spans no other axis; expected "
                f"{len(shape)} extents for shape {list(shape)}, got block {list(self.block)}"
            )
        bits = element(self.element).bits
        grid = self.grid(shape)
        layout(self.layout).check(grid, bits, who)
        check_storage(self.data, layout(self.layout), grid, bits, f"{who} ({self.element} of block {list(self.block)})")

    def cut(self, shape: Shape, start: int, stop: int, *, drop: bool = False) -> Scale:
        """The scale of values[start:stop] along the first axis; `drop`: of values[start], without that axis."""
        first, rest = self.block[0], self.block[1:]
        grid = self.grid(shape)
        if first >= shape[0]:
            low, high, extent = 0, min(stop - start, 1), max(stop - start, 1)
        elif start % first and not drop:
            raise InputError(f"rows: [{start}, {stop}) cuts a scale block of {first} rows; start at a multiple of it")
        else:
            low, high, extent = start // first, -(-stop // first), first
        taken = grid[1:] if drop else (high - low, *grid[1:])
        block = rest if drop else (extent, *rest)
        inner = 1
        for axis in grid[1:-1]:
            inner *= axis
        bits = element(self.element).bits
        data = layout(self.layout).take_rows(self.data, bits, grid, low * inner, high * inner, taken)
        return Scale(data, self.element, block, self.layout)


def check_storage(data: Tensor, chosen: Layout, shape: Shape, bits: int, who: str) -> None:
    """Raise InputError unless `data` has the dtype, shape and contiguity that the layout stores `shape` codes in (A38)."""
    expected = chosen.storage_dtype(bits)
    if data.dtype != expected:
        words = "; a packed operand is bound at the 32-bit words its buffer holds, not at the element given"
        raise InputError(
            f"{who}: expected {chosen.name} storage in {expected}, got {data.dtype}"
            + (words if chosen.name == "words@1" else "")
        )
    stored = chosen.storage_shape(shape, bits)
    if tuple(data.shape) != stored:
        raise InputError(
            f"{who}: expected {chosen.name} storage of shape {list(stored)} for {list(shape)} codes of {bits} bits, "
            f"got {list(data.shape)}"
        )
    if not data.is_contiguous():
        raise InputError(f"{who}: expected contiguous storage, got strides {list(data.stride())}")
