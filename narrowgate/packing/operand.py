"""How a packed tensor crosses an operator's schema: as plain tensors and one string that describes them.

`flatten` and `unflatten` are inverses. The string is compact JSON with everything that is not a tensor, so an operator is a
function of tensors and strings alone and survives tracing, saving and torch.compile. A dense tensor is ([x], "dense").
Order: data, scales innermost first, zero points, offset, codebook.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from torch import Tensor

from narrowgate.errors import InputError
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
        return w.tensors(), describe(w)
    if isinstance(w, Tensor):
        return [w], DENSE
    raise InputError(f"flatten: expected a tensor or a PackedTensor, got {type(w).__name__}")


def unflatten(tensors: list[Tensor], described: str) -> PackedTensor | Tensor:
    """The operand that `flatten` took apart. Raises InputError if tensors and description do not fit together."""
    if described == DENSE:
        if len(tensors) != 1:
            raise InputError(f"unflatten: a dense operand is one tensor, got {len(tensors)}")
        return tensors[0]
    record = _parse(described)
    scales, zero, offset = record["scales"], record["zero_points"], record["offset"]
    expected = 1 + len(scales) + (zero is not None) + len(offset) + record["codebook"]
    if len(tensors) != expected:
        raise InputError(f"unflatten: the description names {expected} tensors, got {len(tensors)}")
    rest = iter(tensors[1:])
    w = PackedTensor(
        record["element"],
        record["layout"],
        tensors[0],
        record["shape"],
        tuple(Scale(next(rest), *fields) for fields in scales),
        None if zero is None else Scale(next(rest), *zero),
        tuple(Scale(next(rest), *fields) for fields in offset),
        next(rest) if record["codebook"] else None,
    )
    w.__dict__["_described"] = described
    return w


def operand_shape(tensors: list[Tensor], described: str) -> tuple[int, ...]:
    """The shape in values, without building anything."""
    return tuple(tensors[0].shape) if described == DENSE else _parse(described)["shape"]


def _describe_scale(scale: Scale) -> dict[str, Any]:
    return {"element": scale.element, "block": list(scale.block), "layout": scale.layout}


@lru_cache(maxsize=4096)
def _parse(described: str) -> dict[str, Any]:
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


def _scale_fields(fields: dict[str, Any]) -> tuple[str, tuple[int, ...], str]:
    return fields["element"], tuple(fields["block"]), fields["layout"]
