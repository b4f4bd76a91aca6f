"""Calls of gpu_stream: which products it takes, and with which tiles (a table, nothing is tuned at run time)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from narrowgate.errors import UnsupportedError
from narrowgate.ops.linear import gpu_run
from narrowgate.ops.linear.gpu_place import place_pairs
from narrowgate.ops.linear.gpu_run import Form
from narrowgate.ops.linear.gpu_stream import Steps, stream_kernel
from narrowgate.packing.planes import PARTS, planes
from narrowgate.tile.gpu_math import INTERPRETED

_SCALES = {"bfloat16": 8, "float8_e4m3fn": 4, "float8_e8m0fnu": 1}  # exact in bfloat16: significant bits
_CODES = {
    "int2": 1,
    "int4": 3,
    "float4_e2m1fn": 2,
    "float6_e2m3fn": 4,
    "float6_e3m2fn": 3,
}  # of values; others may need them all


_MANY = 1024  # rows of x up to which this is faster than decoding the weight once for the vendor's product
_FEWER = 512  # the same of weights of few rows, whose tiles would not fill the device


@dataclass(frozen=True)
class Tile:
    bn: int = 128
    bm: int = 64
    stages: int = 4
    k: int = 128  # of a step, at most
    splits: int = 1


def why_not(f: Form, x: Tensor, dtype: torch.dtype, as_given: bool) -> str:
    """Why a product does not go this way, or "". x: what the call was given, which is multiplied in `dtype`, `as_given` or a copy."""
    if INTERPRETED or not x.is_cuda or torch.cuda.get_device_capability(x.device) != (9, 0):
        return "no Hopper GPU"
    if dtype != torch.bfloat16:
        return f"{str(dtype).removeprefix('torch.')} activations"
    block_scales = f.scale_index is not None and not f.per_row
    if f.zero_index is not None or (block_scales and f.scale not in _SCALES):
        return "a zero point" if f.zero_index is not None else f"block scales of {f.scale}, which bfloat16 does not hold"
    if f.n % 16 or f.k % 8 or (f.matrices > 1 and f.k % (PARTS[f.bits] * f.part)):
        return f"{f.n} outputs of {f.k} values: the copy engine wants whole 16 bytes"
    if block_scales and not _scales_align(f):
        return "scales of one byte, one a step: the copy engine wants them at whole 128 bytes"
    if f.matrices * f.units * planes(f.bits) >= 2**31 or f.matrices * f.blocks >= 2**31:
        return "more than 2^31 rows of units"
    if as_given and (x.stride(-1) != 1 or any(s % 8 for s in x.stride()[:-1]) or x.data_ptr() % 16):
        return "rows of x that do not begin at whole 16 bytes"
    return ""


def _scales_align(f: Form) -> bool:
    """Whether a step brings two blocks at least, so that its scales for 64 rows, of one byte each, fill 128."""
    unit = PARTS[f.bits] * f.part
    return not f.scale.startswith("float8") or unit >= 2 * f.group or (f.units % 2 == 0 and unit == f.group <= 32)


def many(f: Form) -> int:
    """Rows of x up to which a plain product goes this way."""
    if f.bits == 6:
        return 256  # two stages, see tile
    return _MANY if f.n >= 128 * 128 else _FEWER


def reveals(f: Form) -> str:
    """The dtype in which a one-hot x shows the weight: float32 where no product of a code and its scale is rounded."""
    if f.scale_index is None or f.per_row:
        return "float32"
    code, scale = _CODES.get(f.element, 8), _SCALES[f.scale]
    return "float32" if code + scale <= 8 or code == 1 else "bfloat16"


def tile(f: Form, m: int) -> Tile:
    """The configuration of a plain product: programs of 64 rows of the weight go two to a multiprocessor, those of 128 alone."""
    if m <= 64:
        return Tile(64, 64, 4, 128, _splits(f, 64, 1, 2))
    if m <= 128:
        return Tile(64, 128, 3 if f.bits != 6 else 2, 64, _splits(f, 64, 1, 2))
    whole = PARTS[f.bits] * f.part > 64  # a unit is a step of 128, which leaves room for fewer of them
    return Tile(128, 256, 2 if f.bits == 6 else 3 if whole else 4, 64, _splits(f, 128, -(-m // 256), 1))


def _splits(f: Form, bn: int, tiles_m: int, resident: int) -> int:
    """Into how many parts k is cut: the fewest rounds of programs, weighed against writing and adding up their sums."""
    tiles, room = -(-f.n // bn) * tiles_m, 132 * resident
    return min(range(1, 9), key=lambda s: -(-tiles * s // room) / s + 0.03 * s)


def grouped_tile(f: Form, tokens: int) -> Tile:
    """The configuration of a grouped product: by the rows that an expert has on average."""
    rows = tokens / f.matrices
    return Tile(64, 16) if rows <= 12 else Tile(64, 32) if rows <= 40 else Tile(64, 128, 2)


@lru_cache(maxsize=1024)
def _steps(f: Form, chosen: Tile) -> Steps:
    parts, count = PARTS[f.bits], planes(f.bits)
    unit = parts * f.part
    block_scales = f.scale_index is not None and not f.per_row
    units = next(
        u
        for u in (8, 4, 2, 1)
        if u == 1
        or (
            count == 1
            and u * unit <= chosen.k
            and f.units % u == 0
            and (not block_scales or f.group % (u * unit) == 0 or u * unit % f.group == 0)
        )
    )
    tile = gl.NVMMASharedLayout.get_default_for([chosen.bn, f.part // 2], gl.int16)
    asm = tuple(place_pairs(f.element, p) for p in range(parts))
    return Steps(
        asm, f.bits, f.part, parts, count, units, f.group, f.scale if block_scales else "",
        max(units * unit // f.group, 1) if block_scales else 0, chosen.stages, tile,
    )  # fmt: skip


_KINDS = {torch.bfloat16: gl.bfloat16, torch.uint8: gl.uint8, torch.int16: gl.int16}


@lru_cache(maxsize=1024)
def _layout(dtype: torch.dtype, block: tuple[int, ...], swizzled: bool) -> gl.NVMMASharedLayout:
    kind = _KINDS[dtype]
    if swizzled:
        return gl.NVMMASharedLayout.get_default_for(list(block), kind)
    return gl.NVMMASharedLayout(0, kind.primitive_bitwidth, rank=len(block))


def _descriptor(tensor: Tensor, shape: list[int], stride: int, block: list[int], *, swizzled: bool = True) -> TensorDescriptor:
    """What the copy engine is told: `shape` in rows `stride` apart, of which it brings a `block` at a time. Three a call: what its
    own constructor checks, `why_not` has checked, and it takes as long as a small kernel."""
    if tensor.data_ptr() % 16:
        raise UnsupportedError(
            f"linear: expected a weight and scales that begin at whole 16 bytes, got {tensor.data_ptr() % 16} past one"
        )
    strides = [stride * prod(shape[i + 1 : -1]) for i in range(len(shape) - 1)] + [1]
    made: TensorDescriptor = object.__new__(TensorDescriptor)
    layout = _layout(tensor.dtype, tuple(block), swizzled)
    made.__dict__.update(base=tensor, shape=shape, strides=strides, block_shape=block, layout=layout, padding="zero")
    return made


def product(
    f: Form, w: list[Tensor], x: Tensor, bias: Tensor | None, out: Tensor, chosen: Tile, plan: Tensor | None = None
) -> None:
    """out [M, N] = x [M, K] w^T + bias; with `plan` (tiles of chosen.bm rows) each expert's rows by its own matrix."""
    m, splits = x.shape[0], 1 if plan is not None else chosen.splits
    steps = _steps(f, chosen)
    into = out if splits == 1 else torch.empty(splits, m, f.n, dtype=torch.float32, device=x.device)
    tiles_n, tiles_m = -(-f.n // chosen.bn), -(-m // chosen.bm) if plan is None else plan.shape[0]
    half, rows = f.part // 2, f.matrices * f.units * steps.planes
    scale = None if f.scale_index is None else w[f.scale_index]
    blocks = None
    if steps.scales:
        assert scale is not None
        blocks = _descriptor(scale, [f.matrices * f.blocks, f.n], f.n, [steps.scales, chosen.bn], swizzled=False)
    stream_kernel[(tiles_m, tiles_n, splits)](
        _descriptor(x, [m, f.k], x.stride(0), [chosen.bm, steps.k]),
        _descriptor(w[0].view(torch.int16), [rows, f.n, half], half, [steps.units, chosen.bn, half]),
        blocks, None if steps.scales else scale, None if f.outer_index is None else w[f.outer_index], bias, into, plan,
        m, f.n, f.units // steps.units, f.blocks, splits, into.stride(-2), into.stride(-1), F=steps, SCALE=f.scale,
        OUTER=0 if f.outer_index is None else 2 if f.outer_rows else 1, BN=chosen.bn, BM=chosen.bm, PLAIN=splits > 1,
        num_warps=chosen.bn // 16,
    )  # fmt: skip
    if splits > 1:
        gpu_run.reduce(f, w, into, bias, out)
