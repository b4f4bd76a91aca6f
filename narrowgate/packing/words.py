"""`words@1`: fields packed low bits first into 32-bit words, flat over the row-major values.

Field j of a word sits at bits [j*bits, (j+1)*bits) (SPEC A2); value i is field i % (32/bits) of word i // (32/bits), so a
row may start inside a word (SPEC A45); the last word is filled up with zero codes. The stored tensor is 1-D int32. On a
little-endian host, the only kind that we run on, a word is its four bytes in order, so packing is done on bytes.
Widths: 2, 4, 8, 16, 32. Six-bit fields would straddle words: they have fp6.py.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from narrowgate.packing.layout import Layout, Shape

_WIDTHS = (2, 4, 8, 16, 32)


def storage_shape(shape: Shape, bits: int) -> Shape:
    """[words]: one word for every 32/bits values, the last one filled up."""
    return (-(-prod(shape) * bits // 32),)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes of any shape -> int32 [words]."""
    flat = codes.reshape(-1)
    per_word = 32 // bits
    missing = -flat.numel() % per_word
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    if bits == 32:
        return flat.clone()
    if bits == 16:
        return flat.to(torch.int16).view(torch.int32)
    if bits == 4:
        flat = flat[0::2] | (flat[1::2] << 4)
    elif bits == 2:
        flat = flat[0::4] | (flat[1::4] << 2) | (flat[2::4] << 4) | (flat[3::4] << 6)
    return flat.clone().view(torch.int32) if bits == 8 else flat.view(torch.int32)


def unpack_rows(data: Tensor, bits: int, shape: Shape, start: int, stop: int) -> Tensor:
    """Codes [stop - start, K] of the given rows, wherever in a word they start."""
    width = shape[-1]
    per_word = 32 // bits
    first, last = start * width, stop * width
    words = data[first // per_word : -(-last // per_word)]
    fields = _fields(words, bits)
    begin = first % per_word
    return fields[begin : begin + last - first].view(stop - start, width)


def look_up_nibbles(data: Tensor, table: Tensor, first: int, last: int) -> Tensor:
    """table[code] for the 4-bit fields [first, last), float32: two values a look-up, three times as fast as one by one.

    table: float32 [16]. A pair of float32 travels as one int64, so that no arithmetic can touch its bits.
    """
    octets = data.view(torch.uint8)[first // 2 : -(-last // 2)]
    pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], dim=-1).view(torch.int64).view(-1)
    values = pairs.index_select(0, octets.to(torch.int32)).view(torch.float32)
    return values[first % 2 : first % 2 + last - first]


def _view_rows(data: Tensor, bits: int, shape: Shape, start: int, stop: int) -> Tensor | None:
    per_word, width, total = 32 // bits, shape[-1], prod(shape)
    first, last = start * width, stop * width
    if first % per_word or (last % per_word and last != total):
        return None  # a word at the edge also holds a neighbour's codes
    return data[first // per_word : -(-last // per_word)]


def _fields(words: Tensor, bits: int) -> Tensor:
    """Every field of 1-D int32 words, in order."""
    if bits == 32:
        return words
    if bits == 16:
        return words.view(torch.int16).to(torch.int32) & 0xFFFF
    octets = words.view(torch.uint8)
    if bits == 8:
        return octets
    mask = (1 << bits) - 1
    return torch.stack([(octets >> shift) & mask for shift in range(0, 8, bits)], dim=-1).view(-1)


def _refusal(shape: Shape, bits: int) -> str | None:
    return None if bits in _WIDTHS else f"words@1 holds fields of 2, 4, 8, 16 or 32 bits, got {bits}"


LAYOUT = Layout(
    name="words@1",
    pack=pack,
    unpack_rows=unpack_rows,
    storage_shape=storage_shape,
    storage_dtype=lambda bits: torch.int32,
    refusal=_refusal,
    view_rows=_view_rows,
    appendable=True,
)
