"""Runs a case: oracle, rivals, then the operator under guards: allocating, again at another alignment, and into given outputs."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgate.conformance.call import Outcome, call, declared, same, sharing, takes_out
from narrowgate.conformance.case import Arguments, Case
from narrowgate.conformance.compare import bits
from narrowgate.conformance.guards import clone, guard, map_tensors, one_thread
from narrowgate.conformance.law import Absent, lawful
from narrowgate.conformance.result import Result, gap_of, judge
from narrowgate.dispatch import OPERATORS
from narrowgate.errors import UnsupportedError

exactly = bits(nan_payload=True)


@functools.cache
def all_cases() -> dict[str, tuple[Case, ...]]:
    """Every shipped case, by operator: `CASES` of each `narrowgate/ops/<op>/cases.py`, and the golden bytes."""
    import narrowgate.ops as ops
    from narrowgate.conformance import golden

    found: dict[str, list[Case]] = {}
    for module in pkgutil.iter_modules(ops.__path__):
        if not module.ispkg or importlib.util.find_spec(f"narrowgate.ops.{module.name}.cases") is None:
            continue
        for case in importlib.import_module(f"narrowgate.ops.{module.name}.cases").CASES:
            found.setdefault(case.op, []).append(case)
    for case in golden.cases():
        found.setdefault(case.op, []).append(case)
    return {op: tuple(cases) for op, cases in found.items()}


def run(case: Case, function: Callable[..., Any], *, device: str = "cpu", impl: str | None = None) -> Result:
    """Hold `function`, whose signature is the operator's, to one case."""
    start = time.perf_counter()
    if case.cpu_only and device != "cpu":
        return Result(case, "skipped", "looks at values of indices, which only the CPU does")
    extra = {} if impl is None else {"impl": impl}
    way = _refused if case.raises else lawful if case.law else _held
    try:
        with one_thread(impl == "reference"):
            result = way(case, function, device, extra)
    except Absent as absent:
        result = Result(case, "skipped", str(absent))
    except UnsupportedError as refusal:  # a named kernel may refuse a call, but not the reference
        refused = impl in ("cpu", "gpu") and "cannot take this call" in str(refusal)
        result = Result(case, "skipped" if refused else "failed", str(refusal))
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and type(error) is not SystemExit:  # the process is asked to end, not left by a kernel
            raise
        result = Result(case, "failed", f"{type(error).__name__}: {error}")
    result.seconds = time.perf_counter() - start
    return result


def _held(case: Case, function: Callable[..., Any], device: str, extra: dict[str, str]) -> Result:
    assert case.oracle is not None
    result = Result(case, "held")
    with one_thread():
        expected = dict(case.oracle(**clone(case.draw())))
        for rival in case.rivals:
            result.gaps[rival.name] = gap = gap_of(case, expected, rival.reading(**clone(case.draw())))
            if gap <= 1.0:
                result.status = "blind"
                result.detail = f"the rival reading {rival.name!r} would pass (gap {gap:.3g} of the limit)"
    if result.status == "blind":
        return result
    problems = _calls(case, function, expected, device, extra, result)
    if problems:
        result.status, result.detail = "failed", "; ".join(dict.fromkeys(problems))
    return result


def _calls(
    case: Case, function: Callable[..., Any], expected: Mapping[str, Tensor], device: str, extra: dict[str, str], result: Result
) -> list[str]:
    """Once allocating; then again, at another alignment and into a given `out` where there is one: the same bits, please."""
    inputs = case.draw()
    first = call(function, inputs, expected, device, extra)
    problems = [*first.problems, *judge(case, expected, first.outputs, result), *_disturbed(inputs, expected, first.outputs)]
    returned = [name for name in expected if name not in inputs]
    dtypes = dict(zip(returned, declared(case, inputs), strict=False))
    for name, dtype in dtypes.items():
        if name in first.outputs and first.outputs[name].dtype != dtype:
            problems.append(f"{name}: expected {dtype} back, got {first.outputs[name].dtype}")
    if problems:
        return problems
    fills = takes_out(function) and len(returned) == 1 and "out" not in inputs
    out = first.outputs[returned[0]] if fills else None
    second = call(function, inputs, expected, device, extra, out, shifted=True)
    result.first_call = max(0.0, first.seconds - second.seconds)
    problems += [*second.problems, *_unlike(case, first, second, returned[0] if fills else None)]
    other = call(function, inputs, expected, device, extra) if fills else second
    again = sharing({name: other.outputs.get(name) for name in returned}, [first.outputs.get(name) for name in returned])
    problems += [f"{name}: a second call returned the memory of the first" for name in again]
    if out is not None and out.dtype in _OTHER and _any_float(case):
        other = call(function, inputs, expected, device, extra, out.to(_OTHER[out.dtype]))
        problems += [*other.problems, *_unlike(case, first, other, returned[0])]
    return problems


def _disturbed(inputs: Arguments, expected: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> list[str]:
    """What is changed in place: a row (a slot) that the oracle leaves alone keeps every bit, whatever the tolerance."""
    problems = []
    for name in [name for name in expected if isinstance(inputs.get(name), Tensor) and inputs[name].ndim > 1]:
        was, want, got = (t.detach().cpu() for t in (inputs[name], expected[name], outputs[name]))
        for row in range(len(was)):
            if exactly(was[row], want[row].to(was.dtype)).ok and not exactly(was[row], got[row]).ok:
                problems.append(f"{name}: row {row}, which the call must leave alone, was changed")
                break
    return problems


_OTHER = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32, torch.float16: torch.float32}


def _any_float(case: Case) -> bool:
    """Whether a given out may have another floating dtype than an allocated one."""
    return case.op in OPERATORS and OPERATORS[case.op].out_dtype == "float"


def _unlike(case: Case, first: Outcome, again: Outcome, filled: str | None) -> list[str]:
    """What a second call gave in other bits. An out of another dtype agrees in the narrower of the two."""
    problems = []
    for name, got in again.outputs.items():
        want = first.outputs[name]
        if got.dtype != want.dtype:
            narrow = want.dtype if want.element_size() < got.element_size() else got.dtype
            want, got = want.to(narrow), got.to(narrow)
        if name == filled and case.left_alone is not None:
            kept = case.left_alone(**case.draw()).to(got.device).expand(got.shape)
            if not bool(got[kept].isnan().all()):
                problems.append(f"{name}: rows that a call must leave alone in a given out were written")
            want, got = want[~kept], got[~kept]
        verdict = bits()(want, got)
        if not verdict.ok:
            how = "a given out" if name == filled else "a second call"
            problems.append(f"{name}: {how} holds other bits than an allocated one: {verdict}")
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
        if not same(before, placed):
            return Result(case, "failed", "an input was written before the call was refused")
        return Result(case, "held")
    return Result(case, "failed", f"expected {kind.__name__} with {text!r}, but nothing was raised")
