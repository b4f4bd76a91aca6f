"""How every `narrowgate bench` command reports: one table, or one JSON document, and where it was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from narrowgate.bench.timing import Measured
from narrowgate.cli import console
from narrowgate.cli.machine import machine

OURS = "narrowgate"


def report(
    found: Sequence[Measured], *, device: str, command: str, roofs: Mapping[str, float], notes: Sequence[str] = (),
    as_json: bool = False,
) -> None:  # fmt: skip
    """`notes`: what the reader must know, such as peers that are not installed."""
    where = machine(device)
    if as_json:
        rows = [{**m.as_json(), "ratio": _ratio(m, found)} for m in found]
        console.print_json({"command": command, "machine": where, "roofs": dict(roofs), "notes": list(notes), "measured": rows})
        return
    console.out().print(_table(found))
    for name, rate in roofs.items():
        print(f"roof, {name}: {rate / 1e12:.3g} T/s" if rate > 1e12 else f"roof, {name}: {rate / 1e9:.3g} G/s")
    for note in notes:
        print(f"note: {note}")
    print("machine: " + ", ".join(f"{key} {value}" for key, value in where.items()))
    print(f"command: {command}")


def _table(found: Sequence[Measured]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for name in ("case", "who"):
        table.add_column(name, no_wrap=True)
    for name in ("µs", "of the floor", "ours / theirs"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    case = None
    for m in found:
        ratio = _ratio(m, found)
        share = "" if m.share is None else f"{100 * m.share:.0f} %"
        table.add_row(
            m.case if m.case != case else "",
            m.who,
            _time(m.microseconds),
            share,
            "" if ratio is None else f"{ratio:.2f}",
            m.note,
        )
        case = m.case
    return table


def _ratio(m: Measured, found: Sequence[Measured]) -> float | None:
    """Our time over a peer's: below one, we are ahead."""
    ours = next((o for o in found if o.case == m.case and o.who == OURS), None)
    return None if ours is None or m.who == OURS else ours.microseconds / m.microseconds


def _time(microseconds: float) -> str:
    return f"{microseconds:.1f}" if microseconds < 1000 else f"{microseconds:,.0f}"


def plot(found: Sequence[Measured], path: Path) -> None:
    """A bar a contender, grouped by case, the floor as a line across; PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(m.case for m in found))
    who = list(dict.fromkeys(m.who for m in found))
    figure = Figure(figsize=(max(7, 0.35 * len(found)), 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.8 / max(len(who), 1)
    hatches = ["", "///", "...", "xxx", "\\\\\\", "++"]
    for i, name in enumerate(who):
        mine: list[Any] = [(cases.index(m.case), m) for m in found if m.who == name]
        left = [x + (i - (len(who) - 1) / 2) * width for x, _ in mine]
        axes.bar(
            left,
            [m.microseconds for _, m in mine],
            width,
            label=name,
            edgecolor="black",
            hatch=hatches[i % len(hatches)],
            alpha=0.7,
        )
        axes.hlines(
            [m.floor or 0 for _, m in mine], [x - width / 2 for x in left], [x + width / 2 for x in left], color="black"
        )
    axes.set_yscale("log")
    axes.set_ylabel("microseconds (black line: the floor)")
    axes.set_xticks(range(len(cases)), cases, rotation=40, ha="right")
    axes.legend()
    figure.savefig(path, format="png", dpi=130)
