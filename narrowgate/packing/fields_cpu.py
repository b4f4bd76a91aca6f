"""Sixteen raw fields to sixteen float32 values: the decode that every CPU kernel shares, whatever the layout.

A field vector holds a code in the low bits of each lane; what stands above it is ignored. Elements of up to four bits
read a table of 16 (two-bit codes a table that repeats), 6-bit floats a table of 32 magnitudes and a sign, so one kernel
serves every scheme of a width and the table is data. E4M3 is integer arithmetic, E5M2 and float16 are the conversion
instruction. Exact, NaN and infinity codes included."""

from __future__ import annotations

from llvmlite import ir

from narrowgate.simd import cpu as simd
from narrowgate.simd.cpu import VF, VI, constant

TABLE4, TABLE2, TABLE6, SIGNED8, UNSIGNED8, E4M3, E5M2, BFLOAT16, FLOAT16, FLOAT32 = range(10)
BITS = {TABLE4: 4, TABLE2: 2, TABLE6: 6, SIGNED8: 8, UNSIGNED8: 8, E4M3: 8, E5M2: 8, BFLOAT16: 16, FLOAT16: 16, FLOAT32: 32}
NAMES = ("4-bit table", "2-bit table", "6-bit table", "int8", "uint8", "e4m3", "e5m2", "bfloat16", "float16", "float32")


def decode(b: ir.IRBuilder, kind: int, field: ir.Value, low: ir.Value, high: ir.Value) -> ir.Value:
    """Values of fields. low, high: the table's halves (F32); for UNSIGNED8 `low` is the zero point."""
    if kind in (TABLE4, TABLE2):
        return simd.permute.emit(b, low, field)
    if kind == TABLE6:
        magnitude = simd.permute2.emit(b, low, high, field)
        sign = b.and_(b.shl(field, constant(26)), constant(-(2**31)))
        return b.bitcast(b.or_(b.bitcast(magnitude, VI), sign), VF)
    if kind == SIGNED8:
        return b.sitofp(b.ashr(b.shl(field, constant(24)), constant(24)), VF)
    if kind == UNSIGNED8:
        return b.fsub(b.uitofp(b.and_(field, constant(255)), VF), low)
    if kind == E4M3:
        return simd.e4m3.emit(b, field)
    if kind == E5M2:
        return _half(b, b.shl(field, constant(8)))
    if kind == BFLOAT16:
        return b.bitcast(b.shl(field, constant(16)), VF)
    return _half(b, field) if kind == FLOAT16 else b.bitcast(field, VF)


def _half(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    return simd.half_to_float(b, b.trunc(bits, simd.VS))


def unit(kind: int) -> tuple[int, int]:
    """(values, 32-bit words) of the smallest run that fills whole words."""
    return (16, 3) if kind == TABLE6 else (32 // BITS[kind], 1)


def field(b: ir.IRBuilder, kind: int, words: list[ir.Value], j: int) -> ir.Value:
    """Field j of a unit whose words stand in `words`, one vector a word."""
    bits = BITS[kind]
    first, shift = j * bits // 32, j * bits % 32
    value = words[first] if shift == 0 else b.lshr(words[first], constant(shift))
    if shift + bits > 32:
        value = b.or_(value, b.shl(words[first + 1], constant(32 - shift)))
    return value


def row_fields(b: ir.IRBuilder, kind: int, address: ir.Value) -> ir.Value:
    """Sixteen consecutive values of one row, packed low bits first from a byte address on: a field vector."""
    bits = BITS[kind]
    if bits == 32:
        return simd.read(b, address, VI)
    count = bits // 2  # words that sixteen values fill
    words = simd.read(b, address, ir.VectorType(ir.IntType(32), count))
    none = ir.Constant(words.type, ir.Undefined)
    starts = [lane * bits for lane in range(simd.LANES)]
    low = b.shuffle_vector(words, none, constant([s // 32 for s in starts]))
    value = b.lshr(low, constant([s % 32 for s in starts]))
    if bits == 6:
        above = b.shuffle_vector(words, none, constant([min(s // 32 + 1, count - 1) for s in starts]))
        straddles = [s % 32 + bits > 32 for s in starts]
        lifted = b.shl(above, constant([32 - s % 32 if over else 0 for s, over in zip(starts, straddles, strict=True)]))
        value = b.or_(value, b.and_(lifted, constant([-1 if over else 0 for over in straddles])))
    return value
