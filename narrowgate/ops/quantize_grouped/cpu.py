"""quantize_grouped on the CPU: activation, blocks of 32, codes and swizzled scale bytes in one pass over each row.

A task is a run of rows of the padded scales, so every byte of both outputs is written; rows that do not count and padding get zeros,
and their input is never read. The activation is the elementwise operator's own function, rounded to x's dtype, so that fused equals
composed. Values that are not finite and maxima that overflow are noticed, and left to the rule in torch, which refuses them."""

# mypy: allow-untyped-defs
from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from narrowgate.dispatch import checks_values
from narrowgate.formats.microscaling import BLOCK, microscaling_element
from narrowgate.ops.elementwise.cpu import RELU2, SILU_MUL, apply, relu2, silu_mul
from narrowgate.ops.quantize import cpu_encode as encode
from narrowgate.ops.quantize.cpu_blocks import _pack
from narrowgate.packing import pack_fp6_grouped, swizzle_128x4
from narrowgate.packing.swizzle import padded_extents, swizzled_view
from narrowgate.quantize import quantize_microscaling
from narrowgate.simd import cpu as simd
from narrowgate.simd.cpu import inline
from narrowgate.simd.cpu_compile import compiled
from narrowgate.simd.cpu_rows import team
from narrowgate.simd.cpu_threads import parallel
from narrowgate.simd.cpu_values import FLOAT32, KINDS, clear_bytes, load, read_index, size_of, store

NOTHING = -1  # beside the elementwise steps
STEPS = {None: NOTHING, "silu_mul": SILU_MUL, "relu2": RELU2}
SPAN = 1024  # values of a row at a time
TASK = 1 << 14  # values of a task


@inline
def _values(step, kind, source, second, count, rounded, values):
    """`count` values (whole sixteens) after the activation, rounded to the dtype that they came in, as float32."""
    size, none = size_of(kind), simd.splat(np.float32(0.0))
    for i in range(0, count, 16):
        x = load(kind, source + i * size)
        if step != NOTHING:
            x = apply(step, x, load(kind, second + i * size) if step == SILU_MUL else x, none)
            if kind != FLOAT32:
                store(kind, rounded, x)
                x = load(kind, rounded)
        simd.store_f32(values + 4 * i, x)


@numba.njit
def _piece(step, kind, source, second, count, rounded, values):
    if step == SILU_MUL:
        _values(SILU_MUL, kind, source, second, count, rounded, values)
    elif step == RELU2:
        _values(RELU2, kind, source, second, count, rounded, values)
    else:
        _values(NOTHING, kind, source, second, count, rounded, values)


@inline
def _codes(values, factor, second, brain, rounded, mantissa, bias, top, bits, octets):
    """32 codes, one a byte, of values times `factor` times `second`."""
    for i in range(0, 32, 16):
        x = simd.mul(simd.mul(simd.load_f32(values + 4 * i), factor), second)
        if brain:
            simd.store_bf16(rounded, x)
            x = simd.load_bf16(rounded)
        simd.store_i8(octets + i, encode.small_float(x, mantissa, bias, top, bits))


@numba.njit
def _block(values, gs, most, brain, rounded, mantissa, bias, top, bits, octets, flags):
    """Codes of a block and its scale byte (SPEC B19 to B26)."""
    low, high = simd.load_f32(values), simd.load_f32(values + 64)
    scaled = simd.mul(simd.splat(simd.largest(simd.maximum(simd.absolute(low), simd.absolute(high)))), simd.splat(gs))
    astray = simd.add(simd.sub(low, low), simd.add(simd.sub(high, high), simd.sub(scaled, scaled)))
    if simd.total(astray) != np.float32(0.0):  # v - v is NaN for an infinity or a NaN, and NaN is unlike anything
        simd.write_i32(flags, 1)
    code = encode.ceil_byte(simd.div(scaled, simd.splat(most)))
    one = simd.splat(np.float32(1.0))
    power = encode.power_down(code)  # a finite maximum leaves the byte below 254
    factor = simd.mul(power, simd.splat(gs))
    simd.store_i32(rounded, code)
    byte = simd.read_i32(rounded)
    if byte == 0 or simd.lane0(factor) == np.float32(0.0):
        for i in range(0, 32, 16):
            simd.store_i8(octets + i, simd.splat_i32(np.int32(0)))
    elif abs(simd.lane0(factor)) < np.inf:
        _codes(values, factor, one, brain, rounded, mantissa, bias, top, bits, octets)
    else:  # gs is huge and the block tiny: the same product in two finite steps
        _codes(values, simd.splat(gs), power, brain, rounded, mantissa, bias, top, bits, octets)
    return byte


@numba.njit
def _row(x, second, kind, step, width, gs, most, brain, mantissa, bias, top, bits, codes, scales, flags):
    values, octets, rounded = simd.scratch(4160), simd.scratch(1088), simd.scratch(64)
    size = size_of(kind)
    for start in range(0, width, SPAN):
        count = min(SPAN, width - start)
        _piece(step, kind, x + start * size, second + start * size, count, rounded, values)
        for b in range(count // 32):
            byte = _block(values + b * 128, gs, most, brain, rounded, mantissa, bias, top, bits, octets + b * 32, flags)
            column = start // 32 + b
            simd.write_u8(scales + column // 4 * 512 + column % 4, byte)
        _pack(octets, count, bits, codes + start * bits // 8)


@numba.njit
def _task(
    index, per_task, padded_rows, rows, width, x, group_step, row_step, kind, step, counts, count_bytes, scale, scale_step, most, brain,
    mantissa, bias, top, bits, codes, scales, flags,
):  # fmt: skip
    columns = (width // 32 + 3) // 4
    for r in range(index * per_task, (index + 1) * per_task):
        group, row = r // padded_rows, r % padded_rows
        place = scales + group * padded_rows * columns * 4 + row // 128 * columns * 512 + row % 32 * 16 + row % 128 // 32 * 4
        for column in range(columns):
            simd.write_i32(place + column * 512, 0)
        if row >= rows:
            continue
        into = codes + (group * rows + row) * (width * bits // 8)
        if row >= read_index(counts, count_bytes, group):
            clear_bytes(into, width * bits // 8)
            continue
        source, gs = x + group * group_step + row * row_step, simd.read_f32(scale + group * scale_step)
        _row(
            source,
            source + width * size_of(kind),
            kind,
            step,
            width,
            gs,
            most,
            brain,
            mantissa,
            bias,
            top,
            bits,
            into,
            place,
            flags,
        )


def grouped_blocks(
    groups, per_task, padded_rows, rows, width, x, group_step, row_step, kind, step, counts, count_bytes, scale, scale_step, most,
    brain, mantissa, bias, top, bits, codes, scales, flags, team,
):  # fmt: skip
    """Strides in bytes; `per_task` divides `padded_rows`. `flags` (int32) becomes 1 where a value is not finite."""
    arguments = (
        per_task, padded_rows, rows, width, x, group_step, row_step, kind, step, counts, count_bytes, scale, scale_step, most, brain,
        mantissa, bias, top, bits, codes, scales, flags,
    )  # fmt: skip
    parallel(_task, arguments, groups * padded_rows // per_task, team)


@functools.cache
def _kernel() -> Any:
    word = types.int64
    return compiled(grouped_blocks, (word,) * 14 + (types.float32,) + (word,) * 9, "")


def quantize_grouped(
    x: Tensor, row_counts: Tensor, fmt: str, *, global_scale: Tensor, activation: str | None = None,
    bf16_round: bool = False, out: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    (groups, rows, _), record = x.shape, microscaling_element(fmt)
    codes, scales = out[0].permute(2, 0, 1), out[1].view(torch.uint8).permute(5, 2, 4, 0, 1, 3)  # as allocated: contiguous
    width = codes.shape[2] * 8 // record.bits
    if 0 in (groups, rows, width):
        return
    size, (padded, _), flags = x.element_size(), padded_extents(rows, width // BLOCK), torch.zeros(1, dtype=torch.int32)
    x = x if x.stride(2) == 1 else x.contiguous()
    counts, scale = row_counts.contiguous(), global_scale.contiguous()
    per_task = 128
    while per_task > 1 and per_task * width > TASK:
        per_task //= 2
    _kernel()(
        groups, per_task, padded, rows, width, x.data_ptr(), x.stride(0) * size, x.stride(1) * size, KINDS[x.dtype],
        STEPS[activation], counts.data_ptr(), counts.element_size(), scale.data_ptr(), 4 * (scale.numel() > 1),
        record.max, int(bf16_round), record.mantissa_bits, record.bias, record.max_code, record.bits, codes.data_ptr(),
        scales.data_ptr(), flags.data_ptr(), team(groups * rows * width),
    )  # fmt: skip
    if flags.item():
        _by_rule(x, row_counts, fmt, global_scale, activation, bf16_round, out)


def _by_rule(
    x: Tensor,
    row_counts: Tensor,
    fmt: str,
    global_scale: Tensor,
    activation: str | None,
    bf16_round: bool,
    out: tuple[Tensor, Tensor],
) -> None:
    """Values that are not finite: the rule of narrowgate.quantize refuses them, or saturates where nothing may be looked at."""
    x = torch.where(torch.arange(x.shape[1])[:, None] < row_counts[:, None, None], x, 0)
    if activation is not None:
        made = x.new_empty(*x.shape[:-1], x.shape[-1] // 2) if activation == "silu_mul" else torch.empty_like(x)
        (silu_mul if activation == "silu_mul" else relu2)(x, out=made)
        x = made
    scale, policy = global_scale.expand(len(x))[:, None].expand(x.shape[:2]), "raise" if checks_values(x) else "saturate"
    codes, bytes_ = quantize_microscaling(x, scale, fmt, bf16_round=bf16_round, non_finite=policy)
    out[0].copy_(codes.permute(1, 2, 0) if fmt == "e4m3" else pack_fp6_grouped(codes))
    out[1].view(torch.uint8).copy_(swizzled_view(swizzle_128x4(bytes_), x.shape[1], bytes_.shape[-1]))
