"""What the convolution of one token a row must do (SPEC D18 to D22, D24, D25, D46, D81)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Generator

from narrowgate.conformance.case import Arguments, Case
from narrowgate.conformance.compare import close
from narrowgate.conformance.fixtures import BF16, F16, F32, poisoned, refusal, short
from narrowgate.ops.causal_conv1d import cases_inputs as inputs
from narrowgate.ops.causal_conv1d.cases_laws import (
    ALWAYS,
    idle_slots,
    no_rows,
    qkvz,
    step,
    strided,
    widened,
    written,
)

HAND = [
    written(
        "causal_conv1d_step",
        "hand",
        [6.75],
        [2.0, 5.0],
        ALWAYS[:1],
        ("D18",),
        x=[5.0],
        activation="none",
        state=[1.0, 2.0],
        step=True,
    ),
    written(
        "causal_conv1d_step",
        "hand, silu",
        [6.742105806],
        [2.0, 5.0],
        ALWAYS,
        ("D18",),
        x=[5.0],
        activation="silu",
        state=[1.0, 2.0],
        step=True,
    ),
]

STEP = [
    *[
        step(
            f"4 rows of 7, {short(dtype)} to {short(out)}, state {short(state)}",
            ALWAYS,
            ("D18", "D24", "D25"),
            out,
            rows=4,
            channels=7,
            dtype=dtype,
            out=out,
            state=state,
        )
        for dtype, out in ((F32, F32), (BF16, F32), (BF16, BF16), (F16, F16))
        for state in (F32, BF16)
    ],
    step("3 rows of 512", ALWAYS, ("D25",), rows=3, channels=512),
    *[
        step(f"W {width}", ALWAYS if width > 1 else (), ("D18", "D59"), rows=3, channels=5, width=width)
        for width in (1, 2, 3, 4, 5)
    ],
    *[step(f"16 rows of 2048, bias {bias}", ALWAYS, ("D59",), rows=16, channels=2048, bias=bias) for bias in (True, False)],
    step("1 row of 4096", ALWAYS, ("D59",), rows=1, channels=4096, slots=[0], pool=1),
    *[
        step(
            f"slots [2, 0], {str(index).removeprefix('torch.')}",
            ("slot 0 is no slot",),
            ("D19",),
            rows=2,
            channels=6,
            slots=[2, 0],
            pool=3,
            index=index,
        )
        for index in (torch.int32, torch.int64)
    ],
    step(
        "no slot",
        ("slot 0 is no slot",),
        ("D19", "D81", "G39"),
        F32,
        {"left_alone": partial(no_rows, "step")},
        rows=3,
        channels=6,
        slots=[0, 3, -1],
        pool=4,
    ),
    *[
        step(
            f"no slot, out of bytes 0x5a, {short(out)}",
            ("zeros where no slot",),
            ("D19", "D81"),
            out,
            rows=4,
            channels=6,
            slots=[-1, 2, -1, 0],
            pool=4,
            out=out,
        )
        for out in (F32, BF16)
    ],
    step("no rows", (), ("D18",), rows=0, channels=6),
    step("wide rows", ("trailing taps",), ("D20",), rows=3, channels=6, extra=3),
    Case(
        "causal_conv1d_step",
        "idle slots",
        partial(inputs.step, rows=2, channels=6, slots=[2, 0], pool=3),
        law=idle_slots,
        spec=("D19",),
    ),
    *[
        Case(
            "causal_conv1d_step",
            f"padded rows, {short(dtype)}",
            partial(inputs.step, rows=4, channels=8, pad=5, dtype=dtype),
            law=strided,
            spec=("D22",),
        )
        for dtype in (F32, BF16)
    ],
    Case(
        "causal_conv1d_step",
        "rows wider by 2",
        partial(inputs.step, rows=4, channels=8, extra=2),
        law=widened,
        compare=close(abs=1e-7),
        spec=("D20",),
    ),
    *[
        Case(
            "causal_conv1d_step",
            f"merged projection, {tokens} rows, {short(dtype)}",
            partial(qkvz, tokens=tokens, dtype=dtype, step=True),
            law=strided,
            spec=("D46",),
        )
        for tokens in (1, 2, 4, 16, 32)
        for dtype in (F32, BF16)
    ],
]


def _base_step(**changed: Any) -> Arguments:
    return {**inputs.step(Generator().manual_seed(1), 3, 6), "out": poisoned(3, 6), **changed}


REFUSALS = [
    refusal("causal_conv1d_step", name, text, spec=("D10", "D36"), cpu_only=cpu_only, **_base_step(**changed))
    for name, text, cpu_only, changed in (
        ("slot past the pool", "state_idx out of range", True, {"state_indices": torch.tensor([0, 3, 1])}),
        ("one slot twice", "duplicate live state_idx", True, {"state_indices": torch.tensor([1, -1, 1])}),
        ("states for other rows", "one state row per token", False, {"state": torch.zeros(4, 6, 3)}),
        ("float indices", "expected state_indices of dtype", False, {"state_indices": torch.zeros(3)}),
        ("integer weight", "expected weight of dtype", False, {"weight": torch.zeros(6, 4, dtype=torch.int32)}),
    )
]


CASES: list[Case] = HAND + STEP + REFUSALS
