"""`narrowgate bench gdn`: the gated delta family on a GPU, beside a plain pass over as many bytes and flash-linear-attention.

Exit code 1 where something did not check and so was not timed. Left out: how it is timed (narrowgate.bench)."""

from __future__ import annotations

from typing import Annotated

import typer

from narrowgate.cli import console
from narrowgate.cli.bench_report import report
from narrowgate.cli.machine import command_line
from narrowgate.errors import InputError, UnsupportedError


def gdn(
    batches: Annotated[str, typer.Option(help="rows of a decode step, by commas")] = "1,8,32,128",
    heads: Annotated[str, typer.Option(help="value heads, multiples of 16, by commas")] = "32,48",
    lengths: Annotated[str, typer.Option(help="tokens of a prefill, by commas")] = "2048,8192",
    as_json: Annotated[bool, typer.Option("--json", help="everything as one JSON document")] = False,
) -> None:
    """Time steps, prefill, convolution and norms of the gated delta rule on a GPU, and only what checks."""
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("bench gdn: expected a GPU; torch sees none")
    from narrowgate.bench import gdn as bench
    from narrowgate.bench.timing import roofs

    sizes = [_numbers(text) for text in (batches, heads, lengths)]
    if any(h % bench.HK for h in sizes[1]):
        raise InputError(f"bench gdn: expected --heads in multiples of {bench.HK}, got {heads!r}")
    with torch.no_grad():
        found, refused = bench.measure(*sizes, tell=console.notice)
    notes = [f"peer: {bench.peer()}", "floor: a pass over as many bytes, in place where the kernel works in place", *refused]
    report(found, device="cuda", command=command_line(), roofs={"copy": roofs("cuda")["copy"]}, notes=notes, as_json=as_json)
    raise typer.Exit(1 if refused else 0)


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(p.strip().isdigit() and int(p) > 0 for p in parts):
        raise InputError(f"bench gdn: expected positive numbers by commas, got {text!r}")
    return [int(p) for p in parts]
