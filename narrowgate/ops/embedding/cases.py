"""What embedding must do (SPEC C10-C14): two roundings, no fused multiply-add, +0.0 added where there is no offset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from narrowgate.conformance.case import Arguments, Case, Rival
from narrowgate.conformance.compare import bits
from narrowgate.errors import InputError
from narrowgate.packing import PackedTensor, Scale, pack

ROWS = 3
SETTINGS = [
    (width, group, n, shifted) for width in (2, 4, 8) for group in (16, 32, 64) for n in (320, 2560) for shifted in (0, 1)
]
BIAS = {2: -1, 4: -7, 8: -16}


class Fixture:
    """The table of one setting, as plain numbers and packed."""

    def __init__(self, width: int, group: int, n: int, shifted: int) -> None:
        i = torch.arange(ROWS * n).view(ROWS, n)
        self.group, self.bias, self.n = group, BIAS[width], n
        self.codes = (13 * i + 7 * (i // n)) % 2**width
        g = Generator().manual_seed(1000 * width + group + n)
        self.scales = torch.rand(ROWS, n // group, generator=g) * 4 - 2
        self.offsets = torch.rand(ROWS, n // group, generator=g) * 4 - 2 if shifted else None
        self.scales[0, 0] = -0.0
        block = (1, group)
        offset: tuple[Scale, ...] = ()
        if self.offsets is not None:
            self.offsets[0, 0] = 0.0
            offset = (Scale.from_codes(self.offsets.view(torch.int32), "float32", block),)
        self.packed = pack(
            self.codes, f"uint{width}", scales=(Scale.from_codes(self.scales.view(torch.int32), "float32", block),), offset=offset,
            zero_points=Scale.from_codes(torch.full((1, 1), -self.bias), "uint8", (ROWS, n)),
        )  # fmt: skip

    def rows(self, ids: Tensor, fused: bool = False, added: bool = True) -> dict[str, Tensor]:
        """Numpy arithmetic in float32 (two roundings) or in float64 rounded once, which is what a fused form gives."""
        spread = lambda t: t.repeat_interleave(self.group, 1).numpy()[ids.numpy()]  # noqa: E731
        code = (self.codes + self.bias).numpy()[ids.numpy()].astype(np.float32)
        scale = spread(self.scales)
        offset = np.zeros_like(scale) if self.offsets is None else spread(self.offsets)
        if fused:
            value = (code.astype(np.float64) * scale + offset).astype(np.float32)
        else:
            value = (code * scale).astype(np.float32)
            value = value + offset if added or self.offsets is not None else value
        return {"e": torch.from_numpy(value)}


def row_case(width: int, group: int, n: int, shifted: int) -> Case:
    fixture = Fixture(width, group, n, shifted)

    def inputs(_: Generator) -> Arguments:
        return {"ids": torch.tensor([2, 0, 1], dtype=torch.int32), "table": fixture.packed}

    def reading(**how: bool) -> Callable[..., dict[str, Tensor]]:
        return lambda ids, table: fixture.rows(ids, **how)

    rivals = []
    if shifted and width > 2:  # a 2-bit product is exact, so nothing could tell the fused form apart
        rivals.append(Rival("fused multiply-add", reading(fused=True)))
    if not shifted:
        rivals.append(Rival("the add of +0.0 left out", reading(added=False)))
    name = f"{width} bits, group {group}, n {n}{', offset' if shifted else ''}"
    return Case("embedding", name, inputs, reading(), bits(), tuple(rivals), spec=("C10", "C11", "C12", "C13", "C14"))


def gathered(element: str, width: int, k: int, layout: str) -> Case:
    """Rows in any order and with repeats, from a table whose rows need not start at a byte."""
    rows = 11
    codes = (torch.arange(rows * k).view(rows, k) * 5 + 3) % 2**width
    values = torch.where(codes >= 2 ** (width - 1), codes - 2**width, codes).float() + 0.0
    table = pack(codes, element, layout=layout)

    def inputs(_: Generator) -> Arguments:
        return {"ids": torch.tensor([[10, 0, 3], [3, 7, 10]]), "table": table}

    def oracle(ids: Tensor, table: PackedTensor) -> dict[str, Tensor]:
        return {"e": values[ids]}

    def rival(ids: Tensor, table: PackedTensor) -> dict[str, Tensor]:
        return {"e": values.roll(1, 1)[ids]}

    return Case(
        "embedding", f"{element} K={k} {layout}", inputs, oracle, bits(), (Rival("a value further", rival),), spec=("A45",)
    )


def refuse(name: str, message: str, **arguments: Any) -> Case:
    return Case("embedding", f"refuses {name}", lambda g: dict(arguments), raises=(InputError, message), cpu_only=True)


_TABLE = pack(torch.zeros(5, 4, dtype=torch.uint8), "int4")

CASES: list[Case] = [
    *[row_case(*setting) for setting in SETTINGS],
    gathered("int4", 4, 7, "words@1"), gathered("int2", 2, 16, "words@1"), gathered("int8", 8, 9, "words@1"),
    gathered("int8", 8, 9, "bytes@1"),
    refuse("an id past the end", "expected ids in [0, 5), got 5", ids=torch.tensor([0, 5]), table=_TABLE),
    refuse("a negative id", "expected ids in [0, 5), got -1", ids=torch.tensor([4, -1]), table=_TABLE),
    refuse("float ids", "expected ids of dtype int32, int64", ids=torch.tensor([1.0]), table=_TABLE),
]  # fmt: skip
