"""What the products must do (SPEC A20-A37, Z16): packed left and right, blocks along both axes, levels, scale storages.

The expected numbers are the specification's own where it gives them; the rest is float64 arithmetic on the fixture's plain
values, which shares no code with packing or decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from narrowgate.conformance.case import Case, Rival
from narrowgate.conformance.compare import bits, close
from narrowgate.errors import InputError
from narrowgate.ops.linear import cases_inputs, cases_mixed, cases_rows, cases_stored
from narrowgate.packing import PackedTensor, Scale, pack

E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
TIGHT = close(abs=1e-3)


def count(*shape: int) -> Tensor:
    size = 1
    for n in shape:
        size *= n
    return torch.arange(size).view(shape)


def signed(width: int, *shape: int) -> Tensor:
    """v_i = -2^(width-1) + (i mod 2^width), row-major."""
    return count(*shape) % 2**width - 2 ** (width - 1)


def ramp(*shape: int) -> Tensor:
    """x_i = (i mod 7) - 3."""
    return (count(*shape) % 7 - 3).float()


def halves(*shape: int) -> Tensor:
    """s_i = (i + 1) / 2."""
    return (count(*shape) + 1) / 2


def spread(s: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Scales [grid] repeated over their blocks, float64 [shape]."""
    return s.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def stored(s: Tensor, element: str, block: tuple[int, int], layout: str = "rows@1") -> Scale:
    """Scale values as the bit patterns of a torch dtype (an outside encoder), or an exponent byte."""
    if element == "float8_e8m0fnu":
        codes = (s.double().log2().round() + 127).int()
    else:
        kinds = {"float32": (torch.float32, torch.int32), "float16": (torch.float16, torch.int16)}
        kinds["float8_e4m3fn"] = (torch.float8_e4m3fn, torch.uint8)
        to, view = kinds[element]
        codes = s.to(to).view(view).int()
    return Scale.from_codes(codes, element, block, layout)


def product(
    name: str, a: Tensor | PackedTensor, b: Tensor | PackedTensor, values: tuple[Tensor, Tensor], spec: str, *,
    rows: dict[int, list[float]] | None = None, total: float | None = None,
    rivals: dict[str, tuple[Tensor, Tensor]] | None = None, op: str = "matmul", compare: Any = TIGHT,
) -> Case:  # fmt: skip
    """A case of a @ b. `values` are the factors in float64; `rows` and `total` are the specification's numbers."""

    def oracle(**_: Any) -> dict[str, Tensor]:
        c = values[0] @ values[1]
        for i, row in (rows or {}).items():
            want = torch.tensor(row, dtype=torch.float64)
            assert torch.equal(c[i, : len(row)], want), f"{name}: the oracle's row {i} is {c[i].tolist()}"
        assert total is None or float(c.sum()) == total, f"{name}: the oracle's sum is {float(c.sum())}"
        return {"c": c}

    def reading(pair: tuple[Tensor, Tensor]) -> Callable[..., dict[str, Tensor]]:
        return lambda **_: {"c": pair[0] @ pair[1]}

    def inputs(_: Generator) -> dict[str, Any]:
        return {"a": a, "b": b} if op == "matmul" else {"x": a, "w": b}

    shown = tuple(Rival(rival, reading(pair)) for rival, pair in (rivals or {}).items())
    return Case(op, name, inputs, oracle, compare, shown, spec=(spec,))


def lhs(name: str, width: int, spec: str, s: Tensor, element: str, layout: str, rows: dict[int, list[float]]) -> Case:
    """W[4, 32] packed on the left, with scales [4, blocks] of any storage."""
    v, x = signed(width, 4, 32), ramp(32, 4)
    block = (1, 32 // s.shape[1])
    w = pack(v, f"int{width}", scales=(stored(s, element, block, layout),))
    xs, vs = x.double(), v.double()
    right = vs * spread(s, block, (4, 32))
    rivals = {
        "scales modulo the blocks": (vs * s.double().repeat(1, block[1]), xs),
        "one scale": (vs * float(s[0, 0]), xs),
        "zero-extended": ((v % 2**width).double() * spread(s, block, (4, 32)), xs),
    }
    if s.shape[0] == s.shape[1]:
        rivals["scales transposed"] = (vs * spread(s.T, block, (4, 32)), xs)
    return product(name, w, x, (right, xs), spec, rows=rows, rivals=rivals)


def rhs(
    name: str, width: int, spec: str, columns: int, bn: int, m: int, s: Tensor, element: str = "float32",
    layout: str = "rows@1", rows: dict[int, list[float]] | None = None, total: float | None = None,
) -> Case:  # fmt: skip
    """x[m, 32] times W[32, columns] packed along its columns, scales over blocks of 8 by `bn`."""
    v, x = signed(width, 32, columns), ramp(m, 32)
    block = (8, bn)
    w = pack(v, f"int{width}", scales=(stored(s, element, block, layout),))
    xs, vs = x.double(), v.double()
    flipped = s.reshape(s.shape[1], s.shape[0]).T  # s[n // bn, k // bk]
    rivals = {"one scale": (xs, vs * float(s[0, 0]))}
    if s.shape[1] > 1:
        rivals["scales of the other axis first"] = (xs, vs * spread(flipped, block, (32, columns)))
    values = (xs, vs * spread(s, block, (32, columns)))
    return product(name, x, w, values, spec, rows=rows, total=total, rivals=rivals)


def steps(*runs: tuple[float, float, int]) -> list[float]:
    """Runs (start, step, count) one after the other."""
    return [start + step * i for start, step, n in runs for i in range(n)]


A22_ROWS = {
    0: [-32.5, -557.5, 345.5, 580], 1: [373.5, -635.5, 357.5, 1046],
    2: [523.5, -457.5, 241.5, 1000], 3: [417.5, -23.5, -2.5, 442],
}  # fmt: skip
QUARTERS = 0.25 * (1 + count(4, 4) % 4)
POWERS = 2.0 ** ((count(4, 4) % 5) - 2)
A25_ROW = [-344.0, -351, -358, -365, -240, -250, -260, -270]
A35_ROW = [-1920.0, -1931, -1942, -1953, -1944, -1958]


def nvfp4_shape() -> Case:
    """Two levels: a block scale and one global factor (A20)."""
    codes, x = count(4, 32) % 16, ramp(32, 4)
    s, g = halves(4, 2), torch.tensor([[0.25]])
    w = pack(codes, "float4_e2m1fn", scales=(stored(s, "float32", (1, 16)), stored(g, "float32", (4, 32))))
    v, xs, scales = E2M1[codes], x.double(), spread(s, (1, 16), (4, 32))
    nibble = torch.where(codes > 7, codes - 16, codes).double()
    rows = {
        0: [-5.125, -6.875, 2.3125, 5.375], 1: [-11.375, -15.75, 2.1875, 13.125],
        2: [-17.625, -24.625, 2.0625, 20.875], 3: [-23.875, -33.5, 1.9375, 28.625],
    }  # fmt: skip
    rivals = {
        "global omitted": (v * scales, xs), "global twice": (v * scales * 0.0625, xs),
        "signed nibble": (nibble * scales * 0.25, xs),
    }  # fmt: skip
    return product("nvfp4 shape, two levels", w, x, (v * scales * 0.25, xs), "A20", rows=rows, rivals=rivals)


def native() -> Case:
    """A native int8 tensor needs no packing statement (A28): one unit a value, the same C as A22."""
    v, x, s = signed(8, 4, 32), ramp(32, 4), halves(4, 4)
    w = pack(v, "int8", scales=(stored(s, "float32", (1, 8)),), layout="rows@1")
    xs = x.double()
    return product("native int8", w, x, (v.double() * spread(s, (1, 8), (4, 32)), xs), "A28", rows=A22_ROWS)


def unscaled() -> Case:
    """No scale at all (A31)."""
    v, x = signed(8, 32, 8), ramp(1, 32)
    xs = x.double()
    rivals = {"zero-extended": (xs, (v % 256).double())}
    return product(
        "int8 one row, unscaled", x, pack(v, "int8"), (xs, v.double()), "A31", rows={0: steps((288, -6, 8))}, rivals=rivals
    )


def wide() -> Case:
    """A width that is no multiple of 16, so that a permutation of K or of rows cannot hide (Z3), and odd everything."""
    v = (5 * count(7, 37) * count(7, 37) + 3 * count(7, 37)) % 16 - 8
    x, s = ramp(37, 3), halves(7, 5)
    w = pack(v, "int4", scales=(stored(s, "float32", (1, 8)),))
    xs, right = x.double(), v.double() * spread(s, (1, 8), (7, 37))
    rivals = {"k reversed": (v.flip(1).double() * spread(s, (1, 8), (7, 37)), xs), "rows rolled": (right.roll(1, 0), xs)}
    return product("odd width", w, x, (right, xs), "Z3", rivals=rivals)


def thirds() -> Case:
    """Scales and activations that no short type holds (Z16): decoding through float16 is off by .16."""
    v = signed(8, 4, 32)
    x = ((count(32, 4) % 11 - 5) / 7).float()
    s = ((count(4, 4) + 1) / 3).float()
    w = pack(v, "int8", scales=(stored(s, "float32", (1, 8)),))
    decoded = (v.float() * spread(s, (1, 8), (4, 32)).float()).double()
    rivals = {"decoded through float16": (decoded.float().half().double(), x.double())}
    return product("scales in thirds", w, x, (decoded, x.double()), "Z16", rivals=rivals, compare=close(abs=1e-4, rel=1e-5))


def one_hot(op: str, element: str, width: int) -> Case:
    """A one-hot activation reveals each decoded weight bit for bit, up to the sign of zero."""
    n, k = 5, 35
    v = signed(width, n, k) if element.startswith("int") else count(n, k) * 7 % 16
    s = ((count(n, 5) + 1) / 3).float()
    w = pack(v, element, scales=(stored(s, "float32", (1, 8)),))
    plain = v.float() if element.startswith("int") else E2M1[v].float()
    decoded = plain * spread(s, (1, 8), (n, k)).float()
    short = plain * spread(s.bfloat16(), (1, 8), (n, k)).float()
    return Case(
        op, f"one-hot reveals {element}", lambda g: {"x": torch.eye(k), "w": w}, lambda **_: {"y": decoded.T + 0.0}, bits(),
        (Rival("scales rounded to bfloat16", lambda **_: {"y": short.T + 0.0}),),
        spec=("A37",),
    )  # fmt: skip


def bias_once() -> Case:
    """The bias joins in float32, before the one rounding."""
    n, k = 7, 33

    def inputs(g: Generator) -> dict[str, Any]:
        draw = lambda *shape: torch.randn(shape, generator=g)  # noqa: E731
        return {"x": draw(3, 2, k).bfloat16(), "w": draw(n, k).bfloat16(), "bias": (draw(n) * 8).bfloat16()}

    def oracle(x: Tensor, w: Tensor, bias: Tensor) -> dict[str, Tensor]:
        return {"y": (x.double() @ w.double().T + bias.double()).float().bfloat16()}

    def rival(x: Tensor, w: Tensor, bias: Tensor) -> dict[str, Tensor]:
        return {"y": (x.double() @ w.double().T).bfloat16() + bias}

    return Case("linear", "bias before the rounding", inputs, oracle, bits(), (Rival("bias after the rounding", rival),))


def grouped() -> Case:
    """Experts with no, one and several tokens, and rows past the last group."""
    e, n, k, t = 4, 3, 40, 9
    v = (count(e, n, k) * 11 + count(e, n, k) // 16) % 16 - 8
    s = ((count(e, n, 2) + 3) / 4).float()
    w = pack(v, "int4", scales=(Scale.from_codes(s.view(torch.int32), "float32", (1, 1, 32)),))
    dense = v.double() * s.double().repeat_interleave(32, 2)[:, :, :k]
    sizes, expert = [3, 0, 1, 3], [0, 0, 0, 2, 3, 3, 3]

    def oracle(x: Tensor, w: PackedTensor, group_sizes: Tensor) -> dict[str, Tensor]:
        y = torch.zeros(t, n, dtype=torch.float64)
        for i, own in enumerate(expert):
            y[i] = dense[own] @ x[i].double()
        return {"y": y}

    def rival(x: Tensor, w: PackedTensor, group_sizes: Tensor) -> dict[str, Tensor]:
        return {"y": x.double() @ dense[3].T}

    return Case(
        "grouped_linear", "empty experts and rows past the last",
        lambda g: {"x": torch.randn(t, k, generator=g), "w": w, "group_sizes": torch.tensor(sizes, dtype=torch.int32)},
        oracle, close(abs=1e-4, rel=1e-5), (Rival("the last expert for all", rival),),
    )  # fmt: skip


def nothing(op: str, m: int, k: int) -> Case:
    """No rows, or no columns to sum over: zeros, plus the bias (F39)."""
    w, bias = torch.ones(5, k), torch.arange(5.0)
    inputs: dict[str, Any] = {"x": torch.ones(m, k), "w": w, "bias": bias}
    return Case(op, f"M={m} K={k}", lambda g: dict(inputs), lambda **_: {"y": bias.expand(m, 5) + k}, spec=("F39",))


def refusals() -> list[Case]:
    w = pack(signed(4, 3, 8), "int4")
    x = torch.ones(2, 8)

    def refuse(op: str, name: str, message: str, **arguments: Any) -> Case:
        return Case(op, f"refuses {name}", lambda g: dict(arguments), raises=(InputError, message), cpu_only=op != "linear")

    return [
        refuse("linear", "another K", "expected x of shape [..., 8], got [2, 7]", x=torch.ones(2, 7), w=w),
        refuse("linear", "an integer x", "expected x of dtype", x=torch.ones(2, 8, dtype=torch.int64), w=w),
        refuse("linear", "a long bias", "expected bias of shape [3], got [4]", x=x, w=w, bias=torch.ones(4)),
        refuse("linear", "an unknown input scheme", "expected input_scheme", x=x, w=w, input_scheme="int7"),
        refuse("linear", "an integer output", "expected out_dtype", x=x, w=w, out_dtype=torch.int32),
        refuse("matmul", "two K", "with one K", a=x, b=torch.ones(7, 3)),
        refuse(
            "grouped_linear", "too many tokens", "sum to at most 2",
            x=x, w=torch.ones(2, 3, 8), group_sizes=torch.tensor([1, 2]),
        ),
        refuse(
            "grouped_linear", "another E", "group_sizes of shape [2]",
            x=x, w=torch.ones(2, 3, 8), group_sizes=torch.tensor([1]),
        ),
    ]  # fmt: skip


CASES: list[Case] = [
    nvfp4_shape(),
    lhs("int4 left", 4, "A21", halves(4, 4), "float32", "rows@1", {
        0: [11.5, 30.5, 21.5, -40], 1: [49.5, 64.5, 65.5, -70], 2: [87.5, 98.5, 109.5, -100], 3: [125.5, 132.5, 153.5, -130],
    }),
    lhs("int8 left", 8, "A22", halves(4, 4), "float32", "rows@1", A22_ROWS),
    native(),
    rhs("int4 right", 4, "A24", 16, 8, 4, halves(4, 2), total=46, rows={
        0: steps((56, -7, 9), (-10, -10, 7)), 1: [-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5, 0, 2, 4, 6, 8, 10, 12, 14],
        3: steps((72, -9, 16)),
    }),
    rhs("int8 right", 8, "A25", 8, 4, 4, halves(4, 2), total=-10637, rows={0: A25_ROW}),
    rhs("one scale over two lines", 8, "A26", 8, 8, 4, halves(4, 1), total=-5454, rows={0: steps((-100, -5, 8))}),
    rhs("int4 one row", 4, "A29", 16, 8, 1, halves(4, 2), rows={0: steps((56, -7, 9), (-10, -10, 7))}),
    rhs("int8 one row", 8, "A30", 8, 4, 1, halves(4, 2), rows={0: A25_ROW}),
    unscaled(),
    lhs("exponent byte scales, four a word", 8, "A32", POWERS, "float8_e8m0fnu", "words@1", {
        0: [-171.75, -550.5, 481.25, 456], 1: [1031, 502.5, 509.5, 210.25],
        2: [126.5, -262.75, -442, 693], 3: [109, -12.5, -30.75, 80.5],
    }),
    lhs("float16 scales, two a word", 8, "A33", 0.25 * (1 + count(4, 2) % 4), "float16", "words@1", {
        0: [65.25, -96, 103.25, 132.75], 1: [146.75, -127.5, 102.25, 253.25],
        2: [33.25, -32, 39.25, 52.75], 3: [50.75, 0.5, 6.25, 45.25],
    }),
    lhs("float32 scales as words", 8, "A34", QUARTERS, "float32", "words@1", {
        0: [-16.25, -278.75, 172.75, 290], 1: [-8.25, -190.75, 116.75, 202], 2: [-0.25, -102.75, 60.75, 114],
        3: [7.75, -14.75, 4.75, 26],
    }),
    rhs("E4M3 byte scales right", 8, "A35", 16, 4, 1, halves(4, 4), "float8_e4m3fn", "words@1", rows={0: A35_ROW}),
    rhs("float16 scales right, eight rows", 8, "A36", 16, 4, 8, halves(4, 4), "float16", "words@1", total=-32052, rows={
        0: A35_ROW, 1: [1176, 1175.5, 1175, 1174.5, 1204, 1205, 1206, 1207, 1244, 1246.5, 1249, 1251.5, 1296, 1300, 1304, 1308],
    }),
    wide(), thirds(), bias_once(), grouped(), nothing("linear", 0, 12), nothing("linear", 3, 0),
    one_hot("linear", "int4", 4), one_hot("linear", "int8", 8), one_hot("linear", "float4_e2m1fn", 4),
    *refusals(), *cases_inputs.CASES, *cases_mixed.CASES, *cases_rows.CASES, *cases_stored.CASES,
]  # fmt: skip
