"""`narrowgate bench`: one sub-command for each thing that is timed."""

from __future__ import annotations

import typer

from narrowgate.cli.bench_gdn import gdn
from narrowgate.cli.bench_memory import memory
from narrowgate.cli.bench_model import model
from narrowgate.cli.bench_packed import packed

app = typer.Typer(name="bench", add_completion=False, help="Time kernels and models; nothing is timed that does not check.")
app.command()(packed)
app.command()(model)
app.command()(memory)
app.command()(gdn)


@app.callback()
def bench() -> None:
    pass
