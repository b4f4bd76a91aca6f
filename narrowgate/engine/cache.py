"""What a model remembers of a batch of sequences between calls: one state a layer, and how many tokens each has seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from narrowgate.nn.state import LayerState


class Cache:
    """Made by `model.new_cache(batch)`. Sequence i lives in slot i of every layer's state."""

    def __init__(self, batch: int, states: Sequence[LayerState]) -> None:
        self.batch = batch
        self.states = states
        self.lengths = [0] * batch
        self.recordings: dict[Any, Any] = {}  # what a decoding step of so many sequences calls (recording.py)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' states: constant for gated delta layers, growing with the tokens for attention."""
        return sum(state.nbytes for state in self.states)

    def __repr__(self) -> str:
        return f"Cache(batch={self.batch}, lengths={self.lengths}, nbytes={self.nbytes})"
