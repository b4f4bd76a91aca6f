"""What the elementwise steps must do (SPEC B27, C4 to C6, C16)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from narrowgate.conformance.case import Arguments, Case, Rival
from narrowgate.conformance.compare import bits, rel_l1
from narrowgate.conformance.fixtures import BF16, F16, F32, ROUNDED, padded, refusal, short

PAYLOADS = bits(nan_payload=True)
# patterns with the answers of SPEC C16
PATTERNS = {
    0x7FFFFFFF: 0x7FFF, 0xFFFFFFFF: 0xFFFF, 0x7F800001: 0x7FC0, 0xFF800001: 0xFFC0, 0x7FBFFFFF: 0x7FFF, 0x7F800000: 0x7F80,
    0x7F7FFFFF: 0x7F80, 0x3F808000: 0x3F80, 0x3F818000: 0x3F82, 0x00008000: 0x0000, 0x7F7F8000: 0x7F80, 0x80000000: 0x8000,
    0x7FC00000: 0x7FC0, 0xFF800000: 0xFF80, 0x00000000: 0x0000,
}  # fmt: skip


def _normal(g: Generator, shape: tuple[int, ...], dtype: torch.dtype = F32, spread: float = 3.0) -> Arguments:
    return {"x": (torch.randn(shape, generator=g) * spread).to(dtype)}


def _silu(x: Tensor) -> dict[str, Tensor]:
    x = x.double()
    return {"y": (x / (1 + torch.exp(-x))).float()}


def _silu_mul(x: Tensor, swap: bool = False) -> dict[str, Tensor]:
    gate, up = x.double().chunk(2, dim=-1)
    gate, up = (up, gate) if swap else (gate, up)
    return {"y": gate / (1 + torch.exp(-gate)) * up}


def _interleaved(x: Tensor) -> dict[str, Tensor]:
    return _silu_mul(torch.cat([x[..., ::2], x[..., 1::2]], dim=-1))


def _relu2(x: Tensor, power: int = 2) -> dict[str, Tensor]:
    return {"y": x.double().clamp(min=0) ** power}


def _c5(_: Generator) -> Arguments:
    return {"x": (torch.arange(1024, dtype=torch.float64) - 512).float() * 0.013, "s": 128**-0.5}


def _scale(x: Tensor, s: float, wide: bool = False) -> dict[str, Tensor]:
    factor = torch.tensor(s, dtype=torch.float64)
    factor = factor if wide else factor.float().double()
    return {"y": (x.double() * factor).float()}


def _from_bits(patterns: list[int]) -> Tensor:
    return torch.tensor(patterns, dtype=torch.int64).to(torch.uint32).view(torch.float32)


def _c16(_: Generator) -> Arguments:
    return {"x": _from_bits(list(PATTERNS)), "dtype": BF16}


def _c16_random(g: Generator) -> Arguments:
    return {"x": _from_bits(torch.randint(0, 2**32, (4096,), generator=g).tolist()), "dtype": BF16}


def _bf16(x: Tensor, dtype: torch.dtype, keep_nan: bool = True) -> dict[str, Tensor]:
    codes = []
    for u in (x.view(torch.int32).long() & 0xFFFFFFFF).tolist():
        nearest = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16) & 0xFFFF
        codes.append((u >> 16) | 64 if keep_nan and (u & 0x7FFFFFFF) > 0x7F800000 else nearest)
    return {"y": torch.tensor(codes).to(torch.uint16).view(BF16)}


def _written_bf16(x: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    return {"y": torch.tensor(list(PATTERNS.values())).to(torch.uint16).view(BF16)}


def _truncated(x: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    return {"y": (x.view(torch.int32) >> 16).to(torch.int16).view(BF16)}


def _converted(g: Generator, source: torch.dtype, dtype: torch.dtype) -> Arguments:
    x = (torch.randn(7, 33, generator=g) * torch.tensor(2.0) ** torch.randint(-20, 15, (7, 33), generator=g)).to(source)
    x[0, :4] = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0])
    return {"x": x, "dtype": dtype}


def _numpy(x: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Through numpy for float16, through the bits for bfloat16."""
    wide = x.float()
    if dtype == BF16 and x.dtype != BF16:
        return {"y": _bf16(wide.flatten(), BF16)["y"].reshape(x.shape)}
    return {"y": torch.from_numpy(wide.numpy().astype("float16")) if dtype == F16 else wide.to(dtype)}


# ---- laws


def _two_steps(ops: Any, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    gate, up = x.chunk(2, dim=-1)
    return {"y": (ops.silu(gate) * up, ops.silu_mul(x))}


def _in_place(ops: Any, x: Tensor, op: str, **options: Any) -> dict[str, tuple[Tensor, Tensor]]:
    function = getattr(ops, op)
    fresh, place = function(x, **options), x.clone()
    function(place, **options, out=place)
    return {"y": (fresh, place)}


def _any_stride(ops: Any, x: Tensor, op: str, **options: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Strided rows, one row alone, an odd offset: a value's result does not depend on where it lies."""
    function = getattr(ops, op)
    plain = function(x, **options)
    alone = torch.cat([function(row[None, :].clone(), **options) for row in x])
    return {"strided": (plain, function(padded(x, 3), **options)), "alone": (plain, alone)}


def _in_place_inputs(g: Generator, op: str, **options: Any) -> Arguments:
    return {**_normal(g, (5, 38)), "op": op, **options}


SCALED: tuple[str, dict[str, Any]] = ("scale", {"s": 0.3})

CASES: list[Case] = [
    Case(
        "silu", "4096 normals", partial(_normal, shape=(4096,)), _silu, rel_l1(1e-7),
        rivals=(
            Rival("sigmoid", lambda x: {"y": torch.sigmoid(x.double())}),
            Rival("1.702 x", lambda x: {"y": x.double() * torch.sigmoid(1.702 * x.double())}),
        ),
        spec=("C4",),
    ),
    *[
        Case(
            op, f"shape {shape}, {short(dtype)}", partial(_normal, shape=shape, dtype=dtype), oracle, ROUNDED[dtype],
            rivals=rivals if 0 not in shape else (), spec=("B27",),
        )
        for op, oracle, rivals in (
            ("silu_mul", _silu_mul, (Rival("halves swapped", partial(_silu_mul, swap=True)), Rival("pairs", _interleaved))),
            ("relu2", _relu2, (Rival("relu", partial(_relu2, power=1)),)),
            ("silu", _silu, (Rival("identity", lambda x: {"y": x.double()}),)),
        )
        for dtype in (F32, BF16, F16) for shape in ((3, 2, 66), (0, 8), (5, 0))
    ],
    Case("silu_mul", "its two steps", partial(_normal, shape=(9, 70)), law=_two_steps, spec=("B27", "B29")),
    *[
        Case(op, "in place", partial(_in_place_inputs, op=op, **options), law=_in_place, spec=("C4", "C5"))
        for op, options in (("silu", {}), ("relu2", {}), SCALED)
    ],
    *[
        Case(op, "any stride", partial(_in_place_inputs, op=op, **options), law=_any_stride, spec=("C4", "D46"))
        for op, options in (("silu", {}), ("silu_mul", {}), ("relu2", {}), SCALED, ("convert", {"dtype": BF16}))
    ],
    Case(
        "scale", "1/sqrt(128)", _c5, _scale, bits(),
        rivals=(Rival("s kept in float64", partial(_scale, wide=True)),), spec=("C5",),
    ),
    Case("scale", "1", lambda g: {**_c5(g), "s": 1.0}, _scale, bits(), spec=("C5",)),  # a copy all the same
    Case(
        "convert", "written patterns", _c16, _written_bf16, PAYLOADS,
        rivals=(Rival("plain nearest even", partial(_bf16, keep_nan=False)), Rival("truncation", _truncated)), spec=("C16",),
    ),
    Case(
        "convert", "4096 random patterns", _c16_random, _bf16, PAYLOADS,
        rivals=(Rival("plain nearest even", partial(_bf16, keep_nan=False)), Rival("truncation", _truncated)), spec=("C16",),
    ),
    Case(
        "convert", "f32 to f16, 1024 values", lambda g: {"x": _c5(g)["x"], "dtype": F16},
        _numpy, bits(), rivals=(Rival("truncated in f32", lambda x, dtype: {"y": (x * (1 - 2**-11)).to(F16)}),), spec=("C6",),
    ),
    *[
        Case(
            "convert", f"{short(source)} to {short(dtype)}", partial(_converted, source=source, dtype=dtype), _numpy, bits(),
            spec=("C6", "C16"),
        )
        for source in (F32, BF16, F16) for dtype in (F32, BF16, F16)
    ],
    refusal("silu_mul", "an odd width", "expected x of shape [..., 2 * I]", spec=("B27",), x=torch.ones(2, 5)),
    refusal("convert", "to float64", "expected dtype float32, bfloat16 or float16", spec=("C6",), x=torch.ones(2), dtype=torch.float64),
    refusal("convert", "out of another dtype", "expected out of dtype", spec=("C6",), x=torch.ones(2), dtype=F16, out=torch.zeros(2)),
    refusal("silu", "integers", "expected x of dtype", spec=("C4",), x=torch.ones(2, dtype=torch.int64)),
    refusal("relu2", "columns apart", "contiguous last axis", spec=("B27",), x=torch.ones(2, 6)[:, ::2]),
    refusal("scale", "float64", "expected x of dtype", spec=("C5",), x=torch.ones(2, dtype=torch.float64), s=2.0),
]  # fmt: skip
