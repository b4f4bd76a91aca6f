"""`load`: from a folder to a Model. Each tensor is read, quantized if asked, and bound, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from narrowgate.engine.binding import DENSE_DTYPES, Source, bind
from narrowgate.engine.model import Bound, Model
from narrowgate.engine.overrides import SchemeChoice, parse
from narrowgate.errors import InputError
from narrowgate.io.folder import ModelFolder
from narrowgate.io.packed import Store
from narrowgate.models import family
from narrowgate.models.config import HybridConfig
from narrowgate.models.hybrid import EMBEDDING, HEAD, Builder, slots
from narrowgate.nn.weight import Weight
from narrowgate.ops import quantize
from narrowgate.packing import PackedTensor


def load(
    path: str | Path,
    scheme: str | None = None,
    *,
    overrides: str | Sequence[str] = (),
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> Model:
    """A model from a Hugging Face folder, as it is (`scheme=None`) or quantized tensor by tensor while it is read.

    overrides: ordered "pattern=scheme", the first match wins ("lm_head=mxfp8_e4m3", "*.down_proj=bf16"). dtype: of the
    activations; None is float32 on the CPU and bfloat16 on a GPU. Tensors that are never packed, and all of them without a
    scheme, keep the checkpoint's dtype and bits. A packed checkpoint loads as it was packed.
    Raises FileError for what the folder does not hold as it should, InputError for wrong arguments; one line each.
    """
    choice = parse(scheme, overrides)
    if dtype is not None and dtype not in DENSE_DTYPES:
        raise InputError(f"load: expected dtype float32, bfloat16 or float16, got {dtype}")
    target = torch.device(device)
    dtype = dtype or (torch.float32 if target.type == "cpu" else torch.bfloat16)
    folder, config, sources, store, notices = open_checkpoint(path)
    choice = resolve(choice, store, sources, config)
    bound = {s.slot.name: Bound(s, Weight(take(s, store, choice, config.tied, target))) for s in sources}
    store.close()
    build = Builder(config, lambda name: bound[name].weight, dtype, batch_invariant)
    decoder = build.decoder(family(folder.config).build_projection)
    decoder.frequencies = decoder.frequencies.to(target)
    decoder.prepare()
    return Model(folder, config, decoder, bound, choice, dtype, target, tuple(notices))


def open_checkpoint(path: str | Path) -> tuple[ModelFolder, HybridConfig, list[Source], Store, list[str]]:
    """Everything that can be known, and refused, from names, shapes and settings: no tensor data has been read."""
    folder = ModelFolder(path)
    folder.eos_ids  # noqa: B018  read here, so that a bad one is known before the long part
    where = str(folder.path / "config.json")
    model = family(folder.config, where)
    config = model.read_config(folder.config, where)
    store = Store(folder.checkpoint, folder.config)
    sources, notices = bind(folder.path, store, slots(config, model.projections), model, config.tied)
    return folder, config, sources, store, notices


def resolve(choice: SchemeChoice, store: Store, sources: Sequence[Source], config: HybridConfig) -> SchemeChoice:
    """The choice, once it is known to make sense for this checkpoint."""
    if store.quantization is None:
        choice.check_used(m for s in sources if s.slot.packable for m in names_of(s, config.tied))
        return choice
    packed_as = store.quantization.get("default_scheme")
    if choice.overrides or choice.default not in (None, packed_as):
        asked = choice.default if choice.default not in (None, packed_as) else "overrides"
        raise InputError(f"load: the checkpoint is already packed as {packed_as}: expected no other scheme, got {asked}")
    return SchemeChoice(packed_as if isinstance(packed_as, str) else None)


def names_of(source: Source, tied: bool) -> tuple[str, ...]:
    """What overrides may call a tensor. A tied table is the embedding and the head."""
    name = source.slot.name
    return (source.slot.module, HEAD.removesuffix(".weight")) if tied and name == EMBEDDING else (source.slot.module,)


def take(source: Source, store: Store, choice: SchemeChoice, tied: bool, device: torch.device) -> PackedTensor | Tensor:
    """The tensor of a slot on `device`, packed if it is to be."""
    value = source.read(store).to(device)
    chosen = scheme_of(source, store, choice, tied)
    return value if chosen is None else pack_dense(value, chosen, source.names[0])


def scheme_of(source: Source, store: Store, choice: SchemeChoice, tied: bool) -> str | None:
    """The scheme that a slot is to be quantized with, None to keep it as it is in the file."""
    if source.packed or not source.slot.packable or store.quantization is not None:
        return None
    chosen = choice(*names_of(source, tied))
    return None if chosen == "bf16" and source.dtype(store) == torch.bfloat16 else chosen


def pack_dense(value: PackedTensor | Tensor, scheme: str, name: str) -> PackedTensor | Tensor:
    """Quantize one tensor; "bf16" stays a dense tensor, which every other program can read too."""
    assert isinstance(value, Tensor)
    try:
        packed = quantize(value, scheme)
    except InputError as error:
        raise InputError(f"tensor {name!r}: {error}") from None
    return packed.data.view(torch.bfloat16) if scheme == "bf16" else packed
