"""`fp6_bytes@1`: four 6-bit codes in three bytes, and the other forms in which FP6 codes travel (SPEC B10-B16).

Four codes make a little-endian 24-bit lane c0 | c1<<6 | c2<<12 | c3<<18. The rows keep their shape: [..., K] codes are
[..., 3K/4] bytes, so K % 4 must be 0. Also here: one code a byte ("containers"), and both forms as the 64-bit integers
that a kernel moves. torch has no unsigned 64-bit arithmetic, so those are int64 bit patterns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.errors import InputError
from narrowgate.packing.layout import Layout, Shape, as_codes, row_major, view_row_major


def _pack_lanes(codes: Tensor) -> Tensor:
    c0, c1, c2, c3 = codes.unflatten(-1, (-1, 4)).unbind(-1)
    lanes = torch.stack([c0 | (c1 << 6), (c1 >> 2) | (c2 << 4), (c2 >> 4) | (c3 << 2)], dim=-1)
    return lanes.flatten(-2)


def _unpack_lanes(packed: Tensor) -> Tensor:
    b0, b1, b2 = packed.unflatten(-1, (-1, 3)).unbind(-1)
    codes = torch.stack([b0, (b0 >> 6) | (b1 << 2), (b1 >> 4) | (b2 << 4), b2 >> 2], dim=-1)
    return codes.flatten(-2) & 0x3F


def pack_fp6(codes: Tensor) -> Tensor:
    """Codes [..., N] (any integer dtype, masked to 6 bits) -> uint8 [..., 3N/4].

    Raises InputError (a ValueError) if N % 4. Source: SPEC B10, B11.

    >>> pack_fp6(torch.tensor([5, 10, 21, 63])).tolist()
    [133, 82, 253]
    """
    if codes.shape[-1] % 4:
        raise InputError(f"pack_fp6: last dim must be divisible by 4, got {codes.shape[-1]}")
    return _pack_lanes(as_codes(codes, 6, "pack_fp6"))


def unpack_fp6(packed: Tensor, num_fp6: int) -> Tensor:
    """uint8 [..., 3N/4] -> codes uint8 [..., N], where N is `num_fp6`: the inverse of `pack_fp6` (SPEC B12).

    >>> unpack_fp6(torch.tensor([133, 82, 253], dtype=torch.uint8), 4).tolist()
    [5, 10, 21, 63]
    """
    return _unpack(packed, num_fp6, "unpack_fp6")


def expand_fp6(packed: Tensor, num_fp6: int) -> Tensor:
    """uint8 [..., 3N/4] -> byte containers uint8 [..., N]: the code in bits 5..0, bits 7 and 6 zero (SPEC B13)."""
    return _unpack(packed, num_fp6, "expand_fp6")


def _unpack(packed: Tensor, num_fp6: int, who: str) -> Tensor:
    if packed.dtype != torch.uint8:
        raise InputError(f"{who}: expected packed uint8 bytes, got {packed.dtype}")
    if num_fp6 % 4:
        raise InputError(f"{who}: num_fp6 must be divisible by 4, got {num_fp6}")
    if packed.shape[-1] != 3 * num_fp6 // 4:
        raise InputError(f"{who}: packed last dim {packed.shape[-1]} != 3*num_fp6/4 ({3 * num_fp6 // 4})")
    return _unpack_lanes(packed)


def pack_fp6_grouped(codes: Tensor) -> Tensor:
    """Codes [G, R, C] -> uint8 [R, 3C/4, G], the group last and each group's bytes contiguous (SPEC B16).

    The result is a permuted view of [G, R, 3C/4] storage. Raises InputError (a ValueError) if C % 4.
    """
    if codes.dim() != 3:
        raise InputError(f"pack_fp6_grouped: expected codes [G, R, C], got shape {list(codes.shape)}")
    if codes.shape[-1] % 4:
        raise InputError(f"pack_fp6_grouped: cols must be divisible by 4 for FP6 packing, got {codes.shape[-1]}")
    return _pack_lanes(as_codes(codes, 6, "pack_fp6_grouped")).permute(1, 2, 0)


def pack_fp6_u64(codes: Tensor) -> Tensor:
    """Codes [..., 32] -> int64 [..., 3]: the 24 packed bytes as three little-endian 64-bit lanes (SPEC B14)."""
    _check_last(codes, 32, "pack_fp6_u64")
    return _pack_lanes(as_codes(codes, 6, "pack_fp6_u64")).view(torch.int64)


def containers_to_u64(codes: Tensor) -> Tensor:
    """Codes [..., 32] -> int64 [..., 4]: one whole byte a code, unmasked, since E4M3 codes are full bytes (SPEC B14)."""
    _check_last(codes, 32, "containers_to_u64")
    return as_codes(codes, 8, "containers_to_u64").view(torch.int64)


def pack_container_u64(containers: Tensor) -> Tensor:
    """int64 of 8 byte containers -> int64 whose low 48 bits are the 6 packed bytes, little-endian (SPEC B15).

    Two lanes of four codes: code i moves from bit 8i to bit 6i. The arithmetic is 64 bits wide throughout (SPEC Z7).
    """
    if containers.dtype != torch.int64:
        raise InputError(f"pack_container_u64: expected int64 bit patterns, got {containers.dtype}")
    lanes = [((containers >> (8 * i)) & 0x3F) << (6 * i) for i in range(8)]
    return torch.stack(lanes, dim=-1).sum(-1)


def _check_last(codes: Tensor, extent: int, who: str) -> None:
    if codes.shape[-1:] != (extent,):
        raise InputError(f"{who}: expected codes [..., {extent}], got shape {list(codes.shape)}")


def _storage_shape(shape: Shape, bits: int) -> Shape:
    return (*shape[:-1], 3 * shape[-1] // 4)


def _unpack_rows(data: Tensor, bits: int, shape: Shape, start: int, stop: int) -> Tensor:
    return _unpack_lanes(row_major(data, shape)[start:stop])


def _refusal(shape: Shape, bits: int) -> str | None:
    if bits != 6:
        return f"fp6_bytes@1 holds 6-bit codes, got {bits}"
    return f"last dim must be divisible by 4, got {shape[-1]}" if shape[-1] % 4 else None


LAYOUT = Layout(
    name="fp6_bytes@1",
    pack=lambda codes, bits: _pack_lanes(codes),
    unpack_rows=_unpack_rows,
    storage_shape=_storage_shape,
    storage_dtype=lambda bits: torch.uint8,
    refusal=_refusal,
    view_rows=view_row_major,
    appendable=True,
)
