"""float32 arithmetic with exactly one rounding, whatever torch's operators do on a device.

torch computes `number / tensor` as a reciprocal and a product, and a CUDA division by a CPU scalar likewise: two roundings,
which move scale codes. Every division of a quantizer therefore goes through `divide`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.formats.minifloat import from_bits


def divide(numerator: Tensor | float, denominator: Tensor | float) -> Tensor:
    """The correctly rounded float32 quotient (SPEC B34); at least one argument is a float32 tensor.

    >>> hex(divide(200704.0, torch.tensor([2.625])).view(torch.int32).item())
    '0x47955555'
    """
    device = next(v.device for v in (numerator, denominator) if isinstance(v, Tensor))
    top, bottom = (torch.as_tensor(v, dtype=torch.float32, device=device) for v in (numerator, denominator))
    if device.type == "cpu":
        return top / bottom
    # 53 bits are more than twice 24 plus two, so rounding the float64 quotient again is the same as rounding once.
    return (top.to(torch.float64) / bottom.to(torch.float64)).to(torch.float32)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float32, exactly, for int32 exponents in -149..127."""
    normal = (exponent + 127).clamp(min=1) << 23
    subnormal = 1 << (exponent + 149).clamp(0, 22)
    return from_bits(torch.where(exponent >= -126, normal, subnormal))
