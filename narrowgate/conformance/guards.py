"""Guards: canaries round every buffer, poison in every output and in fresh memory, and proof that inputs were left alone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

PAD = 4096  # bytes on each side of a guarded buffer: what goes astray is a row more often than an element
CANARY = 0xA5  # the smallest of numbers, and no value that a kernel writes by chance
POISON = 0xFF  # NaN in every floating type that has one


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed: lists, tuples, dicts and frozen containers such as a packed tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: map_tensors(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        changed_items = [map_tensors(v, change) for v in value]
        return type(value)(*changed_items) if hasattr(value, "_fields") else type(value)(changed_items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {k: map_tensors(v, change) for k, v in fields.items()}
        return value if all(changed[k] is fields[k] for k in fields) else dataclasses.replace(value, **changed)
    return value


def tensors(value: Any) -> list[Tensor]:
    """Every tensor inside a structure, in order."""
    found: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        found.append(t)
        return t

    map_tensors(value, note)
    return found


def clone(value: Any) -> Any:
    """A deep copy that keeps strides and sharing of storage out: every tensor gets memory of its own."""
    return map_tensors(value, lambda t: _span(t).clone().as_strided(t.shape, t.stride(), 0))


def _span(t: Tensor) -> Tensor:
    """The run of elements that a view touches, from its first to its last, as a 1-D tensor."""
    length = 0 if t.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((length,), (1,), t.storage_offset())


@dataclasses.dataclass
class Guarded:
    """A tensor inside a larger byte buffer. `broken()` says whether anything beside its elements was written."""

    tensor: Tensor
    whole: Tensor
    before: Tensor
    touched: Tensor

    def broken(self) -> bool:
        return bool(((self.whole != self.before) & ~self.touched).any())


def guard(t: Tensor, device: torch.device | str = "cpu", poison: bool = False, shifted: bool = False) -> Guarded:
    """`t` moved into guarded memory on `device` with its strides kept, those of 0 too; its gaps hold what the original's
    held. With `poison` its elements hold poison instead of values. With `shifted` it is aligned to its element only, and lies
    between poison instead of canaries: what is read there shows in the result."""
    span = _span(t)
    size = span.numel() * t.element_size()
    pad = PAD + (t.element_size() if shifted else 0)
    whole = torch.full((size + pad + PAD,), POISON if shifted else CANARY, dtype=torch.uint8, device=device)
    inner = whole[pad : pad + size].view(t.dtype) if size else torch.empty(0, dtype=t.dtype, device=device)
    inner.copy_(span)
    view = inner.as_strided(t.shape, t.stride(), inner.storage_offset()) if size else inner.reshape(t.shape)
    touched = torch.zeros_like(whole, dtype=torch.bool)
    if size:
        mask = torch.zeros(span.numel(), dtype=torch.bool, device=device)
        mask.as_strided(t.shape, t.stride(), 0).fill_(True)
        touched[pad : pad + size] = mask.repeat_interleave(t.element_size())
    if poison:
        whole[touched] = POISON
    return Guarded(view, whole, whole.clone(), touched)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory from torch is filled with NaN (floats) or the largest value (integers) within this context."""
    was, fill = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@contextlib.contextmanager
def one_thread(on: bool = True) -> Iterator[None]:
    """Torch works on one thread within it: small tensors on many threads mostly wait, on a busy machine for long."""
    was = torch.get_num_threads()
    torch.set_num_threads(1 if on else was)
    try:
        yield
    finally:
        torch.set_num_threads(was)
