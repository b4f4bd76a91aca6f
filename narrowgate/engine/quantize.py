"""`quantize_checkpoint`: from a folder to a packed folder, tensor by tensor; the model is never built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from narrowgate.engine.binding import Source
from narrowgate.engine.load import open_checkpoint, pack_dense, resolve, scheme_of
from narrowgate.engine.overrides import parse
from narrowgate.engine.save import Piece, packed_like, write_checkpoint
from narrowgate.errors import InputError
from narrowgate.packing import PackedTensor

Progress = Callable[[str, int, int], None]


def quantize_checkpoint(
    path: str | Path, out: str | Path, scheme: str, overrides: str | Sequence[str] = (), progress: Progress | None = None
) -> tuple[str, ...]:  # fmt: skip
    """Quantize the model folder `path` into the new folder `out`; what it holds equals `load(path, scheme).save(out)`.

    Peak memory is the largest tensor (a stack of experts is one), not the model. progress(name, done, total) is called after
    each tensor, in values. Returns notices of what was left out. Raises InputError and FileError, one line each; on failure
    nothing is left at `out`. The source is never written to.
    """
    choice = parse(scheme, overrides)
    folder, config, sources, store, notices = open_checkpoint(path)
    if store.quantization is not None:
        raise InputError(f"quantize: {folder.path} is already packed, expected a checkpoint that is not")
    choice = resolve(choice, store, sources, config)

    def piece(source: Source) -> Piece:
        chosen = scheme_of(source, store, choice, config.tied)

        def make() -> PackedTensor | Tensor:
            value = source.read(store, copy=True)
            return value if chosen is None else pack_dense(value, chosen, source.names[0])

        if chosen is None:
            return Piece(source, torch.empty(source.slot.shape, dtype=source.dtype(store), device="meta"), make)
        try:
            like = packed_like(source.slot.shape, chosen)
        except InputError as error:
            raise InputError(f"tensor {source.names[0]!r}: {error}") from None
        return Piece(source, like, make)

    total = sum(torch.Size(source.slot.shape).numel() for source in sources)
    count = 0

    def done(written: Piece) -> None:
        nonlocal count
        count += torch.Size(written.source.slot.shape).numel()
        if progress is not None:
            progress(written.source.slot.module, count, total)

    write_checkpoint(out, folder, [piece(source) for source in sources], scheme, done)
    return tuple(notices)
