"""What the convolution must do: the cases of its three operators."""

from __future__ import annotations

from narrowgate.conformance.case import Case
from narrowgate.ops.causal_conv1d import cases_forward, cases_speculative, cases_step

CASES: list[Case] = cases_forward.CASES + cases_step.CASES + cases_speculative.CASES
