"""What follows the convolution (SPEC D43 to D45, D47)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from narrowgate.conformance.case import Arguments, Case, Rival
from narrowgate.conformance.compare import bits, close
from narrowgate.conformance.fixtures import BF16, F16, F32, ROUNDED, padded, refusal, short, uniform

Pairs = dict[str, tuple[Tensor, Tensor]]
SHAPES = ((5, 2, 6, 128, 128), (3, 4, 4, 300, 128), (1, 1, 2, 64, 64), (7, 2, 4, 24, 12))  # T, Hk, Hv, K, V


def _split(mixed: Tensor, *, num_k_heads: int, head_k_dim: int, head_v_dim: int, wrong: str = "") -> dict[str, Tensor]:
    keys = num_k_heads * head_k_dim
    rows: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
    for row in mixed:
        q, k, v = row[:keys], row[keys : 2 * keys], row[2 * keys :]
        if wrong == "k before q":
            q, k = k, q
        if wrong == "interleaved a head":
            both = row[: 2 * keys].reshape(num_k_heads, 2, head_k_dim)
            q, k = both[:, 0].flatten(), both[:, 1].flatten()
        if wrong == "v first":
            v, q, k = row[: len(v)], row[len(v) : len(v) + keys], row[len(v) + keys :]
        rows["q"].append(q.reshape(num_k_heads, head_k_dim))
        rows["k"].append(k.reshape(num_k_heads, head_k_dim))
        rows["v"].append(v.reshape(-1, head_v_dim))
    return {name: torch.stack(parts) for name, parts in rows.items()}


def _post_conv(
    conv_out: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, eps: float = 1e-6, wrong: str = "", **sizes: int
) -> dict[str, Tensor]:
    found = {k: t.double() for k, t in _split(conv_out, **sizes, wrong=wrong).items()}
    for name in ("q", "k", "v") if wrong == "v normalized too" else ("q", "k"):
        size = found[name].pow(2)
        size = size.mean(-1, keepdim=True) if wrong == "mean for sum" else size.sum(-1, keepdim=True)
        found[name] = found[name] / (size + eps).sqrt()
    x = a.double() + dt_bias.double()
    beta = torch.sigmoid(b.double())
    if wrong == "beta rounded":
        beta = beta.to(b.dtype).double()
    return {**found, "g": -A_log.double().exp() * torch.where(x > 20, x, torch.log1p(x.clamp(max=20).exp())), "beta": beta}


def _mixed(g: Generator, shape: tuple[int, ...], dtype: torch.dtype = F32) -> Arguments:
    tokens, hk, hv, keys, values = shape
    mixed = uniform(g, tokens, 2 * hk * keys + hv * values, low=-3, high=3, dtype=dtype)
    return {"mixed": mixed, "num_k_heads": hk, "head_k_dim": keys, "head_v_dim": values}


def _inputs(g: Generator, shape: tuple[int, ...], dtype: torch.dtype = F32, gates: torch.dtype = F32) -> Arguments:
    given = _mixed(g, shape, dtype)
    tokens, heads = shape[0], shape[2]
    return {
        "conv_out": given.pop("mixed"),
        "a": uniform(g, tokens, heads, low=-2, high=2, dtype=gates),
        "b": uniform(g, tokens, heads, low=-2, high=2, dtype=gates),
        "A_log": uniform(g, heads, low=-1, high=0.5),
        "dt_bias": uniform(g, heads, low=-0.5, high=0.5),
        **given,
    }


def _merged(g: Generator, tokens: int, dtype: torch.dtype) -> Arguments:
    """a and b out of one buffer [1 pad | b | a | 3 pad] that holds 7.5 elsewhere."""
    given = _inputs(g, (tokens, 2, 6, 8, 8), dtype, dtype)
    parent = torch.full((tokens, 16), 7.5, dtype=dtype)
    parent[:, 1:7], parent[:, 7:13] = given["b"], given["a"]
    return {**given, "b": parent[:, 1:7], "a": parent[:, 7:13]}


NAMES = ("q", "k", "v", "g", "beta")


def _pairs(expected: tuple[Tensor, ...], got: tuple[Tensor, ...]) -> Pairs:
    return {name: (x, y) for name, x, y in zip(NAMES, expected, got, strict=True)}


def _composed(ops: Any, conv_out: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, **sizes: int) -> Pairs:
    q, k, v = ops.split_qkv(conv_out, **sizes)
    apart = (ops.l2_norm(q), ops.l2_norm(k), v, *ops.gdn_gate(a, b, A_log, dt_bias))
    return _pairs(apart, ops.gdn_post_conv(conv_out=conv_out, a=a, b=b, A_log=A_log, dt_bias=dt_bias, **sizes))


def _views_are_copies(ops: Any, conv_out: Tensor, a: Tensor, b: Tensor, **rest: Any) -> Pairs:
    copies = ops.gdn_post_conv(conv_out, a.float().contiguous(), b.float().contiguous(), **rest)
    return _pairs(copies, ops.gdn_post_conv(padded(conv_out, 5), a, b, **rest))


def _unit_norms(ops: Any, **given: Any) -> Pairs:
    q, k, *_ = ops.gdn_post_conv(**given)
    one = torch.ones(q.shape[:2])
    return {"q": (one, q.float().norm(dim=-1).cpu()), "k": (one, k.float().norm(dim=-1).cpu())}


def _split_rivals(*names: str) -> tuple[Rival, ...]:
    return tuple(Rival(name, partial(_split, wrong=name)) for name in names)


def _rivals(*names: str) -> tuple[Rival, ...]:
    return tuple(Rival(name, partial(_post_conv, wrong=name)) for name in names)


def _beta_rounded(conv_out: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, **sizes: Any) -> dict[str, Tensor]:
    """Our own fused operator but for one rounding, to show that the law sees it."""
    import narrowgate.ops as ops

    found = dict(zip(NAMES, ops.gdn_post_conv(conv_out, a, b, A_log, dt_bias, **sizes), strict=True))
    return {**found, "beta": found["beta"].to(BF16).float()}


SIZES: dict[str, Any] = {"num_k_heads": 2, "head_k_dim": 4, "head_v_dim": 3}
GATES: dict[str, Any] = {"a": torch.ones(5, 6), "b": torch.ones(5, 6), "A_log": torch.ones(6), "dt_bias": torch.ones(6)}

CASES: list[Case] = [
    *[
        Case(
            "split_qkv", f"{shape}, {short(dtype)}", partial(_mixed, shape=shape, dtype=dtype), _split, bits(),
            rivals=_split_rivals("k before q", "v first", *(("interleaved a head",) if shape[1] > 1 else ())), spec=("D43",),
        )
        for shape in SHAPES for dtype in (F32, BF16, F16)
    ],
    Case("split_qkv", "no tokens", partial(_mixed, shape=(0, 2, 4, 3, 5)), law=lambda ops, **given: {
        "v": (torch.empty(0, 4, 5), ops.split_qkv(**given)[2])
    }, spec=("D43",)),
    *[
        Case(
            "gdn_post_conv", f"{shape}, {short(dtype)}, gates {short(gates)}", partial(_inputs, shape=shape, dtype=dtype, gates=gates),
            _post_conv, {"q": ROUNDED[dtype], "k": ROUNDED[dtype], "v": close(), "g": close(rel=1e-5), "beta": close(rel=1e-6)},
            rivals=_rivals("k before q", "mean for sum", "v normalized too", *(("beta rounded",) if gates != F32 else ())),
            spec=("D44",),
        )
        for shape in SHAPES for dtype, gates in ((F32, F32), (BF16, BF16), (F32, BF16))
    ],
    *[
        Case(
            "gdn_post_conv", f"composed, {shape}, {short(dtype)}", partial(_inputs, shape=shape, dtype=dtype, gates=dtype),
            law=_composed, rivals=(Rival("beta rounded", _beta_rounded),), spec=("D44", "D48"),
        )
        for shape in SHAPES for dtype in (F32, BF16, F16)
    ],
    *[
        Case(
            "gdn_post_conv", f"merged buffer, {tokens} tokens, {short(dtype)}", partial(_merged, tokens=tokens, dtype=dtype),
            law=_views_are_copies, spec=("D41", "D45"),
        )
        for tokens in (1, 2, 4, 16, 32) for dtype in (F32, BF16)
    ],
    *[
        Case(
            "gdn_post_conv", f"norms of 1, {tokens} tokens, {short(dtype)}",
            partial(_inputs, shape=(tokens, 4, 8, 128, 128), dtype=dtype),
            law=_unit_norms, compare=close(abs=1e-2), spec=("D47",), full=tokens > 200,
        )
        for tokens in (1, 16, 17, 128, 512, 2048) for dtype in (F32, BF16)
    ],
    refusal("split_qkv", "a width that does not fit", "expected mixed rows of 2 * Hk * K + Hv * V", mixed=torch.ones(5, 33), **SIZES),
    refusal(
        "split_qkv", "Hv no multiple of Hk", "Hv must be a multiple of Hk (GQA broadcast)", spec=("D10",),
        mixed=torch.ones(5, 25), **SIZES,
    ),
    refusal("gdn_post_conv", "gates of other heads", "expected a of shape [5, 4]", conv_out=torch.ones(5, 28), **GATES, **SIZES),
    refusal(
        "gdn_post_conv", "columns apart", "expected conv_out with a contiguous last axis",
        conv_out=torch.ones(5, 68)[:, ::2], **GATES, **SIZES,
    ),
]  # fmt: skip
