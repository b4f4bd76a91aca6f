"""Small floats by integer arithmetic: any width of exponent and mantissa, decoded to and rounded from float32 bits.

Why integers: rounding is then stated in the open (one shift, one increment), is the same on every device, does not depend
on flush-to-zero modes, and can be copied into a kernel line by line. Nothing here knows a format by name; NaN, infinity
and saturation are the caller's (elements.py). Left out: exponent widths above 8 and mantissas of 23 bits or more.
"""

from __future__ import annotations

import torch
from torch import Tensor

MANTISSA_MASK = 0x7FFFFF
IMPLICIT_ONE = 0x800000
INFINITY_BITS = 0x7F800000
MAGNITUDE_MASK = 0x7FFFFFFF
QUIET_NAN_BITS = 0x7FC00000


def float_bits(values: Tensor) -> Tensor:
    """The int32 bit patterns of a float32 tensor (same shape)."""
    return values.view(torch.int32)


def from_bits(bits: Tensor) -> Tensor:
    """The float32 tensor whose bit patterns are the given int32 tensor."""
    return bits.view(torch.float32)


def round_magnitude(magnitude: Tensor, mantissa_bits: int, bias: int, *, up: bool = False) -> Tensor:
    """Code (without sign) of the small float nearest to |x|, ties to the even code; or, with `up`, of the smallest one >= |x|.

    `magnitude` holds the int32 bits of |x| in float32. The result is int32 and not yet saturated: exponents beyond the
    format continue the count, so that the caller clamps to its largest code. Infinity rounds to something larger than
    every finite value; NaN gives no useful code.
    """
    lowest = 128 - bias  # float32's biased exponent of the format's smallest normal number
    field = magnitude >> 23
    significand = (magnitude & MANTISSA_MASK) + (field > 0).to(torch.int32) * IMPLICIT_ONE
    field = field.clamp(min=1)
    # Below the smallest normal number the mantissa's last place stays put, so more bits are shifted out. Beyond 25 nothing
    # is left of the 24-bit significand either way, and the shift must stay under 32.
    shift = ((lowest - field).clamp(min=0) + (23 - mantissa_bits)).clamp(max=25)
    below_one = (1 << shift) - 1
    increment = below_one if up else (below_one >> 1) + ((significand >> shift) & 1)
    return ((field - lowest).clamp(min=0) << mantissa_bits) + ((significand + increment) >> shift)


def decode_magnitude(code: Tensor, mantissa_bits: int, bias: int) -> Tensor:
    """float32 bits (int32) of the finite small float whose code without sign is `code` (int32)."""
    exponent = code >> mantissa_bits
    mantissa = code & ((1 << mantissa_bits) - 1)
    normal = ((exponent + (127 - bias)) << 23) | (mantissa << (23 - mantissa_bits))
    if bias == 127:  # the exponent range is float32's own, so subnormals keep their place
        return normal
    subnormal = float_bits(mantissa.to(torch.float32) * 2.0 ** (1 - bias - mantissa_bits))
    return torch.where(exponent > 0, normal, subnormal)
