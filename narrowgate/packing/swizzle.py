"""`swizzle_128x4@1`: byte scales in tiles of 128 rows by 4 columns, as block-scaled tensor cores read them (SPEC B17, B18).

Byte (row, col) of one matrix lies at
    ((((row//128)*ceil(cols/4) + col//4)*32 + row%32)*4 + (row%128)//32)*4 + col%4,
that is, a tile is 32 lines of 16 bytes, and a line holds rows r, r+32, r+64, r+96. Storage is padded to whole tiles with
zero bytes, which are padding and no data. A stack of matrices (experts) is swizzled one by one, one after the other.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from narrowgate.errors import InputError
from narrowgate.packing.layout import Layout, Shape


def padded_extents(rows: int, cols: int) -> tuple[int, int]:
    """Rows rounded up to 128, columns to 4."""
    return -(-rows // 128) * 128, -(-cols // 4) * 4


def swizzle_128x4(scales: Tensor) -> Tensor:
    """uint8 [..., rows, cols] -> uint8 [..., padded rows * padded cols]: the bytes in tile order, padding zero.

    >>> int(swizzle_128x4(torch.arange(8, dtype=torch.uint8).view(2, 4))[17])  # row 1, column 1
    5
    """
    _check_bytes(scales, "swizzle_128x4")
    if scales.dim() < 2:
        raise InputError(f"swizzle_128x4: expected scales [..., rows, cols], got shape {list(scales.shape)}")
    scales = scales.view(torch.uint8)
    *lead, rows, cols = scales.shape
    padded_rows, padded_cols = padded_extents(rows, cols)
    full = torch.nn.functional.pad(scales, (0, padded_cols - cols, 0, padded_rows - rows))
    tiles = full.reshape(prod(lead), padded_rows // 128, 4, 32, padded_cols // 4, 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(*lead, padded_rows * padded_cols)


def swizzled_view(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    """Swizzled bytes [G, padded rows * padded cols] (or 1-D: one group) as the view (32, 4, Rp/128, 4, Cp/4, G) of SPEC B18."""
    padded_rows, padded_cols = padded_extents(rows, cols)
    groups = swizzled.shape[0] if swizzled.dim() == 2 else 1
    tiles = swizzled.view(groups, padded_rows // 128, padded_cols // 4, 32, 4, 4)
    return tiles.permute(3, 4, 1, 5, 2, 0)


def unswizzle_128x4(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    """Swizzled bytes -> row-major uint8 [groups * rows, cols] with the padding dropped.

    swizzled: the 6-D view (32, 4, Rp/128, 4, Cp/4, G), whose groups come out stacked on the rows, or one group's bytes as a
    flat or 2-D buffer of padded rows * padded cols bytes. Raises InputError if the size is another one.
    """
    _check_bytes(swizzled, "unswizzle_128x4")
    padded_rows, padded_cols = padded_extents(rows, cols)
    swizzled = swizzled.view(torch.uint8)
    view = (32, 4, padded_rows // 128, 4, padded_cols // 4)
    if swizzled.dim() == 6:
        if tuple(swizzled.shape[:5]) != view:
            raise InputError(f"unswizzle_128x4: expected a view {list(view)} + [groups], got {list(swizzled.shape)}")
        tiles = swizzled.permute(5, 2, 4, 0, 1, 3)
    else:
        if swizzled.dim() > 2 or swizzled.numel() != padded_rows * padded_cols:
            raise InputError(
                f"unswizzle_128x4: expected {padded_rows} * {padded_cols} bytes in one or two dimensions for "
                f"{rows} x {cols} scales, got shape {list(swizzled.shape)}"
            )
        tiles = swizzled.reshape(1, padded_rows // 128, padded_cols // 4, 32, 4, 4)
    return _from_tiles(tiles, rows, cols).reshape(tiles.shape[0] * rows, cols)


def _from_tiles(tiles: Tensor, rows: int, cols: int) -> Tensor:
    """[G, Rp/128, Cp/4, 32, 4, 4] -> [G, rows, cols]."""
    padded_rows, padded_cols = padded_extents(rows, cols)
    full = tiles.permute(0, 1, 4, 3, 2, 5).reshape(tiles.shape[0], padded_rows, padded_cols)
    return full[:, :rows, :cols]


def _check_bytes(scales: Tensor, who: str) -> None:
    if scales.dtype not in (torch.uint8, torch.int8, torch.float8_e8m0fnu, torch.float8_e4m3fn):
        raise InputError(f"{who}: expected one byte a scale, got {scales.dtype}")


def _storage_shape(shape: Shape, bits: int) -> Shape:
    padded_rows, padded_cols = padded_extents(shape[-2], shape[-1])
    return (prod(shape[:-2]) * padded_rows * padded_cols,)


def _unpack_rows(data: Tensor, bits: int, shape: Shape, start: int, stop: int) -> Tensor:
    rows, cols = shape[-2:]
    padded_rows, padded_cols = padded_extents(rows, cols)
    tiles = data.view(prod(shape[:-2]), padded_rows // 128, padded_cols // 4, 32, 4, 4)
    return _from_tiles(tiles, rows, cols).reshape(tiles.shape[0] * rows, cols)[start:stop]


def _refusal(shape: Shape, bits: int) -> str | None:
    if bits != 8:
        return f"swizzle_128x4@1 holds one byte a scale, got {bits} bits"
    return None if len(shape) >= 2 else f"swizzle_128x4@1 needs rows and columns, got shape {list(shape)}"


LAYOUT = Layout(
    name="swizzle_128x4@1",
    pack=lambda codes, bits: swizzle_128x4(codes).reshape(-1),
    unpack_rows=_unpack_rows,
    storage_shape=_storage_shape,
    storage_dtype=lambda bits: torch.uint8,
    refusal=_refusal,
)
