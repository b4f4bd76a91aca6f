"""What the convolution over sequences must do (SPEC D15 to D17, D20 to D25, D46, D81; KNOWN_FAILURES G)."""

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
    chain,
    forward,
    idle_slots,
    no_rows,
    pieces,
    qkvz,
    singles,
    strided,
    widened,
    with_work,
    written,
    written_work,
)

HAND = [
    written(
        "causal_conv1d",
        "hand",
        [4.25, 4.0],
        [1.0, 2.0],
        ALWAYS[:1] + ALWAYS[2:],
        ("D15",),
        x=[1.0, 2.0],
        activation="none",
        state=[3.0, 4.0],
    ),
    written(
        "causal_conv1d",
        "hand, silu",
        [4.190229585, 3.928055160],
        [1.0, 2.0],
        ALWAYS,
        ("D15",),
        x=[1.0, 2.0],
        activation="silu",
        state=[3.0, 4.0],
    ),
    written(
        "causal_conv1d",
        "short, with a past",
        None,
        [2.0, 3.0, 7.0],
        ("zeros for old taps",),
        ("D17",),
        x=[7.0],
        activation="silu",
        state=[1.0, 2.0, 3.0],
    ),
    written(
        "causal_conv1d",
        "short, without",
        None,
        [0.0, 0.0, 7.0],
        ("stale state",),
        ("D17",),
        x=[7.0],
        activation="silu",
        state=[1.0, 2.0, 3.0],
        has=0,
    ),
]

FORWARD = [
    *[
        forward(
            f"ends [0, 5, 6, 9], fresh [1, 0, 1], {short(dtype)} to {short(out)}, state {short(state)}",
            (*ALWAYS, "stale state"),
            ("D16", "D24", "D25"),
            out,
            ends=[0, 5, 6, 9],
            channels=10,
            initial=[1, 0, 1],
            dtype=dtype,
            out=out,
            state=state,
        )
        for dtype, out in ((F32, F32), (BF16, F32), (BF16, BF16), (F16, F16))
        for state in (F32, BF16)
    ],
    forward("ends [0, 1, 3], linear", ALWAYS[:1], ("D25",), ends=[0, 1, 3], channels=3, activation="none", bias=False),
    forward("no activation given", ALWAYS[:1], ("D15",), ends=[0, 1, 3], channels=3, activation=None),
    forward("ends [0, 9, 16] of 512", ALWAYS, ("D25",), ends=[0, 9, 16], channels=512),
    *[
        forward(
            f"flags {str(flags).removeprefix('torch.')}",
            ("stale state",),
            ("D16", "D25"),
            ends=[0, 5, 9],
            channels=16,
            initial=[0, 1],
            flags=flags,
        )
        for flags in (torch.bool, torch.int8, torch.int32)
    ],
    *[
        forward(f"W {width}", ALWAYS if width > 1 else (), ("D15", "D59"), ends=[0, 2, 9], channels=5, width=width)
        for width in (1, 2, 3, 4, 5)
    ],
    *[
        forward(
            f"ends {ends} of {channels}",
            ALWAYS,
            ("D59",),
            ends=ends,
            channels=channels,
            initial=initial,
            flags=torch.int8,
            pad=pad,
        )
        for ends, channels, initial, pad in (
            ([0, 200], 512, None, 0),
            ([0, 3, 6, 9, 12, 40], 1024, [1, 1, 0, 1, 1], 0),
            ([0, 33, 70], 64, [1, 0], 0),
            ([0, 2, 19, 28], 385, None, 37),
            ([0, 1, 3], 2048, None, 0),
            ([0, 5, 6, 9], 4096, None, 0),
        )
    ],
    forward("empty sequences", ("zeros for old taps",), ("G28", "G30"), ends=[0, 0, 4, 4, 6], channels=7, initial=[1, 1, 0, 1]),
    forward("no tokens", ("stale state",), ("G28", "G30"), ends=[0, 0, 0], channels=7, initial=[1, 0]),
    *[
        forward(
            f"slots of a pool, {str(index).removeprefix('torch.')}",
            ("slot 0 is no slot",),
            ("D19", "D81", "G39"),
            F32,
            {"left_alone": partial(no_rows, "forward")},
            ends=[0, 3, 5, 9],
            channels=6,
            slots=[4, -1, 0],
            pool=6,
            tokens=11,
            index=index,
        )
        for index in (torch.int32, torch.int64)
    ],
    forward(
        "no slot, given out",
        ("zeros where no slot",),
        ("D81",),
        ends=[0, 3, 5, 9],
        channels=6,
        slots=[4, -1, 0],
        pool=6,
        tokens=11,
        out=F32,
    ),
    forward("wide rows", ("trailing taps",), ("D20",), ends=[0, 2, 9], channels=6, extra=3),
    Case(
        "causal_conv1d",
        "idle slots",
        partial(inputs.forward, ends=[0, 3, 9], channels=6, slots=[3, 1], pool=5),
        law=idle_slots,
        spec=("D19",),
    ),
    Case(
        "causal_conv1d",
        "singles",
        partial(inputs.forward, ends=[0, 5, 5, 6, 30], channels=33, initial=[1, 0, 0, 1]),
        law=singles,
        spec=("D6", "G36"),
    ),
    *[
        Case(
            "causal_conv1d",
            f"padded rows, {short(dtype)}",
            partial(inputs.forward, ends=[0, 5], channels=6, pad=7, dtype=dtype),
            law=strided,
            spec=("D22",),
        )
        for dtype in (F32, BF16)
    ],
    *[
        Case(
            "causal_conv1d",
            f"rows wider by {extra}",
            partial(inputs.forward, ends=[0, 2, 9], channels=6, extra=extra),
            law=widened,
            compare=close(abs=1e-7),
            spec=("D20",),
        )
        for extra in (1, 3)
    ],
    *[
        Case("causal_conv1d", f"work, {ends}", partial(inputs.forward, ends=ends, channels=9), law=with_work, spec=("D23",))
        for ends in ([0, 2, 19, 28], [0, 8, 16], [0, 0, 1])
    ],
    Case(
        "causal_conv1d",
        "written work",
        lambda g: {"cu_seqlens": torch.tensor([0, 2, 19, 28])},
        law=written_work,
        spec=("D23",),
    ),
    Case(
        "causal_conv1d",
        "a chain of steps",
        partial(inputs.forward, ends=[0, 4], channels=2),
        law=chain,
        compare=close(abs=1e-6),
        spec=("D21",),
    ),
    Case(
        "causal_conv1d",
        "a chain of 30 steps",
        partial(inputs.forward, ends=[0, 30], channels=37),
        law=chain,
        compare=close(abs=1e-6),
        spec=("D21",),
    ),
    Case(
        "causal_conv1d",
        "pieces of 1, 2 and 1",
        partial(inputs.forward, ends=[0, 4], channels=5),
        law=pieces,
        compare=close(abs=1e-6),
        spec=("G35",),
    ),
    *[
        Case(
            "causal_conv1d",
            f"merged projection, {tokens} tokens, {short(dtype)}",
            partial(qkvz, tokens=tokens, dtype=dtype, step=False),
            law=strided,
            spec=("D46",),
        )
        for tokens in (1, 2, 4, 16, 32)
        for dtype in (F32, BF16)
    ],
]


def _base(**changed: Any) -> Arguments:
    given = inputs.forward(Generator().manual_seed(1), [0, 3, 9], 6)
    return {**given, "out": poisoned(9, 6), **changed}


_ONE = torch.tensor([0])
REFUSALS = [
    refusal("causal_conv1d", name, text, spec=("D10", "G31", "D23"), cpu_only=cpu_only, **_base(**changed))
    for name, text, cpu_only, changed in (
        ("falling ends", "causal_conv1d: query_start_loc not monotonic", True, {"cu_seqlens": torch.tensor([0, 4, 3])}),
        ("end past T", "causal_conv1d: bad query_start_loc bounds", True, {"cu_seqlens": torch.tensor([0, 4, 10])}),
        ("start above 0", "causal_conv1d: bad query_start_loc bounds", True, {"cu_seqlens": torch.tensor([1, 4, 9])}),
        ("slot past the pool", "state_idx out of range", True, {"state_indices": torch.tensor([0, 2])}),
        ("one slot twice", "duplicate live state_idx", True, {"state_indices": torch.tensor([1, 1])}),
        ("a state too narrow", "expected state of shape [slots, C, >= 3]", False, {"state": torch.zeros(2, 6, 2)}),
        ("states for other sequences", "one state row per sequence", False, {"state": torch.zeros(3, 6, 3)}),
        ("an f16 state", "expected state of dtype float32, bfloat16", False, {"state": torch.zeros(2, 6, 3, dtype=F16)}),
        ("another activation", "expected activation to be", False, {"activation": "relu"}),
        ("weight of other channels", "expected weight of shape [6, *]", False, {"weight": torch.zeros(5, 4)}),
        ("bias of other channels", "expected bias of shape [6]", False, {"bias": torch.zeros(5)}),
        ("columns apart", "expected x with a contiguous last axis", False, {"x": torch.zeros(9, 12)[:, ::2]}),
        (
            "flags for other sequences",
            "expected has_initial_state of shape [2]",
            False,
            {"has_initial_state": torch.ones(3, dtype=torch.int8)},
        ),
        ("work without entries", "expected work with at least one entry", False, {"work": (_ONE[:0], _ONE[:0])}),
        ("half of a work", "expected both parts of work or neither", False, {"work": (_ONE, None)}),
        ("work of other chunks", "expected work to name each chunk of 8 tokens once", True, {"work": (_ONE, _ONE)}),
        ("an out of other channels", "expected out of shape", False, {"out": poisoned(9, 7)}),
    )
]

CASES: list[Case] = HAND + FORWARD + REFUSALS
