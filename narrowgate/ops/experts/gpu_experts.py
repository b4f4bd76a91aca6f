"""The experts of a few tokens, in two launches: gate and up with silu(gate) * up, and down with the weighted sum.

A program multiplies one token by 32 rows of one of its experts: nothing is sorted and nothing gathered. Rows of `gate_up` are taken
16 from the gate's half and 16 from the up's, so that the lane that has a gate's sum has the up's. `down` writes each expert's row,
rounded, and the program that is the last to arrive at a token's 32 outputs adds its experts up in the order of the weights: which
one that is changes no bit. The shared expert, where it has the experts' format and shape, is one more of them.

Codes go from memory to the tensor cores in registers, by the assembly of `linear`'s gpu_few_asm and in its order of k: a row's bits
are those of a grouped product by `few_kernel` with as many warps. The interpreter does not know this language (Gluon)."""

# mypy: allow-untyped-defs, disable-error-code="assignment"
# ruff: noqa: RUF005 (this language has no unpacking within a tuple)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from narrowgate.ops.linear.gpu_few import _code, _pieces
from narrowgate.tile.gpu_special import silu


@gluon.jit
def _wait(lane):
    """For the kernel before this one; then the next one may take its place."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, $1;", "=r,r", [lane], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _own(tile: gl.constexpr, half: gl.constexpr, width, FOLD: gl.constexpr, GATED: gl.constexpr):
    """Which of a lane's rows, from its first one. GATED: of the gate's half, then of the up's, `width` below."""
    if GATED:
        return tile * width + (half if FOLD else 8 * half)
    else:
        return 2 * tile + half if FOLD else 16 * tile + 8 * half


@gluon.jit
def _weight(
    first, ws, scale_ptr, warp, t, row0, N, width, units, blocks,
    PARTS: gl.constexpr, PLANES: gl.constexpr, J: gl.constexpr, GROUP: gl.constexpr, BLOCK: gl.constexpr, WARPS: gl.constexpr,
    DEPTH: gl.constexpr, FOLD: gl.constexpr, GATED: gl.constexpr, LANES: gl.constexpr, RUN: gl.constexpr,
):  # fmt: skip
    """(codes, scales) of steps first to first + DEPTH, step by step and tile by tile. Past the last unit the last one again."""
    U: gl.constexpr = PARTS * J
    WORDS: gl.constexpr = J // 16
    PIECES: gl.constexpr = WORDS // 2 if WORDS > 1 else 1
    BLOCKS: gl.constexpr = U // GROUP if GROUP > 0 else 0
    codes, scales = (), ()
    for d in gl.static_range(DEPTH):
        at = gl.minimum((first + d) * WARPS + warp, units - 1)
        for tile in gl.static_range(2):
            for half in gl.static_range(2):
                row = row0 + _own(tile, half, width, FOLD, GATED)
                for plane in gl.static_range(PLANES):
                    base = ws + ((at.to(gl.int64) * PLANES + plane) * N * (4 * PIECES) + t * PIECES)
                    codes = codes + _pieces(base + row * (4 * PIECES), None, PIECES, LANES, RUN)
        for tile in gl.static_range(1 if FOLD else 2):
            for i in gl.static_range(BLOCKS):
                block = gl.minimum((at * U + i * GROUP) // BLOCK, blocks - 1).to(gl.int64) * N
                if FOLD and GATED:
                    two = (scale_ptr + (block + row0)).to(gl.pointer_type(gl.uint16), bitcast=True)
                    up = (scale_ptr + (block + row0 + width)).to(gl.pointer_type(gl.uint16), bitcast=True)
                    scales = scales + (gl.load(two).to(gl.uint32) | (gl.load(up).to(gl.uint32) << 16),)
                elif FOLD:
                    four = (scale_ptr + (block + row0)).to(gl.pointer_type(gl.uint32), bitcast=True)
                    scales = scales + (gl.load(four),)
                else:
                    for half in gl.static_range(2):
                        row = row0 + _own(tile, half, width, FOLD, GATED)
                        scales = scales + (_code(gl.load(scale_ptr + (block + row))),)
    return codes, scales


@gluon.jit
def _rows(
    first, xs, warp, g, t, units, PARTS: gl.constexpr, J: gl.constexpr, WARPS: gl.constexpr, DEPTH: gl.constexpr,
    LANES: gl.constexpr, RUN: gl.constexpr,
):  # fmt: skip
    """x of those steps: the lanes of column 0 have it, the other seven columns are zeros."""
    WORDS: gl.constexpr = J // 16
    fetched = ()
    for d in gl.static_range(DEPTH):
        unit = (first + d) * WARPS + warp
        for p in gl.static_range(PARTS):
            piece = unit * (PARTS * J // 4) + p * (J // 4) + t * WORDS
            fetched = fetched + _pieces(xs + piece, (unit < units) & (g == 0), WORDS, LANES, RUN)
    return fetched


@gluon.jit
def _multiplied(
    sums, weight, x, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, OWN: gl.constexpr, X: gl.constexpr, SCALES: gl.constexpr,
    DEPTH: gl.constexpr, FOLD: gl.constexpr,
):  # fmt: skip
    """sums + the products of DEPTH units. OWN: codes of a unit, X and SCALES likewise."""
    codes, scales = weight
    OF: gl.constexpr = 8 if FOLD else 4
    CODES: gl.constexpr = OWN if FOLD else OWN // 2
    FACTORS: gl.constexpr = SCALES if FOLD else SCALES // 2
    for d in gl.static_range(DEPTH):
        new = ()
        for tile in gl.static_range(1 if FOLD else 2):
            operands = ()
            for i in gl.static_range(OF):
                operands = operands + (sums[tile * OF + i],)
            for i in gl.static_range(CODES):
                operands = operands + (codes[d * OWN + tile * CODES + i],)
            for i in gl.static_range(X):
                operands = operands + (x[d * X + i],)
            for i in gl.static_range(FACTORS):
                operands = operands + (scales[d * SCALES + tile * FACTORS + i],)
            new = new + gl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, dtype=(gl.float32,) * OF, is_pure=True, pack=1)
        sums = new
    return sums


@gluon.jit
def _plus(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@gluon.jit
def _finished(total, n, scale_ptr, outer_ptr, ROW_ASM: gl.constexpr, OUTER: gl.constexpr):
    """A row's sum times what stands before the row and before the weight."""
    if ROW_ASM != "":
        code = _code(gl.load(scale_ptr + n))
        total *= gl.inline_asm_elementwise(ROW_ASM, "=&f,r", [code], dtype=gl.float32, is_pure=True, pack=1)
    if OUTER == 1:
        total *= gl.load(outer_ptr).to(gl.float32, bitcast=True)
    elif OUTER == 2:
        total *= gl.load(outer_ptr + n).to(gl.float32, bitcast=True)
    return total


@gluon.jit(do_not_specialize=["units", "blocks"])
def experts_kernel(
    x_ptr, experts_ptr, w_ptr, scale_ptr, outer_ptr, own_w_ptr, own_scale_ptr, own_outer_ptr, out_ptr, weights_ptr, counts_ptr,
    mixed_ptr, N, units, blocks, x_row, matrix_w, matrix_s,
    ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, ROW_ASM: gl.constexpr, PARTS: gl.constexpr, PLANES: gl.constexpr, J: gl.constexpr,
    GROUP: gl.constexpr, BLOCK: gl.constexpr, OUTER: gl.constexpr, WARPS: gl.constexpr, DEPTH: gl.constexpr, ONCE: gl.constexpr,
    FOLD: gl.constexpr, GATED: gl.constexpr, TOP: gl.constexpr, MIX: gl.constexpr, FOLLOWS: gl.constexpr,
):  # fmt: skip
    """Program (tile, pair): 32 rows of the expert of pair = token * (TOP + 1) + place; the last place is the shared expert (own_*).

    GATED: x [T, K], out [T (TOP + 1), N / 2]. Else x [T (TOP + 1), K], out [T (TOP + 1), N], and where MIX mixed [T, N], whose
    weights [T, TOP + 1] are float32 and whose counts [T, N / 32] are zeros, before and after. w, scale: as few_kernel reads them.
    ONCE: no warp has more than DEPTH units. The experts must have been written two launches ago or before where not GATED.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    RUN: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    ONE: gl.constexpr = gl.SliceLayout(0, LANES)
    WORDS: gl.constexpr = J // 16
    PIECES: gl.constexpr = WORDS // 2 if WORDS > 1 else 1
    CODES: gl.constexpr = gl.pointer_type(gl.int64 if WORDS > 1 else gl.int32)
    BLOCKS: gl.constexpr = PARTS * J // GROUP if GROUP > 0 else 0
    OWN: gl.constexpr = 4 * PLANES * PIECES
    X: gl.constexpr = PARTS * WORDS
    SCALES: gl.constexpr = BLOCKS if FOLD else 4 * BLOCKS
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, LANES))[:, None]
    warp, lane = gl.broadcast(warp, gl.arange(0, 32, layout=ONE)[None, :])
    g, t = lane // 4, lane % 4
    tile, pair = gl.program_id(0), gl.program_id(1)
    token, place = pair // (TOP + 1), pair % (TOP + 1)
    if GATED and FOLLOWS:
        _wait(gl.arange(0, 32, layout=ONE))
    if place == TOP:
        w_ptr = own_w_ptr
        if scale_ptr is not None:
            scale_ptr = own_scale_ptr
        if OUTER > 0:
            outer_ptr = own_outer_ptr
    else:
        expert = gl.load(experts_ptr + token * TOP + place, cache_modifier=".cg").to(gl.int64)
        w_ptr += expert * matrix_w
        if scale_ptr is not None:
            scale_ptr += expert * matrix_s
        if OUTER == 2:
            outer_ptr += expert * N
    width = N // 2
    row0 = tile * (16 if GATED else 32) + g * ((2 if GATED else 4) if FOLD else 1)
    ws = w_ptr.to(CODES, bitcast=True)
    weight = _weight(
        0, ws, scale_ptr, warp, t, row0, N, width, units, blocks,
        PARTS, PLANES, J, GROUP, BLOCK, WARPS, DEPTH, FOLD, GATED, LANES, RUN,
    )  # fmt: skip
    if FOLLOWS and not GATED:
        _wait(gl.arange(0, 32, layout=ONE))
    xs = (x_ptr + (token if GATED else pair).to(gl.int64) * x_row).to(gl.pointer_type(gl.int64), bitcast=True)
    x = _rows(0, xs, warp, g, t, units, PARTS, J, WARPS, DEPTH, LANES, RUN)
    sums = ()
    for _ in gl.static_range(8):
        sums = sums + (gl.zeros([WARPS, 32], gl.float32, LANES),)
    if not ONCE:
        for step in range(DEPTH, gl.cdiv(units, WARPS), DEPTH):
            next_weight = _weight(
                step, ws, scale_ptr, warp, t, row0, N, width, units, blocks,
                PARTS, PLANES, J, GROUP, BLOCK, WARPS, DEPTH, FOLD, GATED, LANES, RUN,
            )  # fmt: skip
            next_x = _rows(step, xs, warp, g, t, units, PARTS, J, WARPS, DEPTH, LANES, RUN)
            sums = _multiplied(sums, weight, x, ASM, CONSTRAINTS, OWN, X, SCALES, DEPTH, FOLD)
            weight, x = next_weight, next_x
    sums = _multiplied(sums, weight, x, ASM, CONSTRAINTS, OWN, X, SCALES, DEPTH, FOLD)
    totals = gl.reduce((sums[0], sums[2], sums[4], sums[6]), 0, _plus)
    one = gl.arange(0, 32, layout=ONE)
    first = tile * (16 if GATED else 32) + one // 4 * ((2 if GATED else 4) if FOLD else 1)
    kind: gl.constexpr = out_ptr.dtype.element_ty
    rounded = ()
    for i in gl.static_range(4):
        n = first + _own(i // 2, i % 2, width, FOLD, GATED)
        rounded = rounded + (_finished(totals[i], n, scale_ptr, outer_ptr, ROW_ASM, OUTER).to(kind),)
    if GATED:
        for half in gl.static_range(2):
            y = silu(rounded[half].to(gl.float32)) * rounded[2 + half].to(gl.float32)
            at = pair.to(gl.int64) * width + first + _own(0, half, width, FOLD, GATED)
            gl.store(out_ptr + at, y.to(kind), mask=one % 4 == 0)
    else:
        for i in gl.static_range(4):
            at = pair.to(gl.int64) * N + first + _own(i // 2, i % 2, width, FOLD, GATED)
            gl.store(out_ptr + at, rounded[i], mask=one % 4 == 0)
        if MIX:
            gl.thread_barrier()
            count_ptr = counts_ptr + token * gl.num_programs(0) + tile
            if gl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == TOP:
                gl.store(count_ptr, 0)
                total = gl.zeros([32], gl.float32, ONE)
                column = tile * 32 + one
                for k in gl.static_range(TOP + 1):
                    entry = token.to(gl.int64) * (TOP + 1) + k
                    row = gl.load(out_ptr + entry * N + column, cache_modifier=".cg").to(gl.float32)
                    total += row * gl.load(weights_ptr + entry)
                gl.store(mixed_ptr + token.to(gl.int64) * N + column, total.to(mixed_ptr.dtype.element_ty))
