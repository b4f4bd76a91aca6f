"""What the speculative step must do (SPEC D64 to D71, D81, Z17; KNOWN_FAILURES G31, G48)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from narrowgate.conformance.case import Arguments, Case, Rival
from narrowgate.conformance.compare import bits
from narrowgate.conformance.fixtures import BF16, F16, F32, ROUNDED, UNSAID, poisoned, refusal, short
from narrowgate.ops.gated_delta_rule import cases_inputs as inputs
from narrowgate.ops.gated_delta_rule import oracle
from narrowgate.ops.gated_delta_rule.cases_step import STORED

OP = "gated_delta_rule_speculative_step"
Pairs = dict[str, tuple[Tensor, Tensor]]
TOKENS = ("q", "k", "v", "g", "beta")


def case(
    name: str, draw: Callable[[Generator], Arguments], wrong: tuple[str, ...], spec: tuple[str, ...],
    out: torch.dtype = F32, state: torch.dtype = F32, cpu_only: bool = False,
) -> Case:  # fmt: skip
    compare = {"o": UNSAID if state == F32 else STORED[state], "out": ROUNDED[out], "state": STORED[state]}
    rivals = tuple(Rival(w, partial(oracle.speculative, wrong=w)) for w in wrong)
    return Case(OP, name, draw, oracle.speculative, compare, rivals=rivals, spec=spec, cpu_only=cpu_only)


# ---- laws: against the single step


def _speculate(ops: Any, given: Arguments, **changed: Any) -> tuple[Tensor, Tensor]:
    given = {**given, **changed}
    given["state"] = given["state"].clone()
    return ops.gated_delta_rule_speculative_step(**given), given["state"]


def _chain(ops: Any, given: Arguments, start: Tensor, first: int, last: int) -> tuple[Tensor, list[Tensor]]:
    """Outputs of the single step from token `first` to `last`, and the state after each."""
    state, outputs, after = start[None].clone(), [], []
    for t in range(first, last):
        one = {k: given[k][t : t + 1] for k in TOKENS}
        outputs.append(ops.gated_delta_rule_step(**one, state=state, scale=given["scale"]))
        after.append(state[0].clone())
    return torch.cat(outputs), after


def _is_step(ops: Any, **given: Any) -> Pairs:
    """One token, one accepted: the single step, bit for bit."""
    o, state = _speculate(ops, given)
    stepped = given["state"].clone()
    slots = given["state_indices"][:, 0].contiguous()
    o2 = ops.gated_delta_rule_step(
        **{k: given[k] for k in TOKENS}, state=stepped, scale=given["scale"], state_indices=slots
    )  # fmt: skip
    return {"o": (o2, o), "state": (stepped, state)}


def _prefixes(ops: Any, **given: Any) -> Pairs:
    """Every snapshot is the state after that prefix; whatever j + 1 tokens are accepted next, the next call goes on from
    there exactly as the chain does: speculation loses nothing, at any state dtype."""
    o, state = _speculate(ops, given)
    ends, columns = given["cu_seqlens"].tolist(), given["state_indices"].tolist()
    found = Pairs()
    for i, accepted in enumerate(given["num_accepted"].tolist()):
        a, b = ends[i], ends[i + 1]
        o2, after = _chain(ops, given, given["state"][columns[i][accepted - 1]], a, b)
        found[f"o{i}"] = (o2, o[a:b])
        for j in range(b - a):
            found[f"request {i}, snapshot {j}"] = (after[j], state[columns[i][j]])
            only = {k: given[k][a:b].flip(0) for k in TOKENS}  # other tokens than before
            ahead = {
                **given, **only, "state_indices": given["state_indices"][i : i + 1],
                "num_accepted": torch.full_like(given["num_accepted"][:1], j + 1),
                "cu_seqlens": torch.tensor([0, b - a], dtype=given["cu_seqlens"].dtype, device=o.device),
            }  # fmt: skip
            o3, state3 = _speculate(ops, ahead, state=state)
            o4, after4 = _chain(ops, ahead, after[j], 0, b - a)
            found[f"request {i}, next after {j + 1}"] = (o4, o3)
            found |= {f"request {i}, next {j}, snapshot {t}": (after4[t], state3[columns[i][t]]) for t in range(b - a)}
    return found


def _inert(ops: Any, **given: Any) -> Pairs:
    """No start slot: rows zero to the bit, the whole pool as it was."""
    o, state = _speculate(ops, given)
    return {"o": (torch.zeros_like(o), o), "state": (given["state"], state)}


def _requests_alone(ops: Any, **given: Any) -> Pairs:
    o, state = _speculate(ops, given)
    ends, found = given["cu_seqlens"].tolist(), Pairs()
    for i in range(len(ends) - 1):
        a, b = ends[i], ends[i + 1]
        one = {k: given[k][a:b] for k in TOKENS}
        one |= {k: given[k][i : i + 1] for k in ("state_indices", "num_accepted")}
        cu = torch.tensor([0, b - a], dtype=given["cu_seqlens"].dtype, device=o.device)
        o2, state2 = _speculate(ops, given, **one, cu_seqlens=cu)
        slots = [s for s in given["state_indices"][i].tolist() if s >= 0]
        found |= {f"o{i}": (o2, o[a:b]), f"state{i}": (state2[slots], state[slots])}
    return found


def _law(name: str, draw: Any, law: Any, spec: tuple[str, ...], full: bool = False) -> Case:
    return Case(OP, name, draw, law=law, compare=bits(), spec=spec, full=full)


# permuted slots with unused ones between; requests of unlike lengths, some shorter than the columns
THREE: dict[str, Any] = {"lengths": [3, 1, 4], "slots": [[5, 9, 2, 7], [0, 11, 3, 6], [12, 1, 8, 10]], "pool": 14}
STARTS = ("start from column 0", "start at accepted")

SPECULATIVE = [
    *[
        case(
            f"three requests, accepted {accepted}, {str(index).removeprefix('torch.')}",
            partial(inputs.speculative, **THREE, accepted=accepted, index=index),
            ("start at accepted", *(("start from column 0",) if accepted != [1, 1, 1] else ())),
            ("D64", "Z17"),
        )
        for accepted, index in (([1, 1, 1], torch.int32), ([2, 1, 4], torch.int64), ([3, 4, 2], torch.int32))
    ],
    *[
        case(
            f"start read whole, {tokens} tokens, {accepted} accepted",
            partial(inputs.speculative, lengths=[tokens], accepted=[accepted], slots=[[3, 0, 4, 1]], pool=6, sizes=(32, 48)),
            ("start read late",),
            ("D65",),
        )
        for tokens in (1, 2, 3, 4)
        for accepted in range(1, tokens + 1)
    ],
    *[
        case(
            f"state {short(state)}, {short(dtype)}",
            partial(inputs.speculative, **THREE, accepted=[2, 4, 1], state=state, dtype=dtype),
            STARTS,
            ("D71",),
            state=state,
        )
        for state in (BF16, F16)
        for dtype in (F32,)
    ],
    *[
        case(
            f"{short(dtype)} to {short(out)}",
            partial(inputs.speculative, **THREE, accepted=[2, 4, 1], dtype=dtype, out=out),
            STARTS,
            ("D8", "D64"),
            out,
        )
        for dtype, out in ((BF16, BF16), (BF16, F32), (F16, F16))
    ],
    case(
        "a snapshot column of -1",
        partial(inputs.speculative, lengths=[4, 2], accepted=[1, 2], slots=[[3, -1, 0, 5], [-1, 2, 1, 6]], pool=8),
        ("-1 ends the snapshots",),
        ("D64", "D81", "Z17"),
    ),
    case(
        "more accepted than tokens",
        partial(inputs.speculative, lengths=[1, 2], accepted=[4, 3], slots=[[3, 4, 0, 5], [7, 2, 1, 6]], pool=8),
        STARTS[:1],
        ("Z17", "G48"),
    ),
    case(
        "no start slot beside a live one",
        partial(inputs.speculative, lengths=[2, 2], accepted=[1, 2], slots=[[-1, 3], [0, 1]], pool=4),
        STARTS[:1],
        ("D69", "D81"),
    ),
    case(
        "an empty request",
        partial(inputs.speculative, lengths=[2, 0, 1], accepted=[1, 7, 2], slots=[[2, 3], [50, 60], [0, 1]], pool=4, tokens=5),
        ("start at accepted",),
        ("D69",),
        cpu_only=True,
    ),
    case(
        "no tokens at all",
        partial(inputs.speculative, lengths=[0, 0], accepted=[1, 1], slots=[[2, 3], [0, 1]], pool=4),
        (),
        ("D69",),
    ),
    case(
        "two requests from one slot that none writes",
        partial(inputs.speculative, lengths=[1, 1], accepted=[2, 2], slots=[[1, 0], [2, 0]], pool=4),
        STARTS[:1],
        ("D64",),
    ),
    *[
        _law(
            f"one token is a step, state {short(state)}",
            partial(inputs.speculative, lengths=[1, 1, 1], accepted=[1, 1, 1], slots=[[4], [0], [2]], pool=6, state=state),
            _is_step,
            ("D66", "D71"),
        )
        for state in (F32, BF16, F16)
    ],
    *[
        _law(
            f"prefixes, three requests, state {short(state)}",
            partial(inputs.speculative, **THREE, accepted=[2, 3, 1], state=state),
            _prefixes,
            ("D67", "D68", "D71"),
        )
        for state in (F32, BF16, F16)
    ],
    *[
        _law(
            f"prefixes, k {k}, Hv {hv}, 128 x 128, accepted {accepted}",
            partial(
                inputs.speculative,
                lengths=[k + 1],
                accepted=[accepted],
                slots=[[2, 0, 3, 1][: k + 1]],
                pool=4,
                heads=(16, hv),
                sizes=(128, 128),
            ),
            _prefixes,
            ("D67", "D68"),
            full=hv == 48 or k == 3,
        )
        for k in (1, 3)
        for hv in (32, 48)
        for accepted in (1, 2)
    ],
    _law(
        "no start slot",
        partial(inputs.speculative, lengths=[2, 3], accepted=[1, 3], slots=[[-1, 1, 2], [3, 0, -1]], pool=5),
        _inert,
        ("D69", "D81"),
    ),
    *[
        _law(
            f"requests alone, state {short(state)}",
            partial(inputs.speculative, **THREE, accepted=[2, 3, 1], state=state),
            _requests_alone,
            ("D67", "Z17"),
        )
        for state in (F32, BF16)
    ],
]


def _base(**changed: Any) -> Arguments:
    given = inputs.speculative(Generator().manual_seed(1), [2, 1], [1, 2], [[3, 0], [1, 2]], 5)
    return {**given, "out": poisoned(3, 6, 8), **changed}


REFUSALS = [
    refusal(OP, name, f"{OP}: {text}", spec=spec, cpu_only=cpu_only, **_base(**changed))
    for name, text, spec, cpu_only, changed in (
        ("0 accepted", "num_accepted_tokens out of range", ("D70", "G31"), True, {"num_accepted": torch.tensor([1, 0])}),
        (
            "3 accepted of 2 columns",
            "num_accepted_tokens out of range",
            ("D70", "G31"),
            True,
            {"num_accepted": torch.tensor([3, 1])},
        ),
        ("slot past the pool", "state_indices out of range", ("D70",), True, {"state_indices": torch.tensor([[5, 0], [1, 2]])}),
        (
            "slot past the pool, in a later column",
            "state_indices out of range",
            ("D70",),
            True,
            {"state_indices": torch.tensor([[3, 0], [1, 99]]), "num_accepted": torch.tensor([1, 1])},
        ),
        (
            "more tokens than columns",
            "expected at most 2 tokens a request, got 3",
            ("D70",),
            True,
            {"cu_seqlens": torch.tensor([0, 3, 3])},
        ),
        ("falling ends", "query_start_loc not monotonic", ("D70",), True, {"cu_seqlens": torch.tensor([0, 2, 1])}),
        ("end past T", "bad query_start_loc bounds", ("D70",), True, {"cu_seqlens": torch.tensor([0, 2, 4])}),
        (
            "two requests that write one slot",
            "duplicate live state_indices",
            ("D70",),
            True,
            {"state_indices": torch.tensor([[3, 0], [0, 2]])},
        ),
        (
            "one column of indices",
            "expected state_indices of shape [2, *]",
            ("D10",),
            False,
            {"state_indices": torch.tensor([3, 1])},
        ),
        ("no scale", "args.scale must be set (> 0)", ("D10",), False, {"scale": None}),
        ("g in f16", "g/beta must be f32", ("D10", "D71"), False, {"g": torch.zeros(3, 6, dtype=F16)}),
        ("a state of [K, V]", "expected state of shape", ("D10",), False, {"state": torch.zeros(5, 6, 16, 8)}),
    )
]

CASES: list[Case] = SPECULATIVE + REFUSALS
