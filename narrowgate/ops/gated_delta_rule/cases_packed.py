"""What the packed step must do (SPEC D30 to D42, D48)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from narrowgate.conformance.case import Arguments, Case, Rival
from narrowgate.conformance.compare import Comparer, all_of, bits, close, rmse_ratio
from narrowgate.conformance.fixtures import BF16, F16, F32, UNSAID, poisoned, refusal, short
from narrowgate.ops.gated_delta_rule import cases_inputs as inputs
from narrowgate.ops.gated_delta_rule import oracle
from narrowgate.ops.gated_delta_rule.cases_step import STORED

OP = "gated_delta_rule_packed_step"
Pairs = dict[str, tuple[Tensor, Tensor]]
FINE = close(abs=1e-6, rel=1e-6)  # narrow enough to see one rounding too many (SPEC Z15)
COARSE = {F32: close(abs=1e-5), BF16: all_of(close(abs=2e-2), rmse_ratio(1e-2)), F16: all_of(close(abs=2e-2), rmse_ratio(1e-2))}
ALWAYS = ("k before q", "a and b swapped", "state [k][v]")
FINER = ("norm rounded", "beta rounding swapped")  # seen only with 16-bit inputs and a float32 state and output


def rivals(*names: str) -> tuple[Rival, ...]:
    return tuple(Rival(name, partial(oracle.packed, wrong=name)) for name in names)


def case(
    name: str, draw: Callable[[Generator], Arguments], compare: Comparer | dict[str, Comparer], wrong: tuple[str, ...],
    spec: tuple[str, ...], full: bool = False,
) -> Case:  # fmt: skip
    return Case(OP, name, draw, oracle.packed, compare, rivals=rivals(*wrong), spec=spec, full=full)


# ---- written answers


def _hand(_: Generator, dtype: torch.dtype = F32, out: torch.dtype = F32) -> Arguments:
    return {
        "mixed_qkv": torch.tensor([[3.0, 4.0, 0.0, 2.0, 1.0, -1.0]]).to(dtype),
        "a": torch.tensor([[0.5]]).to(dtype), "b": torch.tensor([[1.0]]).to(dtype),
        "A_log": torch.zeros(1), "dt_bias": torch.tensor([0.5]), "state": torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]),
        "state_indices": torch.tensor([0], dtype=torch.int32), "scale": 0.5, "out": poisoned(1, 1, 2, dtype=out),
    }  # fmt: skip


def _written(o: list[float], state: list[list[float]], /, **_: Any) -> dict[str, Tensor]:
    return {"out": torch.tensor([[o]]), "state": torch.tensor([[state]])}


HAND = [
    Case(
        OP, f"hand, {short(dtype)} to {short(out)}", partial(_hand, dtype=dtype, out=out), partial(_written, o, state),
        {"out": close(abs=limit), "state": close(abs=1e-6)}, rivals=rivals(*wrong), spec=("D31", "D32", "D33", "D39"),
    )
    for dtype, out, o, state, limit, wrong in (
        (F32, F32, [0.43096944, 0.06535114], [[0.26894142, 0.87571756], [0.80682426, -0.44174034]], 1e-6, ALWAYS[:1]),
        (BF16, F32, [0.43086041, 0.06584088], [[0.26894142, 0.87544499], [0.80682426, -0.44051599]], 1e-6, FINER[1:]),
        (BF16, BF16, [0.43164062, 0.06591797], [[0.26894142, 0.87544499], [0.80682426, -0.44051599]], 1e-7, FINER[1:]),
        (F16, F16, [0.4309082, 0.06542969], [[0.26894142, 0.87567064], [0.80682426, -0.44152955]], 1e-7, FINER[1:]),
    )
]  # fmt: skip


def _past_the_branch(g: Generator) -> Arguments:
    given = inputs.packed(g, 3, dtype=F32)
    given["a"][:, 0], given["a"][:, 1], given["a"][:, 2] = 1e4, 89.0, -100.0
    given["A_log"] = given["A_log"] - 6  # so that a decay of softplus(89) is not yet zero
    return given


def _short_keys(g: Generator) -> Arguments:
    """q and k of norm about 1e-3, where eps counts."""
    given = inputs.packed(g, 3, sizes=(16, 12))
    given["mixed_qkv"][:, : 2 * 2 * 16] *= 2e-4
    return given


# ---- laws


def _run(ops: Any, given: Arguments, **changed: Any) -> tuple[Tensor, Tensor]:
    given = {**given, **changed}
    given["state"] = given["state"].clone()
    return ops.gated_delta_rule_packed_step(**given), given["state"]


def _strided(ops: Any, **given: Any) -> Pairs:
    plain = {k: given[k].contiguous() for k in ("mixed_qkv", "a", "b")}
    (o, state), (o2, state2) = _run(ops, given, **plain), _run(ops, given)
    return {"o": (o, o2), "state": (state, state2)}


def _rows_alone(ops: Any, **given: Any) -> Pairs:
    """A row's bits do not depend on its neighbours; dead rows are zero, idle slots keep their bits."""
    o, state = _run(ops, given)
    slots, found = given["state_indices"].tolist(), Pairs()
    for i, slot in enumerate(slots):
        if slot < 0:
            found[f"o{i}"] = (torch.zeros_like(o[i]), o[i])
            continue
        one = {k: given[k][i : i + 1] for k in ("mixed_qkv", "a", "b", "state_indices")}
        o2, state2 = _run(ops, given, **one)
        found |= {f"o{i}": (o2[0], o[i]), f"state{i}": (state2[slot], state[slot])}
    idle = [i for i in range(len(state)) if i not in slots]
    return {**found, "idle": (given["state"][idle], state[idle])}


def _other_path(ops: Any, **given: Any) -> Pairs:
    """With beta unrounded, the same as post-conv and step within float32 rounding; with beta rounded, visibly not."""
    o, state = _run(ops, given)
    _, _, values, keys = given["state"].shape
    stepped = given["state"].clone()
    width = given["mixed_qkv"].shape[1] - given["a"].shape[1] * values
    q, k, v, g, beta = ops.gdn_post_conv(
        given["mixed_qkv"].float(), given["a"], given["b"], given["A_log"], given["dt_bias"],
        num_k_heads=width // 2 // keys, head_k_dim=keys, head_v_dim=values,
    )  # fmt: skip
    slots = given["state_indices"]
    o2 = ops.gated_delta_rule_step(q, k, v, g, beta, stepped, scale=given["scale"], state_indices=slots)
    return {"o": (o2, o.float()), "state": (stepped, state)}


def _states_alone(ops: Any, **given: Any) -> Pairs:
    return {"state": _other_path(ops, **given)["state"]}


def _beta_rounded(**given: Any) -> dict[str, Tensor]:
    given.pop("round_beta")
    return {k: t.float() for k, t in oracle.packed(**given).items()}


def _law(name: str, draw: Any, law: Any, spec: tuple[str, ...], compare: Comparer | None = None, *seen: Rival) -> Case:
    return Case(OP, name, draw, law=law, compare=compare or bits(), rivals=seen, spec=spec)


DEAD = [0, 3, 1, -1, -1, -1]

PACKED = [
    *[
        case(
            f"matrix, {short(dtype)}, pads {pads}",
            partial(inputs.packed, rows=6, slots=DEAD, pool=6, dtype=dtype, pads=pads),
            {"o": COARSE[dtype], "state": UNSAID},
            (*ALWAYS, "heads tiled", "slot 0 is no slot"),
            ("D35", "D38", "D81"),
        )
        for dtype in (F32, BF16, F16)
        for pads in ((0, 0), (64, 5))
    ],
    *[
        case(
            f"one rounding too many, {short(dtype)}, state {short(state)}",
            partial(inputs.packed, rows=6, sizes=(16, 12), slots=DEAD, pool=6, dtype=dtype, out=F32, state=state),
            {"out": FINE, "state": UNSAID if state == F32 else STORED[state]},
            (*FINER, *(("output from the rounded state",) if state != F32 else ())),
            ("D31", "D33", "D34", "Z15"),
        )
        for dtype in (BF16, F16)
        for state in (F32, BF16, F16)
    ],
    *[
        case(
            f"state {short(state)}, A_log {short(per_head[0])}, dt_bias {short(per_head[1])}",
            partial(inputs.packed, rows=3, dtype=dtype, state=state, per_head=per_head),
            {"o": COARSE[dtype], "state": STORED[state]},
            ALWAYS[:2],
            ("D12", "D37"),
        )
        for dtype, state, per_head in (
            (BF16, F32, (F32, BF16)),
            (F32, BF16, (BF16, F32)),
            (F16, F16, (F16, F16)),
            (F32, F16, (F32, F16)),
        )
    ],
    *[
        case(
            f"Hk {heads[0]}, Hv {heads[1]}, K {sizes[0]}, V {sizes[1]}",
            partial(inputs.packed, rows=3, heads=heads, sizes=sizes),
            {"o": UNSAID, "state": UNSAID},
            ("k before q", "state [k][v]"),
            ("D30", "G21", "G22"),
        )
        for heads, sizes in (((1, 3), (60, 100)), ((2, 2), (128, 128)), ((1, 8), (96, 192)), ((2, 6), (16, 8)))
    ],
    *[
        case(
            f"beta not rounded, {short(dtype)}",
            partial(inputs.packed, rows=4, dtype=dtype, out=F32, round_beta=False),
            {"out": FINE, "state": FINE},
            FINER,
            ("D33", "D48"),
        )
        for dtype in (BF16, F16)
    ],
    case("short keys", _short_keys, {"o": close(abs=1e-6), "state": close(abs=1e-6)}, ("eps after the root",), ("D31", "G8")),
    case("past the branch of softplus", _past_the_branch, {"o": UNSAID, "state": UNSAID}, ("a and b swapped",), ("D32", "G5")),
    case(
        "fewer slots than rows",
        partial(inputs.packed, rows=3, slots=[0, 1, -1], pool=2),
        {"o": UNSAID, "state": UNSAID},
        ALWAYS[:2],
        ("D35",),
    ),
    case(
        "int64 indices",
        partial(inputs.packed, rows=3, slots=[2, 0, 4], pool=5, index=torch.int64),
        {"o": UNSAID, "state": UNSAID},
        ("slot 0 is no slot",),
        ("D30",),
    ),
    case(
        "merged gates, small",
        partial(inputs.packed, rows=5, heads=(2, 6), sizes=(16, 12), dtype=BF16, merged=True),
        {"o": COARSE[BF16], "state": UNSAID},
        ALWAYS,
        ("D41",),
    ),
    *[
        case(
            f"merged gates, Hv {hv}",
            partial(inputs.packed, rows=16, heads=(16, hv), sizes=(128, 128), dtype=BF16, merged=True),
            {"o": COARSE[BF16], "state": UNSAID},
            ALWAYS[:2],
            ("D41",),
            full=True,
        )
        for hv in (48, 32)
    ],
    case(
        "32 rows of Hk 4, Hv 8, 128 x 128",
        partial(inputs.packed, rows=32, heads=(4, 8), sizes=(128, 128), pads=(64, 5)),
        {"o": UNSAID, "state": UNSAID},
        ALWAYS[:2],
        ("D38",),
        full=True,
    ),
    case("no rows", partial(inputs.packed, rows=0), {"o": UNSAID, "state": UNSAID}, (), ("D30",)),
    *[
        _law(
            f"strides, {short(dtype)}",
            partial(inputs.packed, rows=6, slots=DEAD, pool=6, dtype=dtype, pads=(64, 5)),
            _strided,
            ("D30", "D38"),
        )
        for dtype in (F32, BF16, F16)
    ],
    *[
        _law(
            f"rows alone, state {short(state)}",
            partial(inputs.packed, rows=6, slots=DEAD, pool=6, sizes=(16, 12), state=state),
            _rows_alone,
            ("D35", "D81"),
        )
        for state in (F32, BF16)
    ],
    *[
        _law(
            f"the other path, {short(dtype)}",
            partial(inputs.packed, rows=4, sizes=(16, 12), dtype=dtype, round_beta=False, out=None),
            _other_path,
            ("D48",),
            close(abs=1e-5) if dtype == F32 else all_of(close(abs=2e-2), rmse_ratio(1e-2)),
        )
        for dtype in (F32, BF16)
    ],
    _law(
        "the other path, states, bf16",
        partial(inputs.packed, rows=4, sizes=(16, 12), dtype=BF16, round_beta=False),
        _states_alone,
        ("D48",),
        close(abs=1e-5),
        Rival("beta rounded", _beta_rounded),
    ),
]


def _base(**changed: Any) -> Arguments:
    return {**inputs.packed(Generator().manual_seed(1), 3), "out": poisoned(3, 4, 8), **changed}


REFUSALS = [
    refusal(OP, name, f"{OP}: {text}", spec=spec, cpu_only=cpu_only, **_base(**changed))
    for name, text, spec, cpu_only, changed in (
        ("no room for q and k", "invalid packed mixed_qkv width", ("D42",), False, {"mixed_qkv": torch.zeros(3, 32)}),
        ("an odd rest", "invalid packed mixed_qkv width", ("D42",), False, {"mixed_qkv": torch.zeros(3, 65)}),
        (
            "a q of half a head",
            "packed Q width must be divisible by Dk",
            ("D42",),
            False,
            {"mixed_qkv": torch.zeros(3, 32 + 24)},
        ),
        ("three key heads", "Hv must be a multiple of inferred Hk", ("D42",), False, {"mixed_qkv": torch.zeros(3, 32 + 48)}),
        ("one slot twice", "duplicate live state_idx", ("D36",), True, {"state_indices": torch.tensor([2, -1, 2])}),
        ("slot past the pool", "state_idx out of range", ("D36",), True, {"state_indices": torch.tensor([0, 1, 3])}),
        ("no scale", "args.scale must be set (> 0)", ("D10",), False, {"scale": None}),
        ("gates of other heads", "expected a of shape [3, 4]", ("D10",), False, {"a": torch.zeros(3, 6)}),
        ("dt_bias of other heads", "expected dt_bias of shape [4]", ("D10",), False, {"dt_bias": torch.zeros(3)}),
        (
            "indices for other rows",
            "expected state_indices of shape [3]",
            ("D10",),
            False,
            {"state_indices": torch.tensor([0])},
        ),
        (
            "columns apart",
            "expected mixed_qkv with a contiguous last axis",
            ("D30",),
            False,
            {"mixed_qkv": torch.zeros(3, 128)[:, ::2]},
        ),
    )
]

CASES: list[Case] = HAND + PACKED + REFUSALS
