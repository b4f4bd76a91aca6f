"""Packed products on the CPU against ggml's, paired: the same matrix, the same rows, one process, contenders in turn.

What is timed is the public operator on a prepared weight, Python included, and ggml's graph of one node, its own quantization of
the activations included. Weights are cold for few rows: every call takes another copy. A product that does not check is
not timed: ours must lie within the float32 bound of the float64 product of the decoded weights (integer activations: equal
the reference bit for bit), the peer's near the product of the weights it was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import narrowgate.ops as ops
from narrowgate.bench import ggml
from narrowgate.bench.timing import Call, Measured, copies, interleaved, roofs
from narrowgate.errors import UnsupportedError
from narrowgate.ops.linear.prepare import prepare
from narrowgate.packing import PackedTensor
from narrowgate.packing.pages import on_large_pages

OURS = "narrowgate"
COLD_ROWS = 16  # up to here reading the weight is what counts
PEER_ERROR = 0.2  # relative: 4-bit weights and 8-bit activations are off by a tenth, a wrong layout by far more
PAIRS: tuple[tuple[str, str | None, str], ...] = (
    ("int4_g32", None, "q4_0"), ("mxfp4", None, "mxfp4"), ("int8_g32", None, "q8_0"), ("mxfp6_e3m2", None, "q6_K"),
    ("int4_g32", "int8_g32", "q4_0"), ("mxfp4", "int8_g32", "mxfp4"), ("int8_g32", "int8_g32", "q8_0"),
)  # fmt: skip
"""(scheme, input scheme, the ggml type of about the same width)"""


def peer(folder: str | Path | None) -> tuple[ggml.Library | None, str]:
    """(ggml, its name) or (None, why there is none)."""
    try:
        lib = ggml.library(ggml.find(folder))
        return lib, lib.name
    except (UnsupportedError, OSError, AttributeError) as error:
        return None, str(error)


def measure(
    shapes: Sequence[tuple[int, int]], rows: Sequence[int], pairs: Sequence[tuple[str, str | None, str]],
    lib: ggml.Library | None, *, seconds: float = 2.0, tell: Callable[[str], None] = lambda case: None,
) -> tuple[list[Measured], list[str]]:  # fmt: skip
    """(every product of the given shapes (N, K), numbers of rows and pairs; what did not check and so was not timed)."""
    found: list[Measured] = []
    refused = []
    for n, k in shapes:
        w = torch.randn(n, k, generator=torch.Generator().manual_seed(0))
        for scheme, input_scheme, kind in pairs:
            packed = prepare(ops.quantize(w, scheme))
            many = copies(packed.nbytes) if min(rows) <= COLD_ROWS else 1
            weights = [packed, *(_copy(packed) for _ in range(many - 1))]
            for m in rows:
                case = f"{scheme} {input_scheme or 'exact'} {n}x{k} M={m}"
                tell(case)
                cold = weights if m <= COLD_ROWS else weights[:1]
                measured, problem = _one(case, w, cold, input_scheme, kind, m, lib, seconds)
                found += measured
                refused += [f"{case}: not timed, {problem}"] if problem else []
    return found, refused


def _one(
    case: str, w: Tensor, weights: list[PackedTensor], input_scheme: str | None, kind: str, m: int, lib: ggml.Library | None,
    seconds: float,
) -> tuple[list[Measured], str]:  # fmt: skip
    x = torch.randn(m, w.shape[1], generator=torch.Generator().manual_seed(1))
    problem = complaint(x, weights[0], input_scheme)
    if problem:
        return [], problem
    contenders: dict[str, Sequence[Call]] = {OURS: [partial(ops.linear, x, c, input_scheme=input_scheme) for c in weights]}
    theirs: list[ggml.Product] = []
    try:
        if lib is not None:
            theirs = [ggml.Product(lib, kind, w, x, torch.get_num_threads())]
            theirs += [theirs[0].copy() for _ in weights[1:]]
            problem = peer_complaint(theirs[0], w, x)
            contenders[f"ggml {kind}{'+r' if theirs[0].repacked else ''}"] = theirs
        if problem:
            return [], problem
        with torch.no_grad():
            times = interleaved(contenders, seconds=seconds)
    finally:
        for one in theirs:
            one.free()
    read = roofs("cpu")["read"] / 1e6  # bytes a microsecond
    sizes = [weights[0].nbytes, *(one.nbytes for one in theirs[:1])]
    return [
        Measured(case, who, spent, nbytes / read if m <= COLD_ROWS else None, f"{2e-3 * m * w.numel() / spent:.0f} GFLOP/s")
        for (who, spent), nbytes in zip(times.items(), sizes, strict=True)
    ], ""


def _copy(w: PackedTensor) -> PackedTensor:
    scales = tuple(replace(s, data=s.data.clone()) for s in w.scales)
    return replace(w, data=on_large_pages(w.data.clone()), scales=scales)  # as `prepare` leaves it


# ---- what is not timed unless it holds


def complaint(x: Tensor, w: PackedTensor, input_scheme: str | None) -> str:
    """Why our product is wrong, or "". Some rows of x and of w stand for all: the same code serves each of them."""
    y, some = ops.linear(x, w, input_scheme=input_scheme, impl="cpu"), slice(0, 64)
    tail = w.shape[0] // 16 * 16 - 64
    for part in (slice(0, min(64, w.shape[0])), slice(max(tail, 0), w.shape[0])):
        piece = w.rows(part.start, part.stop)
        if input_scheme is not None:
            want = ops.linear(x[some], piece, input_scheme=input_scheme, impl="reference")
            if not torch.equal(y[some, part], want):
                return "integer product differs from the reference"
            continue
        d = piece.dequantize(torch.float32).double()
        bound = x.shape[1] * 2.0**-24 * (x[some].double().abs() @ d.abs().T) + 1e-30
        if not bool(((y[some, part].double() - x[some].double() @ d.T).abs() <= bound).all()):
            return "product outside the float32 bound"
    return ""


def peer_complaint(product: ggml.Product, w: Tensor, x: Tensor) -> str:
    product()
    want = x @ w.T
    error = float((product.value() - want).norm() / want.norm())
    return "" if error < PEER_ERROR else f"the peer's product is off by {error:.2g}"
