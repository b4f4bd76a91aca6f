"""The gated delta rule 64 tokens at a time, to be read. The derivation is in this folder's README.

Inside a chunk everything is matrix products and one triangular solve, for all chunks of a sequence at once; only the state
goes from chunk to chunk. A sequence's last, shorter chunk is computed at its own length: nothing is padded, so nothing
can leak from padding. Sequences are taken one after another, so a sequence's bits do not depend on its neighbours.

Decays are differences of running sums of g. The sums are kept in float64: after one token of g = -90 the differences of
later tokens would have lost four digits in float32. Entries above the diagonal are set to -inf before exp, so that
none overflows."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64
_GONE = -1e4  # exp of it is 0 in float32, but sums and differences of it are finite (those of -inf would be NaN)


def prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, spans: list[tuple[int, int]], out: Tensor
) -> None:
    """q (already scaled), k: [T, Hk, K]; v, out: [T, Hv, V]; g, beta: [T, Hv]; all float32. `state` [n, Hv, V, K] float32,
    one row a span, is changed in place."""
    ratio = v.shape[1] // q.shape[1]
    for (start, end), row in zip(spans, state, strict=True):
        whole = start + (end - start) // CHUNK * CHUNK
        for a, b, size in ((start, whole, CHUNK), (whole, end, end - whole)):
            if b > a:
                heads = [_chunks(t[a:b], size) for t in (q, k, v)]
                q_, k_ = (t.repeat_interleave(ratio, dim=0) for t in heads[:2])
                gates = [t[a:b].t().unflatten(1, (-1, size)) for t in (g, beta)]
                y = _run(q_, k_, heads[2], gates[0], gates[1], row)
                out[a:b] = y.flatten(1, 2).transpose(0, 1)


def _chunks(t: Tensor, size: int) -> Tensor:
    """[T, H, D] -> [H, T / size, size, D]."""
    return t.transpose(0, 1).unflatten(1, (-1, size))


def _run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """[Hv, n, C, .] -> [Hv, n, C, V], with C tokens a chunk; `state` [Hv, V, K] is changed in place."""
    size = q.shape[2]
    total = g.double().clamp(min=_GONE).cumsum(-1)  # log decay from the chunk's start up to and with each token
    upper = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).float().masked_fill(upper, -torch.inf).exp()  # 0 above the diagonal
    since_start = total.float().exp()[..., None]
    to_end = (total[..., -1:] - total).float().exp()[..., None]

    # What each token would write, were the state zero (u), and how it reads the chunk's first state (w).
    beta = beta[..., None]
    overlap = (k * beta) @ k.transpose(-1, -2) * between
    rhs = torch.cat([v * beta, k * beta * since_start], dim=-1)
    solved = torch.linalg.solve_triangular(overlap, rhs, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within = q @ k.transpose(-1, -2) * between
    reads, writes = q * since_start, k * to_end

    out = torch.empty_like(v)
    for c in range(q.shape[1]):
        new = u[:, c] - w[:, c] @ state.transpose(-1, -2)
        out[:, c] = reads[:, c] @ state.transpose(-1, -2) + within[:, c] @ new
        state.mul_(since_start[:, c, -1:]).add_(new.transpose(-1, -2) @ writes[:, c])
    return out
