"""Every layout by name. A new layout is one file with a `LAYOUT` record, and one line here."""

from __future__ import annotations

from narrowgate.errors import InputError
from narrowgate.packing import containers, fp6, lanes, planes, rows, swizzle, words
from narrowgate.packing.layout import Layout

_LAYOUTS: dict[str, Layout] = {m.LAYOUT.name: m.LAYOUT for m in (words, fp6, containers, rows, swizzle, lanes)}
_LAYOUTS |= {chosen.name: chosen for chosen in (lanes.UNITS, *planes.LAYOUTS, planes.COLUMNS)}

SCALE_LAYOUTS = ("rows@1", "swizzle_128x4@1", "words@1", "lanes16_units@1", "columns@1")


def layout(name: str) -> Layout:
    """The layout called `name`. Raises InputError with the known names for any other.

    >>> layout("words@1").storage_shape((3, 5), 4)
    (2,)
    """
    try:
        return _LAYOUTS[name]
    except (KeyError, TypeError):
        raise InputError(f"layout: expected one of {', '.join(_LAYOUTS)}, got {name!r}") from None


def layouts() -> tuple[str, ...]:
    """The names of all layouts."""
    return tuple(_LAYOUTS)
