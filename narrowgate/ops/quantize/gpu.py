"""quantize on the GPU: every scheme of the catalogue, at the reference's bits.

One pass over x where a block has a fixed length; a row's scale (int8_channel) and NVFP4's outer scale need its largest
magnitude first. Layouts whose words no tile fills (rows that start inside a word, other orders) take the codes as bytes and
are packed from those. A weight that is not finite is refused as the reference refuses it, which reads one number back; inside
a stream capture nothing is read, an infinity saturates and a NaN marks its block (narrowgate.quantize.non_finite)."""

from __future__ import annotations

import math
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgate.errors import InputError
from narrowgate.formats import Scheme, codebook, element, scheme
from narrowgate.formats.codebooks import thresholds
from narrowgate.formats.schemes import ROW
from narrowgate.ops.quantize.gpu_blocks import blocks_kernel, channel_kernel, row_amax_kernel
from narrowgate.ops.quantize.gpu_pairs import pairs_kernel
from narrowgate.packing import layout as find_layout
from narrowgate.quantize import quantize as by_rule
from narrowgate.quantize.arithmetic import divide
from narrowgate.quantize.non_finite import NAN_CODE, nan_scale

TILE = 1024  # values of a program
WARPS = 2
TILE_PAIRS = 2048  # values of a program of gpu_pairs.py: 32 a thread
WARPS_PAIRS = 2
_SIGNED = {"signed_integer", "iq4_nl", "q4_0"}  # the scale takes the sign of the value of largest magnitude


class Constants(NamedTuple):
    """A scheme as the kernel needs it."""

    method: tl.constexpr  # a string that travels on to other functions
    rule: tl.constexpr
    bits: int
    mantissa: int
    bias: int
    maximum: float
    emax: int
    low: float
    high: float
    divisor: float
    signed: bool
    scale_bits: int
    half: bool
    nan_scale: int
    nan_code: int
    top: int  # the largest value as a bfloat16, in both halves of a word


@lru_cache(maxsize=256)
def constants(name: str, rule: str) -> Constants:
    """The kernel's constants for a scheme of the catalogue under one of its scale rules."""
    record = scheme(name)
    kind, stored = record.value_element, record.scales[0].element
    floating = kind.kind == "float"
    low, high = record.code_range or (0, 0)
    divisor = {"q4_0": -8.0, "iq4_nl": float(codebook("iq4_nl")[0]), "signed_integer": float(low)}.get(
        record.method, float(high)
    )
    return Constants(
        tl.constexpr(record.method), tl.constexpr(rule), kind.bits, kind.mantissa_bits, kind.bias,
        kind.max if floating else 0.0, kind.emax if floating else 0,
        float(low), float(high), divisor, record.method in _SIGNED, element(stored).bits, stored == "float16",
        nan_scale(stored), NAN_CODE if floating and kind.has_nan else 0,
        int(torch.tensor(kind.max if floating else 0.0).bfloat16().view(torch.int16)) * 0x10001,
    )  # fmt: skip


def quantize(
    x: Tensor, scheme: str, *, scale_rule: str | None = None, global_scale: Tensor | None = None, per_row: bool = False,
    layout: str | None = None, out: list[Tensor],
) -> None:  # fmt: skip
    record = _record(x, scheme, scale_rule)
    raises = x.device.type == "cpu" or not torch.cuda.is_current_stream_capturing()
    rest = iter(out[1 + len(record.scales) :])
    if record.zero_point is not None:
        next(rest).fill_(record.zero_point)
    if record.codebook is not None:
        next(rest).copy_(_table(record.codebook, x.device).view(torch.int32))
    rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    flag = torch.zeros(1, dtype=torch.int32, device=x.device) if raises else None
    outer = _outer_scale(rows, record, global_scale, per_row, flag)
    if len(record.scales) > 1:
        out[1 + 1].copy_(outer.view(torch.int32).expand(out[2].numel()).view(out[2].shape))
    if rows.numel():
        rule = scale_rule or (record.scale_rules[0] if record.scale_rules else "")
        encode_rows(rows, record, rule, out, outer, layout or record.layout, tuple(x.shape), flag)
    if flag is not None and bool(flag):
        given = "per_row" if per_row else global_scale
        by_rule(x, scheme, scale_rule=scale_rule, global_scale=given, layout=layout)  # says what is wrong, and where
        raise InputError(f"quantize: {scheme} cannot hold these values")


def _record(x: Tensor, name: str, scale_rule: str | None) -> Scheme:
    record = scheme(name)
    if x.shape[-1] % record.k_multiple:
        raise InputError(f"quantize: {record.name} needs K divisible by {record.k_multiple}, got {x.shape[-1]}")
    if scale_rule is not None and scale_rule not in record.scale_rules:
        legal = ", ".join(record.scale_rules) or "none"
        raise InputError(f"quantize: expected a scale rule of {record.name} ({legal}), got {scale_rule!r}")
    return record


def encode_rows(
    rows: Tensor, record: Scheme, rule: str, out: list[Tensor], outer: Tensor, layout: str, shape: tuple[int, ...],
    flag: Tensor | None, *, tile: int = TILE, warps: int = WARPS,
) -> None:  # fmt: skip
    """Fill out[0] (codes in `layout`) and out[1] (innermost scales) from rows [M, K], not empty. `flag`: raise mode."""
    count, width = rows.shape
    raises = flag is not None
    if record.method == "plain":
        out[0].copy_(rows.to(torch.bfloat16).view(torch.int16).view(out[0].shape))
        if flag is not None:
            flag.copy_((~rows.isfinite()).any())
        return
    bits = record.value_element.bits
    store = _store(layout, bits, width)
    direct = store != "bytes" or layout == "bytes@1" or (layout == "words@1" and bits == 8)
    data = out[0] if direct else torch.empty(count, width, dtype=torch.uint8, device=rows.device)
    if direct and rows.numel() * bits % 32:
        out[0].view(-1)[-1:].zero_()  # what fills the last word up
    fixed = constants(record.name, rule)
    if direct and _by_pairs(rows, record, rule, layout):
        _encode_pairs(rows, record, fixed, out, flag)
        return
    given = flag if flag is not None else data  # a pointer that is not used
    if record.scales[0].span == ROW:
        chunk = min(2048, max(triton.next_power_of_2(width), 16))
        channel_kernel[(count,)](
            rows, data, out[1], given, width, rows.stride(0), S=fixed, CHUNK=chunk, STORE=store, RAISES=raises,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    else:
        block = record.group_size
        assert block is not None
        groups = -(-width // block)
        G = min(triton.next_power_of_2(groups), tile // block)
        R = min(max(tile // (G * block), 1), triton.next_power_of_2(count))
        group_tiles = triton.cdiv(groups, G)
        thresholds = rows if record.codebook is None else _limits(record.codebook, rows.device)
        blocks_kernel[(triton.cdiv(count, R) * group_tiles,)](
            rows, data, out[1], outer, thresholds, given, count, width, rows.stride(0), groups, group_tiles,
            int(outer.numel() > 1), S=fixed, R=R, G=G, B=block, STORE=store, RAISES=raises,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    if data is not out[0]:
        out[0].copy_(find_layout(layout).pack(data.view(shape), bits))


def _by_pairs(rows: Tensor, record: Scheme, rule: str, layout: str) -> bool:
    """Whether gpu_pairs.py takes it: bfloat16 rows of whole blocks whose 16-byte words lie on their places."""
    block = record.group_size
    if rows.dtype != torch.bfloat16 or block is None or rows.shape[1] % block or rows.data_ptr() % 16:
        return False
    if rows.shape[0] > 1 and rows.stride(0) % 8:
        return False
    if record.method == "microscaling":
        return rule != "mse" and layout == record.layout
    stored = record.scales[0].element
    return record.method == "integer" and stored == "bfloat16" and record.value_element.bits >= 4 and layout == record.layout


def _encode_pairs(rows: Tensor, record: Scheme, fixed: Constants, out: list[Tensor], flag: Tensor | None) -> None:
    block, count, pitch = record.group_size or 1, rows.shape[0], rows.stride(0)
    groups = rows.shape[1] // block
    if pitch == rows.shape[1] or count == 1:  # one run of blocks: rows of a tile each, so that no tile is cut
        span = math.gcd(count * groups, TILE_PAIRS // block)
        span = span if span * block * 4 >= TILE_PAIRS else groups
        count, groups, pitch = count * groups // span, span, span * block
    G = min(triton.next_power_of_2(groups), max(TILE_PAIRS // block, 1))
    R = min(max(TILE_PAIRS // (G * block), 1), triton.next_power_of_2(count))
    pairs_kernel[(triton.cdiv(count, R) * triton.cdiv(groups, G),)](
        rows.view(torch.uint32) if rows.shape[0] else rows, out[0], out[1], out[0] if flag is None else flag, count, groups,
        pitch // 2, S=fixed, R=R, G=G, B=block, V=16 if fixed.bits == 6 else 8, RAISES=flag is not None,
        num_warps=WARPS_PAIRS, enable_fp_fusion=False,
    )  # fmt: skip


def _store(layout: str, bits: int, width: int) -> str:
    """How a tile's codes go to memory: whole words of the layout, or bytes (which 8-bit words are, wherever a row starts)."""
    if layout == "words@1" and bits < 8 and width * bits % 32 == 0:
        return "words"
    return "triples" if layout == "fp6_bytes@1" and width % 16 == 0 else "bytes"


def _outer_scale(rows: Tensor, record: Scheme, given: Tensor | None, per_row: bool, flag: Tensor | None) -> Tensor:
    """float32 [1] or [rows]: the second level's factor; [1] of ones where there is none."""
    if len(record.scales) < 2:
        if given is not None or per_row:
            raise InputError(f"quantize: {record.name} has no second scale level, so it takes no global_scale")
        return _one(rows.device)
    if given is not None:
        if given.numel() not in (1, rows.shape[0]):
            raise InputError(f"quantize: expected global_scale of 1 or {rows.shape[0]} numbers, got {given.numel()}")
        if flag is not None and not bool((given.isfinite() & (given > 0)).all()):
            raise InputError("quantize: expected positive finite global scales")
        return given
    amax = torch.zeros(rows.shape[0], device=rows.device)
    if rows.numel():
        row_amax_kernel[(rows.shape[0],)](
            rows, amax, amax if flag is None else flag, rows.shape[1], rows.stride(0), CHUNK=2048, RAISES=flag is not None,
            num_warps=4,
        )  # fmt: skip
    if not per_row:
        amax = amax.amax(0, keepdim=True) if len(amax) else amax.new_zeros(1)
    scale = divide(amax, record.value_element.max * element(record.scales[0].element).max)
    return torch.where(scale > 0, scale, 1.0)


@lru_cache(maxsize=16)
def _table(name: str, device: torch.device) -> Tensor:
    return codebook(name).to(device)


@lru_cache(maxsize=16)
def _limits(name: str, device: torch.device) -> Tensor:
    return thresholds(name).to(device)


@lru_cache(maxsize=16)
def _one(device: torch.device) -> Tensor:
    return torch.ones(1, device=device)
