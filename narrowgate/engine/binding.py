"""Which tensors of a checkpoint are which tensors of a model, decided from names and shapes before any data is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgate.errors import FileError
from narrowgate.io.packed import Store
from narrowgate.models.hybrid import HEAD, Slot
from narrowgate.packing import PackedTensor

DENSE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Source:
    """Where a slot's tensor comes from: `names`, one tensor of the checkpoint or every expert's parts, experts outermost.

    `module` is the slot's name as this checkpoint would spell it, without ".weight": what a packed copy is called.
    """

    slot: Slot
    names: tuple[str, ...]
    module: str
    packed: bool

    def read(self, store: Store, *, copy: bool = False) -> Tensor | PackedTensor:
        """The tensor; experts that the file holds apart come as one stack in memory of its own."""
        if len(self.names) == 1:
            return store.read(self.names[0], copy=copy)
        first = self.dtype(store)
        stack = torch.empty(self.slot.shape, dtype=first)
        for name, rows in zip(self.names, self.split(stack), strict=True):
            value = store.read(name, copy=copy)
            assert isinstance(value, Tensor)
            rows.copy_(value)
        return stack

    def split(self, stack: Tensor) -> list[Tensor]:
        """Views of a dense tensor, one a name."""
        if len(self.names) == 1:
            return [stack]
        return [part for expert in stack for part in expert.chunk(len(self.slot.experts))]

    def dtype(self, store: Store) -> torch.dtype | None:
        return store.dtype(self.names[0])


def bind(path: Path, store: Store, slots: Iterable[Slot], family: Any, tied: bool) -> tuple[list[Source], list[str]]:
    """(sources in the order of the slots, notices of what is left aside). Raises FileError for what does not fit."""
    known, notices = _known(path, store, family)
    heads = [name for name in (HEAD, HEAD.removesuffix(".weight")) if tied and known.pop(name, "")]
    notices += ["lm_head skipped: the model uses its embedding table as head"] if heads else []
    sources, missing = [], []
    for slot in slots:
        source = _find(slot, known, store)
        if source is None:
            missing.append(_missing(slot, known))
        else:
            _check(path, source, store)
            sources.append(source)
    if missing:
        raise FileError(f"{path}: missing tensor {_first(missing)}")
    unexpected = set(known.values()) - {name for source in sources for name in source.names}
    if unexpected:
        raise FileError(f"{path}: unexpected tensor {_first(sorted(unexpected))}: not part of this model type")
    return sources, notices


def _known(path: Path, store: Store, family: Any) -> tuple[dict[str, str], list[str]]:
    """The family's name of a tensor -> the checkpoint's, and notices of the parts that the family skips."""
    known: dict[str, str] = {}
    skipped: Counter[str] = Counter()
    for name in store:
        plain = family.canonical(name)
        if plain is None:
            skipped[next((p for p in family.SKIPPED if name.startswith(p)), name)] += 1
        elif plain in known:
            raise FileError(f"{path}: tensors {known[plain]!r} and {name!r} are the same part of the model")
        else:
            known[plain] = name
    return known, [f"{count} tensors of {part}* skipped: not part of the text model" for part, count in skipped.items()]


def _find(slot: Slot, known: dict[str, str], store: Store) -> Source | None:
    if slot.name in known and not store.packed(known[slot.name]):
        name = known[slot.name]
        return Source(slot, (name,), name.removesuffix(".weight"), False)
    if slot.module in known and store.packed(known[slot.module]):
        return Source(slot, (known[slot.module],), known[slot.module], True)
    if not slot.experts:
        return None
    parts = _parts(slot)
    if not all(part in known for part in parts):
        return None
    wrapped = known[parts[0]].removesuffix(f".0.{slot.experts[0]}.weight")
    return Source(slot, tuple(known[part] for part in parts), f"{wrapped}.{slot.name.rpartition('.')[2]}", False)


def _parts(slot: Slot) -> list[str]:
    """The names of a stack's parts where a file holds them apart, experts outermost."""
    stem = slot.name.rpartition(".")[0]
    return [f"{stem}.{e}.{part}.weight" for e in range(slot.shape[0]) for part in slot.experts]


def _missing(slot: Slot, known: dict[str, str]) -> str:
    """What to call a slot that was not found: the first part that lacks, where others of its parts are there."""
    lacking = [part for part in _parts(slot) if part not in known]
    return lacking[0] if slot.experts and len(lacking) < slot.shape[0] * len(slot.experts) else slot.name


def _check(path: Path, source: Source, store: Store) -> None:
    slot = source.slot
    want = slot.shape if len(source.names) == 1 else (slot.shape[1] // len(slot.experts), slot.shape[2])
    for name in source.names:
        if store.shape(name) != want:
            raise FileError(f"{path}: tensor {name!r}: expected shape {list(want)}, got {list(store.shape(name))}")
    if source.packed:
        if not slot.packable:
            raise FileError(f"{path}: tensor {source.names[0]!r} is packed, expected a dense one: this part is never packed")
        return
    dtypes = {store.dtype(name) for name in source.names}
    if not dtypes <= set(DENSE_DTYPES) or len(dtypes) != 1:
        got = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise FileError(f"{path}: tensor {source.names[0]!r}: expected one of float32, bfloat16, float16, got {got}")


def _first(names: list[str]) -> str:
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
