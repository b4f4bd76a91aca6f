"""A decoding step on a GPU, captured once and replayed: one launch a token.

`StaticStep` is a step whose every tensor has a fixed place and shape: token ids, slots and positions in one small buffer, which
is all that a new step writes; states in pools (nn/state.py); rotary angles, lengths and the choice of experts made of those on
the device. Nothing of it is read by Python. The first step for a number of sequences runs as it is, which compiles what is
missing; the second is captured in a CUDA graph, and from then on the graph is replayed: the same kernels on the same addresses,
so the same bits. Where the keys and values outgrow their pool the addresses change, and the steps are captured anew.

The same step without the graph runs on any device, which is how it is tested without a card. Left out: prefill, and the
choice of the token (sampling is Python, one row of logits a sequence)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgate.engine.cache import Cache
from narrowgate.nn.batch import static
from narrowgate.nn.decoder import Decoder
from narrowgate.nn.state import LayerState

KEPT = 4  # steps a cache: one for each number of sequences


def step(decoder: Decoder, ids: Tensor, slots: Sequence[int], past: Sequence[int], cache: Cache) -> Tensor:
    """Logits float32 [n, vocab] of one new token each of n sequences; the cache's states advance."""
    found = cache.recordings.get(len(slots))
    if found is None:
        while len(cache.recordings) >= KEPT:
            cache.recordings.pop(next(iter(cache.recordings)))
        found = cache.recordings[len(slots)] = StaticStep(decoder, len(slots), cache.states, graph=True)
    return found(ids, slots, past).clone()


class StaticStep:
    """Called with ids [n], slots and past of n sequences; gives the logits' own place, which the next call overwrites."""

    def __init__(self, decoder: Decoder, n: int, states: Sequence[LayerState], *, graph: bool) -> None:
        device = decoder.frequencies.device
        self._decoder, self._states, self._captures = decoder, states, graph
        self._inputs = torch.zeros(3, n, dtype=torch.int64, device=device)  # ids, slots, positions
        self._cu_seqlens = torch.arange(n + 1, dtype=torch.int32, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None

    def __call__(self, ids: Tensor, slots: Sequence[int], past: Sequence[int]) -> Tensor:
        with torch.cuda.device_of(self._inputs):
            return self._step(ids, slots, past)

    def _step(self, ids: Tensor, slots: Sequence[int], past: Sequence[int]) -> Tensor:
        self._inputs[1:].copy_(torch.tensor([list(slots), list(past)]), non_blocking=True)
        self._inputs[0].copy_(ids, non_blocking=True)
        if not self._captures or self._logits is None:
            self._logits = self.run()
            return self._logits
        if self._graph is None:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                logits = self.run()
            self._graph, self._logits = captured, logits  # only now: a capture that failed may be tried again
        self._graph.replay()
        return self._logits

    def replay(self) -> None:
        """The captured step again, on what its inputs hold."""
        assert self._graph is not None
        self._graph.replay()

    def run(self) -> Tensor:
        """The step on what the inputs hold now."""
        ids, slots, positions = self._inputs.unbind()
        batch = static(slots, positions, self._cu_seqlens, self._decoder.frequencies)
        logits: Tensor = self._decoder(ids, batch, self._states)
        return logits
