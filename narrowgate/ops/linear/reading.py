"""What the CPU kernels must know of a packed weight, read once from its description: field kind, scales, layout, or why not.

Descriptions are strings, so the reading is cached by them and a call pays a dictionary look-up. The kernels take one block
scale a row and block of columns, one outer factor (for all, or a row each), one zero point for all, a codebook of up to 16
entries. Everything else (offsets, blocks over several rows, wide indices, several inner levels) keeps the plain route, and
the plan says for which reason."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from narrowgate.errors import UnsupportedError
from narrowgate.formats import element
from narrowgate.packing.operand import DENSE, parse

# The kinds of field, in the numbering of packing/fields_cpu.py (which may not be imported here: it needs Numba).
TABLE4, TABLE2, TABLE6, SIGNED8, UNSIGNED8, E4M3, E5M2, BFLOAT16, FLOAT16, FLOAT32, PAIR4 = range(11)
_KINDS = {
    "int8": SIGNED8, "uint8": UNSIGNED8, "float8_e4m3fn": E4M3, "float8_e5m2": E5M2, "bfloat16": BFLOAT16,
    "float16": FLOAT16, "float32": FLOAT32, "float6_e2m3fn": TABLE6, "float6_e3m2fn": TABLE6,
}  # fmt: skip
_SCALES = {"bfloat16": (1, 2), "float16": (2, 2), "float32": (3, 4), "float8_e8m0fnu": (4, 1), "float8_e4m3fn": (5, 1)}
CODES, UNITS = "lanes16@1", "lanes16_units@1"
FLAT = ("words@1", "fp6_bytes@1", "rows@1", "bytes@1")  # rows@1 of 2 to 6 bits is one code a byte, and not flat


@dataclass(frozen=True)
class Weight:
    """A weight [..., N, K] as the kernels see it."""

    element: str
    layout: str
    n: int
    k: int
    matrices: int
    kind: int
    bits: int
    values: int  # in a unit
    words: int  # in a unit
    block: int  # values of a row that share a scale, a multiple of `values` or the whole row
    blocks: int
    scale_kind: int  # number of simd/cpu_scales.py; 0: no block scale
    scale_bytes: int
    scale_index: int | None  # which stored tensor holds the block scales
    scale_layout: str
    outer_index: int | None
    outer_rows: bool  # one outer factor a row
    zero_index: int | None
    table_index: int | None  # the codebook

    @property
    def units(self) -> int:
        return -(-self.k // self.values)

    @property
    def tiles(self) -> int:
        return -(-self.n // 16)

    @property
    def prepared(self) -> bool:
        return self.layout == CODES and self.scale_layout in (UNITS, "")

    @property
    def plain(self) -> bool:
        """Whether rows of codes and scales are runs of bits that the kernels can turn into lanes themselves."""
        runs = self.layout in FLAT and (self.layout in ("words@1", "fp6_bytes@1") or self.bits >= 8)
        return runs and self.scale_layout in ("rows@1", "")


@lru_cache(maxsize=4096)
def read_weight(described: str) -> Weight:
    """The reading of a packed operand's description. Raises UnsupportedError with the reason where kernels do not apply."""
    record = parse(described)
    shape, kind = record["shape"], element(record["element"])
    if len(shape) < 2:
        raise UnsupportedError(f"a weight of {len(shape)} axis")
    if record["offset"]:
        raise UnsupportedError("an offset")
    number = _kind(kind.name, kind.bits)
    values, words = (16, 3) if kind.bits == 6 else (32 // kind.bits, 1)
    k = shape[-1]
    zero = None
    if record["zero_points"] is not None:
        zero = 1 + len(record["scales"])
        if prod(_grid(shape, record["zero_points"]["block"])) != 1 or number not in (TABLE4, PAIR4, TABLE2, UNSIGNED8):
            raise UnsupportedError("zero points by block, or on an element that reads no table")
        if record["zero_points"]["element"] not in ("uint2", "uint4", "uint8"):
            raise UnsupportedError(f"a zero point in {record['zero_points']['element']}")
    inner, outer = _levels(record["scales"], shape)
    block, blocks, scale, layout = max(k, 1), 1, (0, 0), ""
    if inner is not None:
        fields = record["scales"][inner]
        block, layout = min(fields["block"][-1], max(k, 1)), fields["layout"]
        blocks, scale = -(-k // block), _SCALES[fields["element"]]
        if block < k and block % values:
            raise UnsupportedError(f"scale blocks of {block} values, no multiple of {values}")
    table = 1 + len(record["scales"]) + (zero is not None) if record["codebook"] else None
    return Weight(
        kind.name, record["layout"], shape[-2], k, prod(shape[:-2]), number, kind.bits, values, words, block, blocks,
        *scale, None if inner is None else 1 + inner, layout, None if outer is None else 1 + outer,
        outer is not None and prod(_grid(shape, record["scales"][outer]["block"])) > 1, zero, table,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def reading(described: str) -> tuple[Weight | None, str]:
    """(what the kernels read, "") or (None, the reason why they do not)."""
    try:
        return (None, "a dense weight") if described == DENSE else (read_weight(described), "")
    except UnsupportedError as refusal:
        return None, str(refusal)


def _kind(name: str, bits: int) -> int:
    if name in _KINDS:
        return _KINDS[name]
    if bits == 4:
        return TABLE4 if name == "index4" else PAIR4  # every value less a zero point of 8 bits is a bfloat16
    if bits == 2:
        return TABLE2
    raise UnsupportedError(f"the element {name}")


def _grid(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-extent // b) for extent, b in zip(shape, block, strict=True))


def _levels(scales: tuple[dict[str, Any], ...], shape: tuple[int, ...]) -> tuple[int | None, int | None]:
    """(the level of block scales, the level of the outer factor), either may be missing."""
    if len(scales) > 2:
        raise UnsupportedError(f"{len(scales)} levels of scales")
    inner = outer = None
    for level, fields in enumerate(scales):
        name, block, layout = fields["element"], fields["block"], fields["layout"]
        grid = _grid(shape, block)
        outermost = level == len(scales) - 1
        if outermost and name == "float32" and layout == "rows@1" and grid[-1] <= 1 and prod(grid) in (1, prod(shape[:-1])):
            outer = level
            continue
        if level or grid[:-1] != shape[:-1]:
            raise UnsupportedError(f"scales in blocks of {list(block)}")
        if name not in _SCALES:
            raise UnsupportedError(f"{name} scales")
        inner = level
    return inner, outer


@lru_cache(maxsize=256)
def _table(name: str, zero: float) -> Tensor:
    """float32 [32]: the values of an element of up to four bits less the zero point, repeated; magnitudes of a 6-bit one."""
    kind = element(name)
    if name == "uint8":
        return torch.full((32,), zero)
    codes = torch.arange(32) % 2 ** min(kind.bits, 5)
    return kind.decode(codes) - zero if kind.bits <= 6 else torch.zeros(32)


def tables(w: Weight, tensors: list[Tensor]) -> Tensor:
    """float32 [>= 16, or 32 for 6-bit floats]: what the kernel looks codes up in."""
    if w.table_index is not None:
        book = tensors[w.table_index].view(torch.float32)
        return book if w.bits == 4 and w.zero_index is None else (book - _zero(w, tensors)).repeat(16 // 2**w.bits)
    return _table(w.element, _zero(w, tensors))


def _zero(w: Weight, tensors: list[Tensor]) -> float:
    if w.zero_index is None:
        return 0.0
    return float(tensors[w.zero_index].item())
