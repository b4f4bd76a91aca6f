"""Operators that move memory and compute little: dequantize, embedding, quantize, quantize_grouped, as shares of the copy roof.

What counts is every byte that must be read and every byte that must be written, once: `floor` is those at the rate at which this
machine copies. Each call works on other copies, so that nothing comes out of a cache. A case whose first rows differ from the
reference by a bit is not timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import narrowgate.ops as ops
from narrowgate.bench.timing import Call, Measured, copies, interleaved, replayed, roofs
from narrowgate.conformance.guards import clone, tensors
from narrowgate.formats import scheme
from narrowgate.packing import PackedTensor, same_bits

SCHEMES = ("int4_g128", "mxfp4", "nvfp4", "mxfp6_e3m2", "mxfp8_e4m3", "int8_channel", "nf4_g64", "q4_0", "int2_g32", "bf16")
GROUPED = (("e3m2", None), ("e4m3", None), ("e4m3", "silu_mul"), ("e3m2", "relu2"))
CHECKED = 128  # rows held to the reference before anything is timed


@dataclass(frozen=True)
class Case:
    """`call(*inputs)` on every copy of the inputs; `wrong()` says why it may not be timed, or nothing."""

    name: str
    call: Callable[..., Any]
    inputs: tuple[Any, ...]
    nbytes: int
    wrong: Callable[[], str]


def cases(shape: tuple[int, int], schemes: Sequence[str] = SCHEMES, device: str = "cpu") -> Iterator[Case]:
    """Every case for a weight [N, K] and for as many activations."""
    n, k = shape
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, k, generator=g).bfloat16().to(device)
    ids = torch.randperm(n, generator=g).to(device)
    for name in schemes:
        yield _quantized(x, name)
        w = ops.quantize(x, name)
        some = w.rows(0, min(CHECKED, n)).to("cpu")
        right = ops.dequantize(some, impl="reference")
        for dtype in (torch.bfloat16, torch.float32):
            out, want = torch.empty(n, k, dtype=dtype, device=device), right.to(dtype)
            nbytes, label = w.nbytes + out.nbytes, f"{name} {str(dtype).removeprefix('torch.')}"
            yield Case(f"dequantize {label}", _dequantize, (w, out), nbytes, partial(_unlike, _dequantize, (w, out), want))
            lookup = (ids, w, out)
            check = partial(_unlike, _embedding, (torch.arange(len(want), device=device), w, out[: len(want)]), want + 0.0)
            yield Case(f"embedding {label}", _embedding, lookup, nbytes + ids.nbytes, check)
    for fmt, activation in GROUPED:
        yield _grouped(x, fmt, activation)


def _dequantize(w: PackedTensor, out: Tensor) -> Tensor:
    return ops.dequantize(w, dtype=out.dtype, out=out)


def _embedding(ids: Tensor, w: PackedTensor, out: Tensor) -> Tensor:
    return ops.embedding(ids, w, dtype=out.dtype, out=out)


def _unlike(call: Callable[..., Tensor], inputs: tuple[Any, ...], want: Tensor) -> str:
    return _same(call(*inputs)[: len(want)], want)


def _quantized(x: Tensor, name: str) -> Case:
    passes = 2 if len(scheme(name).scales) > 1 else 1  # an outer scale wants the largest magnitude of the tensor first
    part = x[:CHECKED]
    made = ops.quantize(part, name)

    def wrong() -> str:
        same = same_bits(made.to("cpu"), ops.quantize(part.cpu(), name, impl="reference"))
        return "" if same else "codes or scales differ from the reference"

    written = made.nbytes * x.shape[0] // part.shape[0]
    return Case(f"quantize {name}", lambda x: ops.quantize(x, name), (x,), passes * x.nbytes + written, wrong)


def _grouped(x: Tensor, fmt: str, activation: str | None) -> Case:
    groups = 8 if x.shape[0] % 8 == 0 else 1
    width = (x.shape[1] // 64 if activation == "silu_mul" else x.shape[1] // 32) * 32
    x = x[:, : 2 * width if activation == "silu_mul" else width].contiguous().view(groups, -1, x.shape[1] // 64 * 64)
    counts = torch.full((groups,), x.shape[1], device=x.device)
    call = partial(ops.quantize_grouped, scheme=fmt, activation=activation)

    def run(x: Tensor, counts: Tensor, gs: Tensor) -> Any:
        return call(x, counts, global_scale=gs)

    def wrong() -> str:
        part = x[:1, :CHECKED]
        count, one = torch.tensor([part.shape[1]]), torch.ones(1)
        got = run(part, count.to(x.device), one.to(x.device))
        if activation == "silu_mul":  # its exp may differ in the last bit between devices: held to its own two steps
            steps = ops.quantize_grouped(ops.silu_mul(part), count.to(x.device), fmt, global_scale=one.to(x.device))
        else:
            steps = call(part.cpu(), count, global_scale=one, impl="reference")
        return next((w for a, b in zip(got, steps, strict=True) if (w := _same(a.view(torch.uint8), b.view(torch.uint8)))), "")

    written = groups * x.shape[1] * (width if fmt == "e4m3" else width // 4 * 3) + groups * x.shape[1] * width // 32
    gs = torch.ones(groups, device=x.device)
    return Case(f"quantize_grouped {fmt} {activation or 'plain'}", run, (x, counts, gs), x.nbytes + written, wrong)


def _same(got: Tensor, want: Tensor) -> str:
    same = torch.equal(got.cpu().nan_to_num(), want.cpu().nan_to_num())
    return "" if same else "values differ from the reference"


def measure(
    shape: tuple[int, int], schemes: Sequence[str] = SCHEMES, *, device: str = "cpu", seconds: float = 1.0,
    tell: Callable[[str], None] = lambda case: None,
) -> tuple[list[Measured], list[str]]:  # fmt: skip
    """(every case that checks, what did not check and so was not timed)."""
    found, refused = [], []
    copy = roofs(device)["copy"] / 1e6  # bytes a microsecond
    with torch.no_grad():
        for case in cases(shape, schemes, device):
            tell(case.name)
            if problem := case.wrong():
                refused.append(f"{case.name}: not timed, {problem}")
                continue
            size = sum(t.nbytes for t in tensors(case.inputs))
            calls: list[Call] = [partial(case.call, *clone(case.inputs)) for _ in range(copies(size, device))]
            spent = replayed(calls) if device == "cuda" else interleaved({"it": calls}, seconds=seconds)["it"]
            found.append(Measured(case.name, "narrowgate", spent, case.nbytes / copy, f"{case.nbytes / spent / 1e3:.0f} GB/s"))
    return found, refused
