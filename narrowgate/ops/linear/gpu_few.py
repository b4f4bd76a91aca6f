"""x times a packed weight for a few rows of x, written lane by lane: the weight goes from memory to the tensor cores in registers.

`packed_kernel` lets the compiler place its tensors, which sends codes and scales through shared memory. Here every tensor has one
entry a lane, [WARPS, 32], and one assembly statement (gpu_few_asm) does a unit of k: place the codes, multiply, scale. Lane
(g, t) = (lane // 4, lane % 4) holds rows of the left operand by its g, and of each the t-th quarter of the unit's bytes; which k an
entry of the product stands for is free as long as x is read alike, so both are read in runs of up to 16 bytes. Sums and
their order are those of one warp a slice of units, added up warp by warp: no atomics.

The interpreter does not know this language (Gluon): these kernels run on a card only, and are held there."""

# mypy: allow-untyped-defs, disable-error-code="assignment"
# ruff: noqa: RUF005 (this language has no unpacking within a tuple)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _pieces(pointer, mask, COUNT: gl.constexpr, LANES: gl.constexpr, RUN: gl.constexpr):
    """COUNT neighbouring pieces (1, 2 or 4) at `pointer` [WARPS, 32], as a tuple; zeros where a mask is false."""
    if COUNT == 1 and mask is None:
        return (gl.load(pointer),)
    elif COUNT == 1:
        return (gl.load(pointer, mask=mask, other=0),)
    else:
        found = ()
        i = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, RUN)))[None, None, :]
        at = gl.convert_layout(pointer, gl.SliceLayout(2, RUN))[:, :, None] + i
        for pair in gl.static_range(COUNT // 2):
            if mask is None:
                both = gl.load(at + 2 * pair)
            else:
                both = gl.load(at + 2 * pair, mask=gl.convert_layout(mask, gl.SliceLayout(2, RUN))[:, :, None], other=0)
            first, second = gl.split(both)
            found = found + (gl.convert_layout(first, LANES), gl.convert_layout(second, LANES))
        return found


@gluon.jit
def _code(stored):
    """The bits of a stored scale, as 32."""
    bits: gl.constexpr = stored.dtype.primitive_bitwidth
    if bits == 8:
        return stored.to(gl.uint8, bitcast=True).to(gl.uint32)
    elif bits == 16:
        return stored.to(gl.uint16, bitcast=True).to(gl.uint32)
    else:
        return stored.to(gl.uint32, bitcast=True)


@gluon.jit
def _row(row, N, EVEN: gl.constexpr):
    """Rows past the last repeat it, so that no read of codes needs a mask."""
    return row if EVEN else gl.minimum(row, N - 1)


@gluon.jit
def _own(tile: gl.constexpr, half: gl.constexpr, FOLD: gl.constexpr):
    """Which of a lane's rows: rows g + 8 i, or under FOLD rows 4 g + i, whose scales are one word."""
    return 2 * tile + half if FOLD else 16 * tile + 8 * half


@gluon.jit
def _fetch(
    first, xs, ws, scale_ptr, warp, t, row0, m0, end, N, K, units, blocks, quarter_stride, split,
    PARTS: gl.constexpr, PLANES: gl.constexpr, J: gl.constexpr, GROUP: gl.constexpr, BLOCK: gl.constexpr, COLUMNS: gl.constexpr,
    TILES: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr, DEPTH: gl.constexpr, TAIL: gl.constexpr, EVEN: gl.constexpr,
    FOLD: gl.constexpr, LANES: gl.constexpr, RUN: gl.constexpr,
):  # fmt: skip
    """What `unit_asm` takes after the sums, for steps first to first + DEPTH: codes of each tile, x, scales of each tile.
    Past the last unit the last one is read again, beside an x of zeros."""
    U: gl.constexpr = PARTS * J
    WORDS: gl.constexpr = J // 16
    PIECES: gl.constexpr = WORDS // 2 if WORDS > 1 else 1
    BLOCKS: gl.constexpr = U // GROUP if GROUP > 0 else 0
    fetched = ()
    for d in gl.static_range(DEPTH):
        unit = ((first + d) * SPLITS + split) * WARPS + warp
        known = unit < units
        at = gl.maximum(gl.minimum(unit, units - 1), 0)
        for tile in gl.static_range(TILES):
            for half in gl.static_range(2):
                row = _row(row0 + _own(tile, half, FOLD), N, EVEN)
                for plane in gl.static_range(PLANES):
                    base = ws + ((at.to(gl.int64) * PLANES + plane) * N * (4 * PIECES) + t * PIECES)
                    fetched = fetched + _pieces(base + row * (4 * PIECES), None, PIECES, LANES, RUN)
        for p in gl.static_range(PARTS):
            piece = unit * (U // 4) + p * (J // 4) + t * WORDS
            for c in gl.static_range(COLUMNS):
                m = m0 + 8 * c
                inside = known & (m < end)
                here = xs + (m.to(gl.int64) * quarter_stride + piece)
                if TAIL:  # a row ends within a unit: piece by piece
                    for i in gl.static_range(WORDS):
                        fetched = fetched + (gl.load(here + i, mask=inside & ((piece + i) * 4 < K), other=0),)
                else:
                    fetched = fetched + _pieces(here, inside, WORDS, LANES, RUN)
        if FOLD:
            for i in gl.static_range(BLOCKS):
                block = gl.minimum((at * U + i * GROUP) // BLOCK, blocks - 1).to(gl.int64) * N
                four = (scale_ptr + (block + row0)).to(gl.pointer_type(gl.int32), bitcast=True)
                fetched = fetched + (gl.load(four),)
        for tile in gl.static_range(0 if FOLD else TILES):
            for i in gl.static_range(BLOCKS):
                block = gl.minimum((at * U + i * GROUP) // BLOCK, blocks - 1).to(gl.int64) * N
                for half in gl.static_range(2):
                    row = _row(row0 + _own(tile, half, FOLD), N, EVEN)
                    fetched = fetched + (_code(gl.load(scale_ptr + (block + row))),)
    return fetched


@gluon.jit
def _follow(
    w_ptr, warp, lane, split, N, units, soon,
    PLANES: gl.constexpr, J: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Ask for the codes of this program's first `soon` units, a lane for each, and only then wait for the kernel before. What is
    asked for comes into the second cache, where that kernel's writes go too: it cannot be stale."""
    row0 = gl.program_id(0) * ROWS
    size = gl.minimum(ROWS, N - row0) * J
    i = warp * 32 + lane
    unit = (i // WARPS * SPLITS + split) * WARPS + i % WARPS
    asked = ((i < soon) & (unit < units)).to(gl.int32)
    for plane in gl.static_range(PLANES):
        where = (
            w_ptr.to(gl.int64) + (gl.maximum(gl.minimum(unit, units - 1), 0).to(gl.int64) * PLANES + plane) * N * J + row0 * J
        )
        gl.inline_asm_elementwise(
            "{ .reg .pred ask; setp.ne.s32 ask, $2, 0; @ask cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0; }",
            "=r,l,r,r", [where, asked, size], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, $1;", "=r,r", [lane], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "N", "K", "units", "blocks", "soon"])
def few_kernel(
    x_ptr, w_ptr, scale_ptr, outer_ptr, bias_ptr, out_ptr, plan_ptr, M, N, K, units, blocks, soon, quarter_stride,
    stride_om, stride_on, matrix_w, matrix_s,
    ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, ROW_ASM: gl.constexpr, PARTS: gl.constexpr, PLANES: gl.constexpr, J: gl.constexpr,
    GROUP: gl.constexpr, BLOCK: gl.constexpr, OUTER: gl.constexpr, BIAS: gl.constexpr, COLUMNS: gl.constexpr,
    TILES: gl.constexpr, WARPS: gl.constexpr, SPLITS: gl.constexpr, DEPTH: gl.constexpr, TAIL: gl.constexpr, EVEN: gl.constexpr,
    GROUPED: gl.constexpr, FOLD: gl.constexpr,
):  # fmt: skip
    """out [M, N], or with SPLITS > 1 float32 sums out [SPLITS, M, N]; x [M, K] of 16 bits, read in pieces of four; w planes
    [units, PLANES, N, J]; scale [blocks, N].

    16 TILES rows of w and 8 COLUMNS rows of x a program; its WARPS share out the units, DEPTH of which are in flight at once.
    BLOCK: values under a scale; GROUP: those in one unit, 0 where sums need no scale (ROW_ASM decodes the row's, if there is one).
    It starts while the kernel before it still runs, and meanwhile asks for its first `soon` units (0 with a plan).
    """
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    RUN: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    ONE: gl.constexpr = gl.SliceLayout(0, LANES)
    U: gl.constexpr = PARTS * J
    WORDS: gl.constexpr = J // 16
    PIECES: gl.constexpr = WORDS // 2 if WORDS > 1 else 1
    CODES: gl.constexpr = gl.pointer_type(gl.int64 if WORDS > 1 else gl.int32)
    BLOCKS: gl.constexpr = U // GROUP if GROUP > 0 else 0
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, LANES))[:, None]
    warp, lane = gl.broadcast(warp, gl.arange(0, 32, layout=ONE)[None, :])
    g, t = lane // 4, lane % 4
    split = gl.program_id(2)
    _follow(w_ptr, warp, lane, split, N, units, soon, PLANES, J, 16 * TILES, WARPS, SPLITS)
    start, end = gl.program_id(1) * (8 * COLUMNS), M
    if GROUPED:
        expert = gl.load(plan_ptr + gl.program_id(1) * 3).to(gl.int64)
        start = gl.load(plan_ptr + gl.program_id(1) * 3 + 1).to(gl.int32)
        end = gl.load(plan_ptr + gl.program_id(1) * 3 + 2).to(gl.int32)
        if start >= end:
            return
        units = gl.where(expert < 0, 0, units)
        w_ptr += gl.maximum(expert, 0) * matrix_w
        if scale_ptr is not None:
            scale_ptr += gl.maximum(expert, 0) * matrix_s
        if OUTER == 2:
            outer_ptr += gl.maximum(expert, 0) * N
    xs = x_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
    ws = w_ptr.to(CODES, bitcast=True)
    row0 = gl.program_id(0) * (16 * TILES) + g * (4 if FOLD else 1)
    m0 = start + g
    sums = ()
    for _ in gl.static_range(4 * COLUMNS * TILES):
        sums = sums + (gl.zeros([WARPS, 32], gl.float32, LANES),)
    steps = gl.cdiv(units, WARPS * SPLITS)
    OWN: gl.constexpr = 2 * PLANES * PIECES
    X: gl.constexpr = PARTS * COLUMNS * WORDS
    ALL: gl.constexpr = TILES * OWN + X + (BLOCKS if FOLD else TILES * 2 * BLOCKS)
    fetched = _fetch(
        0, xs, ws, scale_ptr, warp, t, row0, m0, end, N, K, units, blocks, quarter_stride, split,
        PARTS, PLANES, J, GROUP, BLOCK, COLUMNS, TILES, WARPS, SPLITS, DEPTH, TAIL, EVEN, FOLD, LANES, RUN,
    )  # fmt: skip
    for step in range(0, steps, DEPTH):
        ahead = _fetch(
            step + DEPTH, xs, ws, scale_ptr, warp, t, row0, m0, end, N, K, units, blocks, quarter_stride, split,
            PARTS, PLANES, J, GROUP, BLOCK, COLUMNS, TILES, WARPS, SPLITS, DEPTH, TAIL, EVEN, FOLD, LANES, RUN,
        )  # fmt: skip
        for d in gl.static_range(DEPTH):
            new = ()
            if FOLD:
                operands = sums
                for i in gl.static_range(ALL):
                    operands = operands + (fetched[d * ALL + i],)
                new = _unit(ASM, CONSTRAINTS, operands, 2 * COLUMNS)
            for tile in gl.static_range(0 if FOLD else TILES):
                operands = ()
                for i in gl.static_range(4 * COLUMNS):
                    operands = operands + (sums[tile * 4 * COLUMNS + i],)
                for i in gl.static_range(OWN):
                    operands = operands + (fetched[d * ALL + tile * OWN + i],)
                for i in gl.static_range(X):
                    operands = operands + (fetched[d * ALL + TILES * OWN + i],)
                for i in gl.static_range(2 * BLOCKS):
                    operands = operands + (fetched[d * ALL + TILES * OWN + X + tile * 2 * BLOCKS + i],)
                new = new + _unit(ASM, CONSTRAINTS, operands, COLUMNS)
            sums = new
        fetched = ahead
    one = gl.arange(0, 32, layout=ONE)
    for tile in gl.static_range(TILES):
        for c in gl.static_range(COLUMNS):
            for i in gl.static_range(4):
                total = gl.sum(sums[(tile * COLUMNS + c) * 4 + i], 0)
                n = gl.program_id(0) * (16 * TILES) + one // 4 * (4 if FOLD else 1) + _own(tile, i // 2, FOLD)
                m = start + 8 * c + one % 4 * 2 + i % 2
                if ROW_ASM != "":
                    code = _code(gl.load(scale_ptr + n, mask=n < N, other=0))
                    total *= gl.inline_asm_elementwise(ROW_ASM, "=&f,r", [code], dtype=gl.float32, is_pure=True, pack=1)
                at_out = split.to(gl.int64) * M * N + m.to(gl.int64) * stride_om + n.to(gl.int64) * stride_on
                if SPLITS == 1:
                    if OUTER == 1:
                        total *= gl.load(outer_ptr).to(gl.float32, bitcast=True)
                    elif OUTER == 2:
                        total *= gl.load(outer_ptr + n, mask=n < N, other=0).to(gl.float32, bitcast=True)
                    if BIAS:
                        total += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
                gl.store(out_ptr + at_out, total.to(out_ptr.dtype.element_ty), mask=(n < N) & (m < end))


@gluon.jit
def _unit(ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, operands, COLUMNS: gl.constexpr):
    KINDS: gl.constexpr = (gl.float32,) * (4 * COLUMNS)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, dtype=KINDS, is_pure=True, pack=1)
