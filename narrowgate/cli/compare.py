"""`narrowgate compare`: one model in several formats, side by side.

The checkpoint runs first, as it is, and is the reference; then every scheme, one model in memory at a time. How scores and
times are taken is in engine/evaluate.py and engine/measure.py; how they are shown, in report.py and plot.py."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress, TaskID

from narrowgate.cli import console
from narrowgate.cli.machine import command_line, machine
from narrowgate.cli.options import Device, Json, ModelPath, Overrides, Strict, running
from narrowgate.errors import FallbackWarning, InputError

if TYPE_CHECKING:
    from narrowgate.engine.evaluate import Passage, Reference, Score, Task
    from narrowgate.engine.measure import Size, Speed

DEFAULT_SCHEMES = "int8_g32,mxfp8_e4m3,mxfp6_e2m3,int4_g32,nvfp4,mxfp4,nf4_g64,q4_0,int2_g32"
DEFAULT_BYTES = 32_768


@dataclass
class Row:
    """One model that was run."""

    label: str
    path: str
    scheme: str | None
    reference: bool = False
    score: Score | None = None
    size: Size | None = None
    speed: Speed | None = None
    packed_ends: list[str] = field(default_factory=list)  # "embedding", "head", where they are packed
    contracts: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Comparison:
    """Everything that compare reports."""

    rows: list[Row]
    passage: Passage
    task: Task
    spilled: int
    overrides: list[str]
    machine: dict[str, Any]
    command: str
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        text = {
            "origin": self.passage.origin, "names": self.passage.names, "sha256": self.passage.sha256,
            "scored_bytes": self.task.scored_bytes, "bytes": self.passage.nbytes, "total_bytes": self.passage.total_bytes,
            "tokens": self.task.tokens, "windows": len(self.task.windows), "context": self.task.context,
            "start_token": self.task.start, "python": self.passage.python,
        }  # fmt: skip
        return {
            "command": self.command, "machine": self.machine, "text": text, "overrides": self.overrides,
            "kl": "KL(reference || scheme), nats, mean over tokens, whole vocabulary", "reference_disk_bytes": self.spilled,
            "seconds": self.seconds, "rows": [asdict(row) for row in self.rows],
        }  # fmt: skip


def compare(
    model: ModelPath,
    schemes: Annotated[str | None, typer.Option("--schemes", metavar="A,B,...", help=f"Default: {DEFAULT_SCHEMES}")] = None,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="Score this text, UTF-8, not the held-out one.")
    ] = None,
    max_bytes: Annotated[int, typer.Option("--max-bytes", help="Bytes of text to score; 0 for all of it.")] = DEFAULT_BYTES,
    context: Annotated[int | None, typer.Option("--context", help="Most tokens of a window; default 2048.")] = None,
    reference: Annotated[
        Path | None, typer.Option("--reference", metavar="FOLDER", help="Compare with this model, not with MODEL itself.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw size against quality.")] = None,
    override: Overrides = None,
    device: Device = "cpu",
    strict: Strict = False,
    json: Json = False,
) -> None:
    """Formats side by side: bits a value, bytes, bits per byte of text, KL, top-1 agreement, tokens a second.

    MODEL runs as it is first and is the reference. A packed MODEL has its one row, and --reference gives it something to be
    compared with.
    """
    from narrowgate.cli import plot as plotting
    from narrowgate.cli import report
    from narrowgate.engine.evaluate import file_passage, held_out_passage

    began = time.perf_counter()
    if plot is not None:
        plotting.check(plot)
    with running(device, strict):
        rows = _rows(model, schemes, reference, override or [])
        if text is None and not (model / "held_out.json").exists():
            raise InputError(f"compare: {model} has no held_out.json that lists a text, so --text FILE is needed")
        passage = held_out_passage(model, max_bytes) if text is None else file_passage(text, max_bytes)
        found = _run(rows, passage, context, override or [], device)
    found.seconds = time.perf_counter() - began
    if json:
        console.print_json(found.as_json())
    else:
        report.show(found)
    if plot is not None:  # last: what took minutes must not be lost for a picture
        plotting.draw(found, plot)
        console.notice(f"plot: {plot}")


def _rows(model: Path, schemes: str | None, reference: Path | None, overrides: list[str]) -> list[Row]:
    """What is to run, in order; everything that can be refused is refused here, before anything runs."""
    from narrowgate.engine.load import open_checkpoint
    from narrowgate.engine.overrides import parse

    names = [name.strip() for name in (DEFAULT_SCHEMES if schemes is None else schemes).split(",") if name.strip()]
    for name in names:
        parse(name, overrides)
    if schemes is not None and not names:
        raise InputError("compare: expected --schemes as names with commas between them, got none")
    _, config, _, store, _ = open_checkpoint(model)
    packed = None if store.quantization is None else str(store.quantization.get("default_scheme"))
    rows = []
    if reference is not None:
        _, other, _, known, _ = open_checkpoint(reference)
        if other.vocab_size != config.vocab_size:
            raise InputError(
                f"compare: {reference} has {other.vocab_size} tokens, {model} has {config.vocab_size}: expected the same"
            )
        rows.append(Row(_own_label(other.dtype, known.quantization), str(reference), None, reference=True))
    own = Row(packed or _own_label(config.dtype, None), str(model), None, reference=reference is None)
    if packed is None:
        return [*rows, own, *(Row(n, str(model), n) for n in dict.fromkeys(names) if not (n == "bf16" and own.label == "bf16"))]
    if schemes is not None or overrides:
        raise InputError(f"compare: {model} is packed already ({packed}): expected no --schemes and no --override")
    return [*rows, own]


def _own_label(dtype: str | None, quantization: dict[str, Any] | None) -> str:
    if quantization is not None:
        return str(quantization.get("default_scheme"))
    return {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}.get(str(dtype), "as it is")


def _run(rows: list[Row], passage: Passage, context: int | None, overrides: list[str], device: str) -> Comparison:
    from narrowgate.engine import load
    from narrowgate.engine.evaluate import Reference, task

    work: Task | None = None
    known: Reference | None = None
    try:
        with console.progress() as bar:
            for row in rows:
                line = bar.add_task(row.label.ljust(12), total=None)
                began = time.perf_counter()
                model = load(row.path, row.scheme, overrides=overrides if row.scheme else (), device=device)
                row.seconds["load"] = time.perf_counter() - began
                encoded = task(model, passage, context)
                if work is None:
                    work = encoded
                    known = Reference(work.tokens, model.config.vocab_size) if len(rows) > 1 else None
                elif encoded.windows != work.windows:
                    raise InputError(f"compare: {row.path} encodes the text into other tokens than {rows[0].path}")
                bar.update(line, total=work.tokens)
                _measure(row, model, work, known, partial(_advance, bar, line))
                del model
                gc.collect()
                bar.remove_task(line)
                _say_done(row)
    finally:
        if known is not None:
            known.__exit__()
    assert work is not None
    spilled = 0 if known is None else known.nbytes
    return Comparison(rows, passage, work, spilled, overrides, machine(device), command_line())


def _measure(row: Row, model: Any, work: Task, known: Reference | None, progress: Callable[[int], None]) -> None:
    from narrowgate.engine.evaluate import score
    from narrowgate.engine.measure import contracts, packed_ends, size, speed

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FallbackWarning)
        began = time.perf_counter()
        row.score = score(model, work, known, write=row.reference, progress=progress)
        row.seconds["score"] = time.perf_counter() - began
        row.speed = speed(model, [token for window in work.windows for token in window.inputs])
        row.seconds["speed"] = time.perf_counter() - began - row.seconds["score"]
    row.size = size(model)
    row.packed_ends = packed_ends(model)
    row.contracts = [{**asdict(plan), "tensors": count} for plan, count in contracts(model).items()]
    row.notes = [*model.notices, *sorted({str(w.message) for w in caught if issubclass(w.category, FallbackWarning)})]


def _advance(bar: Progress, line: TaskID, tokens: int) -> None:
    bar.update(line, advance=tokens)


def _say_done(row: Row) -> None:
    assert row.score is not None
    console.notice(f"{row.label}: {row.score.bits_per_byte:.4f} bits per byte, {sum(row.seconds.values()):.1f} s")
