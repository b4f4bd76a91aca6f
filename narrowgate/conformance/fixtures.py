"""What many lists of cases share: seeded inputs, padded views, refusals, and the tolerances that hold where none is given."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Generator, Tensor

from narrowgate.conformance.case import Case
from narrowgate.conformance.compare import close
from narrowgate.errors import InputError

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
UNSAID = close(abs=1.2e-5, rel=1.2e-5)  # SPEC D15: what holds where nothing else is said
ROUNDED = {F32: UNSAID, BF16: close(abs=1.2e-5, rel=2**-8), F16: close(abs=1.2e-5, rel=2**-11)}  # by the output's dtype


def short(dtype: torch.dtype) -> str:
    return {F32: "f32", BF16: "bf16", F16: "f16"}[dtype]


def uniform(g: Generator, *shape: int, low: float = -1.0, high: float = 1.0, dtype: torch.dtype = F32) -> Tensor:
    return (torch.rand(shape, generator=g) * (high - low) + low).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    """An output to be filled: NaN everywhere."""
    return torch.full(shape, float("nan"), dtype=dtype)


def padded(x: Tensor, pad: int, canary: float = float("nan")) -> Tensor:
    """The same values as a view of rows that are longer by `pad`, which hold `canary`."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + pad), canary, dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def apart(case: Case, argument: str, gap: int = 5) -> Case:
    """The same case with the slots of a pool apart: other data lies between them (G38)."""

    def inputs(g: Generator) -> dict[str, Any]:
        given = case.inputs(g)
        pool = given[argument]
        flat = padded(pool.reshape(len(pool), -1), gap)
        given[argument] = flat.as_strided(pool.shape, (flat.stride(0), *pool.stride()[1:]), 0)
        return given

    return dataclasses.replace(case, name=f"{case.name}, slots apart", inputs=inputs, spec=(*case.spec, "G38"))


def refusal(op: str, name: str, text: str, /, *, spec: tuple[str, ...] = (), cpu_only: bool = False, **arguments: Any) -> Case:
    """The call is refused with an InputError whose message holds `text`, and nothing is written."""
    return Case(op, f"refused: {name}", lambda g: dict(arguments), raises=(InputError, text), spec=spec, cpu_only=cpu_only)
