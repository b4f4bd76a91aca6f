"""Inputs of the rule's cases: normalized q and k, decays and betas in the ranges of SPEC D49 and D80, states with canaries."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from narrowgate.conformance.case import Arguments
from narrowgate.conformance.fixtures import F32, padded, poisoned, uniform


def normalized(g: Generator, *shape: int, dtype: torch.dtype = F32) -> Tensor:
    x = uniform(g, *shape)
    return (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).to(dtype)


def flow(
    g: Generator, tokens: int, heads: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype = F32, decay: float = 0.5
) -> Arguments:
    """q, k, v, g and beta of `tokens` tokens; `heads` is (Hk, Hv), `sizes` is (K, V); g lies in [-decay, 0]."""
    (hk, hv), (keys, values) = heads, sizes
    return {
        "q": normalized(g, tokens, hk, keys, dtype=dtype),
        "k": normalized(g, tokens, hk, keys, dtype=dtype),
        "v": uniform(g, tokens, hv, values, dtype=dtype),
        "g": uniform(g, tokens, hv, low=-decay, high=0.0),
        "beta": uniform(g, tokens, hv, low=0.05, high=0.95),
    }


def states(
    g: Generator, slots: int, heads: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype = F32, span: float = 0.5
) -> Tensor:
    return uniform(g, slots, heads[1], sizes[1], sizes[0], low=-span, high=span, dtype=dtype)


def prefill(
    g: Generator, ends: list[int], heads: tuple[int, int] = (2, 6), sizes: tuple[int, int] = (16, 8), *,
    tokens: int | None = None, form: str = "auto", dtype: torch.dtype = F32, out: torch.dtype | None = None, decay: float = 0.5,
    initial: list[int] | None = None, flags: torch.dtype = torch.bool, slots: list[int] | None = None, pool: int = 0,
    index: torch.dtype = torch.int32,
) -> Arguments:  # fmt: skip
    """A call of `gated_delta_rule` on sequences that end at `ends`. `initial`: has_initial_state, false slots then hold NaN.
    `slots`: state_indices into a pool of `pool` rows, of which the unused hold 999."""
    n, total = len(ends) - 1, ends[-1] if tokens is None else tokens
    state = states(g, pool or n, heads, sizes)
    given = flow(g, total, heads, sizes, dtype, decay)
    given |= {"state": state, "cu_seqlens": torch.tensor(ends, dtype=index), "scale": sizes[0] ** -0.5 if sizes[0] else 1.0}
    if form != "auto":
        given["form"] = form
    if slots is not None:
        state[[i for i in range(pool) if i not in slots]] = 999.0
        given["state_indices"] = torch.tensor(slots, dtype=index)
    if initial is not None:
        given["has_initial_state"] = torch.tensor(initial).to(flags)
        for i, keep in enumerate(initial):
            if not keep and (slots is None or slots[i] >= 0):
                state[i if slots is None else slots[i]] = 77.0
    if out is not None:
        given["out"] = poisoned(total, heads[1], sizes[1], dtype=out)
    return given


def step(
    g: Generator, rows: int, heads: tuple[int, int] = (2, 6), sizes: tuple[int, int] = (16, 8), *,
    dtype: torch.dtype = F32, state: torch.dtype = F32, out: torch.dtype | None = None, slots: list[int] | None = None,
    pool: int = 0, index: torch.dtype = torch.int32, decay: float = 1.0, span: float = 0.5,
) -> Arguments:  # fmt: skip
    given = flow(g, rows, heads, sizes, dtype, decay)
    held = states(g, pool or rows, heads, sizes, state, span)
    given |= {"state": held, "scale": sizes[0] ** -0.5}
    if slots is not None:
        held[[i for i in range(len(held)) if i not in slots]] = 999.0
        given["state_indices"] = torch.tensor(slots, dtype=index)
    if out is not None:
        given["out"] = poisoned(rows, heads[1], sizes[1], dtype=out)
    return given


def packed(
    g: Generator, rows: int, heads: tuple[int, int] = (2, 4), sizes: tuple[int, int] = (8, 8), *,
    dtype: torch.dtype = F32, state: torch.dtype = F32, per_head: tuple[torch.dtype, torch.dtype] = (F32, F32),
    out: torch.dtype | None = None, slots: list[int] | None = None, pool: int = 0, pads: tuple[int, int] = (0, 0),
    merged: bool = False, round_beta: bool | None = None, index: torch.dtype = torch.int32,
) -> Arguments:  # fmt: skip
    """A call of the packed step. `per_head`: dtypes of A_log and dt_bias; `pads`: extra columns behind the rows of mixed_qkv
    and of the gates; `merged`: b and a are halves of one buffer."""
    (hk, hv), (keys, values) = heads, sizes
    slots = list(range(rows)) if slots is None else slots
    held = states(g, pool or rows, heads, sizes, state, 0.25)
    held[[i for i in range(len(held)) if i not in slots]] = 999.0
    gates = uniform(g, rows, 2 * hv + pads[1], low=-2, high=2, dtype=dtype)
    mixed = uniform(g, rows, 2 * hk * keys + hv * values, low=-2, high=2, dtype=dtype)
    b, a = gates[:, :hv], gates[:, hv : 2 * hv]
    given: Arguments = {
        "mixed_qkv": padded(mixed, pads[0]) if pads[0] else mixed,
        "a": a if merged or pads[1] else a.contiguous(),
        "b": b if merged or pads[1] else b.contiguous(),
        "A_log": uniform(g, hv, low=-1, high=0.5, dtype=per_head[0]),
        "dt_bias": uniform(g, hv, low=-0.5, high=0.5, dtype=per_head[1]),
        "state": held,
        "state_indices": torch.tensor(slots, dtype=index),
        "scale": keys**-0.5,
    }
    if round_beta is not None:
        given["round_beta"] = round_beta
    if out is not None:
        given["out"] = poisoned(rows, hv, values, dtype=out)
    return given


def speculative(
    g: Generator, lengths: list[int], accepted: list[int], slots: list[list[int]], pool: int,
    heads: tuple[int, int] = (2, 6), sizes: tuple[int, int] = (16, 8), *, dtype: torch.dtype = F32,
    state: torch.dtype = F32, out: torch.dtype | None = None, index: torch.dtype = torch.int32, tokens: int | None = None,
) -> Arguments:  # fmt: skip
    ends = [0]
    for n in lengths:
        ends.append(ends[-1] + n)
    total = ends[-1] if tokens is None else tokens
    given = flow(g, total, heads, sizes, dtype)
    given["g"] = uniform(g, total, heads[1], low=-1.5, high=-0.05)
    held = states(g, pool, heads, sizes, state)
    named = {slot for row in slots for slot in row}
    held[[i for i in range(pool) if i not in named]] = 7.0
    given |= {"state": held, "cu_seqlens": torch.tensor(ends, dtype=index), "state_indices": torch.tensor(slots, dtype=index)}
    given |= {"num_accepted": torch.tensor(accepted, dtype=index), "scale": sizes[0] ** -0.5}
    if out is not None:
        given["out"] = poisoned(total, heads[1], sizes[1], dtype=out)
    return given
