"""Cases with a law: two ways, both through the operators, must agree."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgate.conformance.case import Case
from narrowgate.conformance.guards import Guarded, clone, guard, map_tensors, poisoned_memory
from narrowgate.conformance.result import Result, gap_of, judge


class Absent(Exception):
    """A law needs another operator of the same implementation, and there is none."""


@dataclass(frozen=True)
class _Operators:
    """What a law sees: `function` under the case's own name, the other operators with the same `impl`."""

    own: str
    function: Callable[..., Any]
    extra: dict[str, str]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        import narrowgate.ops as ops
        from narrowgate.dispatch import OPERATORS

        if name == self.own:
            return functools.partial(self.function, **self.extra)
        if self.extra and name in OPERATORS and self.extra["impl"] not in OPERATORS[name].kernels:
            raise Absent(f"{name} has no {self.extra['impl']} kernel yet")
        return functools.partial(getattr(ops, name), **self.extra)


def lawful(case: Case, function: Callable[..., Any], device: str, extra: dict[str, str]) -> Result:
    assert case.law is not None
    result = Result(case, "held")
    for rival in case.rivals:
        ops = _Operators(case.op, _stand_in(rival.reading), {})
        pairs = case.law(ops, **clone(case.draw()))
        result.gaps[rival.name] = gap = gap_of(case, *({k: pair[i] for k, pair in pairs.items()} for i in (0, 1)))
        if gap <= 1.0:
            result.status = "blind"
            result.detail = f"the rival reading {rival.name!r} would pass (gap {gap:.3g} of the limit)"
            return result
    guards: list[Guarded] = []

    def place(t: Tensor) -> Tensor:
        guards.append(guard(t, device))
        return guards[-1].tensor

    placed = map_tensors(case.draw(), place)
    with torch.no_grad(), poisoned_memory():
        pairs = case.law(_Operators(case.op, function, extra), **placed)
    expected, got = ({k: pair[i] for k, pair in pairs.items()} for i in (0, 1))
    problems = judge(case, expected, got, result)
    if any(g.broken() for g in guards):
        problems.append("memory beside a buffer was written")
    if problems:
        result.status, result.detail = "failed", "; ".join(problems)
    return result


def _stand_in(reading: Callable[..., Mapping[str, Tensor]]) -> Callable[..., Any]:
    """An operator made of a reading: what the reading gives for an argument is written into it, the rest is returned."""

    def function(**arguments: Any) -> Any:
        out = arguments.pop("out", None)
        found = dict(reading(**arguments))
        for name in [name for name in found if name in arguments]:
            arguments[name].copy_(found.pop(name))
        values = list(found.values())
        if out is not None:
            return out.copy_(values[0])
        return values[0] if len(values) == 1 else tuple(values)

    return function
