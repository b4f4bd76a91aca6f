"""One decoding step of gated attention on a GPU: rotate, remember, attend, gate, in three launches that never change.

Every extent of a launch follows from shapes: a program for each run of CHUNK keys that the pool could hold, those beyond a
sequence's length leaving at once. A chunk starts at a multiple of CHUNK, so a sequence's bits depend neither on its batch mates
nor on the capacity. Operands are the pool's dtype, sums, softmax and gate float32. Left out: prompts, whose attention is bound by
arithmetic (the library's kernel)."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgate.tile.gpu_launch import follow, launch

CHUNK, BLOCK = 128, 64  # keys of a program, and those that it reads at once


@triton.jit
def _rotated(x, cos, sin, d, mask, HALF: tl.constexpr):
    """Entries d of heads at pointers x, the first 2 HALF of them rotated, float32."""
    first = d < HALF
    turned = d < 2 * HALF
    at = tl.where(first, d, d - HALF)
    c = tl.load(cos + at, turned & mask, other=1.0)
    s = tl.load(sin + at, turned & mask, other=0.0)
    partner = tl.load(x + tl.where(first, d + HALF, d - HALF), turned & mask, other=0.0).to(tl.float32)
    own = tl.load(x + d, mask, other=0.0).to(tl.float32)
    return tl.where(turned, own * c + tl.where(first, -partner, partner) * s, own)


@triton.jit
def _remember_kernel(
    k, v, pool, slots, positions, cos, sin, k_row, k_head, v_row, v_head, slot_stride, value_stride, head_stride,
    D: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    follow(FOLLOWS)
    i, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = d < D
    position = tl.load(positions + i)
    into = pool + tl.load(slots + i).to(tl.int64) * slot_stride + h * head_stride + position * D + d
    key = _rotated(k + i * k_row + h * k_head, cos + i * HALF, sin + i * HALF, d, inside, HALF)
    tl.store(into, key.to(pool.dtype.element_ty), inside)
    tl.store(into + value_stride, tl.load(v + i * v_row + h * v_head + d, inside), inside)


@triton.jit(do_not_specialize=["splits"])
def _chunk_kernel(
    q, pool, slots, positions, cos, sin, sums, tops, totals, scale, splits, q_row, q_head, slot_stride, value_stride, head_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    follow(FOLLOWS)
    split, h, i = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    length = (tl.load(positions + i) + 1).to(tl.int32)
    start = split * CHUNK
    if start < length:
        g, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
        own = (g < GROUP)[:, None] & (d < D)[None, :]
        heads = q + i * q_row + (h * GROUP + g)[:, None] * q_head
        query = _rotated(heads, cos + i * HALF, sin + i * HALF, d[None, :], own, HALF) * scale
        query = query.to(pool.dtype.element_ty)
        base = pool + tl.load(slots + i).to(tl.int64) * slot_stride + h * head_stride
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        for at in tl.static_range(0, CHUNK, BLOCK):
            j = start + at + tl.arange(0, BLOCK)
            there = (j < length)[:, None] & (d < D)[None, :]
            places = base + j.to(tl.int64)[:, None] * D + d[None, :]
            keys = tl.load(places, there, other=0.0)
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
            scores = tl.where((j < length)[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp(scores - higher[:, None])
            shrink = tl.exp(top - higher)
            values = tl.load(places + value_stride, there, other=0.0)
            acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            total = total * shrink + tl.sum(weights, 1)
            top = higher
        row = ((i * tl.num_programs(1) + h) * GROUP + g) * splits + split
        tl.store(sums + row[:, None] * D + d[None, :], acc, own)
        tl.store(tops + row, top, g < GROUP)
        tl.store(totals + row, total, g < GROUP)


@triton.jit(do_not_specialize=["splits"])
def _gate_kernel(
    sums, tops, totals, positions, gate, out, splits, gate_row, gate_head,
    D: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
    FOLLOWS: tl.constexpr,
):  # fmt: skip
    follow(FOLLOWS)
    i, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, WIDTH)
    live = ((tl.load(positions + i) + CHUNK) // CHUNK).to(tl.int32)  # chunks of position + 1 keys
    row = (i * tl.num_programs(1) + h) * splits
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([WIDTH], tl.float32)
    first = 0
    while first < live:
        s = first + tl.arange(0, STEP)
        m = tl.load(tops + row + s, s < live, other=float("-inf"))
        higher = tl.maximum(top, tl.max(m, 0))
        weight = tl.exp(m - higher)
        shrink = tl.exp(top - higher)
        part = tl.load(sums + (row + s)[:, None] * D + d[None, :], (s < live)[:, None] & (d < D)[None, :], other=0.0)
        acc = acc * shrink + tl.sum(part * weight[:, None], 0)
        total = total * shrink + tl.sum(tl.load(totals + row + s, s < live, other=0.0) * weight, 0)
        top = higher
        first += STEP
    z = tl.load(gate + i * gate_row + h * gate_head + d, d < D, other=0.0).to(tl.float32)
    y = acc / total / (1.0 + tl.exp(-z))
    tl.store(out + (i * tl.num_programs(1) + h) * D + d, y.to(out.dtype.element_ty), d < D)


def step(
    q: Tensor, gate: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """[n, H, D] in k's dtype. q, gate [n, H, D] and k, v [n, Hkv, D], rows may be strided; pool [slots, 2, Hkv, capacity, D]; slots
    and positions [n], positions below the capacity; cos, sin [n, 1, rotary / 2] float32. The pool takes the keys and values."""
    (n, heads, dim), kv_heads = q.shape, k.shape[1]
    out = torch.empty(n, heads, dim, dtype=k.dtype, device=k.device)
    if not n:
        return out
    group, width, half, splits = heads // kv_heads, triton.next_power_of_2(dim), cos.shape[-1], -(-pool.shape[3] // CHUNK)
    width = max(width, 16)
    sums = torch.empty(n, heads, splits, dim, dtype=torch.float32, device=k.device)
    tops, totals = torch.empty(2, n, heads, splits, dtype=torch.float32, device=k.device).unbind()
    strides = pool.stride()[:3]
    launch(
        _remember_kernel, (n, kv_heads), k, k, v, pool, slots, positions, cos, sin,
        *k.stride()[:2], *v.stride()[:2], *strides,
        D=dim, WIDTH=width, HALF=half, num_warps=1, overlap=True,
    )  # fmt: skip
    launch(
        _chunk_kernel, (splits, kv_heads, n), k, q, pool, slots, positions, cos, sin, sums, tops, totals, dim**-0.5, splits,
        *q.stride()[:2], *strides,
        GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), D=dim, WIDTH=width, HALF=half, CHUNK=CHUNK, BLOCK=BLOCK,
        num_warps=4, enable_fp_fusion=True, overlap=True,
    )  # fmt: skip
    launch(
        _gate_kernel, (n, heads), k, sums, tops, totals, positions, gate, out, splits, gate.stride(0), gate.stride(1),
        D=dim, WIDTH=width, CHUNK=CHUNK, STEP=16, num_warps=4, enable_fp_fusion=True, overlap=True,
    )  # fmt: skip
    return out
