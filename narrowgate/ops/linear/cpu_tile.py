"""The inner step of the exact product as one intrinsic: a unit of packed words times the activations, in registers.

A tile is `rows` vectors of sixteen output rows by `tokens` activations; its sums are a tuple of rows * tokens vectors. Each
field is decoded once and meets every token. Unrolled when the kernel is built, so that no shift, address or index is left."""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.extending import intrinsic

from narrowgate.packing import fields_cpu as fields
from narrowgate.simd import cpu as simd
from narrowgate.simd.cpu import F32, VF, VI
from narrowgate.simd.cpu_features import FEATURES

_LONG = ir.IntType(64)


def _at(b: ir.IRBuilder, address: ir.Value, offset: int) -> ir.Value:
    return b.add(address, ir.Constant(_LONG, offset)) if offset else address


def _literals(*args: Any) -> bool:
    return all(isinstance(a, types.IntegerLiteral) for a in args)


@intrinsic(prefer_literal=True)
def zeros(typingctx, rows, tokens):
    """Sums of a tile, all zero."""
    if not _literals(rows, tokens):
        return None
    kind = types.UniTuple(F32, rows.literal_value * tokens.literal_value)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return context.make_tuple(builder, kind, [simd.constant(0.0, VF)] * kind.count)

    return kind(rows, tokens), codegen


@intrinsic(prefer_literal=True)
def accumulate(typingctx, kind, rows, tokens, sums, words, stride, last, x, low, high):
    """sums[r, t] = fma(w, x, sums[r, t]) for every value of one unit, in order of k.

    words: address of the unit in the first vector of rows; stride: bytes from one vector of rows to the next, of
    which there are last + 1 (beyond, the last is read again); x: address of float32 [values, tokens]; low, high: the decode table."""
    if not _literals(kind, rows, tokens):
        return None
    sig = sums(kind, rows, tokens, sums, types.int64, types.int64, types.int64, types.int64, F32, F32)
    kind_, rows_, tokens_ = (a.literal_value for a in (kind, rows, tokens))

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        parts = _unit(builder, kind_, rows_, tokens_, cgutils.unpack_tuple(builder, args[3], sums.count), *args[4:])
        return context.make_tuple(builder, sums, parts)

    return sig, codegen


def _unit(
    b: ir.IRBuilder, kind: int, rows: int, tokens: int, sums: list[ir.Value], words: ir.Value, stride: ir.Value,
    last: ir.Value, x: ir.Value, low: ir.Value, high: ir.Value,
) -> list[ir.Value]:  # fmt: skip
    count = fields.unit(kind)[1]
    read = []
    for r in range(rows):
        row = ir.Constant(_LONG, r)
        base = b.add(words, b.mul(stride, b.select(b.icmp_signed("<", row, last), row, last))) if r else words
        for i in range(count):
            simd.prefetch.emit(b, _at(b, base, FEATURES.ahead + 64 * i))
        read.append([simd.read(b, _at(b, base, 64 * i), VI, 4) for i in range(count)])
    decoded = zip(*(fields.unit_values(b, kind, word, low, high) for word in read), strict=True)
    for j, weights in enumerate(decoded):
        for t in range(tokens):
            factor = simd.splat_at.emit(b, _at(b, x, 4 * (j * tokens + t)))
            for r in range(rows):
                sums[r * tokens + t] = simd.fma.emit(b, weights[r], factor, sums[r * tokens + t])
    return sums


@intrinsic(prefer_literal=True)
def add_scaled(typingctx, rows, tokens, total, sums, scales, stride):
    """total[r, t] = fma(sums[r, t], scale[r], total[r, t]); scales: address of float32 [16] of the first vector of rows."""
    if not _literals(rows, tokens):
        return None
    sig = total(rows, tokens, total, sums, types.int64, types.int64)
    rows_, tokens_ = rows.literal_value, tokens.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        into = cgutils.unpack_tuple(builder, args[2], total.count)
        parts = cgutils.unpack_tuple(builder, args[3], total.count)
        for r in range(rows_):
            address = builder.add(args[4], builder.mul(args[5], ir.Constant(_LONG, r)))
            scale = simd.read(builder, address, VF)
            for i in range(r * tokens_, (r + 1) * tokens_):
                into[i] = simd.fma.emit(builder, parts[i], scale, into[i])
        return context.make_tuple(builder, total, into)

    return sig, codegen


@intrinsic
def spill(typingctx, sums, address):
    """Write a tile's sums to memory, one vector after the other."""
    sig = types.void(sums, types.int64)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        for i, value in enumerate(cgutils.unpack_tuple(builder, args[0], sums.count)):
            builder.store(value, simd.pointer(builder, _at(builder, args[1], 64 * i), VF), align=4)
        return context.get_dummy_value()

    return sig, codegen


@intrinsic(prefer_literal=True)
def unit_values(typingctx, kind):
    """How many values a unit holds."""
    return _constant(kind, 0)


@intrinsic(prefer_literal=True)
def unit_bytes(typingctx, kind):
    """How many bytes a unit of sixteen rows takes."""
    return _constant(kind, 1)


def _constant(kind: Any, which: int) -> Any:
    if not _literals(kind):
        return None
    number = fields.unit(kind.literal_value)[which] * (64 if which else 1)
    return types.int64(kind), lambda context, builder, signature, args: ir.Constant(_LONG, number)
