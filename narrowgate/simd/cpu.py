"""Vectors of sixteen for Numba kernels: two types, and the operations on them as intrinsics.

A Numba type whose data model IS an LLVM vector: `F32` is sixteen float32 lanes, `I32` sixteen 32-bit words (which some
operations read as 64 bytes). Plain Numba loops do not become the instructions that decoding needs (CPU vectorisers emit
neither table permutes nor byte dot products); with these types a kernel says what it means and stays Python. Operations
are generic LLVM IR where such IR exists, and LLVM halves a vector where registers are narrower (AVX2); only the permutes
and the byte dot product name instructions, chosen from the CPU's features before anything is compiled.

Rules of the arithmetic: `mul` and `add` are never contracted; `fma` rounds once, always. Memory is addressed by integers
(bytes, from `Tensor.data_ptr()`): no array objects cross into a kernel, and nothing is bounds-checked, so the caller checks.

Every operation is written once as a function on an IR builder and is both an intrinsic (`add(x, y)` in a kernel) and, under
`add.emit(builder, x, y)`, a part of larger intrinsics. Left out: masks as a type, other widths, other processors."""

# mypy: allow-untyped-defs
from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.extending import intrinsic, models, register_model

from narrowgate.simd.cpu_features import FEATURES

LANES = 16
_FLOAT, _INT, _SHORT, _BYTE, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(8), ir.IntType(64)
VF, VI, VS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES), ir.VectorType(_SHORT, LANES)
VB = ir.VectorType(_BYTE, LANES)


class Vector(types.Type):
    """Sixteen lanes of one machine type."""

    def __init__(self, name: str) -> None:
        super().__init__(name)


F32, I32 = Vector("float32x16"), Vector("int32x16")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        super().__init__(dmm, fe_type, VF if fe_type.name.startswith("float") else VI)


def _signature(count: int) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind) for name in ["typingctx", *(f"a{i}" for i in range(count))]])


def vector_op(result: types.Type, *params: types.Type) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of `emit(builder, *values)`, and keep `emit` on it."""

    def make(emit: Callable[..., Any]) -> Any:
        def typer(typingctx: Any, *args: Any) -> Any:
            def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
                made = emit(builder, *values)
                return context.get_dummy_value() if result is types.none else made

            return result(*params), codegen

        typer.__signature__ = _signature(len(params))  # type: ignore[attr-defined]
        typer.__name__ = typer.__qualname__ = emit.__name__
        typer.__doc__ = emit.__doc__
        made = intrinsic(typer)
        made.emit = emit
        return made

    return make


def constant(value: float | list[float], vector: ir.VectorType = VI) -> ir.Constant:
    """A vector constant: one number in every lane, or sixteen."""
    values = value if isinstance(value, list) else [value] * vector.count
    return ir.Constant(vector, [ir.Constant(vector.element, v) for v in values])


def call(b: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """Call an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


def pointer(b: ir.IRBuilder, address: ir.Value, to: ir.Type) -> ir.Value:
    return b.inttoptr(address, to.as_pointer())


def read(b: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int = 1) -> ir.Value:
    """A value of any IR type from memory."""
    return b.load(pointer(b, address, kind), align=align)


def spread(b: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """One scalar in all lanes."""
    vector = ir.VectorType(scalar.type, LANES)
    first = b.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_INT, 0))
    return b.shuffle_vector(first, ir.Constant(vector, ir.Undefined), constant(0))


# ---- memory


@vector_op(F32, types.int64)
def load_f32(b, address):
    """Sixteen float32 from an address (bytes; need not be aligned)."""
    return read(b, address, VF)


@vector_op(I32, types.int64)
def load_i32(b, address):
    return read(b, address, VI)


@vector_op(I32, types.int64)
def load_u8(b, address):
    """Sixteen bytes, zero-extended."""
    return b.zext(read(b, address, VB), VI)


@vector_op(I32, types.int64)
def load_i8(b, address):
    """Sixteen bytes, sign-extended."""
    return b.sext(read(b, address, VB), VI)


@vector_op(F32, types.int64)
def load_bf16(b, address):
    """Sixteen bfloat16 as float32: a shift."""
    return b.bitcast(b.shl(b.zext(read(b, address, VS), VI), constant(16)), VF)


@vector_op(F32, types.int64)
def load_f16(b, address):
    """Sixteen float16 as float32."""
    return half_to_float(b, read(b, address, VS))


def half_to_float(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), VF)


@vector_op(F32, types.int64)
def splat_at(b, address):
    """The float32 at an address in all lanes; folds into the arithmetic as a broadcast operand."""
    return spread(b, read(b, address, _FLOAT))


@vector_op(F32, types.float32)
def splat(b, x):
    return spread(b, x)


@vector_op(I32, types.int32)
def splat_i32(b, x):
    return spread(b, x)


@vector_op(types.none, types.int64, F32)
def store_f32(b, address, x):
    b.store(x, pointer(b, address, VF), align=1)


@vector_op(types.none, types.int64, F32)
def stream_f32(b, address, x):
    """Past the caches, to an address that is a multiple of 64: for results larger than they are, which nobody reads soon."""
    stored = b.store(x, pointer(b, address, VF), align=64)
    stored.set_metadata("nontemporal", b.module.add_metadata([ir.Constant(_INT, 1)]))


@vector_op(types.none, types.int64, I32)
def store_i8(b, address, x):
    """The low byte of each lane, side by side."""
    b.store(b.trunc(x, VB), pointer(b, address, VB), align=1)


@vector_op(types.none, types.int64, I32)
def store_i32(b, address, x):
    b.store(x, pointer(b, address, VI), align=1)


def _first(b: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """The mask of lanes 0 .. count - 1."""
    return b.icmp_signed("<", constant(list(range(LANES))), spread(b, b.trunc(count, _INT)))


@vector_op(F32, types.int64, types.int64)
def load_first_f32(b, address, count):
    """The first `count` lanes, zeros in the others; nothing beyond them is read."""
    align, none = ir.Constant(_INT, 1), constant(0.0, VF)
    return call(b, "llvm.masked.load.v16f32.p0", VF, pointer(b, address, VF), align, _first(b, count), none)


def _first_shorts(b: ir.IRBuilder, address: ir.Value, count: ir.Value) -> ir.Value:
    align, none = ir.Constant(_INT, 1), constant(0, VS)
    return call(b, "llvm.masked.load.v16i16.p0", VS, pointer(b, address, VS), align, _first(b, count), none)


@vector_op(F32, types.int64, types.int64)
def load_first_bf16(b, address, count):
    """The first `count` bfloat16 as float32, zeros in the other lanes; nothing beyond them is read."""
    return b.bitcast(b.shl(b.zext(_first_shorts(b, address, count), VI), constant(16)), VF)


@vector_op(F32, types.int64, types.int64)
def load_first_f16(b, address, count):
    return half_to_float(b, _first_shorts(b, address, count))


@vector_op(I32, types.int64)
def splat_u8(b, address):
    """The byte at an address in all lanes."""
    return spread(b, b.zext(read(b, address, _BYTE), _INT))


@vector_op(I32, types.int64)
def splat_u16(b, address):
    """The 16-bit word at an address in all lanes, zero-extended."""
    return spread(b, b.zext(read(b, address, _SHORT), _INT))


@vector_op(F32, I32)
def half_bits(b, bits):
    """float16 bits in the low halves of the lanes, as float32."""
    return half_to_float(b, b.trunc(bits, VS))


@vector_op(types.none, types.int64, F32, types.int64)
def store_first_f32(b, address, x, count):
    """The first `count` lanes; nothing else is touched."""
    align = ir.Constant(_INT, 1)
    call(b, "llvm.masked.store.v16f32.p0", ir.VoidType(), x, pointer(b, address, VF), align, _first(b, count))


@vector_op(types.none, types.int64, F32)
def store_bf16(b, address, x):
    """Sixteen lanes rounded to bfloat16, nearest even."""
    b.store(b.trunc(_bf16_bits(b, x), VS), pointer(b, address, VS), align=1)


@vector_op(types.none, types.int64, F32)
def store_f16(b, address, x):
    """Sixteen lanes rounded to float16, nearest even."""
    half = b.bitcast(b.fptrunc(x, ir.VectorType(ir.HalfType(), LANES)), VS)
    b.store(half, pointer(b, address, VS), align=1)


@vector_op(types.none, types.int64, F32, types.int64)
def store_first_bf16(b, address, x, count):
    """The first `count` lanes rounded to bfloat16, nearest even."""
    value, align = b.trunc(_bf16_bits(b, x), VS), ir.Constant(_INT, 1)
    call(b, "llvm.masked.store.v16i16.p0", ir.VoidType(), value, pointer(b, address, VS), align, _first(b, count))


@vector_op(types.none, types.int64, F32, types.int64)
def store_first_f16(b, address, x, count):
    """The first `count` lanes rounded to float16, nearest even."""
    half = b.bitcast(b.fptrunc(x, ir.VectorType(ir.HalfType(), LANES)), VS)
    align = ir.Constant(_INT, 1)
    call(b, "llvm.masked.store.v16i16.p0", ir.VoidType(), half, pointer(b, address, VS), align, _first(b, count))


def _bf16_bits(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The upper halves of float32 bits rounded to nearest even, in the low 16 bits; NaN keeps its head and becomes quiet."""
    bits = b.bitcast(x, VI)
    odd = b.and_(b.lshr(bits, constant(16)), constant(1))
    rounded = b.lshr(b.add(bits, b.add(odd, constant(0x7FFF))), constant(16))
    quiet = b.or_(b.lshr(bits, constant(16)), constant(0x40))
    return b.select(b.fcmp_unordered("uno", x, x), quiet, rounded)


@vector_op(types.none, types.int64)
def prefetch(b, address):
    """Ask for the cache line at an address; any address is allowed."""
    hints = [ir.Constant(_INT, n) for n in (0, 3, 1)]
    call(b, "llvm.prefetch.p0", ir.VoidType(), pointer(b, address, _BYTE), *hints)


# ---- single numbers, for the edges of a kernel


@vector_op(types.int64, types.int64)
def read_u64(b, address):
    return read(b, address, _LONG)


@vector_op(types.int64, types.int64)
def read_u8(b, address):
    return b.zext(read(b, address, _BYTE), _LONG)


@vector_op(types.int64, types.int64)
def read_i8(b, address):
    return b.sext(read(b, address, _BYTE), _LONG)


@vector_op(types.int64, types.int64)
def read_i32(b, address):
    return b.sext(read(b, address, _INT), _LONG)


@vector_op(types.float32, types.int64)
def read_f32(b, address):
    return read(b, address, _FLOAT)


@vector_op(types.float32, types.int64)
def read_bf16(b, address):
    return b.bitcast(b.shl(b.zext(read(b, address, _SHORT), _INT), ir.Constant(_INT, 16)), _FLOAT)


@vector_op(types.float32, types.int64)
def read_f16(b, address):
    return b.fpext(b.bitcast(read(b, address, _SHORT), ir.HalfType()), _FLOAT)


@vector_op(types.none, types.int64, F32)
def write_bf16(b, address, x):
    """The first lane rounded to bfloat16."""
    b.store(b.extract_element(b.trunc(_bf16_bits(b, x), VS), ir.Constant(_INT, 0)), pointer(b, address, _SHORT), align=1)


@vector_op(types.none, types.int64, F32)
def write_f16(b, address, x):
    """The first lane rounded to float16."""
    half = b.bitcast(b.fptrunc(x, ir.VectorType(ir.HalfType(), LANES)), VS)
    b.store(b.extract_element(half, ir.Constant(_INT, 0)), pointer(b, address, _SHORT), align=1)


@vector_op(types.float32, F32)
def lane0(b, x):
    """The first lane."""
    return b.extract_element(x, ir.Constant(_INT, 0))


@vector_op(types.none, types.int64, types.int64)
def write_i32(b, address, value):
    """The low 32 bits."""
    b.store(b.trunc(value, _INT), pointer(b, address, _INT), align=1)


@vector_op(types.none, types.int64, types.int64)
def write_u8(b, address, value):
    """The low 8 bits."""
    b.store(b.trunc(value, _BYTE), pointer(b, address, _BYTE), align=1)


@vector_op(types.none, types.int64, types.float32)
def write_f32(b, address, value):
    b.store(value, pointer(b, address, _FLOAT), align=1)


@vector_op(types.int64, types.int64, types.int64)
def shift_down(b, value, count):
    """A 64-bit word shifted right, zeros coming in."""
    return b.lshr(value, count)


# ---- arithmetic


@vector_op(F32, F32, F32)
def add(b, x, y):
    return b.fadd(x, y)


@vector_op(F32, F32, F32)
def sub(b, x, y):
    return b.fsub(x, y)


@vector_op(F32, F32, F32)
def mul(b, x, y):
    return b.fmul(x, y)


@vector_op(F32, F32, F32)
def div(b, x, y):
    return b.fdiv(x, y)


@vector_op(F32, F32, F32, F32)
def fma(b, x, y, z):
    """x * y + z, rounded once."""
    return call(b, "llvm.fma.v16f32", VF, x, y, z)


@vector_op(F32, F32)
def sqrt(b, x):
    return call(b, "llvm.sqrt.v16f32", VF, x)


@vector_op(F32, F32)
def absolute(b, x):
    return call(b, "llvm.fabs.v16f32", VF, x)


@vector_op(F32, F32, F32)
def maximum(b, x, y):
    """The larger lane by lane; y where either is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@vector_op(F32, F32, F32)
def minimum(b, x, y):
    return b.select(b.fcmp_ordered("<", x, y), x, y)


@vector_op(F32, F32, F32, F32, F32)
def where_less(b, x, y, yes, no):
    """`yes` where x < y, else `no`."""
    return b.select(b.fcmp_ordered("<", x, y), yes, no)


@vector_op(F32, F32)
def round_even(b, x):
    """To the nearest integer, ties to even."""
    return call(b, "llvm.rint.v16f32", VF, x)


def _halve(b: ir.IRBuilder, x: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Lane i with lane i + n/2 until one is left: always the same order."""
    while isinstance(x.type, ir.VectorType) and x.type.count > 1:
        half = x.type.count // 2
        index = ir.VectorType(_INT, half)
        none = ir.Constant(x.type, ir.Undefined)
        low = b.shuffle_vector(x, none, constant(list(range(half)), index))
        high = b.shuffle_vector(x, none, constant(list(range(half, 2 * half)), index))
        x = combine(low, high)
    return b.extract_element(x, ir.Constant(_INT, 0))


@vector_op(types.float32, F32)
def total(b, x):
    """The sum of the lanes, pairwise: i with i + 8, then i + 4, i + 2, i + 1."""
    return _halve(b, x, b.fadd)


@vector_op(types.float32, F32)
def largest(b, x):
    return _halve(b, x, lambda p, q: b.select(b.fcmp_ordered(">", p, q), p, q))


@vector_op(types.int32, I32)
def total_i32(b, x):
    return _halve(b, x, b.add)


# ---- integers


@vector_op(I32, I32, I32)
def add_i32(b, x, y):
    return b.add(x, y)


@vector_op(I32, I32, I32)
def bit_and(b, x, y):
    return b.and_(x, y)


@vector_op(I32, I32, I32)
def bit_or(b, x, y):
    return b.or_(x, y)


@vector_op(I32, I32, I32)
def bit_xor(b, x, y):
    return b.xor(x, y)


@vector_op(I32, I32, I32)
def shift_left(b, x, n):
    return b.shl(x, n)


@vector_op(I32, I32, I32)
def shift_right(b, x, n):
    """Zeros come in."""
    return b.lshr(x, n)


@vector_op(F32, I32)
def to_float(b, x):
    """Signed integers as float32, nearest even."""
    return b.sitofp(x, VF)


@vector_op(I32, F32)
def to_int(b, x):
    """Towards zero; the value must fit."""
    return b.fptosi(x, VI)


@vector_op(F32, I32)
def as_float(b, x):
    """The same bits."""
    return b.bitcast(x, VF)


@vector_op(I32, F32)
def as_int(b, x):
    """The same bits."""
    return b.bitcast(x, VI)


@vector_op(I32, I32, types.int32, I32, I32)
def where_equal(b, x, number, yes, no):
    """`yes` where x == number, else `no`."""
    return b.select(b.icmp_signed("==", x, spread(b, number)), yes, no)


@vector_op(F32, I32)
def e4m3(b, code):
    """float8_e4m3fn codes (low 8 bits) as float32, NaN included, with no float32 subnormal on the way (those cost an assist).

    Normal codes are float32 bits with the exponent moved by 120; a subnormal m * 2^-9 is (2^-6 + m * 2^-9) - 2^-6."""
    magnitude = b.and_(code, constant(0x7F))
    small = b.icmp_signed("<", magnitude, constant(8))
    bits = b.add(b.shl(magnitude, constant(20)), b.select(small, constant(121 << 23), constant(120 << 23)))
    value = b.bitcast(bits, VF)
    value = b.select(small, b.fsub(value, constant(2.0**-6, VF)), value)
    nan = b.icmp_signed("==", magnitude, constant(0x7F))
    bits = b.select(nan, constant(0x7FC00000), b.bitcast(value, VI))
    sign = b.and_(b.shl(code, constant(24)), constant(-(2**31)))
    return b.bitcast(b.or_(bits, sign), VF)


# ---- tables and dot products: where instructions are named


def _halves(b: ir.IRBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    none, index = ir.Constant(x.type, ir.Undefined), ir.VectorType(_INT, 8)
    return tuple(b.shuffle_vector(x, none, constant(list(range(i, i + 8)), index)) for i in (0, 8))  # type: ignore[return-value]


def _join(b: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    return b.shuffle_vector(low, high, constant(list(range(16))))


_HALF_F = ir.VectorType(_FLOAT, 8)


def _permute8(b: ir.IRBuilder, table: ir.Value, index: ir.Value) -> ir.Value:
    return call(b, "llvm.x86.avx2.permps", _HALF_F, table, index)


def _choose(b: ir.IRBuilder, index: ir.Value, bit: int, low: ir.Value, high: ir.Value) -> ir.Value:
    """`high` in lanes whose index has `bit` set."""
    sign = b.shl(index, constant(31 - bit, index.type))
    return b.select(b.icmp_signed("<", sign, constant(0, index.type)), high, low)


@vector_op(F32, F32, I32)
def permute(b, table, index):
    """table[index & 15] lane by lane."""
    if FEATURES.avx512:
        return call(b, "llvm.x86.avx512.permvar.sf.512", VF, table, index)
    low, high = _halves(b, table)
    parts = [_choose(b, i, 3, _permute8(b, low, i), _permute8(b, high, i)) for i in _halves(b, index)]
    return _join(b, *parts)


@vector_op(F32, F32, I32)
def permute_repeated(b, table, index):
    """`permute` of a table whose halves are the same."""
    if FEATURES.avx512:
        return permute.emit(b, table, index)
    low, _ = _halves(b, table)
    return _join(b, *(_permute8(b, low, i) for i in _halves(b, index)))


@vector_op(F32, F32, F32, I32)
def permute2(b, low, high, index):
    """The 32-entry table low, high at index & 31."""
    if FEATURES.avx512:
        return call(b, "llvm.x86.avx512.vpermi2var.ps.512", VF, low, index, high)
    return _choose(b, index, 4, permute.emit(b, low, index), permute.emit(b, high, index))


_VB64 = ir.VectorType(_BYTE, 64)


@vector_op(I32, I32, I32)
def permute_bytes(b, table, index):
    """Bytes of each 128-bit quarter of `table` at the low four bits of each byte of `index`; 0 where that is 128 or more."""
    table, index = b.bitcast(table, _VB64), b.bitcast(index, _VB64)
    if FEATURES.avx512:
        return b.bitcast(call(b, "llvm.x86.avx512.pshuf.b.512", _VB64, table, index), VI)
    half = ir.VectorType(_BYTE, 32)
    parts = []
    for start in (0, 32):
        pick = constant(list(range(start, start + 32)), ir.VectorType(_INT, 32))
        part = [b.shuffle_vector(x, ir.Constant(_VB64, ir.Undefined), pick) for x in (table, index)]
        parts.append(call(b, "llvm.x86.avx2.pshuf.b", half, *part))
    return b.bitcast(b.shuffle_vector(*parts, constant(list(range(64)), ir.VectorType(_INT, 64))), VI)


@vector_op(I32, I32, I32, I32)
def dot_bytes(b, acc, unsigned, signed):
    """acc + the sum of four products of unsigned by signed bytes in each lane, exact in 32 bits."""
    if FEATURES.vnni:
        x, y = (b.bitcast(v, _VB64) for v in (unsigned, signed)) if FEATURES.dot_takes_bytes else (unsigned, signed)
        return call(b, "llvm.x86.avx512.vpdpbusd.512", VI, acc, x, y)
    wide = ir.VectorType(_SHORT, 32)
    eight, x, y = constant(8, wide), b.bitcast(unsigned, wide), b.bitcast(signed, wide)
    even = _pairs(b, b.and_(x, constant(255, wide)), b.ashr(b.shl(y, eight), eight))
    return b.add(acc, b.add(even, _pairs(b, b.lshr(x, eight), b.ashr(y, eight))))


def _pairs(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """x[2i] y[2i] + x[2i+1] y[2i+1] of 32 signed shorts, in 16 words."""
    parts = []
    for start in (0, 16):
        pick = constant(list(range(start, start + 16)), VI)
        half = [b.shuffle_vector(v, ir.Constant(v.type, ir.Undefined), pick) for v in (x, y)]
        parts.append(call(b, "llvm.x86.avx2.pmadd.wd", ir.VectorType(_INT, 8), *half))
    return _join(b, *parts)


# ---- interleaved rows: 16 channels of 3 or 4 values each, apart and together again


def _shuffle(b: ir.IRBuilder, x: ir.Value, y: ir.Value, index: list[int]) -> ir.Value:
    return b.shuffle_vector(x, y, constant([*index]))


def _every(step: int, first: int) -> Any:
    """Of `step` vectors read one after the other, the lanes first, first + step, ..."""

    def every(b, x, y, *more):
        if step == 4:
            low, high = (_shuffle(b, p, q, [first % 2 + 2 * i for i in range(16)]) for p, q in ((x, y), more))
            return _shuffle(b, low, high, [first // 2 + 2 * i for i in range(16)])
        wanted = [first + 3 * i for i in range(16)]
        low = _shuffle(b, x, y, [min(i, 31) for i in wanted])
        return _shuffle(b, low, more[0], [lane if i < 32 else i - 16 for lane, i in enumerate(wanted)])

    return vector_op(F32, *(F32,) * step)(every)


third_0, third_1, third_2 = (_every(3, j) for j in range(3))
fourth_0, fourth_1, fourth_2, fourth_3 = (_every(4, j) for j in range(4))


def _woven(part: int) -> Any:
    """Vector `part` of the three that hold x[0], y[0], z[0], x[1], ..."""

    def woven(b, x, y, z):
        places = [divmod(16 * part + lane, 3) for lane in range(16)]
        two = _shuffle(b, x, y, [i + 16 * (which == 1) for i, which in places])
        return _shuffle(b, two, z, [16 + i if which == 2 else lane for lane, (i, which) in enumerate(places)])

    return vector_op(F32, F32, F32, F32)(woven)


woven_0, woven_1, woven_2 = (_woven(part) for part in range(3))


# ---- scratch


@intrinsic
def scratch(typingctx, size):
    """The address of `size` bytes (a literal) on the stack of the running function, aligned to 64."""
    if not isinstance(size, types.IntegerLiteral):
        return None

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        with builder.goto_entry_block():
            space = builder.alloca(ir.ArrayType(_BYTE, size.literal_value))
            space.align = 64
        return builder.ptrtoint(space, _LONG)

    return types.int64(size), codegen


inline = numba.njit(forceinline=True, error_model="numpy")
"""The decorator of helper functions that kernels call: always inlined, never cached by themselves."""
