"""The rule once more, in float64 and plain loops, for the cases to be held to; and the wrong readings of it.

It shares no code with the reference. `wrong` names a rival reading (SPEC R); each is one line below."""

from __future__ import annotations

import torch
from torch import Tensor


def token(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, wrong: str = ""
) -> tuple[Tensor, Tensor]:
    """One token, all heads: S [Hv, V, K], q, k [Hk, K], v [Hv, V], g, beta [Hv], float64. Returns (o, new S)."""
    o, new = [], []
    for h in range(v.shape[0]):
        h_k = h % q.shape[0] if wrong == "heads tiled" else h // (v.shape[0] // q.shape[0])
        q_h, k_h, s = q[h_k] * scale, k[h_k], S[h]
        if wrong == "k scaled too":
            k_h = k_h * scale
        if wrong == "state [k][v]":
            s = s.t().reshape(s.shape) if s.shape[0] != s.shape[1] else s.t()
        decay = torch.exp(g[h])
        if wrong == "read before decay":
            read = s @ k_h
            s = s * decay
        else:
            s = s * decay
            read = s @ k_h
        if wrong == "output before write":
            o.append(s @ q_h)
        s = s + torch.outer((v[h] - read) * beta[h], k_h)
        if wrong != "output before write":
            o.append(s @ q_h)
        new.append(s)
    return torch.stack(o), torch.stack(new)


def rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor | None = None, *,
    scale: float, state_indices: Tensor | None = None, has_initial_state: Tensor | None = None, form: str = "",
    wrong: str = "",
) -> dict[str, Tensor]:  # fmt: skip
    """Prefill: {"o": [T, Hv, V], "state": all slots}, float64."""
    ends = [0, q.shape[0]] if cu_seqlens is None else cu_seqlens.tolist()
    q, k, v, g, beta, slots = (t.double() for t in (q, k, v, g, beta, state.clone()))
    o = torch.zeros(v.shape, dtype=torch.float64)
    for i in range(len(ends) - 1):
        slot = i if state_indices is None else int(state_indices[i])
        if slot < 0:
            continue
        S = slots[slot].clone()
        if has_initial_state is not None and not bool(has_initial_state[i]) and wrong != "stale state":
            S = torch.zeros_like(S)
        for t in range(ends[i], ends[i + 1]):
            if wrong == "carry forgotten" and t > ends[i] and (t - ends[i]) % 64 == 0:
                S = torch.zeros_like(S)
            o[t], S = token(S, q[t], k[t], v[t], g[t], beta[t], scale, wrong)
        slots[slot] = S
    return {"o": o, "state": slots}


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, scale: float,
    state_indices: Tensor | None = None, wrong: str = "",
) -> dict[str, Tensor]:  # fmt: skip
    """One token a row: {"o": [B, Hv, V], "state": all slots}, float64; the state is rounded to its dtype."""
    rows = torch.arange(q.shape[0] + 1)
    if state_indices is not None and wrong == "slot 0 is no slot":
        state_indices = torch.where(state_indices == 0, -1, state_indices)
    found = rule(q, k, v, g, beta, state, rows, scale=scale, state_indices=state_indices, wrong=wrong)
    found["state"] = found["state"].to(state.dtype).double()
    return found
