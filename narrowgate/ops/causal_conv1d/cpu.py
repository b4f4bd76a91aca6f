"""The convolution as one kernel for whole sequences, single steps and drafts: they differ in which taps come first and which are kept.

A task is one sequence and CHANNELS channels of it, which are its lanes. Taps lie side by side in memory, channel after channel;
a task turns them (and the weights) into rows of channels in scratch, once. Then each output is its bias plus W products, added
from the oldest tap to the newest, product and sum rounded apart: the reference's own order. A sequence's state row is
read before it is written and by one task alone, so a `work` descriptor has nothing to split and is not looked at."""

# mypy: allow-untyped-defs
from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
from numba import types
from torch import Tensor

from narrowgate.ops.causal_conv1d.op import WIDEST
from narrowgate.simd import cpu as simd
from narrowgate.simd import cpu_math as math
from narrowgate.simd.cpu import inline
from narrowgate.simd.cpu_compile import compiled
from narrowgate.simd.cpu_rows import team
from narrowgate.simd.cpu_threads import parallel
from narrowgate.simd.cpu_values import (
    FLOAT32,
    KINDS,
    NONE,
    load,
    load_first,
    optional,
    read_index,
    read_value,
    size_of,
    store_first,
    write_value,
)

CHANNELS = 256
PITCH = 4 * CHANNELS  # bytes of a row of scratch
TURN = 16  # tokens whose outputs are made without reading a tap or a weight again
assert WIDEST * PITCH == 16384  # the scratch of a task
ROWS, SEQUENCES, DRAFTS = range(3)  # one token each; cu_seqlens; and the number accepted last time


@inline
def spread(kind, source, stride, columns, channels, into):
    """Row j of scratch = column j of each channel's row in memory."""
    size, whole = size_of(kind), 0
    if columns == 3 and stride == 3 * size:
        whole = channels // 16 * 16
        for c in range(0, whole, 16):
            at = source + c * stride
            x, y, z = load(kind, at), load(kind, at + 16 * size), load(kind, at + 32 * size)
            simd.store_f32(into + 4 * c, simd.third_0(x, y, z))
            simd.store_f32(into + 4 * c + PITCH, simd.third_1(x, y, z))
            simd.store_f32(into + 4 * c + 2 * PITCH, simd.third_2(x, y, z))
    elif columns == 4 and stride == 4 * size:
        whole = channels // 16 * 16
        for c in range(0, whole, 16):
            at = source + c * stride
            x, y, z, u = load(kind, at), load(kind, at + 16 * size), load(kind, at + 32 * size), load(kind, at + 48 * size)
            simd.store_f32(into + 4 * c, simd.fourth_0(x, y, z, u))
            simd.store_f32(into + 4 * c + PITCH, simd.fourth_1(x, y, z, u))
            simd.store_f32(into + 4 * c + 2 * PITCH, simd.fourth_2(x, y, z, u))
            simd.store_f32(into + 4 * c + 3 * PITCH, simd.fourth_3(x, y, z, u))
    for c in range(whole, channels):
        for j in range(columns):
            simd.write_f32(into + j * PITCH + 4 * c, read_value(kind, source + c * stride + j * size))


@inline
def entry(past, taps, x, x_stride, kind, u, c, count):
    """Sixteen channels of the window's entry u: a tap of the past, or a token."""
    if u < taps:
        return simd.load_f32(past + u * PITCH + 4 * c)
    return load_first(kind, x + (u - taps) * x_stride + c * size_of(kind), count)


@inline
def keep(kind, to, stride, first, columns, channels, past, taps, x, x_stride, x_kind):
    """Column j of each channel's row in memory = entry first + j of its window."""
    size, whole = size_of(kind), 0
    if columns == 3 and stride == 3 * size:
        whole = channels // 16 * 16
        for c in range(0, whole, 16):
            a = entry(past, taps, x, x_stride, x_kind, first, c, 16)
            b = entry(past, taps, x, x_stride, x_kind, first + 1, c, 16)
            d = entry(past, taps, x, x_stride, x_kind, first + 2, c, 16)
            at = to + c * stride
            store_first(kind, at, simd.woven_0(a, b, d), 16)
            store_first(kind, at + 16 * size, simd.woven_1(a, b, d), 16)
            store_first(kind, at + 32 * size, simd.woven_2(a, b, d), 16)
    lanes = simd.scratch(64)
    for c in range(whole, channels, 16):
        count = min(channels - c, 16)
        for j in range(columns):
            simd.store_f32(lanes, entry(past, taps, x, x_stride, x_kind, first + j, c, count))
            for i in range(count):
                write_value(kind, to + (c + i) * stride + j * size, simd.read_f32(lanes + 4 * i))


@inline
def walk4(past, x, x_stride, kind, weights, bias, bias_kind, out, out_stride, out_kind, channels, length, silu):
    """The outputs of a window of four: weights and the last three entries stay in registers over TURN tokens."""
    size, out_size = size_of(kind), size_of(out_kind)
    for start in range(0, length, TURN):
        for c in range(0, channels, 16):
            count, spot = min(channels - c, 16), weights + 4 * c
            v, w = simd.load_f32(spot), simd.load_f32(spot + PITCH)
            r, s = simd.load_f32(spot + 2 * PITCH), simd.load_f32(spot + 3 * PITCH)
            first = simd.splat(np.float32(0.0))
            if bias != 0:
                first = load_first(bias_kind, bias + c * size_of(bias_kind), count)
            a = entry(past, 3, x, x_stride, kind, start, c, count)
            b = entry(past, 3, x, x_stride, kind, start + 1, c, count)
            d = entry(past, 3, x, x_stride, kind, start + 2, c, count)
            for t in range(start, min(start + TURN, length)):
                e = load_first(kind, x + t * x_stride + c * size, count)
                y = simd.add(simd.add(first, simd.mul(v, a)), simd.mul(w, b))
                y = simd.add(simd.add(y, simd.mul(r, d)), simd.mul(s, e))
                store_first(out_kind, out + t * out_stride + c * out_size, math.silu(y) if silu else y, count)
                a, b, d = b, d, e


@numba.njit
def four(past, x, x_stride, kind, weights, bias, bias_kind, out, out_stride, out_kind, channels, length, silu):
    if kind == FLOAT32 and out_kind == FLOAT32 and silu:
        walk4(past, x, x_stride, FLOAT32, weights, bias, bias_kind, out, out_stride, FLOAT32, channels, length, True)
    else:
        walk4(past, x, x_stride, kind, weights, bias, bias_kind, out, out_stride, out_kind, channels, length, silu)


@numba.njit
def task(
    index, mode, x, weight, width, bias, state, out, tokens, channels_all, columns, slots, cu, indices, flags, accepted, silu
):
    """x, out: (address, stride, kind); weight: the same; bias: (address, kind); state: (address, slot stride, channel stride,
    kind); cu, indices, flags, accepted: (address, bytes an entry)."""
    blocks = (channels_all + CHANNELS - 1) // CHANNELS
    i, first = index // blocks, index % blocks * CHANNELS
    channels, taps = min(channels_all - first, CHANNELS), width - 1
    slot = i if indices[1] == NONE else read_index(indices[0], indices[1], i)
    if slot < 0 or slot >= slots:
        return
    start, end = i, i + 1
    if mode != ROWS:
        start, end = 0, tokens
        if cu[1] != NONE:
            start, end = read_index(cu[0], cu[1], i), read_index(cu[0], cu[1], i + 1)
    length, offset = end - start, 0
    if mode == DRAFTS:
        if length == 0:
            return
        offset = read_index(accepted[0], accepted[1], i) - 1
    past, weights = simd.scratch(16384), simd.scratch(16384)
    row = state[0] + slot * state[1] + first * state[2]
    if flags[1] != NONE and read_index(flags[0], flags[1], i) == 0:
        for at in range(0, taps * PITCH, 64):
            simd.store_f32(past + at, simd.splat(np.float32(0.0)))
    else:
        spread(state[3], row + offset * size_of(state[3]), state[2], taps, channels, past)
    spread(weight[2], weight[0] + first * weight[1], weight[1], width, channels, weights)
    source = x[0] + start * x[1] + first * size_of(x[2])
    if width == 4:
        four(
            past, source, x[1], x[2], weights, bias[0] and bias[0] + first * size_of(bias[1]), bias[1],
            out[0] + start * out[1] + first * size_of(out[2]), out[1], out[2], channels, length, silu,
        )  # fmt: skip
    for t in range(length if width != 4 else 0):
        to = out[0] + (start + t) * out[1] + first * size_of(out[2])
        for c in range(0, channels, 16):
            count = min(channels - c, 16)
            y = simd.splat(np.float32(0.0))
            if bias[0] != 0:
                y = load_first(bias[1], bias[0] + (first + c) * size_of(bias[1]), count)
            for j in range(width):
                value = entry(past, taps, source, x[1], x[2], t + j, c, count)
                y = simd.add(y, simd.mul(simd.load_f32(weights + j * PITCH + 4 * c), value))
            store_first(out[2], to + c * size_of(out[2]), math.silu(y) if silu else y, count)
    if mode == DRAFTS:
        keep(state[3], row, state[2], 1, taps - 1 + length, channels, past, taps, source, x[1], x[2])
    else:
        keep(state[3], row, state[2], length, taps, channels, past, taps, source, x[1], x[2])


def convolution(
    mode, x, weight, width, bias, state, out, tokens, channels, columns, slots, count, cu, indices, flags, accepted, silu, team
):  # fmt: skip
    arguments = (mode, x, weight, width, bias, state, out, tokens, channels, columns, slots, cu, indices, flags, accepted, silu)
    parallel(task, arguments, count * ((channels + CHANNELS - 1) // CHANNELS), team)


@functools.cache
def kernel() -> Any:
    word = types.int64
    two, three, four = (types.UniTuple(word, n) for n in (2, 3, 4))
    shape = (word, three, three, word, two, four, three, word, word, word, word, word, two, two, two, two, word, word)
    return compiled(convolution, shape, "")


def _row(t: Tensor) -> tuple[int, int, int]:
    return t.data_ptr(), t.stride(0) * t.element_size(), KINDS[t.dtype]


def _run(
    mode: int, count: int, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str | None, out: Tensor,
    cu: Tensor | None = None, indices: Tensor | None = None, flags: Tensor | None = None, accepted: Tensor | None = None,
) -> None:  # fmt: skip
    tokens, channels = x.shape
    if count == 0 or channels == 0:
        return
    size = state.element_size()
    strides = state.stride()
    kept = [None if t is None else t.contiguous() for t in (cu, indices, flags, accepted)]
    kernel()(
        mode, _row(x), _row(weight), weight.shape[1], (0, 0) if bias is None else (bias.data_ptr(), KINDS[bias.dtype]),
        (state.data_ptr(), strides[0] * size, strides[1] * size, KINDS[state.dtype]), _row(out), tokens, channels,
        state.shape[2], state.shape[0], count, *map(optional, kept), int(activation == "silu"), team(2 * tokens * channels),
    )  # fmt: skip


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor | None = None,
    has_initial_state: Tensor | None = None, *, activation: str | None = "silu", state_indices: Tensor | None = None,
    batch_ptr: Tensor | None = None, token_chunk_offset: Tensor | None = None, out: Tensor,
) -> None:  # fmt: skip
    count = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    _run(SEQUENCES, count, x, weight, bias, state, activation, out, cu_seqlens, state_indices, has_initial_state)


def causal_conv1d_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, activation: str | None = "silu",
    state_indices: Tensor | None = None, out: Tensor,
) -> None:  # fmt: skip
    _run(ROWS, x.shape[0], x, weight, bias, state, activation, out, None, state_indices)


def causal_conv1d_speculative_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor, state_indices: Tensor,
    num_accepted: Tensor, *, activation: str | None = "silu", out: Tensor,
) -> None:  # fmt: skip
    count = state_indices.shape[0]
    _run(DRAFTS, count, x, weight, bias, state, activation, out, cu_seqlens, state_indices, None, num_accepted)
