"""Every shipped case holds for the reference on the CPU. A new case enrols itself."""

import pytest

import narrowgate.ops as ops
from narrowgate.conformance.run import all_cases, run

CASES = [case for cases in all_cases().values() for case in cases if not case.full]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case):
    result = run(case, getattr(ops, case.op), impl="reference")
    assert result, result.detail
