"""What each kind of layer remembers of a sequence between calls.

A gated delta layer keeps two arrays of fixed size in a pool of slots, updated in place. An attention layer keeps every
key and value, in a buffer a sequence that doubles when it is full, so that no sequence pays for another's length.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

_FIRST = 64  # tokens of a new buffer


class LayerState(Protocol):
    """What a mixer keeps for all slots."""

    @property
    def nbytes(self) -> int: ...


class Mixer(nn.Module):
    """The part of a layer that looks at other tokens: forward(x, batch, state) -> [T, hidden]."""

    def new_state(self, slots: int, dtype: torch.dtype, device: torch.device) -> LayerState:
        """Empty, for `slots` sequences; `dtype` is the activations'."""
        raise NotImplementedError


class DeltaState:
    """conv [slots, C, W-1], the last inputs of the convolution, and rule [slots, Hv, V, K] float32, the rule's state."""

    def __init__(
        self, slots: int, channels: int, width: int, heads: int, v_dim: int, k_dim: int, device: torch.device
    ) -> None:  # fmt: skip
        self.conv = torch.zeros(slots, channels, width - 1, dtype=torch.float32, device=device)
        self.rule = torch.zeros(slots, heads, v_dim, k_dim, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return self.conv.numel() * self.conv.element_size() + self.rule.numel() * self.rule.element_size()


class KeyValues:
    """Keys and values [tokens, Hkv, D] of each slot."""

    def __init__(self, slots: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._used = [0] * slots
        self._buffers = [torch.empty(0, 2, heads, dim, dtype=dtype, device=device) for _ in range(slots)]

    def append(self, slot: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values [t, Hkv, D] of new tokens; gives views of all that the slot has."""
        used, new = self._used[slot], k.shape[0]
        buffer = self._buffers[slot]
        if used + new > buffer.shape[0]:
            grown = buffer.new_empty(max(used + new, 2 * buffer.shape[0], _FIRST), *buffer.shape[1:])
            grown[:used] = buffer[:used]
            self._buffers[slot] = buffer = grown
        buffer[used : used + new, 0] = k
        buffer[used : used + new, 1] = v
        self._used[slot] = used + new
        return buffer[: used + new, 0], buffer[: used + new, 1]

    @property
    def nbytes(self) -> int:
        return sum(b.numel() * b.element_size() for b in self._buffers)
