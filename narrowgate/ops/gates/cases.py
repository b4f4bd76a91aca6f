"""What the gates must do (SPEC C1 to C3, D43, D45; KNOWN_FAILURES G5)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from narrowgate.conformance.case import Arguments, Case, Rival
from narrowgate.conformance.compare import all_of, close, rel_l1
from narrowgate.conformance.fixtures import BF16, F16, F32, refusal, short, uniform

Pairs = dict[str, tuple[Tensor, Tensor]]


def _softplus(x: Tensor, wrong: str = "") -> Tensor:
    if wrong == "no branch":
        return torch.log1p(torch.exp(x.float())).double()
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))


def _decay(alpha: Tensor, dt_bias: Tensor, neg_a: Tensor, wrong: str = "") -> dict[str, Tensor]:
    factor = neg_a.double()
    if wrong == "exp again":
        factor = -torch.exp(factor)
    if wrong == "positive":
        factor = -factor
    return {"decay": _softplus(alpha.double() + dt_bias.double(), wrong) * factor}


def _gate(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, wrong: str = "") -> dict[str, Tensor]:
    if wrong == "a and b swapped":
        a, b = b, a
    factor = A_log.double() if wrong == "no exp" else -torch.exp(A_log.double())
    beta = torch.sigmoid(b.double())
    if wrong == "beta rounded":
        beta = beta.to(b.dtype).double()
    x = a.double() + (0 if wrong == "no dt_bias" else dt_bias.double())
    return {"g": _softplus(x, wrong) * factor, "beta": beta}


def _c1(g: Generator, rows: int = 1) -> Arguments:
    """48 heads, of which every third lies past the branch, up to 118."""
    i = torch.arange(48)
    alpha = torch.where(i % 3 == 0, 22.0 + 6.0 * (i % 17), torch.randn(rows, 48, generator=g) * 3)
    dt_bias, neg_a = torch.randn(48, generator=g) * 0.5, -(torch.randn(48, generator=g).abs() + 0.1)
    x = alpha + dt_bias
    if not (bool((x > 20).any()) and bool((x > 88.8).any()) and bool((x < 20).any())):
        raise ValueError("expected inputs on both sides of 20 and past 88")
    if not bool((neg_a < 0).all()):
        raise ValueError("expected a negative factor for every head")
    return {"alpha": alpha, "dt_bias": dt_bias, "neg_a": neg_a}


def _branch(_: Generator, dtype: torch.dtype = F32) -> Arguments:
    a = torch.tensor([[-100.0, 20.0, 20.001, 89.0, 1e4]]).to(dtype)
    return {"a": a, "b": a.flip(1).contiguous() / 16, "A_log": torch.zeros(5), "dt_bias": torch.zeros(5)}


def _inputs(g: Generator, tokens: int, heads: int, dtype: torch.dtype = F32, per_head: torch.dtype = F32) -> Arguments:
    """SPEC D80's ranges; a and b are rows of one merged buffer [1 | b | a | 3]."""
    parent = uniform(g, tokens, 2 * heads + 4, low=-2, high=2, dtype=dtype)
    return {
        "a": parent[:, 1 + heads : 1 + 2 * heads],
        "b": parent[:, 1 : 1 + heads],
        "A_log": uniform(g, heads, low=-1, high=0.5, dtype=per_head),
        "dt_bias": uniform(g, heads, low=-0.5, high=0.5, dtype=per_head),
    }


def _merged(g: Generator, tokens: int, dtype: torch.dtype) -> Arguments:
    given = _inputs(g, tokens, 6, dtype)
    parent = torch.full((tokens, 1 + 6 + 6 + 3), 7.5, dtype=dtype)
    parent[:, 1:7], parent[:, 7:13] = given["b"], given["a"]
    return {**given, "b": parent[:, 1:7], "a": parent[:, 7:13]}


def _views_are_copies(ops: Any, a: Tensor, b: Tensor, **per_head: Tensor) -> Pairs:
    """Strided views of any dtype give the bits of contiguous float32 copies of the rounded values."""
    g, beta = ops.gdn_gate(a.float().contiguous(), b.float().contiguous(), **per_head)
    g2, beta2 = ops.gdn_gate(a, b, **per_head)
    return {"g": (g, g2), "beta": (beta, beta2)}


def _decays(ops: Any, **given: Tensor) -> Pairs:
    """exp(g) < 1 for every head: nothing grows."""
    g = ops.gdn_decay(**given)
    return {"below 1": (torch.ones_like(g, dtype=torch.bool), g.exp() < 1)}


def _same_decay(ops: Any, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Pairs:
    return {"g": (ops.gdn_decay(a, dt_bias, -torch.exp(A_log.double()).float()), ops.gdn_gate(a, b, A_log, dt_bias)[0])}


def _decay_rival(name: str) -> Rival:
    return Rival(name, partial(_decay, wrong=name))


def _gate_rivals(*names: str) -> tuple[Rival, ...]:
    return tuple(Rival(name, partial(_gate, wrong=name)) for name in names)


_SHAPE = ("a and b swapped", "no exp", "no dt_bias")

CASES: list[Case] = [
    Case(
        "gdn_decay", "48 heads", _c1, _decay, rel_l1(1e-6),
        rivals=tuple(_decay_rival(n) for n in ("no branch", "exp again", "positive")), spec=("C1", "C2", "C3"),
    ),
    Case(
        "gdn_decay", "the rival without a branch is far", _c1, _decay, rel_l1(0.05),
        rivals=(_decay_rival("no branch"),), spec=("C3",),
    ),
    Case("gdn_decay", "7 rows", partial(_c1, rows=7), _decay, rel_l1(1e-6), rivals=(_decay_rival("exp again"),), spec=("C1",)),
    Case(
        "gdn_decay", "every head decays", _c1, law=_decays, rivals=(Rival("positive", partial(_decay, wrong="positive")),), spec=("C2",)
    ),
    Case(
        "gdn_gate", "both sides of the branch", _branch, _gate, close(abs=1e-30, rel=1e-6),
        rivals=_gate_rivals("no branch", "a and b swapped"), spec=("D43", "G5", "Z10"),
    ),
    *[
        Case(
            "gdn_gate", f"{tokens} tokens of {heads} heads, {short(dtype)}, {short(per_head)} a head",
            partial(_inputs, tokens=tokens, heads=heads, dtype=dtype, per_head=per_head), _gate,
            all_of(close(rel=1e-6), rel_l1(1e-6)),
            rivals=_gate_rivals(*_SHAPE, *(() if dtype == F32 else ("beta rounded",))), spec=("D43", "D48"),
        )
        for tokens, heads, dtype, per_head in (
            (5, 6, F32, F32), (7, 48, BF16, F32), (3, 4, F16, F32), (1, 1, BF16, BF16), (9, 5, F32, F16), (37, 3, BF16, F32),
        )
    ],
    *[
        Case(
            "gdn_gate", f"merged buffer, {tokens} tokens, {short(dtype)}", partial(_merged, tokens=tokens, dtype=dtype),
            law=_views_are_copies, spec=("D41", "D45"),
        )
        for tokens in (1, 2, 4, 16, 32) for dtype in (F32, BF16)
    ],
    Case(
        "gdn_gate", "gdn_decay with -exp(A_log)", partial(_inputs, tokens=5, heads=6), law=_same_decay,
        compare=close(rel=1e-6), spec=("C1", "D43"),
    ),
    Case("gdn_gate", "no tokens", partial(_inputs, tokens=0, heads=3), _gate, close(), spec=("D43",)),
    refusal(
        "gdn_gate", "b of other heads", "expected b of shape [2, 3]",
        a=torch.ones(2, 3), b=torch.ones(2, 4), A_log=torch.ones(3), dt_bias=torch.ones(3),
    ),
    refusal(
        "gdn_gate", "dt_bias of other heads", "expected dt_bias of shape [3]",
        a=torch.ones(2, 3), b=torch.ones(2, 3), A_log=torch.ones(3), dt_bias=torch.ones(4),
    ),
    refusal(
        "gdn_decay", "integer neg_a", "expected neg_a of dtype",
        alpha=torch.ones(2, 3), dt_bias=torch.ones(3), neg_a=torch.ones(3, dtype=torch.int32),
    ),
    refusal("gdn_decay", "one axis", "expected alpha of shape", alpha=torch.ones(3), dt_bias=torch.ones(3), neg_a=torch.ones(3)),
]  # fmt: skip
