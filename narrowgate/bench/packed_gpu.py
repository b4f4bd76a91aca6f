"""Packed products on a GPU: ours on a prepared weight, beside the vendor's bfloat16 product and the peers that are installed.

Each contender runs from a CUDA graph over copies of its weight that together are larger than the cache, so that every call reads
its weight from memory and no Python is timed. A product that does not check is not timed: ours must agree with the float64
product of the decoded weight, within float32 sums where the plan reveals float32 and one 16-bit rounding else; a peer's must
lie near the product of the weight it was given. The floor is the larger of bytes at the read roof and operations at the
bfloat16 roof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import narrowgate.ops as ops
from narrowgate import dispatch
from narrowgate.bench.timing import Measured, copies, replayed, roofs
from narrowgate.ops.linear.prepare import prepare
from narrowgate.packing import PackedTensor

OURS = "narrowgate"
SCHEMES = ("int4_g128", "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8_e4m3")
PEER_ERROR = 0.2  # relative: a 4-bit weight is off by a tenth, a wrong layout by far more
HUMMING: dict[str, dict[str, Any]] = {
    "int4_g128": {"dtype": "int4", "group_size": 128},
    "mxfp4": {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"},
    "mxfp6_e3m2": {"dtype": "float6e3m2", "group_size": 32, "scale_dtype": "float8e8m0"},
    "mxfp6_e2m3": {"dtype": "float6e2m3", "group_size": 32, "scale_dtype": "float8e8m0"},
    "mxfp8_e4m3": {"dtype": "float8e4m3", "group_size": 32, "scale_dtype": "float8e8m0"},
}


def humming() -> tuple[Any, str]:
    """(humming's layer class, "humming") or (None, why there is none)."""
    try:
        from humming.layer import HummingLayer  # type: ignore[import-not-found]

        return HummingLayer, "humming"
    except ImportError as error:
        return None, f"humming-kernels is not installed ({error})"


def measure(
    shapes: Sequence[tuple[int, int]], rows: Sequence[int], schemes: Sequence[str],
    tell: Callable[[str], None] = lambda case: None,
) -> tuple[list[Measured], list[str]]:  # fmt: skip
    """(every product of the given shapes (N, K), numbers of rows and schemes; what did not check and so was not timed)."""
    found: list[Measured] = []
    refused: list[str] = []
    layer, _ = humming()
    for n, k in shapes:
        w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(0)) * 0.02
        dense = [w, *(w.clone() for _ in range(copies(w.nbytes, "cuda") - 1))]
        for scheme in schemes:
            packed = prepare(ops.quantize(w, scheme))
            ours = [packed, *(_copy(packed) for _ in range(copies(packed.nbytes, "cuda") - 1))]
            theirs = _peers(layer, scheme, w, len(ours)) if layer is not None and scheme in HUMMING else []
            for m in rows:
                case = f"{scheme} {n}x{k} M={m}"
                tell(case)
                x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
                problem = complaint(x, packed)
                if problem:
                    refused.append(f"{case}: not timed, {problem}")
                    continue
                contenders: dict[str, tuple[list[Callable[[], Any]], int]] = {
                    OURS: ([partial(ops.linear, x, c) for c in ours], packed.nbytes),
                    "torch bf16": ([partial(torch.nn.functional.linear, x, c) for c in dense], w.nbytes),
                }
                if theirs:
                    error = _distance(theirs[0](x), x.double() @ w.double().T)
                    if error > PEER_ERROR:
                        refused.append(f"{case}: humming not timed, off by {error:.2g}")
                    else:
                        contenders["humming"] = ([partial(c, x) for c in theirs], packed.nbytes)
                found += [_timed(case, who, calls, nbytes, m, n, k) for who, (calls, nbytes) in contenders.items()]
    return found, refused


def _timed(case: str, who: str, calls: list[Callable[[], Any]], nbytes: int, m: int, n: int, k: int) -> Measured:
    with torch.no_grad():
        spent = replayed(calls)
    roof = roofs("cuda")
    moved, flops = nbytes + 2 * m * (n + k), 2 * m * n * k
    floor = max(moved / roof["read"], flops / roof["bf16_flops"]) * 1e6
    return Measured(case, who, spent, floor, f"{moved / spent / 1e6:.2f} TB/s, {flops / spent / 1e6:.0f} TFLOP/s")


def _peers(layer: Any, scheme: str, w: Tensor, count: int) -> list[Any]:
    made = []
    for _ in range(count):
        one = layer(shape_n=w.shape[0], shape_k=w.shape[1], weight_config=HUMMING[scheme], torch_dtype=w.dtype).cuda()
        one.load_from_unquantized(w)
        one.transform()
        made.append(one)
    return made


def _copy(w: PackedTensor) -> PackedTensor:
    return replace(w, data=w.data.clone(), scales=tuple(replace(s, data=s.data.clone()) for s in w.scales))


def _distance(y: Tensor, want: Tensor) -> float:
    return float((y.double() - want).norm() / want.norm())


def complaint(x: Tensor, w: PackedTensor) -> str:
    """Why our product is wrong, or ""."""
    exact = dispatch.plan("linear", x, w).reveals == "float32"
    with torch.no_grad():
        y = ops.linear(x, w, out_dtype=torch.float32)
    error = _distance(y, x.double() @ w.dequantize(torch.float32).double().T)
    return "" if error <= (2e-6 if exact else 4e-3) else f"off by {error:.2g}"
