"""Which power of two a microscaling block is divided by: the E8M0 rules by name, in exact integer arithmetic.

All take the block's largest magnitude `amax` (float32, finite, >= 0) and the element, and return the scale byte, int32 in
0..254, with 0 for an all-zero block. With e the exponent of amax and emax that of the element's largest value:
  floor   e - emax                                (OCP; values above the element's maximum saturate)
  rceil   exponent of f32(amax / max), rounded up (containment: nothing saturates; our default)
  even    as floor, after amax is rounded to the element's mantissa width
  mse     rceil's byte or the one below, whichever leaves the smaller squared error (SPEC B35)
No logarithm is taken: near powers of two a float32 log2 is wrong by up to 22 ulps (SPEC Z6, B23).
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.errors import InputError
from narrowgate.formats import element
from narrowgate.formats.elements import Element
from narrowgate.formats.minifloat import MANTISSA_MASK, float_bits
from narrowgate.quantize.arithmetic import divide, power_of_two

RULES = ("floor", "rceil", "even", "mse")


def scale_byte(amax: Tensor, name: str, rule: str) -> Tensor:
    """E8M0 byte (int32, 0..254) for each block maximum under `rule`: floor, rceil or even (mse needs the values).

    >>> scale_byte(torch.tensor([6.0, 7.0, 0.0]), "float4_e2m1fn", "rceil").tolist()
    [127, 128, 0]
    """
    record = element(name)
    if rule == "rceil":
        return ceil_ratio(amax, record.max).clamp(max=254)
    if rule not in ("floor", "even"):
        raise InputError(f"scale rule: expected one of {', '.join(RULES)}, got {rule!r}")
    bits = float_bits(amax)
    if rule == "even":
        bits = bits + (1 << (22 - record.mantissa_bits))  # half a place of the element's mantissa
    byte = ((bits >> 23) - record.emax).clamp(0, 254)
    return torch.where(amax > 0, byte, 0)


def ceil_ratio(amax: Tensor, maximum: float, global_scale: Tensor | float = 1.0) -> Tensor:
    """SPEC B20: with r = f32(f32(amax * global_scale) / maximum), the biased exponent of r, plus one if r is no power of two.

    int32 in 0..255: r <= 0 gives 0, a subnormal r gives 1, an infinite or NaN r gives 255 (for the caller to refuse).
    """
    ratio = divide(amax * global_scale, maximum)
    bits = float_bits(ratio)
    byte = (bits >> 23) + ((bits & MANTISSA_MASK) != 0).to(torch.int32)
    return torch.where(ratio <= 0, 0, byte.clamp(0, 255))


def minimum_error_byte(blocks: Tensor, amax: Tensor, record: Element) -> Tensor:
    """SPEC B35: rceil's byte, or the next lower one where that leaves a smaller squared error; int32 [...].

    blocks: float32 [..., B]; amax [...]. The lower byte is tried where rceil's exponent is above -126. Errors are summed in
    float64 in index order; equal errors keep rceil.
    """
    byte = scale_byte(amax, record.name, "rceil")
    finer = (byte - 1).clamp(min=0)
    better = _squared_error(blocks, finer, record) < _squared_error(blocks, byte, record)
    return torch.where(better & (byte > 1), finer, byte)


def _squared_error(blocks: Tensor, byte: Tensor, record: Element) -> Tensor:
    codes = record.encode_unchecked(scale_down(blocks, byte))
    decoded = record.decode(codes) * power_of_two(byte - 127)[..., None]
    errors = (blocks.to(torch.float64) - decoded.to(torch.float64)).square_()
    total = torch.zeros_like(errors[..., 0])
    for column in errors.unbind(-1):  # one addition after the other: the order is part of the rule
        total += column
    return total


def scale_down(blocks: Tensor, byte: Tensor) -> Tensor:
    """blocks / 2^(byte - 127) as one product with the exact inverse; byte int32 [...], blocks [..., B]."""
    return blocks * power_of_two(127 - byte)[..., None]
