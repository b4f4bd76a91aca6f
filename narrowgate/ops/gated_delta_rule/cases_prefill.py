"""What prefill must compute, in both forms (SPEC D1 to D5, D8, D49 to D53; KNOWN_FAILURES G)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from narrowgate.conformance.case import Arguments, Case, Rival
from narrowgate.conformance.compare import Comparer, all_of, close, mean_abs, rmse_ratio
from narrowgate.conformance.fixtures import BF16, F16, F32, UNSAID, short
from narrowgate.ops.gated_delta_rule import cases_inputs as inputs
from narrowgate.ops.gated_delta_rule import oracle

OP = "gated_delta_rule"
FORMS = ("recurrent", "chunk")
CLOSE = {"recurrent": UNSAID, "chunk": all_of(close(abs=5e-3, rel=5e-3), rmse_ratio(1e-4))}  # SPEC D49, Z15
# With 16-bit inputs: a 16-bit output; a float32 output and the state
CLOSE_16, FINE_16 = (all_of(close(abs=3e-2, rel=3e-2), rmse_ratio(rms)) for rms in (4.5e-3, 4e-3))

TIGHT_OUT, TIGHT_STATE = (all_of(close(abs=top), mean_abs(mean)) for top, mean in ((2e-3, 6e-5), (2e-2, 6e-4)))  # SPEC D52
ALWAYS = ("k scaled too", "q not scaled", "q scaled twice", "read before decay", "output before write", "state [k][v]")


def limits(form: str, dtype: torch.dtype) -> Comparer:
    """Of the state and of a float32 output. The chunk form may multiply 16-bit inputs in 16 bits; the recurrent form may not."""
    return FINE_16 if form == "chunk" and dtype != F32 else CLOSE[form]


def rivals(*names: str) -> tuple[Rival, ...]:
    return tuple(Rival(name, partial(oracle.rule, wrong=name)) for name in names)


def case(
    name: str, draw: Callable[[Generator], Arguments], compare: Comparer | dict[str, Comparer], wrong: tuple[str, ...] = (),
    spec: tuple[str, ...] = (), full: bool = False,
) -> Case:  # fmt: skip
    return Case(OP, name, draw, oracle.rule, compare, rivals=rivals(*wrong), spec=spec, full=full)


# ---- single inputs


def _hand(_: Generator, form: str, tokens: int = 3, dtype: torch.dtype = F32) -> Arguments:
    given = {
        "q": torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 1.0]]]).to(dtype),
        "k": torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]], [[0.5, 0.5]]]).to(dtype),
        "v": torch.tensor([[[2.0, 1.0]], [[1.0, -1.0]], [[0.0, 2.0]]]).to(dtype),
        "g": torch.tensor([[1.0], [0.5], [1.0]]).log(),
        "beta": torch.tensor([[0.5], [1.0], [0.5]]),
    }
    state = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    return {k: t[:tokens] for k, t in given.items()} | {"state": state, "cu_seqlens": None, "scale": 0.5, "form": form}


def _hand_answer(*_: Any, state: Tensor, q: Tensor, **__: Any) -> dict[str, Tensor]:
    """SPEC D4, as it is written there."""
    o = torch.tensor([[[0.5, 1.5]], [[0.5, 0.625]], [[0.75, 0.59375]]])
    after = [[[1.0, 2.0], [3.0, 2.5]], [[1.0, 1.0], [-1.0, 1.25]], [[0.75, 0.75], [-0.53125, 1.71875]]]
    return {"o": o[: len(q)], "state": torch.tensor(after[len(q) - 1])[None, None]}


def _ungated(g: Generator, form: str) -> Arguments:
    given = inputs.prefill(g, [0, 130], (2, 4), (24, 20), form=form)
    given["g"].zero_()
    return given


def _plunge(g: Generator, form: str, floor: float) -> Arguments:
    """One token forgets everything, the rest nothing: what comes after must be kept to the last bit of decay."""
    given = inputs.prefill(g, [0, 150], (1, 2), (24, 20), form=form)
    given["g"].zero_()
    given["g"][[0, 70]] = floor
    given["g"][71:, 1] = -0.01
    return given


def _one_token_sequences(g: Generator, form: str, n: int, heads: int) -> Arguments:
    return inputs.prefill(g, list(range(n + 1)), (1, heads), (4, 3), form=form)


def _long(g: Generator, form: str) -> Arguments:
    """More tokens than a 16-bit grid axis counts; only the last one says anything."""
    given = inputs.prefill(g, [0, 65537], (1, 1), (4, 3), form=form)
    for name in ("q", "k", "v", "beta"):
        given[name][:-1] = 0.0
    given["g"].mul_(1e-4)
    return given


# ---- the lists

RECURRENCE = [
    *[
        Case(
            OP,
            f"hand, {tokens} tokens, {form}",
            partial(_hand, form=form, tokens=tokens),
            _hand_answer,
            close(abs=1e-6),
            rivals=rivals(*ALWAYS) if tokens == 3 else (),
            spec=("D1", "D4", "G10"),
        )
        for form in FORMS
        for tokens in (1, 2, 3)
    ],
    *[
        case(
            f"{heads[0]} key heads, {heads[1]} value heads, {form}",
            partial(inputs.prefill, ends=[0, 70], heads=heads, sizes=(12, 7), form=form),
            CLOSE[form],
            ALWAYS + (("heads tiled",) if 1 < heads[0] < heads[1] else ()),
            ("D1", "D5", "G13", "G22"),
        )
        for form in FORMS
        for heads in ((2, 6), (1, 1), (1, 2), (1, 3), (1, 4), (1, 8), (3, 3))
    ],
    case("all sizes equal", partial(inputs.prefill, ends=[0, 8], heads=(8, 8), sizes=(8, 8)), CLOSE["chunk"], ALWAYS, ("G13",)),
    *[
        case(
            f"K {sizes[0]}, V {sizes[1]}, {form}",
            partial(inputs.prefill, ends=[0, 67], heads=(1, 2), sizes=sizes, form=form),
            CLOSE[form],
            ("read before decay", "state [k][v]"),
            ("G21", "G23"),
        )
        for form in FORMS
        for sizes in ((128, 128), (96, 192), (100, 60), (60, 100))
    ],
    *[
        case(
            f"{short(dtype)} to {short(out)}, {form}",
            partial(inputs.prefill, ends=[0, 4, 71], dtype=dtype, out=out, form=form),
            {"out": limits(form, dtype) if out == F32 else CLOSE_16, "state": limits(form, dtype)},
            ALWAYS,
            ("D8", "D53", "D56"),
        )
        for form in FORMS
        for dtype, out in ((BF16, F32), (F16, F32), (F32, BF16), (BF16, BF16), (F16, F16))
    ],
    *[
        case(
            f"slow decay, {short(dtype)}, {form}",
            partial(inputs.prefill, ends=[0, 150], sizes=(32, 24), dtype=dtype, decay=0.02, form=form),
            {"o": limits(form, dtype) if dtype == F32 else CLOSE_16, "state": limits(form, dtype)},
            ("carry forgotten", *ALWAYS),
            ("Z15", "D49"),
        )
        for form in FORMS
        for dtype in (F32, BF16)
    ],
    *[
        case(f"no decay, {form}", partial(_ungated, form=form), CLOSE[form], ("gate of 1 zeroed", "carry forgotten"), ("G1",))
        for form in FORMS
    ],
    *[
        case(f"a plunge to {floor:g}, {form}", partial(_plunge, form=form, floor=floor), UNSAID, ("carry forgotten",), ("G3",))
        for form in FORMS
        for floor in (-90.0, -1e4, float("-inf"))
    ],
    *[
        case(
            f"{tokens} tokens, {form}",
            partial(inputs.prefill, ends=[0, tokens], heads=(1, 2), sizes=(12, 20), decay=0.05, form=form),
            UNSAID,
            ("tail decays to zero",) if tokens % 64 else ALWAYS,
            ("D49", "G15", "G25"),
        )
        for form in FORMS
        for tokens in (1, 31, 33, 40, 63, 64, 65, 100, 128)
    ],
]

LADDER = [
    case(
        f"Hk {hk}, Hv {hv}, {ends}, {short(dtype)}",
        partial(inputs.prefill, ends=ends, heads=(hk, hv), sizes=(128, 128), form="chunk", dtype=dtype),
        {"o": limits("chunk", F32) if dtype == F32 else CLOSE_16, "state": limits("chunk", dtype)},
        ("carry forgotten",) if ends[-1] > 130 and len(ends) == 2 else (),
        ("D50",),
        full,
    )
    for hk, hv, ends, dtype, full in (
        (1, 1, [0, 40], F32, False),
        (1, 1, [0, 64], F32, False),
        (1, 1, [0, 128], F32, False),
        (2, 4, [0, 150], F32, False),
        (2, 4, [0, 150], BF16, False),
        (2, 4, [0, 150, 200], F32, False),
        (4, 8, [0, 130], F32, False),
        *[
            (16, hv, ends, F32, True)
            for hv in (32, 48)
            for ends in ([0, 150], [0, 150, 200], [0, 100, 150, 264, 300, 401], [0, 10, 22, 31, 40, 52, 61], [0, 10])
        ],
    )
] + [
    case(
        f"tight bf16, {ends}",
        partial(inputs.prefill, ends=ends, heads=(2, 4), sizes=(128, 128), form="chunk", dtype=BF16),
        {"o": TIGHT_OUT, "state": TIGHT_STATE},
        ALWAYS,
        ("D52",),
    )
    for ends in ([0, 150], [0, 10, 22, 31, 40, 52, 61])
]

MANY = [
    case(
        "2100 sequences of one token", partial(_one_token_sequences, form="recurrent", n=2100, heads=32), UNSAID,
        spec=("G17",), full=True,
    ),
    case("65537 tokens", partial(_long, form="chunk"), UNSAID, spec=("G18",), full=True),
]  # fmt: skip

CASES = RECURRENCE + LADDER + MANY
