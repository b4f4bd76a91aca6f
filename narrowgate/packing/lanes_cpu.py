"""Canonical storage to lanes on the fly: what a product does to a weight that nobody has prepared.

`to_lanes` gives each row's run of bits (words@1, fp6_bytes@1, rows@1: wherever in a byte it starts) its own lane of 32-bit
words; bits past the row's end are zero, as `lanes16@1` stores them. `units_to_lanes` does the same for scales."""

# mypy: allow-untyped-defs
from __future__ import annotations

import numba
from llvmlite import ir
from numba import types

from narrowgate.simd import cpu as simd
from narrowgate.simd.cpu import vector_op
from narrowgate.simd.cpu_threads import parallel

_LONG, _WORD = ir.IntType(64), ir.IntType(32)


@vector_op(types.int64, types.int64)
def _read_8(b, address):
    return simd.read(b, address, _LONG)


@vector_op(types.int64, types.int64)
def _read_1(b, address):
    return b.zext(simd.read(b, address, ir.IntType(8)), _LONG)


@vector_op(types.none, types.int64, types.int64)
def _write_4(b, address, value):
    b.store(b.trunc(value, _WORD), simd.pointer(b, address, _WORD), align=4)


@vector_op(types.none, types.int64, types.int64)
def _write_1(b, address, value):
    b.store(b.trunc(value, ir.IntType(8)), simd.pointer(b, address, ir.IntType(8)), align=1)


@vector_op(types.int64, types.int64, types.int64)
def _shift_down(b, value, count):
    return b.lshr(value, count)


@numba.njit
def _word(source, size, bit):
    """32 bits from bit `bit` of a buffer of `size` bytes on; zeros past its end."""
    byte, shift = bit >> 3, bit & 7
    if byte + 8 <= size:
        return _shift_down(_read_8(source + byte), shift) & 0xFFFFFFFF
    value = 0
    for i in range(max(0, min(5, size - byte))):
        value |= _read_1(source + byte + i) << (8 * i)
    return (value >> shift) & 0xFFFFFFFF


@numba.njit
def _tile(tile, source, size, first_bit, row_bits, rows, words, into):
    for lane in range(16):
        row = tile * 16 + lane
        for i in range(words):
            left = row_bits - i * 32
            value = 0
            if row < rows and left > 0:
                value = _word(source, size, first_bit + row * row_bits + i * 32)
                if left < 32:
                    value &= (1 << left) - 1
            _write_4(into + ((tile * words + i) * 16 + lane) * 4, value)


def to_lanes(source, size, first_bit, row_bits, rows, words, into, team):
    """`rows` rows of `row_bits` bits each to int32 [tiles, words, 16]."""
    parallel(_tile, (source, size, first_bit, row_bits, rows, words, into), (rows + 15) // 16, team)


@numba.njit
def _units(tile, source, blocks, width, rows, into):
    for lane in range(16):
        row = tile * 16 + lane
        for i in range(blocks):
            for byte in range(width):
                value = 0
                if row < rows:
                    value = _read_1(source + (row * blocks + i) * width + byte)
                _write_1(into + ((tile * blocks + i) * 16 + lane) * width + byte, value)


def units_to_lanes(source, blocks, width, rows, into, team):
    """Scales [rows, blocks] of `width` bytes each to [tiles, blocks, 16]."""
    parallel(_units, (source, blocks, width, rows, into), (rows + 15) // 16, team)
