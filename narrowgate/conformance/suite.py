"""Runs many cases and keeps what came of them: what `narrowgate check` shows, as a table, JSON or a page.

Each case is held once for each implementation that the device has. Left out: pytest, and any opinion on how to show it."""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowgate._version import __version__
from narrowgate.conformance.case import Case
from narrowgate.conformance.run import Result, all_cases, run
from narrowgate.dispatch import OPERATORS

STATUSES = ("held", "failed", "blind", "skipped")
IMPLS = {"cpu": ("reference", "cpu"), "cuda": ("reference", "gpu")}
MINE = "mine"


@dataclass(frozen=True)
class Row:
    """One case held by one implementation. Errors and gaps are shares of the limit: above 1 fails."""

    op: str
    case: str
    impl: str
    status: str
    detail: str
    compare: str
    spec: tuple[str, ...]
    errors: Mapping[str, float]  # output -> share of its limit
    gaps: Mapping[str, float]  # rival -> share of the limit that it would have shown
    seconds: float
    first_call: float  # what the first call took beyond a later one: compiling, warming up

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=0.0)


@dataclass
class Report:
    """All rows, in the order of the cases, and where and how they were made."""

    environment: Mapping[str, str]
    rows: list[Row] = field(default_factory=list)
    left_out: int = 0  # cases that only `--full` runs
    seconds: float = 0.0

    def count(self, status: str) -> int:
        return sum(row.status == status for row in self.rows)

    @property
    def ok(self) -> bool:
        """Something was held, and nothing failed."""
        return self.count("held") > 0 and not self.count("failed") and not self.count("blind")

    def by_op(self) -> dict[tuple[str, str], list[Row]]:
        """The rows of each operator and implementation."""
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            groups.setdefault((row.op, row.impl), []).append(row)
        return groups

    def skips(self) -> dict[str, list[Row]]:
        """The rows that were skipped, by reason."""
        reasons: dict[str, list[Row]] = {}
        for row in self.rows:
            if row.status == "skipped":
                reasons.setdefault(row.detail, []).append(row)
        return reasons

    def record(self) -> dict[str, Any]:
        """Everything as plain data, for JSON: an infinity or a NaN becomes a string."""
        return {
            "ok": self.ok, "counts": {status: self.count(status) for status in STATUSES}, "left_to_full": self.left_out,
            "seconds": round(self.seconds, 3), "first_call_seconds": round(sum(row.first_call for row in self.rows), 3),
            "environment": dict(self.environment), "cases": [_plain(dataclasses.asdict(row)) for row in self.rows],
        }  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, float):
        return str(value) if value != value or value in (float("inf"), float("-inf")) else value
    return value


def choose(patterns: Sequence[str] = ()) -> dict[str, tuple[Case, ...]]:
    """The shipped cases of the operators that match any of the patterns (`fnmatch`), all of them without a pattern."""
    found = all_cases()
    chosen = {op: found[op] for op in sorted(found) if not patterns or any(fnmatch.fnmatch(op, p) for p in patterns)}
    for pattern in patterns:
        if not any(fnmatch.fnmatch(op, pattern) for op in found):
            raise LookupError(f"no operator with cases matches {pattern!r}; there are {', '.join(sorted(found))}")
    return chosen


def implementations(op: str, device: str, impl: str | None = None) -> list[str]:
    """What to hold on a device: the one asked for, or all that the operator has there."""
    if impl is not None:
        return [impl]
    return [name for name in IMPLS[torch.device(device).type] if name in OPERATORS[op].kernels]


def missing(op: str, impl: str, device: str) -> str:
    """Why `impl` cannot be held at all, or "" if it can."""
    if impl not in OPERATORS[op].kernels:
        return f"no {impl} kernel yet"
    kind = torch.device(device).type
    if impl == "cpu" and kind != "cpu":
        return "the cpu kernel takes tensors of the CPU only"
    if impl == "gpu" and kind == "cpu" and not _interpreted():
        return "on the CPU the gpu kernel runs only under Triton's interpreter (TRITON_INTERPRET=1)"
    return ""


def _interpreted() -> bool:
    import os

    return os.environ.get("TRITON_INTERPRET") == "1"


def jobs(cases: Mapping[str, Iterable[Case]], device: str, impl: str | None, full: bool) -> list[tuple[Case, str]]:
    """(case, implementation) pairs, an operator at a time."""
    wanted = [case for op in cases for case in cases[op] if full or not case.full]
    return [(case, name) for case in wanted for name in implementations(case.op, device, impl)]


def check(
    cases: Mapping[str, Iterable[Case]], *, device: str = "cpu", impl: str | None = None, full: bool = False, seed: int = 0,
    mine: Callable[..., Any] | None = None, each: Callable[[Row], None] = lambda row: None,
) -> Report:  # fmt: skip
    """Hold every case. `mine` takes the operator's place; `seed` is added to every case's own; `each` sees rows as they come."""
    start = time.perf_counter()
    report = Report(environment(device))
    report.left_out = 0 if full else sum(case.full for op in cases for case in cases[op])
    pairs = jobs(cases, device, "reference" if mine else impl, full)
    for case, name in pairs:
        row = _row(dataclasses.replace(case, seed=case.seed + seed), name, device, mine)
        report.rows.append(row)
        each(row)
    report.seconds = time.perf_counter() - start
    return report


def _row(case: Case, impl: str, device: str, mine: Callable[..., Any] | None) -> Row:
    import narrowgate.ops as ops

    if mine is not None:
        impl, reason = MINE, lacking(case, mine)
    else:
        reason = missing(case.op, impl, device)
    if reason:
        result = Result(case, "skipped", reason)
    elif mine is not None:
        result = run(case, mine, device=device)
    else:
        result = run(case, getattr(ops, case.op), device=device, impl=impl)
    names = dict.fromkeys(
        [case.compare.name] if not isinstance(case.compare, Mapping) else [c.name for c in case.compare.values()]
    )
    told = f"refuses: {case.raises[1]}" if case.raises else ", ".join(names)
    return Row(
        case.op, case.name, impl, result.status, result.detail, told, case.spec, result.errors, result.gaps,
        result.seconds, getattr(result, "first_call", 0.0),
    )  # fmt: skip


def lacking(case: Case, mine: Callable[..., Any]) -> str:
    """Why a user's function is not asked about a case, or ""."""
    if case.raises:
        return "what is refused, and in which words, is our operator's own affair"
    import inspect

    parameters = inspect.signature(mine).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return ""
    absent = [name for name in case.draw() if name not in {p.name for p in parameters}]
    return f"{getattr(mine, '__name__', 'it')} takes no {', '.join(absent)}" if absent else ""


def environment(device: str) -> dict[str, str]:
    """Where a report was made, in words."""
    packages = {name: _version(name) for name in ("torch", "triton", "numba", "numpy")}
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    found = {"narrowgate": __version__, "device": _device_name(device), "python": platform.python_version()}
    found |= {name: version for name, version in packages.items() if version}
    found |= {"system": f"{platform.system()} {platform.machine()}", "threads": str(torch.get_num_threads()), "date": now}
    return found


def _version(package: str) -> str:
    try:
        return torch.__version__ if package == "torch" else importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    return f"cpu, {next(_cpu_models(), platform.processor() or platform.machine())}"


def _cpu_models() -> Iterator[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            yield from (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except OSError:
        return


def named(rows: list[Row]) -> str:
    """The operators of some rows, the first few by name."""
    ops = list(dict.fromkeys(row.op for row in rows))
    return ", ".join(ops[:6]) + (f" and {len(ops) - 6} more" if len(ops) > 6 else "")
