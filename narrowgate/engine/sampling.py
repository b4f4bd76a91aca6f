"""Choosing the next token of one sequence from its logits. Deterministic for a seed, whatever else is in the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgate.errors import InputError, UnsupportedError


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. Otherwise: divide by it, keep the top_k most likely, then the fewest that reach top_p."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, (int, float)) or not 0 <= self.temperature < math.inf:
            raise InputError(f"generate: expected temperature >= 0, got {self.temperature!r}")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise InputError(f"generate: expected top_k of at least 1, got {self.top_k!r}")
        if self.top_p is not None and not (isinstance(self.top_p, (int, float)) and 0 < self.top_p <= 1):
            raise InputError(f"generate: expected top_p in (0, 1], got {self.top_p!r}")
        if self.seed is not None and type(self.seed) is not int:
            raise InputError(f"generate: expected seed to be a whole number, got {self.seed!r}")


class Sampler:
    """One a sequence: it has a generator of its own, so that a batch draws what single runs would draw."""

    def __init__(self, settings: Sampling) -> None:
        self.settings = settings
        self._generator = torch.Generator()
        if settings.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(settings.seed % (1 << 64))

    def __call__(self, logits: Tensor) -> int:
        """A token id from float32 logits [vocab]. Equal logits: the lower id ranks first. Raises for NaN."""
        s = self.settings
        if not bool(logits.max().isfinite()):
            raise UnsupportedError("generate: the model's logits are not finite, so no token can be chosen")
        if s.temperature == 0:
            return int(logits.argmax())
        ids, ranked = _ranked(logits.cpu().double() / s.temperature, s.top_k, s.top_p is not None)
        p = ranked.softmax(dim=-1)
        if s.top_p is not None and s.top_p < 1:
            kept = int((p.cumsum(-1) - p < s.top_p).sum())  # those before whom less than top_p had been reached
            ids, p = ids[:kept], p[:kept]
        total = p.cumsum(-1)
        drawn = torch.rand((), generator=self._generator, dtype=torch.float64) * total[-1]
        return int(ids[min(int(torch.searchsorted(total, drawn, right=True)), len(ids) - 1)])


def _ranked(logits: Tensor, top_k: int | None, sort: bool) -> tuple[Tensor, Tensor]:
    """(ids, logits) of the candidates; in falling order where that matters."""
    ids = torch.arange(logits.shape[-1])
    if top_k is not None and top_k < logits.shape[-1]:
        ids = (logits >= logits.topk(top_k).values[-1]).nonzero().reshape(-1)
        sort = True
    if sort:
        ids = ids[logits[ids].argsort(descending=True, stable=True)][: top_k or None]
    return ids, logits[ids]
