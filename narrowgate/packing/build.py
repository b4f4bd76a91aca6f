"""`pack`: raw codes to a PackedTensor, with every check that a wrong binding should meet here and not at a read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgate.errors import InputError
from narrowgate.formats import element
from narrowgate.packing.layout import as_codes
from narrowgate.packing.registry import layout as find_layout
from narrowgate.packing.scale import Scale
from narrowgate.packing.tensor import PackedTensor


def pack(
    codes: Tensor,
    element: str,
    *,
    scales: Sequence[Scale] = (),
    zero_points: Scale | None = None,
    offset: Sequence[Scale] = (),
    codebook: Tensor | None = None,
    layout: str = "words@1",
) -> PackedTensor:
    """Pack integer codes [shape] of `element` into `layout`, with scales, zero points, offset and codebook attached.

    value = (decode(code) - zero_point) * scales[0] * scales[1] ... + offset[0] * offset[1] ...

    codes: any integer dtype, raw fields or (int elements) signed values, which have the same low bits; bits above the
    field are dropped. scales: innermost first, a block extent for every axis. codebook: float32 1-D with an entry for
    every index (at least 2**bits; the first 2**bits are kept). Raises InputError for a codebook on an element that is no
    index (SPEC A15), for scales of another rank (A41) and for storage that does not fit (A38). Source: SPEC A1-A6.

    >>> w = pack(torch.arange(-8, 8).view(1, 16), "int4")
    >>> [hex(word & 0xFFFFFFFF) for word in w.data.tolist()]
    ['0xfedcba98', '0x76543210']
    """
    kind = _element(element)
    fields = as_codes(codes, kind.bits, "pack")
    if fields.dim() == 0:
        raise InputError("pack: expected codes of at least one axis, got a scalar")
    shape = tuple(fields.shape)
    chosen = find_layout(layout)
    chosen.check(shape, kind.bits, "pack")
    table = None if codebook is None else attach_codebook(kind.name, codebook)
    return PackedTensor(
        kind.name, layout, chosen.pack(fields, kind.bits), shape, tuple(scales), zero_points, tuple(offset), table
    )


def attach_codebook(name: str, codebook: Tensor) -> Tensor:
    """The stored form of a codebook: int32 bit patterns [2**bits]. Raises InputError where SPEC A15 refuses it."""
    kind = _element(name)
    if kind.kind != "index":
        raise InputError(f"pack: a codebook needs index codes, got element {name}")
    if codebook.dim() != 1 or codebook.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InputError(
            f"pack: expected the codebook as a plain 1-D float tensor, got {codebook.dtype} {list(codebook.shape)}"
        )
    if codebook.numel() < 2**kind.bits:
        raise InputError(f"pack: expected a codebook entry for each index, at least {2**kind.bits}, got {codebook.numel()}")
    return codebook[: 2**kind.bits].to(torch.float32).contiguous().view(torch.int32).clone()


def check_lines(w: PackedTensor, width: int) -> None:
    """Raise InputError unless lines of `width` values along the last axis never straddle a scale's block (SPEC A27).

    A block that spans the whole axis covers any line. Called wherever a width is served, before anything is built.
    """
    for scale in w.all_scales:
        block = scale.block[-1]
        if block < w.shape[-1] and block % width:
            raise InputError(
                f"scale blocks must cover whole lines: a line of {width} values does not divide a block of {block} "
                f"values along the last axis of shape {list(w.shape)}"
            )


_element = element
