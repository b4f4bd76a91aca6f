"""`narrowgate inspect`: what a model folder or a safetensors file holds, from config and headers alone.

No tensor data is read, so it is quick for a model of any size. What would keep the model from loading is listed as a
problem, and is the exit code 2, after everything that could be read has been printed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from narrowgate.cli import console
from narrowgate.cli.options import Json
from narrowgate.errors import FileError, NarrowgateError

_PARTS = re.compile(r"\.(data|scales\.\d+|zero_points|offset\.\d+|codebook)$")
_SHORT = {"torch.float32": "f32", "torch.bfloat16": "bf16", "torch.float16": "f16"}


@dataclass
class Group:
    """Tensors whose names differ only in numbers, stored alike: `shape` counts values."""

    name: str
    stored: str
    packed: bool
    shape: tuple[int, ...]
    count: int = 0
    nbytes: int = 0

    @property
    def values(self) -> int:
        return self.count * prod(self.shape)


@dataclass
class Inspection:
    """What was found. `nbytes`: of all tensors; `bits_per_value`: of the packed ones, every scale counted, else of all."""

    path: str
    groups: list[Group]
    model: dict[str, Any] | None = None
    notices: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(g.nbytes for g in self.groups)

    @property
    def packed_tensors(self) -> int:
        return sum(g.count for g in self.groups if g.packed)

    @property
    def kept_tensors(self) -> int:
        return sum(g.count for g in self.groups if not g.packed)

    @property
    def bits_per_value(self) -> float:
        counted = [g for g in self.groups if g.packed] or self.groups
        return 8 * sum(g.nbytes for g in counted) / max(1, sum(g.values for g in counted))

    def as_json(self) -> dict[str, Any]:
        return {
            "path": self.path, "model": self.model, "tensors": self.packed_tensors + self.kept_tensors,
            "values": sum(g.values for g in self.groups), "bytes": self.nbytes, "bits_per_value": self.bits_per_value,
            "packed_tensors": self.packed_tensors, "kept_tensors": self.kept_tensors, "notices": self.notices,
            "problems": self.problems, "groups": [{**asdict(g), "values": g.values} for g in self.groups],
        }  # fmt: skip


def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A model folder or a .safetensors file.", show_default=False)],
    json: Json = False,
) -> None:
    """Say what a model folder or a safetensors file holds, without loading it."""
    found = look(path)
    if json:
        console.print_json(found.as_json())
    else:
        _show(found)
    if found.problems:
        raise FileError(found.problems[0] + (f" (and {len(found.problems) - 1} more)" if len(found.problems) > 1 else ""))


def look(path: Path) -> Inspection:
    """Read headers and config. Raises FileError if not even the tensors can be listed."""
    from narrowgate.io.checkpoint import Checkpoint
    from narrowgate.io.header import read_header

    if path.is_dir():
        return _look_at_folder(path, Checkpoint(path))
    if path.suffix == ".safetensors":
        headers = read_header(path)
        return Inspection(str(path), _grouped((n, str(i.dtype), False, i.shape, i.nbytes) for n, i in headers.items()))
    raise FileError(
        f"{path}: expected a model folder or a .safetensors file, got {'a file' if path.exists() else 'nothing there'}"
    )


def _look_at_folder(path: Path, checkpoint: Any) -> Inspection:
    from narrowgate.engine.load import open_checkpoint
    from narrowgate.io.json_file import read_json
    from narrowgate.io.packed import Store

    problems: list[str] = []
    notices: list[str] = []
    config, store = None, None
    try:
        raw = read_json(path / "config.json")
        store = Store(checkpoint, raw)
    except NarrowgateError as error:
        problems.append(str(error))
    try:
        folder, config, _, _, notices = open_checkpoint(path)
        if folder.tokenizer is None:
            notices = [*notices, "no tokenizer.json: the model takes token ids only"]
    except NarrowgateError as error:
        if str(error) not in problems:
            problems.append(str(error))
    model = None if config is None else {**asdict(config), "layers": config.layers}
    return Inspection(str(path), _grouped(_tensors(checkpoint, store)), model, list(notices), problems)


def _tensors(checkpoint: Any, store: Any) -> Iterator[tuple[str, str, bool, tuple[int, ...], int]]:
    """(name, how stored, packed, shape, bytes) of every tensor; the parts of a packed one together."""
    if store is None:
        for name in checkpoint:
            info = checkpoint.info(name)
            yield name, str(info.dtype), False, info.shape, info.nbytes
        return
    described = store.quantization["tensors"] if store.quantization else {}
    sizes: dict[str, int] = {}
    for name in checkpoint:
        whole = _PARTS.sub("", name)
        if store.packed(whole):
            sizes[whole] = sizes.get(whole, 0) + checkpoint.info(name).nbytes
    for name in store:
        if store.packed(name):
            entry = described[name]
            yield name, str(entry.get("scheme") or entry["element"]), True, store.shape(name), sizes.get(name, 0)
        else:
            info = checkpoint.info(name)
            yield name, str(info.dtype), False, info.shape, info.nbytes


def _grouped(tensors: Iterator[tuple[str, str, bool, tuple[int, ...], int]]) -> list[Group]:
    groups: dict[tuple[Any, ...], Group] = {}
    for name, stored, packed, shape, nbytes in tensors:
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        kind = _SHORT.get(stored, stored.removeprefix("torch."))
        key = (pattern, kind, tuple(shape))
        group = groups.setdefault(key, Group(pattern, kind, packed, tuple(shape)))
        group.count += 1
        group.nbytes += nbytes
    return sorted(groups.values(), key=lambda g: (g.name, g.stored))


def _show(found: Inspection) -> None:
    print(found.path)
    if found.model is not None:
        for line in _model_lines(found.model):
            print(line)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("tensors (* stands for a number)", overflow="fold")
    for name in ("count", "shape", "stored", "bytes"):
        table.add_column(name, justify="left" if name == "stored" else "right", no_wrap=True)
    for g in found.groups:
        shape = "x".join(map(str, g.shape)) or "-"
        table.add_row(g.name.removesuffix(".weight"), str(g.count), shape, g.stored, console.nbytes(g.nbytes))
    console.out().print(table)
    values = sum(g.values for g in found.groups)
    print(f"total     {found.packed_tensors + found.kept_tensors} tensors, {values:,} values, {found.nbytes:,} bytes")
    if found.packed_tensors:
        print(
            f"packed    {found.packed_tensors} tensors at {found.bits_per_value:.3f} bits a value; {found.kept_tensors} are not packed"
        )
    for note in found.notices:
        print(f"note      {note}")
    for problem in found.problems:
        print(f"problem   {problem}")


def _model_lines(m: dict[str, Any]) -> Iterator[str]:
    full = sum(kind == "full_attention" for kind in m["layer_types"])
    yield (
        f"model     {m['model_type']}: {m['layers']} layers, {m['layers'] - full} gated delta and {full} attention, "
        f"hidden {m['hidden_size']}, vocabulary {m['vocab_size']}"
    )
    yield (
        f"heads     delta {m['k_heads']} of {m['k_dim']} serve {m['v_heads']} of {m['v_dim']}; "
        f"attention {m['kv_heads']} serve {m['heads']} of {m['head_dim']}"
    )
    moe = m["moe"]
    width = f"mlp {m['intermediate_size']}"
    if moe is not None:
        width = (
            f"{moe['experts']} experts of {moe['intermediate']}, {moe['top_k']} a token, shared {moe['shared_intermediate']}"
        )
    yield f"widths    {width}; {'head tied to the embedding' if m['tied'] else 'head of its own'}; dtype {m['dtype']}"
