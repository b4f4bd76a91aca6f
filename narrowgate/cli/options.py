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


@contextlib.contextmanager
def running(device: str, strict: bool) -> Iterator[None]:
    """What a command that runs a model wants round it: a device that exists, and strict dispatch if asked."""
    import torch

    from narrowgate import dispatch
    from narrowgate.errors import InputError

    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise InputError(f"--device: expected cpu, cuda or cuda:N, got {device!r}") from None
    if kind not in ("cpu", "cuda"):
        raise InputError(f"--device: expected cpu, cuda or cuda:N, got {device!r}")
    if kind == "cuda":
        count = torch.cuda.device_count()
        if (torch.device(device).index or 0) >= count:
            raise InputError(
                f"--device: expected one of the {count} GPUs that this torch {torch.__version__} sees, got {device!r}"
            )
    with dispatch.strict(strict):
        yield
