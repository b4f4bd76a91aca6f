"""Storing a scale in a narrow type so that no value overflows: round UP to the smallest representable scale (SPEC A40).

Other modes exist under other names: NVFP4 rounds its E4M3 scale to nearest, the microscaling rules choose an exponent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.errors import InputError
from narrowgate.formats import element
from narrowgate.formats.minifloat import INFINITY_BITS, MAGNITUDE_MASK, MANTISSA_MASK, float_bits, round_magnitude


def round_up(scales: Tensor, name: str) -> Tensor:
    """Codes of the smallest `name` value whose magnitude is >= |scale|, sign kept, saturating at the largest finite one.

    scales: float32. name: bfloat16, float16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu (no sign: a negative scale is
    refused; 0 gives the smallest value 2^-127) or float32 (kept). Returns codes in the element's code dtype.
    Raises InputError for non-finite scales.

    >>> element("bfloat16").decode(round_up(torch.tensor([0.1, 1.0]), "bfloat16")).tolist()
    [0.10009765625, 1.0]
    """
    record = element(name)
    if scales.dtype != torch.float32:
        raise InputError(f"round_up: expected float32 scales, got {scales.dtype}")
    if record.kind not in ("float", "exponent"):
        raise InputError(f"round_up: expected a float or exponent element, got {name}")
    bits = float_bits(scales)
    magnitude = bits & MAGNITUDE_MASK
    if bool((magnitude >= INFINITY_BITS).any()):
        raise InputError("round_up: expected finite scales")
    if record.kind == "exponent":
        if bool((scales < 0).any()):
            raise InputError(f"round_up: {name} has no sign, got a negative scale")
        return _exponent_up(magnitude, record.zero_is_zero).to(torch.uint8)
    if record.bits == 32:
        return bits.clone()
    code = round_magnitude(magnitude, record.mantissa_bits, record.bias, up=True).clamp(max=record.max_code)
    return (code | ((bits >> 31) & 1) << (record.bits - 1)).to(record.code_dtype)


def _exponent_up(magnitude: Tensor, zero_is_zero: bool) -> Tensor:
    code = (magnitude >> 23) + ((magnitude & MANTISSA_MASK) != 0).to(torch.int32)
    if zero_is_zero:  # the smallest power above zero is byte 1
        return code.clamp(max=254)
    return torch.where(magnitude <= 0x00400000, 0, code.clamp(max=254))
