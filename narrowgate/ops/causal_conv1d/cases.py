"""What the convolution must do: the cases of its three operators."""

from __future__ import annotations

from narrowgate.conformance.case import Case
from narrowgate.conformance.fixtures import apart
from narrowgate.ops.causal_conv1d import cases_forward, cases_speculative, cases_step

CASES: list[Case] = cases_forward.CASES + cases_step.CASES + cases_speculative.CASES

APART = ("slots of a pool, int32", "slots [2, 0], int32", "wide rows", "W 3, 2 drafted")
CASES += [apart(case, "state") for case in CASES if case.name in APART]
