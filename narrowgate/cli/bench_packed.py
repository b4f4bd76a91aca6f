"""`narrowgate bench packed`: packed products on this CPU beside ggml's, or on a GPU beside the vendor's and humming's.

Exit code 1 where a product did not check and so was not timed. ggml comes with the package llama-cpp-python; `--ggml FOLDER`
names another place of libggml-base.so and libggml-cpu.so. Left out: how it is timed (narrowgate.bench)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowgate.cli import console
from narrowgate.cli.bench_report import plot as draw
from narrowgate.cli.bench_report import report
from narrowgate.cli.machine import command_line
from narrowgate.errors import InputError


def packed(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    rows: Annotated[str | None, typer.Option(help="numbers of activation rows, by commas")] = None,
    shapes: Annotated[str | None, typer.Option(help="NxK of the weight, by commas")] = None,
    scheme: Annotated[list[str] | None, typer.Option(help="only this scheme; repeatable")] = None,
    ggml: Annotated[str | None, typer.Option(help="folder of ggml's libraries; by default llama-cpp-python's")] = None,
    threads: Annotated[int | None, typer.Option(help="threads of both sides; by default torch's number")] = None,
    seconds: Annotated[float, typer.Option(help="for one case")] = 2.0,
    plot: Annotated[Path | None, typer.Option(help="a PNG of the figures")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="everything as one JSON document")] = False,
) -> None:
    """Time packed products against the peers that are installed: cold weights, and only what checks."""
    import torch

    from narrowgate.bench import packed as bench
    from narrowgate.bench.timing import roofs

    if device not in _CASES:
        raise InputError(f"bench packed: expected --device cpu or cuda, got {device!r}")
    usual_shapes, usual_rows = _CASES[device]
    sizes = [_shape(s) for s in (shapes or usual_shapes).split(",")]
    counts = [_number(m) for m in (rows or usual_rows).split(",")]
    if device == "cuda":
        raise typer.Exit(_on_gpu(sizes, counts, scheme, plot, as_json))
    pairs = [pair for pair in bench.PAIRS if not scheme or pair[0] in scheme]
    if not pairs:
        raise InputError(f"bench packed: expected --scheme among {', '.join(sorted({p[0] for p in bench.PAIRS}))}")
    if threads is not None:
        torch.set_num_threads(threads)
    lib, name = bench.peer(ggml)
    with console.progress() as bar:
        task = bar.add_task("products", total=len(sizes) * len(counts) * len(pairs))

        def tell(case: str) -> None:
            bar.advance(task)
            console.notice(case)

        found, refused = bench.measure(sizes, counts, pairs, lib, seconds=seconds, tell=tell)
    notes = [
        f"peer: {name}" + ("; +r: repacked by it for this processor" if lib else ""),
        f"up to {bench.COLD_ROWS} rows weights are cold, read from memory at every call; ggml's types quantize activations to int8",
        *refused,
    ]
    roof = {"read": roofs("cpu")["read"]}
    report(found, device="cpu", command=command_line(), roofs=roof, notes=notes, as_json=as_json)
    if plot is not None:
        draw(found, plot)
    raise typer.Exit(1 if refused else 0)


_CASES = {
    "cpu": ("4096x4096,11008x4096", "1,8,64,512"),
    "cuda": ("16384x5120,5120x17408", "1,4,16,64,256,2048"),
}


def _on_gpu(
    shapes: list[tuple[int, int]], rows: list[int], schemes: list[str] | None, path: Path | None, as_json: bool
) -> int:  # fmt: skip
    import torch

    from narrowgate.bench import packed_gpu as bench
    from narrowgate.bench.timing import roofs

    if not torch.cuda.is_available():
        raise InputError("bench packed: expected a GPU for --device cuda")
    chosen = schemes or list(bench.SCHEMES)
    with console.progress() as bar:
        task = bar.add_task("products", total=len(shapes) * len(rows) * len(chosen))

        def tell(case: str) -> None:
            bar.advance(task)
            console.notice(case)

        found, refused = bench.measure(shapes, rows, chosen, tell)
    notes = [f"peer: {bench.humming()[1]}", "weights are cold, read from memory at every call", *refused]
    report(found, device="cuda", command=command_line(), roofs=roofs("cuda"), notes=notes, as_json=as_json)
    if path is not None:
        draw(found, path)
    return 1 if refused else 0


def _number(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise InputError(f"bench packed: expected positive numbers by commas, got {text!r}")
    return int(text)


def _shape(text: str) -> tuple[int, int]:
    n, _, k = text.partition("x")
    return _number(n), _number(k)
