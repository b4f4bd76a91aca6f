"""Cases of the convolution made short, and the laws that both its forms obey."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from narrowgate.conformance.case import Arguments, Case, Rival
from narrowgate.conformance.compare import Comparer, close
from narrowgate.conformance.fixtures import F32, ROUNDED, uniform
from narrowgate.ops.causal_conv1d import cases_inputs as inputs
from narrowgate.ops.causal_conv1d import oracle
from narrowgate.ops.causal_conv1d.op import causal_conv1d_work

Pairs = dict[str, tuple[Tensor, Tensor]]
ALWAYS = ("taps reversed", "activated inputs stored", "other activation")


def _compare(out: torch.dtype) -> dict[str, Comparer]:
    return {"y": ROUNDED[out], "out": ROUNDED[out], "state": close(abs=1e-6)}


def case(
    op: str, name: str, draw: Any, wrong: tuple[str, ...], spec: tuple[str, ...], out: torch.dtype = F32, **options: Any
) -> Case:
    reading = oracle.forward if op == "causal_conv1d" else oracle.step
    rivals = tuple(Rival(w, partial(reading, wrong=w)) for w in wrong)
    return Case(op, name, draw, reading, _compare(out), rivals=rivals, spec=spec, **options)


def forward(
    name: str, wrong: tuple[str, ...], spec: tuple[str, ...], to: torch.dtype = F32, more: Any = None, /, **draw: Any
) -> Case:
    return case("causal_conv1d", name, partial(inputs.forward, **draw), wrong, spec, to, **(more or {}))


def step(
    name: str, wrong: tuple[str, ...], spec: tuple[str, ...], to: torch.dtype = F32, more: Any = None, /, **draw: Any
) -> Case:
    return case("causal_conv1d_step", name, partial(inputs.step, **draw), wrong, spec, to, **(more or {}))


# ---- written answers


def _hand(
    _: Generator, x: list[float], activation: str, state: list[float], has: int | None = None, step: bool = False
) -> Arguments:
    """SPEC D15, D17, D18: W 3 with bias .5, or W 4 without."""
    given: Arguments = {"x": torch.tensor(x)[:, None], "state": torch.tensor([[state]]), "activation": activation}
    if len(state) == 2:
        given |= {"weight": torch.tensor([[0.25, 0.5, 1.0]]), "bias": torch.tensor([0.5])}
    else:
        given |= {"weight": torch.tensor([[0.25, 0.5, 1.0, 2.0]]), "bias": None}
    if not step:
        given["cu_seqlens"] = torch.tensor([0, len(x)])
    return given if has is None else {**given, "has_initial_state": torch.tensor([has], dtype=torch.int32)}


def _answer(y: list[float] | None, row: list[float], /, **given: Any) -> dict[str, Tensor]:
    wanted = {"y": torch.tensor(y)[:, None]} if y else {"y": oracle.forward(**given)["y"]}
    return {**wanted, "state": torch.tensor([[row]])}


def written(
    op: str, name: str, y: list[float] | None, row: list[float], wrong: tuple[str, ...], spec: tuple[str, ...], /, **draw: Any
) -> Case:
    reading = oracle.forward if op == "causal_conv1d" else oracle.step
    rivals = tuple(Rival(w, partial(reading, wrong=w)) for w in wrong)
    return Case(op, name, partial(_hand, **draw), partial(_answer, y, row), close(abs=1e-6), rivals=rivals, spec=spec)


# ---- laws


def _run(ops: Any, given: Arguments, op: str = "causal_conv1d", **changed: Any) -> tuple[Tensor, Tensor]:
    given = {**given, **changed}
    given["state"] = given["state"].clone()
    return getattr(ops, op)(**given), given["state"]


def _pairs(expected: tuple[Tensor, Tensor], got: tuple[Tensor, Tensor]) -> Pairs:
    return {"y": (expected[0], got[0]), "state": (expected[1], got[1])}


def strided(ops: Any, **given: Any) -> Pairs:
    """x as rows of a longer buffer whose gaps must not matter."""
    op = "causal_conv1d" if "cu_seqlens" in given else "causal_conv1d_step"
    return _pairs(_run(ops, given, op, x=given["x"].contiguous()), _run(ops, given, op))


def widened(ops: Any, **given: Any) -> Pairs:
    """Rows with more taps than W - 1: the same as narrow ones, and what lies behind stays."""
    op = "causal_conv1d" if "cu_seqlens" in given else "causal_conv1d_step"
    taps = given["weight"].shape[1] - 1
    narrow = _run(ops, given, op, state=given["state"][..., :taps].contiguous())
    y, state = _run(ops, given, op)
    return {**_pairs(narrow, (y, state[..., :taps])), "behind": (given["state"][..., taps:], state[..., taps:])}


def with_work(ops: Any, **given: Any) -> Pairs:
    work = tuple(t.to(given["x"].device) for t in causal_conv1d_work(given["cu_seqlens"]))
    turned = tuple(t.flip(0) for t in work)
    plain = _run(ops, given)
    more = _pairs(plain, _run(ops, given, work=turned))
    return {**_pairs(plain, _run(ops, given, work=work)), **{f"{k}, turned": v for k, v in more.items()}}


def written_work(ops: Any, cu_seqlens: Tensor) -> Pairs:
    work = causal_conv1d_work(cu_seqlens)
    return {"sequence": (torch.tensor([0, 1, 1, 1, 2, 2]), work[0]), "chunk": (torch.tensor([0, 0, 1, 2, 0, 1]), work[1])}


def chain(ops: Any, **given: Any) -> Pairs:
    """The step, token by token, over what `causal_conv1d` takes at once."""
    whole, state, rows = _run(ops, given), given["state"].clone(), []
    for t in range(len(given["x"])):
        inner = {k: given[k] for k in ("weight", "bias", "activation")}
        rows.append(ops.causal_conv1d_step(x=given["x"][t : t + 1], state=state, **inner))
    return _pairs((torch.cat(rows), state), whole)


def pieces(ops: Any, **given: Any) -> Pairs:
    """Pieces of 1, 2 and 1 tokens, each shorter than the taps."""
    whole, state, rows, start = _run(ops, given), given["state"].clone(), [], 0
    for n in (1, 2, 1):
        piece = {**given, "x": given["x"][start : start + n], "cu_seqlens": None}
        rows.append(ops.causal_conv1d(**{**piece, "state": state}))
        start += n
    last = given["x"][-3:].t()[None].to(state.dtype)
    return {**_pairs(whole, (torch.cat(rows), state)), "inputs": (last, state)}


def singles(ops: Any, **given: Any) -> Pairs:
    y, state = _run(ops, given)
    ends, found = given["cu_seqlens"].tolist(), Pairs()
    for i in range(len(ends) - 1):
        a, b = ends[i], ends[i + 1]
        flag = {"has_initial_state": given["has_initial_state"][i : i + 1]} if "has_initial_state" in given else {}
        one = _run(ops, given, x=given["x"][a:b], cu_seqlens=None, state=given["state"][i : i + 1], **flag)
        found |= {f"y{i}": (one[0], y[a:b]), f"state{i}": (one[1], state[i : i + 1])}
    return found


def idle_slots(ops: Any, **given: Any) -> Pairs:
    op = "causal_conv1d" if "cu_seqlens" in given else "causal_conv1d_step"
    _, state = _run(ops, given, op)
    idle = [i for i in range(len(state)) if i not in given["state_indices"].tolist()]
    return {"idle": (given["state"][idle], state[idle])}


def qkvz(g: Generator, tokens: int, dtype: torch.dtype, step: bool) -> Arguments:
    """The convolution's columns of a merged projection [1 | q, k, v: 80 | z: 48 | 3]."""
    parent = uniform(g, tokens, 1 + 80 + 48 + 3, low=-3, high=3, dtype=dtype)
    given = inputs.layer(g, tokens, 80, bias=False, dtype=dtype)
    given |= {"x": parent[:, 1:81], "state": uniform(g, tokens if step else 1, 80, 3)}
    return given if step else {**given, "cu_seqlens": None}


def no_rows(keep: str, **given: Any) -> Tensor:
    """Which rows of an output a call leaves alone, as a column."""
    rows = torch.ones(len(given["x"]), 1, dtype=torch.bool)
    if keep == "step":
        return given["state_indices"][:, None] < 0
    ends = given["cu_seqlens"].tolist()
    for i in range(len(ends) - 1):
        if "state_indices" not in given or given["state_indices"][i] >= 0:
            rows[ends[i] : ends[i + 1]] = False
    return rows
