"""Reads of a packed operand inside a Triton kernel: codes, zero point, scales and offset, one float32 rounding each.

The definition is narrowgate.packing.read; the operand is what `arg` (gpu_arg.py) makes of a PackedTensor. Products and sums go
through mul.rn and add.rn, so that no launch option can fuse them."""

# mypy: allow-untyped-defs
import triton
import triton.language as tl

from narrowgate.tile import gpu_decode, gpu_fields, gpu_math


@triton.jit
def _axis(term, row):
    """The part of a scale's row that one group of leading axes gives (gpu_arg.Term)."""
    if term.stride > 1:
        row = row // term.stride
    if term.extent > 0:
        row = row % term.extent
    if term.block > 1:
        row = row // term.block
    return row * term.cells


@triton.jit
def factor(s, row, col, mask):
    """float32 value of a Scale for the values at (row, col), which broadcast together."""
    if s.num_terms == 0 and s.cols == 1:  # one factor for the whole tensor
        return gpu_decode.decode(gpu_fields.field(s.data, 0, 0, s.layout, s.bits, s.rows, s.cols, None), s.element)
    else:
        cell = row * 0
        for i in tl.static_range(s.num_terms):
            cell += _axis(s.terms[i], row)
        block = col // s.block if s.cols > 1 else col * 0
        code = gpu_fields.field(s.data, cell, block, s.layout, s.bits, s.rows, s.cols, mask)
        return gpu_decode.decode(code, s.element)


@triton.jit
def _spread(s, row, col, mask, LINE: tl.constexpr):
    """`factor` with an axis for the values of a line."""
    f = factor(s, row, col, mask)
    if s.num_terms == 0 and s.cols == 1:
        return f
    else:
        return tl.expand_dims(f, -1)


@triton.jit
def lines(w, row, col, mask, LINE: tl.constexpr):
    """float32 [..., LINE]: the lines of LINE values that begin at (row, col), both [...], row int64; `mask` of whole lines.

    Values outside the mask, or beyond the end of a row, have no meaning."""
    codes = gpu_fields.line(w.data, row, col, LINE, w.layout, w.bits, w.rows_of_matrix, w.cols, w.aligned, mask)
    if w.codebook is not None:  # noqa: SIM108
        values = gpu_decode.look_up(w.codebook, codes)
    else:
        values = gpu_decode.decode(codes, w.element, w.native)
    if w.num_zero_points > 0:
        values = gpu_math.sub_rn(values, _spread(w.zero_points[0], row, col, mask, LINE) + tl.zeros_like(values))
    for i in tl.static_range(w.num_scales):
        values = gpu_math.mul_rn(values, _spread(w.scales[i], row, col, mask, LINE) + tl.zeros_like(values))
    if w.num_offsets > 0:
        added = _spread(w.offset[0], row, col, mask, LINE) + tl.zeros_like(values)
        for i in tl.static_range(1, w.num_offsets):
            added = gpu_math.mul_rn(added, _spread(w.offset[i], row, col, mask, LINE) + tl.zeros_like(values))
        values = gpu_math.add_rn(values, added)
    if w.stage == "float16":
        values = gpu_math.through(values, tl.float16)
    elif w.stage == "bfloat16":
        values = gpu_math.through(values, tl.bfloat16)
    return values


@triton.jit
def _read(w, rows, cols, CHECKED: tl.constexpr, LINE: tl.constexpr):
    row = tl.expand_dims(rows, 1).to(tl.int64) + tl.expand_dims(cols, 0).to(tl.int64) * 0
    col = tl.expand_dims(rows, 1) * 0 + tl.expand_dims(cols, 0)
    if CHECKED:
        mask = (row >= 0) & (row < w.rows) & (col >= 0) & (col < w.cols)
        values = lines(w, tl.where(mask, row, 0), tl.where(mask, col, 0), mask, LINE)
        inside = tl.expand_dims(mask, -1) & (tl.expand_dims(col, -1) + tl.arange(0, LINE) < w.cols)
        return tl.where(inside, values, 0.0)
    else:
        return lines(w, row, col, row >= 0, LINE)


@triton.jit
def read(w, rows, cols):
    """float32 [R, C, width] (or [R, C] for an operand made without a width): the lines that begin at rows [R], columns [C].

    Each column is a multiple of the width. What lies outside the tensor, before or behind it, reads as 0."""
    if w.width == 0:
        return tl.reshape(_read(w, rows, cols, True, 1), [rows.shape[0], cols.shape[0]])
    else:
        return _read(w, rows, cols, True, w.width)


@triton.jit
def read_unchecked(w, rows, cols):
    """`read` for a caller whose lines all lie inside the tensor: the same values, and no masks."""
    if w.width == 0:
        return tl.reshape(_read(w, rows, cols, False, 1), [rows.shape[0], cols.shape[0]])
    else:
        return _read(w, rows, cols, False, w.width)


@triton.jit
def read_block(w, row0, col0, ROWS: tl.constexpr, COLS: tl.constexpr):
    """float32 [ROWS, COLS]: the tile whose first value is at (row0, col0), read by whole words; 0 outside the tensor.

    col0 and COLS are multiples of the operand's line: its width, or where none was named the most values that share a word and
    every scale (`arg(...).line`)."""
    tl.static_assert(COLS // w.line * w.line == COLS, "read_block: COLS must be a multiple of the operand's line")
    rows = row0 + tl.arange(0, ROWS)
    cols = col0 + tl.arange(0, COLS // w.line) * w.line
    return tl.reshape(_read(w, rows, cols, True, w.line), [ROWS, COLS])
