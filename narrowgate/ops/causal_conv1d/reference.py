"""The causal depthwise convolution, to be read: taps are added to the bias from the oldest to the newest, one rounding each."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.ops import sequences
from narrowgate.ops.rounded import activate


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor | None = None,
    has_initial_state: Tensor | None = None, *, activation: str | None = "silu", state_indices: Tensor | None = None,
    batch_ptr: Tensor | None = None, token_chunk_offset: Tensor | None = None, out: Tensor,
) -> None:  # fmt: skip
    n, old_taps = sequences.count(cu_seqlens), weight.shape[1] - 1
    slots = sequences.live_slots(state_indices, n, state.shape[0])
    keeps = sequences.flags(has_initial_state, n)
    for (start, end), slot, keep in zip(sequences.spans(cu_seqlens, x.shape[0]), slots, keeps, strict=True):
        if slot is None:
            continue
        row = state[slot, :, :old_taps]
        before = row.float().t() if keep else torch.zeros(old_taps, x.shape[1], device=x.device)
        window = torch.cat([before, x[start:end].float()])
        out[start:end] = activate(_taps(window, weight, bias), activation)
        row.copy_(window[end - start :].t())


def causal_conv1d_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, activation: str | None = "silu",
    state_indices: Tensor | None = None, out: Tensor,
) -> None:  # fmt: skip
    old_taps = weight.shape[1] - 1
    rows = torch.arange(x.shape[0], device=x.device)
    slots = rows if state_indices is None else state_indices.long()
    live = sequences.live_mask(slots, state.shape[0])
    rows, slots = rows[live], slots[live]
    taps = state[..., :old_taps]
    window = torch.cat([taps[slots].float(), x[rows].float()[..., None]], dim=-1)  # [rows, C, W]
    y = _taps(window.permute(2, 0, 1), weight, bias)[0]
    out[rows] = activate(y, activation).to(out.dtype)
    taps[slots] = window[..., 1:].to(state.dtype)


def causal_conv1d_speculative_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor, state_indices: Tensor,
    num_accepted: Tensor, *, activation: str | None = "silu", out: Tensor,
) -> None:  # fmt: skip
    old_taps, columns = weight.shape[1] - 1, state.shape[2]
    spans = sequences.spans(cu_seqlens, x.shape[0])
    slots = sequences.live_slots(state_indices, len(spans), state.shape[0])
    for (start, end), slot, accepted in zip(spans, slots, num_accepted.tolist(), strict=True):
        if slot is None or start == end or not 1 <= accepted <= columns - old_taps + 1:
            continue
        end = min(end, start + columns - old_taps + 1)
        row = state[slot]
        window = torch.cat([row[:, accepted - 1 : accepted - 1 + old_taps].float().t(), x[start:end].float()])
        out[start:end] = activate(_taps(window, weight, bias), activation)
        row[:, : window.shape[0] - 1] = window[1:].t()  # later columns keep what they held


def _taps(window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """window: [W - 1 + n, ..., C] -> [n, ..., C], in float32, before the activation."""
    width = weight.shape[1]
    n = window.shape[0] - (width - 1)
    columns = weight.float().t().contiguous()
    y = torch.zeros((), device=window.device) if bias is None else bias.float()
    for j in range(width):
        y = y + columns[j] * window[j : j + n]
    return y
