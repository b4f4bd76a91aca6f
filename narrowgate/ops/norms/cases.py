"""What the norms must do (SPEC C7 to C9, D26 to D28; KNOWN_FAILURES G8)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from narrowgate.conformance.case import Arguments, Case, Rival
from narrowgate.conformance.compare import bits, close, rel_l1
from narrowgate.conformance.fixtures import BF16, F16, F32, ROUNDED, UNSAID, padded, poisoned, refusal, short, uniform

# ---- oracles: `sized` is the sum or mean that is divided by, `eps` says where eps goes


def _divisor(x: Tensor, eps: float, sized: str, where: str) -> Tensor:
    size = x.pow(2).sum(-1, keepdim=True) if sized == "sum" else x.pow(2).mean(-1, keepdim=True)
    if where == "after":
        return size.sqrt() + eps
    return size.sqrt().clamp(min=eps) if where == "max" else (size + eps).sqrt()


def _l2(x: Tensor, *, eps: float = 1e-6, out: Tensor | None = None, sized: str = "sum", where: str = "in") -> dict[str, Tensor]:
    x = x.double()
    return {"y" if out is None else "out": x / _divisor(x, eps, sized, where)}


def _rms(
    x: Tensor, weight: Tensor | None = None, *, eps: float, weight_bias: float = 0.0, out: Tensor | None = None,
    sized: str = "mean", where: str = "in", weighted: bool = True, bias: float | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    x = x.double()
    y = x / _divisor(x, eps, sized, where)
    if weight is not None and weighted:
        y = y * (weight.double() + (weight_bias if bias is None else bias))
    return {"y" if out is None else "out": y}


def _gated(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, activation: str = "silu", out: Tensor | None = None, wrong: str = ""
) -> dict[str, Tensor]:
    x, z = x.double(), gate.double().reshape(x.shape)
    if wrong == "other activation":
        activation = "silu" if activation == "sigmoid" else "sigmoid"
    act = z / (1 + torch.exp(-z)) if activation == "silu" else 1 / (1 + torch.exp(-z))
    if wrong == "gate then norm":
        x = x * act
        act = torch.ones_like(act)
    y = x / _divisor(x, eps, "mean", "in") * (weight.double() + (wrong == "1 + w")) * act
    return {"y" if out is None else "out": y}


# ---- inputs


def _uniform(g: Generator, shape: tuple[int, ...], dtype: torch.dtype = F32, out: torch.dtype | None = None) -> Arguments:
    x = uniform(g, *shape, low=-6, high=6, dtype=dtype)
    return {"x": x} if out is None else {"x": x, "out": poisoned(*shape, dtype=out)}


def _hand(_: Generator, values: list[float], **options: Any) -> Arguments:
    return {"x": torch.tensor(values), **options}


def _c7(_: Generator, **options: Any) -> Arguments:
    i = torch.arange(24 * 256, dtype=torch.float64)
    x = (torch.sin(0.017 * i) * 1.7 + 0.4).float().reshape(24, 256)
    return {"x": x, "weight": 0.5 + 0.002 * (torch.arange(256) % 97).float(), "eps": 1e-6, **options}


def _gated_inputs(
    g: Generator, shape: tuple[int, ...], dtype: torch.dtype = F32, out: torch.dtype | None = None, activation: str = "silu"
) -> Arguments:
    x, gate = (uniform(g, *shape, low=-6, high=6, dtype=dtype) for _ in range(2))
    weight = torch.rand(shape[-1], generator=g).to(dtype) + 0.5
    given = {} if out is None else {"out": poisoned(*shape, dtype=out)}
    return {"x": x, "gate": gate, "weight": weight, "eps": 1e-6, "activation": activation, **given}


def _padded_gate(g: Generator, *, heads: int, dtype: torch.dtype, activation: str) -> Arguments:
    """x [T * Hv, D] and a gate [T, Hv, D] whose tokens lie further apart than Hv * D."""
    given = _gated_inputs(g, (4 * heads, 5 if heads == 3 else 129), dtype=dtype, activation=activation)
    gate = given["gate"].reshape(4, -1)
    return {**given, "gate": padded(gate, 11, -3.5).unflatten(1, (heads, -1))}


def _gated_like_rms(g: Generator, dtype: torch.dtype, out: torch.dtype) -> Arguments:
    given = _gated_inputs(g, (5, 100), dtype=dtype, out=out)
    return {k: given[k] for k in ("x", "weight", "eps", "out")}


def _uniform_eps(g: Generator, shape: tuple[int, ...]) -> Arguments:
    return {**_uniform(g, shape), "eps": 1e-6}


def _hand_gated(_: Generator, activation: str) -> Arguments:
    x, gate, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, -1.0]]), torch.tensor([2.0, 0.5])
    return {"x": x, "gate": gate, "weight": weight, "eps": 0.0, "activation": activation}


# ---- laws


def _strided(ops: Any, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    return {"y": (ops.l2_norm(x), ops.l2_norm(padded(x, 7, float("nan"))))}


def _rows_alone(ops: Any, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    return {"y": (torch.cat([ops.l2_norm(row[None]) for row in x]), ops.l2_norm(x))}


def _in_place(ops: Any, x: Tensor, weight: Tensor, eps: float) -> dict[str, tuple[Tensor, Tensor]]:
    fresh, place = ops.rms_norm(x, weight, eps=eps), x.clone()
    ops.rms_norm(place, weight, eps=eps, out=place)
    return {"y": (fresh, place)}


def _gate_strides(ops: Any, x: Tensor, gate: Tensor, **options: Any) -> dict[str, tuple[Tensor, Tensor]]:
    plain = ops.rms_norm_gated(x, gate.reshape(x.shape).contiguous(), **options)
    return {"y": (plain, ops.rms_norm_gated(x, gate, **options))}


MEAN = Rival("mean for sum", partial(_l2, sized="mean"))
AFTER = Rival("eps after the root", partial(_l2, where="after"))
LARGER = Rival("max(norm, eps)", partial(_l2, where="max"))
RMS_RIVALS = (
    Rival("sum for mean", partial(_rms, sized="sum")),
    Rival("no weight", partial(_rms, weighted=False)),
    Rival("sum and no weight", partial(_rms, sized="sum", weighted=False)),
    Rival("1 + w", partial(_rms, bias=1.0)),
)
GATED_RIVALS = tuple(Rival(name, partial(_gated, wrong=name)) for name in ("gate then norm", "other activation", "1 + w"))


def _l2_case(name: str, inputs: Any, compare: Any, *rivals: Rival, spec: tuple[str, ...] = ("D26",)) -> Case:
    return Case("l2_norm", name, inputs, _l2, compare, rivals=rivals, spec=spec)


def _rms_case(name: str, inputs: Any, compare: Any, *rivals: Rival, spec: tuple[str, ...] = ("C7",)) -> Case:
    return Case("rms_norm", name, inputs, _rms, compare, rivals=rivals, spec=spec)


def _gated_case(name: str, inputs: Any, compare: Any, *rivals: Rival, spec: tuple[str, ...] = ("D27",)) -> Case:
    return Case("rms_norm_gated", name, inputs, _gated, compare, rivals=rivals, spec=spec)


L2_CASES = [
    _l2_case("hand", partial(_hand, values=[3.0, 4.0], eps=0.0), close(abs=1e-6), MEAN),
    _l2_case("eps inside the root", partial(_hand, values=[1e-3, 0.0]), close(abs=1e-6), MEAN, AFTER, LARGER, spec=("D26", "G8")),
    _l2_case("norm of 1e-4", partial(_hand, values=[6e-5, -8e-5]), close(abs=1e-6), MEAN, AFTER, LARGER, spec=("G8",)),
    Case(
        "l2_norm", "zero row", lambda g: {"x": torch.zeros(2, 5)}, lambda x: {"y": torch.zeros(2, 5)}, bits(),
        rivals=(Rival("0 / 0", lambda x: {"y": x / x.norm()}),), spec=("D26", "G8"),
    ),
    *[
        _l2_case(f"shape {shape}", partial(_uniform, shape=shape), UNSAID, MEAN, spec=("D26", "C21"))
        for shape in ((5, 127), (3, 2, 128), (2, 300))
    ],
    *[
        _l2_case(f"{short(dtype)} to {short(out)}", partial(_uniform, shape=(7, 60), dtype=dtype, out=out), ROUNDED[out], MEAN)
        for dtype in (F32, BF16, F16) for out in (F32, BF16, F16)
    ],
    Case("l2_norm", "no rows", partial(_uniform, shape=(0, 7)), lambda x: {"y": x}, bits(), spec=("D26",)),
    Case("l2_norm", "no columns", partial(_uniform, shape=(3, 0)), lambda x: {"y": x}, bits(), spec=("D26",)),
    *[
        Case(
            "l2_norm", f"strided rows, {short(dtype)}", partial(_uniform, shape=(9, 33), dtype=dtype),
            law=_strided, spec=("D26", "D46"),
        )
        for dtype in (F32, BF16)
    ],
    Case("l2_norm", "a row alone", partial(_uniform, shape=(37, 100)), law=_rows_alone, spec=("D26",)),
    refusal("l2_norm", "integers", "expected x of dtype", x=torch.ones(2, 3, dtype=torch.int32)),
    refusal("l2_norm", "columns apart", "contiguous last axis", x=torch.ones(4, 6)[:, ::2]),
    refusal("l2_norm", "a negative eps", "expected eps >= 0", x=torch.ones(2, 3), eps=-1.0),
    refusal("l2_norm", "out of another shape", "expected out of shape", x=torch.ones(2, 3), out=torch.zeros(3, 3)),
    refusal("l2_norm", "out of integers", "expected out of dtype", x=torch.ones(2, 3), out=torch.zeros(2, 3, dtype=torch.int32)),
]  # fmt: skip

RMS_CASES = [
    _rms_case("24 x 256", _c7, rel_l1(1e-6), *RMS_RIVALS, spec=("C7", "C8")),
    _rms_case("rivals are far", _c7, rel_l1(0.5), *RMS_RIVALS, spec=("C8",)),
    _rms_case("no weight", partial(_c7, weight=None), close(abs=1e-6), RMS_RIVALS[0], spec=("C9",)),
    _rms_case("1 + w", partial(_c7, weight_bias=1.0), rel_l1(1e-6), Rival("plain w", partial(_rms, bias=0.0))),
    _rms_case(
        "eps inside the root", partial(_hand, values=[1e-3, 0.0], eps=1e-6), close(abs=1e-6),
        Rival("eps after the root", partial(_rms, where="after")), Rival("max(rms, eps)", partial(_rms, where="max")),
    ),
    *[
        _rms_case(
            f"{short(dtype)} to {short(out)}", partial(_gated_like_rms, dtype=dtype, out=out), ROUNDED[out], *RMS_RIVALS[:2],
            spec=("C7", "C21"),
        )
        for dtype in (F32, BF16, F16) for out in (F32, BF16, F16)
    ],
    Case("rms_norm", "in place", _c7, law=_in_place, spec=("C7", "C9")),
    Case("rms_norm", "no rows", partial(_uniform_eps, shape=(0, 7)), lambda x, eps: {"y": x}, bits(), spec=("C7",)),
    refusal("rms_norm", "a weight too long", "expected weight of shape [3]", x=torch.ones(2, 3), weight=torch.ones(4), eps=0.0),
    refusal("rms_norm", "no axis", "at least one axis", x=torch.ones(()), eps=0.0),
]  # fmt: skip

GATED_CASES = [
    _gated_case(f"hand, {act}", partial(_hand_gated, activation=act), close(abs=1e-6), *GATED_RIVALS)
    for act in ("silu", "sigmoid")
] + [
    *[
        _gated_case(
            f"{short(dtype)} to {short(out)}, {act}", partial(_gated_inputs, shape=(13, 129), dtype=dtype, out=out, activation=act),
            ROUNDED[out], *GATED_RIVALS,
        )
        for dtype, out in ((F32, F32), (F32, BF16), (BF16, F32), (BF16, BF16), (F16, F16)) for act in ("silu", "sigmoid")
    ],
    *[
        Case(
            "rms_norm_gated", f"padded gate of {heads} heads, {short(dtype)}, {act}",
            partial(_padded_gate, heads=heads, dtype=dtype, activation=act), law=_gate_strides, spec=("D28",),
        )
        for heads, dtype, act in ((3, F32, "silu"), (3, BF16, "sigmoid"), (1, F32, "silu"), (1, BF16, "sigmoid"))
    ],
    *[
        _gated_case(
            f"rows {rows} of 128, {short(dtype)} to {short(out)}", partial(_gated_inputs, shape=(rows, 128), dtype=dtype, out=out),
            ROUNDED[out], *GATED_RIVALS, spec=("D27",),
        )
        for rows, dtype, out in ((48, BF16, BF16), (96, F32, BF16), (512, F32, F32))
    ],
    refusal(
        "rms_norm_gated", "another activation", "expected activation to be",
        x=torch.ones(2, 3), gate=torch.ones(2, 3), weight=torch.ones(3), eps=0.0, activation="relu",
    ),
    refusal(
        "rms_norm_gated", "a gate of other rows", "expected gate with the rows of x",
        x=torch.ones(2, 3), gate=torch.ones(3, 3), weight=torch.ones(3), eps=0.0,
    ),
]  # fmt: skip

CASES: list[Case] = L2_CASES + RMS_CASES + GATED_CASES
