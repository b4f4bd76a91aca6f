"""How a packed tensor crosses an operator's schema: as plain tensors and one string that describes them.

`flatten` and `unflatten` are inverses. The string is compact JSON with everything that is not a tensor, so an operator is a
function of tensors and strings alone and survives tracing, saving and torch.compile. A dense tensor is ([x], "dense").
Order: data, scales innermost first, zero points, offset, codebook.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from narrowgate.errors import InputError
from narrowgate.formats import element
from narrowgate.packing.registry import layout
from narrowgate.packing.scale import Scale
from narrowgate.packing.tensor import PackedTensor

DENSE = "dense"

Operand = PackedTensor | Tensor


def describe(w: PackedTensor) -> str:
    """The format string of `w`; computed once for each tensor object."""
    cached = w.__dict__.get("_described")
    if cached is None:
        record: dict[str, Any] = {"element": w.element, "layout": w.layout, "shape": list(w.shape)}
        record["scales"] = [_describe_scale(scale) for scale in w.scales]
        if w.zero_points is not None:
            record["zero_points"] = _describe_scale(w.zero_points)
        if w.offset:
            record["offset"] = [_describe_scale(scale) for scale in w.offset]
        if w.codebook is not None:
            record["codebook"] = True
        cached = json.dumps(record, separators=(",", ":"))
        w.__dict__["_described"] = cached
    return cached


def flatten(w: PackedTensor | Tensor) -> tuple[list[Tensor], str]:
    """(tensors, format string) of a packed tensor, or ([x], "dense") of a dense one."""
    if isinstance(w, PackedTensor):
        tensors = w.__dict__.get("_tensors")
        if tensors is None:
            tensors = w.__dict__["_tensors"] = tuple(w.tensors())
        return list(tensors), describe(w)
    if isinstance(w, Tensor):
        return [w], DENSE
    raise InputError(f"flatten: expected a tensor or a PackedTensor, got {type(w).__name__}")


def unflatten(tensors: list[Tensor], described: str) -> PackedTensor | Tensor:
    """The operand that `flatten` took apart. Raises InputError if tensors and description do not fit together."""
    if described == DENSE:
        if len(tensors) != 1:
            raise InputError(f"unflatten: a dense operand is one tensor, got {len(tensors)}")
        return tensors[0]
    w = _assemble(tensors, described, checked=fits(tensors, described))
    w.__dict__["_described"] = described
    return w


def operand_shape(tensors: list[Tensor], described: str) -> tuple[int, ...]:
    """The shape in values, without building anything."""
    return tuple(tensors[0].shape) if described == DENSE else parse(described)["shape"]


def _describe_scale(scale: Scale) -> dict[str, Any]:
    return {"element": scale.element, "block": list(scale.block), "layout": scale.layout}


def _assemble(tensors: list[Tensor], described: str, *, checked: bool) -> PackedTensor:
    """The packed tensor; `checked` skips the checks of its parts, which cost four times as much as the rest."""
    record = parse(described)
    scales, zero, offset = record["scales"], record["zero_points"], record["offset"]
    expected = 1 + len(scales) + (zero is not None) + len(offset) + record["codebook"]
    if len(tensors) != expected:
        raise InputError(f"unflatten: the description names {expected} tensors, got {len(tensors)}")
    rest = iter(tensors[1:])
    make = _unchecked if checked else _checked
    return make(
        PackedTensor,
        element=record["element"],
        layout=record["layout"],
        data=tensors[0],
        shape=record["shape"],
        scales=tuple(make(Scale, data=next(rest), **fields) for fields in scales),
        zero_points=None if zero is None else make(Scale, data=next(rest), **zero),
        offset=tuple(make(Scale, data=next(rest), **fields) for fields in offset),
        codebook=next(rest) if record["codebook"] else None,
    )


def _checked(kind: type, **fields: Any) -> Any:
    return kind(**fields)


def _unchecked(kind: type, **fields: Any) -> Any:
    made: Any = object.__new__(kind)
    made.__dict__.update(fields)
    return made


def fits(tensors: list[Tensor], described: str) -> bool:
    """Whether the tensors have the dtypes and shapes that a sound description asks for; False says: look closely."""
    expected = _expected(described)
    return len(tensors) == len(expected) and all(
        t.dtype == dtype and t.shape == shape and t.is_contiguous() and t.device == tensors[0].device
        for t, (dtype, shape) in zip(tensors, expected, strict=True)
    )


@lru_cache(maxsize=4096)
def _expected(described: str) -> tuple[tuple[torch.dtype, torch.Size], ...]:
    """(dtype, shape) of every stored tensor. The description itself is checked here, once, on tensors without data."""
    record = parse(described)
    parts = [(record["element"], record["layout"], record["shape"])]
    scales = [*record["scales"], *([record["zero_points"]] if record["zero_points"] else ()), *record["offset"]]
    for fields in scales:
        if len(fields["block"]) != len(record["shape"]) or min(fields["block"], default=1) < 1:
            return ()  # the full check will say what is wrong
        grid = tuple(-(-extent // block) for extent, block in zip(record["shape"], fields["block"], strict=True))
        parts.append((fields["element"], fields["layout"], grid))
    empty = []
    for name, where, shape in parts:
        bits, chosen = element(name).bits, layout(where)
        chosen.check(shape, bits, "unflatten")
        empty.append(torch.empty(chosen.storage_shape(shape, bits), dtype=chosen.storage_dtype(bits), device="meta"))
    if record["codebook"]:
        empty.append(torch.empty(2 ** element(record["element"]).bits, dtype=torch.int32, device="meta"))
    _assemble(empty, described, checked=False)
    return tuple((t.dtype, t.shape) for t in empty)


@lru_cache(maxsize=4096)
def parse(described: str) -> dict[str, Any]:
    """The description with tuples for lists and every key present. The result is shared: nobody writes to it."""
    try:
        record = json.loads(described)
        return {
            "element": record["element"],
            "layout": record["layout"],
            "shape": tuple(record["shape"]),
            "scales": tuple(_scale_fields(fields) for fields in record["scales"]),
            "zero_points": _scale_fields(record["zero_points"]) if "zero_points" in record else None,
            "offset": tuple(_scale_fields(fields) for fields in record.get("offset", ())),
            "codebook": bool(record.get("codebook", False)),
        }
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise InputError(f"unflatten: not a packed tensor's description ({error}): {described[:200]!r}") from None


def _scale_fields(fields: dict[str, Any]) -> dict[str, Any]:
    return {"element": fields["element"], "block": tuple(fields["block"]), "layout": fields["layout"]}
