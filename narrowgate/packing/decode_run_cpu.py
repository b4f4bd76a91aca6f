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


def decode_into(w: PackedTensor, out: Tensor, *, first: int = 0, ids: Tensor | None = None, positive: bool = False) -> bool:
    """out [n, K] = the values of rows first .. first + n, or of rows `ids` (int32 or int64 [n], contiguous); w is in one of RUNS.

    out: float32, bfloat16 or float16, rows contiguous. `positive` adds +0.0 to every value. Rows are the leading axes of w
    taken together. Bit for bit `decode_rows` and `gather_rows`, rounded once to out's dtype. False, and nothing written, where an
    id is no row of w.
    """
    rows = slice(first, first + out.shape[0]) if ids is None else ids
    return Reading(w, rows, positive).into(out, first, ids)


class Reading:
    """What the kernel must know of `w`, of which the given rows are read. `lasting`: it serves for any rows, as long as w's tensors
    stay where they are and `changed()` is False; scales that had to be decoded first serve for those rows only."""

    def __init__(self, w: PackedTensor, rows: slice | Tensor, positive: bool) -> None:
        kind = element(w.element)
        assert w.layout in RUNS, w.layout
        kept: list[tuple[Tensor, Scale]] = []
        levels = [] if w.zero_points is None else [_level(decode_cpu.SUBTRACT, w.zero_points, w, rows, kept)]
        levels += [_level(decode_cpu.MULTIPLY, scale, w, rows, kept) for scale in w.scales]
        for i, scale in enumerate(w.offset):
            levels.append(_level(decode_cpu.TIMES if i else decode_cpu.FIRST, scale, w, rows, kept))
        levels += [[decode_cpu.ADD, *[0] * 7]] if w.offset else []
        table, described = _table(w), torch.tensor(levels, dtype=torch.int64)
        single = [scale.data for _, scale in kept if row_count(scale.grid(w.shape)) == 1 and scale.data.numel() == 1]
        self._seen = [(data, data.item()) for data in single]
        self.lasting = len(single) == len(kept) and (w.codebook is None or table.numel() == w.codebook.numel())
        self._kept = [*kept, table, described]
        layout = _LAYOUTS.get(w.layout, decode_cpu.BYTES if w.layout == "rows@1" and kind.bits < 8 else decode_cpu.FLAT)
        self._run, self._limit = _kernel(), row_count(w.shape)
        self._described = (
            w.shape[-2] if len(w.shape) > 1 else 1, w.shape[-1], _kind(w.element, w.codebook is not None), kind.bits, layout,
            w.data.data_ptr(), w.data.numel() * w.data.element_size(), table.data_ptr(), described.data_ptr(), len(levels),
            int(positive),
        )  # fmt: skip

    def changed(self) -> bool:
        """Whether a single factor that was decoded ahead is another one now."""
        return any(data.item() != value for data, value in self._seen)

    def into(self, out: Tensor, first: int, ids: Tensor | None) -> bool:
        """`decode_into` of the rows that this was made for."""
        (n, width), size = out.shape, out.element_size()
        values = n * width
        if values == 0:
            return True
        team = threads() if values > _ALONE else 1
        place, id_bytes = (0, 0) if ids is None else (ids.data_ptr(), ids.element_size())
        found: bool = self._run(
            n, max(1, min(_TASK // width, -(-n // (4 * team)))), first, place, id_bytes, self._limit, *self._described,
            out.data_ptr(), out.stride(0) * size, _OUT[out.dtype], int(4 * values > _STREAM), team,
        )  # fmt: skip
        return found


@cache
def _kernel() -> Any:
    return compiled(decode_cpu.decode_rows, (types.int64,) * 22, "")


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


def _level(operation: int, scale: Scale, w: PackedTensor, rows: slice | Tensor, kept: list[tuple[Tensor, Scale]]) -> list[int]:
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
    kept.append((values, scale))
    per_row = 0 if values.numel() == 1 else values.shape[1]
    return [operation, KINDS["float32"], values.data_ptr(), per_row, block, 0, 1, 4]
