"""ggml's blocks of 32 values, as GGUF files store them: to and from packed tensors that keep codes and scales apart.

A block is its scale first (float16 `d`, or one E8M0 byte for MXFP4), then the codes: 32 bytes for Q8_0, else 16 bytes whose
low nibbles are values 0..15 and whose high nibbles are values 16..31 ("split halves", not neighbours: F23). A row of K values
is K/32 blocks. Only the rearrangement is here; quantizing to these schemes is narrowgate.quantize's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgate.errors import InputError
from narrowgate.formats import codebook, element
from narrowgate.formats import scheme as find_scheme
from narrowgate.packing.build import pack
from narrowgate.packing.scale import Scale
from narrowgate.packing.tensor import PackedTensor

BLOCK = 32
BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "iq4_nl": 18, "mxfp4": 17}


def to_ggml_blocks(w: PackedTensor) -> Tensor:
    """The GGUF bytes of `w` (scheme q8_0, q4_0, iq4_nl or mxfp4): uint8 [..., K/32 * bytes of a block].

    Raises InputError for any other scheme, and for an mxfp4 tensor whose K is no multiple of 32.
    """
    name = w.scheme
    if name not in BLOCK_BYTES:
        raise InputError(f"to_ggml_blocks: expected one of {', '.join(BLOCK_BYTES)}, got {name or w.element}")
    _check_width("to_ggml_blocks", name, w.shape[-1])
    blocks = w.codes().reshape(*w.shape[:-1], w.shape[-1] // BLOCK, BLOCK)
    if w.element != "int8":
        blocks = blocks[..., :16] | (blocks[..., 16:] << 4)
    scale_bits = element(w.scales[0].element).bits
    codes = w.scales[0].codes(w.shape)
    scale = codes.to(torch.int16).unsqueeze(-1).view(torch.uint8) if scale_bits == 16 else codes.unsqueeze(-1)
    return torch.cat([scale, blocks], dim=-1).flatten(-2)


def from_ggml_blocks(data: Tensor, scheme: str, shape: Sequence[int], *, layout: str = "words@1") -> PackedTensor:
    """GGUF bytes (uint8, any shape, blocks in row-major order) -> a packed tensor of `shape` values; inverse of to_ggml_blocks.

    Raises InputError for an unknown scheme, K % 32, or a byte count that does not fit the shape.

    >>> w = from_ggml_blocks(torch.tensor([127] + [7 | 9 << 4] * 16, dtype=torch.uint8), "mxfp4", (1, 32))
    >>> w.codes()[0, 15:17].tolist()
    [7, 9]
    """
    if scheme not in BLOCK_BYTES:
        raise InputError(f"from_ggml_blocks: expected one of {', '.join(BLOCK_BYTES)}, got {scheme!r}")
    record = find_scheme(scheme)
    shape = tuple(int(extent) for extent in shape)
    _check_width("from_ggml_blocks", scheme, shape[-1])
    grid = (*shape[:-1], shape[-1] // BLOCK)
    expected = BLOCK_BYTES[scheme] * torch.Size(grid).numel()
    if data.dtype != torch.uint8 or data.numel() != expected:
        raise InputError(
            f"from_ggml_blocks: expected {expected} uint8 bytes for {scheme} {list(shape)}, got {data.numel()} {data.dtype}"
        )
    blocks = data.reshape(*grid, BLOCK_BYTES[scheme])
    head = element(record.scales[0].element).bits // 8
    stored, codes = blocks[..., :head].contiguous(), blocks[..., head:]
    if head == 2:
        stored = stored.view(torch.int16)
    if record.element != "int8":
        codes = torch.cat([codes & 15, codes >> 4], dim=-1)
    scale = Scale(stored.squeeze(-1), record.scales[0].element, record.scales[0].block(shape))
    zero = None
    if record.zero_point is not None:
        cell = torch.full(tuple(min(e, 1) for e in shape), record.zero_point, dtype=torch.uint8, device=data.device)
        zero = Scale(cell, "uint8", tuple(max(e, 1) for e in shape))
    table = None if record.codebook is None else codebook(record.codebook).to(data.device)
    return pack(
        codes.reshape(shape), record.element, scales=(scale,), zero_points=zero, codebook=table, layout=layout
    )  # fmt: skip


def _check_width(who: str, scheme: str, width: int) -> None:
    if width % BLOCK:
        raise InputError(f"{who}: {scheme} blocks need K divisible by {BLOCK}, got {width}")
