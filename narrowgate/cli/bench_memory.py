"""`narrowgate bench memory`: the operators that move memory, as shares of the rate at which this machine copies.

Exit code 1 where something did not check and so was not timed. Left out: how it is timed (narrowgate.bench)."""

from __future__ import annotations

from typing import Annotated

import typer

from narrowgate.cli import console
from narrowgate.cli.bench_report import report
from narrowgate.cli.machine import command_line
from narrowgate.errors import InputError


def memory(
    shape: Annotated[str, typer.Option(help="NxK of the tensor")] = "4096x4096",
    scheme: Annotated[list[str] | None, typer.Option(help="only this scheme; repeatable")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    seconds: Annotated[float, typer.Option(help="for one case on the CPU")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="everything as one JSON document")] = False,
) -> None:
    """Time dequantize, embedding and the quantizers against a copy of as many bytes; only what checks."""
    from narrowgate.bench import memory as bench
    from narrowgate.bench.timing import roofs

    n, _, k = shape.partition("x")
    if not (n.isdigit() and k.isdigit() and int(n) > 0 and int(k) > 0 and int(k) % 64 == 0):
        raise InputError(f"bench memory: expected --shape NxK with K a multiple of 64, got {shape!r}")
    schemes = tuple(scheme or bench.SCHEMES)
    with console.progress() as bar:
        task = bar.add_task("cases", total=5 * len(schemes) + len(bench.GROUPED))

        def tell(case: str) -> None:
            bar.advance(task)
            console.notice(case)

        found, refused = bench.measure((int(n), int(k)), schemes, device=device, seconds=seconds, tell=tell)
    roof = {"copy": roofs(device)["copy"]}
    report(found, device=device, command=command_line(), roofs=roof, notes=refused, as_json=as_json)
    raise typer.Exit(1 if refused else 0)
