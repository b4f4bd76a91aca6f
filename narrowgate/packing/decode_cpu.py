"""Rows of a packed tensor to values on the CPU, bit for bit what decode.py defines, for every element, layout and level.

One compiled kernel serves all: a row is worked on in chunks that stay in the first-level cache, one pass a step (fields to values,
then each level in turn: subtract, multiply, or gather the factors of the offset and add), so a step is one float32 rounding
and nothing can be fused. A chunk whose bits do not start on a byte, lie apart (`lanes16@1`) or end the buffer is staged first.
Scales of the usual storage are read in place; any other (swizzled, in words, over blocks of rows) comes decoded by decode.py."""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.core.extending import intrinsic

from narrowgate.packing import fields_cpu as fields
from narrowgate.simd import cpu as simd
from narrowgate.simd.cpu import F32, I32, inline
from narrowgate.simd.cpu_scales import load_scale, load_scales
from narrowgate.simd.cpu_threads import parallel
from narrowgate.simd.cpu_values import read_index

CHUNK = 1024
INDEX = 11  # beside the kinds of fields_cpu.py: a table of any length in memory, codes of 8 or 16 bits
FLAT, BYTES, LANES = range(3)  # where a row's codes are: a run of bits, one code a byte, words apart
SUBTRACT, MULTIPLY, FIRST, TIMES, ADD = range(5)  # FIRST and TIMES make the offset, ADD joins it
LEVEL = 8  # int64 fields of a level: operation, scale kind, address, scales a row, block, apart, by place, bytes of a scale


@intrinsic(prefer_literal=True)
def _sixteen(typingctx, kind, address):
    """Sixteen packed fields of a kind from a byte address on, as values less their table."""
    if not isinstance(kind, types.IntegerLiteral):
        return None
    number = kind.literal_value
    return I32(kind, types.int64), lambda context, b, sig, args: fields.row_fields(b, number, args[1])


@intrinsic(prefer_literal=True)
def _decode(typingctx, kind, field, low, high):
    if not isinstance(kind, types.IntegerLiteral):
        return None
    number = kind.literal_value
    return F32(kind, I32, F32, F32), lambda context, b, sig, args: fields.decode(b, number, *args[1:])


def _filler(kind: int) -> Any:
    """fill(source, apart, count, low, high, into): codes of one kind to values; `apart`: one code a byte."""
    bits = fields.BITS[kind]

    @numba.njit
    def fill(source, apart, count, low, high, into):
        if apart:
            for i in range(0, count, 16):
                simd.store_f32(into + 4 * i, _decode(kind, simd.load_u8(source + i), low, high))
        else:
            for i in range(0, count, 16):
                simd.store_f32(into + 4 * i, _decode(kind, _sixteen(kind, source + i * bits // 8), low, high))

    return fill


_table4, _table2, _table6, _signed8, _unsigned8, _e4m3, _e5m2, _bfloat16, _float16, _float32 = map(_filler, range(10))


@numba.njit
def _fill(kind, bits, source, apart, count, table, into):
    """`count` codes from a place that is readable up to the next sixteen."""
    low, high = simd.load_f32(table), simd.load_f32(table + (64 if kind == 2 else 0))
    if kind == 0:
        _table4(source, apart, count, low, high, into)
    elif kind == 1:
        _table2(source, apart, count, low, high, into)
    elif kind == 2:
        _table6(source, apart, count, low, high, into)
    elif kind == 3:
        _signed8(source, apart, count, low, high, into)
    elif kind == 4:
        _unsigned8(source, apart, count, simd.splat(np.float32(0.0)), high, into)
    elif kind == 5:
        _e4m3(source, apart, count, low, high, into)
    elif kind == 6:
        _e5m2(source, apart, count, low, high, into)
    elif kind == 7:
        _bfloat16(source, False, count, low, high, into)
    elif kind == 8:
        _float16(source, False, count, low, high, into)
    elif kind == 9:
        _float32(source, False, count, low, high, into)
    else:
        for i in range(count):
            code = (
                simd.read_u8(source + i) if bits == 8 else simd.read_u8(source + 2 * i) + 256 * simd.read_u8(source + 2 * i + 1)
            )
            simd.write_f32(into + 4 * i, simd.read_f32(table + 4 * code))


@numba.njit
def _source(layout, bits, data, size, row, lane, start, count, width, stage):
    """Where the codes of a chunk of one row can be read sixteen at a time: in place, or copied to `stage`."""
    if layout == LANES:
        words = (width + 15) // 16 * 3 if bits == 6 else (width * bits + 31) // 32
        first = start * bits // 32
        base = data + (lane // 16 * words * 16 + lane % 16) * 4
        for i in range(min((count * bits + 31) // 32, words - first)):
            simd.write_i32(stage + 4 * i, simd.read_i32(base + (first + i) * 64))
        return stage
    unit = 8 if layout == BYTES else bits
    bit = (row * width + start) * unit
    byte, shift, length = bit >> 3, bit & 7, (count * unit + 7) >> 3
    if shift == 0 and byte + ((count + 15) // 16 * 2 * unit) <= size:
        return data + byte
    carry = simd.read_u8(data + byte) >> shift
    for i in range(length):
        following = simd.read_u8(data + byte + i + 1) if byte + i + 1 < size else 0
        simd.write_u8(stage + i, carry | (following << (8 - shift)))
        carry = following >> shift
    return stage


@inline
def _factors(kind, address, per_row, apart, row, lane, first, count, size, into):
    """Scales first .. first + count of a row as float32."""
    if apart:
        base = address + (lane // 16 * per_row * 16 + lane % 16) * size
        for i in range(count):
            simd.store_first_f32(into + 4 * i, load_scale(kind, base + (first + i) * 16 * size), 1)
        return
    base, whole = address + (row * per_row + first) * size, count // 16 * 16
    for i in range(0, whole, 16):
        simd.store_f32(into + 4 * i, load_scales(kind, base + i * size))
    for i in range(whole, count):
        simd.store_first_f32(into + 4 * i, load_scale(kind, base + i * size), 1)


@inline
def _meet(operation, x, y):
    if operation == SUBTRACT:
        return simd.sub(x, y)
    if operation == ADD:
        return simd.add(x, y)
    if operation == FIRST:
        return y
    return simd.mul(x, y)


@numba.njit
def _run(operation, into, count, factor):
    """`count` values of one block meet its factor."""
    whole = count // 16 * 16
    for i in range(0, whole, 16):
        simd.store_f32(into + 4 * i, _meet(operation, simd.load_f32(into + 4 * i), factor))
    if whole < count:
        rest = count - whole
        x = simd.load_first_f32(into + 4 * whole, rest)
        simd.store_first_f32(into + 4 * whole, _meet(operation, x, factor), rest)


@numba.njit
def _level(level, row, lane, place, start, count, values, sums, factors):
    operation, kind, address = simd.read_u64(level), simd.read_u64(level + 8), simd.read_u64(level + 16)
    if operation == ADD:
        for i in range(0, count, 16):
            simd.store_f32(values + 4 * i, simd.add(simd.load_f32(values + 4 * i), simd.load_f32(sums + 4 * i)))
        return
    per_row, block = simd.read_u64(level + 24), simd.read_u64(level + 32)
    apart, by_place, size = simd.read_u64(level + 40), simd.read_u64(level + 48), simd.read_u64(level + 56)
    into = sums if operation in (FIRST, TIMES) else values
    first, last = start // block, (start + count - 1) // block
    if per_row == 0:
        first, last = 0, 0
    _factors(kind, address, per_row, apart, place if by_place else row, lane, first, last - first + 1, size, factors)
    for b in range(first, last + 1):
        begin, end = max(b * block, start) - start, min((b + 1) * block, start + count) - start
        if per_row == 0:
            begin, end = 0, count
        _run(operation, into + 4 * begin, end - begin, simd.splat_at(factors + 4 * (b - first)))


@numba.njit
def _store(kind, into, values, count, stream):
    """float32 values to memory, rounded to the output's dtype."""
    whole = count // 16 * 16
    if kind == 0:
        if stream and into & 63 == 0:
            for i in range(0, whole, 16):
                simd.stream_f32(into + 4 * i, simd.load_f32(values + 4 * i))
        else:
            for i in range(0, whole, 16):
                simd.store_f32(into + 4 * i, simd.load_f32(values + 4 * i))
        simd.store_first_f32(into + 4 * whole, simd.load_f32(values + 4 * whole), count - whole)
    elif kind == 1:
        for i in range(0, count, 16):
            simd.store_first_bf16(into + 2 * i, simd.load_f32(values + 4 * i), min(16, count - i))
    else:
        for i in range(0, count, 16):
            simd.store_first_f16(into + 2 * i, simd.load_f32(values + 4 * i), min(16, count - i))


@numba.njit
def _task(
    task, rows, per_task, first, ids, id_bytes, stack, width, kind, bits, layout, data, size, table, levels, count, positive, out,
    out_stride, out_kind, stream,
):  # fmt: skip
    values, sums, factors, stage = simd.scratch(4160), simd.scratch(4160), simd.scratch(4096), simd.scratch(4224)
    for place in range(task * per_task, min((task + 1) * per_task, rows)):
        row = first + place
        if ids != 0:
            row = read_index(ids, id_bytes, place)
        lane = row // stack * ((stack + 15) // 16 * 16) + row % stack  # matrices of a stack are padded to whole vectors
        for start in range(0, width, CHUNK):
            length = min(CHUNK, width - start)
            source = _source(layout, bits, data, size, row, lane, start, length, width, stage)
            _fill(kind, bits, source, layout == BYTES, length, table, values)
            for level in range(count):
                _level(levels + level * LEVEL * 8, row, lane, place, start, length, values, sums, factors)
            if positive:
                _run(ADD, values, length, simd.splat(np.float32(0.0)))
            _store(out_kind, out + place * out_stride + start * (4 if out_kind == 0 else 2), values, length, stream)


def decode_rows(
    rows, per_task, first, ids, id_bytes, limit, stack, width, kind, bits, layout, data, size, table, levels, count, positive, out,
    out_stride, out_kind, stream, team,
):  # fmt: skip
    """out[i] = values of row first + i, or of row ids[i] where ids is an address. Strides in bytes; one unit a matrix of rows.

    Returns whether every id is in [0, limit); where one is not, nothing is written."""
    if ids != 0:
        for place in range(rows):
            row = read_index(ids, id_bytes, place)
            if row < 0 or row >= limit:
                return False
    arguments = (
        rows, per_task, first, ids, id_bytes, stack, width, kind, bits, layout, data, size, table, levels, count, positive, out,
        out_stride, out_kind, stream,
    )  # fmt: skip
    parallel(_task, arguments, (rows + per_task - 1) // per_task, team)
    return True
