"""Quantizing blocks on the CPU: the same steps as quantize/methods.py, sixteen scales or sixteen values at a time.

A row is worked on in spans of whole blocks that stay in the first-level cache: the largest magnitude of each block, then the scales of
all blocks of the span at once (lanes are blocks), then the codes, then their packing. One compiled kernel serves every
scheme; families differ in two switches, numbers and tables."""

# mypy: allow-untyped-defs
from __future__ import annotations

import numba
import numpy as np

from narrowgate.ops.quantize import cpu_encode as encode
from narrowgate.simd import cpu as simd
from narrowgate.simd.cpu import inline
from narrowgate.simd.cpu_threads import parallel
from narrowgate.simd.cpu_values import load_first, size_of

SPAN = 1024
FLOOR, RCEIL, MSE, NVFP4, INTEGER, SIGNED, TABLE, IQ4_NL, Q8_0, Q4_0 = range(10)
MINIFLOAT, WHOLE, NEAREST, AWAY, SHIFTED = range(5)  # how a value becomes a code


@numba.njit
def _load(kind, x, count, padded, values):
    """A piece of a row as float32, zeros up to `padded` values."""
    for i in range(0, padded, 16):
        left = count - i
        if left <= 0:
            simd.store_f32(values + 4 * i, simd.splat(np.float32(0.0)))
        elif kind == 0:
            simd.store_f32(values + 4 * i, load_first(0, x + 4 * i, left))
        elif kind == 1:
            simd.store_f32(values + 4 * i, load_first(1, x + 2 * i, left))
        else:
            simd.store_f32(values + 4 * i, load_first(2, x + 2 * i, left))


@inline
def _amax(values, count, so_far):
    top = simd.splat(so_far)
    for i in range(0, count, 16):
        top = simd.maximum(simd.absolute(simd.load_f32(values + 4 * i)), top)
    return simd.largest(top)


@inline
def _first_largest(values, count, amax):
    """The first value of that magnitude, with its sign."""
    for i in range(count):
        value = simd.read_f32(values + 4 * i)
        if abs(value) == amax:
            return value
    return np.float32(0.0)


@inline
def _inverse(scale):
    """f32(1 / d), 0 where d is 0 or 1 / d overflows."""
    one, none = simd.splat(np.float32(1.0)), simd.splat(np.float32(0.0))
    inverse = simd.div(one, encode.where_zero(scale, one, scale))
    top = simd.splat(np.float32(3.4028234663852886e38))
    return encode.where_zero(scale, none, simd.where_less(top, simd.absolute(inverse), none, inverse))


@numba.njit
def _scales(family, amax, bottom, emax, half, outer, nonzero, codes, factors):
    """Sixteen blocks: scale codes (int32) and what values meet, from their largest magnitudes (or signed largest values)."""
    a, none = simd.load_f32(amax), simd.splat(np.float32(0.0))
    if family in (FLOOR, RCEIL, MSE):
        byte = encode.floor_byte(a, half, emax) if family == FLOOR else encode.ceil_byte(simd.div(a, simd.splat(bottom)))
        code, factor = byte, encode.power_down(byte)
    elif family == NVFP4:
        code = encode.small_float(simd.div(a, simd.splat(bottom * outer)), 3, 7, 126, 8)
        if nonzero:
            code = simd.as_int(
                simd.where_less(
                    none, a, simd.as_float(encode.larger_i32(code, simd.splat_i32(np.int32(1)))), simd.as_float(code)
                )
            )
        factor = simd.mul(simd.e4m3(code), simd.splat(outer))
    elif family == TABLE:
        code, factor = simd.as_int(a), a
    else:
        scale = simd.div(a, simd.splat(bottom))
        if family in (Q8_0, Q4_0):
            code, factor = encode.float16_bits(scale), _inverse(scale)
        elif family == IQ4_NL:
            code = encode.float16_bits(encode.where_zero(scale, none, scale))
            factor = simd.half_bits(code)
        elif half:  # a float32 scale is stored as it is
            code, factor = simd.as_int(scale), scale
        else:
            code = encode.bfloat16_up(encode.where_zero(scale, none, scale))
            factor = simd.as_float(simd.shift_left(code, simd.splat_i32(np.int32(16))))
    simd.store_i32(codes, code)
    simd.store_f32(factors, factor)


@inline
def _quotient(x, scale):
    """f32(x / s), 0 where s is 0."""
    none = simd.splat(np.float32(0.0))
    return encode.where_zero(scale, none, simd.div(x, encode.where_zero(scale, simd.splat(np.float32(1.0)), scale)))


@inline
def _whole(x, low, high):
    return simd.to_int(simd.minimum(simd.maximum(x, simd.splat(low)), simd.splat(high)))


@numba.njit
def _minifloats(values, count, factor, inverse, mantissa, bias, top, width, octets):
    for i in range(0, count, 16):
        x = simd.load_f32(values + 4 * i)
        x = simd.mul(x, factor) if inverse else _quotient(x, factor)
        simd.store_i8(octets + i, encode.small_float(x, mantissa, bias, top, width))


@numba.njit
def _codes(how, values, count, factor, low, high, thresholds, octets):
    none, half = simd.splat(np.float32(0.0)), simd.splat(np.float32(8.5))
    for i in range(0, count, 16):
        x = simd.load_f32(values + 4 * i)
        if how == WHOLE:
            code = _whole(simd.round_even(_quotient(x, factor)), low, high)
        elif how == NEAREST:
            code = encode.count_above(_quotient(x, factor), thresholds)
            code = simd.as_int(encode.where_zero(factor, none, simd.as_float(code)))
        elif how == AWAY:
            product = simd.mul(x, factor)
            magnitude = simd.absolute(product)
            whole = encode.floor(magnitude)
            rest = simd.sub(magnitude, whole)
            code = simd.to_int(encode.copy_sign(simd.add(whole, encode.floor(simd.add(rest, rest))), product))
        else:
            code = _whole(encode.truncate(simd.add(simd.mul(x, factor), half)), low, high)
        simd.store_i8(octets + i, code)


@numba.njit
def _error(values, count, octets, table, power):
    """The squared error of a block under a scale, in float64, one value after the other."""
    total = 0.0
    for i in range(count):
        decoded = simd.read_f32(table + 4 * simd.read_u8(octets + i)) * power
        difference = np.float64(simd.read_f32(values + 4 * i)) - np.float64(decoded)
        total += difference * difference
    return total


@numba.njit
def _finer(values, count, codes, mantissa, bias, top, width, table, octets, other):
    """Least error of a block: its codes under the byte at `codes` or the one below, and that byte (SPEC B35)."""
    byte = simd.read_i32(codes)
    coarse = simd.splat_i32(np.int32(byte))
    _minifloats(values, count, encode.power_down(coarse), True, mantissa, bias, top, width, octets)
    if byte <= 1:
        return
    fine = simd.splat_i32(np.int32(byte - 1))
    _minifloats(values, count, encode.power_down(fine), True, mantissa, bias, top, width, other)
    powers = simd.scratch(128)
    simd.store_f32(powers, encode.power_down(simd.splat_i32(np.int32(254 - byte))))
    simd.store_f32(powers + 64, encode.power_down(simd.splat_i32(np.int32(255 - byte))))
    if _error(values, count, other, table, simd.read_f32(powers + 64)) < _error(
        values, count, octets, table, simd.read_f32(powers)
    ):
        simd.write_i32(codes, byte - 1)
        for i in range(0, count, 16):
            simd.store_i32(octets + i, simd.load_i32(other + i))


@inline
def _packed(x, bits):
    """Eight codes, one a byte, side by side in the low 8 * bits bits."""
    if bits == 4:
        x = (x | simd.shift_down(x, 4)) & 0x00FF00FF00FF00FF
        x = (x | simd.shift_down(x, 8)) & 0x0000FFFF0000FFFF
        return x | simd.shift_down(x, 16)
    if bits == 2:
        x = (x | simd.shift_down(x, 6)) & 0x000F000F000F000F
        x = (x | simd.shift_down(x, 12)) & 0x000000FF000000FF
        return x | simd.shift_down(x, 24)
    x = (x & 0x003F003F003F003F) | (simd.shift_down(x, 2) & 0x0FC00FC00FC00FC0)
    x = (x & 0x00000FFF00000FFF) | (simd.shift_down(x, 4) & 0x00FFF00000FFF000)
    return (x & 0x0000000000FFFFFF) | (simd.shift_down(x, 8) & 0x0000FFFFFF000000)


@numba.njit
def _pack(octets, count, bits, out):
    """`count` codes to a run of bits; `octets` is zero up to the next eight, and its high bits may be a sign's."""
    if bits == 8:
        for i in range(0, count // 16 * 16, 4):
            simd.write_i32(out + i, simd.read_i32(octets + i))
        for i in range(count // 16 * 16, count):
            simd.write_u8(out + i, simd.read_u8(octets + i))
        return
    mask = 0x0101010101010101 * ((1 << bits) - 1)
    for i in range(0, count, 8):
        word = _packed(simd.read_u64(octets + i) & mask, bits)
        left = min(8, count - i) * bits
        at = out + i * bits // 8
        if left == 32:
            simd.write_i32(at, word)
        else:
            for byte in range((left + 7) // 8):
                simd.write_u8(at + byte, simd.shift_down(word, 8 * byte))


@numba.njit
def _task(
    task, rows, per_task, x, stride, kind, width, block, family, how, bottom, emax, half, outer, outer_step, nonzero, mantissa, bias,
    top, element_bits, low, high, table, out, out_stride, out_bits, scales, scale_bytes, flags,
):  # fmt: skip
    values, octets, other = simd.scratch(4160), simd.scratch(1088), simd.scratch(1088)
    amax, codes, factors = simd.scratch(4160), simd.scratch(4160), simd.scratch(4160)
    blocks = (width + block - 1) // block
    span = max(block, SPAN // block * block)
    signed = family in (SIGNED, IQ4_NL, Q4_0)
    for row in range(task * per_task, min((task + 1) * per_task, rows)):
        source, factor2 = x + row * stride, simd.read_f32(outer + 4 * row * outer_step)
        for start in range(0, width, span):
            stop = min(start + span, width)
            count = (stop - start + block - 1) // block
            for piece in range(start, stop, SPAN):
                length = min(SPAN, stop - piece)
                padded = min(SPAN, (length + block - 1) // block * block + 15) // 16 * 16
                _load(kind, source + piece * size_of(kind), length, padded, values)
                for b in range(count):
                    size = min(block, padded)
                    spot, so_far = values + 4 * b * block, simd.read_f32(amax + 4 * b) if piece > start else np.float32(0.0)
                    largest = _amax(spot, size, so_far)
                    simd.write_f32(amax + 4 * b, _first_largest(spot, size, largest) if signed else largest)
            for b in range(0, count, 16):
                _scales(family, amax + 4 * b, bottom, emax, half, factor2, nonzero, codes + 4 * b, factors + 4 * b)
            for piece in range(start, stop, SPAN):
                length = min(SPAN, stop - piece)
                if block > SPAN:
                    _load(kind, source + piece * size_of(kind), length, (length + 15) // 16 * 16, values)
                for b in range(count):
                    spot, size = values + 4 * b * block, min(block, (length + 15) // 16 * 16)
                    into, factor = octets + b * block, simd.splat_at(factors + 4 * b)
                    if family == MSE:
                        _finer(spot, size, codes + 4 * b, mantissa, bias, top, element_bits, table, into, other)
                    elif how == MINIFLOAT:
                        _minifloats(spot, size, factor, family < NVFP4, mantissa, bias, top, element_bits, into)
                    else:
                        _codes(how, spot, size, factor, low, high, table, into)
                _pack(octets, length, out_bits, out + row * out_stride + piece * out_bits // 8)
            into = scales + (row * blocks + start // block) * scale_bytes
            for b in range(count):
                code = simd.read_i32(codes + 4 * b)
                if (family >= IQ4_NL) and (code & 0x7FFF) == 0x7C00:
                    simd.write_i32(flags, 1)
                for byte in range(scale_bytes):
                    simd.write_u8(into + b * scale_bytes + byte, code >> (8 * byte))


def quantize_blocks(
    rows, per_task, x, stride, kind, width, block, family, how, bottom, emax, half, outer, outer_step, nonzero, mantissa, bias,
    top, element_bits, low, high, table, out, out_stride, out_bits, scales, scale_bytes, flags, team,
):  # fmt: skip
    """Rows of values to a run of codes and scale codes a row. Strides in bytes; `bottom`, `low`, `high` are float32."""
    arguments = (
        rows, per_task, x, stride, kind, width, block, family, how, bottom, emax, half, outer, outer_step, nonzero, mantissa,
        bias, top, element_bits, low, high, table, out, out_stride, out_bits, scales, scale_bytes, flags,
    )  # fmt: skip
    parallel(_task, arguments, (rows + per_task - 1) // per_task, team)


@numba.njit
def _row_amax(row, x, stride, kind, width, into):
    mask = simd.splat_i32(np.int32(0x7FFFFFFF))
    top = simd.splat_i32(np.int32(0))
    base = x + row * stride
    if kind == 0:
        for i in range(0, width, 16):
            top = encode.larger_i32(top, simd.bit_and(simd.as_int(load_first(0, base + 4 * i, width - i)), mask))
    elif kind == 1:
        for i in range(0, width, 16):
            top = encode.larger_i32(top, simd.bit_and(simd.as_int(load_first(1, base + 2 * i, width - i)), mask))
    else:
        for i in range(0, width, 16):
            top = encode.larger_i32(top, simd.bit_and(simd.as_int(load_first(2, base + 2 * i, width - i)), mask))
    simd.write_i32(into + 4 * row, encode.largest_i32(top))


def row_amax(x, stride, kind, width, rows, into, team):
    """The largest magnitude of each row as float32 bits: as integers they are in order, infinities and NaN on top."""
    parallel(_row_amax, (x, stride, kind, width, into), rows, team)
