"""Writing a checkpoint, dense and packed tensors together, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgate.engine.binding import Source
from narrowgate.errors import InputError
from narrowgate.formats import element, scheme
from narrowgate.io import packed
from narrowgate.io.checkpoint import SINGLE
from narrowgate.io.folder import ModelFolder
from narrowgate.io.writer import TensorWriter, new_folder, write_json
from narrowgate.nn.weight import Weight
from narrowgate.packing import PackedTensor

if TYPE_CHECKING:
    from narrowgate.engine.model import Bound


@dataclass(frozen=True)
class Piece:
    """A tensor to be written: `like` (on the meta device, or the tensor itself) says its form, `make()` gives it."""

    source: Source
    like: PackedTensor | Tensor
    make: Callable[[], PackedTensor | Tensor]

    def stored(self, value: PackedTensor | Tensor) -> dict[str, Tensor]:
        """The tensors of the file that hold `value`."""
        if isinstance(value, PackedTensor):
            return {f"{self.source.module}.{suffix}": part for suffix, part in packed.parts(value).items()}
        return dict(zip(self.source.names, self.source.split(value), strict=True))


def write_checkpoint(
    path: str | Path, folder: ModelFolder, pieces: Sequence[Piece], default_scheme: str | None,
    done: Callable[[Piece], None] = lambda piece: None,
) -> None:  # fmt: skip
    """A new folder at `path` with the pieces, the config and the companions of `folder`. Nothing is left on failure."""
    with new_folder(path, source=folder.path) as target:
        entries = {n: (t.dtype, tuple(t.shape)) for piece in pieces for n, t in piece.stored(piece.like).items()}
        described: dict[str, Any] = {}
        with TensorWriter(target / SINGLE, entries) as writer:
            for piece in pieces:
                value = piece.make()
                for name, tensor in piece.stored(value).items():
                    writer.write(name, tensor)
                if isinstance(value, PackedTensor):
                    described[piece.source.module] = packed.entry(value)
                del value
                done(piece)
        write_json(target / "config.json", _config(folder.config, described, default_scheme))
        folder.copy_companions(target)


def save(path: str | Path, folder: ModelFolder, bound: Sequence[Bound], default_scheme: str | None) -> None:
    """A loaded model, in the layouts that files use."""

    def piece(item: Bound) -> Piece:
        def make() -> PackedTensor | Tensor:
            return item.weight.stored().to("cpu")

        return Piece(item.source, _like(item.weight, item.source.slot.shape), make)

    write_checkpoint(path, folder, [piece(item) for item in bound], default_scheme)


def _like(weight: Weight, shape: tuple[int, ...]) -> PackedTensor | Tensor:
    """What `weight.stored()` will give, without making it where that can be known."""
    if weight.dtype is not None:
        return torch.empty(shape, dtype=weight.dtype, device="meta")
    value = weight()
    assert isinstance(value, PackedTensor)
    return weight.stored() if value.scheme is None else packed_like(shape, value.scheme)


def _config(raw: dict[str, Any], described: dict[str, Any], default_scheme: str | None) -> dict[str, Any]:
    kept = {key: value for key, value in raw.items() if key not in packed.KEYS}
    if not described:
        return kept
    ours = {"quant_method": packed.METHOD, "format_version": packed.VERSION, "default_scheme": default_scheme}
    return {**kept, "quantization_config": {**ours, "tensors": described}}


def packed_like(shape: tuple[int, ...], name: str) -> PackedTensor | Tensor:
    """The form that quantizing values of `shape` with scheme `name` gives, on the meta device: dtypes and shapes, no data."""
    from narrowgate.packing import Scale, layout
    from narrowgate.packing.rows import storage_dtype

    record = scheme(name)
    if name == "bf16":
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")
    chosen, bits = layout(record.layout), record.value_element.bits
    if shape[-1] % record.k_multiple:
        raise InputError(f"quantize: {name} needs K divisible by {record.k_multiple}, got {shape[-1]}")
    chosen.check(shape, bits, "quantize")

    def scale(kind: str, block: tuple[int, ...]) -> Scale:
        grid = tuple(-(-extent // b) for extent, b in zip(shape, block, strict=True))
        return Scale(torch.empty(grid, dtype=storage_dtype(element(kind).bits), device="meta"), kind, block)

    whole = tuple(max(extent, 1) for extent in shape)
    return PackedTensor(
        record.element, record.layout,
        torch.empty(chosen.storage_shape(shape, bits), dtype=chosen.storage_dtype(bits), device="meta"), shape,
        tuple(scale(spec.element, spec.block(shape)) for spec in record.scales),
        None if record.zero_point is None else scale("uint8", whole), (),
        None if record.codebook is None else torch.empty(2**bits, dtype=torch.int32, device="meta"),
    )  # fmt: skip
