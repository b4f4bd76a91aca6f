"""Rows of float32, bfloat16 or float16 as float32 lanes, with the dtype as a number, so that a kernel is compiled once for all three.

A row of n values is walked sixteen at a time; the last vector may be short (`load_first`, zeros in the missing lanes). Where
a kernel's loop is hot, the branch on the kind is taken outside of it: called with a constant kind, these fold to one load.
Also read here: indices (int32 or int64) and flags. Left out: strides along the innermost axis, which is contiguous."""

# mypy: allow-untyped-defs
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from narrowgate.simd import cpu as simd
from narrowgate.simd.cpu import inline

FLOAT32, BFLOAT16, FLOAT16 = range(3)
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
NONE, WORD, LONG, BYTE = 0, 4, 8, 1  # bytes of an index or flag; NONE: there is no such tensor


def optional(t: Tensor | None) -> tuple[int, int]:
    """(address, bytes an element) of a contiguous tensor of indices or flags that may be absent."""
    return (0, NONE) if t is None else (t.data_ptr(), t.element_size())


@inline
def size_of(kind):
    """Bytes of one value."""
    return 4 if kind == FLOAT32 else 2


@inline
def load(kind, address):
    """Sixteen values."""
    if kind == FLOAT32:
        return simd.load_f32(address)
    if kind == BFLOAT16:
        return simd.load_bf16(address)
    return simd.load_f16(address)


@inline
def load_first(kind, address, count):
    """The first `count` values (up to sixteen), zeros in the other lanes; nothing beyond them is read."""
    if count >= 16:
        return load(kind, address)
    if kind == FLOAT32:
        return simd.load_first_f32(address, count)
    if kind == BFLOAT16:
        return simd.load_first_bf16(address, count)
    return simd.load_first_f16(address, count)


@inline
def store(kind, address, value):
    """Sixteen values, rounded to nearest even; a NaN stays a NaN."""
    if kind == FLOAT32:
        simd.store_f32(address, value)
    elif kind == BFLOAT16:
        simd.store_bf16(address, value)
    else:
        simd.store_f16(address, value)


@inline
def store_first(kind, address, value, count):
    """The first `count` lanes. Whole vectors are not masked: some processors take many times longer over a masked store."""
    if count >= 16:
        store(kind, address, value)
    elif kind == FLOAT32:
        simd.store_first_f32(address, value, count)
    elif kind == BFLOAT16:
        simd.store_first_bf16(address, value, count)
    else:
        simd.store_first_f16(address, value, count)


@inline
def read_value(kind, address):
    """One value."""
    if kind == FLOAT32:
        return simd.read_f32(address)
    if kind == BFLOAT16:
        return simd.read_bf16(address)
    return simd.read_f16(address)


@inline
def write_value(kind, address, value):
    """One value, rounded to nearest even."""
    if kind == FLOAT32:
        simd.write_f32(address, value)
    elif kind == BFLOAT16:
        simd.write_bf16(address, simd.splat(value))
    else:
        simd.write_f16(address, simd.splat(value))


@inline
def read_index(address, size, i):
    """Entry i of indices or flags of `size` bytes."""
    if size == LONG:
        return simd.read_u64(address + 8 * i)
    if size == WORD:
        return simd.read_i32(address + 4 * i)
    return simd.read_u8(address + i)


@inline
def copy_bytes(to, source, count):
    """`count` bytes from one place to another that does not overlap it."""
    whole = count // 64 * 64
    for i in range(0, whole, 64):
        simd.store_i32(to + i, simd.load_i32(source + i))
    for i in range(whole, count // 4 * 4, 4):
        simd.write_i32(to + i, simd.read_i32(source + i))
    for i in range(count // 4 * 4, count):
        simd.write_u8(to + i, simd.read_u8(source + i))


@inline
def clear_bytes(to, count):
    """`count` bytes of zeros."""
    whole = count // 64 * 64
    for i in range(0, whole, 64):
        simd.store_i32(to + i, simd.splat_i32(np.int32(0)))
    for i in range(whole, count):
        simd.write_u8(to + i, 0)
