"""Every shipped case holds for the reference and for the CPU kernel where there is one. A new case enrols itself."""

import pytest

import narrowgate.ops as ops
from narrowgate.conformance.run import all_cases, run
from narrowgate.dispatch import OPERATORS

CASES = [case for cases in all_cases().values() for case in cases if not case.full]


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case, impl):
    if impl not in OPERATORS[case.op].kernels:
        pytest.skip(f"{case.op} has no {impl} kernel yet")
    result = run(case, getattr(ops, case.op), impl=impl)
    if result.status == "skipped":
        pytest.skip(result.detail)
    assert result, result.detail
