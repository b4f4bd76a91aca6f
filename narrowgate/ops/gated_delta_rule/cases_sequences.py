"""What prefill must do with several sequences, strides, slots and bad arguments (SPEC D5 to D10, D16, D81; KNOWN_FAILURES G)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from narrowgate.conformance.case import Arguments, Case
from narrowgate.conformance.compare import Comparer, bits, close
from narrowgate.conformance.fixtures import BF16, F16, UNSAID, padded, poisoned, refusal
from narrowgate.ops.gated_delta_rule import cases_inputs as inputs
from narrowgate.ops.gated_delta_rule.cases_prefill import CLOSE, FORMS, OP, case

Pairs = dict[str, tuple[Tensor, Tensor]]


def _strided(g: Generator, form: str, packed: bool) -> Arguments:
    """q, k and v as slices of one packed row, g and beta as slices of merged buffers, a pool whose slots lie apart."""
    given = inputs.prefill(g, [0, 5, 70], (2, 4), (16, 16), form=form)
    tokens = len(given["q"])
    if packed:
        parts = [given[name].flatten(1) for name in ("q", "k", "v")]
        row = torch.cat([*parts, torch.full((tokens, 3), float("nan"))], dim=1)
        for name, at, heads in (("q", 0, 2), ("k", 32, 2), ("v", 64, 4)):
            given[name] = row[:, at : at + heads * 16].unflatten(1, (heads, 16))
    else:  # [H, T, D] seen as [T, H, D]
        given |= {name: given[name].transpose(0, 1).contiguous().transpose(0, 1) for name in ("q", "k", "v")}
    given["g"], given["beta"] = padded(given["g"], 3), padded(given["beta"], 2)
    slots = torch.full((2, 4 * 16 * 16 + 40), 999.0)
    slots[:, : 4 * 16 * 16] = given["state"].flatten(1)
    given["state"] = slots[:, : 4 * 16 * 16].unflatten(1, (4, 16, 16))
    return given


# ---- laws: (expected, got)


def _run(ops: Any, given: Arguments, **changed: Any) -> tuple[Tensor, Tensor]:
    given = {**given, **changed}
    given["state"] = given["state"].clone()
    return ops.gated_delta_rule(**given), given["state"]


def _singles(ops: Any, **given: Any) -> Pairs:
    """Each sequence alone gives the bits that it gives among others."""
    together, states = _run(ops, given)
    ends, result = given["cu_seqlens"].tolist(), Pairs()
    for i in range(len(ends) - 1):
        a, b = ends[i], ends[i + 1]
        alone = {k: t[a:b] for k, t in given.items() if k in ("q", "k", "v", "g", "beta")}
        o, state = _run(ops, given, **alone, state=given["state"][i : i + 1], cu_seqlens=None)
        result |= {f"o{i}": (o, together[a:b]), f"state{i}": (state, states[i : i + 1])}
    return result


def _single_heads(ops: Any, **given: Any) -> Pairs:
    together, states = _run(ops, given)
    result = Pairs()
    ratio = given["v"].shape[1] // given["q"].shape[1]
    for h in range(given["v"].shape[1]):
        one = {k: given[k][:, h // ratio : h // ratio + 1] for k in ("q", "k")}
        one |= {k: given[k][:, h : h + 1] for k in ("v", "g", "beta", "state")}
        o, state = _run(ops, given, **one)
        result |= {f"o{h}": (o, together[:, h : h + 1]), f"state{h}": (state, states[:, h : h + 1])}
    return result


def _is_step(ops: Any, **given: Any) -> Pairs:
    o, state = _run(ops, given)
    stepped = given["state"].clone()
    inner = {k: given[k] for k in ("q", "k", "v", "g", "beta", "scale")}
    return {"o": (ops.gated_delta_rule_step(**inner, state=stepped), o), "state": (stepped, state)}


def _chain(ops: Any, **given: Any) -> Pairs:
    """One call over T tokens, and T calls of the step."""
    o, state = _run(ops, given)
    stepped, rows = given["state"].clone(), []
    for t in range(len(o)):
        inner = {k: given[k][t : t + 1] for k in ("q", "k", "v", "g", "beta")}
        rows.append(ops.gated_delta_rule_step(**inner, state=stepped, scale=given["scale"]))
    return {"o": (torch.cat(rows), o), "state": (stepped, state)}


def _prefill_and_step(ops: Any, **given: Any) -> Pairs:
    """T - 1 tokens and then one, or all T (G27)."""
    o, state = _run(ops, given)
    names = ("q", "k", "v", "g", "beta")
    _, before = _run(ops, given, **{k: given[k][:-1] for k in names}, cu_seqlens=None)
    last = ops.gated_delta_rule_step(**{k: given[k][-1:] for k in names}, state=before, scale=given["scale"])
    return {"o": (last, o[-1:]), "state": (before, state)}


def _strides_do_not_count(ops: Any, **given: Any) -> Pairs:
    plain = {k: t.contiguous() if isinstance(t, Tensor) else t for k, t in given.items()}
    (o, state), (o2, state2) = _run(ops, plain), _run(ops, given, state=given["state"].clone())
    ops.gated_delta_rule(**given)
    return {"o": (o, o2), "state": (state, state2), "in place": (state, given["state"])}


def _auto_ignores_lengths(ops: Any, **given: Any) -> Pairs:
    """form="auto" over short and long sequences together gives the bits that it gives one by one."""
    return _singles(ops, **given)


def _reads_no_neighbour(ops: Any, **given: Any) -> Pairs:
    o, state = _run(ops, given)
    ends = given["cu_seqlens"]
    other = {k: given[k].clone() for k in ("q", "k", "v")}
    for t in other.values():
        t[int(ends[1]) : int(ends[2])] = float("nan")
    o2, state2 = _run(ops, given, **other)
    return {"o": (o[: ends[1]], o2[: ends[1]]), "state": (state[:1], state2[:1]), "after": (o[ends[2] :], o2[ends[2] :])}


def _untouched(ops: Any, **given: Any) -> Pairs:
    """Slots that no sequence names keep their bits; the rows of one that has no slot are zero to the bit."""
    o, state = _run(ops, given)
    live = given["state_indices"].tolist()
    idle = [i for i in range(len(state)) if i not in live]
    ends, dead = given["cu_seqlens"].tolist(), torch.zeros(len(o), dtype=torch.bool)
    for i, slot in enumerate(live):
        dead[ends[i] : ends[i + 1]] = slot < 0
    dead[ends[-1] :] = True
    return {"slots": (given["state"][idle], state[idle]), "rows": (torch.zeros_like(o[dead]), o[dead])}


def _gathered(ops: Any, **given: Any) -> Pairs:
    """Prefill takes no 16-bit state: gathered to float32, run and scattered back, a bf16 cache holds the rounded states."""
    cache = torch.full((7, *given["state"].shape[1:]), 999.0, dtype=BF16, device=given["q"].device)
    slots = torch.tensor([5, 0], device=cache.device)
    ops.scatter_state(cache=cache, rows=given["state"], indices=slots)
    rows = ops.gather_state(cache=cache, indices=slots)
    o, after = _run(ops, given, state=rows)
    ops.scatter_state(cache=cache, rows=after, indices=slots)
    exact, exact_after = _run(ops, given, state=given["state"].to(BF16).float())
    return {
        "o": (exact, o),
        "cache": (exact_after.to(BF16), cache[slots]),
        "idle": (torch.full_like(cache[1:5], 999.0), cache[1:5]),
    }


def _repeats(ops: Any, **given: Any) -> Pairs:
    first, second = _run(ops, given), _run(ops, given)
    return {"o": (first[0], second[0]), "state": (first[1], second[1])}


def _law(
    name: str, draw: Callable[[Generator], Arguments], law: Any, spec: tuple[str, ...], compare: Comparer | None = None
) -> Case:
    return Case(OP, name, draw, law=law, compare=compare or bits(), spec=spec)


SEQUENCES = [
    *[
        case(
            f"ends {ends}, {form}",
            partial(inputs.prefill, ends=ends, form=form),
            CLOSE[form],
            ("tail reads on",) if len(ends) > 2 and ends[1] % 64 and ends[1] < ends[-1] else (),
            ("D6", "D50", "G28"),
        )
        for form in FORMS
        for ends in ([0, 2, 5], [0, 150, 200], [0, 10, 22, 31, 40, 52, 61], [0, 0, 64], [0, 64, 64], [0, 0, 0], [0, 4, 7])
    ],
    *[
        case(
            f"fresh {initial}, {str(flags).removeprefix('torch.')}, {form}",
            partial(inputs.prefill, ends=[0, 3, 3, 70], initial=initial, flags=flags, form=form),
            CLOSE[form],
            ("stale state",),
            ("D16", "G28", "G30"),
        )
        for form in FORMS
        for initial, flags in (([1, 0, 0], torch.bool), ([0, 1, 1], torch.int8), ([0, 0, 0], torch.int32))
    ],
    *[
        case(
            f"slots of a pool, {str(index).removeprefix('torch.')}, {form}",
            partial(inputs.prefill, ends=[0, 3, 9, 70], slots=[4, 0, -1], pool=6, tokens=75, index=index, form=form),
            CLOSE[form],
            ("-1 is the last slot", "slot 0 is no slot"),
            ("D6", "D81", "G39"),
        )
        for form in FORMS
        for index in (torch.int32, torch.int64)
    ],
    *[
        _law(
            f"idle slots and dead rows, {form}",
            partial(inputs.prefill, ends=[0, 3, 9, 70], slots=[4, 0, -1], pool=6, tokens=75, form=form),
            _untouched,
            ("D6", "D81", "G39"),
        )
        for form in FORMS
    ],
    *[
        case(
            f"no tokens, fresh {fresh}, {form}",
            partial(inputs.prefill, ends=[0, 0, 0], initial=[0, 1] if fresh else None, form=form),
            bits_or_close,
            ("stale state",) if fresh else (),
            ("G30",),
        )
        for form in FORMS
        for fresh in (False, True)
        for bits_or_close in (close(abs=1e-12),)
    ],
    *[
        case(
            f"rows past the end, {form}",
            partial(inputs.prefill, ends=[0, 5], tokens=9, form=form),
            CLOSE[form],
            (),
            ("D6", "G41"),
        )
        for form in FORMS
    ],
    *[
        _law(f"singles, {ends}, {form}", partial(inputs.prefill, ends=ends, form=form, sizes=(20, 12)), _singles, ("D6",))
        for form in (*FORMS, "auto")
        for ends in ([0, 2, 5], [0, 150, 200, 201, 201, 270])
    ],
    *[
        _law(f"single heads, {form}", partial(inputs.prefill, ends=[0, 70], form=form), _single_heads, ("D5",), close(abs=1e-6))
        for form in FORMS
    ],
    *[
        _law(
            f"reads no neighbour, {form}",
            partial(inputs.prefill, ends=[0, 70, 131, 140], form=form),
            _reads_no_neighbour,
            ("D6", "G25"),
        )
        for form in FORMS
    ],
    *[
        _law(
            f"strides, {'packed' if packed else 'transposed'}, {form}",
            partial(_strided, form=form, packed=packed),
            _strides_do_not_count,
            ("G38",),
        )
        for form in FORMS
        for packed in (True, False)
    ],
    _law("gathered from a bf16 cache", partial(inputs.prefill, ends=[0, 5, 40]), _gathered, ("D61", "D62", "D78")),
    _law("one token is a step, recurrent", partial(inputs.prefill, ends=[0, 1, 2, 3, 4], form="recurrent"), _is_step, ("D7",)),
    _law("one token is a step, chunk", partial(inputs.prefill, ends=[0, 1, 2, 3, 4], form="chunk"), _is_step, ("D7",), UNSAID),
    _law(
        "a chain of steps, recurrent",
        partial(inputs.prefill, ends=[0, 37], sizes=(100, 60), form="recurrent"),
        _chain,
        ("D7", "D67"),
    ),
    _law(
        "a chain of steps, chunk",
        partial(inputs.prefill, ends=[0, 67], sizes=(100, 60), form="chunk"),
        _chain,
        ("D7", "D49"),
        UNSAID,
    ),
    *[
        _law(
            f"{tokens - 1} tokens and one",
            partial(inputs.prefill, ends=[0, tokens], heads=(1, 2)),
            _prefill_and_step,
            ("G27",),
            UNSAID,
        )
        for tokens in range(60, 71)
    ],
    *[_law(f"twice, {form}", partial(inputs.prefill, ends=[0, 70, 90], form=form), _repeats, ("G54",)) for form in FORMS],
]


def _base(**changed: Any) -> Arguments:
    given = {**inputs.prefill(Generator().manual_seed(1), [0, 2, 5]), "out": poisoned(5, 6, 8)}
    return {**given, **changed}


REFUSALS = [
    refusal(OP, name, text, spec=spec, cpu_only=cpu_only, **_base(**changed))
    for name, text, spec, cpu_only, changed in (
        (
            "f16 state",
            "gdn_prefill: state must be f32; gather compressed cache rows first",
            ("D9",),
            False,
            {"state": torch.zeros(2, 6, 8, 16, dtype=F16)},
        ),
        (
            "bf16 state",
            "gdn_prefill: state must be f32; gather compressed cache rows first",
            ("D9",),
            False,
            {"state": torch.zeros(2, 6, 8, 16, dtype=BF16)},
        ),
        (
            "Hv no multiple of Hk",
            "gated_delta_rule: Hv must be a multiple of Hk (GQA broadcast)",
            ("D9", "D10"),
            False,
            {"q": torch.zeros(5, 4, 16), "k": torch.zeros(5, 4, 16)},
        ),
        ("no scale", "gated_delta_rule: args.scale must be set (> 0)", ("D9", "D10"), False, {"scale": None}),
        ("scale 0", "gated_delta_rule: args.scale must be set (> 0)", ("D9", "D10"), False, {"scale": 0.0}),
        ("scale below 0", "gated_delta_rule: args.scale must be set (> 0)", ("D9", "D10"), False, {"scale": -1.0}),
        ("g in bf16", "gated_delta_rule: g/beta must be f32", ("D10",), False, {"g": torch.zeros(5, 6, dtype=BF16)}),
        ("beta in f16", "gated_delta_rule: g/beta must be f32", ("D10",), False, {"beta": torch.zeros(5, 6, dtype=F16)}),
        (
            "start above 0",
            "gated_delta_rule: bad query_start_loc bounds",
            ("D6", "D10", "G31"),
            True,
            {"cu_seqlens": torch.tensor([1, 2, 5])},
        ),
        (
            "end past T",
            "gated_delta_rule: bad query_start_loc bounds",
            ("D6", "D10", "G31"),
            True,
            {"cu_seqlens": torch.tensor([0, 2, 6])},
        ),
        (
            "falling ends",
            "gated_delta_rule: query_start_loc not monotonic",
            ("D6", "D10", "G31"),
            True,
            {"cu_seqlens": torch.tensor([0, 4, 3])},
        ),
        ("states for other sequences", "one state row per sequence", ("D6",), False, {"state": torch.zeros(3, 6, 8, 16)}),
        ("slot past the pool", "state_idx out of range", ("D10", "G31"), True, {"state_indices": torch.tensor([0, 2])}),
        ("one slot twice", "duplicate live state_idx", ("D10",), True, {"state_indices": torch.tensor([1, 1])}),
        ("a state of [K, V]", "expected state of shape", ("G13",), False, {"state": torch.zeros(2, 6, 16, 8)}),
        ("integer q", "expected q of dtype", ("D10",), False, {"q": torch.zeros(5, 2, 16, dtype=torch.int32)}),
        (
            "q with columns apart",
            "expected q with a contiguous last axis",
            ("D10",),
            False,
            {"q": torch.zeros(5, 2, 32)[..., ::2]},
        ),
        (
            "state with columns apart",
            "expected state with a contiguous last axis",
            ("D10",),
            False,
            {"state": torch.zeros(2, 6, 16, 8).transpose(2, 3)},
        ),
        ("another form", "expected form to be one of", ("D53",), False, {"form": "fast"}),
        ("float indices", "expected state_indices of dtype int32, int64", ("D10",), False, {"state_indices": torch.zeros(2)}),
        (
            "flags of int64",
            "expected has_initial_state of dtype bool, int8, int32",
            ("D16",),
            False,
            {"has_initial_state": torch.zeros(2, dtype=torch.int64)},
        ),
        ("an out of other heads", "expected out of shape", ("D10",), False, {"out": poisoned(5, 6, 7)}),
        ("an out of integers", "expected out of dtype", ("D8",), False, {"out": torch.zeros(5, 6, 8, dtype=torch.int32)}),
    )
]

CASES = SEQUENCES + REFUSALS
