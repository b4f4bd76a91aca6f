"""Encoders as vector operations: float32 lanes to codes, the same integer arithmetic as formats/minifloat.py, line by line."""

# mypy: allow-untyped-defs
from __future__ import annotations

from llvmlite import ir
from numba import types

from narrowgate.simd import cpu as simd
from narrowgate.simd.cpu import F32, I32, VF, VI, constant, vector_op

INT = types.int64


def _word(b: ir.IRBuilder, number: ir.Value) -> ir.Value:
    """An int64 argument in all lanes, as 32 bits."""
    return simd.spread(b, b.trunc(number, ir.IntType(32)))


def _larger(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.icmp_signed(">", x, y), x, y)


def _smaller(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.icmp_signed("<", x, y), x, y)


def _round(b: ir.IRBuilder, magnitude: ir.Value, mantissa: ir.Value, bias: ir.Value, up: bool) -> ir.Value:
    """`round_magnitude`: mantissa and bias are vectors."""
    one, zero = constant(1), constant(0)
    lowest = b.sub(constant(128), bias)
    field = b.lshr(magnitude, constant(23))
    significand = b.and_(magnitude, constant(0x7FFFFF))
    significand = b.select(b.icmp_signed(">", field, zero), b.or_(significand, constant(0x800000)), significand)
    field = _larger(b, field, one)
    shift = b.add(_larger(b, b.sub(lowest, field), zero), b.sub(constant(23), mantissa))
    shift = _smaller(b, shift, constant(25))
    below = b.sub(b.shl(one, shift), one)
    step = below if up else b.add(b.lshr(below, one), b.and_(b.lshr(significand, shift), one))
    whole = b.shl(_larger(b, b.sub(field, lowest), zero), mantissa)
    return b.add(whole, b.lshr(b.add(significand, step), shift))


def _signed(b: ir.IRBuilder, bits: ir.Value, code: ir.Value, width: ir.Value) -> ir.Value:
    sign = b.lshr(b.and_(bits, constant(-(2**31))), b.sub(constant(32), width))
    return b.or_(code, sign)


@vector_op(I32, F32, INT, INT, INT, INT)
def small_float(b, x, mantissa, bias, top, width):
    """The nearest float of `mantissa` bits and `bias`, ties to even, at most code `top`; sign at bit width - 1. No NaN."""
    bits = b.bitcast(x, VI)
    code = _round(b, b.and_(bits, constant(0x7FFFFFFF)), _word(b, mantissa), _word(b, bias), False)
    return _signed(b, bits, _smaller(b, code, _word(b, top)), _word(b, width))


@vector_op(I32, F32)
def bfloat16_up(b, x):
    """The bfloat16 of the next magnitude that is not smaller, at most the largest finite one, sign kept."""
    bits = b.bitcast(x, VI)
    code = _round(b, b.and_(bits, constant(0x7FFFFFFF)), constant(7), constant(127), True)
    return _signed(b, bits, _smaller(b, code, constant(0x7F7F)), constant(16))


@vector_op(I32, F32)
def float16_bits(b, x):
    """float16 to nearest even; what is too large is an infinity."""
    half = b.fptrunc(x, ir.VectorType(ir.HalfType(), simd.LANES))
    return b.zext(b.bitcast(half, simd.VS), VI)


@vector_op(I32, F32)
def ceil_byte(b, ratio):
    """The E8M0 byte of the next power of two that is not smaller, 0 to 254; 0 for what is not above 0 (SPEC B20)."""
    bits = b.bitcast(ratio, VI)
    inexact = b.icmp_signed("!=", b.and_(bits, constant(0x7FFFFF)), constant(0))
    byte = b.add(b.lshr(bits, constant(23)), b.zext(inexact, VI))
    byte = _smaller(b, byte, constant(254))
    return b.select(b.fcmp_ordered(">", ratio, constant(0.0, VF)), byte, constant(0))


@vector_op(I32, F32, INT, INT)
def floor_byte(b, amax, half, emax):
    """The E8M0 byte of amax's exponent less emax; `half` (0, or half a place) is added to its bits first."""
    byte = b.sub(b.lshr(b.add(b.bitcast(amax, VI), _word(b, half)), constant(23)), _word(b, emax))
    byte = _larger(b, _smaller(b, byte, constant(254)), constant(0))
    return b.select(b.fcmp_ordered(">", amax, constant(0.0, VF)), byte, constant(0))


@vector_op(F32, I32)
def power_down(b, byte):
    """2^(127 - byte) exactly, for bytes 0 to 254."""
    bits = b.shl(b.sub(constant(254), byte), constant(23))
    return b.bitcast(b.select(b.icmp_signed("==", byte, constant(254)), constant(0x00400000), bits), VF)


@vector_op(I32, F32, INT)
def count_above(b, x, thresholds):
    """How many of the fifteen float32 at an address are below x: the index of the nearest entry, ties to the lower."""
    total = constant(0)
    for i in range(15):
        limit = simd.splat_at.emit(b, b.add(thresholds, ir.Constant(ir.IntType(64), 4 * i)))
        total = b.add(total, b.zext(b.fcmp_ordered(">", x, limit), VI))
    return total


@vector_op(I32, I32, I32)
def larger_i32(b, x, y):
    return _larger(b, x, y)


@vector_op(types.int32, I32)
def largest_i32(b, x):
    return simd._halve(b, x, lambda p, q: b.select(b.icmp_signed(">", p, q), p, q))


@vector_op(F32, F32, F32, F32)
def where_zero(b, x, yes, no):
    """`yes` where x == 0, else `no`."""
    return b.select(b.fcmp_ordered("==", x, constant(0.0, VF)), yes, no)


@vector_op(F32, F32)
def floor(b, x):
    return simd.call(b, "llvm.floor.v16f32", VF, x)


@vector_op(F32, F32)
def truncate(b, x):
    return simd.call(b, "llvm.trunc.v16f32", VF, x)


@vector_op(F32, F32, F32)
def copy_sign(b, x, y):
    """The magnitude of x with the sign of y."""
    return simd.call(b, "llvm.copysign.v16f32", VF, x, y)
