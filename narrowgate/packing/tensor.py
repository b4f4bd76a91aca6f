"""`PackedTensor`: low-bit values with everything that decoding them needs, as a plain container.

It is no torch.Tensor and no subclass: a torch function that meets one raises TypeError instead of computing noise. All
stored tensors are integers, so nothing that casts floating tensors (`module.to(dtype)`) can change a bit. Decoding is the
registered operator `narrowgate::dequantize`, called by name, so that this file imports nothing above it; the reference of
that operator is decode.py. Left out: arithmetic of any kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from narrowgate.errors import InputError
from narrowgate.formats import element
from narrowgate.formats.elements import Element
from narrowgate.packing.layout import row_count
from narrowgate.packing.registry import layout
from narrowgate.packing.scale import Scale, check_storage


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """Codes of one element in one layout, with scales: value = (decode(code) - zero point) * scales (in order) + offset.

    shape counts VALUES. scales: innermost first. zero_points: subtracted from the decoded code. offset: factors multiplied
    together left to right, the product added last. codebook: int32 bit patterns of float32 [2**bits], for index elements.
    """

    element: str
    layout: str
    data: Tensor
    shape: tuple[int, ...]
    scales: tuple[Scale, ...] = ()
    zero_points: Scale | None = None
    offset: tuple[Scale, ...] = ()
    codebook: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("shape", "scales", "offset"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        kind = element(self.element)
        if not self.shape or any(extent < 0 for extent in self.shape):
            raise InputError(f"PackedTensor: expected at least one axis and no negative extent, got {list(self.shape)}")
        chosen = layout(self.layout)
        chosen.check(self.shape, kind.bits, "PackedTensor")
        check_storage(self.data, chosen, self.shape, kind.bits, "PackedTensor data")
        for level, scale in enumerate(self.scales):
            scale.check(self.shape, f"PackedTensor scales[{level}]")
        if self.zero_points is not None:
            self.zero_points.check(self.shape, "PackedTensor zero_points")
        for level, scale in enumerate(self.offset):
            scale.check(self.shape, f"PackedTensor offset[{level}]")
        _check_codebook(kind, self.codebook)
        if any(t.device != self.data.device for t in self.tensors()):
            raise InputError(f"PackedTensor: all stored tensors must be on {self.data.device}")

    @property
    def device(self) -> torch.device:
        """Where the stored tensors are."""
        return self.data.device

    @property
    def numel(self) -> int:
        """How many values."""
        return prod(self.shape)

    @property
    def all_scales(self) -> tuple[Scale, ...]:
        """Scales, zero points, offset: every Scale, in storage order."""
        middle = () if self.zero_points is None else (self.zero_points,)
        return (*self.scales, *middle, *self.offset)

    def tensors(self) -> list[Tensor]:
        """Every stored tensor: data, scales innermost first, zero points, offset, codebook."""
        last = [] if self.codebook is None else [self.codebook]
        return [self.data, *(scale.data for scale in self.all_scales), *last]

    @property
    def nbytes(self) -> int:
        """Every stored byte: codes, scales, zero points, offset, codebook, padding."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    @property
    def bits_per_value(self) -> float:
        """Stored bits over values; 0.0 for an empty tensor."""
        return 8 * self.nbytes / self.numel if self.numel else 0.0

    @cached_property
    def scheme(self) -> str | None:
        """The catalogue's name for this element, these scales and these blocks, or None if it has none."""
        from narrowgate.packing.naming import scheme_of

        return scheme_of(self)

    def codes(self) -> Tensor:
        """Raw unsigned fields in `shape`: uint8 up to 8 bits, int32 above (32-bit fields as int32 bit patterns)."""
        return layout(self.layout).unpack(self.data, element(self.element).bits, self.shape)

    def codebook_values(self) -> Tensor | None:
        """The codebook as float32, or None."""
        return None if self.codebook is None else self.codebook.view(torch.float32)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values [shape], computed in float32 and rounded once to `dtype` (the operator narrowgate::dequantize)."""
        from narrowgate.packing.operand import flatten

        tensors, described = flatten(self)
        return torch.ops.narrowgate.dequantize(tensors, described, dtype=dtype)

    def to(self, device: torch.device | str) -> PackedTensor:
        """The same tensor on another device."""
        return self._map(self.data.to(device), lambda scale: scale.to(device), self.shape, device)

    def with_layout(self, name: str | None = None, *, scales: str | None = None) -> PackedTensor:
        """The same codes in layout `name`, and the innermost scale in layout `scales` (None: unchanged)."""
        kept = self
        if name is not None and name != self.layout:
            bits = element(self.element).bits
            chosen = layout(name)
            chosen.check(self.shape, bits, "with_layout")
            kept = replace(kept, layout=name, data=chosen.pack(self.codes().contiguous(), bits))
        if scales is not None and self.scales:
            innermost = self.scales[0].with_layout(scales, self.shape)
            kept = replace(kept, scales=(innermost, *self.scales[1:]))
        return kept

    def rows(self, start: int, stop: int) -> PackedTensor:
        """values[start:stop] along the first axis, without copying where whole words allow it.

        Raises InputError for bounds outside the tensor, and where `start` cuts a scale block.
        """
        if len(self.shape) < 2 or not 0 <= start <= stop <= self.shape[0]:
            raise InputError(f"rows: expected 0 <= start <= stop <= {self.shape[0]} and two axes, got [{start}, {stop})")
        taken = (stop - start, *self.shape[1:])
        inner = row_count(self.shape[1:])
        data = self._take(start * inner, stop * inner, taken)
        return self._map(data, lambda scale: scale.cut(self.shape, start, stop), taken)

    def select(self, index: int) -> PackedTensor:
        """values[index] along the first axis: one expert of a stack [E, N, K]."""
        if len(self.shape) < 2 or not 0 <= index < self.shape[0]:
            raise InputError(f"select: expected 0 <= index < {self.shape[0]} and two axes, got {index}")
        taken = self.shape[1:]
        inner = row_count(taken)
        data = self._take(index * inner, (index + 1) * inner, taken)
        return self._map(data, lambda scale: scale.cut(self.shape, index, index + 1, drop=True), taken)

    def _take(self, start: int, stop: int, taken: tuple[int, ...]) -> Tensor:
        return layout(self.layout).take_rows(self.data, element(self.element).bits, self.shape, start, stop, taken)

    def _map(
        self,
        data: Tensor,
        change: Callable[[Scale], Scale],
        shape: tuple[int, ...],
        device: torch.device | str | None = None,
    ) -> PackedTensor:
        return PackedTensor(
            self.element,
            self.layout,
            data,
            shape,
            tuple(change(scale) for scale in self.scales),
            None if self.zero_points is None else change(self.zero_points),
            tuple(change(scale) for scale in self.offset),
            self.codebook if self.codebook is None or device is None else self.codebook.to(device),
        )

    def __repr__(self) -> str:
        return (
            f"PackedTensor({self.scheme or self.element}, shape={list(self.shape)}, layout={self.layout}, "
            f"bits_per_value={self.bits_per_value:.3f}, device={self.device})"
        )


def _check_codebook(kind: Element, table: Tensor | None) -> None:
    if (kind.kind == "index") != (table is not None):
        need = "needs a codebook" if table is None else "is no index element, so it takes no codebook"
        raise InputError(f"PackedTensor: {kind.name} {need}")
    if table is not None and (table.dtype != torch.int32 or tuple(table.shape) != (2**kind.bits,)):
        raise InputError(
            f"PackedTensor: expected the codebook as int32 bit patterns of shape [{2**kind.bits}], "
            f"got {table.dtype} {list(table.shape)}"
        )


def same_bits(a: PackedTensor, b: PackedTensor) -> bool:
    """Whether two packed tensors store the same bytes under the same description (element, layout, shape, blocks)."""
    from narrowgate.packing.operand import flatten

    (left, described), (right, other) = flatten(a), flatten(b)
    return described == other and all(torch.equal(x, y.to(x.device)) for x, y in zip(left, right, strict=True))
