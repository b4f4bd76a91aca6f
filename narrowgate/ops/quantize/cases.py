"""What quantize must do (SPEC A39, A40, B7, B20; KNOWN_FAILURES F1-F10): hand-made blocks with hand-made bytes.

The exhaustive sweeps (every tie, every exponent, a million weights) are property tests; these few are the ones to carry to
another device or another implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgate.conformance.case import Case, Rival
from narrowgate.conformance.compare import bits
from narrowgate.conformance.guards import tensors
from narrowgate.errors import InputError
from narrowgate.ops.linear.cases_inputs import microscaled
from narrowgate.ops.quantize_grouped.cases import nearest, pack_rows


def block(values: Sequence[float], length: int = 32) -> Tensor:
    return torch.tensor([[*values, *([0.0] * (length - len(values)))]])


def words(codes: Sequence[int], width: int, length: int = 32) -> Tensor:
    """Codes packed by hand: field j of a word at bits [j * width, (j + 1) * width)."""
    padded = [*codes, *([0] * (length - len(codes)))]
    per = 32 // width
    packed = [
        sum((c & (2**width - 1)) << (width * j) for j, c in enumerate(padded[i : i + per])) for i in range(0, length, per)
    ]
    return torch.tensor([w - 2**32 if w >= 2**31 else w for w in packed], dtype=torch.int32)


def mx(
    name: str, scheme: str, values: Sequence[float], codes: Sequence[int], byte: int, spec: str, *,
    rule: str | None = None, rival: tuple[str, Sequence[int], int] | None = None,
) -> Case:  # fmt: skip
    """One block of a microscaling scheme with word-packed codes."""
    width = 4 if "fp4" in scheme else 8

    def bytes_of(fields: Sequence[int], scale: int) -> dict[str, Tensor]:
        return {"data": words(fields, width), "scales": torch.tensor([[scale]], dtype=torch.uint8)}

    shown = () if rival is None else (Rival(rival[0], lambda **_: bytes_of(rival[1], rival[2])),)
    arguments = {"x": block(values), "scheme": scheme, "scale_rule": rule}
    return Case("quantize", name, lambda g: dict(arguments), lambda **_: bytes_of(codes, byte), bits(), shown, spec=(spec,))


TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
TIES_EVEN = [0, 2, 2, 4, 4, 6, 6, 7]
TIES_AWAY = [1, 2, 3, 4, 5, 6, 7, 7]


def nvfp4() -> Case:
    """Two levels with s2 given: E4M3 code 1 (2^-9) is legal, and the quotient uses the rounded scale (FORMATS 1.4)."""
    x = torch.zeros(2, 16)
    x[0, :3] = torch.tensor([6.0 * 2**-9, -3.0 * 2**-9, 2.0**-9])
    x[1, 0] = 1e-3  # far below what a nearest scale could hold: kept by the floor of 2^-9

    def expected(low: int) -> dict[str, Tensor]:
        codes = [7, 13, 2] + [0] * 13 + [(1 if low else 0)] + [0] * 15
        return {
            "data": words(codes, 4, 32), "scales": torch.tensor([[1], [low]], dtype=torch.uint8),
            "global": torch.ones(1, 1).view(torch.int32),
        }  # fmt: skip

    rival = Rival("nearest, so that a small block vanishes", lambda **_: expected(0))
    arguments = {"x": x, "scheme": "nvfp4", "global_scale": 1.0}
    return Case(
        "quantize", "nvfp4, small blocks", lambda g: dict(arguments), lambda **_: expected(1), bits(), (rival,), spec=("A40",)
    )


def int4() -> Case:
    """amax / 7 = 1 / 7 stored in bfloat16 rounded UP: 0x3e13 (0.1435..), never 0x3e12 (0.1425..), so no value overflows."""
    x = block([1.0, -1.0, 0.5])

    def expected(scale: int, half: int) -> dict[str, Tensor]:
        return {"data": words([7, -7, half], 4), "scales": torch.tensor([[scale]], dtype=torch.int16)}

    rival = Rival("scale to nearest", lambda **_: expected(0x3E12, 4))
    arguments = {"x": x, "scheme": "int4_g32"}
    return Case(
        "quantize",
        "int4_g32, scale rounded up",
        lambda g: dict(arguments),
        lambda **_: expected(0x3E13, 3),
        bits(),
        (rival,),
        spec=("A40",),
    )


def not_finite() -> Case:
    x = torch.zeros(3, 32)
    x[1, 5], x[2, 0] = float("nan"), float("inf")
    arguments = {"x": x, "scheme": "mxfp4"}
    message = "2 of 96 values are not finite, the first at index [1, 5]"
    return Case("quantize", "refuses NaN and inf", lambda g: dict(arguments), raises=(InputError, message))


def least_error() -> Case:
    """One 7.6 among small values: the exponent below the ceiling leaves the smaller squared error, though 7.6 saturates (B35)."""
    x = block([7.6, *(0.1 * i for i in range(1, 32))])

    def expected(byte: int) -> dict[str, Tensor]:
        codes = nearest(x.double() * 2.0 ** (127 - byte), "e2m3")
        return {"data": pack_rows(codes[None], "e2m3")[..., 0], "scales": torch.tensor([[byte]], dtype=torch.uint8)}

    arguments = {"x": x, "scheme": "mxfp6_e2m3", "scale_rule": "mse"}
    return Case(
        "quantize", "7.6 among small values, mse", lambda g: dict(arguments), lambda **_: expected(127),
        rivals=(Rival("rceil", lambda **_: expected(128)),), spec=("B35",),
    )  # fmt: skip


def least_error_is_the_ceiling() -> Case:
    """Where the ceiling is as good, it stays: a block that the lower exponent would only saturate, and an exact tie (B35)."""
    x = torch.stack([block([8.0, *([7.75] * 31)])[0], block([4.0, -2.0, 1.0])[0]])

    def expected(first: int, second: int) -> dict[str, Tensor]:
        byte = torch.tensor([[first], [second]])
        codes = nearest(x.double() * torch.exp2(127.0 - byte.double()), "e2m3")
        return {"data": pack_rows(codes[None], "e2m3")[..., 0], "scales": byte.to(torch.uint8)}

    arguments = {"x": x, "scheme": "mxfp6_e2m3", "scale_rule": "mse"}
    rivals = (
        Rival("always one below", lambda **_: expected(127, 126)), Rival("a tie goes down", lambda **_: expected(128, 126)),
    )  # fmt: skip
    return Case(
        "quantize", "saturation and a tie, mse", lambda g: dict(arguments), lambda **_: expected(128, 127), rivals=rivals,
        spec=("B35",),
    )  # fmt: skip


def short_last_block() -> Case:
    """K = 100: the last block of each row has four values and a scale of its own (F34)."""
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(7))

    def expected(**_: Any) -> dict[str, Tensor]:
        codes, byte = microscaled(x, "e4m3")[:2]
        return {"data": words(codes.reshape(-1).tolist(), 8, 300), "scales": byte.to(torch.uint8)}

    def flat(**_: Any) -> dict[str, Tensor]:
        codes, byte = microscaled(x.reshape(1, -1), "e4m3")[:2]
        whole = torch.nn.functional.pad(byte, (0, 2)).view(3, 4).to(torch.uint8)
        return {"data": words(codes.reshape(-1).tolist(), 8, 300), "scales": whole}

    arguments = {"x": x, "scheme": "mxfp8_e4m3"}
    return Case(
        "quantize", "a short last block", lambda g: dict(arguments), expected,
        rivals=(Rival("blocks run over the flat values", flat),), spec=("F34",),
    )  # fmt: skip


def any_float_type() -> Case:
    """Values that all three types hold give equal bytes (F33)."""

    def law(ops: Any, x: Tensor, scheme: str) -> dict[str, tuple[Tensor, Tensor]]:
        made = [tensors(ops.quantize(x=x.to(d), scheme=scheme)) for d in (torch.float32, torch.bfloat16, torch.float16)]
        return {f"{other}, tensor {i}": (made[0][i], made[other][i]) for other in (1, 2) for i in range(len(made[0]))}

    def reinterpreted(x: Tensor, scheme: str) -> dict[str, Tensor]:
        bits_ = x.contiguous().view({4: torch.int32, 2: torch.int16}[x.element_size()])
        return {"data": bits_.sum(-1, dtype=torch.int64)}

    def draw(g: torch.Generator) -> dict[str, Any]:
        return {"x": torch.randint(-64, 65, (5, 48), generator=g) / 16, "scheme": "nvfp4"}

    rivals = (Rival("the bytes of x whatever its type", reinterpreted),)
    return Case("quantize", "nvfp4 of three types", draw, law=law, rivals=rivals, spec=("F33",))


CASES: list[Case] = [
    mx("ties to even", "mxfp4", TIES, TIES_EVEN, 127, "F1", rival=("ties away", TIES_AWAY, 127)),
    mx("amax 7, rceil", "mxfp4", [7.0, 1.0], [6, 1], 128, "F4", rival=("floor", [7, 2], 127)),
    mx("amax 7, floor", "mxfp4", [7.0, 1.0], [7, 2], 127, "F4", rule="floor", rival=("rceil", [6, 1], 128)),
    mx("amax 6, floor", "mxfp4", [6.0, -6.0], [7, 15], 127, "F7", rule="floor", rival=("emax twice", [7, 15], 125)),
    mx("just under 8, floor", "mxfp4", [7.9999995], [7], 127, "F8", rule="floor", rival=("float log2", [6], 128)),
    mx("957, floor", "mxfp8_e4m3", [957.0], [0x7E], 128, "F5", rule="floor", rival=("rceil", [0x77], 129)),
    mx("957, rceil", "mxfp8_e4m3", [957.0], [0x77], 129, "F5", rival=("floor", [0x7E], 128)),
    mx("a zero block", "mxfp4", [0.0, -0.0], [0, 8], 0, "F10", rival=("scale byte 127", [0, 8], 127)),
    nvfp4(), int4(), not_finite(), least_error(), least_error_is_the_ceiling(), short_last_block(), any_float_type(),
]  # fmt: skip
