"""The convolution's step and what follows it in one launch on the GPU: `causal_conv1d_step` (silu) and `gdn_post_conv`, bit for bit.

A program takes rows of q and k, channels of v, or gates, as in `gdn_post_conv`; it convolves what it takes and replaces those taps,
which nobody else reads. Rows without a slot are convolved to zeros, as an output that the step allocates."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from narrowgate.ops.causal_conv1d.gpu import convolved, shift, window
from narrowgate.ops.gates.gpu import BLOCK as GATES
from narrowgate.ops.gates.gpu import gate
from narrowgate.ops.norms.gpu import shape
from narrowgate.tile.gpu_launch import follow, launch
from narrowgate.tile.gpu_math import round_to, through
from narrowgate.tile.gpu_special import silu
from narrowgate.tile.gpu_sums import inverse_norm, steady

CHANNELS = 512  # of v, that a program takes


@triton.jit
def _convolve(x, taps, weight, c, ok, stride_c, stride_w, W: tl.constexpr, STEADY: tl.constexpr):
    """What `causal_conv1d_step` stores for channels c, as float32; their taps are replaced."""
    found = window(x, taps, c, ok, stride_c, W, STEADY)
    y = convolved(tl.zeros(c.shape, tl.float32), found, weight, c, ok, stride_w, W, STEADY)
    tl.debug_barrier()
    shift(found, taps, c, ok, stride_c, W, STEADY)
    return through(silu(y), x.dtype.element_ty)


@triton.jit(do_not_specialize=["limit"])
def _kernel(
    mixed, weight, taps, indices, q, k, v, a, b, A_log, dt_bias, g, beta, rows, slots, limit, eps,
    stride_m, stride_w, stride_t, stride_c, stride_i, stride_a, stride_b, stride_A, stride_dt,
    W: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, VALUES: tl.constexpr, GATES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    follow(FOLLOWS)
    NORMS: tl.constexpr = (2 * HK + ROWS - 1) // ROWS
    PARTS: tl.constexpr = NORMS + (HV * V + VALUES - 1) // VALUES
    row, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    if row < rows:
        slot = tl.load(indices + row * stride_i).to(tl.int64)
        live = (slot >= 0) & (slot < slots)
        taps += tl.where(live, slot, 0) * stride_t
        x = mixed + row * stride_m
        if part < NORMS:
            head, i = (part * ROWS + tl.arange(0, ROWS))[:, None], tl.arange(0, BLOCK)[None, :]
            there = (head < 2 * HK) & (i < limit)
            y = _convolve(x, taps, weight, head * K + i, there & live, stride_c, stride_w, W, True)
            y = round_to(y * inverse_norm(y, 1.0, eps), mixed.dtype.element_ty)
            tl.store(steady(q, (row * HK + head) * K + i), y, there & (head < HK))
            tl.store(steady(k, (row * HK + head - HK) * K + i), y, there & (head >= HK))
        else:
            d = (part - NORMS) * VALUES + tl.arange(0, VALUES)
            values = _convolve(x, taps, weight, 2 * HK * K + d, (d < HV * V) & live, stride_c, stride_w, W, False)
            tl.store(v + row * (HV * V) + d, round_to(values, mixed.dtype.element_ty), d < HV * V)
    else:
        gate(
            tl.program_id(0) - rows * PARTS,
            a,
            b,
            A_log,
            dt_bias,
            g,
            beta,
            rows,
            stride_a,
            stride_b,
            stride_A,
            stride_dt,
            HV,
            GATES,
        )


def conv_and_post(
    mixed: Tensor, weight: Tensor, taps: Tensor, state_indices: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *,
    num_k_heads: int, head_k_dim: int, head_v_dim: int, eps: float = 1e-6, out: tuple[Tensor, ...],
) -> None:  # fmt: skip
    """`out`: q, k, v, g, beta, contiguous, as `gdn_post_conv` gives them."""
    rows, heads = a.shape
    constants = shape(head_k_dim, 1)
    programs = triton.cdiv(2 * num_k_heads, constants["ROWS"]) + triton.cdiv(heads * head_v_dim, CHANNELS)
    q, k, v, g, beta = out
    launch(
        _kernel, rows * programs + triton.cdiv(rows * heads, GATES), mixed, mixed, weight, taps, state_indices, q, k, v, a, b, A_log,
        dt_bias, g, beta, rows, taps.shape[0], head_k_dim, eps, mixed.stride(0), weight.stride(0), *taps.stride()[:2],
        state_indices.stride(0), a.stride(0), b.stride(0), A_log.stride(0), dt_bias.stride(0), W=weight.shape[1], HK=num_k_heads,
        HV=heads, K=head_k_dim, V=head_v_dim, VALUES=CHANNELS, GATES=GATES, overlap=True, **constants,
    )  # fmt: skip
