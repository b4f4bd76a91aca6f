"""Integer activations on the CPU (the contract is in integer.py): quantize rows, lay their bytes out for the dot product, multiply.

The instruction multiplies unsigned by signed bytes and adds four products to a lane. Weights go unsigned: a table look-up of
sixteen bytes (or a flipped sign bit for int8) adds a bias, and bias * sum of the run's activations is taken off before the
run begins. A word of packed codes is never put in order: field j of its bytes is one mask and shift, and the activations'
bytes are laid out to match, once. Everything up to the scales is exact, so the order is free there."""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.extending import intrinsic

from narrowgate.ops.linear import cpu_tile as tile
from narrowgate.ops.linear.cpu_exact import BLOCKS, decode_scales, finish
from narrowgate.packing import fields_cpu as fields
from narrowgate.simd import cpu as simd
from narrowgate.simd.cpu import F32, I32, VI, constant, inline
from narrowgate.simd.cpu_features import FEATURES
from narrowgate.simd.cpu_threads import parallel

_LONG, _INT = ir.IntType(64), ir.IntType(32)


@intrinsic(prefer_literal=True)
def begin(typingctx, rows, tokens, corrections):
    """Sums of a tile that start at minus the bias: int32 [tokens] at an address, the same for every row."""
    if not (isinstance(rows, types.IntegerLiteral) and isinstance(tokens, types.IntegerLiteral)):
        return None
    kind = types.UniTuple(I32, rows.literal_value * tokens.literal_value)

    def codegen(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        spot = [b.add(args[2], ir.Constant(_LONG, 4 * t)) for t in range(tokens.literal_value)]
        start = [simd.spread(b, simd.read(b, s, _INT)) for s in spot]
        return context.make_tuple(b, kind, start * rows.literal_value)

    return kind(rows, tokens, types.int64), codegen


@intrinsic(prefer_literal=True)
def dot_unit(typingctx, kind, rows, tokens, sums, words, stride, last, x, table):
    """sums[r, t] += the products of one unit's codes with the activations' bytes, x: int32 [values / 4, tokens]."""
    if not isinstance(kind, types.IntegerLiteral):
        return None
    sig = sums(kind, rows, tokens, sums, types.int64, types.int64, types.int64, types.int64, I32)
    kind_, rows_, tokens_ = (a.literal_value for a in (kind, rows, tokens))

    def codegen(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        parts = cgutils.unpack_tuple(b, args[3], sums.count)
        return context.make_tuple(b, sums, _dots(b, kind_, rows_, tokens_, parts, *args[4:]))

    return sig, codegen


def _dots(
    b: ir.IRBuilder, kind: int, rows: int, tokens: int, sums: list[ir.Value], words: ir.Value, stride: ir.Value,
    last: ir.Value, x: ir.Value, table: ir.Value,
) -> list[ir.Value]:  # fmt: skip
    bits = fields.BITS[kind]
    read = []
    for r in range(rows):
        row = ir.Constant(_LONG, r)
        base = b.add(words, b.mul(stride, b.select(b.icmp_signed("<", row, last), row, last))) if r else words
        simd.prefetch.emit(b, b.add(base, ir.Constant(_LONG, FEATURES.ahead)))
        read.append(simd.read(b, base, VI, 4))
    for j in range(8 // bits):
        octets = [_unsigned(b, kind, word, j * bits, table) for word in read]
        for t in range(tokens):
            spot = b.add(x, ir.Constant(_LONG, 4 * (j * tokens + t)))
            factor = simd.spread(b, simd.read(b, spot, _INT))
            for r in range(rows):
                sums[r * tokens + t] = simd.dot_bytes.emit(b, sums[r * tokens + t], octets[r], factor)
    return sums


def _unsigned(b: ir.IRBuilder, kind: int, word: ir.Value, shift: int, table: ir.Value) -> ir.Value:
    """Four biased codes of each lane, one a byte."""
    if kind == fields.SIGNED8:
        return b.xor(word, constant(-0x7F7F7F80))  # 0x80 in every byte
    mask = 0x0F0F0F0F if fields.BITS[kind] == 4 else 0x03030303
    shifted = b.lshr(word, constant(shift)) if shift else word
    return simd.permute_bytes.emit(b, table, b.and_(shifted, constant(mask)))


@intrinsic(prefer_literal=True)
def add_run(typingctx, rows, tokens, total, sums, unit, scales, stride, x_scales):
    """total = f32(total + f32(f32(sum * unit) * f32(scale * x scale))), for each row vector and token."""
    if not isinstance(rows, types.IntegerLiteral):
        return None
    sig = total(rows, tokens, total, sums, F32, types.int64, types.int64, types.int64)
    rows_, tokens_ = rows.literal_value, tokens.literal_value

    def codegen(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        into, parts = (cgutils.unpack_tuple(b, a, total.count) for a in args[2:4])
        for r in range(rows_):
            scale = simd.read(b, b.add(args[5], b.mul(args[6], ir.Constant(_LONG, r))), simd.VF)
            for t in range(tokens_):
                i = r * tokens_ + t
                factor = b.fmul(scale, simd.splat_at.emit(b, b.add(args[7], ir.Constant(_LONG, 4 * t))))
                whole = b.fmul(b.sitofp(parts[i], simd.VF), args[4])
                into[i] = b.fadd(into[i], b.fmul(whole, factor))
        return context.make_tuple(b, total, into)

    return sig, codegen


@numba.njit
def task(
    index, kind, rows, tokens, words, scales, scale_kind, scale_bytes, table, x, x_scales, corrections, tokens_all, units,
    run_units, runs, block_runs, blocks, tiles, n, outer, outer_step, bias, out, out_stride, out_kind,
):  # fmt: skip
    """`rows` vectors of output rows, all tokens."""
    first = index * rows
    octets, whole_unit = simd.load_i32(table), simd.splat_at(table + 64)
    unit, values = tile.unit_bytes(kind), tile.unit_values(kind)
    stride, last = units * unit, min(rows, tiles - first) - 1
    base = words + first * units * unit
    space, results = simd.scratch(16384), simd.scratch(1024)
    run_values, x_blocks = run_units * values, (units * values + 31) // 32
    for group in range((tokens_all + tokens - 1) // tokens):
        total = tile.zeros(rows, tokens)
        source = x + group * units * values * tokens
        for start in range(0, blocks, BLOCKS):
            stop = min(start + BLOCKS, blocks)
            decode_scales(rows, first, tiles, scales, scale_kind, scale_bytes, blocks, start, stop, space)
            for b in range(start, stop):
                for run in range(b * block_runs, min((b + 1) * block_runs, runs)):
                    sums = begin(rows, tokens, corrections + (group * runs + run) * tokens * 4)
                    for u in range(run * run_units, min((run + 1) * run_units, units)):
                        sums = dot_unit(
                            kind, rows, tokens, sums, base + u * unit, stride, last, source + u * values * tokens, octets
                        )
                    block = group * x_blocks + run * run_values // 32
                    total = add_run(
                        rows, tokens, total, sums, whole_unit, space + (b - start) * 64, BLOCKS * 64,
                        x_scales + block * tokens * 4,
                    )  # fmt: skip
        tile.spill(total, results)
        for r in range(rows):
            row = (first + r) * 16
            for t in range(min(tokens, tokens_all - group * tokens)):
                if row < n:
                    value = simd.load_f32(results + (r * tokens + t) * 64)
                    into = out + (group * tokens + t) * out_stride
                    finish(value, row, min(n - row, 16), outer, outer_step, bias, into, out_kind)


def integer_product(
    kind, rows, tokens, words, scales, scale_kind, scale_bytes, table, x, x_scales, corrections, tokens_all, units,
    run_units, runs, block_runs, blocks, tiles, n, outer, outer_step, bias, out, out_stride, out_kind, team,
):  # fmt: skip
    """y = x w^T for int8 activations as `arrange` lays them out; addresses in bytes. table: 64 bytes, then the unit."""
    arguments = (
        kind, rows, tokens, words, scales, scale_kind, scale_bytes, table, x, x_scales, corrections, tokens_all, units,
        run_units, runs, block_runs, blocks, tiles, n, outer, outer_step, bias, out, out_stride, out_kind,
    )  # fmt: skip
    parallel(task, arguments, (tiles + rows - 1) // rows, team)


@inline
def _code(value, scale):
    """Nearest even of value / scale within -127 .. 127; 0 where the scale is 0."""
    top, none = simd.splat(np.float32(127.0)), simd.splat(np.float32(0.0))
    ratio = simd.round_even(simd.div(value, scale))
    ratio = simd.maximum(simd.minimum(ratio, top), simd.splat(np.float32(-127.0)))
    return simd.to_int(simd.where_less(none, scale, ratio, none))


@numba.njit
def _row(row, x, stride, k, codes, scales, astray):
    """One row in int8_g32: codes [K padded to 32] and float32 scales."""
    blocks = (k + 31) // 32
    for b in range(blocks):
        at, left = x + row * stride + b * 128, k - b * 32
        low = simd.load_first_f32(at, min(left, 16))
        high = simd.load_first_f32(at + 64, max(min(left - 16, 16), 0))
        amax = simd.largest(simd.maximum(simd.absolute(low), simd.absolute(high)))
        if simd.total(simd.add(simd.sub(low, low), simd.sub(high, high))) != np.float32(0.0):
            simd.write_i32(astray, 1)  # x - x is NaN for an infinity or a NaN, and NaN is unlike anything
        bits = simd.as_int(simd.div(simd.splat(amax), simd.splat(np.float32(127.0))))
        above = simd.add_i32(bits, simd.splat_i32(np.int32(0xFFFF)))
        scale = simd.as_float(simd.bit_and(above, simd.splat_i32(np.int32(-65536))))  # up to the next bfloat16
        simd.store_i8(codes + (row * blocks + b) * 32, _code(low, scale))
        simd.store_i8(codes + (row * blocks + b) * 32 + 16, _code(high, scale))
        simd.store_first_f32(scales + (row * blocks + b) * 4, scale, 1)


@inline
def _even(octet):
    """Bytes 0, 2, 4 and 6 of a 64-bit word, side by side."""
    octet = octet & 0x00FF00FF00FF00FF
    octet = (octet | simd.shift_down(octet, 8)) & 0x0000FFFF0000FFFF
    return octet | simd.shift_down(octet, 16)


@numba.njit
def _group(group, codes, scales, rows, tokens, blocks, units, values, run, runs, bias, x, x_scales, corrections):
    parts, width = values // 4, blocks * 32
    for t in range(tokens):
        row = group * tokens + t
        if row >= rows:
            for word in range(units * parts):
                simd.write_i32(x + ((group * units * parts + word) * tokens + t) * 4, 0)
            for b in range(blocks):
                simd.write_i32(x_scales + ((group * blocks + b) * tokens + t) * 4, 0)
            for r in range(runs):
                simd.write_i32(corrections + ((group * runs + r) * tokens + t) * 4, 0)
            continue
        line, spot, step = codes + row * width, x + (group * units * parts * tokens + t) * 4, tokens * 4
        if parts == 1:
            for unit in range(units):
                simd.write_i32(spot + unit * step, simd.read_i32(line + 4 * unit))
        elif parts == 2:
            for unit in range(units):
                octet = simd.read_u64(line + 8 * unit)  # 0 1 2 3 4 5 6 7: the even bytes are one word, the odd ones the next
                simd.write_i32(spot + 2 * unit * step, _even(octet))
                simd.write_i32(spot + (2 * unit + 1) * step, _even(simd.shift_down(octet, 8)))
        else:
            for word in range(units * parts):
                k, value = values * (word // parts) + word % parts, 0
                for byte in range(4):
                    value |= simd.read_u8(line + k + byte * parts) << (8 * byte)
                simd.write_i32(spot + word * step, value)
        for b in range(blocks):
            simd.write_f32(x_scales + ((group * blocks + b) * tokens + t) * 4, simd.read_f32(scales + (row * blocks + b) * 4))
        for r in range(runs):
            total = 0
            for k in range(r * run, min((r + 1) * run, width), 16):  # a run is whole sixteens, and codes end in zeros
                total += simd.total_i32(simd.load_i8(line + k))
            simd.write_i32(corrections + ((group * runs + r) * tokens + t) * 4, -bias * total)


@numba.njit
def _lay_out(
    group, x, stride, k, codes, scales, astray, rows, tokens, blocks, units, values, run, runs, bias, into, x_scales, corrections
):  # fmt: skip
    for row in range(group * tokens, min((group + 1) * tokens, rows) if x != 0 else 0):
        _row(row, x, stride, k, codes, scales, astray)
    _group(group, codes, scales, rows, tokens, blocks, units, values, run, runs, bias, into, x_scales, corrections)


def lay_out(
    x, stride, k, codes, scales, astray, rows, tokens, blocks, units, values, run, runs, bias, into, x_scales, corrections, team
):  # fmt: skip
    """x [rows, k] float32 to int8_g32 and then to words for the dot product; returns 1, by way of `astray` (int32), if a value is
    not finite. With x = 0 the codes (int8 [rows, blocks * 32]) and scales (float32) are given.

    Words: int32 [groups, units * values / 4, tokens], word j of a unit holding the values j, j + p, j + 2p, j + 3p with
    p = values / 4; scales and corrections [groups, blocks or runs, tokens]."""
    arguments = (
        x, stride, k, codes, scales, astray, rows, tokens, blocks, units, values, run, runs, bias, into, x_scales, corrections
    )  # fmt: skip
    simd.write_i32(astray, 0)
    parallel(_lay_out, arguments, (rows + tokens - 1) // tokens, team)
    return simd.read_i32(astray)
