"""Calls of the packed kernels: what a weight is to them, and which tiles a call takes (a table, nothing is tuned at run time)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from narrowgate.errors import UnsupportedError
from narrowgate.ops.linear import gpu_packed
from narrowgate.ops.linear.gpu_place import place
from narrowgate.ops.linear.prepare import PLACED, divides
from narrowgate.ops.linear.reading import read_weight
from narrowgate.packing.operand import DENSE, parse
from narrowgate.packing.planes import PARTS, planes, units

_KIND = {torch.bfloat16: "bf16", torch.float16: "f16"}
_TL = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Form:
    """A prepared weight [..., N, K] as the packed kernels see it."""

    element: str
    bits: int
    n: int
    k: int
    matrices: int
    part: int  # J
    group: int
    blocks: int
    per_row: bool
    scale: str  # element of the block scales, "" for none
    scale_index: int | None
    outer_index: int | None
    outer_rows: bool

    @property
    def units(self) -> int:
        return units(self.k, self.bits, self.part)


@lru_cache(maxsize=4096)
def form(described: str) -> tuple[Form | None, str]:
    """(the weight in a layout that the kernels read, "") or (None, why not)."""
    if described == DENSE:
        return None, "a dense weight"
    try:
        w = read_weight(described)
    except UnsupportedError as refusal:
        return None, str(refusal)
    record = parse(described)
    if w.zero_index is not None or w.element not in PLACED:
        return None, "zero points" if w.zero_index is not None else f"the element {w.element}"
    if not w.layout.startswith("planes") or w.scale_layout not in ("columns@1", ""):
        return None, f"{w.layout} codes and {w.scale_layout or 'no'} scales (ng.prepare gives what the kernels read in place)"
    part = int(w.layout.removeprefix("planes").removesuffix("@1"))
    per_row = w.blocks <= 1
    if not per_row and not divides(w.block, part, w.bits):
        return None, f"scale blocks of {w.block} values in parts of {part}"
    scale = "" if w.scale_index is None else record["scales"][w.scale_index - 1]["element"]
    return Form(
        w.element, w.bits, w.n, w.k, w.matrices, part, w.block, w.blocks, per_row, scale, w.scale_index, w.outer_index,
        w.outer_rows,
    ), ""  # fmt: skip


@dataclass(frozen=True)
class Tile:
    bn: int = 16
    bm: int = 8
    warps: int = 4
    stages: int = 4
    splits: int = 1


def tile(f: Form, m: int, batch_invariant: bool) -> Tile:
    """The configuration of a call, from its shapes alone."""
    if batch_invariant or m > 32:
        return Tile(32, 16, 4, 3, 1)
    if m <= 8:
        return Tile(16, 8, 4, 4, 1)
    return Tile(32, 16 if m <= 16 else 32, 4, 3, 1)


def grouped_tile(f: Form, tokens: int, batch_invariant: bool) -> Tile:
    """The configuration of a grouped product: by the rows that an expert has on average."""
    rows = tokens / max(f.matrices, 1)
    if batch_invariant or 4 < rows <= 24:
        return Tile(32, 16, 4, 3, 1)
    return Tile(32, 8, 4, 4, 1) if rows <= 4 else Tile(64, 32, 4, 3, 1)


def sums(f: Form, dtype: torch.dtype) -> bool:
    """Whether a product of many rows scales its partial sums: else the scale is exact in x's dtype, and the weight takes it."""
    exact = {"float8_e4m3fn", "bfloat16" if dtype == torch.bfloat16 else "float16"}
    return f.scale not in (exact | {"float8_e8m0fnu"} if dtype == torch.bfloat16 else exact)


def wide(f: Form, w: list[Tensor], x: Tensor, bias: Tensor | None, out: Tensor, chosen: Tile) -> None:
    """out [M, N] = x [M, K] w^T + bias, for many rows."""
    m = x.shape[0]
    outer = None if f.outer_index is None else w[f.outer_index]
    parts = PARTS[f.bits]
    asm = [place(f.element, min(p, parts - 1), _KIND[x.dtype]) for p in range(4)]
    gpu_packed.wide_kernel[(-(-m // chosen.bm), -(-f.n // chosen.bn))](
        x, w[0], None if f.scale_index is None else w[f.scale_index], outer, bias, out, m, f.n, f.k, f.units, f.blocks,
        x.stride(0), out.stride(0), out.stride(1), *asm, ELEMENT=f.element, BITS=f.bits, J=f.part, PARTS=parts,
        PLANES=planes(f.bits), SCALE=f.scale, GROUP=f.group, PER_ROW=f.per_row,
        OUTER=0 if outer is None else 2 if f.outer_rows else 1, BIAS=bias is not None, DTYPE=_TL[x.dtype],
        BN=chosen.bn, BM=chosen.bm, SUMS=sums(f, x.dtype), STAGES=chosen.stages, TAIL=f.k % (parts * f.part) != 0,
        num_warps=chosen.warps, enable_fp_fusion=True,
    )  # fmt: skip


def packed(
    f: Form, w: list[Tensor], x: Tensor, bias: Tensor | None, out: Tensor, chosen: Tile, plan: Tensor | None = None
) -> None:
    """out [M, N] = x [M, K] w^T + bias; with `plan` (tiles of chosen.bm rows) each expert's rows by its own matrix."""
    m, splits = x.shape[0], 1 if plan is not None else chosen.splits
    into = out if splits == 1 else torch.empty(splits, m, f.n, dtype=torch.float32, device=x.device)
    outer = None if f.outer_index is None else w[f.outer_index]
    which = 0 if outer is None else 2 if f.outer_rows else 1
    parts, count = PARTS[f.bits], planes(f.bits)
    tiles = -(-m // chosen.bm) if plan is None else plan.shape[0]
    asm = [place(f.element, min(p, parts - 1), _KIND[x.dtype]) for p in range(4)]
    gpu_packed.packed_kernel[(-(-f.n // chosen.bn), tiles, splits)](
        x, w[0], None if f.scale_index is None else w[f.scale_index], outer, bias, into, plan, m, f.n, f.k, f.units, f.blocks,
        x.stride(0), into.stride(-2), into.stride(-1), f.units * count * f.n * f.part, f.blocks * f.n,
        *asm, ELEMENT=f.element, BITS=f.bits, J=f.part, PARTS=parts, PLANES=count, SCALE=f.scale,
        GROUP=f.group, PER_ROW=f.per_row, OUTER=which, BIAS=bias is not None, DTYPE=_TL[x.dtype],
        BN=chosen.bn, BM=chosen.bm, WARPS=chosen.warps, SPLITS=splits, STAGES=chosen.stages,
        TAIL=f.k % (parts * f.part) != 0, GROUPED=plan is not None, num_warps=chosen.warps, enable_fp_fusion=True,
    )  # fmt: skip
    if splits > 1:
        gpu_packed.reduce_kernel[(-(-f.n // 256), m)](
            into, outer, bias, out, m, f.n, out.stride(0), out.stride(1), SPLITS=splits, OUTER=which, BIAS=bias is not None,
            BN=256, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
