"""What came of a case, and how results and rivals are held to what is expected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from narrowgate.conformance.case import Case
from narrowgate.conformance.compare import share_of


@dataclass
class Result:
    """What came of a case. `status`: held, failed, blind (a rival would pass), or skipped with a reason."""

    case: Case
    status: str
    detail: str = ""
    errors: dict[str, float] = field(default_factory=dict)  # output -> error, as a share of its limit
    gaps: dict[str, float] = field(default_factory=dict)  # rival -> error that it would have shown, likewise
    seconds: float = 0.0
    first_call: float = 0.0  # what the first call took beyond the second: compiling, warming up

    def __bool__(self) -> bool:
        return self.status == "held"


def gap_of(case: Case, expected: Mapping[str, Tensor], rival: Mapping[str, Tensor]) -> float:
    """How far outside the limits a rival's results lie, at their most visible."""
    worst = 0.0
    for name, want in expected.items():
        if name in rival:
            verdict = case.comparer(name)(want, rival[name])
            worst = max(worst, share_of(verdict.error, verdict.limit) if not verdict.ok else 0.0)
    return worst


def judge(case: Case, expected: Mapping[str, Tensor], outputs: Mapping[str, Tensor], result: Result) -> list[str]:
    problems = []
    for name, got in outputs.items():
        verdict = case.comparer(name)(expected[name], got)
        result.errors[name] = share_of(verdict.error, verdict.limit)
        if not verdict.ok:
            problems.append(f"{name}: {case.comparer(name).name}: {verdict}")
    return problems
