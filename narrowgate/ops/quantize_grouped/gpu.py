"""quantize_grouped on the GPU: activation, blocks of 32, codes and swizzled scale bytes in one pass (SPEC B16-B29).

The grid covers the padded scales, so that every byte of both outputs is written: rows that do not count and padding get zeros,
and their input is never read. The activation is the one of narrowgate.ops.elementwise, rounded to x's dtype, so that the fused
form is the two steps, bit for bit. Nothing is read back but where values may be looked at (the CPU, debug_checks())."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgate.dispatch import checks_values
from narrowgate.errors import InputError
from narrowgate.formats.microscaling import BLOCK, microscaling_element
from narrowgate.packing.swizzle import padded_extents
from narrowgate.quantize import quantize_microscaling
from narrowgate.tile import gpu_decode, gpu_encode, gpu_math, gpu_special

BLOCKS = 4  # of a program: what one tile of swizzled scales has side by side
TILES = {6: (16, 2), 8: (32, 4)}  # bits of a code: rows and warps of a program
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _activated(at, mask, half, ACTIVATION: tl.constexpr):
    """float32 values after the activation, rounded to x's dtype as the operator of that name stores them."""
    raw = tl.load(at, mask=mask, other=0.0)
    x = gpu_math.widen(raw)
    if ACTIVATION == "silu_mul":
        up = gpu_math.widen(tl.load(at + half, mask=mask, other=0.0))
        return gpu_math.through(gpu_math.mul_rn(gpu_special.silu(x), up), raw.dtype)
    elif ACTIVATION == "relu2":
        x = tl.where(x < 0.0, 0.0, x)
        return gpu_math.through(gpu_math.mul_rn(x, x), raw.dtype)
    else:
        return x


@triton.jit
def _block_codes(v, gs, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, BF16: tl.constexpr):
    """Codes [R, B, 32] and bytes [R, B] of values under the global scale gs (SPEC B20-B22, B26); NaN marks its block."""
    most = tl.max(gpu_encode.to_bits(v) & 0x7FFFFFFF, axis=2)  # as bits, which order like magnitudes and keep a NaN on top
    amax = tl.minimum(gpu_decode.from_bits(tl.minimum(most, gpu_decode.INFINITY)), gpu_encode.LARGEST)
    nan = v != v
    v = tl.minimum(tl.maximum(v, -gpu_encode.LARGEST), gpu_encode.LARGEST)  # what a NaN becomes does not matter
    scaled_amax = gpu_math.mul_rn(amax, gs)
    byte = gpu_encode.ceil_ratio(tl.where(scaled_amax > FLOAT_MAX, FLOAT_MAX, scaled_amax), MAX)
    power = gpu_decode.from_bits(tl.where(byte < 254, 254 - byte, 0) << 23)
    multiplier = gpu_math.mul_rn(tl.where(byte == 0, 0.0, power), gs)
    whole = tl.abs(multiplier) < float("inf")
    first = tl.where(whole, multiplier, gs)  # where gs is huge and the block tiny, the same product in two finite steps
    second = tl.where(whole, 1.0, power)
    scaled = gpu_math.mul_rn(gpu_math.mul_rn(v, first[:, :, None]), second[:, :, None])
    if BF16:
        scaled = gpu_math.through(scaled, tl.bfloat16)
    codes = gpu_encode.encode_float(scaled, BITS, MANTISSA, BIAS, MAX)
    byte = tl.where(most > gpu_decode.INFINITY, 255, byte)
    codes = codes & tl.where((multiplier == 0.0) | (byte == 255), 0, 0xFFFFFFFF).to(tl.uint32)[:, :, None]
    if BITS == 8:
        codes = tl.where(nan, 0x7F, codes)
    return codes, byte


@triton.jit
def _kernel(
    x, counts, scale, codes, scales, rows, blocks, step_g, step_r, row_tiles, col_tiles, padded_blocks, scale_step,
    ACTIVATION: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr,
    BF16: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    g = program // (row_tiles * col_tiles)
    row = (program // col_tiles % row_tiles) * R + tl.arange(0, R)
    block = (program % col_tiles).to(tl.int32) * B + tl.arange(0, B)
    col = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    counted = (row < tl.load(counts + g)) & (row < rows)
    mask = counted[:, None, None] & (block < blocks)[None, :, None] & (tl.arange(0, 32) >= 0)
    at = x + g * step_g + row[:, None, None] * step_r + col[None, :, :]
    values = _activated(at, mask, blocks * 32, ACTIVATION)
    gs = tl.load(scale + g * scale_step)
    code, byte = _block_codes(values, gs, BITS, MANTISSA, BIAS, MAX, BF16)
    code = tl.where(mask, code, 0)
    byte = tl.where(counted[:, None] & (block < blocks)[None, :], byte, 0)
    inside = (row < rows)[:, None, None]
    if BITS == 6:
        run = block[:, None] * 2 + tl.arange(0, 2)[None, :]
        word = codes.to(tl.pointer_type(tl.uint32)) + ((g * rows + row)[:, None, None] * (blocks * 2) + run[None, :, :]) * 3
        fits = inside & (run < blocks * 2)[None, :, :]
        first, second, third = gpu_encode.pack_triples(code)
        tl.store(word, first, mask=fits)
        tl.store(word + 1, second, mask=fits)
        tl.store(word + 2, third, mask=fits)
    else:
        to = codes + (g * rows + row)[:, None, None] * (blocks * 32) + col[None, :, :]
        tl.store(to, code.to(tl.uint8), mask=inside & (col < blocks * 32)[None, :, :])
    line = (((row // 128)[:, None] * (padded_blocks // 4) + block[None, :] // 4) * 32 + (row % 32)[:, None]) * 4
    to = scales + g * (row_tiles * R) * padded_blocks + (line + (row % 128 // 32)[:, None]) * 4 + block[None, :] % 4
    tl.store(to, byte.to(tl.uint8), mask=(row >= 0)[:, None] & (block < padded_blocks)[None, :])


def quantize_grouped(
    x: Tensor, row_counts: Tensor, fmt: str, *, global_scale: Tensor, activation: str | None = None,
    bf16_round: bool = False, out: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    codes, scales = out[0].permute(2, 0, 1), out[1].view(torch.uint8).permute(5, 2, 4, 0, 1, 3)  # as they lie in memory
    groups, rows, stored = codes.shape
    kind = microscaling_element(fmt)
    blocks = (stored if kind.bits == 8 else stored // 3 * 4) // BLOCK
    padded_rows, padded_blocks = padded_extents(rows, blocks)
    if scales.numel() == 0:
        return
    tile_rows, warps = TILES[kind.bits]
    row_tiles, col_tiles = padded_rows // tile_rows, triton.cdiv(padded_blocks, BLOCKS)
    _kernel[(groups * row_tiles * col_tiles,)](
        x, row_counts, global_scale, codes, scales, rows, blocks, x.stride(0), x.stride(1), row_tiles, col_tiles, padded_blocks,
        int(global_scale.numel() > 1), ACTIVATION=activation or "", BITS=kind.bits, MANTISSA=kind.mantissa_bits, BIAS=kind.bias,
        MAX=kind.max, BF16=bf16_round, R=tile_rows, B=BLOCKS, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    if checks_values(x):
        _refuse_what_is_not_finite(x, row_counts, fmt, global_scale, activation, scales)


def _refuse_what_is_not_finite(
    x: Tensor, row_counts: Tensor, fmt: str, global_scale: Tensor, activation: str | None, scales: Tensor
) -> None:
    """Where values may be looked at, raise as the reference does: for a value that is not finite, or an overflow."""
    counted = torch.where(torch.arange(x.shape[1], device=x.device)[:, None] < row_counts[:, None, None], x, 0)
    if activation is None:
        quantize_microscaling(counted, global_scale.expand(len(x))[:, None].expand(x.shape[:2]), fmt)
    elif not bool(counted.isfinite().all()) or bool((scales == 255).any()):
        raise InputError("microscaling: values under an activation must be finite")
