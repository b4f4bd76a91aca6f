"""Tiles of rows whose sums do not depend on how the memory lies.

Triton picks the layout of a tile from what it knows of the addresses, and the layout is the order of a sum: a view that starts
four bytes later, or a state of another dtype, would sum a row in another order and give other bits. `steady` states the same
four columns a thread for every tile of rows; and where memory is not aligned for it, the mask of `columns` says nothing of its
own alignment, so that the same four columns are read one by one. That is a claim about layout, never about an access: the
compiler widens an access only as far as its mask allows."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from narrowgate.tile.gpu_special import inverse_root


@triton.jit
def steady(base, offsets):
    """base + offsets, [R, K] pointers with K contiguous, four columns a thread. (The sum is formed here because a hint sticks to
    the operation that made a value.)"""
    bytes: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    return tl.max_contiguous(tl.multiple_of(base + offsets, [1, 4 * bytes]), [1, 4])


@triton.jit
def single(base, offsets):
    """base + offsets, [C] pointers, one element a thread: what a thread stores it has read itself, at whatever offset."""
    bytes: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    return tl.max_contiguous(tl.multiple_of(base + offsets, [bytes]), [1])


@triton.jit
def columns(BLOCK: tl.constexpr, WIDTH: tl.constexpr, limit, ALIGNED: tl.constexpr):
    """(the columns [1, BLOCK], which of them exist). `limit` is WIDTH again, as a value that nothing is known about."""
    c = tl.arange(0, BLOCK)[None, :]
    if ALIGNED:
        return c, c < WIDTH
    else:
        return c, c < limit


@triton.jit
def inverse_norm(x, share, eps):
    """[R, BLOCK] -> [R, 1]: 1 / sqrt(share * sum x^2 + eps). The L2 norm's share is 1.0, the mean's one over the width."""
    return inverse_root(tl.sum(x * x, axis=1, keep_dims=True) * share + eps)


@triton.jit
def offset(row, inner, stride_outer, stride_inner):
    """Where a row starts whose number, 32 bits (a division of 64 costs as much as a norm), is that of two axes, the second of
    `inner` rows."""
    return (row // inner).to(tl.int64) * stride_outer + (row % inner).to(tl.int64) * stride_inner


def block(width: int) -> int:
    """Columns of a tile: a power of two, enough for the layout to be the same whatever the rows."""
    return max(16, triton.next_power_of_2(width))
