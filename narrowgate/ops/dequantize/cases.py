"""What dequantize must do (SPEC A7-A16, A45, F14-F16): every code of every element, every rounding in order.

The expected values come from numpy, torch's own float types and written tables, never from narrowgate's decoder."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from narrowgate.conformance.case import Case, Rival
from narrowgate.conformance.compare import bits
from narrowgate.ops.linear.cases_stored import swizzled
from narrowgate.packing import PackedTensor, Scale, pack

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M3 = [i / 8 for i in range(16)] + [2 + i / 4 for i in range(8)] + [4 + i / 2 for i in range(8)]
E3M2 = [i / 16 for i in range(8)] + [2.0**e * (1 + m / 4) for e in range(-1, 5) for m in range(4)]


def both_signs(magnitudes: list[float]) -> Tensor:
    return torch.tensor(magnitudes + [-m for m in magnitudes], dtype=torch.float32)


def case(
    name: str, w: PackedTensor, expected: Tensor, spec: str, rivals: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> Case:
    def reading(values: Tensor) -> Callable[..., dict[str, Tensor]]:
        return lambda **_: {"values": values}

    shown = tuple(Rival(rival, reading(values)) for rival, values in rivals.items())
    return Case("dequantize", name, lambda g: {"w": w, "dtype": dtype}, reading(expected), bits(), shown, spec=(spec,))


def signed(width: int, rows: int, columns: int) -> Case:
    """Two's complement, the lowest value included, negatives and positives both (Z2)."""
    codes = torch.arange(rows * columns).view(rows, columns) % 2**width
    value = torch.where(codes >= 2 ** (width - 1), codes - 2**width, codes).float()
    rivals = {
        "zero-extended": codes.float(),
        "sign always set": (codes | -(2 ** (width - 1))).float(),
        "high field first": value.flip(1),
    }
    return case(f"int{width}", pack(codes, f"int{width}"), value, "A7", rivals)


def floats(element: str, table: Tensor, layout: str, rivals: dict[str, Tensor]) -> Case:
    codes = torch.arange(len(table)).view(2, -1)
    shaped = {name: values.view(2, -1) for name, values in rivals.items()}
    return case(element, pack(codes, element, layout=layout), table.view(2, -1), "A10" if "8" in element else "A8", shaped)


def native(element: str, dtype: torch.dtype) -> Case:
    """All 256 codes, NaN, infinities and subnormals too, held to torch's own type."""
    codes = torch.arange(256).view(4, 64)
    value = codes.to(torch.uint8).view(dtype).float()
    flushed = torch.where(value.abs() < 2.0**-6, torch.zeros_like(value), value)
    return case(element, pack(codes, element), value, "A10", {"subnormals flushed": flushed})


def exponents() -> Case:
    """E8M0 code 0 is 2^-127, a subnormal, and 255 is NaN; 16-bit output keeps codes 103 to 112 (F14, F15)."""
    table = torch.tensor([2.0 ** (e - 127) for e in range(255)] + [float("nan")], dtype=torch.float64).float()
    scale = Scale.from_codes(torch.arange(256).view(256, 1), "float8_e8m0fnu", (1, 2))
    w = pack(torch.full((256, 2), 2), "float4_e2m1fn", scales=(scale,))
    values = table[:, None].expand(256, 2)
    code0 = torch.where(values < 2.0**-126, torch.zeros_like(values), values)
    return case("exponent bytes", w, values.contiguous(), "F14", {"code 0 as zero": code0})


def halves() -> Case:
    table = torch.tensor([2.0 ** (e - 127) for e in range(103, 143)], dtype=torch.float64).float()
    scale = Scale.from_codes(torch.arange(103, 143).view(40, 1), "float8_e8m0fnu", (1, 3))
    w = pack(torch.full((40, 3), 2), "float4_e2m1fn", scales=(scale,))
    flushed = torch.where(table < 2.0**-14, torch.zeros_like(table), table)
    wrong = {"scale through a float16 that flushes": flushed[:, None].expand(40, 3).half()}
    return case("float16 from small exponents", w, table[:, None].expand(40, 3).half(), "F15", wrong, torch.float16)


def scaled() -> Case:
    """[8, 32] under blocks of 16 columns (A13)."""
    v = torch.arange(256).view(8, 32) - 128
    s = (torch.arange(16).view(8, 2) + 1) / 4
    w = pack(v, "int8", scales=(Scale.from_codes(s.view(torch.int32), "float32", (1, 16)),))
    right = v.float() * s.repeat_interleave(16, 1)
    rivals = {"scales modulo the blocks": v.float() * s.repeat(1, 16), "one scale": v.float() * 0.25}
    return case("scaled copy", w, right, "A13", rivals)


def codebook(width: int) -> Case:
    """Indices are unsigned; table times scale is one rounding (A14)."""
    index = (37 * torch.arange(256).view(8, 32) + 3) % 2**width
    table = (torch.arange(2**width) - 127.5) / 3
    s = (torch.arange(16).view(8, 2) + 1) / 4
    w = pack(index, f"index{width}", codebook=table, scales=(Scale.from_codes(s.view(torch.int32), "float32", (1, 16)),))
    right = table[index] * s.repeat_interleave(16, 1)
    rivals = {"table in float16": table.half().float()[index] * s.repeat_interleave(16, 1)}
    if width == 8:
        as_signed = torch.where(index > 127, index - 256, index).clamp(0)
        rivals["signed index"] = table[as_signed] * s.repeat_interleave(16, 1)
    return case(f"index{width}", w, right, "A14", rivals)


def wide_index() -> Case:
    """16-bit fields that use the whole range, in rows that start inside a word (Z19, A45)."""
    index = (25743 * torch.arange(3 * 67).view(3, 67) + 3) % 65536
    table = (torch.arange(65536) - 32767.5) / 3
    w = pack(index, "index16", codebook=table)
    return case("index16, odd width", w, table[index], "A16", {"signed index": table[(index % 32768)]})


def rounded_scales(element: str, dtype: torch.dtype, shape: tuple[int, int]) -> Case:
    """Rows of scales that start inside a word (A45): [3, 3] float16 and [3, 5] E4M3."""
    rows, blocks = shape
    s = ((torch.arange(rows * blocks).view(shape) + 1) / 2).to(dtype)
    view = torch.int16 if dtype == torch.float16 else torch.uint8
    v = (torch.arange(rows * blocks * 4).view(rows, blocks * 4) * 3) % 16 - 8
    w = pack(v, "int4", scales=(Scale.from_codes(s.view(view), element, (1, 4), "words@1"),))
    right = v.float() * s.float().repeat_interleave(4, 1)
    return case(
        f"{element} scales {list(shape)} in words",
        w,
        right,
        "A45",
        {"rolled": v.float() * s.float().roll(1, 1).repeat_interleave(4, 1)},
    )


def levels() -> Case:
    """Zero point, two scales and an offset, each one rounding, in order; thirds make every rounding visible."""
    v = (torch.arange(5 * 24).view(5, 24) * 7) % 16
    s, g = ((torch.arange(15).view(5, 3) + 1) / 3).float(), torch.tensor([[1 / 7]])
    o = ((torch.arange(15).view(5, 3) - 7) / 11).float()
    f32 = lambda t, block: Scale.from_codes(t.view(torch.int32), "float32", block)  # noqa: E731
    zero = Scale.from_codes(torch.full((1, 1), 8), "uint8", (5, 24))
    w = pack(v, "uint4", scales=(f32(s, (1, 8)), f32(g, (5, 24))), zero_points=zero, offset=(f32(o, (1, 8)),))
    wide = lambda t: t.repeat_interleave(8, 1)  # noqa: E731
    q = v.float() - 8
    right = (q * wide(s)) * g + wide(o)
    rivals = {
        "outer scale first": (q * g) * wide(s) + wide(o), "scales multiplied first": q * (wide(s) * g) + wide(o),
        "fused add": (((q * wide(s)).double() * g.double()) + wide(o).double()).float(),
        "zero point after the scale": (v.float() * wide(s) * g + wide(o)) - 8, "rounded to bfloat16": right.bfloat16().float(),
    }  # fmt: skip
    return case("zero point, two levels, offset", w, right, "A5", rivals)


def once(dtype: torch.dtype) -> Case:
    """Thirds, and half a step more than a 16-bit value: one rounding from float32, to nearest even."""
    v = (torch.arange(6 * 20).view(6, 20) * 37) % 256 - 128
    s = torch.tensor([[1 / 3], [1 + 2.0**-11], [1 + 2.0**-8 + 2.0**-20], [0.7], [2.0**-9 / 3], [11 / 7]])
    w = pack(v, "int8", scales=(Scale.from_codes(s.view(torch.int32), "float32", (1, 20)),))
    exact = v.float() * s
    other = torch.bfloat16 if dtype == torch.float16 else torch.float16
    wrong = {
        "through another 16-bit type": exact.to(other).to(dtype), "scale rounded first": (v.float() * s.to(dtype).float()).to(dtype),
        "truncated": (exact.view(torch.int32) & (-1 << (13 if dtype == torch.float16 else 16))).view(torch.float32).to(dtype),
    }  # fmt: skip
    return case(f"rounded once to {str(dtype).removeprefix('torch.')}", w, exact.to(dtype), "F41", wrong, dtype)


def short_block() -> Case:
    """K = 10 under blocks of 4: the last block of a row is short (F34)."""
    v = torch.arange(30).view(3, 10) % 16 - 8
    s = (torch.arange(9).view(3, 3) + 1) / 4
    w = pack(v, "int4", scales=(Scale.from_codes(s.view(torch.int32), "float32", (1, 4)),))
    right = v.float() * s.repeat_interleave(4, 1)[:, :10]
    flat = s.reshape(-1).repeat_interleave(4)[:30].view(3, 10)
    return case("short last block", w, right, "F34", {"blocks run over the flat values": v.float() * flat})


def far_below() -> Case:
    """A group of scale 2^-17 beside one of 1 survives, and byte 255 is NaN: there is no way through a coarser 8-bit block (F21)."""
    codes = (torch.arange(3 * 64).view(3, 64) * 5 + 1) % 16
    byte = torch.tensor([[127, 110], [110, 127], [255, 110]])
    power = torch.where(byte == 255, torch.nan, torch.exp2(byte.double() - 127)).repeat_interleave(32, 1)
    table = both_signs(E2M1).double()[codes]
    w = pack(codes, "float4_e2m1fn", scales=(Scale.from_codes(byte, "float8_e8m0fnu", (1, 32)),))
    largest = 2.0 ** (127 - 127)
    coarse = ((table * power).nan_to_num(0.0) / largest).float().to(torch.float8_e4m3fn).float() * largest
    return case(
        "groups far below the largest", w, (table * power).float(), "F21", {"through E4M3 under the tile's scale": coarse}
    )


def stack(layout: str, element: str) -> Case:
    """A stack [3, 6, 64] of experts, packed and read back (F31)."""
    codes = (torch.arange(3 * 6 * 64).view(3, 6, 64) * 11 + torch.arange(3 * 6 * 64).view(3, 6, 64) // 17) % 16
    table = torch.tensor([float(c) for c in range(16)]) if element == "uint4" else both_signs(E3M2)
    w = pack(codes, element, layout=layout)
    wrong = {"experts and rows swapped": table[codes].transpose(0, 1).reshape(3, 6, 64)}
    return case(f"[3, 6, 64] in {layout}", w, table[codes], "F31", wrong)


CASES: list[Case] = [
    signed(8, 8, 32), signed(4, 8, 32), signed(2, 4, 32), signed(4, 3, 37),
    floats("float4_e2m1fn", both_signs(E2M1), "words@1", {
        "sign-extended nibble": torch.tensor([*range(8), *range(-8, 0)], dtype=torch.float32),
    }),
    floats("float6_e2m3fn", both_signs(E2M3), "fp6_bytes@1", {"bias 3": both_signs(E2M3) / 4}),
    floats("float6_e3m2fn", both_signs(E3M2), "fp6_bytes@1", {"bias 1": both_signs(E3M2) * 4}),
    native("float8_e4m3fn", torch.float8_e4m3fn), native("float8_e5m2", torch.float8_e5m2),
    exponents(), halves(), scaled(), codebook(8), codebook(4), codebook(2), wide_index(),
    rounded_scales("float16", torch.float16, (3, 3)), rounded_scales("float8_e4m3fn", torch.float8_e4m3fn, (3, 5)),
    levels(), once(torch.float16), once(torch.bfloat16), short_block(), far_below(), swizzled("dequantize"),
    stack("words@1", "uint4"), stack("bytes@1", "uint4"), stack("fp6_bytes@1", "float6_e3m2fn"),
]  # fmt: skip
