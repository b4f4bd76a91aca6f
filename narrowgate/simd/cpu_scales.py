"""Stored scales to float32 lanes: one helper with the storage as a number, so that no kernel is compiled per scale element."""

# mypy: allow-untyped-defs
from __future__ import annotations

import numpy as np

from narrowgate.simd import cpu as simd
from narrowgate.simd.cpu import inline

ONE, BFLOAT16, FLOAT16, FLOAT32, E8M0, E4M3 = range(6)
KINDS = {"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": FLOAT32, "float8_e8m0fnu": E8M0, "float8_e4m3fn": E4M3}
SIZE = (0, 2, 2, 4, 1, 1)  # bytes of one scale

_HALF_SMALLEST, _QUIET = np.int32(0x00400000), np.int32(0x7FC00000)


@inline
def _e8m0(code):
    """2^(byte - 127): byte 0 is the subnormal 2^-127, byte 255 NaN."""
    bits = simd.shift_left(code, simd.splat_i32(np.int32(23)))
    bits = simd.where_equal(code, np.int32(0), simd.splat_i32(_HALF_SMALLEST), bits)
    return simd.as_float(simd.where_equal(code, np.int32(255), simd.splat_i32(_QUIET), bits))


@inline
def load_scales(kind, address):
    """Sixteen scales of storage `kind` at an address."""
    if kind == BFLOAT16:
        return simd.load_bf16(address)
    if kind == FLOAT16:
        return simd.load_f16(address)
    if kind == FLOAT32:
        return simd.load_f32(address)
    if kind == E8M0:
        return _e8m0(simd.load_u8(address))
    if kind == E4M3:
        return simd.e4m3(simd.load_u8(address))
    return simd.splat(np.float32(1.0))


@inline
def load_scale(kind, address):
    """One scale of storage `kind`, in all lanes."""
    if kind == BFLOAT16:
        return simd.as_float(simd.shift_left(simd.splat_u16(address), simd.splat_i32(np.int32(16))))
    if kind == FLOAT16:
        return simd.half_bits(simd.splat_u16(address))
    if kind == FLOAT32:
        return simd.splat_at(address)
    if kind == E8M0:
        return _e8m0(simd.splat_u8(address))
    if kind == E4M3:
        return simd.e4m3(simd.splat_u8(address))
    return simd.splat(np.float32(1.0))
