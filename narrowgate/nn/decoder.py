"""The stack: embedding, layers of a mixer and a feed-forward block with residuals, final norm, head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from narrowgate.nn.batch import Ragged
from narrowgate.nn.linear import PackedEmbedding, PackedExperts, PackedLinear, Projections
from narrowgate.nn.norm import RMSNorm
from narrowgate.nn.state import LayerState, Mixer
from narrowgate.ops.host import missing


class Layer(nn.Module):
    """x += mixer(norm(x)), then x += mlp(norm(x)). `mixer` is a GatedDeltaNet or a GatedAttention.

    A sum is left to the norm after it, which reads x anyway: a layer takes what the layer before still owes x, None for
    nothing, pays into x in place, and returns what it owes."""

    mixer: Mixer

    def __init__(self, mixer: Mixer, mlp: nn.Module, before: RMSNorm, between: RMSNorm) -> None:
        super().__init__()
        self.mixer, self.mlp, self.before, self.between = mixer, mlp, before, between

    def forward(self, x: Tensor, owed: Tensor | None, batch: Ragged, state: LayerState) -> Tensor:
        owed = self.mixer(self.before(x, owed), batch, state)
        return self.mlp(self.between(x, owed))


class Decoder(nn.Module):
    """`frequencies` [rotary/2] float32: kept here because every attention layer shares them. No buffer: never cast."""

    def __init__(
        self, embed: PackedEmbedding, layers: Sequence[Layer], norm: RMSNorm, head: PackedLinear, frequencies: Tensor
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed, self.layers, self.norm, self.head = embed, nn.ModuleList(layers), norm, head
        self.frequencies = frequencies
        self._mixers = tuple(layer.mixer for layer in layers)

    def prepare(self) -> None:
        """Hold every matrix as the device's products read it, and projections of one input in one piece, where there is a gain."""
        if self.frequencies.device.type == "cpu" and missing():
            return
        for module in self.modules():
            if isinstance(module, (PackedLinear, PackedExperts)):
                module.weight.prepare()
        for module in list(self.modules()):
            if isinstance(module, Projections):
                module.join()

    def new_states(
        self, slots: int, dtype: torch.dtype, device: torch.device, *, pooled: bool = False
    ) -> list[LayerState]:  # fmt: skip
        """One state a layer, empty. `pooled`: of the kind whose addresses and shapes do not follow the tokens (nn/state.py)."""
        return [mixer.new_state(slots, dtype, device, pooled) for mixer in self._mixers]

    def forward(self, ids: Tensor, batch: Ragged, states: Sequence[LayerState], rows: Tensor | None = None) -> Tensor:
        """ids [T] -> logits float32 [T, vocab], or of `rows` alone; the states advance by T tokens."""
        x, owed = self.embed(ids), None
        for layer, state in zip(self.layers, states, strict=True):
            owed = layer(x, owed, batch, state)
        if rows is not None:
            x, owed = x[rows], None if owed is None else owed[rows]
        return self.head(self.norm(x, owed), out_dtype=torch.float32)
