"""What the norms must do (SPEC D26, C7, C8, D27; KNOWN_FAILURES G8)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from narrowgate.conformance.case import Arguments, Case, Rival
from narrowgate.conformance.compare import close


def _l2(x: Tensor, *, eps: float = 1e-6) -> dict[str, Tensor]:
    x = x.double()
    return {"y": x / (x.pow(2).sum(-1, keepdim=True) + eps).sqrt()}


def _l2_mean(x: Tensor, *, eps: float = 1e-6) -> dict[str, Tensor]:
    x = x.double()
    return {"y": x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()}


def _uniform(*shape: int) -> Callable[[Generator], Arguments]:
    return lambda g: {"x": torch.rand(shape, generator=g) * 12 - 6}


CASES: list[Case] = [
    Case(
        "l2_norm", "hand", lambda g: {"x": torch.tensor([3.0, 4.0]), "eps": 0.0}, _l2, close(abs=1e-6),
        rivals=(Rival("mean for sum", _l2_mean),), spec=("D26",),
    ),
    *[
        Case(
            "l2_norm", f"shape {shape}", _uniform(*shape), _l2, close(rel=1.2e-5),
            rivals=(Rival("mean for sum", _l2_mean),), spec=("D26",),
        )
        for shape in ((5, 127), (3, 2, 128), (2, 300))
    ],
]  # fmt: skip
