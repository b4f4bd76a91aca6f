"""quantize on the CPU: the reference's frame (checks, outer scale, layouts), with the rows done by the kernel in cpu_blocks.py."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from numba import types
from torch import Tensor

from narrowgate.formats import Scheme, element
from narrowgate.formats.codebooks import thresholds
from narrowgate.ops.quantize import cpu_blocks as kernel
from narrowgate.packing.decode import decode_table
from narrowgate.packing.layout import Layout
from narrowgate.packing.registry import layout as find_layout
from narrowgate.packing.rows import storage_dtype
from narrowgate.quantize.quantize import finite_row_amax, quantize_rows
from narrowgate.quantize.quantize import quantize as by_rule
from narrowgate.simd.cpu_compile import compiled
from narrowgate.simd.cpu_rows import team
from narrowgate.simd.cpu_values import KINDS

_RULES = {"floor": kernel.FLOOR, "even": kernel.FLOOR, "rceil": kernel.RCEIL, "mse": kernel.MSE}
_FAMILIES = {  # method: (family, how)
    "nvfp4": (kernel.NVFP4, kernel.MINIFLOAT), "integer": (kernel.INTEGER, kernel.WHOLE), "table": (kernel.TABLE, kernel.NEAREST),
    "signed_integer": (kernel.SIGNED, kernel.WHOLE), "iq4_nl": (kernel.IQ4_NL, kernel.NEAREST),
    "q8_0": (kernel.Q8_0, kernel.AWAY), "q4_0": (kernel.Q4_0, kernel.SHIFTED),
}  # fmt: skip
_BOTTOM = {"iq4_nl": -127.0, "q8_0": 127.0, "q4_0": -8.0, "table": 1.0}  # what a block's largest value is divided by
_I, _F = types.int64, types.float32


def quantize(
    x: Tensor, scheme: str, *, scale_rule: str | None = None, global_scale: Tensor | None = None, per_row: bool = False,
    layout: str | None = None, out: list[Tensor],
) -> None:  # fmt: skip
    outer = "per_row" if per_row else global_scale
    packed = by_rule(x, scheme, scale_rule=scale_rule, global_scale=outer, layout=layout, rows_by=_rows, amax_by=_row_amax)
    for into, made in zip(out, packed.tensors(), strict=True):
        into.copy_(made)


def _row_amax(rows: Tensor, shape: torch.Size) -> Tensor:
    amax, rows = torch.zeros(rows.shape[0]), rows if rows.stride(-1) == 1 else rows.contiguous()
    if rows.numel():
        step = rows.stride(0) * rows.element_size()
        _amax_kernel()(
            rows.data_ptr(), step, KINDS[rows.dtype], rows.shape[1], rows.shape[0], amax.data_ptr(), team(rows.numel())
        )
    return amax if bool(amax.isfinite().all()) else finite_row_amax(rows, shape)  # which raises, and says where


@cache
def _amax_kernel() -> Any:
    return compiled(kernel.row_amax, (_I,) * 7, "")


@cache
def _kernel() -> Any:
    signature = (_I,) * 9 + (_F,) + (_I,) * 9 + (_F, _F) + (_I,) * 8
    return compiled(kernel.quantize_blocks, signature, "")


def _rows(
    rows: Tensor, shape: tuple[int, ...], record: Scheme, rule: str, outer: Tensor | None, chosen: Layout, policy: str
) -> tuple[Tensor, Tensor]:
    """Codes in the chosen layout, and the innermost scale's codes in their grid's shape."""
    (n, width), kind = rows.shape, record.value_element
    if record.method == "plain" or rows.numel() == 0:  # torch's cast is bfloat16's rounding, at memory speed
        if record.method == "plain" and chosen.name == "rows@1" and rows.numel():
            return rows.to(torch.bfloat16).view(torch.int16).reshape(shape), torch.zeros((*shape[:-1], 1), dtype=torch.uint8)
        return quantize_rows(rows, shape, record, rule, outer, chosen, policy)
    block = record.group_size or width
    scale_bits = element(record.scales[0].element).bits
    scales = torch.empty((n, -(-width // block)), dtype=storage_dtype(scale_bits))
    flat = chosen.name in ("words@1", "fp6_bytes@1") and width * kind.bits % 8 == 0
    working = chosen if flat else find_layout("bytes@1")
    data = torch.zeros(working.storage_shape(shape, kind.bits), dtype=working.storage_dtype(kind.bits))
    bits = kind.bits if flat else 8
    family, how = _FAMILIES.get(record.method, (_RULES.get(rule, 0), kernel.MINIFLOAT))
    low, high = record.code_range or (0, kind.max_code)
    half = int(scale_bits == 32) if family == kernel.INTEGER else 1 << (22 - kind.mantissa_bits) if rule == "even" else 0
    factors, table, flags = torch.ones(1) if outer is None else outer, _table(record, family), torch.zeros(1, dtype=torch.int32)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    threads = team(rows.numel())
    _kernel()(
        n, max(1, min((1 << 16) // width, -(-n // (4 * threads)))), rows.data_ptr(), rows.stride(0) * rows.element_size(),
        KINDS[rows.dtype], width, block, family, how, _bottom(record), kind.emax if kind.kind == "float" else 0, half,
        factors.data_ptr(), int(len(factors) > 1), int(rule == "nearest_nonzero"), kind.mantissa_bits, kind.bias, kind.max_code,
        kind.bits, low, high, table.data_ptr(), data.data_ptr(), width * bits // 8, bits, scales.data_ptr(), scale_bits // 8,
        flags.data_ptr(), threads,
    )  # fmt: skip
    if flags.item():  # a scale that float16 cannot hold: the reference says which
        return quantize_rows(rows, shape, record, rule, outer, chosen, policy)
    if not flat:
        data &= (1 << kind.bits) - 1
    return data if flat or chosen is working else chosen.pack(data, kind.bits), scales.view(*shape[:-1], -1)


def _bottom(record: Scheme) -> float:
    if record.method in ("integer", "signed_integer"):
        assert record.code_range is not None
        return float(record.code_range[record.method == "integer"])
    return _BOTTOM.get(record.method, record.value_element.max)


@cache
def _table(record: Scheme, family: int) -> Tensor:
    """Thresholds of a codebook, values of every code for the least error, or nothing that is read."""
    if record.codebook is not None:
        return thresholds(record.codebook)
    return decode_table(record.value_element.name, torch.device("cpu")) if family == kernel.MSE else torch.zeros(16)
