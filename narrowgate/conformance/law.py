"""Cases with a law: two ways, both through the operators, must agree."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from narrowgate.conformance.call import same
from narrowgate.conformance.case import Case
from narrowgate.conformance.guards import Guarded, clone, guard, map_tensors, poisoned_memory, tensors
from narrowgate.conformance.result import Result, gap_of, judge


class Absent(Exception):
    """A law needs another operator of the same implementation, and there is none."""


@dataclass(frozen=True)
class _Operators:
    """What a law sees: `function` under the case's own name, the other operators with the same `impl`. However the law calls
    it, `function` gets each argument by its name and in guarded memory on `device`."""

    own: str
    function: Callable[..., Any]
    extra: dict[str, str]
    device: str = "cpu"
    problems: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        import narrowgate.ops as ops
        from narrowgate.dispatch import OPERATORS

        if name == self.own:
            return self._guarded
        if self.extra and name in OPERATORS and self.extra["impl"] not in OPERATORS[name].kernels:
            raise Absent(f"{name} has no {self.extra['impl']} kernel yet")
        return functools.partial(getattr(ops, name), **self.extra)

    def _guarded(self, *args: Any, **kwargs: Any) -> Any:
        """One call, watched; what it changed in place is copied to where the law looks for it."""
        import narrowgate.ops as ops
        from narrowgate.dispatch import OPERATORS

        named = inspect.signature(getattr(ops, self.own)).bind(*args, **kwargs).arguments if args else kwargs
        guards: list[Guarded] = []

        def place(t: Tensor) -> Tensor:
            guards.append(guard(t, self.device))
            return guards[-1].tensor

        placed = {name: map_tensors(value, place) for name, value in named.items()}
        got = self.function(**placed, **self.extra)
        if any(g.broken() for g in guards):
            self.problems.append("memory beside a buffer was written")
        schema = OPERATORS[self.own].inputs if self.own in OPERATORS else ""
        changing = {"out", *re.findall(r"\(\w!\) (\w+)", schema)}
        for name, value in named.items():
            if not same(value, placed[name]):
                if name not in changing:
                    self.problems.append(f"{name}: the input was changed")
                for t, now in zip(tensors(value), tensors(placed[name]), strict=True):
                    t.copy_(now)
        return named["out"] if got is not None and got is placed.get("out") else got


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
    operators = _Operators(case.op, function, extra, device)
    with torch.no_grad(), poisoned_memory():
        pairs = case.law(operators, **map_tensors(clone(case.draw()), lambda t: guard(t, device).tensor))
    expected, got = ({k: pair[i] for k, pair in pairs.items()} for i in (0, 1))
    problems = [*operators.problems, *judge(case, expected, got, result)]
    if problems:
        result.status, result.detail = "failed", "; ".join(dict.fromkeys(problems))
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
