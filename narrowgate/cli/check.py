"""`narrowgate check`: hold every operator, or one's own kernel, to the shipped cases on one's own device.

Exit code 0: all held. 1: something failed, or a case was blind. 2: the question made no sense. Reports go to standard
output, progress to standard error. Left out: how a case is held (narrowgate.conformance)."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from narrowgate.cli.options import existing_device
from narrowgate.conformance.suite import Report, check, choose, jobs, named
from narrowgate.errors import FileError, InputError

STYLE = {"held": "blue", "failed": "bold red", "blind": "magenta", "skipped": "bright_black"}


def register(app: typer.Typer) -> None:
    """Add the command `check` to an app."""
    app.command("check")(command)


def command(
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N")] = "cpu",
    op: Annotated[list[str] | None, typer.Option(help="only this operator; a pattern such as 'gdn_*'; repeatable")] = None,
    impl: Annotated[str | None, typer.Option(help="reference, cpu or gpu; by default all that the device has")] = None,
    mine: Annotated[str | None, typer.Option(help="module:function, your kernel; its signature is the operator's")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="name the cases and run nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="everything as one JSON document")] = False,
    html: Annotated[Path | None, typer.Option(help="write one self-contained page", dir_okay=False)] = None,
    full: Annotated[bool, typer.Option("--full", help="the slow cases too")] = False,
    seed: Annotated[
        int, typer.Option(min=-(2**62), max=2**62, help="added to every case's seed: other draws, the same rules")
    ] = 0,
) -> None:
    """Prove on this device that every operator does what is written, and that each case would have seen it done wrong."""
    place = _device(device)
    if html is not None:
        _writable(html)
    if impl not in (None, "reference", "cpu", "gpu"):
        raise typer.BadParameter(f"expected reference, cpu or gpu, got {impl!r}", param_hint="--impl")
    function = None if mine is None else _load(mine)
    patterns = op or []
    if mine is not None and function is not None:
        patterns = [_op_of(mine, function, patterns)]
    try:
        cases = choose(patterns)
    except LookupError as error:
        raise typer.BadParameter(str(error), param_hint="--op") from None
    if list_cases:
        _list(cases, as_json)
        return
    progress = Console(stderr=True)
    with _bar(progress) as bar, contextlib.redirect_stdout(sys.stderr):  # what a kernel prints is no part of a report
        total = len(jobs(cases, place, "reference" if function else impl, full))
        task = bar.add_task("", total=total, op="")
        report = check(
            cases, device=place, impl=impl, full=full, seed=seed, mine=function,
            each=lambda row: bar.update(task, advance=1, op=row.op),
        )  # fmt: skip
    if as_json:
        print(json.dumps(report.record()))
    else:
        show(report, Console())
    if html is not None:  # last: what took minutes must not be lost for a page
        from narrowgate.conformance.page import page  # a template engine, which nothing else here needs

        _write(html, page(report))
        progress.print(f"page written to {html}")
    raise typer.Exit(0 if report.ok else 1)


# ---- what was asked for


def _device(name: str) -> str:
    try:
        existing_device(name)
    except InputError as error:
        raise typer.BadParameter(str(error)) from None
    return name


def _writable(page: Path) -> None:
    """What would keep the page from being written, known before the long part."""
    if not page.absolute().parent.is_dir() or page.is_dir():
        why = "it is a folder" if page.is_dir() else "no such folder"
    elif not os.access(page if page.exists() else page.absolute().parent, os.W_OK):
        why = "no permission"
    else:
        return
    raise typer.BadParameter(f"cannot write {page}: {why}", param_hint="--html")


def _write(page: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = page.with_name(f".{page.name}.{secrets.token_hex(4)}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, page)
    except OSError as error:
        raise FileError(f"--html: cannot write {page}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _load(target: str) -> Callable[..., Any]:
    """The function of "module:function"; modules of the current folder count."""
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise typer.BadParameter(f"expected module:function, got {target!r}", param_hint="--mine")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # the module's own code runs, and whatever it does wrong is the user's to mend
        plain = isinstance(error, (ImportError, AttributeError))
        said = f"{error}" if plain else f"{type(error).__name__}: {error}"
        raise typer.BadParameter(f"cannot load {target!r}: {said}", param_hint="--mine") from None
    finally:
        sys.path.remove(os.getcwd())
    if not callable(found):
        raise typer.BadParameter(f"{target!r} is {type(found).__name__}, expected a function", param_hint="--mine")
    return found


def _op_of(target: str, function: Callable[..., Any], patterns: list[str]) -> str:
    """The one operator whose place `function` takes; its signature must be that operator's."""
    names = sorted(choose(patterns)) if patterns else [target.rpartition(":")[2]]
    if len(names) != 1 or names[0] not in choose():
        hint = f"expected --op NAME with the one operator that it stands for, got {', '.join(patterns) or 'none'}"
        raise typer.BadParameter(f"{hint}; there are {', '.join(choose())}", param_hint="--mine")
    problem = signature_problem(names[0], function)
    if problem:
        raise typer.BadParameter(problem, param_hint="--mine")
    return names[0]


def signature_problem(op: str, function: Callable[..., Any]) -> str:
    """What keeps `function` from taking the operator's place, in words, or "".

    It must take the operator's required arguments under their names, and require no other. Arguments that have a default
    may be missing (the cases that need them are skipped), and so may `out` and `impl`."""
    import narrowgate.ops as ops

    wanted = inspect.signature(getattr(ops, op)).parameters
    expected = f"the signature of {op} is {op}({', '.join(_shown(p) for p in wanted.values() if p.name != 'impl')})"
    try:
        got = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return f"Python can read no signature of it; wrap it in a function: {expected}"
    if any(p.kind is p.POSITIONAL_ONLY for p in got.values()):
        return f"its arguments cannot be given by name; {expected}"
    anything = any(p.kind is p.VAR_KEYWORD for p in got.values())
    absent = [p.name for p in wanted.values() if p.default is p.empty and p.name not in got and not anything]
    named = [p for p in got.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    extra = [p.name for p in named if p.name not in wanted and p.default is p.empty]
    complaints = [f"it takes no {name}" for name in absent] + [f"it requires {name}, which no case gives" for name in extra]
    return f"{', '.join(complaints)}; {expected}" if complaints else ""


def _shown(parameter: inspect.Parameter) -> str:
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"


# ---- what is shown


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.fields[op]:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _list(cases: dict[str, Any], as_json: bool) -> None:
    every = [case for op in cases for case in cases[op]]
    if as_json:
        print(json.dumps([{"op": c.op, "case": c.name, "spec": c.spec, "full": c.full} for c in every]))
        return
    for case in every:
        print(f"{case.id}{'  [--full]' if case.full else ''}{'  ' + ' '.join(case.spec) if case.spec else ''}")


def show(report: Report, console: Console) -> None:
    """A table by operator, then what failed, what was skipped and why, and the sum of it."""
    shown = [status for status in STYLE if status == "held" or report.count(status)]
    timed = any(row.first_call >= 0.005 for row in report.rows)
    table = Table("operator", "kernel", *shown, "worst", "s", *(["first call s"] if timed else []), box=SIMPLE, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for (op, impl), rows in report.by_op().items():
        counts = {status: sum(row.status == status for row in rows) for status in shown}
        cells = [Text(str(n) if n else "", STYLE[status]) for status, n in counts.items()]
        first = sum(row.first_call for row in rows)
        times = [f"{sum(row.seconds for row in rows) - first:.2f}", *([f"{first:.2f}"] if timed else [])]
        table.add_row(op, impl, *cells, share(max(row.worst for row in rows)), *times)
    console.print(table)
    for row in report.rows:
        if row.status in ("failed", "blind"):
            console.print(
                Text(f"{row.status}: {row.op}/{row.case} ({row.impl}) ", STYLE[row.status]) + Text(row.detail, "default")
            )
    for reason, rows in report.skips().items():
        console.print(Text(f"skipped {len(rows)}: {reason} ({named(rows)})", STYLE["skipped"]))
    console.print(summary(report))


def share(worst: float) -> str:
    """A worst error as a share of its limit, shortly."""
    return "exact" if worst == 0 else "<1%" if worst < 0.005 else f"{worst:.0%}" if worst < 10 else f"{worst:.3g} x"


def summary(report: Report) -> str:
    """One line: how many, how long, what was left out."""
    counts = ", ".join(f"{report.count(status)} {status}" for status in STYLE if report.count(status)) or "no case ran"
    first = sum(row.first_call for row in report.rows)
    rest = f"; {report.left_out} slow cases are left to --full" if report.left_out else ""
    return (
        f"{counts}; worst errors are shares of the limit; {report.seconds - first:.1f} s and {first:.1f} s of first calls{rest}"
    )
