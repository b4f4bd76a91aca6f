"""From tensors to the calls of the integer product; the counterpart of cpu_run.py."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from numba import types
from torch import Tensor

from narrowgate.ops.linear import cpu_integer
from narrowgate.ops.linear.activations import quantize_input
from narrowgate.ops.linear.cpu_run import OUT_KINDS, slices, whole_tiles
from narrowgate.ops.linear.integer import NAME, integer_table, run_length
from narrowgate.ops.linear.reading import SIGNED8, Weight
from narrowgate.packing import fields_cpu
from narrowgate.simd.cpu_compile import compiled
from narrowgate.simd.cpu_threads import threads

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


def _lay_out(w: Weight, x: Tensor, tokens: int, runs: int, lift: int) -> tuple[Tensor, Tensor, Tensor]:
    """(words, scales, corrections) of x [M, K] as the kernel reads them."""
    (m, k), length = x.shape, run_length(w)
    blocks, groups = -(-k // 32), -(-m // tokens)
    x = x.float()
    x = x if x.stride(1) == 1 else x.contiguous()
    codes, scales = torch.empty(m, blocks * 32, dtype=torch.int8), torch.empty(m, blocks)
    words = torch.empty(groups, w.units * w.values // 4, tokens, dtype=torch.int32)
    arranged, corrections = torch.empty(groups, blocks, tokens), torch.empty(groups, runs, tokens, dtype=torch.int32)
    astray = torch.zeros(1, dtype=torch.int32)
    run, team = _layer(), threads() if m * k > _ALONE else 1

    def call(address: int) -> None:
        run(
            address, 4 * x.stride(0), k, codes.data_ptr(), scales.data_ptr(), astray.data_ptr(), m, tokens, blocks, w.units,
            w.values, length, runs, lift, words.data_ptr(), arranged.data_ptr(), corrections.data_ptr(), team,
        )  # fmt: skip

    call(x.data_ptr())
    if astray.item():  # the rule for what is not finite is the quantizer's: saturate or refuse
        codes, scales = _given(x)
        call(0)
    return words, arranged, corrections


@cache
def _layer() -> Any:
    return compiled(cpu_integer.lay_out, (_WORD,) * 18, "")


def integer(w: Weight, tensors: list[Tensor], x: Tensor, bias: Tensor | None, out: Tensor, matrix: int = 0) -> None:
    """out [M, N] = x [M, K] in int8_g32 times w[matrix]^T, + bias, by the contract of integer.py."""
    m, (rows, tokens) = x.shape[0], tile(x.shape[0])
    table, lift = byte_table(w, tensors)
    length = run_length(w)
    runs = -(-w.k // length)
    words, arranged, corrections = _lay_out(w, x, tokens, runs, lift)
    outer = None if w.outer_index is None else tensors[w.outer_index].view(torch.float32).reshape(-1)
    if outer is not None and w.outer_rows:
        outer = whole_tiles(outer[matrix * w.n : (matrix + 1) * w.n], w)
    bias = None if bias is None else whole_tiles(bias.float(), w)
    block_runs = w.block // length if w.blocks > 1 else runs
    kind = fields_cpu.TABLE4 if w.bits == 4 else w.kind  # bytes of any 4-bit table are read alike
    for place in slices(w, tensors, matrix):
        n = place.stop - place.start
        product(kind, rows, tokens)(
            kind, rows, tokens, place.codes, place.scales, w.scale_kind, w.scale_bytes, table.data_ptr(), words.data_ptr(),
            arranged.data_ptr(), corrections.data_ptr(), m, w.units, length // w.values, runs, block_runs, w.blocks,
            -(-n // 16), n, 0 if outer is None else outer.data_ptr() + 4 * place.start * w.outer_rows, int(w.outer_rows),
            0 if bias is None else bias.data_ptr() + 4 * place.start, out.data_ptr() + place.start * out.element_size(),
            out.stride(0) * out.element_size(), OUT_KINDS[out.dtype], threads(),
        )  # fmt: skip
