"""The rule once more, in float64 and plain loops, for the cases to be held to; and the wrong readings of it.

It shares no code with the reference. `wrong` names a rival reading (SPEC R); each is a line or two below."""

from __future__ import annotations

import torch
from torch import Tensor


def token(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, wrong: str = ""
) -> tuple[Tensor, Tensor]:
    """One token: S [Hv, V, K], q, k [Hk, K], v [Hv, V], g, beta [Hv], all float64. Returns (o, new S)."""
    heads = torch.arange(v.shape[0])
    heads = heads % q.shape[0] if wrong == "heads tiled" else heads // (v.shape[0] // q.shape[0])
    q, k = q[heads] * scale, k[heads]
    if wrong == "k scaled too":
        k = k * scale
    if wrong == "q not scaled":
        q = q / scale
    if wrong == "q scaled twice":
        q = q * scale
    if wrong == "state [k][v]":
        S = S.reshape(S.shape[0], S.shape[2], S.shape[1]).transpose(1, 2)
    decay = g.exp()[:, None, None]
    if wrong == "gate of 1 zeroed":
        decay = torch.where(g[:, None, None] >= 0, 0.0, decay)
    read = ((S if wrong == "read before decay" else S * decay) * k[:, None, :]).sum(-1)
    new = S * decay + ((v - read) * beta[:, None])[:, :, None] * k[:, None, :]
    o = ((S * decay if wrong == "output before write" else new) * q[:, None, :]).sum(-1)
    if wrong == "state [k][v]":
        new = new.transpose(1, 2).reshape(new.shape[0], new.shape[1], new.shape[2])
    return o, new


def rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor | None = None, *,
    scale: float, state_indices: Tensor | None = None, has_initial_state: Tensor | None = None, form: str = "",
    out: Tensor | None = None, wrong: str = "",
) -> dict[str, Tensor]:  # fmt: skip
    """Prefill: {"o" (or "out"): [T, Hv, V], "state": all slots}, float64."""
    ends = [0, q.shape[0]] if cu_seqlens is None else cu_seqlens.tolist()
    q, k, v, g, beta, slots = (t.double() for t in (q, k, v, g, beta, state.clone()))
    o = torch.zeros(v.shape, dtype=torch.float64)
    for i in range(len(ends) - 1):
        slot = i if state_indices is None else int(state_indices[i])
        if wrong == "slot 0 is no slot" and slot == 0:
            continue
        if slot < 0 and wrong != "-1 is the last slot":
            continue
        S = slots[slot].clone()
        if has_initial_state is not None and not bool(has_initial_state[i]) and wrong != "stale state":
            S = torch.zeros_like(S)
        for t in range(ends[i], ends[i + 1]):
            if wrong == "carry forgotten" and t > ends[i] and (t - ends[i]) % 64 == 0:
                S = torch.zeros_like(S)
            o[t], S = token(S, q[t], k[t], v[t], g[t], beta[t], scale, wrong)
            if wrong == "rounded every token":
                S = S.bfloat16().double()
        slots[i if wrong == "indexed by row" else slot] = S
        if wrong == "tail reads on" and (ends[i + 1] - ends[i]) % 64 and ends[i + 1] < len(q):
            t = ends[i + 1]  # a chunk's tail that is not masked takes in the next sequence's token
            slots[slot] = token(S, q[t], k[t], v[t], g[t], beta[t], scale)[1]
        if wrong == "tail decays to zero" and (ends[i + 1] - ends[i]) % 64:
            slots[slot] = S * 0.5
    return {"o" if out is None else "out": o, "state": slots}


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, scale: float,
    state_indices: Tensor | None = None, out: Tensor | None = None, wrong: str = "",
) -> dict[str, Tensor]:  # fmt: skip
    """One token a row: {"o" (or "out"): [B, Hv, V], "state": all slots}, float64; the state is rounded to its dtype."""
    rows = torch.arange(q.shape[0] + 1)
    found = rule(q, k, v, g, beta, state, rows, scale=scale, state_indices=state_indices, out=out, wrong=wrong)
    found["state"] = found["state"].to(state.dtype).double()
    if wrong == "output from the rounded state":
        again = rule(q, k, v, g, beta, state, rows, scale=scale, state_indices=state_indices)["state"].to(state.dtype)
        for i in range(q.shape[0]):
            slot = i if state_indices is None else int(state_indices[i])
            heads = torch.arange(v.shape[1]) // (v.shape[1] // q.shape[1])
            if slot >= 0:
                reads = again[slot].double() * (q[i].double()[heads] * scale)[:, None, :]
                found["o" if out is None else "out"][i] = reads.sum(-1)
    return found


def packed(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor, state_indices: Tensor, *,
    scale: float, round_beta: bool = True, out: Tensor | None = None, wrong: str = "",
) -> dict[str, Tensor]:  # fmt: skip
    """Decode from rows of [q | k | v]: q and k normalized, never rounded; beta rounded through b's dtype."""
    _, heads, values, keys = state.shape
    width = (mixed_qkv.shape[1] - heads * values) // 2
    q, k, v = (t.double() for t in mixed_qkv.split([width, width, heads * values], dim=1))
    if wrong == "k before q":
        q, k = k, q
    q, k = (t.reshape(len(t), width // keys, keys) for t in (q, k))
    v = v.reshape(len(v), heads, values)
    if wrong == "eps after the root":
        q, k = (t / (t.pow(2).sum(-1, keepdim=True).sqrt() + 1e-6) for t in (q, k))
    else:
        q, k = (t / (t.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    if wrong == "norm rounded":
        q, k = q.to(mixed_qkv.dtype).double(), k.to(mixed_qkv.dtype).double()
    x = a.double() + dt_bias.double()
    g = -A_log.double().exp() * torch.where(x > 20, x, torch.log1p(x.clamp(max=20).exp()))
    beta = torch.sigmoid(b.double())
    if round_beta != (wrong == "beta rounding swapped"):
        beta = beta.to(b.dtype).double()
    if wrong == "a and b swapped":
        beta = torch.sigmoid(a.double())
    inner = wrong if wrong in ("output from the rounded state", "heads tiled", "state [k][v]", "slot 0 is no slot") else ""
    return step(q, k, v, g, beta, state, scale=scale, state_indices=state_indices, out=out, wrong=inner)


def speculative(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor, state_indices: Tensor,
    num_accepted: Tensor, *, scale: float, out: Tensor | None = None, wrong: str = "",
) -> dict[str, Tensor]:  # fmt: skip
    """Drafted tokens with a snapshot after each: {"o": [T, Hv, V], "state": all slots}, float64."""
    dtype, slots = state.dtype, state.double()
    o = torch.zeros(v.shape, dtype=torch.float64)
    q, k, v, g, beta = (t.double() for t in (q, k, v, g, beta))
    ends, columns = cu_seqlens.tolist(), state_indices.tolist()
    for i, accepted in enumerate(num_accepted.tolist()):
        n = ends[i + 1] - ends[i]
        first = {"start from column 0": 0, "start at accepted": min(accepted, len(columns[i]) - 1)}.get(wrong, accepted - 1)
        if n == 0 or columns[i][first] < 0:
            continue
        if wrong == "start read late" and n >= accepted:  # by then it holds a snapshot: as if the tokens came twice
            S = slots[columns[i][first]].clone()
            for t in range(ends[i], ends[i] + accepted):
                S = token(S, q[t], k[t], v[t], g[t], beta[t], scale)[1]
            slots[columns[i][first]] = S
        S = slots[columns[i][first]].clone()
        for j in range(n):
            t = ends[i] + j
            o[t], S = token(S, q[t], k[t], v[t], g[t], beta[t], scale)
            if wrong != "rounded at the end":
                S = S.to(dtype).double()
            if columns[i][j] >= 0:
                slots[columns[i][j]] = S.to(dtype).double()
            elif wrong == "-1 ends the snapshots":
                break
    return {"o" if out is None else "out": o, "state": slots}
