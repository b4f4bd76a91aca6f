"""A report as one page: no script, nothing fetched, readable on a phone, on paper, in the dark and without colours.

The look is in page.html; here is what it is filled with. Glyphs say what colours say, for those who see them alike."""

from __future__ import annotations

import importlib.resources
import math

import jinja2
from markupsafe import Markup

from narrowgate.conformance.suite import STATUSES, Report, Row, named

GLYPHS = {"held": "\u2713", "failed": "\u2717", "blind": "?", "skipped": "\u2013"}
MEANINGS = {
    "held": "as written", "failed": "other than written", "blind": "the case could not have seen a wrong reading",
    "skipped": "not asked",
}  # fmt: skip


def page(report: Report) -> str:
    """The whole page as HTML."""
    source = importlib.resources.files("narrowgate.conformance").joinpath("page.html").read_text(encoding="utf-8")
    groups = report.by_op()
    gaps = {(row.op, row.case, rival): gap for row in report.rows for rival, gap in row.gaps.items() if gap > 1}
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(source).render(
        report=report, statuses=STATUSES, glyphs=GLYPHS, meanings=MEANINGS, groups=groups, verdict=verdict(report),
        anchors=_Anchors(report.rows), bar=bar, share=share, times_limit=times_limit, named=named,
        rivals=len(gaps), nearest=min(gaps.values(), default=0.0),
        first_call=round(sum(row.first_call for row in report.rows), 1),
        worst={key: max(row.worst for row in rows) for key, rows in groups.items()},
        times={key: f"{sum(row.seconds for row in rows):.2f}" for key, rows in groups.items()},
    )  # fmt: skip


class _Anchors(dict[int, str]):
    """A name on the page for each row."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__({id(row): f"c{i}" for i, row in enumerate(rows)})

    def __getitem__(self, row: object) -> str:
        return super().__getitem__(id(row))


def verdict(report: Report) -> str:
    """The result in a sentence."""
    asked = len(report.rows) - report.count("skipped")
    wrong = report.count("failed") + report.count("blind")
    if not asked:
        return "No case ran"
    return f"All {asked} cases held" if not wrong else f"{wrong} of {asked} cases did not hold"


def bar(worst: float) -> Markup:
    """An error as a bar, full at its limit; nothing for an exact result."""
    if worst == 0:
        return Markup("")
    width = 100.0 if not worst < 1 else max(1.0, 100 * worst)
    over = " over" if not worst <= 1 else ""
    return Markup('<div class="bar{}" role="img" aria-label="{}"><i style="width:{:.0f}%"></i></div>').format(
        over, share(worst), width
    )


def share(worst: float) -> str:
    """An error in words, against its limit."""
    if worst == 0:
        return "exact"
    if not math.isfinite(worst):
        return "beyond any limit"
    return "<1% of its limit" if worst < 0.005 else f"{worst:.0%} of its limit" if worst < 10 else f"{worst:.2g} limits"


def times_limit(gap: float) -> str:
    """A rival's gap in limits."""
    return "beyond any limit" if not math.isfinite(gap) else f"{gap:.2g} limits"
