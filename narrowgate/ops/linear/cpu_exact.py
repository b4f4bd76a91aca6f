"""The exact product on prepared weights (`lanes16@1`): float32 activations, codes decoded in registers, sums in order of k.

For output row n and token m, with b running over the scale's blocks:
    part = 0;  for k in the block, ascending: part = fma(code[n, k], x[m, k], part)
    total = fma(part, scale[n, b], total)
then total * outer scale, + bias, one rounding to the output's dtype. The order depends on nothing but k, so a row's bits do
not depend on how many rows there are, on threads, or on the instruction set. A kernel is compiled for a kind of field and a
tile (4 x 16 rows by 1 token, or 16 rows by 8 tokens); schemes differ in the table and the scales' storage, which are data."""

# mypy: allow-untyped-defs
from __future__ import annotations

import numba

from narrowgate.ops.linear import cpu_tile as tile
from narrowgate.simd import cpu as simd
from narrowgate.simd.cpu import inline
from narrowgate.simd.cpu_scales import load_scales
from narrowgate.simd.cpu_threads import parallel

BLOCKS = 32  # blocks whose scales are decoded at a time, into the first-level cache
TO_FLOAT32, TO_BFLOAT16, TO_FLOAT16 = range(3)


@inline
def store(kind, address, value, count):
    """The first `count` lanes, in the output's dtype."""
    if kind == TO_FLOAT32:
        simd.store_first_f32(address, value, count)
    elif kind == TO_BFLOAT16:
        simd.store_first_bf16(address, value, count)
    else:
        simd.store_first_f16(address, value, count)


@inline
def finish(value, row, count, outer, outer_step, bias, out, out_kind):
    """Outer scale (one, or one a row), bias, rounding, store: of rows `row` to row + count."""
    if outer != 0:
        factor = simd.load_f32(outer + row * 4) if outer_step else simd.splat_at(outer)
        value = simd.mul(value, factor)
    if bias != 0:
        value = simd.add(value, simd.load_f32(bias + row * 4))
    store(out_kind, out + row * (4 if out_kind == TO_FLOAT32 else 2), value, count)


@inline
def decode_scales(rows, first, tiles, scales, scale_kind, scale_bytes, blocks, start, stop, into):
    """Scales of blocks [start, stop) of `rows` vectors of rows, as float32 lanes."""
    for r in range(rows):
        source = scales + min(first + r, tiles - 1) * blocks * 16 * scale_bytes
        for b in range(start, stop):
            value = load_scales(scale_kind, source + b * 16 * scale_bytes)
            simd.store_f32(into + (r * BLOCKS + b - start) * 64, value)


@numba.njit
def task(
    index, kind, rows, tokens, words, scales, scale_kind, scale_bytes, low_table, high_table, x, tokens_all, units, block_units, blocks,
    tiles, n, outer, outer_step, bias, out, out_stride, out_kind,
):  # fmt: skip
    """`rows` vectors of output rows, all tokens."""
    first = index * rows
    low, high = simd.load_f32(low_table), simd.load_f32(high_table)
    unit, values = tile.unit_bytes(kind), tile.unit_values(kind)
    # The last task of a matrix may have fewer vectors of rows: then its last one is computed again, and not stored.
    stride, last = units * unit, min(rows, tiles - first) - 1
    base = words + first * units * unit
    space, results = simd.scratch(16384), simd.scratch(1024)
    for group in range((tokens_all + tokens - 1) // tokens):
        total = tile.zeros(rows, tokens)
        source = x + group * units * values * tokens * 4
        for start in range(0, blocks, BLOCKS):
            stop = min(start + BLOCKS, blocks)
            decode_scales(rows, first, tiles, scales, scale_kind, scale_bytes, blocks, start, stop, space)
            for b in range(start, stop):
                sums = tile.zeros(rows, tokens)
                for u in range(b * block_units, min((b + 1) * block_units, units)):
                    sums = tile.accumulate(
                        kind, rows, tokens, sums, base + u * unit, stride, last, source + u * values * tokens * 4, low, high
                    )
                total = tile.add_scaled(rows, tokens, total, sums, space + (b - start) * 64, BLOCKS * 64)
        tile.spill(total, results)
        for r in range(rows):
            row = (first + r) * 16
            for t in range(min(tokens, tokens_all - group * tokens)):
                if row < n:
                    value = simd.load_f32(results + (r * tokens + t) * 64)
                    into = out + (group * tokens + t) * out_stride
                    finish(value, row, min(n - row, 16), outer, outer_step, bias, into, out_kind)


def exact_product(
    kind, rows, tokens, words, scales, scale_kind, scale_bytes, low_table, high_table, x, tokens_all, units, block_units, blocks,
    tiles, n, outer, outer_step, bias, out, out_stride, out_kind, team,
):  # fmt: skip
    """y = x w^T for weights in lanes16@1. Addresses in bytes; x is float32 [ceil(M / tokens), K padded to units, tokens]."""
    arguments = (
        kind, rows, tokens, words, scales, scale_kind, scale_bytes, low_table, high_table, x, tokens_all, units, block_units, blocks,
        tiles, n, outer, outer_step, bias, out, out_stride, out_kind,
    )  # fmt: skip
    parallel(task, arguments, (tiles + rows - 1) // rows, team)
