"""What the gated delta rule must do: the cases of its four operators."""

from __future__ import annotations

from narrowgate.conformance.case import Case
from narrowgate.conformance.fixtures import apart
from narrowgate.ops.gated_delta_rule import cases_packed, cases_prefill, cases_sequences, cases_speculative, cases_step

CASES: list[Case] = [
    *cases_prefill.CASES,
    *cases_sequences.CASES,
    *cases_step.CASES,
    *cases_packed.CASES,
    *cases_speculative.CASES,
]

APART = ("matrix, bf16, pads (64, 5)", "three requests, accepted [2, 1, 4], int64", "state bf16, f32")
CASES += [apart(case, "state") for case in CASES if case.name in APART]
