"""x times a packed weight, for few rows of x: each weight byte is read once, in place, and the tensor cores do the rest.

The weight is the left operand: 16 (or more) of its rows at a time, whose codes are placed into bfloat16 or float16 (gpu_place), meet
8 or more columns, the rows of x. Products are exact and sums float32; a group's partial sum is multiplied by the group's scale,
so no scale is ever rounded to 16 bits and a one-hot x shows the float32 weight. An outer factor multiplies the whole sum.
The warps of a program share out the units of k (a batched product: one slice of the batch a warp) and add up in one fixed order
at the end; where that leaves the device empty the grid splits k as well, into a float32 workspace that a second kernel adds up in
order. No atomics: a call gives the same bits every time."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from narrowgate.tile.gpu_decode import decode
from narrowgate.tile.gpu_launch import follow
from narrowgate.tile.gpu_math import INTERPRETED, bound, mul_rn, round_to


@triton.jit
def _part(
    b0,
    b1,
    b2,
    A0: tl.constexpr,
    A1: tl.constexpr,
    A2: tl.constexpr,
    A3: tl.constexpr,
    ELEMENT: tl.constexpr,
    BITS: tl.constexpr,
    PART: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Values of one part, exact in DTYPE. b0, b1, b2: bytes of the planes (the same tensor where there is one plane)."""
    if INTERPRETED:
        if BITS == 6 and PART == 3:
            code = (b0.to(tl.uint32) >> 6) | ((b1.to(tl.uint32) >> 6) << 2) | ((b2.to(tl.uint32) >> 6) << 4)
        elif BITS == 6:
            code = b0.to(tl.uint32) & 63
        else:
            code = (b0.to(tl.uint32) >> (BITS * PART)) & ((1 << BITS) - 1)
        return decode(code, ELEMENT, "placed")
    else:
        return _placed(b0, b1, b2, A0, A1, A2, A3, BITS, PART, DTYPE)


@triton.jit
def _placed(
    b0,
    b1,
    b2,
    A0: tl.constexpr,
    A1: tl.constexpr,
    A2: tl.constexpr,
    A3: tl.constexpr,
    BITS: tl.constexpr,
    PART: tl.constexpr,
    DTYPE: tl.constexpr,
):
    ASM: tl.constexpr = A0 if PART == 0 else A1 if PART == 1 else A2 if PART == 2 else A3
    if BITS == 6 and PART == 3:
        return _assembled3(b0, b1, b2, ASM, DTYPE)
    elif tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(ASM, "=r,=r,r", [b0], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(ASM, "=r,=r,r", [b0], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def _assembled3(b0, b1, b2, ASM: tl.constexpr, DTYPE: tl.constexpr):
    if tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(ASM, "=r,=r,r,r,r", [b0, b1, b2], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(ASM, "=r,=r,r,r,r", [b0, b1, b2], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def _factor(code, ELEMENT: tl.constexpr):
    """float32 of stored scales."""
    code = code.to(tl.int32)
    if ELEMENT == "float16" or ELEMENT == "bfloat16":
        code = code & 0xFFFF
    return decode(code, ELEMENT, "placed")


@triton.jit
def _stored(scale_ptr, unit, I: tl.constexpr, row, N, blocks, PER_ROW: tl.constexpr, U: tl.constexpr, GROUP: tl.constexpr):
    """[WARPS, BN]: the I-th scale of each warp's unit, as stored; nothing where a unit has fewer."""
    if PER_ROW or (I > 0 and I * GROUP >= U):
        return unit[:, None] * 0 + row[None, :].to(tl.int32) * 0
    else:
        block = tl.minimum((unit * U + I * GROUP) // GROUP, blocks - 1).to(tl.int64)
        return tl.load(scale_ptr + block[:, None] * N + row[None, :])


@triton.jit
def _less(v, zero_ptr, ZERO: tl.constexpr):
    """Codes of up to four bits minus the zero point, a byte: whole numbers that 16-bit floats hold."""
    return v - tl.load(zero_ptr).to(tl.float32).to(v.dtype) if ZERO else v


@triton.jit
def _one_of(a, b, c, d, I: tl.constexpr):
    if I < 2:
        return a if I == 0 else b
    else:
        return c if I == 2 else d


@triton.jit
def _finish(acc, n, m, N, end, outer_ptr, bias_ptr, out_ptr, stride_om, stride_on, OUTER: tl.constexpr, BIAS: tl.constexpr):
    """acc [BN, BM] times the outer factor, plus the bias, rounded once."""
    if OUTER == 1:
        acc = acc * tl.load(outer_ptr).to(tl.float32, bitcast=True)
    elif OUTER == 2:
        acc = acc * tl.load(outer_ptr + n, mask=n < N, other=0).to(tl.float32, bitcast=True)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    at = m[None, :] * stride_om + n[:, None] * stride_on
    tl.store(out_ptr + at, round_to(acc, out_ptr.dtype.element_ty), mask=(n[:, None] < N) & (m[None, :] < end))


@triton.jit(do_not_specialize=["M", "N", "K", "units", "blocks"])
def packed_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, out_ptr, plan_ptr, M, N, K, units, blocks,
    stride_xm, stride_om, stride_on, matrix_w, matrix_s,
    A0: tl.constexpr, A1: tl.constexpr, A2: tl.constexpr, A3: tl.constexpr,  # gpu_place.place of each part
    ELEMENT: tl.constexpr, BITS: tl.constexpr, J: tl.constexpr, PARTS: tl.constexpr, PLANES: tl.constexpr,
    SCALE: tl.constexpr, GROUP: tl.constexpr, PER_ROW: tl.constexpr, ZERO: tl.constexpr, OUTER: tl.constexpr, BIAS: tl.constexpr,
    DTYPE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, WARPS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    TAIL: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """out [M, N]; or with SPLITS > 1 float32 sums out [SPLITS, M, N]. w: planes [units, PLANES, N, J]; scale: [blocks, N].

    GROUP: values under one scale, a multiple of J; PER_ROW: one scale a row (it multiplies the whole sum then).
    TAIL: K is no whole number of units. GROUPED: `plan` as gpu_dense.schedule writes it, for tiles of BM rows.
    """
    tile_n = tl.program_id(0).to(tl.int64)
    tile_m = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    start, end = tile_m * BM, M.to(tl.int64)
    if GROUPED:
        expert = tl.load(plan_ptr + tile_m * 3).to(tl.int64)
        start = tl.load(plan_ptr + tile_m * 3 + 1).to(tl.int64)
        end = tl.load(plan_ptr + tile_m * 3 + 2).to(tl.int64)
        if start >= end:
            return
        w_ptr += tl.maximum(expert, 0) * matrix_w
        if SCALE != "":
            scale_ptr += tl.maximum(expert, 0) * matrix_s
        if OUTER == 2:
            outer_ptr += tl.maximum(expert, 0) * N
    n = tile_n * BN + tl.arange(0, BN)
    m = start + tl.arange(0, BM)
    row = tl.minimum(n, N - 1)  # rows past the last repeat it, so that no read needs a mask
    s = tl.arange(0, WARPS)
    j = tl.arange(0, J)
    acc = tl.zeros((WARPS, BN, BM), tl.float32)
    w_ptrs = w_ptr + row[None, :, None] * J + j[None, None, :]
    x_ptrs = x_ptr + m[None, None, :] * stride_xm + j[None, :, None]
    x_mask = m[None, None, :] < end
    steps = tl.cdiv(units, WARPS * SPLITS)
    if GROUPED:
        steps = tl.where(expert < 0, 0, steps)
    U: tl.constexpr = PARTS * J
    unit = split * WARPS + s
    s0 = _stored(scale_ptr, unit, 0, row, N, blocks, PER_ROW, U, GROUP)
    s1 = _stored(scale_ptr, unit, 1, row, N, blocks, PER_ROW, U, GROUP)
    s2 = _stored(scale_ptr, unit, 2, row, N, blocks, PER_ROW, U, GROUP)
    s3 = _stored(scale_ptr, unit, 3, row, N, blocks, PER_ROW, U, GROUP)
    for step in tl.range(0, bound(steps), num_stages=STAGES):
        unit = (step * SPLITS + split) * WARPS + s
        ahead = unit + SPLITS * WARPS  # the scales of the next step are fetched while this one is computed
        n0 = _stored(scale_ptr, ahead, 0, row, N, blocks, PER_ROW, U, GROUP)
        n1 = _stored(scale_ptr, ahead, 1, row, N, blocks, PER_ROW, U, GROUP)
        n2 = _stored(scale_ptr, ahead, 2, row, N, blocks, PER_ROW, U, GROUP)
        n3 = _stored(scale_ptr, ahead, 3, row, N, blocks, PER_ROW, U, GROUP)
        known = unit < units
        at = tl.minimum(unit, units - 1).to(tl.int64)[:, None, None] * N
        b0 = tl.load(w_ptrs + at * (PLANES * J))
        b1, b2 = b0, b0
        if PLANES == 3:
            b1 = tl.load(w_ptrs + at * (PLANES * J) + N * J)
            b2 = tl.load(w_ptrs + at * (PLANES * J) + N * J * 2)
        partial = tl.zeros((WARPS, BN, BM), tl.float32)
        for p in tl.static_range(PARTS):
            own = b0
            if PLANES == 3 and p == 1:
                own = b1
            if PLANES == 3 and p == 2:
                own = b2
            v = _less(_part(own, b1, b2, A0, A1, A2, A3, ELEMENT, BITS, p, DTYPE), zero_ptr, ZERO)
            k = unit * U + p * J
            mask = x_mask & known[:, None, None]
            if TAIL:
                mask = mask & (k[:, None, None] + j[None, :, None] < K)
            x = tl.load(x_ptrs + k[:, None, None], mask=mask, other=0.0)
            if INTERPRETED:
                x = x.to(tl.float32)
            partial = tl.dot(v, x, partial)
            if not PER_ROW and ((p + 1) * J % GROUP == 0 or p == PARTS - 1):
                code = _one_of(s0, s1, s2, s3, (p * J) // GROUP)
                acc += partial * _factor(code, SCALE)[:, :, None]
                partial = tl.zeros((WARPS, BN, BM), tl.float32)
        s0, s1, s2, s3 = n0, n1, n2, n3
        if PER_ROW:
            acc += partial
    total = tl.sum(acc, 0)
    if PER_ROW and SCALE != "":
        total = total * _factor(tl.load(scale_ptr + row), SCALE)[:, None]
    if SPLITS > 1:
        at = (split.to(tl.int64) * M + m[None, :]) * N + n[:, None]
        tl.store(out_ptr + at, total, mask=(n[:, None] < N) & (m[None, :] < end))
    else:
        _finish(total, n, m, N, end, outer_ptr, bias_ptr, out_ptr, stride_om, stride_on, OUTER, BIAS)


@triton.jit(do_not_specialize=["first", "last", "N", "K", "units", "blocks"])
def unpack_kernel(
    w_ptr, scale_ptr, zero_ptr, outer_ptr, out_ptr, first, last, N, K, units, blocks, stride_on,
    A0: tl.constexpr, A1: tl.constexpr, A2: tl.constexpr, A3: tl.constexpr,
    ELEMENT: tl.constexpr, BITS: tl.constexpr, J: tl.constexpr, PARTS: tl.constexpr, PLANES: tl.constexpr,
    SCALE: tl.constexpr, GROUP: tl.constexpr, PER_ROW: tl.constexpr, ZERO: tl.constexpr, OUTER: tl.constexpr,
    DTYPE: tl.constexpr, BN: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """out [last - first, K]: those rows of the weight decoded, float32 steps in the order of `dequantize`, rounded once."""
    unit = tl.program_id(0)
    n = first + tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    row = tl.minimum(n, N - 1)
    j = tl.arange(0, J)
    w_ptrs = w_ptr + unit.to(tl.int64) * N * (PLANES * J) + row[:, None] * J + j[None, :]
    b0 = tl.load(w_ptrs)
    b1, b2 = b0, b0
    if PLANES == 3:
        b1 = tl.load(w_ptrs + N * J)
        b2 = tl.load(w_ptrs + N * J * 2)
    for p in tl.static_range(PARTS):
        own = b0
        if PLANES == 3 and p == 1:
            own = b1
        if PLANES == 3 and p == 2:
            own = b2
        v = _less(_part(own, b1, b2, A0, A1, A2, A3, ELEMENT, BITS, p, DTYPE), zero_ptr, ZERO).to(tl.float32)
        k = unit * (PARTS * J) + p * J
        if SCALE != "":
            block = 0 if PER_ROW else tl.minimum(k // GROUP, blocks - 1).to(tl.int64)
            v = mul_rn(v, _factor(tl.load(scale_ptr + block * N + row), SCALE)[:, None])
        if OUTER == 1:
            v = mul_rn(v, tl.load(outer_ptr).to(tl.float32, bitcast=True))
        elif OUTER == 2:
            v = mul_rn(v, tl.load(outer_ptr + row).to(tl.float32, bitcast=True)[:, None])
        mask = n[:, None] < last
        if TAIL:
            mask = mask & (k + j[None, :] < K)
        tl.store(
            out_ptr + (n - first)[:, None] * stride_on + (k + j)[None, :], round_to(v, out_ptr.dtype.element_ty), mask=mask
        )


@triton.jit(do_not_specialize=["M", "N"])
def reduce_kernel(
    sums_ptr, outer_ptr, bias_ptr, out_ptr, M, N, stride_om, stride_on,
    SPLITS: tl.constexpr, OUTER: tl.constexpr, BIAS: tl.constexpr, BN: tl.constexpr,
    FOLLOWS: tl.constexpr,
):  # fmt: skip
    """out [M, N] from sums [SPLITS, M, N], added in order."""
    follow(FOLLOWS)
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    m = tl.program_id(1).to(tl.int64)
    total = tl.zeros((BN,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums_ptr + (split * M + m) * N + n, mask=n < N, other=0.0)
    _finish(total[:, None], n, m + tl.arange(0, 1), N, M, outer_ptr, bias_ptr, out_ptr, stride_om, stride_on, OUTER, BIAS)
