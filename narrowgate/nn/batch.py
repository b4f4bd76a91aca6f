"""What the tokens of one forward pass are: several sequences laid end to end, without padding, each with a past.

Padding is where hybrid models go wrong (a padded token changes a recurrent state for ever), so there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Ragged:
    """`lengths[i]` new tokens of the sequence in cache slot `slots[i]`, which has seen `past[i]` tokens before.

    cu_seqlens int32 [n + 1] and state_indices int32 [n] say the same to the operators; cos and sin [T, 1, rotary/2],
    float32, are the rotary angles of the T = sum(lengths) new tokens. A recorded step has one of these and refills it.

    `positions` int64 [n]: of a step of one token each whose slots and past are in tensors alone (`static`); `slots` and
    `past` are then empty.
    """

    lengths: tuple[int, ...]
    slots: tuple[int, ...]
    past: tuple[int, ...]
    cu_seqlens: Tensor
    state_indices: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor | None = None

    @property
    def one_each(self) -> bool:
        """Whether every sequence brings one token: a decoding step."""
        return all(n == 1 for n in self.lengths)

    @property
    def starts(self) -> tuple[int, ...]:
        """Row of each sequence's first token."""
        starts, at = [], 0
        for n in self.lengths:
            starts.append(at)
            at += n
        return tuple(starts)


def ragged(
    lengths: Sequence[int], slots: Sequence[int], past: Sequence[int], frequencies: Tensor
) -> Ragged:  # fmt: skip
    """Lay out a batch; `frequencies` [rotary/2] float32 comes from `rotary_frequencies`."""
    device = frequencies.device
    positions = torch.cat([torch.arange(p, p + n) for n, p in zip(lengths, past, strict=True)] or [torch.arange(0)])
    angles = positions.to(device=device, dtype=torch.float32)[:, None, None] * frequencies
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    indices = torch.tensor(slots, dtype=torch.int32, device=device)
    return Ragged(tuple(lengths), tuple(slots), tuple(past), cu_seqlens, indices, angles.cos(), angles.sin())


def static(slots: Tensor, positions: Tensor, cu_seqlens: Tensor, frequencies: Tensor) -> Ragged:
    """One new token each of the sequences in `slots`, at `positions`, both int64 [n]: nothing of it is known to Python."""
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    ones = (1,) * slots.shape[0]
    return Ragged(ones, (), (), cu_seqlens, slots.to(torch.int32), angles.cos(), angles.sin(), positions)


def rotary_frequencies(theta: float, rotary_dim: int) -> Tensor:
    """theta^(-2i/rotary_dim) for i < rotary_dim/2, float32."""
    return 1.0 / (theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first 2 * cos.shape[-1] entries of each head, x [T, H, D] float32; the rest passes through.

    Entry i is paired with entry i + rotary/2 (halves, not neighbours).
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
