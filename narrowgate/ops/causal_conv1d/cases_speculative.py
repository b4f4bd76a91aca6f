"""What the convolution of drafted tokens must do (SPEC D72 to D75, Z13; KNOWN_FAILURES G48)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from narrowgate.conformance.case import Arguments, Case, Rival
from narrowgate.conformance.compare import close
from narrowgate.conformance.fixtures import BF16, F32, ROUNDED, poisoned, refusal, short
from narrowgate.ops.causal_conv1d import cases_inputs as inputs
from narrowgate.ops.causal_conv1d import oracle

OP = "causal_conv1d_speculative_step"
Pairs = dict[str, tuple[Tensor, Tensor]]


def _rivals(*names: str) -> tuple[Rival, ...]:
    return tuple(Rival(name, partial(oracle.speculative, wrong=name)) for name in names)


def _hand(_: Generator, old: list[float], x: list[float], accepted: int) -> Arguments:
    return {
        "x": torch.tensor(x)[:, None], "weight": torch.tensor([[0.25, 0.5, 1.0, 2.0]]), "bias": None,
        "state": torch.tensor([[old]]), "cu_seqlens": torch.tensor([0, len(x)], dtype=torch.int32),
        "state_indices": torch.tensor([0], dtype=torch.int32), "num_accepted": torch.tensor([accepted], dtype=torch.int32),
        "activation": "none",
    }  # fmt: skip


def _written(y: list[float], row: list[float], /, **_: Any) -> dict[str, Tensor]:
    return {"y": torch.tensor(y)[:, None], "state": torch.tensor([[row]])}


def _no_rows(**given: Any) -> Tensor:
    """Rows of an output that a call leaves alone, as a column."""
    rows, ends = torch.ones(len(given["x"]), 1, dtype=torch.bool), given["cu_seqlens"].tolist()
    for i, slot in enumerate(given["state_indices"].tolist()):
        if slot >= 0:
            rows[ends[i] : ends[i + 1]] = False
    return rows


# ---- laws: against one token at a time


def _native(ops: Any, given: Arguments, x: Tensor, state: Tensor) -> Tensor:
    inner = {k: given[k] for k in ("weight", "bias", "activation")}
    return torch.cat([ops.causal_conv1d_step(x[t : t + 1], state=state, **inner) for t in range(len(x))])


def _rollback(ops: Any, **given: Any) -> Pairs:
    """After one draft the row read at offset j is the row of a plain chain after j + 1 tokens; the next call, told j + 1,
    goes on as that chain does. For every j."""
    taps, first = given["weight"].shape[1] - 1, int(given["num_accepted"][0]) - 1
    past = given["state"][..., first : first + taps].contiguous()
    drafted = given["state"].clone()
    y = ops.causal_conv1d_speculative_step(**{**given, "state": drafted})
    chain, found = past.clone(), Pairs()
    rows = _native(ops, given, given["x"], chain.clone())
    found["y"] = (rows, y)
    follow = given["x"].flip(0).contiguous()
    for j in range(len(given["x"])):
        _native(ops, given, given["x"][j : j + 1], chain)
        found[f"row {j}"] = (chain.clone(), drafted[..., j : j + taps])
        again, accepted = drafted.clone(), torch.full_like(given["num_accepted"], j + 1)
        z = ops.causal_conv1d_speculative_step(**{**given, "x": follow, "state": again, "num_accepted": accepted})
        found[f"next {j}"] = (_native(ops, given, follow, chain.clone()), z)
    return found


def _columns_behind(ops: Any, **given: Any) -> Pairs:
    """A short request keeps the columns that it does not need; other slots keep all."""
    state = given["state"].clone()
    ops.causal_conv1d_speculative_step(**{**given, "state": state})
    taps, ends = given["weight"].shape[1] - 1, given["cu_seqlens"].tolist()
    idle = [i for i in range(len(state)) if i not in given["state_indices"].tolist()]
    found = {"idle": (given["state"][idle], state[idle])}
    for i, slot in enumerate(given["state_indices"].tolist()):
        if slot >= 0:
            used = taps - 1 + ends[i + 1] - ends[i] if ends[i + 1] > ends[i] else 0
            found[f"request {i}"] = (given["state"][slot, :, used:], state[slot, :, used:])
    return found


LONG = [
    Case(
        OP,
        f"hand, {accepted} accepted",
        partial(_hand, old=[1.0, 2.0, 3.0, 4.0], x=[5.0, 6.0], accepted=accepted),
        partial(_written, y, row),
        close(abs=1e-6),
        rivals=_rivals(*wrong),
        spec=("D74",),
    )
    for accepted, y, row, wrong in (
        (1, [14.25, 19.0], [2.0, 3.0, 5.0, 6.0], ("offset is accepted",)),
        (2, [16.0, 19.75], [3.0, 4.0, 5.0, 6.0], ("offset ignored", "offset is accepted", "taps reversed")),
    )
] + [
    Case(
        OP,
        "hand, a short request",
        partial(_hand, old=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], x=[7.0], accepted=4),
        partial(_written, [23.5], [5.0, 6.0, 7.0, 4.0, 5.0, 6.0]),
        close(abs=1e-6),
        rivals=_rivals("full width kept", "offset ignored", "offset is accepted"),
        spec=("D74", "Z13"),
    ),
    *[
        Case(
            OP,
            f"lengths {lengths}, accepted {accepted}, {short(dtype)} to {short(out)}, state {short(state)}",
            partial(
                inputs.speculative,
                lengths=lengths,
                accepted=accepted,
                channels=11,
                drafted=3,
                slots=[5, 0, 2],
                pool=7,
                dtype=dtype,
                out=out,
                state=state,
                index=index,
            ),
            oracle.speculative,
            {"out": ROUNDED[out], "state": close(abs=1e-30) if state == BF16 else close(abs=1e-6)},
            rivals=_rivals("offset ignored", "offset is accepted", "full width kept", "taps reversed", "slot 0 is no slot"),
            spec=("D72", "Z13", "G48"),
        )
        for lengths, accepted, dtype, out, state, index in (
            ([4, 1, 3], [2, 4, 3], F32, F32, F32, torch.int32),
            ([2, 4, 0], [3, 2, 1], BF16, F32, F32, torch.int64),
            ([1, 2, 3], [4, 3, 2], BF16, BF16, BF16, torch.int32),
            ([4, 4, 2], [1, 2, 4], F32, F32, BF16, torch.int32),
        )
    ],
    *[
        Case(
            OP,
            f"{tokens} tokens after {accepted} accepted",
            partial(inputs.speculative, lengths=[tokens], accepted=[accepted], channels=5, drafted=3),
            oracle.speculative,
            close(abs=1.2e-5, rel=1.2e-5),
            rivals=_rivals(
                *(("offset ignored",) if accepted > 1 else ()),
                "offset is accepted",
                *(("full width kept",) if tokens < 4 else ()),
            ),
            spec=("D72", "G48"),
        )
        for tokens in (1, 2, 3, 4)
        for accepted in (1, 2, 3, 4)
    ],
    *[
        Case(
            OP,
            f"W {width}, {drafted} drafted",
            partial(inputs.speculative, lengths=[2, 1], accepted=[2, 1], channels=5, drafted=drafted, width=width),
            oracle.speculative,
            close(abs=1.2e-5, rel=1.2e-5),
            rivals=_rivals("taps reversed", "offset is accepted"),
            spec=("D72",),
        )
        for width, drafted in ((2, 1), (3, 2), (5, 4))
    ],
    Case(
        OP,
        "no slot",
        partial(inputs.speculative, lengths=[2, 3, 2], accepted=[1, 2, 3], channels=5, drafted=3, slots=[1, -1, 0], pool=3),
        oracle.speculative,
        close(abs=1.2e-5, rel=1.2e-5),
        rivals=_rivals("slot 0 is no slot"),
        spec=("D75", "D81"),
        left_alone=_no_rows,
    ),
    Case(
        OP,
        "no slot, out of bytes 0x5a",
        partial(
            inputs.speculative, lengths=[2, 3, 2], accepted=[1, 2, 3], channels=5, drafted=3, slots=[1, -1, 0], pool=3, out=F32
        ),
        oracle.speculative,
        close(abs=1.2e-5, rel=1.2e-5),
        rivals=_rivals("zeros where no slot"),
        spec=("D75", "D81"),
    ),
    Case(
        OP,
        "no tokens",
        partial(inputs.speculative, lengths=[0, 0], accepted=[1, 9], channels=5, drafted=3, slots=[1, 40], pool=3),
        oracle.speculative,
        close(abs=1e-30),
        spec=("D75",),
        cpu_only=True,
    ),
    *[
        Case(
            OP,
            f"rollback, {channels} channels, {first} accepted before",
            partial(inputs.speculative, lengths=[4], accepted=[first], channels=channels, drafted=3),
            law=_rollback,
            spec=("D73", "G48"),
        )
        for channels, first in ((7, 1), (7, 3), (10240, 2), (8192, 4))
    ],
    Case(
        OP,
        "columns behind",
        partial(
            inputs.speculative, lengths=[4, 1, 0, 2], accepted=[2, 4, 1, 3], channels=5, drafted=3, slots=[5, 0, 2, -1], pool=7
        ),
        law=_columns_behind,
        spec=("D72", "D75"),
    ),
]


def _base(**changed: Any) -> Arguments:
    given = inputs.speculative(Generator().manual_seed(1), [4, 1], [2, 3], 5, 3)
    return {**given, "out": poisoned(5, 5), **changed}


REFUSALS = [
    refusal(OP, name, text, spec=("D75", "G31"), cpu_only=cpu_only, **_base(**changed))
    for name, text, cpu_only, changed in (
        ("0 accepted", f"{OP}: num_accepted_tokens out of range", True, {"num_accepted": torch.tensor([1, 0])}),
        ("5 accepted", f"{OP}: num_accepted_tokens out of range", True, {"num_accepted": torch.tensor([1, 5])}),
        ("too many tokens", "expected at most 4 tokens a request, got 5", True, {"cu_seqlens": torch.tensor([0, 5, 5])}),
        ("slot past the pool", f"{OP}: state_indices out of range", True, {"state_indices": torch.tensor([0, 2])}),
        ("one slot twice", "duplicate live state_indices", True, {"state_indices": torch.tensor([1, 1])}),
        ("falling ends", "query_start_loc not monotonic", True, {"cu_seqlens": torch.tensor([0, 4, 3])}),
        ("end past T", "bad query_start_loc bounds", True, {"cu_seqlens": torch.tensor([0, 4, 6])}),
        ("accepted for other requests", "expected num_accepted of shape [2]", False, {"num_accepted": torch.tensor([1])}),
        ("one tap", "W >= 2", False, {"weight": torch.zeros(5, 1)}),
    )
]

CASES: list[Case] = LONG + REFUSALS
