"""Products under every way that scales, codebooks and codes may be stored, and the known failures of other products (SPEC A32-A35,
A14, A45, F12, F14, F27, F28, F31, F34, F39, F41, F42)."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from narrowgate.conformance.case import Case, Rival
from narrowgate.conformance.compare import Comparer, bits, close
from narrowgate.packing import PackedTensor, Scale, pack, swizzle_128x4

E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
BITS = {
    "float32": (torch.float32, torch.int32), "float16": (torch.float16, torch.int16), "bfloat16": (torch.bfloat16, torch.int16),
    "float8_e4m3fn": (torch.float8_e4m3fn, torch.uint8), "float8_e5m2": (torch.float8_e5m2, torch.uint8),
    "float8_e8m0fnu": (torch.float8_e8m0fnu, torch.uint8),
}  # fmt: skip


def count(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def as_stored(s: Tensor, element: str, block: tuple[int, ...], layout: str = "rows@1") -> Scale:
    dtype, view = BITS[element]
    return Scale.from_codes(s.float().to(dtype).view(view), element, block, layout)


def case(
    op: str, name: str, x: Any, w: Any, y: Tensor, rivals: dict[str, Tensor], *spec: str, compare: Comparer | None = None,
    **options: Any,
) -> Case:  # fmt: skip
    inputs = {"a": x, "b": w, **options} if op == "matmul" else {"x": x, "w": w, **options}
    shown = tuple(Rival(rival, lambda v=v, **_: {"y": v}) for rival, v in rivals.items())
    return Case(op, name, lambda g: dict(inputs), lambda **_: {"y": y}, compare or close(abs=1e-3), shown, spec=spec)


def scale_type(element: str, layout: str, side: str) -> Case:
    """Distinct scales of one stored type over blocks of 8, five to a row, so that a row of scales starts inside a word."""
    values = 2.0 ** (count(7, 5) % 5 - 2) if element == "float8_e8m0fnu" else 0.25 * (1 + count(7, 5) % 7)
    v = (5 * count(7, 40) ** 2 + 3 * count(7, 40)) % 256 - 128
    x = (count(40, 3) % 7 - 3).float()
    right = v.double() * values.double().repeat_interleave(8, 1)
    rivals = {"scales rolled": v.double() * values.double().roll(1, 1).repeat_interleave(8, 1),
              "one scale": v.double() * float(values[0, 0]),
              "rows of scales padded to words": v.double() * padded(values, element).repeat_interleave(8, 1)}  # fmt: skip
    if layout != "words@1" or element == "float32":
        del rivals["rows of scales padded to words"]
    if side == "left":
        w = pack(v, "int8", scales=(as_stored(values, element, (1, 8), layout),))
        made = {name: r @ x.double() for name, r in rivals.items()}
        return case(
            "matmul", f"{element} scales, {layout}, left", w, x, right @ x.double(), made, *_item(element), "A23", "A42"
        )
    w = pack(v.T, "int8", scales=(as_stored(values.T.contiguous(), element, (8, 1), layout),))
    made = {name: x.T.double() @ r.T for name, r in rivals.items() if not name.startswith("rows")}
    return case(
        "matmul",
        f"{element} scales, {layout}, right",
        x.T.contiguous(),
        w,
        x.T.double() @ right.T,
        made,
        *_item(element),
        "A43",
    )


def _item(element: str) -> tuple[str, ...]:
    item = {"float8_e8m0fnu": "A32", "float16": "A33", "float32": "A34", "float8_e4m3fn": "A35"}.get(element)
    return (item, "A45") if item else ("A45",)


def padded(values: Tensor, element: str) -> Tensor:
    """What a reader sees who lets every row of scales start in a word of its own."""
    per = 32 // (8 * BITS[element][0].itemsize)
    flat, rows, blocks = values.double().reshape(-1), *values.shape
    place = torch.arange(rows)[:, None] * (-(-blocks // per) * per) + torch.arange(blocks)
    return flat[place.clamp(max=len(flat) - 1)]


def codebook(width: int) -> Case:
    """Indices of any width in a product; above 127 they stay unsigned."""
    index = ((25743 if width == 16 else 37) * count(5, 48) + 3) % 2**width
    table = ((torch.arange(2**width) - 2 ** (width - 1) + 0.5) / 2 ** (width - 3)).float()
    s = (count(5, 3) + 1) / 4
    w = pack(index, f"index{width}", codebook=table, scales=(as_stored(s, "float32", (1, 16)),))
    x = (count(48, 3) % 7 - 3).float().T.contiguous()
    decode = lambda i: table.double()[i] * s.double().repeat_interleave(16, 1)  # noqa: E731
    signed = torch.where(index >= 2 ** (width - 1), index - 2**width, index).clamp(min=0)
    rivals = {"signed index": x.double() @ decode(signed).T, "high field first": x.double() @ decode(index.flip(1)).T}
    return case("linear", f"index{width} codebook", x, w, x.double() @ decode(index).T, rivals, "A14")


def containers() -> Case:
    """One code a byte; the bits above the field mean nothing."""
    v = count(5, 37) * 11 % 64
    table = [i / 16 for i in range(8)] + [2.0**e * (1 + m / 4) for e in range(-1, 5) for m in range(4)]
    values = torch.tensor(table + [-m for m in table], dtype=torch.float64)[v]
    w = pack(v, "float6_e3m2fn", layout="bytes@1")
    w = replace(w, data=w.data | (count(5, 37) % 4 * 64).to(torch.uint8))
    x = (count(3, 37) % 7 - 3).float()
    rolled = values * (1 + count(5, 37) % 4)
    return case(
        "linear", "byte containers", x, w, x.double() @ values.T, {"upper bits read": x.double() @ rolled.T}, "B5", "B13"
    )


@functools.cache
def wide_swizzled() -> tuple[PackedTensor, Tensor, Tensor]:
    """[130, 2880] of FP4 under swizzled bytes, 90 blocks padded to 92 and 130 rows to 256, the padding all 0xFF; its values."""
    codes = (count(130, 2880) * 7 + count(130, 2880) // 16) % 16
    byte = 120 + (count(130, 90) * 5 + count(130, 90) // 90) % 13
    scale = Scale.from_codes(byte, "float8_e8m0fnu", (1, 32), "swizzle_128x4@1")
    marks = swizzle_128x4(torch.ones(130, 90, dtype=torch.uint8))
    poisoned = torch.where(marks == 0, 255, scale.data).to(torch.uint8)
    w = pack(codes, "float4_e2m1fn", scales=(replace(scale, data=poisoned),))
    return w, E2M1[codes] * torch.exp2(byte.double() - 127).repeat_interleave(32, 1), byte


def swizzled(op: str) -> Case:
    """Padding bytes of a swizzled scale are no data (F27)."""
    w, values, byte = wide_swizzled()
    plain = torch.exp2(w.scales[0].data[: 130 * 90].view(130, 90).double() - 127).nan_to_num(1.0).clamp(max=4.0)
    codes = values / torch.exp2(byte.double() - 127).repeat_interleave(32, 1)
    misread = codes * plain.repeat_interleave(32, 1)
    if op == "dequantize":
        rivals = (Rival("read as row-major", lambda **_: {"y": misread.float()}),)
        return Case(
            op, "swizzled scales, poisoned padding", lambda g: {"w": w}, lambda **_: {"y": values.float()}, bits(), rivals,
            spec=("F27", "R13"),
        )  # fmt: skip
    x = (count(2, 2880) % 7 - 3).float()
    return case(
        op, "swizzled scales, poisoned padding", x, w, x.double() @ values.T, {"read as row-major": x.double() @ misread.T},
        "F27", "R13", compare=close(abs=1e-2),
    )  # fmt: skip


def many_rows(k: int, full: bool) -> Case:
    """N = 12448, no multiple of a tile of 128: the last rows need no scale beyond the end (F28)."""
    n = 12448

    @functools.cache
    def drawn() -> tuple[PackedTensor, Tensor, Tensor]:
        codes = (count(n, k) * 7 + count(n, k) // 16) % 16
        byte = 122 + (count(n, k // 32) * 5 + count(n, k // 32) // 7) % 11
        w = pack(codes, "float4_e2m1fn", scales=(Scale.from_codes(byte, "float8_e8m0fnu", (1, 32)),))
        values = E2M1[codes] * torch.exp2(byte.double() - 127).repeat_interleave(32, 1)
        return w, values, (count(1, k) % 7 - 3).float()

    def oracle(**_: Any) -> dict[str, Tensor]:
        return {"y": drawn()[2].double() @ drawn()[1].T}

    def rival(**_: Any) -> dict[str, Tensor]:
        y = oracle()["y"].clone()
        y[:, n // 128 * 128 :] = y[:, n // 128 * 128 :].roll(1, 1)
        return {"y": y}

    rivals = (Rival("the last tile under its neighbours' scales", rival),)
    return Case(
        "linear", f"N {n}, K {k}", lambda g: {"x": drawn()[2], "w": drawn()[0]}, oracle, close(abs=1e-2), rivals,
        spec=("F28",), full=full,
    )  # fmt: skip


def small_global() -> Case:
    """448 * 6 * 64 overflows float16 before the global 1e-5 makes it 1.72032: sums and scales are float32 (F12)."""
    block = Scale.from_codes(torch.full((3, 4), 0x7E), "float8_e4m3fn", (1, 16))
    outer = as_stored(torch.tensor([[1e-5]]), "float32", (3, 64))
    w = pack(torch.full((3, 64), 7), "float4_e2m1fn", scales=(block, outer))
    y = torch.full((2, 3), 1.72032).half()
    rivals = {"float16 before the global scale": torch.full((2, 3), torch.inf).half()}
    x = torch.ones(2, 64)
    return case(
        "linear", "large blocks, small global", x, w, y, rivals, "F12", compare=close(rel=1e-3), out_dtype=torch.float16
    )


def tiny_blocks() -> Case:
    """Blocks under byte 0, some of zero codes: values near 2^-127, never 0 / 0 (F14)."""
    codes = count(4, 64) % 16
    codes[:, 32:] = 0
    smallest = Scale.from_codes(torch.zeros(4, 2, dtype=torch.uint8), "float8_e8m0fnu", (1, 32))
    w = pack(codes, "float4_e2m1fn", scales=(smallest,))
    x = (count(3, 64) % 7 + 1).float() * 2.0**120
    y = x.double() @ (E2M1[codes] * 2.0**-127).T
    rivals = {"0 / 0": torch.full((3, 4), torch.nan, dtype=torch.float64), "flushed to zero": torch.zeros_like(y)}
    return case("linear", "blocks under byte 0", x, w, y, rivals, "F14", compare=close(abs=1e-6, rel=1e-4))


def dtypes(scale: str, x_dtype: torch.dtype, out_dtype: torch.dtype) -> Case:
    """Scales and activations of any two types; the output comes in the dtype asked for, rounded once (F41, F42)."""
    v, s = (count(5, 64) * 7 + count(5, 64) // 9) % 16 - 8, (count(5, 2) % 3 + 1) / 4
    w = pack(v, "int4", scales=(as_stored(s, scale, (1, 32)),))
    x = ((count(3, 64) % 13 - 6) / 8).to(x_dtype)
    exact = x.double() @ (v.double() * s.double().repeat_interleave(32, 1)).T
    y = exact.float().to(out_dtype)
    rivals = {"scales rolled": x.double() @ (v.double() * s.double().roll(1, 1).repeat_interleave(32, 1)).T}
    if out_dtype != torch.float32:
        other = torch.float16 if out_dtype == torch.bfloat16 else torch.bfloat16
        rivals["bits of the other 16-bit float"] = exact.to(other).view(torch.int16).view(out_dtype).double()
    short = (scale, *(str(d).removeprefix("torch.") for d in (x_dtype, out_dtype)))
    made = {name: r.float().to(out_dtype) for name, r in rivals.items()}
    return case(
        "linear", "scales {}, x {}, out {}".format(*short), x, w, y, made, "F41", "F42", compare=bits(), out_dtype=out_dtype
    )


def short_tail(k: int, group: int) -> Case:
    """K that the group does not divide: the last block of each row is short (F34)."""
    v, s = (count(3, k) * 5 + count(3, k) // 11) % 16 - 8, (count(3, -(-k // group)) % 9 + 1) / 8
    w = pack(v, "int4", scales=(as_stored(s, "bfloat16", (1, group)),))
    x = (count(2, k) % 3 - 1).float()
    spread = s.double().repeat_interleave(group, 1)[:, :k]
    flat = s.double().reshape(-1).repeat_interleave(group)[: 3 * k].view(3, k)
    rivals = {"blocks run over the flat values": x.double() @ (v.double() * flat).T}
    return case("linear", f"K {k} in groups of {group}", x, w, x.double() @ (v.double() * spread).T, rivals, "F34")


def experts() -> Case:
    """A stack [3, 6, 64] of packed experts (F31)."""
    v = (count(3, 6, 64) * 7 + count(3, 6, 64) // 13) % 16 - 8
    s = (count(3, 6, 2) % 7 + 1) / 4
    w = pack(v, "int4", scales=(as_stored(s, "bfloat16", (1, 1, 32)),))
    values = v.double() * s.double().repeat_interleave(32, 2)
    x, sizes = (count(5, 64) % 7 - 3).float(), torch.tensor([2, 0, 3])
    y = torch.cat([x[:2].double() @ values[0].T, x[2:].double() @ values[2].T])
    rivals = {"experts in order of use": torch.cat([x[:2].double() @ values[0].T, x[2:].double() @ values[1].T])}
    return case("grouped_linear", "a stack of three", x, w, y, rivals, "F31", group_sizes=sizes)


def no_rows() -> list[Case]:
    """No row, and groups of no rows; the calls after them are the other cases (F39)."""
    w = pack(count(5, 64) % 16, "int4")
    stack = pack(count(3, 5, 64) % 16, "int4")
    none = torch.zeros(3, dtype=torch.int64)
    return [
        case("linear", "M=0, packed", torch.ones(0, 64), w, torch.ones(0, 5), {}, "F39"),
        case("matmul", "M=0, packed", torch.ones(0, 5), w, torch.ones(0, 64), {}, "F39"),
        case("grouped_linear", "no token", torch.ones(0, 64), stack, torch.ones(0, 5), {}, "F39", group_sizes=none),
        case("grouped_linear", "all experts empty", torch.ones(2, 64), stack, torch.zeros(2, 5), {}, "F39", group_sizes=none),
    ]


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CASES: list[Case] = [
    *(scale_type(e, where, side) for e in BITS for where in ("words@1", "rows@1") for side in ("left", "right")),
    *(codebook(width) for width in (2, 4, 8, 16)),
    containers(), swizzled("linear"), many_rows(64, False), many_rows(4096, True), small_global(), tiny_blocks(),
    *(dtypes(s, x, o) for s in ("float32", "bfloat16", "float16") for x in (F32, BF16, F16) for o in (F32, BF16, F16)),
    short_tail(10944, 128), short_tail(100, 32), experts(), *no_rows(),
]  # fmt: skip
