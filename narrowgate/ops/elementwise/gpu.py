"""The elementwise steps on the GPU, all in one kernel: a program takes a piece of one row. Contiguous tensors are one row."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgate.strides import two_axes
from narrowgate.tile.gpu_launch import follow, launch
from narrowgate.tile.gpu_math import round_to
from narrowgate.tile.gpu_special import silu as silu_
from narrowgate.tile.gpu_sums import offset

BLOCK = 2048


@triton.jit
def _kernel(
    x, out, s, width, x_inner, x_outer, x_step, o_inner, o_outer, o_step, parts, STEP: tl.constexpr, BLOCK: tl.constexpr,
    FOLLOWS: tl.constexpr,
):  # fmt: skip
    follow(FOLLOWS)
    row = tl.program_id(0) // parts
    c = (tl.program_id(0) % parts).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = c < width
    x += offset(row, x_inner, x_outer, x_step)
    raw = tl.load(x + c, ok, other=0.0)
    y = raw.to(tl.float32)
    to = out + offset(row, o_inner, o_outer, o_step) + c
    if STEP == "silu":
        y = silu_(y)
    elif STEP == "silu_mul":
        y = silu_(y) * tl.load(x + width + c, ok, other=0.0).to(tl.float32)
    elif STEP == "relu2":
        y = tl.where(y < 0.0, 0.0, y)
        y = y * y
    elif STEP == "scale":
        y = y * s
    if STEP != "convert":
        tl.store(to, round_to(y, out.dtype.element_ty), ok)
    elif out.dtype.element_ty == x.dtype.element_ty:
        tl.store(to, raw, ok)
    elif out.dtype.element_ty == tl.bfloat16:
        tl.store(to.to(tl.pointer_type(tl.uint16), bitcast=True), _bfloat16_bits(y), ok)
    else:
        tl.store(to, y.to(out.dtype.element_ty), ok)


@triton.jit
def _bfloat16_bits(x):
    """To nearest, ties to even, on the bits; a NaN keeps its sign and upper payload, made quiet (SPEC C16)."""
    u = x.to(tl.uint32, bitcast=True)
    nearest = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
    return tl.where((u & 0x7FFFFFFF) > 0x7F800000, (u >> 16) | 64, nearest).to(tl.uint16)


def _run(step: str, x: Tensor, out: Tensor, s: float = 0.0) -> None:
    flat = step != "silu_mul" and x.is_contiguous() and out.is_contiguous()
    width = out.numel() if flat else out.shape[-1]
    rows = out.numel() // width if width else 0
    parts = triton.cdiv(width, BLOCK)
    axes = (1, 0, 0, 1, 0, 0) if flat else (*(two_axes(x)), *(two_axes(out)))
    launch(_kernel, rows * parts, x, x, out, s, width, *axes, parts, STEP=step, BLOCK=BLOCK, overlap=True)


def silu(x: Tensor, *, out: Tensor) -> None:
    _run("silu", x, out)


def silu_mul(x: Tensor, *, out: Tensor) -> None:
    _run("silu_mul", x, out)


def relu2(x: Tensor, *, out: Tensor) -> None:
    _run("relu2", x, out)


def scale(x: Tensor, s: float, *, out: Tensor) -> None:
    _run("scale", x, out, s)


def convert(x: Tensor, dtype: torch.dtype, *, out: Tensor) -> None:
    _run("convert", x, out)
