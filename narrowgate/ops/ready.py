"""Calls on a packed operand that have run before, made ready to run again: what was checked and chosen for them is remembered
beside the operand, so that a call costs its kernel and a few microseconds.

A call is known by the shape and dtype of its dense inputs and by its options; the operand by its identity, and by the addresses of
its stored tensors, which a ready call holds as numbers. Only plain tensors in host memory that are contiguous and ask for no
gradient come this way, and only while nothing traces and the operator's kernel is the package's own; any other call is checked
anew. Left out: calls that write into a given `out`, and GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor

from narrowgate.dispatch import Operator, untraced
from narrowgate.ops.host import missing
from narrowgate.packing import PackedTensor, flatten

_PLAIN = (Tensor, torch.nn.Parameter)
_MANY = 256  # different calls on one operand

Call = Callable[..., Any]


class Calls(dict[Any, Call | None]):
    """Ready calls on one operand, by what is asked of them; None: such a call cannot be made ready. A copy of the operand, which
    has tensors of its own, starts without any."""

    def __init__(self, w: PackedTensor | None = None) -> None:
        super().__init__()
        self.tensors, self.described = flatten(w) if w is not None else ([], "")
        self.addresses = [t.data_ptr() for t in self.tensors]

    def __reduce__(self) -> Any:
        return Calls, ()


class Ready:
    """The ready calls of one operator. `target`: "module:function", called with the operand's tensors, its description and what else
    `make` is given; it returns the call, or None."""

    def __init__(self, operator: Operator, target: str) -> None:
        self._operator, self._target, self._name = operator, target, f"_ready_{operator.name}"
        self._kernel = operator.kernels["cpu"]

    def find(self, w: Any) -> Calls | None:
        """The calls on `w`, or None where none may be used or made now."""
        if type(w) is not PackedTensor or not untraced() or self._operator.kernels["cpu"] is not self._kernel:
            return None
        calls: Calls | None = w.__dict__.get(self._name)
        if calls is None or not calls.tensors or [t.data_ptr() for t in calls.tensors] != calls.addresses:
            if w.data.device.type != "cpu":
                return None
            calls = w.__dict__[self._name] = Calls(w)
        return calls

    def make(self, calls: Calls, key: Any, *given: Any) -> None:
        """Make a call ready that has just run, so that nothing can be wrong with it."""
        module, _, name = self._target.partition(":")
        if len(calls) >= _MANY:
            calls.clear()
        make = None if missing() else getattr(importlib.import_module(module), name)
        calls[key] = make and make(calls.tensors, calls.described, *given)


def plain(t: Any) -> TypeGuard[Tensor]:
    """Whether it is an ordinary tensor in host memory, contiguous, that asks for no gradient."""
    return (
        type(t) in _PLAIN
        and t.layout is torch.strided
        and t.is_cpu
        and t.is_contiguous()
        and not (t.requires_grad and torch.is_grad_enabled())
    )
