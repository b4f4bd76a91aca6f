"""Arguments and options that several commands share, each spelled once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

ModelPath = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A Hugging Face model folder, packed or not.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--override", metavar="NAME=SCHEME", help="Another scheme for tensors of that name; repeatable, first match wins."
    ),
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...")]
Strict = Annotated[bool, typer.Option("--strict", help="Fail where a reference would run instead of a kernel.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]


def existing_device(name: str) -> None:
    """Raises InputError unless `name` is the CPU or a GPU that is here."""
    import torch

    from narrowgate.errors import InputError

    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or (device.type != "cuda" and name != "cpu"):
        raise InputError(f"--device: expected cpu, cuda or cuda:N, got {name!r}")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InputError(f"--device: expected one of the {count} GPUs that this torch {torch.__version__} sees, got {name!r}")


@contextlib.contextmanager
def running(device: str, strict: bool) -> Iterator[None]:
    """What a command that runs a model wants round it: a device that exists, and strict dispatch if asked."""
    from narrowgate import dispatch

    existing_device(device)
    with dispatch.strict(strict):
        yield
