"""`narrowgate quantize`: a checkpoint to a packed checkpoint, tensor by tensor; OUT appears whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from narrowgate.cli import console
from narrowgate.cli.options import Json, ModelPath, Overrides
from narrowgate.errors import InputError, NarrowgateError


def quantize(
    model: ModelPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write: new or empty.", show_default=False)],
    scheme: Annotated[str, typer.Option("--scheme", help="mxfp4, nvfp4, int4_g32, q8_0, ...", show_default=False)],
    override: Overrides = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is a checkpoint that narrowgate packed.")] = False,
    json: Json = False,
) -> None:
    """Write MODEL to OUT with its matrices packed as SCHEME."""
    from narrowgate.cli.inspect import Inspection, look
    from narrowgate.engine import quantize_checkpoint

    began = time.perf_counter()
    _apart(model, out)
    with _target(out, force) as target, console.progress() as bar:
        line = bar.add_task("quantizing", total=None)

        def progress(name: str, done: int, total: int) -> None:
            bar.update(line, description=name, completed=done, total=total)

        notices = quantize_checkpoint(model, target, scheme, override or [], progress)
    before, after = look(model), look(out)
    if json:
        console.print_json(
            {
                "model": str(model), "out": str(out), "scheme": scheme, "overrides": override or [], "notices": notices,
                "bytes_before": before.nbytes, "bytes_after": after.nbytes, "bits_per_value": after.bits_per_value,
                "packed_tensors": after.packed_tensors, "kept_tensors": after.kept_tensors,
                "seconds": time.perf_counter() - began,
            }
        )  # fmt: skip
    else:
        _summary(before, after, out, notices, time.perf_counter() - began)
    assert isinstance(after, Inspection)


def _summary(before: Any, after: Any, out: Path, notices: tuple[str, ...], seconds: float) -> None:
    print(f"wrote     {out} in {seconds:.1f} s")
    print(f"bytes     {before.nbytes:,} before, {after.nbytes:,} after ({after.nbytes / max(1, before.nbytes):.1%})")
    print(f"packed    {after.packed_tensors} tensors at {after.bits_per_value:.3f} bits a value, every scale counted")
    print(f"kept      {after.kept_tensors} tensors as in the checkpoint")
    for note in notices:
        print(f"note      {note}")


def _apart(model: Path, out: Path) -> None:
    """Writing must not reach the source, nor a folder that holds it."""
    source, target = model.resolve(), out.resolve()
    if source == target:
        raise InputError(f"quantize: expected OUT to be another folder than MODEL, got {out} for both")
    if source in target.parents or target in source.parents:
        raise InputError(f"quantize: expected OUT and MODEL apart from one another, got {out} and {model}")


@contextmanager
def _target(out: Path, force: bool) -> Iterator[Path]:
    """Where to write. With --force that is a folder beside OUT, which takes OUT's place once it is whole."""
    if not out.exists() or not (out.is_dir() and any(out.iterdir())):
        yield out
        return
    if not force:
        raise InputError(
            f"quantize: expected OUT to be new or empty, got {out}, which holds something (--force replaces a checkpoint)"
        )
    if not _ours(out):
        raise InputError(f"quantize: --force replaces only a checkpoint that narrowgate packed, and {out} is none")
    real = out.resolve()
    fresh, old = (real.with_name(f".{real.name}.{secrets.token_hex(4)}.{end}") for end in ("new", "old"))
    try:
        yield fresh
        _swap(real, fresh, old, os.replace)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _swap(real: Path, fresh: Path, old: Path, rename: Callable[[Path, Path], None]) -> None:
    rename(real, old)
    try:
        rename(fresh, real)
    except BaseException:
        rename(old, real)
        raise


def _ours(folder: Path) -> bool:
    from narrowgate.io.json_file import read_json
    from narrowgate.io.packed import quantization

    try:
        return quantization(read_json(folder / "config.json")) is not None
    except NarrowgateError:
        return False
