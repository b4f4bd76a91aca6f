"""What a model remembers of a batch of sequences between calls: one state a layer, and how many tokens each has seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from narrowgate.nn.state import LayerState, PooledKeyValues


class Cache:
    """Made by `model.new_cache(batch)`. Sequence i lives in slot i of every layer's state."""

    def __init__(self, batch: int, states: Sequence[LayerState]) -> None:
        self.batch = batch
        self.states = states
        self._pools = [state for state in states if isinstance(state, PooledKeyValues)]
        self.lengths = [0] * batch
        self.recordings: dict[Any, Any] = {}  # a decoding step of so many sequences, to be repeated (recording.py, graph.py)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` of every sequence. What was captured of addresses that change by it is dropped."""
        for state in self._pools:
            if state.reserve(tokens):
                self.recordings.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' states: constant for gated delta layers, growing with the tokens for attention."""
        return sum(state.nbytes for state in self.states)

    def __repr__(self) -> str:
        return f"Cache(batch={self.batch}, lengths={self.lengths}, nbytes={self.nbytes})"
