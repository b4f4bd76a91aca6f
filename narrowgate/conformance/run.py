"""Runs a case: oracle, rivals, then the operator under guards, once allocating and once into a given `out`."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from narrowgate.conformance.case import Arguments, Case
from narrowgate.conformance.compare import bits
from narrowgate.conformance.guards import Guarded, clone, guard, map_tensors, poisoned_memory, tensors


@dataclass
class Result:
    """What came of a case. `status`: held, failed, blind (a rival would pass), or skipped with a reason."""

    case: Case
    status: str
    detail: str = ""
    errors: dict[str, float] = field(default_factory=dict)  # output -> error, as a share of its limit
    gaps: dict[str, float] = field(default_factory=dict)  # rival -> error that it would have shown, likewise
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return self.status == "held"


@functools.cache
def all_cases() -> dict[str, tuple[Case, ...]]:
    """Every shipped case, by operator: `CASES` of each `narrowgate/ops/<op>/cases.py`."""
    import narrowgate.ops as ops

    found: dict[str, list[Case]] = {}
    for module in pkgutil.iter_modules(ops.__path__):
        if not module.ispkg or importlib.util.find_spec(f"narrowgate.ops.{module.name}.cases") is None:
            continue
        for case in importlib.import_module(f"narrowgate.ops.{module.name}.cases").CASES:
            found.setdefault(case.op, []).append(case)
    return {op: tuple(cases) for op, cases in found.items()}


def run(case: Case, function: Callable[..., Any], *, device: str = "cpu", impl: str | None = None) -> Result:
    """Hold `function`, whose signature is the operator's, to one case."""
    start = time.perf_counter()
    if case.cpu_only and device != "cpu":
        return Result(case, "skipped", "looks at values of indices, which only the CPU does")
    extra = {} if impl is None else {"impl": impl}
    try:
        result = _refused(case, function, device, extra) if case.raises else _held(case, function, device, extra)
    except Exception as error:
        result = Result(case, "failed", f"{type(error).__name__}: {error}")
    result.seconds = time.perf_counter() - start
    return result


def _held(case: Case, function: Callable[..., Any], device: str, extra: dict[str, str]) -> Result:
    assert case.oracle is not None
    result = Result(case, "held")
    expected = dict(case.oracle(**clone(case.draw())))
    for rival in case.rivals:
        result.gaps[rival.name] = gap = _gap(case, expected, rival.reading(**clone(case.draw())))
        if gap <= 1.0:
            result.status, result.detail = (
                "blind",
                f"the rival reading {rival.name!r} would pass (gap {gap:.3g} of the limit)",
            )
    if result.status == "blind":
        return result
    inputs = case.draw()
    returned = [name for name in expected if name not in inputs]
    first = _call(case, function, inputs, expected, device, extra, out=None)
    problems = [*first.problems, *_judge(case, expected, first.outputs, result)]
    if _takes_out(function) and len(returned) == 1 and first.outputs and "out" not in inputs:
        second = _call(case, function, inputs, expected, device, extra, out=first.outputs[returned[0]])
        problems += second.problems
        for name, got in second.outputs.items():
            if not bits()(first.outputs[name], got).ok:
                problems.append(f"{name}: a given out holds other bits than an allocated one")
    if problems:
        result.status, result.detail = "failed", "; ".join(dict.fromkeys(problems))
    return result


def _gap(case: Case, expected: Mapping[str, Tensor], rival: Mapping[str, Tensor]) -> float:
    """How far outside the limits a rival's results lie, at their most visible."""
    worst = 0.0
    for name, want in expected.items():
        if name in rival:
            verdict = case.comparer(name)(want, rival[name])
            worst = max(worst, _share(verdict.error, verdict.limit) if not verdict.ok else 0.0)
    return worst


def _share(error: float, limit: float) -> float:
    if error != error:
        return float("inf")
    return error / limit if limit else (0.0 if error == 0 else 1.0 + error)


@dataclass
class _Outcome:
    outputs: dict[str, Tensor]
    problems: list[str]


def _call(
    case: Case, function: Callable[..., Any], inputs: Arguments, expected: Mapping[str, Tensor], device: str,
    extra: dict[str, str], out: Tensor | None,
) -> _Outcome:  # fmt: skip
    guards: list[Guarded] = []

    def place(t: Tensor) -> Tensor:
        guards.append(guard(t, device))
        return guards[-1].tensor

    placed = map_tensors(inputs, place)
    kept = {name: clone(value) for name, value in placed.items() if name not in expected}
    into = None
    if out is not None:
        guards.append(guard(torch.empty_like(out), device, poison=True))
        into = guards[-1].tensor
    with torch.no_grad(), poisoned_memory():
        got = function(**placed, **extra, **({} if into is None else {"out": into}))
    if device != "cpu":
        torch.cuda.synchronize()
    problems = [f"{name}: the input was changed" for name, was in kept.items() if not _same(was, placed[name])]
    if any(g.broken() for g in guards):
        problems.append("memory beside a buffer was written")
    if into is not None and isinstance(got, Tensor) and got.data_ptr() != into.data_ptr() and into.numel():
        problems.append("a given out was not the tensor returned")
    returned = [name for name in expected if name not in inputs]
    outputs = dict(zip(returned, _as_list(got if into is None else into), strict=False))
    outputs.update({name: placed[name] for name in expected if name in inputs})
    missing = [name for name in expected if name not in outputs]
    return _Outcome(outputs, problems + [f"{name}: nothing came back" for name in missing])


def _judge(case: Case, expected: Mapping[str, Tensor], outputs: Mapping[str, Tensor], result: Result) -> list[str]:
    problems = []
    for name, got in outputs.items():
        verdict = case.comparer(name)(expected[name], got)
        result.errors[name] = _share(verdict.error, verdict.limit)
        if not verdict.ok:
            problems.append(f"{name}: {case.comparer(name).name}: {verdict}")
    return problems


def _refused(case: Case, function: Callable[..., Any], device: str, extra: dict[str, str]) -> Result:
    assert case.raises is not None
    kind, text = case.raises
    placed = map_tensors(case.draw(), lambda t: guard(t, device).tensor)
    before = clone(placed)
    try:
        with torch.no_grad():
            function(**placed, **extra)
    except kind as error:
        if text not in str(error):
            return Result(case, "failed", f"expected the message to contain {text!r}, got {str(error)!r}")
        if not _same(before, placed):
            return Result(case, "failed", "an input was written before the call was refused")
        return Result(case, "held")
    return Result(case, "failed", f"expected {kind.__name__} with {text!r}, but nothing was raised")


def _as_list(value: Any) -> list[Tensor]:
    if value is None:
        return []
    return [value] if isinstance(value, Tensor) else tensors(value)


def _same(a: Any, b: Any) -> bool:
    pairs = zip(tensors(a), tensors(b), strict=True)
    return all(bits(nan_payload=True)(x, y).ok for x, y in pairs)


def _takes_out(function: Callable[..., Any]) -> bool:
    return "out" in inspect.signature(function).parameters
