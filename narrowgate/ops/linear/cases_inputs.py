"""Products of activations quantized on purpose (SPEC B34, B36-B38, B43, R18): every input scheme, what is not finite, rows alone.

The oracle quantizes with the tables of the grouped quantizer's cases and with torch's own float types, then sums in float64."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Generator, Tensor

from narrowgate.conformance.case import Case, Rival
from narrowgate.conformance.compare import Comparer, close
from narrowgate.errors import InputError
from narrowgate.ops.quantize_grouped.cases import MAGNITUDES, SIGN, nearest, scale_bytes
from narrowgate.packing import Scale, pack

MAGNITUDES.setdefault("e2m1", [0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
SIGN.setdefault("e2m1", 8)
MAGNITUDES.setdefault("e5m2", [i / 65536 for i in range(4)] + [2.0**e * (1 + m / 4) for e in range(-14, 16) for m in range(4)])
SIGN.setdefault("e5m2", 128)
MX = {"mxfp4": "e2m1", "mxfp6_e2m3": "e2m3", "mxfp6_e3m2": "e3m2", "mxfp8_e4m3": "e4m3", "mxfp8_e5m2": "e5m2"}
ROWS = {"mxfp8_e4m3_row": "e4m3", "mxfp6_e2m3_row": "e2m3", "mxfp6_e3m2_row": "e3m2"}
ELEMENT = {"e2m3": "float6_e2m3fn", "e3m2": "float6_e3m2fn", "e4m3": "float8_e4m3fn"}


def in_blocks(x: Tensor) -> Tensor:
    """[M, K] -> [M, blocks, 32], the last one filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))


def microscaled(x: Tensor, fmt: str) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [M, K], scale bytes [M, blocks], values in float64 [M, K]) of float32 rows."""
    blocks = in_blocks(x)
    byte = scale_bytes(blocks.abs().amax(-1), torch.ones(()), fmt)
    power = torch.ldexp(torch.ones(byte.shape), byte - 127).double()[..., None]
    codes = torch.where(byte[..., None] == 0, 0, nearest(blocks.double() / power, fmt))
    table = torch.tensor(MAGNITUDES[fmt] + [-m for m in MAGNITUDES[fmt]], dtype=torch.float64)
    index = codes % SIGN[fmt] + (codes >= SIGN[fmt]) * len(MAGNITUDES[fmt])
    flat = lambda t: t.flatten(1)[:, : x.shape[1]]  # noqa: E731
    return flat(codes), byte, flat(table[index] * power)


def of_rows(x: Tensor, fmt: str, amax: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `microscaled` after bf16(x gs), and the factor of each row in float64 [M, 1]."""
    largest = x.float().abs().amax(-1, keepdim=True) if amax is None else amax
    gs = (448.0 * MAGNITUDES[fmt][-1] / largest.clamp(min=1e-6).double()).float()
    return *microscaled((x.float() * gs).bfloat16().float(), fmt), (1.0 / gs.double()).float().bfloat16().double()


def integers(x: Tensor, group: int) -> Tensor:
    """int8 with a scale amax / 127 for `group` columns (0: the row, in float32), rounded up to bfloat16."""
    k = x.shape[1]
    width = group or k
    blocks = torch.nn.functional.pad(x, (0, -k % width)).unflatten(1, (-1, width))
    s = (blocks.abs().amax(-1, keepdim=True).double() / 127).float()
    if group:
        short = s.bfloat16()
        up = (short.view(torch.int16) + (short.float() < s).to(torch.int16)).view(torch.bfloat16)
        s = up.float()
    q = torch.where(s > 0, (blocks / s).round().clamp(-127, 127), 0.0)
    return (q.double() * s.double()).flatten(1)[:, :k]


def token(x: Tensor) -> Tensor:
    s = (x.abs().amax(-1, keepdim=True).double() / 448).float()
    s = torch.where(s > 0, s, 1.0)
    return (x / s).to(torch.float8_e4m3fn).double() * s.double()


def quantized(x: Tensor, name: str) -> Tensor:
    """The values that a product under input scheme `name` sees, float64 [M, K]."""
    x = x.float()
    if name in MX:
        return microscaled(x, MX[name])[2]
    if name in ROWS:
        values, factor = of_rows(x, ROWS[name])[2:]
        return values * factor
    return token(x) if name == "float8_e4m3fn_token" else integers(x, 32 if name == "int8_g32" else 0)


def uneven(g: Generator, m: int, k: int) -> Tensor:
    """Rows and blocks of very different size."""
    x = torch.randn(m, k, generator=g)
    return x * torch.exp2(torch.randint(-9, 10, (m, 1), generator=g)) * torch.exp2(torch.randint(-3, 4, (1, k), generator=g))


def scheme(name: str, dtype: torch.dtype) -> Case:
    """Against float64 on the quantized values; each row has a bound of its own size."""
    n, k, m = 6, 101, 9

    def inputs(g: Generator) -> dict[str, Any]:
        x = uneven(g, m, k).to(dtype)
        x[3] = 0
        x[5, 32:64] = 0
        w = torch.randint(-4, 5, (n, k), generator=g).float()
        return {"x": x, "w": w, "input_scheme": name, "out_dtype": torch.float32}

    def oracle(x: Tensor, w: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"y": quantized(x, name) @ w.double().T}

    def exact(x: Tensor, w: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"y": x.double() @ w.double().T}

    rivals = [Rival("activations exact", exact)]
    spec: tuple[str, ...] = ()
    if name in ROWS:
        spec = ("B34", "B38")

        def whole(x: Tensor, w: Tensor, **_: Any) -> dict[str, Tensor]:
            values, factor = of_rows(x, ROWS[name], x.float().abs().amax().reshape(1, 1))[2:]
            return {"y": values * factor @ w.double().T}

        rivals.append(Rival("one global scale for the batch", whole))
    elif name in MX and name != "mxfp8_e5m2":  # so wide an element sees no wrong power of two

        def blind(x: Tensor, w: Tensor, **_: Any) -> dict[str, Tensor]:
            lone = microscaled(x.float().reshape(1, -1), MX[name])[2].view(x.shape)
            return {"y": lone @ w.double().T}

        rivals.append(Rival("blocks run over the flat values", blind))
    short = str(dtype).removeprefix("torch.")
    return Case(
        "linear", f"input {name}, {short}", inputs, oracle, by_row(1e-5), tuple(rivals), spec=spec
    )  # fmt: skip


def by_row(rel: float) -> Comparer:
    """|expected - got| <= rel * the largest |expected| of the row: float32 sums of terms of that size."""

    def measure(expected: Tensor, got: Tensor) -> tuple[float, Tensor]:
        size = expected.double().abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True)
        both = expected.isnan() & got.isnan()
        distance = torch.where(both | (expected == got), 0.0, (expected.double() - got.double()).abs())
        share = torch.where(distance == 0, 0.0, distance / (rel * size))
        return float(share.max()), share

    return Comparer(f"by_row({rel:g})", 1.0, measure)


def not_finite(name: str) -> Case:
    """A NaN is seen in its row and nowhere else; an infinity is read as 2^127, so that the rest of its block is lost in its scale."""
    x = torch.ones(4, 64)
    x[1, 40], x[2, 3] = torch.nan, -torch.inf
    w = torch.zeros(3, 64)
    w[0, 3], w[1, 50], w[2] = 0.25, 1.0, 2.0**-10
    clean = x.clone()
    clean[2, 3] = -(2.0**127)

    def oracle(**_: Any) -> dict[str, Tensor]:
        y = quantized(clean.nan_to_num(0.0), name) @ w.double().T
        y[1] = torch.nan
        return {"y": y}

    def zero(**_: Any) -> dict[str, Tensor]:
        return {"y": quantized(clean.nan_to_num(0.0), name) @ w.double().T}

    def infinite(**_: Any) -> dict[str, Tensor]:
        y = oracle()["y"].clone()
        y[2, :] = torch.tensor([-torch.inf, torch.nan, -torch.inf])
        return {"y": y}

    arguments = {"x": x, "w": w, "input_scheme": name}
    rivals = (Rival("NaN as zero", zero), Rival("infinity kept", infinite))
    return Case("linear", f"input {name}, not finite", lambda g: dict(arguments), oracle, by_row(1e-5), rivals)


def refused(name: str) -> Case:
    x = torch.ones(2, 64)
    x[1, 7] = torch.nan
    arguments = {"x": x, "w": torch.ones(3, 64), "input_scheme": name}
    message = f"{name}: integer codes have no NaN, 1 of 128"
    return Case("linear", f"input {name} refuses NaN", lambda g: dict(arguments), raises=(InputError, message), cpu_only=True)


def among(name: str, m: int) -> Case:
    """y of m rows is y of 128 rows, cut: each row's result is its own, to the bit."""

    def inputs(g: Generator) -> dict[str, Any]:
        return {"x": uneven(g, 128, 64).bfloat16(), "w": torch.randn(5, 64, generator=g), "input_scheme": name,
                "batch_invariant": True}  # fmt: skip

    def law(ops: Any, x: Tensor, **rest: Any) -> dict[str, tuple[Tensor, Tensor]]:
        return {"y": (ops.linear(x=x, **rest)[:m], ops.linear(x=x[:m], **rest))}

    def whole(x: Tensor, w: Tensor, **_: Any) -> dict[str, Tensor]:
        values, factor = of_rows(x, ROWS[name], x.float().abs().amax().reshape(1, 1))[2:]
        return {"y": (values * factor @ w.double().T).bfloat16()}

    rivals = (Rival("one global scale for the batch", whole),)
    return Case("linear", f"{name}: {m} rows as among 128", inputs, law=law, rivals=rivals, spec=("B34", "B37", "R18"))


def chain(name: str, m: int) -> Case:
    """The whole against the host's chain: rows scaled and quantized by the oracle, a product, the row's factor, the bias."""
    fmt = ROWS[name]

    def inputs(g: Generator) -> dict[str, Any]:
        x, w = uneven(g, m, 96).bfloat16(), torch.randint(-4, 5, (5, 96), generator=g)
        return {
            "x": x,
            "w": pack(w, "int4"),
            "bias": torch.randn(5, generator=g),
            "input_scheme": name,
            "batch_invariant": True,
        }

    def law(ops: Any, x: Tensor, w: Any, bias: Tensor, input_scheme: str, batch_invariant: bool) -> dict[str, Any]:
        codes, byte, _, factor = of_rows(x.cpu(), fmt)
        packed = pack(codes, ELEMENT[fmt], scales=(Scale.from_codes(byte, "float8_e8m0fnu", (1, 32)),), layout="bytes@1")
        total = ops.linear(x=packed.to(x.device), w=w, input_scheme=None, batch_invariant=batch_invariant)
        want = (total * factor.float().to(x.device) + bias).bfloat16()
        got = ops.linear(x=x, w=w, bias=bias, input_scheme=input_scheme, batch_invariant=batch_invariant)
        return {"y": (want, got)}

    def unscaled(x: Any, w: Any, **_: Any) -> dict[str, Tensor]:
        x = x if isinstance(x, Tensor) else x.dequantize()
        return {"y": (x.double() @ w.dequantize().double().T).to(x.dtype)}

    return Case(
        "linear", f"{name}: {m} rows, whole and in steps", inputs, law=law, rivals=(Rival("activations exact", unscaled),),
        spec=("B37",),
    )  # fmt: skip


def expanded(fmt: str) -> Case:
    """A packed weight and the same codes one a byte: the same bits."""

    def inputs(g: Generator) -> dict[str, Any]:
        codes, byte, _ = microscaled(torch.randn(7, 96, generator=g), fmt)
        scale = Scale.from_codes(byte, "float8_e8m0fnu", (1, 32))
        return {"x": torch.randn(3, 96, generator=g), "w": pack(codes, ELEMENT[fmt], scales=(scale,), layout="fp6_bytes@1")}

    def law(ops: Any, x: Tensor, w: Any) -> dict[str, tuple[Tensor, Tensor]]:
        return {"y": (ops.linear(x=x, w=w), ops.linear(x=x, w=w.with_layout("bytes@1")))}

    def rival(x: Tensor, w: Any) -> dict[str, Tensor]:
        lane = w.codes().unflatten(1, (-1, 4)).flip(2).flatten(1) if w.layout == "fp6_bytes@1" else w.codes()
        read = pack(lane, w.element, scales=w.scales, layout="bytes@1")
        return {"y": x @ read.dequantize().T}

    return Case(
        "linear",
        f"{fmt}: packed and expanded weight",
        inputs,
        law=law,
        rivals=(Rival("lanes big-endian", rival),),
        spec=("B37",),
    )


def relative(name: str, n: int, k: int) -> Case:
    """One code's step, relative to each value: no absolute floor behind which a wrong stride of a later, smaller tile could hide."""
    fmt = MX[name]
    step = {"e3m2": 2.0**-2, "e2m3": 2.0**-3}[fmt]

    @functools.cache  # a case draws its inputs several times
    def drawn() -> dict[str, Any]:
        g = Generator().manual_seed(0)
        w = torch.rand(n, k, generator=g) + 0.5  # of one sign, so that no sum is small by cancelling
        w[64:] *= 2.0**-20
        codes, byte, _ = microscaled(w, fmt)
        packed = pack(codes, ELEMENT[fmt], scales=(Scale.from_codes(byte, "float8_e8m0fnu", (1, 32)),), layout="fp6_bytes@1")
        return {"x": torch.rand(2, k, generator=g) + 0.5, "w": packed, "input_scheme": name}

    def values(w: Any) -> Tensor:
        power = torch.exp2(w.scales[0].data.double() - 127).repeat_interleave(32, 1)
        table = torch.tensor(MAGNITUDES[fmt] + [-m for m in MAGNITUDES[fmt]], dtype=torch.float64)
        return table[w.codes().long()] * power

    def oracle(x: Tensor, w: Any, **_: Any) -> dict[str, Tensor]:
        return {"y": quantized(x, name) @ values(w).T}

    def rival(x: Tensor, w: Any, **_: Any) -> dict[str, Tensor]:
        y = quantized(x, name) @ values(w).T
        y[:, 96:] = y[:, 64 : 64 + n - 96] * torch.linspace(1.5, 3, n - 96)
        return {"y": y}

    return Case(
        "linear", f"{name}: {n} x {k}, a relative bound", lambda g: dict(drawn()), oracle, close(rel=step),
        (Rival("a later tile half as large again", rival),), spec=("B36", "B43"),
    )  # fmt: skip


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CASES: list[Case] = [
    *(scheme(name, BF16) for name in (*MX, *ROWS)),
    scheme("float8_e4m3fn_token", F32), scheme("int8_g32", F16), scheme("int8_channel", F32), scheme("mxfp6_e3m2_row", F32),
    *(not_finite(name) for name in (*MX, *ROWS, "float8_e4m3fn_token")),
    refused("int8_g32"), refused("int8_channel"),
    *(among(name, m) for name in ROWS for m in (1, 3, 16)),
    chain("mxfp6_e2m3_row", 17), chain("mxfp6_e3m2_row", 128), chain("mxfp8_e4m3_row", 130), chain("mxfp6_e3m2_row", 256),
    expanded("e2m3"), expanded("e3m2"),
    relative("mxfp6_e3m2", 256, 512), relative("mxfp6_e2m3", 128, 512), relative("mxfp6_e3m2", 256, 256),
]  # fmt: skip
