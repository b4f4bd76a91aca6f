"""The gates on the GPU, in float32 throughout."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from narrowgate.tile.gpu_launch import launch
from narrowgate.tile.gpu_special import exp, log_decay, sigmoid

BLOCK = 256


@triton.jit
def gate(
    part,
    a,
    b,
    A_log,
    dt_bias,
    g,
    beta,
    tokens,
    stride_a,
    stride_b,
    stride_A,
    stride_dt,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK values of both gates, whose outputs are contiguous."""
    i = part.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = i < tokens * HEADS
    t, h = i // HEADS, i % HEADS
    neg_a = -exp(tl.load(A_log + h * stride_A, ok, other=0.0).to(tl.float32))
    x, dt = tl.load(a + t * stride_a + h, ok, other=0.0), tl.load(dt_bias + h * stride_dt, ok, other=0.0)
    tl.store(g + i, log_decay(x, dt, neg_a), ok)
    tl.store(beta + i, sigmoid(tl.load(b + t * stride_b + h, ok, other=0.0).to(tl.float32)), ok)


@triton.jit
def _gate_kernel(
    a, b, A_log, dt_bias, g, beta, tokens, stride_a, stride_b, stride_A, stride_dt, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    gate(tl.program_id(0), a, b, A_log, dt_bias, g, beta, tokens, stride_a, stride_b, stride_A, stride_dt, HEADS, BLOCK)


@triton.jit
def _decay_kernel(alpha, dt_bias, neg_a, g, tokens, stride_a, stride_dt, stride_n, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = i < tokens * HEADS
    t, h = i // HEADS, i % HEADS
    x, dt = tl.load(alpha + t * stride_a + h, ok, other=0.0), tl.load(dt_bias + h * stride_dt, ok, other=0.0)
    n = tl.load(neg_a + h * stride_n, ok, other=0.0).to(tl.float32)
    tl.store(g + i, log_decay(x, dt, n), ok)


def gdn_gate(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, out: tuple[Tensor, Tensor]) -> None:
    launch(
        _gate_kernel, triton.cdiv(a.numel(), BLOCK), a, a, b, A_log, dt_bias, *out, a.shape[0], a.stride(0), b.stride(0),
        A_log.stride(0), dt_bias.stride(0), HEADS=a.shape[1], BLOCK=BLOCK,
    )  # fmt: skip


def gdn_decay(alpha: Tensor, dt_bias: Tensor, neg_a: Tensor, *, out: Tensor) -> None:
    launch(
        _decay_kernel, triton.cdiv(alpha.numel(), BLOCK), alpha, alpha, dt_bias, neg_a, out, alpha.shape[0], alpha.stride(0),
        dt_bias.stride(0), neg_a.stride(0), HEADS=alpha.shape[1], BLOCK=BLOCK,
    )  # fmt: skip
