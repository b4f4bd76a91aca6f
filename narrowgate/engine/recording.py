"""A decoding step on the CPU, recorded once and replayed: a token costs its kernels, not the Python that leads to them.

The first step of a cache for a number of sequences runs as always, and meanwhile every call of a compiled kernel is noted with
its arguments, which are addresses and sizes. All memory of that step is kept, so the next step is the same calls in the same
order, after the few inputs that change (token ids, slots, rotary angles) were written into their places. Torch's own
operators are noted too, and write into the tensors that they made the first time. What depends on values (attention over a
growing past, the choice of experts) is a part of its own (nn/apart.py) and is called anew.

A step that reads a value anywhere else cannot be replayed: that is noticed while recording, said once, and the model then
runs step by step. So does one where the CPU kernels are missing. Recordings end with their cache; another number of threads,
as after a fork, makes a new one. Left out: prefill, which is bound by arithmetic, and GPUs, which have graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgate import dispatch
from narrowgate.engine.cache import Cache
from narrowgate.nn.apart import recorder
from narrowgate.nn.batch import Ragged
from narrowgate.nn.decoder import Decoder
from narrowgate.ops.host import missing

LOG = logging.getLogger("narrowgate")
KEPT = 4  # recordings a cache
_READS = ("tolist", "numpy", "__array__", "item", "__bool__", "__int__", "__float__", "__index__")
_EMPTY = ("empty", "new_empty", "empty_like", "empty_strided")
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_said: set[str] = set()


def step(decoder: Decoder, ids: Tensor, batch: Ragged, cache: Cache) -> Tensor:
    """Logits float32 [n, vocab] of one new token each of n sequences; the cache's states advance."""
    if missing():
        return decoder(ids, batch, cache.states)
    from narrowgate.simd.cpu_threads import threads

    key = (len(batch.slots), threads())
    found = cache.recordings.get(key)
    if found is None:
        found = Recording(decoder, ids, batch, cache.states)
        while len(cache.recordings) >= KEPT:
            cache.recordings.pop(next(iter(cache.recordings)))
        cache.recordings[key] = found
        return found.logits.clone()
    return found(ids, batch)


class Recording:
    """Made by running a step; called with other inputs of the same number of sequences, it runs that step again.

    `calls`: (function, arguments) in order. `refused`: why it cannot be replayed, or None."""

    def __init__(self, decoder: Decoder, ids: Tensor, batch: Ragged, states: Sequence[Any]) -> None:
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.refused: str | None = None
        self._kept: list[Any] = []
        self._paused = False
        self._decoder, self._states = decoder, states
        self._constants = {b.untyped_storage().data_ptr() for b in decoder.buffers()}
        self._ids, self._batch = ids.clone(), batch
        with self._noting():
            self.logits: Tensor = decoder(self._ids, batch, states)
        if self.refused is not None and self.refused not in _said:
            _said.add(self.refused)
            LOG.warning("narrowgate: decoding runs step by step, unrecorded: %s", self.refused)

    def __call__(self, ids: Tensor, batch: Ragged) -> Tensor:
        if self.refused is not None:
            logits: Tensor = self._decoder(ids, batch, self._states)
            return logits
        mine = self._batch
        mine.lengths, mine.slots, mine.past = batch.lengths, batch.slots, batch.past
        self._ids.copy_(ids)
        mine.state_indices.copy_(batch.state_indices)
        mine.cos.copy_(batch.cos)
        mine.sin.copy_(batch.sin)
        for function, arguments in self.calls:
            function(*arguments)
        return self.logits.clone()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        from narrowgate.simd.cpu_compile import tape

        self._tape = tape
        taken, apart = tape.set(self.calls), recorder.set(self._apart)
        try:
            with dispatch.recording(), _Reads(self), _Operators(self):
                yield
        finally:
            tape.reset(taken)
            recorder.reset(apart)

    def _apart(self, part: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Call a part that is to be called anew each time, and note that."""
        taken, self._paused = self._tape.set(None), True
        nested = recorder.set(None)
        try:
            found = part(*tensors)
        finally:
            self._tape.reset(taken)
            recorder.reset(nested)
            self._paused = False
        self.calls.append((_again, (found, part, tensors)))
        return found

    def _refuse(self, reason: str) -> None:
        self.refused = self.refused or reason

    def _note(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any], found: Any) -> None:
        """One of torch's operators: what must happen again for `found` to hold the next step's values."""
        tensors = [t for t in (found if isinstance(found, (tuple, list)) else (found,)) if isinstance(t, Tensor)]
        self._kept += [tensors, arguments]
        if any(tag in function.tags for tag in _TAGS) and not _by_number(function, arguments):
            if not all(self._constant(t) for t in arguments):
                self._refuse(f"{function} depends on values")
        elif function._schema.is_mutable:
            self.calls.append((partial(function, **named), arguments))
        elif function.is_view or function._opname in _EMPTY or _same_memory(tensors, arguments):
            return
        elif isinstance(found, Tensor):
            self.calls.append((_again, (found, partial(function, **named), arguments)))
        else:
            self.calls.append((_all_again, (tensors, partial(function, **named), arguments)))

    def _constant(self, t: Any) -> bool:
        return isinstance(t, Tensor) and t.untyped_storage().data_ptr() in self._constants


def _again(into: Tensor, function: Callable[..., Tensor], arguments: tuple[Any, ...]) -> None:
    into.copy_(function(*arguments))


def _all_again(into: Sequence[Tensor], function: Callable[..., Sequence[Tensor]], arguments: tuple[Any, ...]) -> None:
    for tensor, value in zip(into, function(*arguments), strict=True):
        tensor.copy_(value)


def _by_number(function: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether it is indexing by row numbers: only masks make a shape of values."""
    index = arguments[1] if function is torch.ops.aten.index.Tensor else ()
    return bool(index) and all(t is None or t.dtype != torch.bool for t in index)


def _same_memory(found: Sequence[Tensor], arguments: tuple[Any, ...]) -> bool:
    places = {t.untyped_storage().data_ptr() for t in arguments if isinstance(t, Tensor)}
    return bool(found) and all(t.untyped_storage().data_ptr() in places for t in found)


class _Operators(TorchDispatchMode):
    """Sees every operator of torch below autograd."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not self._recording._paused:
            self._recording._note(func, args, kwargs or {}, found)
        return found


class _Reads(TorchFunctionMode):
    """Sees the methods of tensors that hand values to Python, some of which no operator shows."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS and not self._recording._paused and not self._recording._constant(args[0]):
            self._recording._refuse(f"Tensor.{name} reads a value")
        return func(*args, **(kwargs or {}))
