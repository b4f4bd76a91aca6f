"""Rows in and out of caches on the GPU: one kernel, whose programs each move a piece of one row.

A bad index reads zeros and writes nothing: nobody looks at its value on the host."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgate.strides import two_axes
from narrowgate.tile.gpu_launch import flags, launch
from narrowgate.tile.gpu_math import round_to

BLOCK = 2048
_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _move_kernel(
    source, to, indices, flags, slots, stride_source, stride_to, s_inner, s_outer, s_step, t_inner, t_outer, t_step, stride_i,
    parts, TOTAL: tl.constexpr, WIDTH: tl.constexpr, FROM: tl.constexpr, FLAGGED: tl.constexpr, FLOAT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """FROM: indices choose the row read, and every row of `to` is written; else they choose the row written."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    e = (tl.program_id(0) % parts).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(indices + row * stride_i).to(tl.int64)
    live = (slot >= 0) & (slot < slots)
    read = live
    if FLAGGED:
        read = read & (tl.load(flags + row) != 0)
    ok = e < TOTAL
    at, put = e, e  # within a row
    if WIDTH != TOTAL:
        r, c = e // WIDTH, e % WIDTH
        at, put = r // s_inner * s_outer + r % s_inner * s_step + c, r // t_inner * t_outer + r % t_inner * t_step + c
    if FROM:
        x = tl.load(source + slot * stride_source + at, ok & read, other=0)
        to += row * stride_to
    else:
        x = tl.load(source + row * stride_source + at, ok & read, other=0)
        to += slot * stride_to
        ok = ok & live
    if FLOAT:
        x = round_to(x.to(tl.float32), to.dtype.element_ty)
    tl.store(to + put, x, ok)


def _move(source: Tensor, to: Tensor, indices: Tensor, choose_source: bool, has: Tensor | None = None) -> None:
    total, rows = to[0].numel() if to.shape[0] else 0, indices.shape[0]
    whole = all(t.shape[0] == 0 or t[0].is_contiguous() for t in (source, to))
    s, t = ((1, 0, 0), (1, 0, 0)) if whole else (two_axes(source[0]), two_axes(to[0]))
    parts = triton.cdiv(total, BLOCK)
    slots = source.shape[0] if choose_source else to.shape[0]
    launch(
        _move_kernel, rows * parts, to, source, to, indices, has, slots, source.stride(0), to.stride(0), *s, *t,
        indices.stride(0), parts, TOTAL=total, WIDTH=total if whole else to.shape[-1], FROM=choose_source,
        FLAGGED=has is not None, FLOAT=to.dtype.is_floating_point, BLOCK=BLOCK,
    )  # fmt: skip


def gather_state(cache: Tensor, indices: Tensor, has_initial_state: Tensor | None = None, *, out: Tensor) -> None:
    _move(cache, out, indices, True, flags(has_initial_state))


def scatter_state(cache: Tensor, rows: Tensor, indices: Tensor) -> None:
    _move(rows, cache, indices, False)


def select_rows(x: Tensor, indices: Tensor, *, out: Tensor) -> None:
    _move(_bytes(x), _bytes(out), indices, True)


def copy_rows(dst: Tensor, src: Tensor, indices: Tensor) -> None:
    _move(_bytes(src), _bytes(dst), indices, False)


def _bytes(t: Tensor) -> Tensor:
    return t.view(_BYTES[t.element_size()])
