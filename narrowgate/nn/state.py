"""What each kind of layer remembers of a sequence between calls.

A gated delta layer keeps two arrays of fixed size in a pool of slots, updated in place. An attention layer keeps every
key and value: on the CPU in a buffer a sequence that doubles when it is full, so that no sequence pays for another's length; on
a GPU in one pool of a fixed capacity, so that a decoding step can be captured and replayed, and is captured again when it grows.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

_FIRST = 64  # tokens of a new buffer
_POOLED = 256  # tokens that a pool's capacity is a multiple of


class LayerState(Protocol):
    """What a mixer keeps for all slots."""

    @property
    def nbytes(self) -> int: ...


class Mixer(nn.Module):
    """The part of a layer that looks at other tokens: forward(x, batch, state) -> [T, hidden]."""

    def new_state(self, slots: int, dtype: torch.dtype, device: torch.device, pooled: bool = False) -> LayerState:
        """Empty, for `slots` sequences; `dtype` is the activations'; `pooled` decides how attention keeps its keys and values."""
        raise NotImplementedError


class DeltaState:
    """conv [slots, C, W-1], the last inputs of the convolution, and rule [slots, Hv, V, K] float32, the rule's state. `arrivals`
    is what programs of one launch count each other in (`decode_layer`); between launches it is zero."""

    def __init__(
        self, slots: int, channels: int, width: int, k_heads: int, heads: int, v_dim: int, k_dim: int, device: torch.device
    ) -> None:  # fmt: skip
        self.conv = torch.zeros(slots, channels, width - 1, dtype=torch.float32, device=device)
        self.rule = torch.zeros(slots, heads, v_dim, k_dim, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(slots, k_heads, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        return self.conv.numel() * self.conv.element_size() + self.rule.numel() * self.rule.element_size()


class KeyValues:
    """Keys and values [tokens, Hkv, D] of each slot, in a buffer of its own."""

    def __init__(self, slots: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._buffers = [torch.empty(0, 2, heads, dim, dtype=dtype, device=device) for _ in range(slots)]

    def append(self, slot: int, used: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values [t, Hkv, D] of new tokens after `used` that the slot has; gives views of all."""
        new = k.shape[0]
        buffer = self.room(slot, used, new)
        buffer[used : used + new, 0] = k
        buffer[used : used + new, 1] = v
        return buffer[: used + new, 0], buffer[: used + new, 1]

    def room(self, slot: int, used: int, new: int) -> Tensor:
        """The slot's buffer [tokens, 2, Hkv, D], with room for `new` tokens after the `used` ones, which it holds."""
        buffer = self._buffers[slot]
        if used + new > buffer.shape[0]:
            grown = buffer.new_empty(max(used + new, 2 * buffer.shape[0], _FIRST), *buffer.shape[1:])
            grown[:used] = buffer[:used]
            self._buffers[slot] = buffer = grown
        return buffer

    @property
    def nbytes(self) -> int:
        return sum(b.numel() * b.element_size() for b in self._buffers)


class PooledKeyValues:
    """pool [slots, 2, Hkv, capacity, D]: keys and values of all slots in one buffer, `used` of each counted elsewhere.

    Between two growths no address and no shape follows the tokens, which is what a captured step needs. It costs the longest
    sequence's length for every slot."""

    def __init__(self, slots: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.pool = torch.empty(slots, 2, heads, 0, dim, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        """Tokens that a slot may have."""
        return self.pool.shape[3]

    def reserve(self, tokens: int) -> bool:
        """Make room for `tokens` in every slot; True where the buffer had to move for it."""
        if tokens <= self.capacity:
            return False
        slots, two, heads, old, dim = self.pool.shape
        room = -(-max(tokens, 2 * old, _POOLED) // _POOLED) * _POOLED
        grown = self.pool.new_zeros(slots, two, heads, room, dim)
        grown[:, :, :, :old] = self.pool
        self.pool = grown
        return True

    def append(self, slot: int, used: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As `KeyValues.append`."""
        after = used + k.shape[0]
        self.reserve(after)
        self.pool[slot, 0, :, used:after] = k.transpose(0, 1)
        self.pool[slot, 1, :, used:after] = v.transpose(0, 1)
        return self.pool[slot, 0, :, :after].transpose(0, 1), self.pool[slot, 1, :, :after].transpose(0, 1)

    @property
    def nbytes(self) -> int:
        return self.pool.numel() * self.pool.element_size()
