"""Calls of the packed kernels: what a weight is to them, and which tiles a call takes (a table, nothing is tuned at run time)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from narrowgate.errors import UnsupportedError
from narrowgate.ops.linear import gpu_few, gpu_few_asm, gpu_packed, gpu_wide
from narrowgate.ops.linear.gpu_place import place
from narrowgate.ops.linear.prepare import PLACED, divides
from narrowgate.ops.linear.reading import read_weight
from narrowgate.packing.operand import DENSE, parse
from narrowgate.packing.planes import PARTS, planes, units
from narrowgate.tile.gpu_launch import launch
from narrowgate.tile.gpu_math import INTERPRETED

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
    zero_index: int | None
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
    if w.element not in PLACED:
        return None, f"the element {w.element}"
    if w.zero_index is not None and (record["zero_points"]["element"], record["zero_points"]["layout"]) != ("uint8", "rows@1"):
        return None, "a zero point that is no byte"
    if not w.layout.startswith("planes") or w.scale_layout not in ("columns@1", ""):
        return None, f"{w.layout} codes and {w.scale_layout or 'no'} scales (ng.prepare gives what the kernels read in place)"
    part = int(w.layout.removeprefix("planes").removesuffix("@1"))
    per_row = w.blocks <= 1
    if not per_row and not divides(w.block, part, w.bits):
        return None, f"scale blocks of {w.block} values in parts of {part}"
    scale = "" if w.scale_index is None else record["scales"][w.scale_index - 1]["element"]
    return Form(
        w.element, w.bits, w.n, w.k, w.matrices, part, w.block, w.blocks, per_row, scale, w.scale_index, w.zero_index, w.outer_index,
        w.outer_rows,
    ), ""  # fmt: skip


@dataclass(frozen=True)
class Tile:
    bn: int = 16
    bm: int = 8
    warps: int = 4
    stages: int = 4
    splits: int = 1
    wide: bool = False  # wide_kernel instead of packed_kernel
    few: bool = False  # few_kernel: bn 16 or 32, bm 8 or 16, stages is its DEPTH


FEW = 32  # rows of x that packed_kernel takes wherever gpu_stream takes more
FEW_EACH = 1  # the same of experts, on average
SOME = 64  # elsewhere: rows of x up to which a weight is read in place; beyond, decoding it once and the vendor's product are faster


def tile(f: Form, m: int, batch_invariant: bool) -> Tile:
    """The configuration of a call, from its shapes alone."""
    if batch_invariant:
        return Tile(32, 16, 4, 2)
    if m <= 16 and takes_few(f):
        return _few(f, m)
    if m <= 8:
        return Tile(32, 8, 2, 3)
    return Tile(32, 16, 4, 2) if m <= 32 else Tile(128, 64, 8, 3, wide=True)


@cache
def _hopper() -> bool:
    """Of the kernels that compile for the card here; without a card for the one that is compiled for."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= 9


def takes_few(f: Form) -> bool:
    """Whether few_kernel reads the weight. The interpreter has no such language: under it packed_kernel does this work."""
    return not INTERPRETED.value and _hopper() and f.zero_index is None and f.scale in gpu_few_asm.SCALES and f.k % 4 == 0


def _few(f: Form, m: int) -> Tile:
    """The configuration of few_kernel: k is split where the rows alone would not fill the device, and long enough."""
    columns, warps = 8 if m <= 8 else 16, 4
    tiles, splits = -(-f.n // 32) * -(-m // columns), 1
    while splits < 4 and tiles * splits < 400 and f.units >= 8 * warps * splits:
        splits *= 2
    deep = (
        m <= 8 and f.bits != 6 and (splits == 1 or f.bits == 8 or f.part == 16)
    )  # more would take too many registers, or too long
    return Tile(32, columns, warps, 2 if deep else 1, splits, few=True)


def grouped_tile(f: Form, tokens: int, batch_invariant: bool) -> Tile:
    """The configuration of a grouped product: by the rows that an expert has on average."""
    rows = tokens / max(f.matrices, 1)
    warps = (
        4 if f.units >= 16 else 2 if f.units >= 8 else 1
    )  # a warp has a few units at least, lest it wait for its first loads
    if batch_invariant or 4 < rows <= 24:
        return Tile(32, 16, warps, 3)
    return Tile(32, 8, warps, 3) if rows <= 4 else Tile(128, 64, 8, 3, wide=True)


def _format(f: Form, dtype: torch.dtype) -> tuple[list[str], dict[str, Any]]:
    """What every kernel is told of the weight's format: the assembly of each part, and constants."""
    parts = PARTS[f.bits]
    asm = [place(f.element, min(p, parts - 1), _KIND[dtype]) for p in range(4)]
    return asm, {
        "ELEMENT": f.element, "BITS": f.bits, "J": f.part, "PARTS": parts, "PLANES": planes(f.bits), "SCALE": f.scale,
        "GROUP": f.group, "PER_ROW": f.per_row, "ZERO": f.zero_index is not None,
        "OUTER": 0 if f.outer_index is None else 2 if f.outer_rows else 1,
        "DTYPE": _TL[dtype], "TAIL": f.k % (parts * f.part) != 0,
    }  # fmt: skip


def _stored(w: list[Tensor], index: int | None) -> Tensor | None:
    return None if index is None else w[index]


def reduce(f: Form, w: list[Tensor], sums: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [M, N] from float32 sums [splits, M, N], added in order, times the outer factor, plus the bias."""
    splits, m, _ = sums.shape
    launch(
        gpu_packed.reduce_kernel, (-(-f.n // 256), m), sums, sums, _stored(w, f.outer_index), bias, out, m, f.n,
        out.stride(0), out.stride(1), SPLITS=splits,
        OUTER=0 if f.outer_index is None else 2 if f.outer_rows else 1, BIAS=bias is not None, BN=256, num_warps=4,
        overlap=True,
    )  # fmt: skip


def unpack(f: Form, w: list[Tensor], dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of the decoded weight [N, K], the bits of `dequantize`."""
    out = torch.empty(stop - start, f.k, dtype=dtype, device=w[0].device)
    asm, form = _format(f, dtype)
    rows = 4096 // f.part
    gpu_packed.unpack_kernel[(f.units, -(-(stop - start) // rows))](
        w[0], _stored(w, f.scale_index), _stored(w, f.zero_index), _stored(w, f.outer_index), out, start, stop,
        f.n, f.k, f.units, f.blocks, out.stride(0), *asm, **form, BN=rows, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


AHEAD = 2 << 20  # bytes of a weight that all programs of few_kernel together ask for ahead; more slows the kernel before


def _soon(f: Form, w: list[Tensor], chosen: Tile, grid: tuple[int, ...]) -> int:
    """Units that a program of few_kernel asks for before it waits: at most one a lane, none that the copy engine could not."""
    if w[0].data_ptr() % 16:
        return 0
    each = chosen.bn * planes(f.bits) * f.part
    return min(32 * chosen.warps, AHEAD // (grid[0] * grid[2] * each))


def _launch_few(
    f: Form,
    w: list[Tensor],
    x: Tensor,
    bias: Tensor | None,
    into: Tensor,
    chosen: Tile,
    plan: Tensor | None,
    grid: tuple[int, ...],
) -> None:
    unit, columns, tiles = f.part * PARTS[f.bits], chosen.bm // 8, chosen.bn // 16
    group = 0 if f.per_row else min(f.group, unit)
    kind = _KIND[x.dtype]
    fold = gpu_few_asm.folds(f.element, f.scale, group, chosen.bn, f.n, kind)
    if fold:
        asm, constraints = gpu_few_asm.folded_asm(f.element, f.bits, f.part, group, columns)
    else:
        asm, constraints = gpu_few_asm.unit_asm(f.element, f.bits, f.part, group, f.scale, columns, kind)
    gpu_few.few_kernel[grid](
        x, w[0], _stored(w, f.scale_index), _stored(w, f.outer_index), bias, into, plan, x.shape[0], f.n, f.k, f.units, f.blocks,
        0 if plan is not None else _soon(f, w, chosen, grid), x.stride(0) // 4,
        into.stride(-2), into.stride(-1), f.units * planes(f.bits) * f.n * f.part, f.blocks * f.n,
        ASM=asm, CONSTRAINTS=constraints, ROW_ASM=gpu_few_asm.row_asm(f.scale) if f.per_row else "", PARTS=PARTS[f.bits],
        PLANES=planes(f.bits), J=f.part, GROUP=group, BLOCK=f.group, OUTER=0 if f.outer_index is None else 2 if f.outer_rows else 1,
        BIAS=bias is not None, COLUMNS=columns, TILES=tiles, WARPS=chosen.warps, SPLITS=grid[2], DEPTH=chosen.stages,
        TAIL=f.k % unit != 0, EVEN=f.n % chosen.bn == 0, GROUPED=plan is not None, FOLD=fold, launch_pdl=True,
        num_warps=chosen.warps, enable_fp_fusion=False,
    )  # fmt: skip


def packed(
    f: Form, w: list[Tensor], x: Tensor, bias: Tensor | None, out: Tensor, chosen: Tile, plan: Tensor | None = None
) -> None:
    """out [M, N] = x [M, K] w^T + bias; with `plan` (tiles of chosen.bm rows) each expert's rows by its own matrix."""
    m, splits = x.shape[0], 1 if plan is not None else chosen.splits
    if chosen.few and (x.data_ptr() % 16 or x.stride(0) % 4):
        x = x.clone(memory_format=torch.contiguous_format)  # few_kernel reads pieces of four; so few rows cost little
    into = out if splits == 1 else torch.empty(splits, m, f.n, dtype=torch.float32, device=x.device)
    tiles_n, tiles_m = -(-f.n // chosen.bn), -(-m // chosen.bm) if plan is None else plan.shape[0]
    if chosen.few:
        _launch_few(f, w, x, bias, into, chosen, plan, (tiles_n, tiles_m, splits))
        if splits > 1:
            reduce(f, w, into, bias, out)
        return
    asm, form = _format(f, x.dtype)
    arguments = (
        x, w[0], _stored(w, f.scale_index), _stored(w, f.zero_index), _stored(w, f.outer_index), bias, into, plan,
        m, f.n, f.k, f.units, f.blocks, x.stride(0), into.stride(-2), into.stride(-1),
        f.units * planes(f.bits) * f.n * f.part, f.blocks * f.n, *asm,
    )  # fmt: skip
    form |= {"BIAS": bias is not None, "BN": chosen.bn, "BM": chosen.bm, "STAGES": chosen.stages, "GROUPED": plan is not None}
    if chosen.wide:
        gpu_wide.wide_kernel[(tiles_m, tiles_n)](*arguments, **form, num_warps=chosen.warps, enable_fp_fusion=True)
        return
    gpu_packed.packed_kernel[(tiles_n, tiles_m, splits)](
        *arguments, **form, WARPS=chosen.warps, SPLITS=splits, num_warps=chosen.warps, enable_fp_fusion=True
    )
    if splits > 1:
        reduce(f, w, into, bias, out)
