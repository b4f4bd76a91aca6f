"""Many tokens a sequence on the GPU, one after another: prefill in recurrent form, and the speculative step.

A program keeps its tile of the state in registers from the first token to the last. Prefill stores it once, speculation after
every token, rounded through the state's dtype each time, as a chain of single steps would. One launch; nothing is allocated."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from narrowgate.ops.gated_delta_rule import gpu_token as token
from narrowgate.tile.gpu_launch import flags, launch
from narrowgate.tile.gpu_math import bound, through
from narrowgate.tile.gpu_special import exp


@triton.jit
def _clamped(offsets, i, tokens):
    return tl.minimum(tl.maximum(tl.load(offsets + i).to(tl.int64), 0), tokens)


@token.unspecialized
def _sequence_kernel(
    q, k, v, g, beta, state, offsets, indices, fresh_or_accepted, out, scale, slots, tokens, sequences, column_count,
    heads, ratio, values, limit,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_gt, stride_bt,
    stride_s, stride_sh, stride_sv, stride_i, stride_ot, stride_oh,
    SNAPSHOTS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(values, BV)
    part, head = tl.program_id(0) % parts, tl.program_id(0) // parts % heads
    i = (tl.program_id(0) // (parts * heads)).to(tl.int64)
    inside, ok, vs, v_ok, ks, k_ok = token.tile(head, part, stride_sh, stride_sv, limit, K, values, BK, BV, ALIGNED)
    out += head * stride_oh + vs
    tokens = tokens.to(tl.int64)
    first, last = tokens * 0, tokens
    if offsets is not None:
        first = _clamped(offsets, i, tokens)
        last = tl.maximum(first, _clamped(offsets, i + 1, tokens))
        # rows outside every sequence are zero: the first program clears what lies before, the last what lies behind
        before = tl.where(i == 0, first, 0)
        behind = tl.where(i == sequences - 1, last, tokens)
        for t in range(0, bound(before)):
            token.store_column(out + t * stride_ot, tl.zeros([BV, 1], tl.float32), v_ok)
        for t in range(bound(behind), bound(tokens)):
            token.store_column(out + t * stride_ot, tl.zeros([BV, 1], tl.float32), v_ok)
    stop = last
    slot = i
    if SNAPSHOTS:
        accepted = tl.load(fresh_or_accepted + i).to(tl.int64)
        good = (accepted >= 1) & (accepted <= column_count)
        slot = tl.load(indices + i * stride_i + accepted - 1, good, other=-1).to(tl.int64)
        stop = tl.minimum(last, first + column_count)  # a request may have no more tokens than columns
    elif indices is not None:
        slot = tl.load(indices + i * stride_i).to(tl.int64)
    live = (slot >= 0) & (slot < slots)
    stop = tl.where(live, stop, first)
    keep = live
    if fresh_or_accepted is not None and not SNAPSHOTS:
        keep = keep & (tl.load(fresh_or_accepted + i) != 0)
    S = token.load(state + tl.where(live, slot, 0) * stride_s, inside, ok & keep)
    for t in range(bound(first), bound(stop)):
        k_t = token.load(k + t * stride_kt + head // ratio * stride_kh, ks, k_ok)
        q_t = token.load(q + t * stride_qt + head // ratio * stride_qh, ks, k_ok) * scale
        v_t = token.load_column(v + t * stride_vt + head * stride_vh + vs, v_ok)
        decay, beta_t = exp(tl.load(g + t * stride_gt + head)), tl.load(beta + t * stride_bt + head)
        S, o = token.advance(S, q_t, k_t, v_t, decay, beta_t)
        token.store_column(out + t * stride_ot, o, v_ok)
        if SNAPSHOTS:
            S = through(S, state.dtype.element_ty)
            to = tl.load(indices + i * stride_i + t - first).to(tl.int64)
            token.store(state + to * stride_s, inside, S, ok & (to >= 0) & (to < slots))
    for t in range(bound(stop), bound(last)):
        token.store_column(out + t * stride_ot, tl.zeros([BV, 1], tl.float32), v_ok)
    if not SNAPSHOTS:
        token.store(state + slot * stride_s, inside, S, ok & live)


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor | None, *,
    scale: float, state_indices: Tensor | None = None, has_initial_state: Tensor | None = None, out: Tensor,
) -> None:  # fmt: skip
    """`gated_delta_rule(form="recurrent")`."""
    sequences = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if sequences == 0:
        out.zero_()  # every row lies outside of every sequence
    _run(q, k, v, g, beta, state, cu_seqlens, state_indices, flags(has_initial_state), out, scale, sequences, snapshots=False)


def gated_delta_rule_speculative_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor, state_indices: Tensor,
    num_accepted: Tensor, *, scale: float, out: Tensor,
) -> None:  # fmt: skip
    sequences = num_accepted.shape[0]
    if sequences == 0:
        out.zero_()
    _run(q, k, v, g, beta, state, cu_seqlens, state_indices, num_accepted, out, scale, sequences, snapshots=True)


def _run(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor | None, indices: Tensor | None,
    third: Tensor | None, out: Tensor, scale: float, sequences: int, snapshots: bool,
) -> None:  # fmt: skip
    programs, constants = token.shape(state, q, k)
    launch(
        _sequence_kernel, sequences * programs, q, q, k, v, g, beta, state, cu_seqlens, indices, third, out, scale,
        state.shape[0], q.shape[0], sequences, indices.shape[-1] if snapshots and indices is not None else 0,
        v.shape[1], v.shape[1] // q.shape[1], *state.shape[2:], *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], g.stride(0),
        beta.stride(0), *state.stride()[:3], 0 if indices is None else indices.stride(0), *out.stride()[:2],
        SNAPSHOTS=snapshots, **constants,
    )  # fmt: skip
