"""Values of indices are looked at on the CPU alone: elsewhere it would synchronise, and break a capture (SPEC D79).

A GPU is not needed to see it. Fake tensors say that they are on one and have no values: whoever looked would fail."""

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import narrowgate.ops as ops
from narrowgate.conformance.guards import clone, map_tensors
from narrowgate.conformance.run import all_cases
from narrowgate.dispatch import OPERATORS, _nothing, checks_values, debug_checks

CASES = all_cases()


LOOKING = [op for op in CASES if OPERATORS[op].check_values is not _nothing]


def on_a_gpu(case):
    """The case's arguments as fake tensors on a GPU, in the operator's schema."""
    operator = OPERATORS[case.op]
    inputs = {name: value for name, value in clone(case.draw()).items() if name != "out"}
    with FakeTensorMode():
        placed = map_tensors(inputs, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda"))
        if operator.flatten:
            return operator, *operator.flatten(**placed)
        bound = inspect.signature(operator.check).bind(**placed)
        return operator, bound.args, bound.kwargs


@pytest.mark.spec("D79")
@pytest.mark.parametrize("op", LOOKING)
def test_no_value_is_looked_at(op):
    """What the CPU refuses for its values passes the checks of a GPU; under debug_checks() it would be looked at."""
    seen = 0
    for case in (case for case in CASES[op] if case.cpu_only and case.raises):
        with pytest.raises(case.raises[0]):
            getattr(ops, op)(**case.draw(), impl="reference")
        operator, args, kwargs = on_a_gpu(case)
        try:
            operator.check(*args, **kwargs)
        except case.raises[0]:
            continue  # refused for a shape or a type, which a GPU refuses as well
        operator.check_values(*args, **kwargs)
        with debug_checks(), pytest.raises((DataDependentOutputException, RuntimeError)):
            operator.check_values(*args, **kwargs)
        seen += 1
    assert seen


def test_where_values_may_be_looked_at():
    with FakeTensorMode():
        far = torch.empty(3, dtype=torch.int32, device="cuda")
    assert checks_values(torch.zeros(3))
    assert not checks_values(far)
    with debug_checks():
        assert checks_values(far)
        assert not checks_values(torch.zeros(3, device="meta"))
