"""Generation: prefill every prompt at once, then one token a step for the sequences that are not done.

Nothing is padded, so the sequences of a batch do not meet; each has a sampler, a text and stops of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from narrowgate.engine.sampling import Sampler, Sampling
from narrowgate.engine.text import TextStream
from narrowgate.errors import InputError

if TYPE_CHECKING:
    from narrowgate.engine.model import Model


_AHEAD = 4096  # most new tokens that room is made for before there are any


@dataclass(frozen=True)
class Completion:
    """What was generated, the prompt not included. `text` ends before a stop string; `token_ids` are all that were chosen,
    an end-of-text token or those of a stop included; `logprobs` belong to them (natural log, of the model's own
    distribution, before temperature). `finished`: "eos", "stop" or "length"."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finished: str


@dataclass
class _Sequence:
    slot: int
    sampler: Sampler
    text: TextStream | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finished: str | None = None

    def completion(self, logprobs: bool) -> Completion:
        assert self.finished is not None
        chosen = tuple(self.logprobs) if logprobs else None
        return Completion("".join(self.pieces), tuple(self.token_ids), chosen, self.finished)


def check(max_new_tokens: int, stop: str | Sequence[str]) -> tuple[str, ...]:
    """The stop strings as a tuple. Raises InputError for settings that make no sense."""
    if type(max_new_tokens) is not int or max_new_tokens < 0:
        raise InputError(f"generate: expected max_new_tokens >= 0, got {max_new_tokens!r}")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(s, str) and s for s in stops):
        raise InputError(f"generate: expected stop strings that are not empty, got {stops!r}")
    return stops


def run(
    model: Model, prompts: Sequence[Sequence[int]], settings: Sampling, *, max_new_tokens: int, stops: Sequence[str] = (),
    logprobs: bool = False,
) -> list[Completion]:  # fmt: skip
    """All of it, one Completion a prompt."""
    sequences = _start(model, prompts, settings, stops)
    for _ in _steps(model, prompts, sequences, max_new_tokens, logprobs):
        pass
    return [sequence.completion(logprobs) for sequence in sequences]


def stream(
    model: Model, prompt: Sequence[int], settings: Sampling, *, max_new_tokens: int, stops: Sequence[str] = ()
) -> Iterator[str]:  # fmt: skip
    """The text of one prompt's completion, as soon as it is certain."""
    sequences = _start(model, [prompt], settings, stops)
    return (piece for _, piece in _steps(model, [prompt], sequences, max_new_tokens, False) if piece)


def _start(
    model: Model, prompts: Sequence[Sequence[int]], settings: Sampling, stops: Sequence[str]
) -> list[_Sequence]:  # fmt: skip
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise InputError(f"generate: expected prompts of at least one token, got prompt {i} empty")
    if stops and model.tokenizer is None:
        raise InputError("generate: stop strings need a tokenizer, and the model's folder has none")
    texts = [None if model.tokenizer is None else TextStream(model.tokenizer, stops) for _ in prompts]
    return [_Sequence(i, Sampler(settings), text) for i, text in enumerate(texts)]


def _steps(
    model: Model, prompts: Sequence[Sequence[int]], sequences: list[_Sequence], max_new_tokens: int, logprobs: bool
) -> Iterator[tuple[_Sequence, str]]:  # fmt: skip
    """(sequence, new text) for every token chosen."""
    if max_new_tokens == 0 or not sequences:
        for sequence in sequences:
            sequence.finished = "length"
        return
    longest = max(map(len, prompts))
    cache = model.new_cache(len(sequences), capacity=longest + min(max_new_tokens, _AHEAD))
    flat = torch.tensor([token for prompt in prompts for token in prompt])
    logits = model.advance(flat, cache, [len(p) for p in prompts], range(len(prompts)), last_only=True)
    active = sequences
    while True:
        for sequence, row in zip(active, logits, strict=True):
            token = sequence.sampler(row)
            sequence.token_ids.append(token)
            if logprobs:
                sequence.logprobs.append(float(row.log_softmax(dim=-1)[token]))
            yield sequence, _take(sequence, token, model.eos_ids, max_new_tokens)
        active = [sequence for sequence in active if sequence.finished is None]
        if not active:
            return
        last = torch.tensor([sequence.token_ids[-1] for sequence in active])
        logits = model.advance(last, cache, [1] * len(active), [s.slot for s in active], last_only=True)


def _take(sequence: _Sequence, token: int, eos_ids: frozenset[int], max_new_tokens: int) -> str:
    """Add a token to a sequence's text, and see whether it is done; gives the text that is new."""
    text, piece = sequence.text, ""
    if token in eos_ids:
        sequence.finished = "eos"
    elif text is not None:
        piece = text.push(token)
    if sequence.finished is None and len(sequence.token_ids) == max_new_tokens:
        sequence.finished = "length"
    if text is not None:
        if sequence.finished is not None and text.stopped is None:
            piece += text.finish()
        if text.stopped is not None:
            sequence.finished = "stop"
    sequence.pieces.append(piece)
    return piece
