"""Where things are printed: results on stdout, progress and notices on stderr; and how numbers are written."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


def out() -> Console:
    return Console(highlight=False, markup=False, emoji=False)


def err() -> Console:
    return Console(highlight=False, markup=False, emoji=False, stderr=True)


def progress() -> Progress:
    """A bar on stderr, gone when it is done; nothing at all where stderr is no terminal."""
    console = err()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def notice(message: str) -> None:
    """A line on stderr for a log to show how far things are; where there is a terminal, the bar shows it."""
    if not sys.stderr.isatty():
        print(message, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One document. Numbers that JSON cannot write (a NaN or an infinity) become null."""
    print(json.dumps(_finite(value), indent=2, ensure_ascii=True))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def nbytes(count: int) -> str:
    """Exact while it fits a narrow column: 15,826,448, then 17.21 GB (10^9 bytes).

    >>> nbytes(15826448), nbytes(17210000000)
    ('15,826,448', '17.21 GB')
    """
    return f"{count:,}" if count < 10**9 else f"{count / 1e9:.2f} GB"


def rate(per_second: float) -> str:
    """Tokens a second, to three digits.

    >>> rate(8.123), rate(1234.5)
    ('8.12', '1234')
    """
    return f"{per_second:.0f}" if per_second >= 100 else f"{per_second:.3g}"
