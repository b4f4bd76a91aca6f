"""One token a row on the GPU, in one launch, in place over the pool of states: the step, and the packed step.

A program takes one tile of one head of one row. Nothing is allocated; a row whose slot is none, or out of the pool, is zero."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from narrowgate.ops.gated_delta_rule import gpu_token as token
from narrowgate.tile.gpu_launch import follow, launch
from narrowgate.tile.gpu_math import through
from narrowgate.tile.gpu_special import exp, log_decay, sigmoid
from narrowgate.tile.gpu_sums import inverse_norm


@triton.jit
def _program(indices, stride_i, slots, HV: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, INDEXED: tl.constexpr):
    """Of a grid (row, head, part), parts innermost: the row, the head, the part, the row's slot and whether it has one."""
    parts: tl.constexpr = (V + BV - 1) // BV
    part, head = tl.program_id(0) % parts, tl.program_id(0) // parts % HV
    row = (tl.program_id(0) // (parts * HV)).to(tl.int64)
    slot = tl.load(indices + row * stride_i).to(tl.int64) if INDEXED else row
    return row, head, part, slot, (slot >= 0) & (slot < slots)


@triton.jit(do_not_specialize=["limit"])
def _step_kernel(
    q, k, v, g, beta, state, indices, out, scale, slots, limit,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_gt, stride_bt,
    stride_s, stride_sh, stride_sv, stride_i, stride_ot, stride_oh,
    RATIO: tl.constexpr, INDEXED: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, ALIGNED: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    follow(FOLLOWS)
    row, head, part, slot, live = _program(indices, stride_i, slots, HV, V, BV, INDEXED)
    inside, ok, vs, v_ok, ks, k_ok = token.tile(head, part, stride_sh, stride_sv, limit, K, V, BK, BV, ALIGNED)
    to = out + row * stride_ot + head * stride_oh + vs
    if live:
        S = token.load(state + slot * stride_s, inside, ok)
        k_t = token.load(k + row * stride_kt + head // RATIO * stride_kh, ks, k_ok)
        q_t = token.load(q + row * stride_qt + head // RATIO * stride_qh, ks, k_ok) * scale
        v_t = token.load_column(v + row * stride_vt + head * stride_vh + vs, v_ok)
        decay, beta_t = exp(tl.load(g + row * stride_gt + head)), tl.load(beta + row * stride_bt + head)
        S, o = token.advance(S, q_t, k_t, v_t, decay, beta_t)
        token.store_column(to, o, v_ok)
        token.store(state + slot * stride_s, inside, S, ok)
    else:
        token.store_column(to, tl.zeros([BV, 1], tl.float32), v_ok)


@triton.jit(do_not_specialize=["limit"])
def _packed_step_kernel(
    mixed, a, b, A_log, dt_bias, state, indices, out, scale, slots, limit,
    stride_m, stride_a, stride_b, stride_A, stride_dt, stride_s, stride_sh, stride_sv, stride_i, stride_ot, stride_oh,
    RATIO: tl.constexpr, ROUND_BETA: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, ALIGNED: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    follow(FOLLOWS)
    row, head, part, slot, live = _program(indices, stride_i, slots, HV, V, BV, True)
    inside, ok, vs, v_ok, ks, k_ok = token.tile(head, part, stride_sh, stride_sv, limit, K, V, BK, BV, ALIGNED)
    to = out + row * stride_ot + head * stride_oh + vs
    if live:
        S = token.load(state + slot * stride_s, inside, ok)
        HK: tl.constexpr = HV // RATIO
        q_t = token.load(mixed + row * stride_m + head // RATIO * limit, ks, k_ok)
        k_t = token.load(mixed + row * stride_m + (HK + head // RATIO) * limit, ks, k_ok)
        v_t = token.load_column(mixed + row * stride_m + 2 * HK * limit + head * V + vs, v_ok)
        q_t = q_t * (inverse_norm(q_t, 1.0, 1e-6) * scale)  # never rounded through the activations' dtype
        k_t = k_t * inverse_norm(k_t, 1.0, 1e-6)
        neg_a = -exp(tl.load(A_log + head * stride_A).to(tl.float32))
        g = log_decay(tl.load(a + row * stride_a + head), tl.load(dt_bias + head * stride_dt), neg_a)
        beta_t = sigmoid(tl.load(b + row * stride_b + head).to(tl.float32))
        if ROUND_BETA:
            beta_t = through(beta_t, b.dtype.element_ty)
        S, o = token.advance(S, q_t, k_t, v_t, exp(g), beta_t)
        token.store_column(to, o, v_ok)
        token.store(state + slot * stride_s, inside, S, ok)
    else:
        token.store_column(to, tl.zeros([BV, 1], tl.float32), v_ok)


def gated_delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, scale: float,
    state_indices: Tensor | None = None, out: Tensor,
) -> None:  # fmt: skip
    rows, indexed = q.shape[0], state_indices is not None
    indices = g if state_indices is None else state_indices
    programs, constants = token.shape(state, q, k)
    launch(
        _step_kernel, rows * programs, q, q, k, v, g, beta, state, indices, out, scale, state.shape[0], state.shape[3],
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], g.stride(0), beta.stride(0), *state.stride()[:3], indices.stride(0),
        *out.stride()[:2], RATIO=v.shape[1] // q.shape[1], INDEXED=indexed, HV=v.shape[1], V=v.shape[2], **constants, overlap=True,
    )  # fmt: skip


def gated_delta_rule_packed_step(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor, state_indices: Tensor, *,
    scale: float, round_beta: bool = True, out: Tensor,
) -> None:  # fmt: skip
    rows, (slots, heads, values, keys) = mixed_qkv.shape[0], state.shape
    programs, constants = token.shape(state, mixed_qkv)
    launch(
        _packed_step_kernel, rows * programs, mixed_qkv, mixed_qkv, a, b, A_log, dt_bias, state, state_indices, out, scale,
        slots, keys, mixed_qkv.stride(0), a.stride(0), b.stride(0), A_log.stride(0), dt_bias.stride(0), *state.stride()[:3],
        state_indices.stride(0), *out.stride()[:2], RATIO=heads * 2 * keys // (mixed_qkv.shape[1] - heads * values),
        ROUND_BETA=round_beta, HV=heads, V=values, **constants, overlap=True,
    )  # fmt: skip
