"""The FP6 layer's block quantizer: one global scale, one E8M0 byte for 32 values, byte 0 meaning "zero block" (SPEC B).

It differs from the catalogue's mxfp schemes in two points, which is why it has its own entry: values are multiplied by a
global scale before they meet their block scale (and divided by it on the way back), and scale byte 0 is the element
`ue8m0_zero`: 0, not 2^-127, in quantizing and in dequantizing. These functions work on blocks; groups of rows with counts
and fused activations are operators built on them.

  t = f32(amax * gs), r = f32(t / max), byte = exponent of r rounded up (B20)
  m = f32(gs * 2^(127 - byte)), code = encode(f32(x * m))            y = f32(code * 2^(byte - 127) / gs)
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.errors import InputError
from narrowgate.formats import element
from narrowgate.formats.microscaling import BLOCK, microscaling_element
from narrowgate.formats.minifloat import from_bits
from narrowgate.packing.fp6 import unpack_fp6
from narrowgate.packing.swizzle import padded_extents, unswizzle_128x4
from narrowgate.quantize.arithmetic import divide
from narrowgate.quantize.non_finite import FLOAT_MAX, check_policy, mark, saturated
from narrowgate.quantize.scale_rules import ceil_ratio


def block_scale_byte(amax: Tensor, global_scale: Tensor | float, fmt: str, *, non_finite: str = "raise") -> Tensor:
    """Scale byte of each block (uint8) from its float32 maximum (SPEC B19, B20).

    global_scale: a number, or a tensor that broadcasts against amax. Raises InputError where amax * global_scale overflows
    or is NaN: byte 255 is never emitted (SPEC B22). With non_finite="saturate" nothing is looked at: an overflow counts as
    the largest float32, a NaN gives 255.

    >>> block_scale_byte(torch.tensor([28.0, 29.0, 0.0]), 1.0, "e3m2").tolist()
    [127, 128, 0]
    """
    scaled = amax * global_scale
    if non_finite == "saturate":
        scaled = scaled.clamp(max=FLOAT_MAX)
    byte = ceil_ratio(scaled, microscaling_element(fmt).max)
    if non_finite == "raise" and bool((byte == 255).any()):
        raise InputError(f"microscaling: amax * global_scale must be finite, {int((byte == 255).sum())} blocks are not")
    return byte.to(torch.uint8)


def block_multiplier(byte: Tensor, global_scale: Tensor | float) -> Tensor:
    """float32 gs * 2^(127 - byte), the power built as exponent field 254 - byte; bytes 0 and 254 give 0 (SPEC B22)."""
    power = from_bits((254 - byte.to(torch.int32)).clamp(min=0) << 23)
    return torch.where(byte == 0, 0.0, power) * global_scale


def quantize_block(
    blocks: Tensor, amax: Tensor, global_scale: Tensor | float, fmt: str, *, bf16_round: bool = False,
    non_finite: str = "raise",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes uint8 [..., 32] and scale bytes uint8 [...] of float32 blocks [..., 32] with the given maxima [...].

    amax is the caller's: values above it saturate (SPEC B28). global_scale: a number, or a tensor that broadcasts against
    amax; 0 gives zero codes and a zero byte. bf16_round rounds the scaled value to bfloat16 before it is encoded (SPEC B26):
    it models a converter that takes bfloat16 sources and can move a code by one. Raises InputError for a NaN, an amax that
    overflows, an unknown format. non_finite="saturate" raises for no value and looks at none (non_finite.py).
    """
    record = microscaling_element(fmt)
    looks = non_finite == "raise"
    check_policy("quantize_block", non_finite)
    if not looks:
        (blocks, nan), (amax, lost) = saturated(blocks), saturated(amax)
    byte = block_scale_byte(amax, global_scale, fmt, non_finite=non_finite)
    multiplier = block_multiplier(byte, global_scale)
    scaled = blocks * multiplier[..., None]
    overflowed = multiplier.isinf()
    if not looks or bool(overflowed.any()):  # gs is huge and the block tiny: the same product in two finite steps
        power = from_bits((254 - byte.to(torch.int32)) << 23)
        gs = torch.as_tensor(global_scale, dtype=torch.float32, device=blocks.device).expand_as(power)
        scaled = torch.where(overflowed[..., None], blocks * gs[..., None] * power[..., None], scaled)
    if bf16_round:
        scaled = scaled.to(torch.bfloat16).to(torch.float32)
    codes = record.encode(scaled) if looks else record.encode_unchecked(scaled)
    codes = torch.where((multiplier == 0)[..., None], 0, codes)
    if looks:
        return codes, byte
    codes, byte = mark(codes, byte, nan, record, "ue8m0_zero")
    broken = (byte == 255) | lost  # also a global scale that is NaN
    return torch.where(broken[..., None] & ~nan, 0, codes), torch.where(broken, 255, byte)


def quantize_microscaling(
    x: Tensor,
    global_scale: Tensor | float = 1.0,
    fmt: str = "e3m2",
    *,
    activation_fmt: str | None = None,
    bf16_round: bool = False,
    non_finite: str = "raise",
) -> tuple[Tensor, Tensor]:
    """x [..., K] -> codes uint8 [..., K] and row-major scale bytes uint8 [..., K/32], element `ue8m0_zero`.

    x: float32, bfloat16 or float16, finite. global_scale: a number, or one for each row as a tensor [...]. activation_fmt
    overrides fmt (SPEC B26). Raises InputError "cols must be divisible by 32, got K". Pack the codes with pack_fp6.

    >>> codes, byte = quantize_microscaling(torch.arange(32) / 4 - 4.0)
    >>> byte.tolist(), codes[:8].tolist()
    ([125], [60, 60, 59, 58, 58, 58, 57, 56])
    """
    width = x.shape[-1]
    if width % BLOCK:
        raise InputError(f"quantize_microscaling: cols must be divisible by 32, got {width}")
    blocks = x.to(torch.float32).unflatten(-1, (width // BLOCK, BLOCK))
    amax = blocks.abs().amax(-1) if non_finite == "raise" else saturated(blocks)[0].abs().amax(-1)
    scale = global_scale.to(torch.float32)[..., None] if isinstance(global_scale, Tensor) else global_scale
    codes, byte = quantize_block(blocks, amax, scale, activation_fmt or fmt, bf16_round=bf16_round, non_finite=non_finite)
    return codes.flatten(-2), byte


def dequantize_microscaling(
    packed: Tensor,
    scales: Tensor,
    num_fp6: int,
    global_scale: Tensor | float = 1.0,
    fmt: str = "e3m2",
    *,
    swizzled: bool = True,
) -> Tensor:
    """packed uint8 [rows, 3K/4] and scale bytes -> float32 [rows, K], K being `num_fp6`: f32(code * 2^(byte - 127) / gs).

    fmt: "e3m2" or "e2m3"; "e4m3" has one byte a code, [rows, K].
    scales: the 128x4 swizzle as its 6-D view (groups stacked on the rows), or as a flat or 2-D padded buffer; row-major
    [rows, K/32] with swizzled=False. global_scale is DIVIDED by, with one rounding; a number, one a group, or one a row; 0
    gives zeros. Byte 0 is a zero block. Raises InputError "scale row count does not match packed row count", and for
    num_fp6 % 32. Source: SPEC B18, B21, B32.
    """
    if num_fp6 % BLOCK:
        raise InputError(f"dequantize_microscaling: num_fp6 must be divisible by 32, got {num_fp6}")
    record = microscaling_element(fmt)
    if record.bits == 8 and packed.shape[-1] != num_fp6:
        raise InputError(f"dequantize_microscaling: expected {num_fp6} bytes a row for e4m3, got {packed.shape[-1]}")
    codes = (unpack_fp6(packed, num_fp6) if record.bits == 6 else packed).reshape(-1, num_fp6)
    rows, blocks = codes.shape[0], num_fp6 // BLOCK
    byte = _row_major(scales, rows, blocks) if swizzled else scales.view(torch.uint8)
    if tuple(byte.shape) != (rows, blocks):
        raise InputError(
            f"dequantize_microscaling: scale row count does not match packed row count: expected scales {[rows, blocks]}, "
            f"got {list(byte.shape)}"
        )
    factors = element("ue8m0_zero").decode(byte)
    values = record.decode(codes).view(rows, blocks, BLOCK) * factors[..., None]
    gs = torch.as_tensor(global_scale, dtype=torch.float32, device=packed.device).reshape(-1)
    if gs.numel() == 0 or rows % gs.numel():
        raise InputError(
            f"dequantize_microscaling: expected global_scale of 1 or a divisor of {rows} numbers, got {gs.numel()}"
        )
    gs = gs.repeat_interleave(rows // gs.numel())[:, None, None]
    quotient = divide(values, torch.where(gs == 0, 1.0, gs).expand_as(values))
    return torch.where(gs == 0, 0.0, quotient).view(rows, num_fp6)


def _row_major(scales: Tensor, rows: int, blocks: int) -> Tensor:
    groups = scales.shape[5] if scales.dim() == 6 else 1
    per_group = rows // max(groups, 1)
    padded_rows, padded_cols = padded_extents(per_group, blocks)
    if groups * per_group != rows or scales.numel() != groups * padded_rows * padded_cols:
        raise InputError(
            f"dequantize_microscaling: scale row count does not match packed row count: expected {padded_rows} x "
            f"{padded_cols} padded bytes for {per_group} rows in each of {groups} groups, got {list(scales.shape)}"
        )
    return unswizzle_128x4(scales, per_group, blocks)
