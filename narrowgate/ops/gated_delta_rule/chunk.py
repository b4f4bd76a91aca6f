"""The gated delta rule 64 tokens at a time, to be read. The derivation is in this folder's README.

Three stages, each of which a kernel may replace: `solve` (per chunk: what each token would write, were the state zero, and how
it reads the state that the chunk starts from), `carry` (the only one that goes from chunk to chunk) and `read_out`. The
first and the last work on all chunks of a sequence at once. A sequence's last, shorter chunk is computed at its own length:
nothing is padded, so nothing can leak from padding. Sequences are taken one after another, so a sequence's bits do not depend
on its neighbours.

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
            if b == a:
                continue
            q_, k_ = (_chunks(t[a:b], size).repeat_interleave(ratio, dim=0) for t in (q, k))
            total = running(_chunks(g[a:b, :, None], size)[..., 0])
            u, w = solve(k_, _chunks(v[a:b], size), total, _chunks(beta[a:b, :, None], size))
            starts, new = carry(k_, u, w, total, row)
            out[a:b] = read_out(q_, k_, new, total, starts).flatten(1, 2).transpose(0, 1)


def _chunks(t: Tensor, size: int) -> Tensor:
    """[T, H, D] -> [H, T / size, size, D]."""
    return t.transpose(0, 1).unflatten(1, (-1, size))


def running(g: Tensor) -> Tensor:
    """[H, n, C] -> float64: the log decay from the chunk's start up to and with each token."""
    return g.double().clamp(min=_GONE).cumsum(-1)


def _between(total: Tensor) -> Tensor:
    """[H, n, C] -> [H, n, C, C]: the decay from token j to token i, 0 where j comes after i."""
    later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
    return (total[..., :, None] - total[..., None, :]).float().masked_fill(later, -torch.inf).exp()


def solve(k: Tensor, v: Tensor, total: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """k [H, n, C, K], v [H, n, C, V], total [H, n, C], beta [H, n, C, 1] -> u [H, n, C, V], w [H, n, C, K]."""
    overlap = (k * beta) @ k.transpose(-1, -2) * _between(total)
    rhs = torch.cat([v * beta, k * beta * total.float().exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(overlap, rhs, upper=False, unitriangular=True)  # reads below the diagonal only
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    return u, w


def carry(k: Tensor, u: Tensor, w: Tensor, total: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """From chunk to chunk; `state` [H, V, K] is changed in place. Returns the state that each chunk starts from,
    [H, n, V, K], and what each token writes, [H, n, C, V]."""
    starts, new = state.new_empty(u.shape[0], u.shape[1], *state.shape[1:]), torch.empty_like(u)
    writes = k * (total[..., -1:] - total).float().exp()[..., None]
    decay = total[..., -1].float().exp()[..., None, None]
    for c in range(u.shape[1]):
        starts[:, c] = state
        new[:, c] = u[:, c] - w[:, c] @ state.transpose(-1, -2)
        state.mul_(decay[:, c]).add_(new[:, c].transpose(-1, -2) @ writes[:, c])
    return starts, new


def read_out(q: Tensor, k: Tensor, new: Tensor, total: Tensor, starts: Tensor) -> Tensor:
    """o [H, n, C, V]: what q reads of the chunk's first state, and of what the tokens up to its own wrote."""
    since_start = total.float().exp()[..., None]
    return (q * since_start) @ starts.transpose(-1, -2) + (q @ k.transpose(-1, -2) * _between(total)) @ new
