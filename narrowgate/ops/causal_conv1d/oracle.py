"""The convolution once more, in float64, token by token and tap by tap, and the wrong readings of it.

It shares no code with the reference. `wrong` names a rival reading (SPEC R)."""

from __future__ import annotations

import torch
from torch import Tensor


def _taps(window: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, wrong: str) -> Tensor:
    """window [W, C], oldest first -> [C], the activation included."""
    width = weight.shape[1]
    y = torch.zeros(weight.shape[0], dtype=torch.float64) if bias is None else bias.double().clone()
    for j in range(width):
        y = y + weight[:, width - 1 - j if wrong == "taps reversed" else j].double() * window[j]
    if (activation == "silu") != (wrong == "other activation"):
        y = y / (1 + torch.exp(-y))
    return y


def _no_slot(slot: int, wrong: str) -> bool:
    return slot < 0 or (wrong == "slot 0 is no slot" and slot == 0)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor | None = None,
    has_initial_state: Tensor | None = None, *, activation: str | None = "silu", state_indices: Tensor | None = None,
    work: object = None, out: Tensor | None = None, wrong: str = "",
) -> dict[str, Tensor]:  # fmt: skip
    """{"y" (or "out"): [T, C], "state": all rows}; rows without a slot keep what `out` held, or are zero."""
    ends = [0, len(x)] if cu_seqlens is None else cu_seqlens.tolist()
    keep, rows = weight.shape[1] - 1, state.double()
    y = torch.zeros(x.shape, dtype=torch.float64) if out is None else out.double()
    for i in range(len(ends) - 1):
        slot = i if state_indices is None else int(state_indices[i])
        if _no_slot(slot, wrong):
            if wrong == "zeros where no slot":
                y[ends[i] : ends[i + 1]] = 0.0
            continue
        first = rows.shape[2] - keep if wrong == "trailing taps" else 0
        taps = [rows[slot, :, first + j].clone() for j in range(keep)]
        if has_initial_state is not None and not bool(has_initial_state[i]) and wrong != "stale state":
            taps = [torch.zeros_like(t) for t in taps]
        for t in range(ends[i], ends[i + 1]):
            taps.append(x[t].double())
            y[t] = _taps(torch.stack(taps[-weight.shape[1] :]), weight, bias, activation, wrong)
            if wrong == "activated inputs stored":
                taps[-1] = y[t]
        n = ends[i + 1] - ends[i]
        for j in range(keep):
            tap = taps[n + j]
            if wrong == "zeros for old taps" and n + j < keep:
                tap = torch.zeros_like(tap)
            rows[slot, :, first + j] = tap.to(state.dtype).double()
    return {"y" if out is None else "out": y, "state": rows}


def step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, activation: str | None = "silu",
    state_indices: Tensor | None = None, out: Tensor | None = None, wrong: str = "",
) -> dict[str, Tensor]:  # fmt: skip
    rows = torch.arange(len(x) + 1)
    return forward(x, weight, bias, state, rows, activation=activation, state_indices=state_indices, out=out, wrong=wrong)


def speculative(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor, state_indices: Tensor,
    num_accepted: Tensor, *, activation: str | None = "silu", out: Tensor | None = None, wrong: str = "",
) -> dict[str, Tensor]:  # fmt: skip
    keep, columns, rows = weight.shape[1] - 1, state.shape[2], state.double()
    y = torch.zeros(x.shape, dtype=torch.float64) if out is None else out.double()
    ends = cu_seqlens.tolist()
    for i, (slot, accepted) in enumerate(zip(state_indices.tolist(), num_accepted.tolist(), strict=True)):
        a, b = ends[i], ends[i + 1]
        if _no_slot(slot, wrong) or a == b:
            if wrong == "zeros where no slot":
                y[a:b] = 0.0
            continue
        first = {"offset ignored": 0, "offset is accepted": accepted}.get(wrong, accepted - 1)
        old = [rows[slot, :, j].clone() for j in range(columns)] + [torch.zeros(x.shape[1], dtype=torch.float64)] * columns
        taps = old[first : first + keep]
        for t in range(a, b):
            taps.append(x[t].double())
            y[t] = _taps(torch.stack(taps[-keep - 1 :]), weight, bias, activation, wrong)
        new = taps[1:]
        if wrong == "full width kept":
            new = old[first + 1 : first + 1 + columns - (b - a)] + taps[keep:]
        for j, tap in enumerate(new[:columns]):
            rows[slot, :, j] = tap.to(state.dtype).double()
    return {"y" if out is None else "out": y, "state": rows}
