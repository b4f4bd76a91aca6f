"""Parts of a layer that cannot be replayed: their shapes or their calls follow from values (which experts, how many keys).

A step that is recorded (engine/recording.py) keeps the addresses of everything and calls kernels again in the same order;
such a part it calls anew. Everywhere else `apart` just calls it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from torch import Tensor

Part = Callable[..., Tensor]
recorder: ContextVar[Callable[..., Tensor] | None] = ContextVar("narrowgate_recorder", default=None)


def apart(part: Part, *tensors: Tensor) -> Tensor:
    """part(*tensors), a tensor whose shape and dtype follow from the shapes and dtypes of `tensors`."""
    recording = recorder.get()
    return part(*tensors) if recording is None else recording(part, *tensors)
