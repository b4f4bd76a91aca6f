"""Sixteen raw fields to sixteen float32 values: the decode that every CPU kernel shares, whatever the layout.

A field vector holds a code in the low bits of each lane; what stands above it is ignored. Elements of up to four bits
read a table of 16 (two-bit codes a table that repeats), 6-bit floats a table of 32 magnitudes and a sign, so one kernel
serves every scheme of a width and the table is data. Where every entry is a bfloat16 (`PAIR4`, 6-bit floats), AVX-512 looks up
16-bit words, so that one look-up serves two fields, 16 bits apart, and AVX2 bytes, two for four fields of four bits. E4M3 is integer
arithmetic, E5M2 and float16 are the conversion instruction. Exact, NaN and infinity codes included."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from llvmlite import ir

from narrowgate.simd import cpu as simd
from narrowgate.simd.cpu import VF, VI, constant
from narrowgate.simd.cpu_features import FEATURES

TABLE4, TABLE2, TABLE6, SIGNED8, UNSIGNED8, E4M3, E5M2, BFLOAT16, FLOAT16, FLOAT32, PAIR4 = range(11)
BITS = {
    TABLE4: 4, TABLE2: 2, TABLE6: 6, SIGNED8: 8, UNSIGNED8: 8, E4M3: 8, E5M2: 8, BFLOAT16: 16, FLOAT16: 16, FLOAT32: 32, PAIR4: 4,
}  # fmt: skip
NAMES = (
    "4-bit table", "2-bit table", "6-bit table", "int8", "uint8", "e4m3", "e5m2", "bfloat16", "float16", "float32",
    "4-bit table of bfloat16",
)  # fmt: skip


def decode(b: ir.IRBuilder, kind: int, field: ir.Value, low: ir.Value, high: ir.Value) -> ir.Value:
    """Values of fields. low, high: the table's halves (F32); for UNSIGNED8 `low` is the zero point."""
    if kind in (TABLE4, TABLE2, PAIR4):
        look_up = simd.permute_repeated if kind == TABLE2 else simd.permute
        return look_up.emit(b, low, field)
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


def unit_values(b: ir.IRBuilder, kind: int, words: list[ir.Value], low: ir.Value, high: ir.Value) -> Iterator[ir.Value]:
    """The values of a unit in order of k, each decoded when it is asked for; as `decode` of `field`, faster where it can."""
    if FEATURES.avx512 and kind in (PAIR4, TABLE6):
        pairs = _pairs4(b, words, low) if kind == PAIR4 else _pairs6(b, words, low, high)
        yield from (b.bitcast(b.shl(pair, constant(16)), VF) for pair in pairs)
        yield from (b.bitcast(b.and_(pair, constant(-65536)), VF) for pair in pairs)
    elif kind in (PAIR4, TABLE6):
        pairs = _octets4(b, words[0], low) if kind == PAIR4 else _octets6(b, words, low, high)
        yield from (b.bitcast(b.shl(pair, constant(16)), VF) for pair in pairs)
        yield from (b.bitcast(b.and_(pair, constant(-65536)), VF) for pair in pairs)
    elif kind == SIGNED8:
        yield from _signed8(b, words[0])
    elif FEATURES.avx512 and kind == E4M3:
        yield from _e4m3(b, words[0])
    else:
        yield from (decode(b, kind, field(b, kind, words, j), low, high) for j in range(unit(kind)[0]))


_VH = ir.VectorType(ir.IntType(16), 32)


def _upper_halves(b: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    """The bfloat16 of two tables of sixteen, as 32 words. Nothing of it is left in a loop."""
    parts = [b.trunc(b.lshr(b.bitcast(t, VI), constant(16)), simd.VS) for t in (low, high)]
    return b.shuffle_vector(*parts, constant(list(range(32)), ir.VectorType(ir.IntType(32), 32)))


def _pairs4(b: ir.IRBuilder, words: list[ir.Value], low: ir.Value) -> list[ir.Value]:
    """Pair s: the bfloat16 of fields s (low half of a lane) and s + 4 (high half)."""
    table, word = _upper_halves(b, low, low), b.bitcast(words[0], _VH)
    shifted = [b.lshr(word, constant(4 * s, _VH)) if s else word for s in range(4)]
    return [b.bitcast(simd.call(b, "llvm.x86.avx512.permvar.hi.512", _VH, table, index), VI) for index in shifted]


def _octets(b: ir.IRBuilder, table: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The upper and the lower byte of sixteen bfloat16 as tables of bytes. Nothing of it is left in a loop."""
    shorts, octets, every = (
        b.lshr(b.bitcast(table, VI), constant(16)),
        ir.VectorType(ir.IntType(8), 16),
        [i % 16 for i in range(64)],
    )
    upper, lower = (
        b.bitcast(
            b.shuffle_vector(t, ir.Constant(octets, ir.Undefined), constant([*every], ir.VectorType(ir.IntType(32), 64))), VI
        )
        for t in (b.trunc(b.lshr(shorts, constant(8)), octets), b.trunc(shorts, octets))
    )
    return upper, lower


def _look_up(b: ir.IRBuilder, table: ir.Value, index: ir.Value) -> ir.Value:
    return b.bitcast(simd.permute_bytes.emit(b, table, b.bitcast(index, VI)), _VH)


def _octets4(b: ir.IRBuilder, word: ir.Value, low: ir.Value) -> list[ir.Value]:
    """As `_pairs4` with look-ups of bytes: the two bytes of four fields in one each, then woven together."""
    tables, eight, woven = _octets(b, low), constant(8, _VH), []
    for source in (word, b.lshr(word, constant(4))):
        upper, lower = (_look_up(b, table, b.and_(source, constant(0x0F0F0F0F))) for table in tables)
        even = b.or_(b.shl(upper, eight), b.and_(lower, constant(0xFF, _VH)))
        odd = b.or_(b.and_(upper, constant(-256, _VH)), b.lshr(lower, eight))
        woven.append((b.bitcast(even, VI), b.bitcast(odd, VI)))
    return [woven[j % 2][j // 2] for j in range(4)]


def _octets6(b: ir.IRBuilder, words: list[ir.Value], low: ir.Value, high: ir.Value) -> list[ir.Value]:
    """As `_pairs6` with look-ups of bytes, which give 0 for an index of 128 and more: so each half of the table is asked with an
    index that the other half's codes take above, and their answers are joined."""
    first, second = _octets(b, low), _octets(b, high)
    pairs = []
    for index in _fields6(b, words):
        code = b.and_(index, constant(31, _VH))
        below, above = b.add(code, constant(0x8070 - 65536, _VH)), b.add(code, constant(0x80F0 - 65536, _VH))
        upper, lower = (b.or_(_look_up(b, p, below), _look_up(b, q, above)) for p, q in zip(first, second, strict=True))
        sign = b.and_(b.shl(index, constant(10, _VH)), constant(-0x8000, _VH))
        pairs.append(b.bitcast(b.or_(b.or_(b.shl(upper, constant(8, _VH)), lower), sign), VI))
    return pairs


def _pairs6(b: ir.IRBuilder, words: list[ir.Value], low: ir.Value, high: ir.Value) -> list[ir.Value]:
    """Pair j: the bfloat16 of fields j and j + 8."""
    table = _upper_halves(b, low, high)
    negative = b.or_(table, constant(-0x8000, _VH))
    looked = (simd.call(b, "llvm.x86.avx512.vpermi2var.hi.512", _VH, table, i, negative) for i in _fields6(b, words))
    return [b.bitcast(pair, VI) for pair in looked]


def _fields6(b: ir.IRBuilder, words: list[ir.Value]) -> list[ir.Value]:
    """Fields j and j + 8 low in the halves of a lane. They lie 48 bits apart: so halves 0 and 3, 1 and 4, 2 and 5 of the unit are put
    side by side."""
    below, above = constant(0xFFFF), constant(-65536)
    halves = [
        b.or_(b.and_(words[0], below), b.and_(words[1], above)),
        b.or_(b.lshr(words[0], constant(16)), b.shl(words[2], constant(16))),
        b.or_(b.and_(words[1], below), b.and_(words[2], above)),
    ]
    source = [b.bitcast(h, _VH) for h in halves]
    fields = []
    for j in range(8):
        first, shift = 6 * j // 16, 6 * j % 16
        index = b.lshr(source[first], constant(shift, _VH)) if shift else source[first]
        if shift > 10:
            index = b.or_(index, b.shl(source[first + 1], constant(16 - shift, _VH)))
        fields.append(index)
    return fields


def _e4m3_magnitudes() -> list[int]:
    """The bfloat16 of the 128 codes without a sign; the last is NaN."""
    values = [(c & 7) * 2.0**-9 if c < 8 else (8 + (c & 7)) * 2.0 ** ((c >> 3) - 10) for c in range(127)]
    return [struct.unpack("<I", struct.pack("<f", v))[0] >> 16 for v in values] + [0x7FC0]


def _e4m3(b: ir.IRBuilder, word: ir.Value) -> Iterator[ir.Value]:
    """Four E4M3 codes: two look-ups of 64 bfloat16 serve two of them, bit 6 chooses, and the sign joins."""
    magnitudes = _e4m3_magnitudes()
    tables = [constant([m - 65536 if m >= 32768 else m for m in magnitudes[i : i + 32]], _VH) for i in range(0, 128, 32)]
    shorts, sign = b.bitcast(word, _VH), constant(-0x8000, _VH)
    pairs = []
    for code, lifted in ((shorts, b.shl(shorts, constant(8, _VH))), (b.lshr(shorts, constant(8, _VH)), shorts)):
        low, high = (simd.call(b, "llvm.x86.avx512.vpermi2var.hi.512", _VH, tables[i], code, tables[i + 1]) for i in (0, 2))
        upper = b.icmp_signed("!=", b.and_(code, constant(64, _VH)), constant(0, _VH))
        pairs.append(b.bitcast(b.or_(b.select(upper, high, low), b.and_(lifted, sign)), VI))
    for half in (lambda pair: b.shl(pair, constant(16)), lambda pair: b.and_(pair, constant(-65536))):
        yield from (b.bitcast(half(pair), VF) for pair in pairs)


def _signed8(b: ir.IRBuilder, word: ir.Value) -> Iterator[ir.Value]:
    """Four int8: as the mantissa of a float32 whose last place counts them, less what stands there for zero. Exact."""
    for j in range(4):
        place = 8 * (j % 2)
        bits = b.lshr(word, constant(16)) if j == 2 else word
        word = bits
        zero = 2.0 ** (23 - place) + 128
        flipped = b.xor(b.and_(bits, constant(0xFF << place)), constant((150 - place) << 23 | 0x80 << place))
        yield b.fsub(b.bitcast(flipped, VF), constant(zero, VF))


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
