"""The picture of a comparison: size against quality, one point a row, readable without colour."""

from __future__ import annotations

import importlib.util
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgate.errors import FileError, InputError

if TYPE_CHECKING:
    from narrowgate.cli.compare import Comparison

_MARKERS = "os^vDPX<>*ph"


@dataclass(frozen=True)
class _Point:
    label: str
    x: float
    y: float
    marker: str


def check(path: Path) -> None:
    """Everything that would make `draw` fail, known before the long part. Raises InputError or FileError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot: needs matplotlib, which is not installed: pip install 'narrowgate[plot]'")
    if path.suffix.lower() != ".png":
        raise InputError(f"--plot: expected a file name that ends in .png, got {path}")
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise FileError(f"--plot: cannot write {path}: {'it is a folder' if path.is_dir() else 'no such folder'}")


def draw(found: Comparison, path: Path) -> None:
    """KL from the reference, on a log axis, over the model's bytes; every name with its bits per byte. Where there is no
    KL (one row), bits per byte on a linear axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    points = _points(found)
    for point in points:
        axes.scatter(
            [point.x], [point.y], s=60, marker=point.marker, facecolor="white", edgecolor="black", linewidth=1.4, zorder=3
        )
    _dress(axes, found, log=bool(points) and len(found.rows) > 1)
    figure.draw_without_rendering()
    _labels(figure, axes, points)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        figure.savefig(temporary, format="png", dpi=130)
        os.replace(temporary, path)
    except OSError as error:
        raise FileError(f"--plot: cannot write {path}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _points(found: Comparison) -> list[_Point]:
    """From the worst to the best, so that names go down the page as their points do."""
    points = []
    for i, row in enumerate(found.rows):
        assert row.size is not None
        assert row.score is not None
        y = row.score.kl if len(found.rows) > 1 else row.score.bits_per_byte
        if y > 0:  # a log axis has no place for the reference itself, nor for a scheme that changes nothing
            label = f"{row.label}  {row.score.bits_per_byte:.4f}"
            points.append(_Point(label, row.size.nbytes / 1e6, y, _MARKERS[i % len(_MARKERS)]))
    return sorted(points, key=lambda point: -point.y)


def _dress(axes: Any, found: Comparison, log: bool) -> None:
    first, last = found.rows[0], Path(found.rows[-1].path).resolve()
    assert first.size is not None
    assert first.score is not None
    text = f"{last.parent.name}/{last.name}: size against quality"
    axes.set_title(text, loc="left", fontsize=12)
    axes.set_xlabel("bytes of the whole model, MB ($10^6$)")
    axes.margins(x=0.15, y=0.12)
    if log:
        axes.set_yscale("log")
        axes.set_ylabel(f"KL({first.label} || scheme), nats a token, log scale; lower is better")
        axes.axvline(first.size.nbytes / 1e6, color="0.4", linestyle="--", linewidth=1, zorder=1)
        note = f"{first.label}, the reference \n{first.score.bits_per_byte:.4f} bits a byte "
        axes.text(first.size.nbytes / 1e6, 0.98, note, transform=axes.get_xaxis_transform(), ha="right", va="top", fontsize=9)
    else:
        axes.set_ylabel("bits per byte of text (lower is better)")
    axes.annotate(
        f"beside each name: bits per byte of {found.task.scored_bytes:,} bytes of text", (1, 1), (0, 5), fontsize=9, color="0.3",
        xycoords="axes fraction", textcoords="offset points", ha="right", va="bottom",
    )  # fmt: skip
    axes.grid(True, which="major", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _places() -> list[tuple[float, float]]:
    """Offsets in points to try for a name, the nearest first: beside the point, then above and below at a distance."""
    beside = [(10.0, 0.0), (-10.0, 0.0)]
    away = [(side * 30.0, sign * step * 15.0) for step in range(1, 8) for side in (1, -1) for sign in (1, -1)]
    return beside + away


def _labels(figure: Any, axes: Any, points: list[_Point]) -> None:
    """Each name at the first place round its point where it covers neither a point nor another name."""
    from matplotlib.text import Text

    renderer = figure.canvas.get_renderer()
    frame = axes.get_window_extent(renderer)
    taken = [_box(axes, point) for point in points]
    for point in points:
        for dx, dy in _places():
            line = {"arrowstyle": "-", "color": "0.5", "linewidth": 0.7, "shrinkB": 4} if dy else None
            text = axes.annotate(
                point.label, (point.x, point.y), (dx, dy), textcoords="offset points", ha="left" if dx > 0 else "right",
                va="center", fontsize=9, arrowprops=line, zorder=4,
            )  # fmt: skip
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer)  # of the words alone; the annotation's own has its line too
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if (inside and not any(box.overlaps(other) for other in taken)) or (dx, dy) == _places()[-1]:
                taken.append(box)
                break
            text.remove()


def _box(axes: Any, point: _Point) -> Any:
    from matplotlib.transforms import Bbox

    x, y = axes.transData.transform((point.x, point.y))
    return Bbox.from_bounds(x - 9, y - 9, 18, 18)
