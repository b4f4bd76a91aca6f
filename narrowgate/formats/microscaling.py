"""The three elements of the FP6 layer under their short names, with their constants and small conversions (SPEC B1-B9, B30).

"e3m2", "e2m3" and "e4m3" are what FP6 producers write in their metadata. Any other name is refused: taking an unknown one
for a default misreads every value (SPEC Z8).
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.errors import InputError
from narrowgate.formats.elements import Element, element

BLOCK = 32
_NAMES = {"e3m2": "float6_e3m2fn", "e2m3": "float6_e2m3fn", "e4m3": "float8_e4m3fn"}
E4M3_MAX = 448.0


def microscaling_element(fmt: str) -> Element:
    """The element called "e3m2", "e2m3" or "e4m3". Raises InputError for any other name."""
    if fmt not in _NAMES:
        raise InputError(f"microscaling: expected one of {', '.join(_NAMES)}, got {fmt!r}")
    return element(_NAMES[fmt])


def global_scale_numerator(fmt: str) -> float:
    """448 * max of the element: global_scale = numerator / amax (12544, 3360, 200704; SPEC B2)."""
    return E4M3_MAX * microscaling_element(fmt).max


def decode_table(fmt: str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """All values of a format, indexable by code: [64] (or [256] for e4m3) of `dtype` on `device` (SPEC B5)."""
    record = microscaling_element(fmt)
    return record.decode(torch.arange(2**record.bits)).to(dtype=dtype, device=device)


def decode_word(words: Tensor, fmt: str) -> Tensor:
    """int32 words of four codes, one a byte, lowest first -> float32 [..., 4]; bits above the field are masked (SPEC B6)."""
    if words.dtype != torch.int32:
        raise InputError(f"decode_word: expected int32 words, got {words.dtype}")
    return microscaling_element(fmt).decode(words.unsqueeze(-1).view(torch.uint8))


def quantize_values(x: Tensor, fmt: str = "e3m2") -> Tensor:
    """The nearest value of the format to every element of x, as float32 of the same shape: encode, then decode (SPEC B9).

    >>> quantize_values(torch.tensor([22.0, -30.0, 0.09375])).tolist()
    [24.0, -28.0, 0.125]
    """
    record = microscaling_element(fmt)
    return record.decode(record.encode(x))


def encode_pair(high: Tensor, low: Tensor, fmt: str) -> Tensor:
    """Codes of (high, low) in one int32: high's in bits 15..8, low's in bits 7..0 (SPEC B30)."""
    record = microscaling_element(fmt)
    return (record.encode(high).to(torch.int32) << 8) | record.encode(low).to(torch.int32)


def encode_octet(values: Tensor, fmt: str) -> Tensor:
    """Codes of [..., 8] values as one int64 bit pattern, value i in byte i (SPEC B30)."""
    if values.shape[-1:] != (8,):
        raise InputError(f"encode_octet: expected values [..., 8], got shape {list(values.shape)}")
    return microscaling_element(fmt).encode(values).contiguous().view(torch.int64).squeeze(-1)
