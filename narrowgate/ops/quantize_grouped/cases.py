"""What quantize_grouped must do (SPEC B16-B31, B36, B37): the specification's own bytes, row counts, both byte orders.

The oracle shares no code with the quantizer: it looks the nearest code up in a written table, packs four codes with integer
arithmetic and places every scale byte by the formula of SPEC B17."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from narrowgate.conformance.case import Case, Rival
from narrowgate.errors import InputError

MAGNITUDES = {
    "e3m2": [i / 16 for i in range(8)] + [2.0**e * (1 + m / 4) for e in range(-1, 5) for m in range(4)],
    "e2m3": [i / 8 for i in range(16)] + [2 + i / 4 for i in range(8)] + [4 + i / 2 for i in range(8)],
    "e4m3": [i / 512 for i in range(8)] + [2.0**e * (1 + m / 8) for e in range(-6, 9) for m in range(8)][:-1],
}
SIGN = {"e3m2": 32, "e2m3": 32, "e4m3": 128}
SCHEME = {"e3m2": "mxfp6_e3m2", "e2m3": "mxfp6_e2m3", "e4m3": "mxfp8_e4m3"}


def nearest(values: Tensor, fmt: str) -> Tensor:
    """The code of the nearest table entry, a tie to the even code, the sign kept, that of zero too."""
    table = torch.tensor(MAGNITUDES[fmt], dtype=torch.float64)
    size = values.double().abs().clamp(max=table[-1])
    above = torch.searchsorted(table, size).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    up, down = table[above] - size, size - table[below]
    code = torch.where(up < down, above, torch.where(down < up, below, torch.where(above % 2 == 0, above, below)))
    return code + torch.signbit(values) * SIGN[fmt]


def scale_bytes(amax: Tensor, gs: Tensor, fmt: str) -> Tensor:
    """ceil(log2(f32(f32(amax * gs) / max))) + 127 by the exact exponent, 0 for a zero block."""
    ratio = (amax * gs).double().div(MAGNITUDES[fmt][-1]).float()
    fraction, exponent = torch.frexp(ratio)  # ratio = fraction * 2^exponent, fraction in [.5, 1)
    power = exponent - (fraction == 0.5).int() + 127
    return torch.where(ratio > 0, power.clamp(1, 254), 0)


def pack_rows(codes: Tensor, fmt: str) -> Tensor:
    """[G, R, C] codes -> [R, bytes, G]."""
    if fmt == "e4m3":
        return codes.to(torch.uint8).permute(1, 2, 0)
    c = codes.long().unflatten(-1, (-1, 4))
    lane = c[..., 0] | c[..., 1] << 6 | c[..., 2] << 12 | c[..., 3] << 18
    octets = torch.stack([lane & 255, lane >> 8 & 255, lane >> 16], dim=-1)
    return octets.flatten(-2).to(torch.uint8).permute(1, 2, 0)


def placed(bytes_: Tensor) -> Tensor:
    """[G, R, blocks] scale bytes -> the 6-D view, byte by byte."""
    groups, rows, blocks = bytes_.shape
    tiles, columns = -(-rows // 128), -(-blocks // 4)
    flat = torch.zeros(groups, tiles * columns * 512, dtype=torch.uint8)
    r, b = torch.arange(rows)[:, None], torch.arange(blocks)
    offset = ((((r // 128) * columns + b // 4) * 32 + r % 32) * 4 + (r % 128) // 32) * 4 + b % 4
    flat[:, offset.reshape(-1)] = bytes_.reshape(groups, rows * blocks).to(torch.uint8)
    view = flat.view(groups, tiles, columns, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)
    return view.view(torch.float8_e8m0fnu)


def reading(x: Tensor, counts: Tensor, fmt: str, gs: Tensor, *, bf16_round: bool = False, wrong: str = "") -> dict[str, Tensor]:
    """The right result, or with `wrong` one of the plausible others."""
    groups, rows, width = x.shape
    counted = torch.arange(rows) < counts[:, None]
    x = torch.where(counted[..., None], x.float(), 1.0 if wrong == "rows" else 0.0)
    scale = gs.expand(groups).clone()
    if wrong == "first group":
        scale[:] = scale[0]
    blocks = x.view(groups, rows, width // 32, 32)
    amax = blocks.abs().amax(-1)
    byte = scale_bytes(amax, scale[:, None, None], fmt)
    if wrong == "floor":
        byte = (byte - 1).clamp(min=0)
    power = torch.where(byte == 0, 0.0, torch.ldexp(torch.ones_like(amax), 127 - byte))
    scaled = blocks * (power * scale[:, None, None])[..., None]
    if bf16_round:
        scaled = scaled.bfloat16().float()
    codes = torch.where(byte[..., None] == 0, 0, nearest(scaled, fmt)).view(groups, rows, width)
    packed = pack_rows(codes, fmt)
    if wrong == "groups first":
        packed = packed.permute(2, 0, 1).reshape(packed.shape)
    if wrong == "big-endian":
        packed = packed.unflatten(1, (-1, 3)).flip(2).flatten(1, 2)
    scales = placed(byte)
    if wrong == "row-major":
        plain = torch.zeros(scales.numel(), dtype=torch.uint8)
        plain[: byte.numel()] = byte.reshape(-1).to(torch.uint8)
        scales = plain.view(scales.shape).view(torch.float8_e8m0fnu)
    return {"codes": packed, "scales": scales}


WRONG = {
    "rows": "rows beyond quantized", "row-major": "scales row-major", "first group": "the first group's global scale for all",
    "floor": "exponent rounded down", "groups first": "groups first", "big-endian": "codes packed big-endian",
}  # fmt: skip


def case(
    name: str, fmt: str, x: Tensor, counts: list[int], gs: Tensor, wrong: tuple[str, ...], *spec: str, bf16_round: bool = False
) -> Case:
    count = torch.tensor(counts, dtype=torch.int32)
    rivals = [Rival(WRONG[w], lambda w=w, **_: reading(x, count, fmt, gs, wrong=w, bf16_round=bf16_round)) for w in wrong]
    if bf16_round:
        rivals.append(Rival("not rounded to bfloat16", lambda **_: reading(x, count, fmt, gs)))
    arguments = {"x": x, "row_counts": count, "scheme": SCHEME[fmt], "global_scale": gs, "bf16_round": bf16_round}
    return Case(
        "quantize_grouped", name, lambda g: dict(arguments),
        lambda **_: reading(x, count, fmt, gs, bf16_round=bf16_round), rivals=tuple(rivals), spec=spec,
    )  # fmt: skip


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=Generator().manual_seed(seed))


B31 = {
    "e3m2": (125, [60, 60, 59, 58, 58, 58, 57, 56, 56, 55, 54, 53, 52, 50, 48, 44,
                   0, 12, 16, 18, 20, 21, 22, 23, 24, 24, 25, 26, 26, 26, 27, 28]),
    "e2m3": (127, [*range(56, 48, -1), 48, 46, 44, 42, 40, 38, 36, 34, *range(0, 16, 2), *range(16, 24)]),
}  # fmt: skip
B31_BYTES = {"e3m2": [0x3C, 0xBF, 0xEB, 0xBA, 0x9E, 0xE3], "e2m3": [0xF8, 0x6D, 0xD7, 0xF4, 0x2C, 0xC7]}


def b31(fmt: str) -> Case:
    """x_i = i/4 - 4: the specification's codes and its first packed bytes."""
    x = (torch.arange(32) / 4 - 4.0).view(1, 1, 32)

    def expected(shift: int = 0) -> dict[str, Tensor]:
        byte, codes = B31[fmt]
        packed = pack_rows(torch.tensor(codes).view(1, 1, 32), fmt)
        assert packed.view(-1)[:6].tolist() == B31_BYTES[fmt]
        return {"codes": packed, "scales": placed(torch.tensor([[[byte + shift]]]))}

    arguments = {"x": x, "row_counts": torch.tensor([1]), "scheme": fmt, "global_scale": 1.0}
    rivals = (Rival("exponent rounded down", lambda **_: reading(x, torch.tensor([1]), fmt, torch.ones(1), wrong="floor")),)
    return Case(
        "quantize_grouped", f"{fmt}: i/4 - 4", lambda g: dict(arguments), lambda **_: expected(), rivals=rivals, spec=("B31",)
    )


def groups(fmt: str, dtype: torch.dtype) -> Case:
    """Full, empty and ragged groups over two tiles of rows and of columns, NaN and infinity beyond the counts."""
    counts = [130, 0, 33]
    x = noise(1, 3, 130, 160) * torch.exp2((torch.arange(3 * 130 * 5) % 37 - 18).float()).view(3, 130, 5, 1).expand(
        3, 130, 5, 32
    ).reshape(3, 130, 160)
    x[0, 7, 32:64] = 0.0
    for g, n in enumerate(counts):
        x[g, n:] = float("nan")
        x[g, n::2] = float("inf")
    wrong = ("rows", "row-major", "first group") if dtype == torch.float32 else ("floor", "groups first", "big-endian")
    short = str(dtype).removeprefix("torch.")
    spec = ("B16", "B17", "B18", "B20", "B21", "B24", "B25", "B36", "R12", "R13", "R17")
    return case(f"{fmt}: ragged groups, {short}", fmt, x.to(dtype), counts, torch.tensor([3.7, 1.0, 0.021]), wrong, *spec)


def strided() -> Case:
    """Rows of a wider buffer, whose other columns hold NaN."""
    wide = torch.full((2, 5, 101), float("nan"))
    wide[..., 3:99] = noise(2, 2, 5, 96)
    return case("e2m3: strided rows", "e2m3", wide[..., 3:99], [5, 4], torch.tensor([2.0]), ("rows",), "B24")


def rounded(fmt: str) -> Case:
    x = noise(3, 2, 9, 256)
    return case(f"{fmt}: through bfloat16", fmt, x, [9, 7], torch.tensor([5.3, 0.7]), (), "B26", bf16_round=True)


def nothing(name: str, shape: tuple[int, int, int], counts: list[int], gs: float) -> Case:
    """Nothing to quantize: zero codes and zero bytes, whatever x holds; gs 0 likewise (B28)."""
    x = noise(4, *shape) + 3
    rivals = ("rows",) if gs and shape[0] * shape[1] else ()
    return case(name, "e3m2", x, counts, torch.tensor([gs]), rivals, "B25", "B28", *(() if shape[1] else ("F39",)))


def fused(activation: str, fmt: str, dtype: torch.dtype) -> Case:
    """Fused and in two steps, by operators of the same implementation: the same bits."""
    width = 192 if activation == "silu_mul" else 96
    count, gs = torch.tensor([7, 0, 4]), torch.tensor([3.0, 1.0, 0.4])

    def inputs(g: Generator) -> dict[str, Any]:
        x = (torch.randn(3, 7, width, generator=g) * 3).to(dtype)
        x[2, 4:] = float("nan")
        return {"x": x, "row_counts": count, "scheme": SCHEME[fmt], "global_scale": gs, "activation": activation}

    def law(ops: Any, x: Tensor, activation: str, **rest: Any) -> dict[str, tuple[Tensor, Tensor]]:
        steps = ops.quantize_grouped(x=getattr(ops, activation)(x), activation=None, **rest)
        once = ops.quantize_grouped(x=x, activation=activation, **rest)
        return {name: (steps[i], once[i]) for i, name in enumerate(("codes", "scales"))}

    def unrounded(x: Tensor, activation: str | None, **_: Any) -> dict[str, Tensor]:
        if activation == "silu_mul":
            gate, up = x.double().chunk(2, -1)
            x = (gate / (1 + torch.exp(-gate)) * up).float()
        elif activation == "relu2":
            x = x.float().relu().square()
        return reading(x.float(), count, fmt, gs)

    def swapped(x: Tensor, activation: str | None, **_: Any) -> dict[str, Tensor]:
        if activation is not None:
            up, gate = (x.double(), x.double()) if activation == "relu2" else x.double().chunk(2, -1)
            x = (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)
        return reading(x.float(), count, fmt, gs)

    rivals = [Rival("gate and up swapped" if activation == "silu_mul" else "silu for relu", swapped)]
    if dtype != torch.float32:
        rivals.append(Rival("not rounded to x's dtype", unrounded))
    short = str(dtype).removeprefix("torch.")
    return Case(
        "quantize_grouped", f"{activation} into {fmt}, {short}", inputs, law=law, rivals=tuple(rivals), spec=("B27", "B29")
    )


def gated() -> Case:
    """Gates at which every exp gives the same silu: 0, and 40 and more. Then the bytes are the same everywhere."""
    gate = torch.tensor([0.0, 40.0, 57.0, 111.0]).repeat(2, 3, 16)
    up = noise(5, 2, 3, 64)
    x = torch.cat([gate, up], dim=-1).bfloat16()
    made = (x[..., :64].float() * x[..., 64:].float()).bfloat16()
    count, gs = torch.tensor([3, 2]), torch.tensor([1.3])
    arguments = {"x": x, "row_counts": count, "scheme": "mxfp8_e4m3", "global_scale": gs, "activation": "silu_mul"}
    product = (x[..., :64].float() * x[..., 64:].float()).float()
    other = x[..., :64].float() * (x[..., 64:].float() * torch.sigmoid(x[..., 64:].float()))
    rivals = (
        Rival("not rounded to x's dtype", lambda **_: reading(product, count, "e4m3", gs)),
        Rival("gate and up swapped", lambda **_: reading(other.bfloat16(), count, "e4m3", gs)),
    )
    oracle = lambda **_: reading(made, count, "e4m3", gs)  # noqa: E731
    return Case("quantize_grouped", "silu_mul of large gates", lambda g: dict(arguments), oracle, rivals=rivals, spec=("B27",))


def neighbours(fmt: str, m: int) -> Case:
    """A row's codes and bytes do not depend on how many rows there are."""

    def inputs(g: Generator) -> dict[str, Any]:
        x = torch.randn(1, 128, 64, generator=g)
        x[:, 64:] *= 4  # the largest value is none of the first rows'
        return {"x": x, "row_counts": torch.tensor([128]), "scheme": SCHEME[fmt], "global_scale": 1.0}

    def law(ops: Any, x: Tensor, row_counts: Tensor, **rest: Any) -> dict[str, tuple[Tensor, Tensor]]:
        all_, few = (ops.quantize_grouped(x=x[:, :n], row_counts=row_counts - 128 + n, **rest) for n in (128, m))
        rows = lambda s: s.contiguous().view(torch.uint8).permute(2, 1, 0, 4, 3, 5).reshape(128, 4)[:m]  # noqa: E731
        return {"codes": (all_[0][:m], few[0]), "scales": (rows(all_[1]), rows(few[1]))}

    def whole(x: Tensor, row_counts: Tensor, **_: Any) -> dict[str, Tensor]:
        return reading(x, row_counts, fmt, (448.0 / x.abs().amax()).reshape(1))

    rivals = (Rival("the global scale of the batch", whole),)
    return Case("quantize_grouped", f"{fmt}: {m} rows as among 128", inputs, law=law, rivals=rivals, spec=("B37",))


def refusals() -> list[Case]:
    good: dict[str, Any] = {
        "x": torch.ones(2, 3, 64), "row_counts": torch.tensor([3, 1]), "scheme": "mxfp6_e3m2", "global_scale": 1.0,
    }  # fmt: skip
    poisoned = torch.ones(2, 3, 64)
    poisoned[1, 0, 5] = float("nan")

    def refuse(name: str, message: str, cpu_only: bool = False, **change: Any) -> Case:
        arguments = {**good, **change}
        return Case(
            "quantize_grouped", f"refuses {name}", lambda g: dict(arguments), raises=(InputError, message), cpu_only=cpu_only,
            spec=("B24",),
        )  # fmt: skip

    return [
        refuse("33 columns", "cols must be divisible by 32, got 33", x=torch.ones(2, 3, 33)),
        refuse("half of 96 columns", "cols must be divisible by 32, got 48", x=torch.ones(2, 3, 96), activation="silu_mul"),
        refuse("an unknown scheme", "expected one of mxfp6_e3m2", scheme="e4m3fn"),
        refuse("an unknown activation", "expected activation", activation="gelu"),
        refuse("two axes", "expected x of shape [*, *, *]", x=torch.ones(3, 64)),
        refuse("counts of another length", "expected row_counts of shape [2]", row_counts=torch.tensor([1])),
        refuse("three global scales", "expected global_scale of 1 or 2 numbers", global_scale=torch.ones(3)),
        refuse("a count past the rows", "expected row_counts of 0..3", True, row_counts=torch.tensor([4, 0])),
        refuse("a NaN in a row that counts", "must be finite", True, x=poisoned),
        refuse("an overflow", "amax * global_scale must be finite", True, x=torch.full((2, 3, 64), 1e30), global_scale=1e30),
    ]


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CASES: list[Case] = [
    b31("e3m2"), b31("e2m3"),
    groups("e3m2", F32), groups("e2m3", BF16), groups("e4m3", F32), strided(),
    rounded("e3m2"), rounded("e2m3"), rounded("e4m3"),
    nothing("no group", (0, 5, 32), [], 1.0), nothing("no row", (2, 0, 32), [0, 0], 1.0),
    nothing("no row that counts", (2, 3, 64), [0, 0], 1.0), nothing("global scale 0", (1, 3, 64), [3], 0.0),
    fused("silu_mul", "e3m2", BF16), fused("silu_mul", "e4m3", F16), fused("silu_mul", "e2m3", F32),
    fused("relu2", "e3m2", F32), fused("relu2", "e4m3", BF16), gated(),
    *(neighbours(fmt, m) for fmt in ("e2m3", "e3m2", "e4m3") for m in (1, 3, 5, 16)),
    *refusals(),
]  # fmt: skip
