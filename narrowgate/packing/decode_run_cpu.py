"""From a PackedTensor to the call of the kernel in decode_cpu.py: what an operator that decodes rows uses."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from numba import types
from torch import Tensor

from narrowgate.formats import element
from narrowgate.packing import decode_cpu, fields_cpu
from narrowgate.packing.decode import RUNS, decode_table, scale_rows
from narrowgate.packing.layout import row_count
from narrowgate.packing.scale import Scale
from narrowgate.packing.tensor import PackedTensor
from narrowgate.simd.cpu_compile import compiled
from narrowgate.simd.cpu_scales import KINDS, SIZE
from narrowgate.simd.cpu_threads import threads

_FIELDS = {
    "int8": fields_cpu.SIGNED8, "uint8": fields_cpu.UNSIGNED8, "float8_e4m3fn": fields_cpu.E4M3, "float8_e5m2": fields_cpu.E5M2,
    "bfloat16": fields_cpu.BFLOAT16, "float16": fields_cpu.FLOAT16, "float32": fields_cpu.FLOAT32,
}  # fmt: skip
_NARROW = {4: fields_cpu.TABLE4, 2: fields_cpu.TABLE2, 6: fields_cpu.TABLE6}
_LAYOUTS = {"bytes@1": decode_cpu.BYTES, "lanes16@1": decode_cpu.LANES}
_OUT = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_TASK = 1 << 16  # values of a task
_ALONE = 1 << 14  # values that one thread decodes sooner than a second one wakes
_STREAM = 16 << 20  # bytes of a result that is not kept in the caches


def decode_into(w: PackedTensor, out: Tensor, *, first: int = 0, ids: Tensor | None = None, positive: bool = False) -> None:
    """out [n, K] = the values of rows first .. first + n, or of rows `ids` (int64 [n], checked by the caller); w is in one of RUNS.

    out: float32, bfloat16 or float16, rows contiguous. `positive` adds +0.0 to every value. Rows are the leading axes of w
    taken together. Bit for bit `decode_rows` and `gather_rows`, rounded once to out's dtype.
    """
    (n, width), kind = out.shape, element(w.element)
    assert w.layout in RUNS, w.layout
    if n == 0 or width == 0:
        return
    rows: slice | Tensor = slice(first, first + n) if ids is None else ids
    table, kept = _table(w), [ids, out]
    levels = [] if w.zero_points is None else [_level(decode_cpu.SUBTRACT, w.zero_points, w, rows, kept)]
    levels += [_level(decode_cpu.MULTIPLY, scale, w, rows, kept) for scale in w.scales]
    for i, scale in enumerate(w.offset):
        levels.append(_level(decode_cpu.TIMES if i else decode_cpu.FIRST, scale, w, rows, kept))
    levels += [[decode_cpu.ADD, *[0] * 7]] if w.offset else []
    described = torch.tensor(levels, dtype=torch.int64)
    stack = w.shape[-2] if len(w.shape) > 1 else 1  # a tensor with values has rows
    team = threads() if n * width > _ALONE else 1
    layout = _LAYOUTS.get(w.layout, decode_cpu.BYTES if w.layout == "rows@1" and kind.bits < 8 else decode_cpu.FLAT)
    _kernel()(
        n, max(1, min(_TASK // width, -(-n // (4 * team)))), first, 0 if ids is None else ids.data_ptr(), stack, width,
        _kind(w.element, w.codebook is not None), kind.bits, layout, w.data.data_ptr(), w.data.numel() * w.data.element_size(),
        table.data_ptr(), described.data_ptr(), len(levels), int(positive), out.data_ptr(), out.stride(0) * out.element_size(),
        _OUT[out.dtype], int(4 * n * width > _STREAM), team,
    )  # fmt: skip


@cache
def _kernel() -> Any:
    return compiled(decode_cpu.decode_rows, (types.int64,) * 20, "")


@lru_cache(maxsize=64)
def _kind(name: str, book: bool) -> int:
    bits = element(name).bits
    return _FIELDS[name] if name in _FIELDS else _NARROW.get(bits, decode_cpu.INDEX)


def _table(w: PackedTensor) -> Tensor:
    """float32 [>= 16]: what codes are looked up in; unread where the element needs none."""
    if w.codebook is None:
        return _own_table(w.element)
    book = w.codebook.view(torch.float32)
    return book.repeat(4) if book.numel() == 4 else book


@lru_cache(maxsize=64)
def _own_table(name: str) -> Tensor:
    if element(name).bits > 8:
        return torch.zeros(32)
    values = decode_table(name, torch.device("cpu"))
    return values.repeat(max(1, 16 // values.numel()))


def _level(operation: int, scale: Scale, w: PackedTensor, rows: slice | Tensor, kept: list[Any]) -> list[int]:
    """The kernel's record of a level. Storage that it does not know is decoded here, the rows that are wanted."""
    grid, block = scale.grid(w.shape), min(scale.block[-1], w.shape[-1])
    kind = KINDS.get(scale.element, 0)
    single, whole = row_count(grid) == 1, grid[:-1] == w.shape[:-1]
    apart = scale.layout == "lanes16_units@1"
    if kind and (single or whole) and (apart or scale.layout == "rows@1"):
        per_row = 0 if single and grid[-1] == 1 else grid[-1]
        if not (single and per_row and not whole):  # a row of several scales that all rows share has no place in the record
            return [operation, kind, scale.data.data_ptr(), per_row, block, int(apart and per_row > 0), 0, SIZE[kind]]
    values = scale_rows(scale, w.shape, rows).contiguous()
    if values.shape[0] == 1 and values.shape[1] > 1:
        values = values.expand(rows.stop - rows.start if isinstance(rows, slice) else len(rows), -1).contiguous()
    kept.append(values)
    per_row = 0 if values.numel() == 1 else values.shape[1]
    return [operation, KINDS["float32"], values.data_ptr(), per_row, block, 0, 1, 4]
