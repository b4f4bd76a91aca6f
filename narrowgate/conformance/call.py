"""One guarded call of what is under test: buffers between canaries, poison in every output, inputs watched, time taken.

Left out: what the results should be (run.py)."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgate.conformance.case import Arguments, Case
from narrowgate.conformance.compare import bits
from narrowgate.conformance.guards import Guarded, clone, guard, map_tensors, poisoned_memory, tensors
from narrowgate.dispatch import OPERATORS


@dataclass
class Outcome:
    """What came back under the oracle's names, what was wrong with the way it did, and how long the call took."""

    outputs: dict[str, Tensor]
    problems: list[str]
    seconds: float


def call(
    function: Callable[..., Any], inputs: Arguments, expected: Mapping[str, Tensor], device: str, extra: Mapping[str, str],
    out: Tensor | None = None, shifted: bool = False,
) -> Outcome:  # fmt: skip
    """Call it on guarded copies of `inputs`. `out`: give it an output of that shape and dtype, poisoned. `shifted`: every
    buffer aligned to its element only."""
    guards: list[Guarded] = []

    def place(t: Tensor, poison: bool = False) -> Tensor:
        guards.append(guard(t, device, poison, shifted))
        return guards[-1].tensor

    placed = map_tensors(inputs, place)
    kept = {name: clone(value) for name, value in placed.items() if name not in expected}
    into = None if out is None else place(torch.empty_like(out), poison=True)
    given = {} if into is None else {"out": into}
    start = time.perf_counter()
    with torch.no_grad(), poisoned_memory():
        got = function(**placed, **extra, **given)
    if device != "cpu":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    problems = [f"{name}: the input was changed" for name, was in kept.items() if not same(was, placed[name])]
    if any(g.broken() for g in guards):
        problems.append("memory beside a buffer was written")
    if into is not None and isinstance(got, Tensor) and got.data_ptr() != into.data_ptr() and into.numel():
        problems.append("a given out was not the tensor returned")
    outputs, more = _named(got if into is None else into, placed, expected)
    fresh = {name: t for name, t in outputs.items() if name not in placed and into is None and "out" not in placed}
    problems += [f"{name}: shares memory with an argument" for name in sharing(fresh, tensors(placed))]
    return Outcome(outputs, problems + more, seconds)


def sharing(outputs: Mapping[str, Any], others: Sequence[Any]) -> list[str]:
    """The outputs that lie in the memory of another tensor: a later write to one of the two would change both."""
    taken = {_memory(t) for t in others if isinstance(t, Tensor)} - {None}
    return [name for name, t in outputs.items() if isinstance(t, Tensor) and _memory(t) in taken]


def _memory(t: Tensor) -> int | None:
    return t.untyped_storage().data_ptr() if t.layout == torch.strided and t.numel() else None


def _named(got: Any, placed: Arguments, expected: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The returned tensors under the oracle's names, in order, and the arguments that it says are changed in place."""
    returned = [name for name in expected if name not in placed]
    came = [] if got is None else [got] if isinstance(got, Tensor) else tensors(got)
    problems = []
    if "out" not in placed and len(came) > len(returned):
        problems.append(f"expected {len(returned)} tensors back, got {len(came)}")
    outputs = dict(zip(returned, came, strict=False))
    outputs.update({name: placed[name] for name in expected if name in placed})
    return outputs, problems + [f"{name}: nothing came back" for name in expected if name not in outputs]


def declared(case: Case, inputs: Arguments) -> list[torch.dtype]:
    """The dtypes that the operator itself would allocate for a case: whatever stands in for it must return the same."""
    operator = OPERATORS.get(case.op)
    if operator is None or operator.allocate is None:
        return []
    arguments = {name: value for name, value in inputs.items() if name != "out"}
    args, kwargs = operator.flatten(**arguments) if operator.flatten else ((), arguments)
    with torch.no_grad():
        return [t.dtype for t in tensors(operator.allocate(*args, **kwargs))]


def same(a: Any, b: Any) -> bool:
    """Every tensor inside the two, to the bit."""
    pairs = zip(tensors(a), tensors(b), strict=True)
    return all(bits(nan_payload=True)(x, y).ok for x, y in pairs)


def takes_out(function: Callable[..., Any]) -> bool:
    try:
        return "out" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
