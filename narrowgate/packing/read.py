"""`read`: a few values of a packed tensor by position, in lines of any width. The definition that a kernel's reads are held to.

A line is `width` neighbouring values of one row; it may be a part of a word, a word, or several words, and a row may start inside
a word (SPEC A16-A18, A45). `read` is masked: what lies outside the tensor reads as 0. `read_unchecked` is for a caller who has
checked: the same values, and here an error where a kernel would read beyond its memory. `stage` rounds what is read through a
shorter dtype, as a walk that stages its operand does (SPEC A19). What cannot be served is refused before anything is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.errors import InputError
from narrowgate.formats import element
from narrowgate.packing.build import check_lines
from narrowgate.packing.decode import gather_rows
from narrowgate.packing.layout import row_count
from narrowgate.packing.tensor import PackedTensor

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INDICES = (torch.int32, torch.int64)


def read(w: PackedTensor, rows: Tensor, cols: Tensor, *, width: int = 1, stage: torch.dtype | None = None) -> Tensor:
    """float32 [len(rows), len(cols), width]: value [i, j, l] is that of row rows[i], column cols[j] + l, or 0 outside.

    w: rows are its leading axes taken together. rows, cols: int32 or int64, 1-D, any numbers, negative ones too; every column
    is the first of a line, a multiple of `width`. stage: None is exact; float16 or bfloat16 rounds each value, scales already
    in it, to nearest even. Raises InputError: a width that neither divides a word nor is whole words, a scale block that a line
    would straddle ("scale blocks must cover whole lines", SPEC A27), a column inside a line. Source: SPEC A16-A19.

    >>> from narrowgate.packing import pack
    >>> w = pack(torch.arange(-8, 2).view(2, 5), "int4")
    >>> read(w, torch.tensor([1]), torch.tensor([0, 4]), width=2).tolist()
    [[[-3.0, -2.0], [1.0, 0.0]]]
    """
    places = _places(w, rows, cols, width, stage)
    inside = (rows >= 0) & (rows < row_count(w.shape))
    within = (places >= 0) & (places < w.shape[-1])
    values = _values(w, torch.where(inside, rows, 0), torch.where(within, places, 0), stage)
    return torch.where(inside[:, None, None] & within, values, 0.0)


def read_unchecked(w: PackedTensor, rows: Tensor, cols: Tensor, *, width: int = 1, stage: torch.dtype | None = None) -> Tensor:
    """`read` for a caller whose lines all lie inside the tensor. Raises InputError where one does not; a kernel would not."""
    places = _places(w, rows, cols, width, stage)
    for name, index, end in (("rows", rows, row_count(w.shape)), ("columns", places, w.shape[-1])):
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= end):
            raise InputError(f"read_unchecked: expected {name} in 0..{end - 1}, got {int(index.min())}..{int(index.max())}")
    return _values(w, rows, places, stage)


def check_width(w: PackedTensor, width: int, who: str = "read") -> None:
    """Raise InputError unless lines of `width` values can be read from `w` (SPEC A16, A27, A41)."""
    if width < 1:
        raise InputError(f"{who}: expected a width of at least 1, got {width}")
    bits = element(w.element).bits
    per_word = 32 // bits if w.layout == "words@1" else 1
    if width % per_word and per_word % width:
        raise InputError(
            f"{who}: expected a width that divides the {per_word} values of a word or is a multiple of them, got {width}"
        )
    check_lines(w, width)


def _places(w: PackedTensor, rows: Tensor, cols: Tensor, width: int, stage: torch.dtype | None) -> Tensor:
    """Every column read: int64 [len(cols), width]."""
    check_width(w, width)
    for name, index in (("rows", rows), ("cols", cols)):
        if index.dtype not in _INDICES or index.dim() != 1:
            raise InputError(f"read: expected {name} as int32 or int64 of one axis, got {index.dtype} {list(index.shape)}")
    if stage is not None and stage not in _FLOATS:
        raise InputError(f"read: expected stage None, float32, bfloat16 or float16, got {stage}")
    if bool((cols % width != 0).any()):
        raise InputError(f"read: a line of {width} values starts at a multiple of its width, got columns {cols.tolist()}")
    return cols.to(torch.int64)[:, None] + torch.arange(width, device=cols.device)


def _values(w: PackedTensor, rows: Tensor, places: Tensor, stage: torch.dtype | None) -> Tensor:
    if rows.numel() == 0 or places.numel() == 0 or w.numel == 0:
        return torch.zeros((len(rows), *places.shape), device=w.device)
    values = gather_rows(w, rows.to(torch.int64))[:, places]
    return values if stage is None else values.to(stage).to(torch.float32)
