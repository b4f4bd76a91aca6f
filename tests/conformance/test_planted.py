"""The checker can fail: every operator with cases has planted faults, and the suite catches each of them."""

import functools
import itertools
import re

import planted
import planted_delta
import planted_glue
import planted_grouped
import planted_packed
import pytest

import narrowgate.ops as ops
from narrowgate.conformance.guards import tensors
from narrowgate.conformance.run import all_cases, run

FAMILIES = (planted_packed, planted_grouped, planted_glue, planted_delta)
CASES = all_cases()
PLANTED = [
    (op, name, function)
    for op in CASES
    for name, function in {**planted.FAULTS.get(op, {}), **planted.general(op)}.items()
]  # fmt: skip


def test_every_operator_with_cases_has_faults_of_its_own():
    assert [op for op in CASES if not planted.FAULTS.get(op)] == []
    assert all(hasattr(ops, op) for op in planted.FAULTS)


# What only a refusal can show: a call that should have been refused and was not.
UNREFUSED = {
    "an id clamped, not refused", "NaN quantized in silence", "-1 means the last row", "a row written twice in silence",
}  # fmt: skip
CRASH = re.compile(r"\w+(Error|Exception): ")


@functools.cache
def size(op):
    """How many elements each case of an operator draws."""
    return {case.name: sum(t.numel() for t in tensors(case.draw())) for case in CASES[op] if not case.full}


@functools.cache
def in_turn(op, refusals):
    """Cases in the order in which they find most soonest: the smallest of each set of arguments, then the next of each."""
    cases = [case for case in CASES[op] if not case.full and (case.raises is not None) == refusals]
    kinds = {}
    for case in sorted(cases, key=lambda case: (case.law is not None, size(op)[case.name])):
        kinds.setdefault((case.law is not None, *sorted(case.draw())), []).append(case)
    return [case for turn in itertools.zip_longest(*kinds.values()) for case in turn if case is not None]


def catches(case, function):
    """Whether a case sees a fault in the results. That a wrong function broke down somewhere proves nothing."""
    result = run(case, function)
    return result.status == "failed" and not CRASH.match(result.detail)


@pytest.mark.parametrize(("op", "name", "function"), PLANTED, ids=[f"{op}: {name}" for op, name, _ in PLANTED])
def test_is_caught(op, name, function):
    """One case is enough; refusals are asked only where nothing else could show it."""
    cases = in_turn(op, name in UNREFUSED)
    assert any(catches(case, function) for case in cases), f"no case of {op} fails when it is wrong so: {name}"


@pytest.mark.parametrize("op", CASES)
def test_the_wrapping_alone_fails_nothing(op):
    """What stands in for an operator and does as it does is held: the faults are caught for what they get wrong."""
    honest = planted.planted(op, lambda honest, **arguments: honest(**arguments))
    for case in CASES[op][:12]:
        if not case.full:
            result = run(case, honest)
            assert result, f"{case.id}: {result.detail}"


@pytest.mark.parametrize("op", [op for op in planted_delta.RIGHT if op in CASES])
def test_an_implementation_that_does_right_is_held(op):
    """The loops that carry the faults of planted_delta.py, told nothing wrong: what is caught there is the fault."""
    right = planted.planted(op, planted_delta.RIGHT[op])
    cases = [case for case in CASES[op] if not case.full and case.raises is None and case.law is None]
    for case in sorted(cases, key=lambda case: size(op)[case.name])[:25]:
        result = run(case, right)
        assert result, f"{case.id}: {result.detail}"
