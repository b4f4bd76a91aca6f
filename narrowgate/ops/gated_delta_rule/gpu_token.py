"""One token of the gated delta rule on a tile of the state: the only place where it is computed token by token.

A program owns rows v0..v0+BV of one head's state, all K columns, in the registers of one warp: what it reads it alone writes,
so a step works in place, and a speculative one has read its start before it stores a snapshot. Products and sums are rounded
apart (the launches forbid fusing), sums over k have one order for every state dtype, batch size and form (tile/gpu_sums.py):
so prefill in recurrent form, the step, and the speculative step give the same bits. Left out: q's and k's norms, the gates."""

# mypy: allow-untyped-defs
from __future__ import annotations

import inspect
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from narrowgate.strides import aligned
from narrowgate.tile.gpu_math import round_to
from narrowgate.tile.gpu_sums import block, columns, steady


def unspecialized(function: Any) -> Any:
    """triton.jit, but for no value of an argument anew: what a kernel has to know of its addresses, `steady` says."""
    names = [n for n, p in inspect.signature(function).parameters.items() if "constexpr" not in str(p.annotation)]
    return triton.jit(function, do_not_specialize=names)


@triton.jit
def advance(S, q, k, v, decay, beta):
    """S [BV, BK]; q (scaled) and k [1, BK]; v [BV, 1]; decay, beta scalars; float32. Returns the new S and o [BV, 1]."""
    S = S * decay
    missing = (v - tl.sum(S * k, axis=1, keep_dims=True)) * beta
    S = S + missing * k
    return S, tl.sum(S * q, axis=1, keep_dims=True)


@triton.jit
def tile(
    head,
    part,
    stride_h,
    stride_v,
    limit,
    K: tl.constexpr,
    V,
    BK: tl.constexpr,
    BV: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Offsets [BV, BK] of a tile within a slot, which of them exist, its rows v [BV, 1] and columns k [1, BK] with their masks."""
    k, k_ok = columns(BK, K, limit, ALIGNED)
    v = (part * BV + tl.arange(0, BV))[:, None]
    v_ok = v < V
    return head.to(tl.int64) * stride_h + v.to(tl.int64) * stride_v + k, v_ok & k_ok, v, v_ok, k, k_ok


@triton.jit
def load(base, offsets, mask):
    return tl.load(steady(base, offsets), mask, other=0.0).to(tl.float32)


@triton.jit
def store(base, offsets, S, mask):
    tl.store(steady(base, offsets), round_to(S, base.dtype.element_ty), mask)


@triton.jit
def load_column(pointers, mask):
    """[BV, 1]: v of a token."""
    return tl.load(pointers, mask, other=0.0).to(tl.float32)


@triton.jit
def store_column(pointers, o, mask):
    tl.store(pointers, round_to(o, pointers.dtype.element_ty), mask)


TILE = 512  # values of a tile: few registers, many programs (measured, see README)


def shape(state: Tensor, *also_read: Tensor) -> tuple[int, dict[str, Any]]:
    """(programs a row, the constants of a launch) for one token or one sequence a row. Neither the tile's height nor K changes a
    bit: where memory is not aligned, the kernels do not use K."""
    _, heads, values, keys = state.shape
    bk = block(keys)
    bv = max(1, TILE // bk)
    even = aligned(state, *also_read)
    constants = {"K": keys if even else bk, "BK": bk, "BV": bv, "ALIGNED": even}
    return heads * triton.cdiv(values, bv), {**constants, "num_warps": 1, "num_stages": 1}
