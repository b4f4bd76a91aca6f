"""`prepare`: a weight in the layout that a device's kernel reads in place. It moves bits and changes none."""

from __future__ import annotations

from dataclasses import replace

import torch

from narrowgate.errors import InputError
from narrowgate.ops.linear.reading import CODES, UNITS, Weight, reading
from narrowgate.packing import PackedTensor, describe
from narrowgate.packing.pages import on_large_pages
from narrowgate.packing.planes import PARTS, WIDTHS

PLACED = (
    "int2", "int4", "int8", "uint2", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3fn", "float8_e5m2",
)  # elements that are exact in bfloat16 and float16 by moving bits  # fmt: skip
_OPS = ("linear", "grouped_linear", "matmul", "embedding", "dequantize")


def prepare(w: PackedTensor, device: torch.device | str | None = None, op: str = "linear") -> PackedTensor:
    """The same tensor on `device` (None: where it is), in the layout that the kernel of `op` reads without a copy.

    For linear and grouped_linear that is, on the CPU, rows as lanes (`lanes16@1`, and `lanes16_units@1` for block scales); on a
    GPU, group-major planes (`planes64@1` or narrower, by the element and the scale block, and `columns@1` for block scales).
    Other ops, and weights that the kernel does not take, keep their layout. Every op takes every layout: this saves work,
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
    if op not in ("linear", "grouped_linear"):
        return w
    weight, _ = reading(describe(w))
    if weight is None:
        return w
    if w.device.type == "cuda":
        return for_gpu(w)
    if w.device.type != "cpu" or weight.prepared:
        return w
    lanes = w.with_layout(CODES, scales=UNITS if weight.scale_index is not None else None)
    return replace(lanes, data=on_large_pages(lanes.data))


def for_gpu(w: PackedTensor) -> PackedTensor:
    """`prepare` for the GPU's kernels, wherever the tensor is now."""
    weight, _ = reading(describe(w))
    part = part_width(weight) if weight is not None else 0
    if weight is None or not part:
        return w
    return w.with_layout(f"planes{part}@1", scales="columns@1" if weight.scale_index is not None else None)


def part_width(w: Weight) -> int:
    """The J of `planesJ@1` that suits a weight, 0 where the GPU's kernels do not take it."""
    if w.element not in PLACED:
        return 0
    widest = 64 if w.bits in (4, 8) else 32
    if w.blocks <= 1:
        return widest
    return next((j for j in WIDTHS[::-1] if j <= widest and divides(w.block, j, w.bits)), 0)


def divides(group: int, part: int, bits: int) -> bool:
    """Whether no part has two scales, and units and scale blocks end together."""
    unit = part * PARTS[bits]
    return group % part == 0 and (unit % group == 0 or group % unit == 0)
