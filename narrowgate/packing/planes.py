"""`planes16@1`, `planes32@1`, `planes64@1`: group-major, the layouts that the GPU's products read; `columns@1` is theirs for scales.

A row is cut into units, and a unit into parts of J values (J is the number in the name). Byte j of a row's unit holds the j-th code
of every part, so that one mask (and a shift) frees a whole part, in order of k, wherever the other parts are. Storage is uint8
[units, planes, rows, J]: the rows of a tile lie in one run of bytes for each unit.
* 8 bits: one part, one plane. 4 bits: two parts, low and high. 2 bits: four parts, lowest first.
* 6 bits: four parts, three planes; plane i holds part i in its low six bits, and bits 2i, 2i+1 of part 3 above.
The last unit of a row is filled up with zero codes: the only cost, up to one unit a row. Scales stand as [blocks, rows] for each
matrix, so that the scales of neighbouring rows are neighbours. A stack [E, N, K] is its matrices one after the other."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from narrowgate.packing import rows as plain
from narrowgate.packing.layout import Layout, Shape, code_dtype

PARTS = {8: 1, 4: 2, 2: 4, 6: 4}
WIDTHS = (16, 32, 64)


def planes(bits: int) -> int:
    """Bytes that hold one code of every part."""
    return 3 if bits == 6 else 1


def units(width: int, bits: int, part: int) -> int:
    """Units of a row of `width` values in parts of `part`."""
    return -(-width // (part * PARTS[bits]))


def _interleave(parts: list[Tensor], bits: int) -> Tensor:
    """Codes of each part -> bytes [planes, ...]."""
    if bits == 6:
        last = parts[3]
        return torch.stack([parts[i] | (((last >> (2 * i)) & 3) << 6) for i in range(3)])
    byte = parts[0]
    for i, codes in enumerate(parts[1:], 1):
        byte = byte | (codes << (bits * i))
    return byte[None]


def _separate(stored: Tensor, bits: int) -> list[Tensor]:
    """Bytes [planes, ...] -> codes of each part."""
    if bits == 6:
        last = (stored[0] >> 6) | ((stored[1] >> 6) << 2) | ((stored[2] >> 6) << 4)
        return [stored[0] & 63, stored[1] & 63, stored[2] & 63, last]
    mask = (1 << bits) - 1
    return [(stored[0] >> (bits * i)) & mask for i in range(PARTS[bits])]


def _layout(part: int) -> Layout:
    def storage_shape(shape: Shape, bits: int) -> Shape:
        return (prod(shape[:-2]) * units(shape[-1], bits, part), planes(bits), shape[-2], part)

    def pack(codes: Tensor, bits: int) -> Tensor:
        shape = tuple(codes.shape)
        if codes.numel() == 0:
            return torch.zeros(storage_shape(shape, bits), dtype=torch.uint8, device=codes.device)
        count = units(shape[-1], bits, part)
        filled = torch.nn.functional.pad(codes, (0, count * part * PARTS[bits] - shape[-1]))
        split = filled.view(-1, shape[-2], count, PARTS[bits], part).transpose(1, 2)  # [matrices, units, rows, parts, J]
        stored = _interleave(list(split.unbind(3)), bits)  # [planes, matrices, units, rows, J]
        return stored.movedim(0, 2).reshape(storage_shape(shape, bits)).contiguous()

    def unpack_rows(data: Tensor, bits: int, shape: Shape, start: int, stop: int) -> Tensor:
        if start == stop or shape[-1] == 0:
            return data.new_empty((stop - start, shape[-1]), dtype=code_dtype(bits))
        n = shape[-2]
        matrices = data.view(prod(shape[:-2]), -1, *data.shape[1:])
        first, last = start // n, -(-stop // n)
        taken = matrices[first:last, :, :, start - first * n : stop - first * n] if last - first == 1 else matrices[first:last]
        split = torch.stack(_separate(taken.movedim(2, 0), bits), -2)  # [matrices, units, rows, parts, J]
        codes = split.transpose(1, 2).flatten(3).flatten(2).flatten(0, 1)[:, : shape[-1]]
        return codes if last - first == 1 else codes[start - first * n : stop - first * n]

    def view_rows(data: Tensor, bits: int, shape: Shape, start: int, stop: int) -> Tensor | None:
        n = shape[-2]
        if not n or start % n or stop % n:
            return None  # rows of one matrix lie apart
        count = units(shape[-1], bits, part)
        return data[start // n * count : stop // n * count]

    name = f"planes{part}@1"

    def refusal(shape: Shape, bits: int) -> str | None:
        if len(shape) < 2:
            return f"{name} needs rows and columns, got shape {list(shape)}"
        return None if bits in PARTS else f"{name} holds fields of 2, 4, 6 or 8 bits, got {bits}"

    return Layout(name, pack, unpack_rows, storage_shape, lambda bits: torch.uint8, refusal, view_rows)


def _column_shape(shape: Shape, bits: int) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])


def _pack_columns(codes: Tensor, bits: int) -> Tensor:
    return codes.to(plain.storage_dtype(bits), copy=True).transpose(-1, -2).contiguous()


def _unpack_columns(data: Tensor, bits: int, shape: Shape, start: int, stop: int) -> Tensor:
    taken = data.transpose(-1, -2).reshape(prod(shape[:-1]), shape[-1])[start:stop]
    return taken.to(torch.int32) & 0xFFFF if bits == 16 else taken


def _view_columns(data: Tensor, bits: int, shape: Shape, start: int, stop: int) -> Tensor | None:
    n = shape[-2]
    whole = n and start % n == 0 and stop % n == 0
    return data.view(-1, shape[-1], n)[start // n : stop // n] if whole else None


def _column_refusal(shape: Shape, bits: int) -> str | None:
    if len(shape) < 2:
        return f"columns@1 needs rows and columns, got shape {list(shape)}"
    return None if bits in (8, 16, 32) else f"columns@1 holds units of 8, 16 or 32 bits, got {bits}"


LAYOUTS = tuple(_layout(part) for part in WIDTHS)
COLUMNS = Layout(
    "columns@1", _pack_columns, _unpack_columns, _column_shape, plain.storage_dtype, _column_refusal, _view_columns
)  # fmt: skip
