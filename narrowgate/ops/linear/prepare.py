"""`prepare`: a weight in the layout that a device's kernel reads in place. It moves bits and changes none."""

from __future__ import annotations

import torch

from narrowgate.errors import InputError
from narrowgate.ops.linear.reading import CODES, UNITS, reading
from narrowgate.packing import PackedTensor, describe

_OPS = ("linear", "grouped_linear", "matmul", "embedding", "dequantize")


def prepare(w: PackedTensor, device: torch.device | str | None = None, op: str = "linear") -> PackedTensor:
    """The same tensor on `device` (None: where it is), in the layout that the kernel of `op` reads without a copy.

    On the CPU that is rows as lanes (`lanes16@1`, and `lanes16_units@1` for block scales) for linear and grouped_linear;
    other ops, and weights that the kernel does not take, keep their layout. Every op takes every layout: this saves work,
    not correctness, and the bits of a result do not change. `with_layout` and saving a model undo it. Raises InputError.

    >>> import narrowgate as ng
    >>> w = ng.quantize(torch.randn(20, 64), "mxfp4")
    >>> p = ng.prepare(w)
    >>> p.layout, ng.same_bits(p.with_layout("words@1", scales="rows@1"), w)
    ('lanes16@1', True)
    """
    if not isinstance(w, PackedTensor):
        raise InputError(f"prepare: expected a PackedTensor, got {type(w).__name__}")
    if op not in _OPS:
        raise InputError(f"prepare: expected op to be one of {', '.join(_OPS)}, got {op!r}")
    w = w if device is None else w.to(device)
    if w.device.type != "cpu" or op not in ("linear", "grouped_linear"):
        return w
    weight, _ = reading(describe(w))
    if weight is None or weight.prepared:
        return w
    return w.with_layout(CODES, scales=UNITS if weight.scale_index is not None else None)
