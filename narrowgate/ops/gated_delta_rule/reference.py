"""The gated delta rule token by token, to be read. Prefill in recurrent form, the single step and all that is built on it
share one function, `advance`, so that they give the same bits.

What makes that hold: every sum runs over the contiguous last axis of a freshly made product, where torch's order depends
on nothing but the length; products and sums are rounded apart; exp is rounded once from float64. A matmul would choose its
order by the batch size. The chunk form is in chunk.py."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.ops import rounded, sequences
from narrowgate.ops.gated_delta_rule import chunk


def advance(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One token of each row: decay, read, write, read out. `state` [n, Hv, V, K] float32 is changed in place.

    q (already scaled), k: [n, Hk, K]; v: [n, Hv, V]; g (log decay), beta: [n, Hv]; float32. Returns [n, Hv, V]."""
    return advance_decayed(state, q, k, v, rounded.exp(g), beta)


def advance_decayed(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    ratio = v.shape[1] // q.shape[1]
    q = q.repeat_interleave(ratio, dim=1)[:, :, None, :]  # value head h reads key head h // ratio
    k = k.repeat_interleave(ratio, dim=1)[:, :, None, :]
    state *= decay[..., None, None]
    missing = (v - (state * k).sum(-1)) * beta[..., None]
    state += missing[..., None] * k
    return (state * q).sum(-1)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor | None, *,
    scale: float, state_indices: Tensor | None = None, has_initial_state: Tensor | None = None,
    form: str = "auto", out: Tensor,
) -> None:  # fmt: skip
    tokens, n = q.shape[0], sequences.count(cu_seqlens)
    spans = sequences.spans(cu_seqlens, tokens)
    slots = sequences.live_slots(state_indices, n, state.shape[0])
    keeps = sequences.flags(has_initial_state, n)
    live = [i for i in range(n) if slots[i] is not None]
    live.sort(key=lambda i: spans[i][0] - spans[i][1])  # longest first, so that those still running are a prefix
    where = torch.tensor([slots[i] for i in live], dtype=torch.long, device=q.device)
    fresh = torch.tensor([not keeps[i] for i in live], dtype=torch.bool, device=q.device)
    running = state[where].masked_fill(fresh[:, None, None, None], 0.0)
    result = torch.zeros(v.shape, device=q.device)
    prefill = _recurrent if form == "recurrent" else chunk.prefill
    prefill(q.float() * scale, k.float(), v.float(), g, beta, running, [spans[i] for i in live], result)
    out.copy_(result)
    state[where] = running


def _recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, spans: list[sequences.Span], out: Tensor
) -> None:
    """All sequences side by side, one token of each at a time; `state` [n, ...] goes with `spans`, longest first."""
    starts = torch.tensor([a for a, _ in spans], dtype=torch.long, device=q.device)
    lengths = [b - a for a, b in spans]
    active = len(spans)
    for t in range(max(lengths, default=0)):
        while lengths[active - 1] <= t:
            active -= 1
        rows = starts[:active] + t
        out[rows] = advance(state[:active], q[rows], k[rows], v[rows], g[rows], beta[rows])


def gated_delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, scale: float,
    state_indices: Tensor | None = None, out: Tensor,
) -> None:  # fmt: skip
    rows = torch.arange(q.shape[0], device=q.device)
    slots = rows if state_indices is None else state_indices.long()
    live = sequences.live_mask(slots, state.shape[0])
    rows, slots = rows[live], slots[live]
    running = state[slots].float()
    result = torch.zeros(v.shape, device=q.device)
    result[rows] = advance(running, q[rows].float() * scale, k[rows].float(), v[rows].float(), g[rows], beta[rows])
    out.copy_(result)
    state[slots] = running.to(state.dtype)


def gated_delta_rule_packed_step(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor, state_indices: Tensor, *,
    scale: float, round_beta: bool = True, out: Tensor,
) -> None:  # fmt: skip
    _, heads, values, keys = state.shape
    live = sequences.live_mask(state_indices, state.shape[0])
    slots = state_indices[live].long()
    width = (mixed_qkv.shape[1] - heads * values) // 2
    q, k, v = mixed_qkv[live].float().split([width, width, heads * values], dim=1)
    q, k = q.unflatten(1, (-1, keys)), k.unflatten(1, (-1, keys))
    q, k = q * (_inverse_norm(q) * scale), k * _inverse_norm(k)
    softplus = rounded.softplus64(a[live].double() + dt_bias.double())
    decay = torch.exp(-torch.exp(A_log.double()) * softplus).float()
    beta = rounded.sigmoid(b[live])
    if round_beta:
        beta = beta.to(b.dtype).float()
    running = state[slots].float()
    result = torch.zeros(out.shape, device=out.device)
    result[live] = advance_decayed(running, q, k, v.unflatten(1, (heads, values)), decay, beta)
    out.copy_(result)
    state[slots] = running.to(state.dtype)


def _inverse_norm(x: Tensor) -> Tensor:
    return 1.0 / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def gated_delta_rule_speculative_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor, state_indices: Tensor,
    num_accepted: Tensor, *, scale: float, out: Tensor,
) -> None:  # fmt: skip
    q, k, v = q.float() * scale, k.float(), v.float()
    requests = []  # (length, first token, start slot, snapshot slots)
    spans = sequences.spans(cu_seqlens, q.shape[0])
    for (a, b), columns, accepted in zip(spans, state_indices.tolist(), num_accepted.tolist(), strict=True):
        start = columns[accepted - 1] if 1 <= accepted <= len(columns) else -1
        if b > a and 0 <= start < state.shape[0]:
            requests.append((min(b - a, len(columns)), a, start, columns))
    requests.sort(key=lambda r: -r[0])  # longest first, so that those still running are a prefix
    running = state[[r[2] for r in requests]].float()  # every start is read before anything is stored
    result = torch.zeros(v.shape, device=q.device)
    for t in range(requests[0][0] if requests else 0):
        active = [r for r in requests if r[0] > t]
        rows = torch.tensor([r[1] + t for r in active], device=q.device)
        now = running[: len(active)]
        result[rows] = advance(now, q[rows], k[rows], v[rows], g[rows], beta[rows])
        stored = now.to(state.dtype)
        now.copy_(stored)  # go on from what was stored, as a chain of single steps does
        keep = [i for i, r in enumerate(active) if 0 <= r[3][t] < state.shape[0]]
        state[[active[i][3][t] for i in keep]] = stored[keep]
    out.copy_(result)
