"""What the single step must do (SPEC D3, D7, D8, D11 to D14, D56, D81; KNOWN_FAILURES G)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from narrowgate.conformance.case import Arguments, Case, Rival
from narrowgate.conformance.compare import Comparer, all_of, bits, close, rmse_ratio
from narrowgate.conformance.fixtures import BF16, F16, F32, ROUNDED, UNSAID, poisoned, refusal, short
from narrowgate.ops.gated_delta_rule import cases_inputs as inputs
from narrowgate.ops.gated_delta_rule import oracle

OP = "gated_delta_rule_step"
Pairs = dict[str, tuple[Tensor, Tensor]]
ALWAYS = ("k scaled too", "q not scaled", "q scaled twice", "read before decay", "output before write", "state [k][v]")
STORED = {
    F32: UNSAID,
    BF16: all_of(close(abs=1e-5, rel=2**-7), rmse_ratio(3e-3)),
    F16: all_of(close(abs=1e-5, rel=2**-10), rmse_ratio(4e-4)),
}


def compare(out: torch.dtype = F32, state: torch.dtype = F32) -> dict[str, Comparer]:
    return {"o": ROUNDED[out], "out": ROUNDED[out], "state": STORED[state]}


def case(
    name: str, draw: Callable[[Generator], Arguments], wrong: tuple[str, ...], spec: tuple[str, ...],
    out: torch.dtype = F32, state: torch.dtype = F32, full: bool = False,
) -> Case:  # fmt: skip
    rivals = tuple(Rival(w, partial(oracle.step, wrong=w)) for w in wrong)
    return Case(OP, name, draw, oracle.step, compare(out, state), rivals=rivals, spec=spec, full=full)


def _hand(_: Generator, dtype: torch.dtype = F32) -> Arguments:
    return {
        "q": torch.tensor([[[1.0, 0.0]]]).to(dtype), "k": torch.tensor([[[0.0, 1.0]]]).to(dtype),
        "v": torch.tensor([[[2.0, 1.0]]]).to(dtype), "g": torch.tensor([[0.5]]).log(), "beta": torch.tensor([[0.5]]),
        "state": torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), "scale": 0.5,
    }  # fmt: skip


def _hand_answer(**_: Any) -> dict[str, Tensor]:
    return {"o": torch.tensor([[[0.25, 0.75]]]), "state": torch.tensor([[[[0.5, 1.5], [1.5, 1.5]]]])}


# ---- laws


def _run(ops: Any, given: Arguments, **changed: Any) -> tuple[Tensor, Tensor]:
    given = {**given, **changed}
    given["state"] = given["state"].clone()
    return ops.gated_delta_rule_step(**given), given["state"]


def _compact(ops: Any, **given: Any) -> Pairs:
    """Slots of a pool in place, and the same rows in a state of their own; idle slots keep their bits, dead rows are zero."""
    live = given["state_indices"] >= 0
    slots = given["state_indices"][live].long()
    rows = {k: given[k][live] for k in ("q", "k", "v", "g", "beta")}
    o, state = _run(ops, given)
    o2, state2 = _run(ops, {**rows, "scale": given["scale"]}, state=given["state"][slots])
    idle = torch.tensor([i for i in range(len(state)) if i not in slots.tolist()], dtype=torch.long, device=state.device)
    return {
        "o": (o2, o[live]), "state": (state2, state[slots]), "idle": (given["state"][idle], state[idle]),
        "dead": (torch.zeros_like(o[~live]), o[~live]),
    }  # fmt: skip


def _rows_alone(ops: Any, **given: Any) -> Pairs:
    o, state = _run(ops, given)
    found = Pairs()
    for i in range(len(o)):
        one = {k: given[k][i : i + 1] for k in ("q", "k", "v", "g", "beta", "state")}
        o2, state2 = _run(ops, {**one, "scale": given["scale"]})
        found |= {f"o{i}": (o2, o[i : i + 1]), f"state{i}": (state2, state[i : i + 1])}
    return found


def _output_is_not_rounded(ops: Any, **given: Any) -> Pairs:
    """A 16-bit state that holds exactly what a float32 one does gives the same output: rounding comes after."""
    wide = _run(ops, given, state=given["state"].float())
    o, state = _run(ops, given)
    return {"o": (wide[0], o), "state": (wide[1].to(state.dtype), state)}


def _drift(ops: Any, g: Tensor, rows: int, heads: tuple[int, int], sizes: tuple[int, int], steps: int) -> Pairs:
    """Steps in a row with a bf16 state, and with a float32 one."""
    found, held = [], torch.zeros(rows, heads[1], sizes[1], sizes[0], device=g.device)
    wide, narrow = held.clone(), held.bfloat16()
    for t in range(steps):
        given = {k: t.to(g.device) for k, t in inputs.flow(Generator().manual_seed(t), rows, heads, sizes).items()}
        a = ops.gated_delta_rule_step(**given, state=wide, scale=sizes[0] ** -0.5)
        b = ops.gated_delta_rule_step(**given, state=narrow, scale=sizes[0] ** -0.5)
        found.append((a, b))
    return {"o": (torch.stack([a for a, _ in found]), torch.stack([b for _, b in found])), "state": (wide, narrow.float())}


def _many_steps(ops: Any, steps: int, start: Tensor) -> Pairs:
    """Thousands of steps with bf16 inputs and a float32 state, against float64; and the state's size stays bounded."""
    heads, sizes = (1, 2), (16, 12)
    drawn = inputs.flow(Generator().manual_seed(5), steps, heads, sizes, BF16, decay=0.02)
    state, exact = start.clone(), start.double().cpu()
    wide, given = {k: t.double() for k, t in drawn.items()}, {k: t.to(start.device) for k, t in drawn.items()}
    names = ("q", "k", "v", "g", "beta")
    for t in range(steps):
        ops.gated_delta_rule_step(**{name: given[name][t : t + 1] for name in names}, state=state, scale=0.25)
        q, k, v, g, beta = (wide[name][t] for name in names)
        exact[0] = oracle.token(exact[0], q, k, v, g, beta, 0.25)[1]
    bounded = torch.linalg.matrix_norm(state.float(), ord=2) < 10
    return {"state": (exact, state), "dtype": (torch.zeros((), dtype=F32), torch.zeros((), dtype=state.dtype)),
            "bounded": (torch.ones_like(bounded), bounded)}  # fmt: skip


def _huge_state(ops: Any, weight: Tensor, **given: Any) -> Pairs:
    """float16 inputs and a state of 3e4: the readout, kept in float32, and the norm after it are finite and right."""
    o = torch.empty(given["v"].shape, device=given["v"].device)
    held = given["state"].clone()
    ops.gated_delta_rule_step(**{**given, "state": held}, out=o)
    y = ops.rms_norm_gated(o, given["v"], weight, eps=1e-6)
    on_cpu: Arguments = {k: t.cpu() if isinstance(t, Tensor) else t for k, t in given.items()}
    exact = oracle.step(**on_cpu)["o"]
    gate = given["v"].double().cpu()
    norm = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gate / (1 + torch.exp(-gate))
    return {"o": (exact, o), "y": (norm, y)}


def _huge(g: Generator) -> Arguments:
    given = inputs.step(g, 2, (1, 2), (16, 8), dtype=F16)
    given["state"] = given["state"].sign() * 3e4
    given["q"] = (given["q"] * 16).to(F16)
    return {**given, "scale": 1.0, "weight": torch.ones(8)}


def _long(g: Generator, steps: int) -> Arguments:
    return {"steps": steps, "start": inputs.states(g, 1, (1, 2), (16, 12))}


def _strided(ops: Any, **given: Any) -> Pairs:
    """q, k and v as slices of one row; a pool whose slots lie apart."""
    rows, (hk, keys), (hv, values) = len(given["q"]), given["q"].shape[1:], given["v"].shape[1:]
    row = torch.cat([given[n].flatten(1) for n in ("q", "k", "v")], dim=1)
    parts = row.split([hk * keys, hk * keys, hv * values], dim=1)
    views = {n: t.unflatten(1, (-1, d)) for n, t, d in zip("qkv", parts, (keys, keys, values), strict=True)}
    pool = torch.full((rows, 2, *given["state"].shape[1:]), 999.0, dtype=given["state"].dtype, device=row.device)
    pool[:, 0] = given["state"]
    o = ops.gated_delta_rule_step(**{**given, **views, "state": pool[:, 0]})
    o2, state = _run(ops, given)
    return {"o": (o2, o), "state": (state, pool[:, 0]), "gaps": (torch.full_like(state, 999.0), pool[:, 1])}


def _law(name: str, draw: Any, law: Any, spec: tuple[str, ...], compare: Any = None, full: bool = False) -> Case:
    return Case(OP, name, draw, law=law, compare=compare or bits(), spec=spec, full=full)


STEP = [
    Case(
        OP,
        "hand",
        _hand,
        _hand_answer,
        close(abs=1e-6),
        rivals=tuple(Rival(w, partial(oracle.step, wrong=w)) for w in ALWAYS if w != "output before write"),
        spec=("D1", "D3", "G10"),
    ),
    Case(
        OP,
        "hand, bf16",
        partial(_hand, dtype=BF16),
        _hand_answer,
        {"o": close(rel=0.01), "state": close(abs=1e-6)},
        rivals=tuple(Rival(w, partial(oracle.step, wrong=w)) for w in ALWAYS if w != "output before write"),
        spec=("D8",),
    ),
    *[
        case(
            f"{rows} rows, Hk {heads[0]}, Hv {heads[1]}, K {sizes[0]}, V {sizes[1]}, state {short(state)}",
            partial(inputs.step, rows=rows, heads=heads, sizes=sizes, state=state),
            (*ALWAYS, *(("heads tiled",) if 1 < heads[0] < heads[1] else ())),
            ("D12", "D56", "G21", "G22", "G23"),
            state=state,
        )
        for state in (F32, BF16, F16)
        for rows, heads, sizes in (
            (3, (2, 6), (16, 8)),
            (2, (2, 2), (128, 128)),
            (1, (1, 3), (60, 100)),
            (5, (1, 8), (96, 192)),
            (4, (4, 4), (8, 8)),
        )
    ],
    *[
        case(
            f"{short(dtype)} to {short(out)}, state {short(state)}",
            partial(inputs.step, rows=3, dtype=dtype, out=out, state=state),
            ALWAYS,
            ("D8", "D12"),
            out,
            state,
        )
        for dtype, out in ((BF16, BF16), (BF16, F32), (F16, F16), (F32, BF16))
        for state in (F32, BF16, F16)
    ],
    *[
        Case(
            OP,
            f"output from the unrounded state, {short(state)}",
            partial(inputs.step, rows=3, state=state),
            oracle.step,
            {"o": close(abs=1e-5, rel=1e-5), "state": STORED[state]},
            rivals=(Rival("rounded first", partial(oracle.step, wrong="output from the rounded state")),),
            spec=("D12", "D34"),
        )
        for state in (BF16, F16)
    ],
    *[
        case(
            f"slots {slots} of {pool}, {str(index).removeprefix('torch.')}, state {short(state)}",
            partial(inputs.step, rows=len(slots), slots=slots, pool=pool, index=index, state=state),
            ("slot 0 is no slot",) if 0 in slots else ("indexed by row",),
            ("D11", "D81", "G39", "G43"),
            state=state,
        )
        for slots, pool in (([2, 0], 3), ([0, 3, -1], 4), ([0, -1, -1], 3), ([63, 5], 64))
        for index, state in ((torch.int32, F32), (torch.int64, BF16))
    ],
    *[
        case(
            f"Dk 512, Dv 32, state {short(state)}",
            partial(inputs.step, rows=2, heads=(1, 2), sizes=(512, 32), slots=[3, 1], pool=4, state=state),
            ALWAYS,
            ("D13",),
            state=state,
        )
        for state in (F16, BF16)
    ],
    case(
        "8 rows, Hk 16, Hv 32, 128 x 128", partial(inputs.step, rows=8, heads=(16, 32), sizes=(128, 128)), ALWAYS[:1], ("D56",)
    ),
    case("slow decay", partial(inputs.step, rows=3, decay=0.02), ALWAYS, ("Z15",)),
    case("no rows", partial(inputs.step, rows=0), (), ("D11",)),
    *[
        _law(
            f"compact, slots {slots} of {pool}, state {short(state)}",
            partial(inputs.step, rows=len(slots), slots=slots, pool=pool, state=state),
            _compact,
            ("D11", "D57", "D81", "G19", "G39", "G42"),
        )
        for slots, pool in (([2, -1, 0], 5), ([0, 3, -1], 4), ([63, 5], 64))
        for state in (F32, BF16, F16)
    ],
    *[
        _law(
            f"rows alone, K {sizes[0]}, V {sizes[1]}, {short(state)}",
            partial(inputs.step, rows=7, sizes=sizes, state=state),
            _rows_alone,
            ("D7", "D68"),
        )
        for sizes in ((16, 8), (128, 37), (100, 60), (3, 5))
        for state in (F32, BF16)
    ],
    *[
        _law(
            f"stored rounded, {short(state)}", partial(inputs.step, rows=3, state=state), _output_is_not_rounded, ("D12", "D34")
        )
        for state in (BF16, F16)
    ],
    _law("strides", partial(inputs.step, rows=4, sizes=(16, 16)), _strided, ("G38",)),
    _law("float16 inputs, a state of 3e4", _huge, _huge_state, ("G6",), all_of(close(rel=1e-4, abs=1e-4), rmse_ratio(1e-4))),
    _law(
        "drift of a bf16 state, small",
        lambda g: {"g": torch.zeros(1), "rows": 2, "heads": (2, 4), "sizes": (32, 32), "steps": 16},
        _drift,
        ("D14",),
        close(abs=5e-2),
    ),
    _law(
        "drift of a bf16 state",
        lambda g: {"g": torch.zeros(1), "rows": 8, "heads": (16, 32), "sizes": (128, 128), "steps": 16},
        _drift,
        ("D14",),
        close(abs=5e-2),
        full=True,
    ),
    *[
        _law(
            f"{steps} steps",
            partial(_long, steps=steps),
            _many_steps,
            ("G9", "G11"),
            {"state": close(abs=1e-3), "dtype": bits(), "bounded": bits()},
            full=steps > 1000,
        )
        for steps in (500, 4096)
    ],
]


def _base(**changed: Any) -> Arguments:
    return {**inputs.step(Generator().manual_seed(1), 3), "out": poisoned(3, 6, 8), **changed}


REFUSALS = [
    refusal(OP, name, text, spec=spec, cpu_only=cpu_only, **_base(**changed))
    for name, text, spec, cpu_only, changed in (
        (
            "Hv no multiple of Hk",
            f"{OP}: Hv must be a multiple of Hk (GQA broadcast)",
            ("D9", "D10"),
            False,
            {"q": torch.zeros(3, 4, 16), "k": torch.zeros(3, 4, 16)},
        ),
        ("no scale", f"{OP}: args.scale must be set (> 0)", ("D9", "D10"), False, {"scale": None}),
        ("scale 0", f"{OP}: args.scale must be set (> 0)", ("D9", "D10"), False, {"scale": 0.0}),
        ("g in bf16", f"{OP}: g/beta must be f32", ("D10",), False, {"g": torch.zeros(3, 6, dtype=BF16)}),
        (
            "states for other rows",
            f"{OP}: one state row per token required",
            ("D10",),
            False,
            {"state": torch.zeros(4, 6, 8, 16)},
        ),
        (
            "fewer slots than rows",
            f"{OP}: indexed cache must have >= batch rows",
            ("D10",),
            False,
            {"state": torch.zeros(2, 6, 8, 16), "state_indices": torch.tensor([0, 1, -1])},
        ),
        ("slot past the pool", "state_idx out of range", ("D10",), True, {"state_indices": torch.tensor([0, 1, 3])}),
        ("one slot twice", "duplicate live state_idx", ("D10",), True, {"state_indices": torch.tensor([1, -1, 1])}),
        ("an f64 state", "expected state of dtype", ("D12",), False, {"state": torch.zeros(3, 6, 8, 16, dtype=torch.float64)}),
        ("a state of [K, V]", "expected state of shape", ("G13",), False, {"state": torch.zeros(3, 6, 16, 8)}),
        ("v of other rows", "expected v of shape [3, *, *]", ("D10",), False, {"v": torch.zeros(4, 6, 8)}),
        ("beta of other heads", "expected beta of shape [3, 6]", ("D10",), False, {"beta": torch.zeros(3, 5)}),
        ("an out of other sizes", "expected out of shape", ("D10",), False, {"out": poisoned(3, 6, 9)}),
    )
]

CASES: list[Case] = STEP + REFUSALS
