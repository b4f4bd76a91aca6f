"""A row of a product with `batch_invariant=True` is the same however many rows there are, to the bit, exact activations too.

The activations span many binades and K is odd, so that any other order of summation shows. What a product of quantized
activations owes its rows is in cases_inputs.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from narrowgate.conformance.case import Case, Rival
from narrowgate.ops.linear.cases_stored import as_stored
from narrowgate.packing import PackedTensor, pack

N, K, M = 7, 323, 41
WEIGHTS = ("float32", "bfloat16", "int4", "float4_e2m1fn", "int8")


def _weight(g: Generator, name: str, *shape: int) -> Tensor | PackedTensor:
    if name in ("float32", "bfloat16"):
        return torch.randn(shape, generator=g).to(getattr(torch, name))
    codes = torch.randint(0, 256 if name == "int8" else 16, shape, generator=g)
    blocks = (*shape[:-1], -(-shape[-1] // 32))
    scales = as_stored(torch.rand(blocks, generator=g) + 0.1, "bfloat16", (*(1 for _ in shape[1:]), 32))
    return pack(codes, name, scales=(scales,))


def _activations(g: Generator) -> Tensor:
    return torch.randn(M, K, generator=g) * torch.exp2(torch.randint(-6, 7, (M, K), generator=g))


def _halves(a: Tensor, b: Tensor) -> Tensor:
    """a b^T in float32, the second half of K first where there are several rows."""
    a, b = a.float(), b.float()
    if len(a) > 1:
        return a[:, K // 2 :] @ b[:, K // 2 :].T + a[:, : K // 2] @ b[:, : K // 2].T
    return (a * b).sum(1)[None]


def _values(w: Tensor | PackedTensor) -> Tensor:
    return w if isinstance(w, Tensor) else w.dequantize()


def linear(name: str) -> Case:
    def law(ops: Any, x: Tensor, **rest: Any) -> dict[str, tuple[Tensor, Tensor]]:
        whole = ops.linear(x=x, **rest)
        return {f"{m} rows": (whole[:m], ops.linear(x=x[:m], **rest)) for m in (1, 2, 5, 17)}

    def inputs(g: Generator) -> dict[str, Any]:
        return {"x": _activations(g), "w": _weight(g, name, N, K), "batch_invariant": True}

    rival = Rival("another order for one row", lambda x, w, **_: {"y": _halves(x, _values(w))})
    return Case("linear", f"rows alone as among {M}, {name}", inputs, law=law, rivals=(rival,), spec=("R18",))


def matmul(name: str) -> Case:
    def law(ops: Any, a: Tensor, **rest: Any) -> dict[str, tuple[Tensor, Tensor]]:
        whole = ops.matmul(a=a, **rest)
        return {f"{m} rows": (whole[:m], ops.matmul(a=a[:m], **rest)) for m in (1, 2, 5, 17)}

    def inputs(g: Generator) -> dict[str, Any]:
        return {"a": _activations(g), "b": _weight(g, name, K, N), "batch_invariant": True}

    rival = Rival("another order for one row", lambda a, b, **_: {"y": _halves(a, _values(b).T)})
    return Case("matmul", f"rows alone as among {M}, {name}", inputs, law=law, rivals=(rival,), spec=("R18",))


def grouped(name: str) -> Case:
    """The rows of each expert as among all rows, and as that expert's weight gives them alone."""

    def law(ops: Any, x: Tensor, w: Any, group_sizes: Tensor, **rest: Any) -> dict[str, tuple[Tensor, Tensor]]:
        whole = ops.grouped_linear(x=x, w=w, group_sizes=group_sizes, **rest)
        found, start = {}, 0
        for e, n in enumerate(group_sizes.tolist()):
            alone = torch.zeros_like(group_sizes)
            alone[e] = 1
            if n:
                one = ops.grouped_linear(x=x[start : start + 1], w=w, group_sizes=alone, **rest)
                found[f"expert {e}"] = (whole[start : start + 1], one)
            start += n
        return found

    def inputs(g: Generator) -> dict[str, Any]:
        sizes = torch.tensor([5, 0, 19, 17])
        return {"x": _activations(g), "w": _weight(g, name, len(sizes), N, K), "group_sizes": sizes, "batch_invariant": True}

    def reading(x: Tensor, w: Any, group_sizes: Tensor, **_: Any) -> dict[str, Tensor]:
        parts = x.split(group_sizes.tolist())
        return {"y": torch.cat([_halves(p, b) if len(p) else p[:, :N] for p, b in zip(parts, _values(w), strict=True)])}

    rival = Rival("another order for one row", reading)
    return Case("grouped_linear", f"rows alone as among {M}, {name}", inputs, law=law, rivals=(rival,), spec=("R18",))


CASES: list[Case] = [
    *(linear(name) for name in WEIGHTS), *(matmul(name) for name in WEIGHTS), *(grouped(name) for name in WEIGHTS),
]  # fmt: skip
