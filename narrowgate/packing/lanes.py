"""`lanes16@1`: rows as lanes, the layout that the CPU's products read; `lanes16_units@1` is the same for scales.

Sixteen rows stand side by side: word i of rows 16t .. 16t+15 is one vector of sixteen 32-bit words, and a row's words hold
its codes in order of k, low bits first, each row starting in a fresh word. Storage is int32 [tiles, words, 16], where a
row has ceil(K / u) units of u values: u = 32 / bits and one word, or 16 values in three words for 6 bits. Scales are one
unit a lane: [tiles, blocks, 16] of uint8, int16 or int32. A kernel then gives each output row a lane of its own, needs no
sum across lanes, and adds in plain order of k whatever the number of tokens. Missing rows and values are zero codes.
Matrices of a stack [E, N, K] are padded one by one, so that an expert is a view."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from narrowgate.packing import rows as plain
from narrowgate.packing import words
from narrowgate.packing.fp6 import _pack_lanes, _unpack_lanes
from narrowgate.packing.layout import Layout, Shape, code_dtype

LANES = 16


def unit(bits: int) -> tuple[int, int]:
    """(values, words) of the smallest run of codes that fills whole words."""
    return (16, 3) if bits == 6 else (32 // bits, 1)


def _tiles(shape: Shape) -> tuple[int, int]:
    """(matrices, tiles of a matrix)."""
    return prod(shape[:-2]), -(-shape[-2] // LANES)


def _word_count(width: int, bits: int) -> int:
    values, count = unit(bits)
    return -(-width // values) * count


def _by_lane(table: Tensor, shape: Shape) -> Tensor:
    """[rows, C] -> [tiles, C, 16], short tiles filled with zeros."""
    matrices, tiles = _tiles(shape)
    padded = torch.nn.functional.pad(table.view(matrices, shape[-2], -1), (0, 0, 0, tiles * LANES - shape[-2]))
    return padded.view(matrices * tiles, LANES, -1).transpose(1, 2).contiguous()


def _by_row(data: Tensor, shape: Shape, start: int, stop: int) -> Tensor:
    """[tiles, C, 16] -> [stop - start, C] of the flat rows [start, stop)."""
    matrices, tiles = _tiles(shape)
    if matrices == 1:
        first = start // LANES
        part = data[first : -(-stop // LANES)].transpose(1, 2).reshape(-1, data.shape[1])
        return part[start - first * LANES : stop - first * LANES]
    row = torch.arange(start, stop, device=data.device)
    matrix, inner = row // shape[-2], row % shape[-2]
    return data[matrix * tiles + inner // LANES, :, inner % LANES]


def _pack(codes: Tensor, bits: int) -> Tensor:
    shape, width = tuple(codes.shape), codes.shape[-1]
    count = _word_count(width, bits)
    if codes.numel() == 0:
        return torch.zeros(_storage_shape(shape, bits), dtype=torch.int32, device=codes.device)
    values = unit(bits)[0]
    padded = torch.nn.functional.pad(codes.reshape(-1, width), (0, -width % values))
    packed = _pack_lanes(padded).reshape(-1).view(torch.int32) if bits == 6 else words.pack(padded, bits)
    return _by_lane(packed.view(-1, count), shape)


def _unpack_rows(data: Tensor, bits: int, shape: Shape, start: int, stop: int) -> Tensor:
    if start == stop or shape[-1] == 0:
        return data.new_empty((stop - start, shape[-1]), dtype=code_dtype(bits))
    packed = _by_row(data, shape, start, stop).contiguous()
    if bits == 6:
        return _unpack_lanes(packed.view(torch.uint8))[:, : shape[-1]]
    width = packed.shape[1] * (32 // bits)
    return words.unpack_rows(packed.view(-1), bits, (stop - start, width), 0, stop - start)[:, : shape[-1]]


def _storage_shape(shape: Shape, bits: int) -> Shape:
    matrices, tiles = _tiles(shape)
    return (matrices * tiles, _word_count(shape[-1], bits), LANES)


def _view_rows(data: Tensor, bits: int, shape: Shape, start: int, stop: int) -> Tensor | None:
    matrices, tiles = _tiles(shape)
    n = shape[-2]
    if n and start % n == 0 and stop % n == 0:
        return data[start // n * tiles : stop // n * tiles]
    if matrices == 1 and start % LANES == 0 and (stop % LANES == 0 or stop == n):
        return data[start // LANES : -(-stop // LANES)]
    return None


def _refusal(shape: Shape, bits: int) -> str | None:
    if len(shape) < 2:
        return f"lanes16@1 needs rows and columns, got shape {list(shape)}"
    return None if bits in (2, 4, 6, 8, 16, 32) else f"lanes16@1 holds fields of 2, 4, 6, 8, 16 or 32 bits, got {bits}"


def _unit_refusal(shape: Shape, bits: int) -> str | None:
    if len(shape) < 2:
        return f"lanes16_units@1 needs rows and columns, got shape {list(shape)}"
    return None if bits in (8, 16, 32) else f"lanes16_units@1 holds units of 8, 16 or 32 bits, got {bits}"


def _pack_units(codes: Tensor, bits: int) -> Tensor:
    if codes.numel() == 0:
        return torch.zeros(_unit_shape(tuple(codes.shape), bits), dtype=plain.storage_dtype(bits), device=codes.device)
    return _by_lane(codes.to(plain.storage_dtype(bits)).reshape(-1, codes.shape[-1]), tuple(codes.shape))


def _unpack_units(data: Tensor, bits: int, shape: Shape, start: int, stop: int) -> Tensor:
    if start == stop or shape[-1] == 0:
        return data.new_empty((stop - start, shape[-1]), dtype=code_dtype(bits))
    taken = _by_row(data, shape, start, stop)
    return taken.to(torch.int32) & 0xFFFF if bits == 16 else taken


def _unit_shape(shape: Shape, bits: int) -> Shape:
    matrices, tiles = _tiles(shape)
    return (matrices * tiles, shape[-1], LANES)


LAYOUT = Layout("lanes16@1", _pack, _unpack_rows, _storage_shape, lambda bits: torch.int32, _refusal, _view_rows)
UNITS = Layout("lanes16_units@1", _pack_units, _unpack_units, _unit_shape, plain.storage_dtype, _unit_refusal, _view_rows)
