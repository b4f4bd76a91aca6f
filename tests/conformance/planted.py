"""Planted faults: for each operator, wrong versions of it, as functions with its signature. The suite must catch each one.

`@fault(op, name)` registers one. It is called with the honest operator first and then the arguments by name. The general
faults at the end are made for every operator; planted_*.py hold those that only one family can have."""

from __future__ import annotations

import inspect

import torch

import narrowgate.ops as ops
from narrowgate.conformance.guards import map_tensors, tensors

FAULTS: dict[str, dict[str, object]] = {}


def fault(op, name):
    """Register a fault of `op`, or of each of several operators."""

    def note(function):
        for one in [op] if isinstance(op, str) else op:
            FAULTS.setdefault(one, {})[name] = planted(one, function)
        return function

    return note


def planted(op, function):
    """`function(honest, **arguments)` with the operator's own signature."""
    honest = getattr(ops, op)
    signature = inspect.signature(honest)
    shown = signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "impl"])

    def wrong(*args, **kwargs):
        bound = shown.bind(*args, **kwargs)
        return function(honest, **bound.arguments)

    wrong.__signature__ = shown
    return wrong


def give(value, out=None):
    """`value`, or `out` filled with it."""
    return value if out is None else out.copy_(value)


# ---- what any operator can get wrong


def _result(got, arguments):
    """What an operator gave: what it returned, or what it changed."""
    return got if got is not None else next(iter(arguments.values()))


def _unwritten(honest, **arguments):
    """The last element of the result is left as it was in memory."""
    into = arguments.get("out")
    if into is not None:
        was = into.clone()
        got = honest(**arguments)
        got.view(-1)[-1:] = was.view(-1)[-1:] if got.is_contiguous() and got.numel() else got.view(-1)[-1:]
        return got
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    got = honest(**arguments)
    if got is None:  # it only changes its first argument
        first = next(iter(arguments))
        arguments[first][-1] = before[first][-1]
        return None

    def forget(t):
        fresh = torch.empty_like(t)
        fresh.view(-1)[:-1] = t.reshape(-1)[:-1]
        return fresh

    return map_tensors(got, forget)


def _changes_an_input(honest, **arguments):
    """The last tensor among the arguments gets another first element."""
    got = honest(**arguments)
    given = [
        t for name, value in arguments.items() if name != "out" for t in tensors(value) if t.numel() and t.dtype != torch.bool
    ]
    if given:
        where = given[-1].view(-1)[:1] if given[-1].is_contiguous() else given[-1][(slice(0, 1),) * given[-1].ndim]
        where.add_(1)
    return got


def _writes_beside(honest, **arguments):
    """One element after the end of the first tensor is written."""
    got = honest(**arguments)
    for t in tensors(list(arguments.values())):
        end = t.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        if t.numel() and t.untyped_storage().nbytes() >= (end + 1) * t.element_size():
            t.as_strided((1,), (1,), end).view(torch.uint8).fill_(0x5A)
            break
    return got


def _another_dtype(honest, **arguments):
    """The result comes in another type."""
    into = arguments.pop("out", None)
    got = honest(**arguments)
    if into is not None:
        return into.copy_(got)
    return map_tensors(got, lambda t: t.double() if t.is_floating_point() else t.to(torch.int64) + 2**40)


def _not_into_out(honest, **arguments):
    """A given out is filled, but the function returns a tensor of its own."""
    got = honest(**arguments)
    return got.clone() if "out" in arguments else got


def _one_too_many(honest, **arguments):
    """One tensor more than there should be."""
    got = honest(**arguments)
    return got if "out" in arguments else [*tensors(got), torch.zeros(1)]


def _depends_on_alignment(honest, **arguments):
    """The first element differs where the first tensor lies at an odd address: a vector loop with a wrong tail."""
    got = honest(**arguments)
    first = tensors(list(arguments.values()))[0]
    changed = tensors(_result(got, arguments))[0]
    if changed.numel() and first.data_ptr() % 64:
        changed.view(torch.uint8).view(-1)[:1] ^= 1 if changed.is_contiguous() else 0
    return got


@fault("split_qkv", "views of the input")
def _views(honest, mixed, **arguments):
    got = honest(mixed=mixed, **arguments)
    parts = mixed.split([t.shape[1:].numel() for t in got], -1)
    return tuple(part.unflatten(-1, t.shape[1:]) for part, t in zip(parts, got, strict=True))


@fault("scale", "by 1 it is the input")
def _itself(honest, x, s, out=None):
    return x if s == 1 and out is None else honest(x, s, out)


@fault("select_rows", "all rows in order are the input")
def _all_rows(honest, x, indices, out=None):
    return x if indices.tolist() == list(range(len(x))) and out is None else honest(x, indices, out)


@fault("gather_state", "all rows in order are the cache")
def _all_slots(honest, cache, indices, has_initial_state=None, out=None):
    whole = has_initial_state is None and out is None and cache.dtype == torch.float32
    return cache if whole and indices.tolist() == list(range(len(cache))) else honest(cache, indices, has_initial_state, out)


_LAST = {}


def _memory_of_the_last_call(honest, **arguments):
    """Results come in one buffer for each shape and type, kept from call to call."""
    got = honest(**arguments)
    if "out" in arguments:
        return got
    return map_tensors(got, lambda t: _LAST.setdefault((t.shape, t.dtype), torch.empty_like(t)).copy_(t))


def _reads_beside(honest, **arguments):
    """What lies behind the first tensor is added to the first element of the result."""
    first = next(t for t in tensors(list(arguments.values())))
    got = honest(**arguments)
    end = first.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(first.shape, first.stride(), strict=True))
    changed = tensors(_result(got, arguments))[0]
    if first.numel() and changed.numel() and first.untyped_storage().nbytes() >= (end + 1) * first.element_size():
        where = changed[(slice(0, 1),) * changed.ndim]
        where.add_(first.as_strided((1,), (1,), end).to(where.dtype).view(where.shape) if where.ndim else 0)
    return got


def _touches_an_idle_row(honest, **arguments):
    """A row of what is changed in place, and of no concern to the call, moves by one step of its type."""
    got = honest(**arguments)
    name = next(n for n in ("state", "cache", "dst") if n in arguments)
    live = arguments["state_indices" if name == "state" else "indices"]
    pool = arguments[name]
    idle = [] if live is None else [i for i in range(len(pool)) if i not in live.flatten().tolist()]
    if idle and pool[idle[0]].numel():
        one = pool[idle[0]][(slice(0, 1),) * (pool.ndim - 1)]
        step = one.clone().contiguous()
        step.view(torch.uint8).view(-1)[:1] ^= 1
        one.copy_(step)
    return got


SLOTTED = ("gated_delta_rule", "gated_delta_rule_step", "gated_delta_rule_packed_step", "causal_conv1d", "causal_conv1d_step")
fault((*SLOTTED, "scatter_state", "copy_rows"), "an idle row touched")(_touches_an_idle_row)
fault(("silu", "relu2", "l2_norm", "rms_norm", "silu_mul"), "what lies behind is read")(_reads_beside)


def _pools_packed(honest, **arguments):
    """The slots of a pool are taken to lie one behind the other."""
    state = arguments["state"]
    arguments["state"] = state.as_strided(state.shape, torch.empty(state.shape).stride(), state.storage_offset())
    return honest(**arguments)


fault((*SLOTTED, "gated_delta_rule_speculative_step", "causal_conv1d_speculative_step"), "slots one behind the other")(
    _pools_packed
)

GENERAL = {
    "the last element unwritten": _unwritten, "an input changed": _changes_an_input, "a canary overwritten": _writes_beside,
    "another dtype": _another_dtype, "not into out": _not_into_out, "one tensor too many": _one_too_many,
    "depends on alignment": _depends_on_alignment,     "the memory of the last call": _memory_of_the_last_call,
}  # fmt: skip


def general(op):
    """The general faults that `op` can have."""
    parameters = inspect.signature(getattr(ops, op)).parameters
    mutates_only = op in ("scatter_state", "copy_rows")
    absent = set()
    if "out" not in parameters:
        absent.add("not into out")
    if mutates_only:
        absent |= {
            "another dtype",
            "not into out",
            "one tensor too many",
            "the memory of an argument",
            "the memory of the last call",
        }
    if op == "quantize":  # a packed tensor refuses storage of another dtype by itself
        absent.add("another dtype")
    return {name: planted(op, function) for name, function in GENERAL.items() if name not in absent}
