"""Rows of a packed operand, decoded into a dense tensor: the kernel of dequantize (all rows) and of embedding (rows by id).

A program decodes a tile of rows by lines; a line is what one word holds, so that it is read once, and a scale is read once a
line. Bound by memory: the configuration only has to keep enough bytes in flight."""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgate.tile import gpu_math, gpu_read

TILE = 2048  # values of a program
WARPS = 4  # 2 for 6-bit codes, whose words three threads would otherwise share


@triton.jit
def _rows_kernel(w, ids, out, count, pitch, col_tiles, ROWS: tl.constexpr, LINES: tl.constexpr, GATHERED: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    place = (program // col_tiles) * ROWS + tl.arange(0, ROWS)
    counted = place < count
    row = tl.load(ids + place, mask=counted, other=-1).to(tl.int64) if GATHERED else place
    col = (program % col_tiles).to(tl.int32) * (LINES * w.line) + tl.arange(0, LINES) * w.line
    rows = row[:, None] + col[None, :] * 0
    cols = (row[:, None] * 0).to(tl.int32) + col[None, :]
    mask = (rows >= 0) & (rows < w.rows) & (cols < w.cols)
    values = gpu_read.lines(w, tl.where(mask, rows, 0), tl.where(mask, cols, 0), mask, w.line)
    if GATHERED:  # an id that is no row gives zeros, and -0.0 becomes +0.0
        values = gpu_math.add_rn(tl.where(mask[:, :, None], values, 0.0), 0.0)
    at = cols[:, :, None] + tl.arange(0, w.line)
    target = out + (place[:, None] * pitch)[:, :, None] + at
    kept = (counted[:, None] & (cols < w.cols))[:, :, None] & (at < w.cols)
    tl.store(target, gpu_math.round_to(values, out.dtype.element_ty), mask=kept)


def decode_rows(w: Any, out: Tensor, ids: Tensor | None = None, *, tile: int = TILE, warps: int | None = None) -> None:
    """out[i] = row ids[i] of the operand (gpu_arg.Operand), or row i where there are no ids; out [..., K] any strides of rows."""
    width = out.shape[-1]
    if out.numel() == 0:
        return
    flat = _as_rows(out)
    if flat is None:
        made = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        decode_rows(w, made, ids, tile=tile, warps=warps)
        out.copy_(made)
        return
    count, line = flat.shape[0], w.line.value
    warps = warps or (2 if w.bits.value == 6 else WARPS)
    lines = _tile_lines(-(-width // line), tile // line)
    rows = min(max(tile // (lines * line), 1), triton.next_power_of_2(count))
    col_tiles = triton.cdiv(width, lines * line)
    grid = (triton.cdiv(count, rows) * col_tiles,)
    given = flat if ids is None else ids
    _rows_kernel[grid](
        w, given, flat, count, flat.stride(0), col_tiles, ROWS=rows, LINES=lines, GATHERED=ids is not None,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def _as_rows(out: Tensor) -> Tensor | None:
    """[rows, K] over the same memory, or None where the leading axes have no common stride."""
    try:
        return out.view(-1, out.shape[-1])
    except RuntimeError:
        return None


def _tile_lines(lines: int, most: int) -> int:
    """A power of two of lines a program: the largest that wastes least in a row's last tile, within a factor of 8 of `most`."""
    top = min(triton.next_power_of_2(lines), most)
    candidates = [top >> i for i in range(4) if top >> i]
    return min(candidates, key=lambda n: (-(-lines // n) * n / lines > 1.15, -n))
