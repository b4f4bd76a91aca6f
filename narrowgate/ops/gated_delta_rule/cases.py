"""What the gated delta rule must do."""

from __future__ import annotations

import functools

import torch
from torch import Generator

from narrowgate.conformance.case import Arguments, Case, Rival
from narrowgate.conformance.compare import close
from narrowgate.ops.gated_delta_rule import oracle


def _rivals(*names: str) -> tuple[Rival, ...]:
    return tuple(Rival(name, functools.partial(oracle.rule, wrong=name)) for name in names)


def _hand_prefill(_: Generator, form: str) -> Arguments:
    return {
        "q": torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 1.0]]]),
        "k": torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]], [[0.5, 0.5]]]),
        "v": torch.tensor([[[2.0, 1.0]], [[1.0, -1.0]], [[0.0, 2.0]]]),
        "g": torch.tensor([[1.0], [0.5], [1.0]]).log(),
        "beta": torch.tensor([[0.5], [1.0], [0.5]]),
        "state": torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]),
        "cu_seqlens": None,
        "scale": 0.5,
        "form": form,
    }


CASES = [
    Case(
        "gated_delta_rule", f"hand, {form}", functools.partial(_hand_prefill, form=form), oracle.rule,
        close(abs=1e-6), rivals=_rivals("k scaled too", "read before decay", "output before write", "state [k][v]"),
        spec=("D1", "D4"),
    )
    for form in ("recurrent", "chunk")
]  # fmt: skip
