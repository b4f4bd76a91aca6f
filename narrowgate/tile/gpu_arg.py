"""`arg`: a PackedTensor as one argument of a Triton kernel, checked before anything is built.

A nested named tuple: tensors become pointers, the number of rows stays a number, and everything else (names, extents, blocks)
is a compile-time constant, so that a kernel contains only what its operand needs. What SPEC A27, A38 and A41 refuse is refused
here, by the same checks as the readable reads of narrowgate.packing."""

from __future__ import annotations

from functools import lru_cache
from math import gcd, prod
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from narrowgate.errors import InputError
from narrowgate.formats import element
from narrowgate.packing import PackedTensor
from narrowgate.packing.operand import describe, parse
from narrowgate.packing.read import check_width

DECODES = ("auto", "table", "native", "placed")
_STAGES = {None: "", torch.float32: "", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_C = tl.constexpr


class Term(NamedTuple):
    """Leading axes of the values that one run of a scale's rows follows: cells * (row // stride % extent // block)."""

    stride: Any
    extent: Any  # 0: the outermost, which needs no remainder
    block: Any
    cells: Any


class ScaleArg(NamedTuple):
    """A Scale: its grid is [rows, cols] for each matrix of a stack, a cell covers `block` columns."""

    data: Any
    element: Any
    bits: Any
    layout: Any
    rows: Any
    cols: Any
    block: Any
    terms: Any
    num_terms: Any


class Operand(NamedTuple):
    """A packed tensor inside a kernel. `rows` is the product of the leading axes; `line` what `read_block` reads at once."""

    data: Any
    rows: Any
    cols: Any
    rows_of_matrix: Any
    element: Any
    bits: Any
    layout: Any
    aligned: Any
    scales: Any
    num_scales: Any
    zero_points: Any  # a tuple of one or none, since Triton compares no tuple with None
    num_zero_points: Any
    offset: Any
    num_offsets: Any
    codebook: Any
    width: Any
    line: Any
    stage: Any
    native: Any


def arg(w: PackedTensor, *, width: int | None = None, stage: torch.dtype | None = None, decode: str = "auto") -> Operand:
    """`w` as one kernel argument, to be read by `tile.read`, `tile.read_unchecked` and `tile.read_block`.

    width: how many neighbouring values a read serves (None: one, and `read` gives no axis for it): a power of two that divides
    the values of a 32-bit word or is a multiple of them. stage: float16 or bfloat16 rounds each value through that dtype (None:
    exact). decode: "placed" by bit placement, "native" by the device's conversion, "table" by a look-up, "auto" what is fastest.
    Raises InputError: "scale blocks must cover whole lines" (SPEC A27), a width that no word serves, a layout bound at another
    element than it stores (A38), an unknown name. Source: SPEC A5, A9, A16-A19.

    >>> from narrowgate.packing import pack
    >>> operand = arg(pack(torch.arange(-8, 8).view(2, 8), "int4"), width=8)
    >>> operand.rows, operand.line.value
    (2, 8)
    """
    if not isinstance(w, PackedTensor):
        raise InputError(f"tile.arg: expected a PackedTensor, got {type(w).__name__}")
    if stage not in _STAGES:
        raise InputError(f"tile.arg: expected stage None, float32, bfloat16 or float16, got {stage}")
    if decode not in DECODES:
        raise InputError(f"tile.arg: expected decode to be one of {', '.join(DECODES)}, got {decode!r}")
    if width is not None:
        if width < 1 or width & (width - 1):
            raise InputError(f"tile.arg: expected a width that is a power of two, got {width}")
        check_width(w, width, "tile.arg")
    return bind(w.tensors(), describe(w), width=width, stage=_STAGES[stage], decode=decode)


def bind(tensors: list[Tensor], described: str, *, width: int | None = None, stage: str = "", decode: str = "auto") -> Operand:
    """`arg` of an operand as it crosses a schema (narrowgate.packing.flatten), whose checks have been made."""
    fixed, scales, zero, offset = _constants(described, width, stage, decode)
    rest = iter(tensors[1:])

    def take(scale: ScaleArg) -> ScaleArg:
        return scale._replace(data=next(rest))

    bound, subtracted = tuple(take(s) for s in scales), tuple(take(s) for s in zero)
    added = tuple(take(s) for s in offset)
    table = next(rest, None)
    if table is None and decode == "table":
        table = _decode_table(fixed.element.value, tensors[0].device)
    aligned = _C(tensors[0].data_ptr() % 4 == 0)
    return fixed._replace(
        data=tensors[0], rows=fixed.rows, aligned=aligned, scales=bound, zero_points=subtracted, offset=added, codebook=table
    )


@lru_cache(maxsize=1024)
def _constants(
    described: str, width: int | None, stage: str, decode: str
) -> tuple[Operand, tuple[ScaleArg, ...], tuple[ScaleArg, ...], tuple[ScaleArg, ...]]:
    """The compile-time part of an operand, computed once for a description."""
    record = parse(described)
    shape, kind = record["shape"], element(record["element"])
    if decode == "table" and kind.kind != "index" and kind.bits > 8:
        raise InputError(f"tile.arg: decode='table' needs codes of at most 8 bits, {kind.name} has {kind.bits}")
    scales = tuple(_scale(fields, shape) for fields in record["scales"])
    zero = () if record["zero_points"] is None else (_scale(record["zero_points"], shape),)
    offset = tuple(_scale(fields, shape) for fields in record["offset"])
    every = [*record["scales"], *([record["zero_points"]] if zero else ()), *record["offset"]]
    fixed = Operand(
        data=None, rows=prod(shape[:-1]), cols=_C(shape[-1]), rows_of_matrix=_C(_matrix_rows(record["layout"], shape)),
        element=_C(kind.name), bits=_C(kind.bits), layout=_C(record["layout"]), aligned=_C(True),
        scales=(), num_scales=_C(len(scales)), zero_points=(), num_zero_points=_C(len(zero)), offset=(),
        num_offsets=_C(len(offset)), codebook=None,
        width=_C(width or 0), line=_C(width or _line(kind.bits, record["layout"], shape, every)), stage=_C(stage),
        native=_C(decode == "native"),
    )  # fmt: skip
    return fixed, scales, zero, offset


def _line(bits: int, layout: str, shape: tuple[int, ...], scales: list[dict[str, Any]]) -> int:
    """The most values that a word holds and every scale covers, for rows that start with a line; a power of two."""
    most = {2: 16, 4: 8, 6: 16 if layout == "fp6_bytes@1" else 8}.get(bits, 8)
    shared = gcd(most, shape[-1]) if shape[-1] else 1
    if layout == "fp6_bytes@1" and shared == 8:
        shared = 4  # three bytes; sixteen values are three words
    for fields in scales:
        if fields["block"][-1] < shape[-1]:
            shared = gcd(shared, fields["block"][-1])
    return shared


def _scale(fields: dict[str, Any], shape: tuple[int, ...]) -> ScaleArg:
    block = fields["block"]
    grid = tuple(-(-extent // b) for extent, b in zip(shape, block, strict=True))
    terms = _terms(shape[:-1], block[:-1])
    return ScaleArg(
        None, _C(fields["element"]), _C(element(fields["element"]).bits), _C(fields["layout"]),
        _C(_matrix_rows(fields["layout"], grid)), _C(grid[-1]), _C(block[-1]),
        tuple(Term(*map(_C, term)) for term in terms), _C(len(terms)),
    )  # fmt: skip


def _matrix_rows(layout: str, shape: tuple[int, ...]) -> int:
    """Rows of one matrix of a stack, where rows do not lie one after the other; else 1, lest a row count compile a kernel."""
    return shape[-2] if layout.startswith(("swizzle", "lanes", "planes", "columns")) else 1


def _terms(shape: tuple[int, ...], block: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """(stride, extent, block, cells) of the leading axes along which a scale varies, unblocked neighbours as one."""
    terms: list[tuple[int, int, int, int]] = []
    stride = cells = 1
    for extent, b in zip(reversed(shape), reversed(block), strict=True):
        here = -(-extent // b)
        joins = terms and terms[-1][0] * terms[-1][1] == stride and terms[-1][2] == b == 1
        if here > 1 and joins:
            terms[-1] = (terms[-1][0], terms[-1][1] * extent, 1, terms[-1][3])
        elif here > 1:
            terms.append((stride, extent, b, cells))
        stride, cells = stride * extent, cells * here
    if terms and terms[-1][0] * terms[-1][1] == stride:  # the outermost: a row never wraps
        terms[-1] = (terms[-1][0], 0, *terms[-1][2:])
    return terms


@lru_cache(maxsize=64)
def _decode_table(name: str, device: torch.device) -> Tensor:
    """int32 bit patterns of an element's values, indexable by code."""
    record = element(name)
    return record.decode(torch.arange(2**record.bits)).view(torch.int32).to(device)
