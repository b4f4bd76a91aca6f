"""A case: one behaviour of one operator, as data. One list an operator (`ops/<op>/cases.py`) feeds tests, suite and benchmarks.

A case draws its inputs from a seed, has an oracle that shares no code with the kernels, a comparer, and rivals: the
plausible wrong readings. A rival that the comparer would let pass makes the case blind, and a blind case fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgate.conformance.compare import Comparer, bits

Arguments = dict[str, Any]
Reading = Callable[..., Mapping[str, Tensor]]
Law = Callable[..., Mapping[str, tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Rival:
    """A wrong reading: called with the case's inputs like the oracle, and expected to differ visibly from it. In a case
    with a law it stands in for the operator, and the law must not hold."""

    name: str
    reading: Reading


@dataclass(frozen=True)
class Case:
    """`inputs(generator)` gives the operator's arguments by name, on the CPU. `oracle(**inputs)` gives what must come
    back: an entry for each returned tensor, in order, under any name that is no argument, and one for each argument
    that the operator changes in place, under that argument's name. `raises` replaces the oracle where the call must be
    refused. So does `law(ops, **inputs)` where two ways must agree: it gives {name: (expected, got)}, both computed through
    `ops.<name>`, which are operators of one implementation, the case's own being the one under test."""

    op: str
    name: str
    inputs: Callable[[torch.Generator], Arguments]
    oracle: Reading | None = None
    compare: Comparer | Mapping[str, Comparer] = bits()
    rivals: tuple[Rival, ...] = ()
    raises: tuple[type[Exception], str] | None = None
    law: Law | None = None
    spec: tuple[str, ...] = ()  # the items of the specification that it holds, such as "D3" or "G25"
    seed: int = 0
    full: bool = False  # too slow for the default set
    cpu_only: bool = False  # looks at values, which a GPU never does
    left_alone: Callable[..., Tensor] | None = None  # inputs -> mask of the output: what is not written in a given `out`

    def __post_init__(self) -> None:
        if sum(way is not None for way in (self.oracle, self.raises, self.law)) != 1:
            raise ValueError(f"{self.op}/{self.name}: expected one of oracle, raises and law")

    @property
    def id(self) -> str:
        return f"{self.op}/{self.name}"

    def draw(self) -> Arguments:
        return self.inputs(torch.Generator().manual_seed(self.seed))

    def comparer(self, output: str) -> Comparer:
        return self.compare if isinstance(self.compare, Comparer) else self.compare[output]
