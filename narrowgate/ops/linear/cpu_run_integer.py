"""From tensors to the calls of the integer product; the counterpart of cpu_run.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import torch
from numba import types
from torch import Tensor

from narrowgate.ops.linear import cpu_integer
from narrowgate.ops.linear.activations import quantize_input
from narrowgate.ops.linear.cpu_run import Call, slices, whole_tiles
from narrowgate.ops.linear.integer import NAME, integer_table, run_length
from narrowgate.ops.linear.reading import SIGNED8, Weight
from narrowgate.packing import fields_cpu
from narrowgate.simd.cpu_compile import compiled
from narrowgate.simd.cpu_threads import threads
from narrowgate.simd.cpu_values import KINDS

_WORD = types.int64
_NOTHING = torch.zeros(16, dtype=torch.int32)
_ALONE = 1 << 15  # values that one thread quantizes sooner than a second one wakes


@lru_cache(maxsize=64)
def product(kind: int, rows: int, tokens: int) -> Any:
    """The compiled integer product for a kind of field and a tile."""
    literals = tuple(types.literal(n) for n in (kind, rows, tokens))
    what = f"{fields_cpu.NAMES[kind]}, {16 * rows} rows x {tokens}"
    return compiled(cpu_integer.integer_product, literals + (_WORD,) * 23, what)


def tile(rows: int) -> tuple[int, int]:
    return (4, 1) if rows == 1 else (1, 8)


@lru_cache(maxsize=64)
def _octets(values: Tensor, unit: float) -> tuple[Tensor, int]:
    """(64 bytes of biased codes and the unit as float32, the bias). `values` is one object for an element and zero point."""
    bias = max(0, -int(values.min()))
    table = torch.zeros(68, dtype=torch.uint8)
    table[:64] = (values + bias).to(torch.uint8).repeat(64 // len(values))
    table[64:] = torch.tensor([unit]).view(torch.uint8)
    return table, bias


def byte_table(w: Weight, tensors: list[Tensor]) -> tuple[Tensor, int]:
    """What the kernel looks bytes up in, and the bias to take off. Raises UnsupportedError for codes that are no integers."""
    if w.kind == SIGNED8:
        return _octets(_NOTHING, 1.0)[0], 128
    return _octets(*integer_table(w, tensors))


def _given(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes [M, blocks * 32] and float32 scales [M, blocks] by the quantizer itself, which knows what is not finite."""
    packed = quantize_input(x, NAME)
    codes = torch.nn.functional.pad(packed.codes().view(torch.int8), (0, -x.shape[1] % 32)).contiguous()
    return codes, packed.scales[0].values(packed.shape).contiguous()


@dataclass(frozen=True)
class Laid:
    """Where the parts of laid out activations [m, k] lie in one piece of memory, in bytes, after a flag."""

    m: int
    k: int
    tokens: int
    words: int
    scales: int
    corrections: int
    codes: int  # these and their scales are left over from quantizing
    code_scales: int
    size: int
    described: tuple[int, ...]  # m, tokens and what the kernel is told beside them

    @staticmethod
    @lru_cache(maxsize=256)
    def of(w: Weight, m: int, k: int, tokens: int) -> Laid:
        blocks, groups, length = -(-k // 32), -(-m // tokens), run_length(w)
        runs = -(-k // length)
        sizes = (
            w.units * w.values * tokens * groups,
            4 * groups * blocks * tokens,
            4 * groups * runs * tokens,
            m * blocks * 32,
        )
        words, scales, corrections, codes, last, end = accumulate(
            (-(-size // 64) * 64 for size in (*sizes, 4 * m * blocks)), initial=64
        )
        described = (m, tokens, blocks, w.units, w.values, length, runs)
        return Laid(m, k, tokens, words, scales, corrections, codes, last, end, described)


def _lay_out(laid: Laid, x: Tensor, lift: int) -> Tensor:
    """x [M, K] as the kernel reads it, in memory that `laid` describes."""
    x = x if x.dtype == torch.float32 else x.float()
    x = x if x.stride(-1) == 1 else x.contiguous()
    space = x.new_empty(laid.size, dtype=torch.uint8)
    start, team = space.data_ptr(), threads() if laid.m * laid.k > _ALONE else 1
    last = (start, *laid.described, lift, start + laid.words, start + laid.scales, start + laid.corrections, team)
    if _layer()(x.data_ptr(), 4 * x.stride(0), laid.k, start + laid.codes, start + laid.code_scales, *last):
        codes, scales = _given(x)  # the rule for what is not finite is the quantizer's: saturate or refuse
        _layer()(0, 0, laid.k, codes.data_ptr(), scales.data_ptr(), *last)
    return space


@cache
def _layer() -> Any:
    return compiled(cpu_integer.lay_out, (_WORD,) * 18, "")


def integer(w: Weight, tensors: list[Tensor], x: Tensor, bias: Tensor | None, out: Tensor, matrix: int = 0) -> None:
    """out [M, N] = x [M, K] in int8_g32 times w[matrix]^T, + bias, by the contract of integer.py."""
    rows, tokens = tile(x.shape[0])
    table, lift = byte_table(w, tensors)
    laid = Laid.of(w, *x.shape, tokens)
    space = _lay_out(laid, x, lift)
    outer = None if w.outer_index is None else tensors[w.outer_index].view(torch.float32).reshape(-1)
    if outer is not None and w.outer_rows:
        outer = whole_tiles(outer[matrix * w.n : (matrix + 1) * w.n], w)
    bias = None if bias is None else whole_tiles(bias.float(), w)
    for place in slices(w, tensors, matrix):
        n = place.stop - place.start
        product(_kind(w), rows, tokens)(
            _kind(w), rows, tokens, place.codes, place.scales, w.scale_kind, w.scale_bytes, table.data_ptr(),
            *_places(laid, space), *_sizes(w, laid), -(-n // 16), n,
            0 if outer is None else outer.data_ptr() + 4 * place.start * w.outer_rows, int(w.outer_rows),
            0 if bias is None else bias.data_ptr() + 4 * place.start, out.data_ptr() + place.start * out.element_size(),
            out.stride(0) * out.element_size(), KINDS[out.dtype], threads(),
        )  # fmt: skip


def _kind(w: Weight) -> int:
    return fields_cpu.TABLE4 if w.bits == 4 else w.kind  # bytes of any 4-bit table are read alike


def _places(laid: Laid, space: Tensor) -> tuple[int, int, int]:
    start = space.data_ptr()
    return start + laid.words, start + laid.scales, start + laid.corrections


def _sizes(w: Weight, laid: Laid) -> tuple[int, ...]:
    """The kernel's arguments from the number of rows to the number of scale blocks."""
    length, runs = run_length(w), laid.described[-1]
    return laid.m, w.units, length // w.values, runs, w.block // length if w.blocks > 1 else runs, w.blocks


def ready(w: Weight, tensors: list[Tensor], shape: torch.Size, dtype: torch.dtype) -> Call:
    """`integer` for a prepared weight and a contiguous x [..., K] of one shape: call(x, bias) returns y."""
    m, kind, size = shape[:-1].numel(), _kind(w), (*shape[:-1], w.n)
    rows, tokens = tile(m)
    laid, run, (place,) = Laid.of(w, m, w.k, tokens), product(kind, rows, tokens), slices(w, tensors, 0)
    known, fixed = byte_table(w, tensors), w.zero_index is None
    outer = 0 if w.outer_index is None else tensors[w.outer_index].data_ptr()
    before = (kind, rows, tokens, place.codes, place.scales, w.scale_kind, w.scale_bytes)
    after = (*_sizes(w, laid), w.tiles, w.n, outer, int(w.outer_rows))
    stride, out_kind = w.n * dtype.itemsize, KINDS[dtype]

    def call(x: Tensor, bias: Tensor | None) -> Tensor:
        y = x.new_empty(size, dtype=dtype)
        table, lift = known if fixed else byte_table(w, tensors)
        space = _lay_out(laid, x if x.dim() == 2 else x.view(m, w.k), lift)
        bias = None if bias is None else whole_tiles(bias.float(), w)
        run(
            *before, table.data_ptr(), *_places(laid, space), *after, 0 if bias is None else bias.data_ptr(), y.data_ptr(),
            stride, out_kind, threads(),
        )  # fmt: skip
        return y

    return call
