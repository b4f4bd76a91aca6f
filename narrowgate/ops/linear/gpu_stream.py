"""x times a packed weight, for many rows of x: codes are decoded under the tensor cores' time (Hopper's asynchronous products).

As in gpu_packed the weight is the left operand, in registers, and a tile of rows of x the right one, in shared memory. Each
warpgroup owns 64 rows of the weight. The copy engine fills a ring of tiles of x, codes and scales; while the product of one
step runs, the same warps decode the codes of the next. A block's scale multiplies its codes in bfloat16, rounded once (exact for
exponent scales), so that one float32 sum runs over all of k; a row's own scale and an outer factor multiply that sum."""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)


@dataclass(frozen=True)
class Steps:
    """What the kernel is told of a weight: how codes stand, and what one step of k holds."""

    place: tuple[str, ...]  # gpu_place.place_pairs of each part
    bits: int
    part: int  # J
    parts: int
    planes: int
    units: int  # of a step
    group: int
    scale: str  # element of the block scales, "" for none
    scales: int  # rows of scales that a step reads
    stages: int
    tile: gl.NVMMASharedLayout  # of one tile of codes

    @property
    def unit(self) -> int:
        return self.parts * self.part

    @property
    def k(self) -> int:
        return self.units * self.unit

    @property
    def pieces(self) -> int:
        """Rows of the layout's outer axis, (unit, plane), that a step reads; one unit a step where there are several planes."""
        return self.units * self.planes


@gluon.jit
def _fetch(x, w, s, ready, xs, ws, ss, i, first, m0, w0, s0, n0, pred, F: gl.constexpr):
    """Start the copies of step first + i: x [BM, k], each plane's codes [units, BN, J], rows of scales [scales, BN].

    Each has barriers of its own: copies that share one would be kept apart by a barrier of all threads.
    """
    PLANES: gl.constexpr = F.planes
    stage, step = i % F.stages, first + i
    mbarrier.expect(ready[0].index(stage), x.block_type.nbytes, pred=pred)
    if F.scales > 0:
        mbarrier.expect(ready[1].index(stage), s.block_type.nbytes, pred=pred)
    for plane in gl.static_range(PLANES):
        mbarrier.expect(ready[2 + plane].index(stage), w.block_type.nbytes, pred=pred)
    for plane in gl.static_range(PLANES):
        at = w0 + step * F.pieces + plane
        tma.async_copy_global_to_shared(w, [at, n0, 0], ready[2 + plane].index(stage), ws[plane].index(stage), pred=pred)
    if F.scales > 0:
        at = s0 + step * F.k // F.group
        tma.async_copy_global_to_shared(s, [at, n0], ready[1].index(stage), ss.index(stage), pred=pred)
    tma.async_copy_global_to_shared(x, [m0, step * F.k], ready[0].index(stage), xs.index(stage), pred=pred)


@gluon.jit
def _concat(a, b):
    """[R, C] and [R, C] -> [R, 2 C]: registers get other names, nothing moves."""
    both = gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), [a.shape[0], 2 * a.shape[1]])
    return gl.convert_layout(both, a.type.layout, assert_trivial=True)


@gluon.jit
def _factor(code, SCALE: gl.constexpr):
    """bfloat16 of stored scales, exactly."""
    if SCALE == "bfloat16":
        return code.to(gl.bfloat16, bitcast=True)
    elif SCALE == "float8_e4m3fn":
        return code.to(gl.float8e4nv, bitcast=True).to(gl.bfloat16)
    else:
        gl.static_assert(SCALE == "float8_e8m0fnu")
        wide = code.to(gl.uint8, bitcast=True).to(gl.int16)
        bits = gl.maximum(wide << 7, 0x40) | ((wide + 1) >> 8)  # byte 0 is 2^-127, a subnormal; byte 255 a NaN
        return bits.to(gl.int16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _pairs(codes, PAIRS: gl.constexpr):
    """uint32 [BN, J / 2]: the bytes of two neighbouring values."""
    return codes.load(PAIRS).to(gl.uint16, bitcast=True).to(gl.uint32)


@gluon.jit
def _part(ws, ss, at_w, at_s, K: gl.constexpr, F: gl.constexpr, LEFT: gl.constexpr, PAIRS: gl.constexpr):
    """bfloat16 [BN, J]: the values of a step from its K-th on, scaled."""
    P: gl.constexpr = K % F.unit // F.part
    SCALE: gl.constexpr = F.scale
    own = at_w + K // F.unit
    if F.bits == 6 and P == 3:
        codes = [_pairs(ws[0].index(own), PAIRS), _pairs(ws[1].index(own), PAIRS), _pairs(ws[2].index(own), PAIRS)]
        low, high = gl.inline_asm_elementwise(
            F.place[P], "=r,=r,r,r,r,r,r,r", codes, dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    else:
        codes = [_pairs(ws[P if F.bits == 6 else 0].index(own), PAIRS)]
        low, high = gl.inline_asm_elementwise(
            F.place[P], "=r,=r,r,r", codes, dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    v = _unpair(low, high, LEFT)
    if F.scales > 0:
        code = ss.index(at_s + K // F.group).permute((1, 0)).load(LEFT)
        v = gl.inline_asm_elementwise(
            "mul.bf16x2 $0, $1, $2;", "=r,r,r", [v, _factor(code, SCALE)], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    return v


@gluon.jit
def _unpair(low, high, LEFT: gl.constexpr):
    """[BN, J] from two tensors [BN, J / 2] that assembly wrote register by register.

    It is given the pairs of row r and of row r + 8 and returns one register with the two values of row r, which counts as `low`
    of both rows, and one with those of row r + 8, `high` of both. So their axes are exchanged in name.
    """
    BN: gl.constexpr = low.shape[0]
    HALF: gl.constexpr = low.shape[1]
    v = gl.reshape(gl.join(low, high), [BN // 16, 2, 8, HALF, 2])
    v = gl.reshape(gl.permute(v, (0, 4, 2, 3, 1)), [BN, 2 * HALF])
    return gl.convert_layout(v, LEFT, assert_trivial=True)


@gluon.jit
def _values(ws, ss, at_w, at_s, K: gl.constexpr, COUNT: gl.constexpr, F: gl.constexpr, LEFT: gl.constexpr, PAIRS: gl.constexpr):
    """bfloat16 [BN, COUNT parts]: the values of a step from its K-th on."""
    if COUNT == 1:
        return _part(ws, ss, at_w, at_s, K, F, LEFT, PAIRS)
    else:
        HALF: gl.constexpr = COUNT // 2
        left = _values(ws, ss, at_w, at_s, K, HALF, F, LEFT, PAIRS)
        return _concat(left, _values(ws, ss, at_w, at_s, K + HALF * F.part, HALF, F, LEFT, PAIRS))


@gluon.jit
def _decode(ready, ws, ss, i, pred, F: gl.constexpr, LEFT: gl.constexpr, PAIRS: gl.constexpr):
    """Wait for the codes and scales of a step and decode them: bfloat16 [BN, k], the products' left operand."""
    COUNT: gl.constexpr = F.units * F.parts
    PLANES: gl.constexpr = F.planes
    stage, phase = i % F.stages, (i // F.stages) & 1
    if F.scales > 0:
        mbarrier.wait(ready[1].index(stage), phase, pred=pred)
    for plane in gl.static_range(PLANES):
        mbarrier.wait(ready[2 + plane].index(stage), phase, pred=pred)
    return _values(ws, ss, stage * F.units, stage * F.scales, 0, COUNT, F, LEFT, PAIRS)


@gluon.jit
def _right(ready, xs, i, F: gl.constexpr):
    """Wait for the rows of x of a step: [k, BM], the products' right operand."""
    mbarrier.wait(ready[0].index(i % F.stages), (i // F.stages) & 1)
    return xs.index(i % F.stages).permute((1, 0))


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    """One barrier a stage."""
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit
def _planes(w, BN: gl.constexpr, F: gl.constexpr):
    """Room for one plane's codes, as they are copied and tile by tile, and its barriers."""
    STAGES: gl.constexpr = F.stages
    copied = gl.allocate_shared_memory(gl.int16, [F.stages, F.units, BN, F.part // 2], w.layout)
    return copied, copied._reinterpret(gl.int16, [F.stages * F.units, BN, F.part // 2], F.tile), _barriers(STAGES)


@gluon.jit
def _row_factor(ptr, n, N, ELEMENT: gl.constexpr):
    """float32 of stored scales, one a row."""
    code = gl.load(ptr + n, mask=n < N, other=0)
    if ELEMENT == "float32":
        return code.to(gl.float32, bitcast=True)
    elif ELEMENT == "float16":
        return code.to(gl.float16, bitcast=True).to(gl.float32)
    else:
        return _factor(code, ELEMENT).to(gl.float32)


@gluon.jit
def _store(
    acc, rows_ptr, outer_ptr, bias_ptr, out_ptr, start, end, n0, N, stride_om, stride_on, SCALE: gl.constexpr, OUTER: gl.constexpr,
    PLAIN: gl.constexpr,
):  # fmt: skip
    """acc [BN, BM] times the factors, plus the bias, rounded once; as it is where PLAIN."""
    BN: gl.constexpr = acc.shape[0]
    BM: gl.constexpr = acc.shape[1]
    MMA: gl.constexpr = acc.type.layout
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [BN // 8, 256 // BN], [1, gl.num_warps()], [0, 1])
    n = n0 + gl.arange(0, BN, gl.SliceLayout(1, MMA))
    if rows_ptr is not None:
        acc = acc * gl.expand_dims(_row_factor(rows_ptr, n, N, SCALE), 1)
    if not PLAIN:
        if OUTER == 1:
            acc = acc * gl.load(outer_ptr).to(gl.float32, bitcast=True)
        elif OUTER == 2:
            acc = acc * gl.expand_dims(gl.load(outer_ptr + n, mask=n < N, other=0).to(gl.float32, bitcast=True), 1)
        if bias_ptr is not None:
            acc += gl.expand_dims(gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32), 1)
    acc = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), OUT)
    n = n0 + gl.arange(0, BN, gl.SliceLayout(1, OUT))
    m = start + gl.arange(0, BM, gl.SliceLayout(0, OUT))
    at = gl.expand_dims(m.to(gl.int64), 0) * stride_om + gl.expand_dims(n.to(gl.int64), 1) * stride_on
    inside = (gl.expand_dims(n, 1) < N) & (gl.expand_dims(m, 0) < end)
    gl.store(out_ptr + at, acc, mask=inside)


@gluon.jit(do_not_specialize=["M", "steps", "blocks", "splits"])
def stream_kernel(
    x, w, s, rows_ptr, outer_ptr, bias_ptr, out_ptr, plan_ptr, M, N, steps, blocks, splits, stride_om, stride_on,
    F: gl.constexpr, SCALE: gl.constexpr, OUTER: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr, PLAIN: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """out [M, N] = x w^T; or with PLAIN float32 sums out [splits, M, N].

    x, w, s: descriptors of x [M, K], the planes [matrices * units * planes, N, J / 2], the block scales [matrices * blocks, N].
    rows: one scale a row, of element SCALE. plan: as gpu_dense.schedule writes it, for tiles of BM rows.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    PAIRS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=1)
    STAGES: gl.constexpr = F.stages
    tile_m, split = gl.program_id(0), gl.program_id(2)
    n0 = gl.program_id(1) * BN
    start, end, w0, s0, first, last = tile_m * BM, M, 0, 0, 0, steps
    if plan_ptr is not None:
        expert = gl.load(plan_ptr + tile_m * 3)
        start = gl.load(plan_ptr + tile_m * 3 + 1)
        end = gl.load(plan_ptr + tile_m * 3 + 2)
        if start >= end:
            return
        last = gl.where(expert < 0, 0, steps)
        expert = gl.maximum(expert, 0)
        w0 = expert * (steps * F.pieces)
        s0 = expert * blocks
        if rows_ptr is not None:
            rows_ptr += expert.to(gl.int64) * N
        if OUTER == 2:
            outer_ptr += expert.to(gl.int64) * N
    if PLAIN:
        share = (steps + splits - 1) // splits
        first = gl.minimum(split * share, steps)
        last = gl.minimum(first + share, steps)
        out_ptr += split.to(gl.int64) * M * N
    xs = gl.allocate_shared_memory(gl.bfloat16, [F.stages, BM, F.k], x.layout)
    copied_s, ss, ready_s = xs, xs, _barriers(STAGES)
    if F.scales > 0:
        copied_s = gl.allocate_shared_memory(s.dtype, [F.stages, F.scales, BN], s.layout)
        ss = copied_s._reinterpret(s.dtype, [F.stages * F.scales, 1, BN], s.layout)
    copied_w, ws, ready_w = _planes(w, BN, F)
    copied_1, w1, ready_1 = copied_w, ws, ready_w
    copied_2, w2, ready_2 = copied_w, ws, ready_w
    if F.planes == 3:
        copied_1, w1, ready_1 = _planes(w, BN, F)
        copied_2, w2, ready_2 = _planes(w, BN, F)
    ready = (_barriers(STAGES), ready_s, ready_w, ready_1, ready_2)
    copied_w, ws = (copied_w, copied_1, copied_2), (ws, w1, w2)
    fence_async_shared()
    gl.thread_barrier()
    count = last - first
    for i in gl.static_range(STAGES - 1):
        _fetch(x, w, s, ready, xs, copied_w, copied_s, i, first, start, w0, s0, n0, i < count, F)
    acc = warpgroup_mma_init(gl.zeros([BN, BM], gl.float32, MMA))
    even = _decode(ready, ws, ss, 0, count > 0, F, LEFT, PAIRS)
    for pair in range(count // 2):
        step = 2 * pair
        acc = warpgroup_mma(even, _right(ready, xs, step, F), acc, is_async=True)
        acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[acc]))  # the product before this one has ended: its stage is free
        gl.thread_barrier()
        ahead = step + F.stages - 1
        _fetch(x, w, s, ready, xs, copied_w, copied_s, ahead, first, start, w0, s0, n0, ahead < count, F)
        odd = _decode(ready, ws, ss, step + 1, True, F, LEFT, PAIRS)
        acc = warpgroup_mma(odd, _right(ready, xs, step + 1, F), acc, is_async=True)
        acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[acc]))
        gl.thread_barrier()
        _fetch(x, w, s, ready, xs, copied_w, copied_s, ahead + 1, first, start, w0, s0, n0, ahead + 1 < count, F)
        even = _decode(ready, ws, ss, step + 2, step + 2 < count, F, LEFT, PAIRS)
    total = warpgroup_mma_wait(0, deps=[acc])
    if count % 2 == 1:
        total = warpgroup_mma(even, _right(ready, xs, count - 1, F), total)
    _store(total, rows_ptr, outer_ptr, bias_ptr, out_ptr, start, end, n0, N, stride_om, stride_on, SCALE, OUTER, PLAIN)
