"""Canonical storage to lanes on the fly: what a product does to a weight that nobody has prepared.

`to_lanes` gives each row's run of bits (words@1, fp6_bytes@1, rows@1: wherever in a byte it starts) its own lane of 32-bit
words; bits past the row's end are zero, as `lanes16@1` stores them. `units_to_lanes` does the same for scales."""

# mypy: allow-untyped-defs
from __future__ import annotations

import numba

from narrowgate.simd import cpu as simd
from narrowgate.simd.cpu_threads import parallel


@numba.njit
def _word(source, size, bit):
    """32 bits from bit `bit` of a buffer of `size` bytes on; zeros past its end."""
    byte, shift = bit >> 3, bit & 7
    if byte + 8 <= size:
        return simd.shift_down(simd.read_u64(source + byte), shift) & 0xFFFFFFFF
    value = 0
    for i in range(max(0, min(5, size - byte))):
        value |= simd.read_u8(source + byte + i) << (8 * i)
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
            simd.write_i32(into + ((tile * words + i) * 16 + lane) * 4, value)


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
                    value = simd.read_u8(source + (row * blocks + i) * width + byte)
                simd.write_u8(into + ((tile * blocks + i) * 16 + lane) * width + byte, value)


def units_to_lanes(source, blocks, width, rows, into, team):
    """Scales [rows, blocks] of `width` bytes each to [tiles, blocks, 16]."""
    parallel(_units, (source, blocks, width, rows, into), (rows + 15) // 16, team)
