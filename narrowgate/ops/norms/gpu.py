"""The norms on the GPU: a program takes a few whole rows. A row's order of summation depends on its width alone."""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from narrowgate.strides import aligned, two_axes
from narrowgate.tile.gpu_launch import follow, launch
from narrowgate.tile.gpu_math import round_to, through
from narrowgate.tile.gpu_special import activated
from narrowgate.tile.gpu_sums import block, columns, inverse_norm, offset, steady


@triton.jit(do_not_specialize=["limit"])
def _norm_kernel(
    x, delta, gate, weight, out, share, eps, weight_bias, rows, limit,
    x_inner, x_outer, x_step, d_inner, d_outer, d_step, g_inner, g_outer, g_step, o_inner, o_outer, o_step,
    ADDS: tl.constexpr, WEIGHTED: tl.constexpr, GATE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ALIGNED: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    follow(FOLLOWS)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    c, inside = columns(BLOCK, WIDTH, limit, ALIGNED)
    ok = (row < rows) & inside
    y = tl.load(steady(x, offset(row, x_inner, x_outer, x_step) + c), ok, other=0.0).to(tl.float32)
    if WEIGHTED:  # loads stand ahead of the sum, which nothing after it passes
        factor = tl.load(steady(weight, c), inside, other=0.0).to(tl.float32) + weight_bias
    if GATE != "none":
        z = tl.load(steady(gate, offset(row, g_inner, g_outer, g_step) + c), ok, other=0.0).to(tl.float32)
    if ADDS:  # x += delta, rounded as it is stored
        y += tl.load(steady(delta, offset(row, d_inner, d_outer, d_step) + c), ok, other=0.0).to(tl.float32)
        y = through(y, x.dtype.element_ty)
        tl.store(steady(x, offset(row, x_inner, x_outer, x_step) + c), round_to(y, x.dtype.element_ty), ok)
    y = y * inverse_norm(y, share, eps)
    if WEIGHTED:
        y = y * factor
    if GATE != "none":
        y = y * activated(z, GATE, out.dtype.element_ty)
    tl.store(steady(out, offset(row, o_inner, o_outer, o_step) + c), round_to(y, out.dtype.element_ty), ok)


VALUES, GATED = 4096, 1024  # of a program where there are many rows; with a gate, whose arithmetic wants more programs
STEADY = 512  # values of a tile in which every thread of four warps has four of one row: fewer would change the order of a sum


def shape(width: int, rows: int, values: int = VALUES) -> dict[str, Any]:
    """The tile for rows of one width. `rows` changes how many a program takes, and no bit."""
    columns_ = block(width)
    most, few = max(1, values // columns_), max(1, STEADY // columns_)
    return {"BLOCK": columns_, "ROWS": most if rows >= 2048 * most else few, "num_warps": 4 if columns_ <= 4096 else 16}


def _norm(
    x: Tensor, out: Tensor, count: int, eps: float, weight: Tensor | None = None, weight_bias: float = 0.0,
    gate: Tensor | None = None, activation: str = "none", delta: Tensor | None = None,
) -> None:  # fmt: skip
    width = x.shape[-1]
    rows = x.numel() // width if width else 0
    constants, given = (
        shape(width, rows, VALUES if gate is None else GATED),
        [t for t in (x, delta, gate, weight, out) if t is not None],
    )
    launch(
        _norm_kernel, triton.cdiv(rows, constants["ROWS"]), x, x, delta, gate, weight, out, 1.0 / count, eps, weight_bias, rows, width,
        *(axis for t in (x, delta, gate, out) for axis in ((1, 0, 0) if t is None else two_axes(t))),
        ADDS=delta is not None, WEIGHTED=weight is not None, GATE=activation, WIDTH=width, ALIGNED=aligned(*given),
        **constants, overlap=True,
    )  # fmt: skip


def l2_norm(x: Tensor, *, eps: float = 1e-6, out: Tensor) -> None:
    _norm(x, out, 1, eps)


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float, weight_bias: float = 0.0, out: Tensor) -> None:
    _norm(x, out, x.shape[-1], eps, weight, weight_bias)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, *, eps: float, weight_bias: float, out: Tensor) -> None:
    """x += delta, then rms_norm(x), in one pass. Below the operators: x and delta are [rows, width] of one dtype."""
    _norm(x, out, x.shape[-1], eps, weight, weight_bias, delta=delta)


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, activation: str = "silu", out: Tensor) -> None:
    _norm(x, out, x.shape[-1], eps, weight, gate=gate, activation=activation)
