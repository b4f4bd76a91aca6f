"""From tensors to kernel calls: stage the activations, choose the tile, hand addresses over. Everything has been checked.

A weight in `lanes16@1` is read in place; any other is turned into lanes a slice of rows at a time, in a workspace, and meets
the same kernel: the same bits, more work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from numba import types
from torch import Tensor

from narrowgate.ops.linear import cpu_exact, cpu_ordered, cpu_stage
from narrowgate.ops.linear.reading import Weight, tables
from narrowgate.packing import fields_cpu, lanes_cpu
from narrowgate.simd.cpu_compile import compiled
from narrowgate.simd.cpu_features import FEATURES
from narrowgate.simd.cpu_threads import threads
from narrowgate.simd.cpu_values import KINDS

SLICE = 8 << 20  # bytes of a canonical weight turned into lanes at a time
_WORD = types.int64
_ALONE = 1 << 15  # values that one thread lays out sooner than a second one wakes

Call = Callable[[Tensor, Tensor | None], Tensor]


@lru_cache(maxsize=64)
def product(kind: int, rows: int, tokens: int) -> Any:
    """The compiled exact product for a kind of field and a tile."""
    literals = tuple(types.literal(n) for n in (kind, rows, tokens))
    what = f"{fields_cpu.NAMES[kind]}, {16 * rows} rows x {tokens}"
    return compiled(cpu_exact.exact_product, literals + (_WORD,) * 20, what)


def tile(rows: int, kind: int) -> tuple[int, int]:
    """(vectors of output rows, tokens) of the kernel for a number of activation rows; the sums are the same for all."""
    if not FEATURES.avx512:  # half as many registers of half the width
        return (2, 1) if rows == 1 else (1, 4)
    if rows == 1:
        return (3 if kind == fields_cpu.TABLE6 else 4, 1)  # 6-bit floats keep eight looked-up pairs a vector in registers
    return (2, 4) if rows <= 4 else (1, 8)


def stage(x: Tensor, width: int, tokens: int) -> Tensor:
    """x [M, K] as float32 [ceil(M / tokens), width, tokens], the missing values zero; x itself where it is that."""
    m, k = x.shape
    if tokens == 1 and k == width and x.dtype == torch.float32 and x.is_contiguous():
        return x
    if x.stride(1) != 1 and k > 1:
        x = x.contiguous()
    staged = x.new_empty((-(-m // tokens), width, tokens), dtype=torch.float32)
    team = threads() if m * width > _ALONE else 1
    _stage()(
        x.data_ptr(), KINDS[x.dtype], x.stride(0) * x.element_size(), m, k, width, tokens, staged.data_ptr(), team
    )  # fmt: skip
    return staged


@cache
def _stage() -> Any:
    return compiled(cpu_stage.stage, (_WORD,) * 9, "")


def into_lanes(w: Weight, tensors: list[Tensor], matrix: int, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
    """Codes and scales of rows [start, stop) of one matrix of a weight in canonical storage, in lanes."""
    word, rows, count = _WORD, stop - start, w.units * w.words
    data = tensors[0]
    first = (matrix * w.n + start) * w.k * w.bits
    lanes = torch.empty((-(-rows // 16), count, 16), dtype=torch.int32)
    run = compiled(lanes_cpu.to_lanes, (word,) * 8, "")
    size = data.numel() * data.element_size()
    run(data.data_ptr(), size, first, w.k * w.bits, rows, count, lanes.data_ptr(), threads())
    if w.scale_index is None:
        return lanes, None
    scales = tensors[w.scale_index]
    units = torch.empty((-(-rows // 16), w.blocks, 16), dtype=scales.dtype)
    run = compiled(lanes_cpu.units_to_lanes, (word,) * 6, "")
    source = scales.data_ptr() + (matrix * w.n + start) * w.blocks * w.scale_bytes
    run(source, w.blocks, w.scale_bytes, rows, units.data_ptr(), threads())
    return lanes, units


def exact(w: Weight, tensors: list[Tensor], x: Tensor, bias: Tensor | None, out: Tensor, matrix: int = 0) -> None:
    """out [M, N] = x [M, K] w[matrix]^T + bias; out has contiguous rows and one of the three float dtypes."""
    m = x.shape[0]
    rows, tokens = tile(m, w.kind)
    staged = stage(x, w.units * w.values, tokens)
    bias = None if bias is None else whole_tiles(bias.float(), w)
    outer = None if w.outer_index is None else tensors[w.outer_index].view(torch.float32).reshape(-1)
    if outer is not None and w.outer_rows:
        outer = whole_tiles(outer[matrix * w.n : (matrix + 1) * w.n], w)
    for place in slices(w, tensors, matrix):
        _call(w, tensors, place, staged, m, (rows, tokens), bias, outer, out)


def ready(w: Weight, tensors: list[Tensor], shape: torch.Size, dtype: torch.dtype) -> Call:
    """`exact` for a prepared weight and a contiguous x [..., K] of one shape: call(x, bias) returns y."""
    m, width = shape[:-1].numel(), w.units * w.values
    rows, tokens = tile(m, w.kind)
    run, (place,), fixed = product(w.kind, rows, tokens), slices(w, tensors, 0), w.table_index is None and w.zero_index is None
    outer = 0 if w.outer_index is None else tensors[w.outer_index].data_ptr()
    before = (w.kind, rows, tokens, place.codes, place.scales, w.scale_kind, w.scale_bytes)
    after = (m, w.units, w.block // w.values if w.blocks > 1 else w.units, w.blocks, w.tiles, w.n, outer, int(w.outer_rows))
    known, high, size = tables(w, tensors), 64 * (w.bits == 6), (*shape[:-1], w.n)
    stride, kind = w.n * dtype.itemsize, KINDS[dtype]

    def call(x: Tensor, bias: Tensor | None) -> Tensor:
        y = x.new_empty(size, dtype=dtype)
        staged = stage(x if x.dim() == 2 else x.view(m, w.k), width, tokens)
        low = (known if fixed else tables(w, tensors)).data_ptr()
        bias = None if bias is None else whole_tiles(bias.float(), w)
        run(
            *before, low, low + high, staged.data_ptr(), *after, 0 if bias is None else bias.data_ptr(), y.data_ptr(), stride, kind,
            threads(),
        )  # fmt: skip
        return y

    return call


@dataclass
class Place:
    """Rows [start, stop) of a weight in lanes: addresses, and the tensors that keep them alive."""

    start: int
    stop: int
    codes: int
    scales: int
    kept: tuple[Tensor | None, ...] = ()


def slices(w: Weight, tensors: list[Tensor], matrix: int) -> Iterator[Place]:
    """A prepared matrix as a whole, in place; any other a slice of rows at a time, turned into lanes."""
    if w.prepared:
        codes = tensors[0].data_ptr() + matrix * w.tiles * w.units * w.words * 64
        step = matrix * w.tiles * w.blocks * 16 * w.scale_bytes
        yield Place(0, w.n, codes, 0 if w.scale_index is None else tensors[w.scale_index].data_ptr() + step)
        return
    step = max(SLICE // max(w.units * w.words * 4, 1) // 64, 1) * 64
    for start in range(0, w.n, step):
        stop = min(start + step, w.n)
        lanes, units = into_lanes(w, tensors, matrix, start, stop)
        yield Place(start, stop, lanes.data_ptr(), 0 if units is None else units.data_ptr(), (lanes, units))


def whole_tiles(values: Tensor, w: Weight) -> Tensor:
    """float32 [N] with room for a whole last vector."""
    return values.contiguous() if w.n % 16 == 0 else torch.nn.functional.pad(values, (0, -w.n % 16))


def _call(
    w: Weight, tensors: list[Tensor], place: Place, staged: Tensor, m: int, shape: tuple[int, int],
    bias: Tensor | None, outer: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    table, n = tables(w, tensors), place.stop - place.start
    low = table.data_ptr()
    product(w.kind, *shape)(
        w.kind, *shape, place.codes, place.scales, w.scale_kind, w.scale_bytes, low, low + 64 * (w.bits == 6),
        staged.data_ptr(), m, w.units, w.block // w.values if w.blocks > 1 else w.units, w.blocks, -(-n // 16), n,
        0 if outer is None else outer.data_ptr() + 4 * place.start * w.outer_rows, int(w.outer_rows),
        0 if bias is None else bias.data_ptr() + 4 * place.start, out.data_ptr() + place.start * out.element_size(),
        out.stride(0) * out.element_size(), KINDS[out.dtype], threads(),
    )  # fmt: skip


def add_in_order(a: Tensor, b: Tensor, total: Tensor) -> None:
    """total [M, N] += a [M, K] b [K, N], float32, rounding each product and each sum, k ascending."""
    if 0 in (*a.shape, *total.shape):
        return
    a, b = a if a.stride(1) == 1 else a.contiguous(), b.contiguous()
    run = compiled(cpu_ordered.ordered_product, (_WORD,) * 10, "")
    run(
        a.data_ptr(), 4 * a.stride(0), a.shape[0], a.shape[1], b.data_ptr(), 4 * b.stride(0), b.shape[1],
        total.data_ptr(), 4 * total.stride(0), threads(),
    )  # fmt: skip
