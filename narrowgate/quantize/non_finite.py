"""What a quantizer does with values that are not finite, where it may not look at them and raise.

A quantizer of weights raises (the policy "raise"). A quantizer of activations may run inside a captured graph, where nothing
can be looked at; its policy is "saturate", and it is the same on every device:
* +-infinity is read as +-2^127, and so is what is finite but larger: it saturates, and the rest of its block rounds to zero. Not as
  the largest float32, which a code would round up to 2^128: an infinity when it is decoded;
* a block with a NaN gets a scale that is NaN: byte 255 of an exponent scale, the quiet NaN 0x7FC0 (0x7E00, 0x7FC00000) of a
  bfloat16 (float16, float32) one. The whole block then decodes to NaN: never a plausible number;
* in such a block every code is 0, but for the NaN's own place where the element has a NaN: 0x7F in E4M3 and in E5M2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.errors import InputError
from narrowgate.formats.elements import Element

POLICIES = ("raise", "saturate")
LARGEST = 2.0**127  # what an infinity is read as
FLOAT_MAX = torch.finfo(torch.float32).max
NAN_CODE = 0x7F  # of both 8-bit floats; the sign and the payload of a NaN are not kept
_NAN_SCALE = {"bfloat16": 0x7FC0, "float16": 0x7E00, "float32": 0x7FC00000, "float8_e4m3fn": NAN_CODE, "float8_e5m2": NAN_CODE}


def check_policy(who: str, policy: str) -> None:
    """Raise InputError unless the policy is one of the two."""
    if policy not in POLICIES:
        raise InputError(f"{who}: expected non_finite to be one of {', '.join(POLICIES)}, got {policy!r}")


def saturated(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x as float32 with NaN as 0, clamped to +-2^127; where x is NaN)."""
    x = x.to(torch.float32)
    return torch.nan_to_num(x, nan=0.0).clamp(-LARGEST, LARGEST), x.isnan()


def nan_scale(name: str) -> int:
    """The code of a scale that makes its block NaN."""
    return 255 if name in ("float8_e8m0fnu", "ue8m0_zero") else _NAN_SCALE[name]


def mark(codes: Tensor, scales: Tensor, nan: Tensor, kind: Element, scale_element: str) -> tuple[Tensor, Tensor]:
    """Codes [..., B] and scale codes [...] with every block that holds a NaN (`nan` [..., B]) made NaN as above."""
    marked = nan.any(-1)
    own = nan & (kind.kind == "float" and kind.has_nan)
    codes = torch.where(marked[..., None], own.to(codes.dtype) * NAN_CODE, codes)
    return codes, torch.where(marked, nan_scale(scale_element), scales)
