"""Rows in and out of caches (SPEC D20, D61 to D63, D76, D81)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from narrowgate.conformance.case import Arguments, Case, Rival
from narrowgate.conformance.compare import bits
from narrowgate.conformance.fixtures import BF16, F16, F32, apart, poisoned, refusal, short, uniform

PAYLOADS = bits(nan_payload=True)
Pairs = dict[str, tuple[Tensor, Tensor]]


def _gather(cache: Tensor, indices: Tensor, has_initial_state: Tensor | None = None, wrong: str = "") -> dict[str, Tensor]:
    rows = []
    for i, slot in enumerate(indices.tolist()):
        row = cache[i if wrong == "row i" else slot].float()
        if has_initial_state is not None and not bool(has_initial_state[i]) and wrong != "stale":
            row = row * 0.0 if wrong == "times zero" else torch.zeros_like(row)
        rows.append(row)
    return {"rows": torch.stack(rows)}


def _scatter(cache: Tensor, rows: Tensor, indices: Tensor, wrong: str = "") -> dict[str, Tensor]:
    cache = cache.clone()
    for i, slot in enumerate(indices.tolist()):
        if wrong == "truncated" and cache.dtype == BF16:
            cache[slot] = (rows[i].contiguous().view(torch.int32) >> 16).to(torch.int16).view(BF16)
        else:
            cache[i if wrong == "row i" else slot] = rows[i].to(cache.dtype)
    return {"cache": cache}


def _select(x: Tensor, indices: Tensor, wrong: str = "") -> dict[str, Tensor]:
    return {"y": torch.stack([x[i if wrong == "row i" else slot] for i, slot in enumerate(indices.tolist())])}


def _copy(dst: Tensor, src: Tensor, indices: Tensor, wrong: str = "") -> dict[str, Tensor]:
    dst = dst.clone()
    for i, slot in enumerate(indices.tolist()):
        dst[i if wrong == "row i" else slot] = src[i]
    return {"dst": dst}


def _cache(g: Generator, slots: int, dtype: torch.dtype) -> Tensor:
    return uniform(g, slots, 3, 5, 7, low=-8, high=8, dtype=dtype)


def _gather_inputs(
    g: Generator, slots: int, indices: list[int], dtype: torch.dtype = F32, flags: torch.dtype | None = None,
    index: torch.dtype = torch.int32,
) -> Arguments:  # fmt: skip
    given: Arguments = {"cache": _cache(g, slots, dtype), "indices": torch.tensor(indices, dtype=index)}
    if flags is not None:
        given["has_initial_state"] = torch.tensor([i % 2 for i in range(len(indices))]).to(flags)
        for slot in indices[::2]:
            given["cache"][slot] = float("nan")
    return given


def _scatter_inputs(g: Generator, slots: int, indices: list[int], dtype: torch.dtype) -> Arguments:
    rows = uniform(g, len(indices), 3, 5, 7, low=-8, high=8)
    return {"cache": _cache(g, slots, dtype), "rows": rows, "indices": torch.tensor(indices, dtype=torch.int32)}


def _wide(g: Generator, dtype: torch.dtype) -> Arguments:
    """The leading 3 taps of rows of 6: the view that a convolution's cache is gathered through."""
    cache = torch.full((5, 4, 6), 777.0)
    cache[..., :3] = uniform(g, 5, 4, 3)
    return {"cache": cache.to(dtype)[..., :3], "indices": torch.tensor([3, 1, 4], dtype=torch.int32)}


def _bytes(g: Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Every bit pattern, NaN of all payloads among them."""
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=g, dtype=torch.uint8)
    return (raw & 1).to(torch.bool) if dtype == torch.bool else raw.view(dtype)


def _partition(g: Generator, dtype: torch.dtype, width: int, take: int, odd: bool) -> Arguments:
    """21 rows, `take` of `width` columns, and the odd or even of them."""
    x = _bytes(g, dtype, (21, width))[:, :take]
    return {"x": x, "indices": torch.arange(int(odd), 21, 2, dtype=torch.int32)}


def _every_row(g: Generator) -> Arguments:
    """Nothing moves, and yet what comes back is a copy."""
    return {"x": _bytes(g, F32, (5, 7)), "indices": torch.arange(5)}


def _copy_inputs(g: Generator, dtype: torch.dtype, width: int, take: int) -> Arguments:
    indices = torch.arange(1, 21, 2)
    return {
        "dst": _bytes(g, dtype, (21, width))[:, :take],
        "src": _bytes(g, dtype, (len(indices), take)),
        "indices": indices[torch.randperm(len(indices), generator=g)],
    }


def _whole(g: Generator, dtype: torch.dtype, width: int) -> Arguments:
    return {"x": _bytes(g, dtype, (21, width))}


# ---- laws


def _rebuilds(ops: Any, x: Tensor) -> Pairs:
    """Both halves of a partition, copied back over 0xAB, give the bytes again."""
    parts = [torch.arange(start, len(x), 2, dtype=torch.int32, device=x.device) for start in (0, 1)]
    new = torch.full_like(x.view(torch.uint8), 0xAB).view(x.dtype)
    for part in parts:
        ops.copy_rows(dst=new, src=ops.select_rows(x=x, indices=part), indices=part)
    return {"bytes": (x.view(torch.uint8), new.view(torch.uint8))}


def _round_trip(ops: Any, cache: Tensor, indices: Tensor) -> Pairs:
    """Gathered to float32 and scattered back, a 16-bit cache is what it was; so are its idle columns and rows."""
    before = cache.clone()
    rows = ops.gather_state(cache=cache, indices=indices)
    ops.scatter_state(cache=cache, rows=rows * 2, indices=indices)
    doubled = before.clone()
    doubled[indices.long()] *= 2
    return {"rows": (before[indices.long()].float(), rows), "cache": (doubled, cache)}


def _rival(reading: Any, *names: str) -> tuple[Rival, ...]:
    return tuple(Rival(name, partial(reading, wrong=name)) for name in names)


BAD: list[tuple[str, str, dict[str, Any]]] = [
    ("gather_state", "past the end", {"cache": torch.ones(4, 2, 3), "indices": torch.tensor([1, 4])}),
    ("gather_state", "negative", {"cache": torch.ones(4, 2, 3), "indices": torch.tensor([-1, 2])}),
    ("scatter_state", "past the end", {"cache": torch.ones(4, 2), "rows": torch.ones(2, 2), "indices": torch.tensor([1, 4])}),
    ("scatter_state", "negative", {"cache": torch.ones(4, 2), "rows": torch.ones(2, 2), "indices": torch.tensor([1, -1])}),
    ("select_rows", "past the end", {"x": torch.ones(4, 2), "indices": torch.tensor([4])}),
    ("select_rows", "negative", {"x": torch.ones(4, 2), "indices": torch.tensor([-1])}),
    ("copy_rows", "past the end", {"dst": torch.ones(4, 2), "src": torch.ones(2, 2), "indices": torch.tensor([0, 4])}),
    ("copy_rows", "negative", {"dst": torch.ones(4, 2), "src": torch.ones(2, 2), "indices": torch.tensor([0, -1])}),
]

CASES: list[Case] = [
    *[
        Case(
            "gather_state", f"{indices} of {slots}, {short(dtype)}, {str(index).removeprefix('torch.')}",
            partial(_gather_inputs, slots=slots, indices=indices, dtype=dtype, index=index), _gather, bits(),
            rivals=_rival(_gather, "row i") if indices != [0, 1, 2] else (), spec=("D61",),
        )
        for slots, indices, index in (
            (5, [3, 1, 4], torch.int32), (7, [5, 1, 6], torch.int64), (4, [2, 0, 2, 2], torch.int32), (3, [0, 1, 2], torch.int32),
        )
        for dtype in (F32, BF16, F16)
    ],
    *[
        Case(
            "gather_state", f"fresh rows, {short(dtype)}, flags {str(flags).removeprefix('torch.')}",
            partial(_gather_inputs, slots=7, indices=[5, 1, 6, 0], dtype=dtype, flags=flags), _gather, bits(),
            rivals=_rival(_gather, "stale", "times zero"), spec=("D61",),
        )
        for dtype in (F32, BF16) for flags in (torch.bool, torch.int8, torch.int32)
    ],
    *[
        Case(
            "scatter_state", f"{indices} of {slots}, {short(dtype)}",
            partial(_scatter_inputs, slots=slots, indices=indices, dtype=dtype), _scatter, bits(),
            rivals=_rival(_scatter, "row i", *(("truncated",) if dtype == BF16 else ())), spec=("D62",),
        )
        for slots, indices in ((5, [3, 1, 4]), (7, [5, 1, 6])) for dtype in (F32, BF16, F16)
    ],
    *[
        Case(
            "gather_state", f"leading taps of wider rows, {short(dtype)}", partial(_wide, dtype=dtype),
            law=_round_trip, spec=("D20", "D61", "D62"),
        )
        for dtype in (F32, BF16)
    ],
    *[
        Case(
            "select_rows", f"{'odd' if odd else 'even'} rows, {take} of {width} columns, {str(dtype).removeprefix('torch.')}",
            partial(_partition, dtype=dtype, width=width, take=take, odd=odd), _select, PAYLOADS,
            rivals=_rival(_select, "row i"), spec=("D76",),
        )
        for odd in (False, True)
        for dtype, width, take in (
            (BF16, 96, 48), (F32, 48, 48), (F16, 7, 5), (torch.uint8, 96, 48), (torch.int64, 9, 4), (torch.bool, 11, 11),
            (torch.float8_e4m3fn, 12, 5), (torch.int32, 3, 1),
        )
    ],
    Case("select_rows", "every row in order", _every_row, _select, PAYLOADS, spec=("D76",)),
    *[
        Case(
            "copy_rows", f"{take} of {width} columns, {str(dtype).removeprefix('torch.')}",
            partial(_copy_inputs, dtype=dtype, width=width, take=take), _copy, PAYLOADS,
            rivals=_rival(_copy, "row i"), spec=("D76",),
        )
        for dtype, width, take in ((BF16, 96, 48), (F32, 48, 48), (torch.uint8, 96, 48), (torch.int64, 9, 4))
    ],
    *[
        Case(
            op, f"21 rows of {width} again, {short(dtype)}", partial(_whole, dtype=dtype, width=width),
            law=_rebuilds, compare=PAYLOADS, spec=("D76",),
        )
        for op in ("select_rows", "copy_rows") for dtype in (BF16, F32) for width in (6144, 10240)
    ],
    *[
        refusal(op, f"an index {what}", f"{op}: indices out of range", spec=("D63", "D76", "D81"), cpu_only=True, **given)
        for op, what, given in BAD
    ],
    *[
        refusal(
            BAD[i][0], "an index twice", "duplicate indices", spec=("D63", "D76"), cpu_only=True,
            **{**BAD[i][2], "indices": torch.tensor([1, 1])},
        )
        for i in (2, 6)
    ],
    refusal(
        "gather_state", "a cache of integers", "expected cache of dtype",
        cache=torch.ones(4, 2, dtype=torch.int32), indices=torch.tensor([1]),
    ),
    refusal(
        "gather_state", "an out of bf16", "expected out of dtype float32",
        cache=torch.ones(4, 2), indices=torch.tensor([1]), out=poisoned(1, 2, dtype=BF16),
    ),
    refusal("scatter_state", "rows of another width", "expected rows of shape [2, 2]", **{**BAD[2][2], "rows": torch.ones(2, 3)}),
    refusal("copy_rows", "another dtype", "expected src of dtype", **{**BAD[6][2], "src": torch.ones(2, 2, dtype=BF16)}),
    refusal("copy_rows", "too few rows", "expected src of shape [2, 2]", **{**BAD[6][2], "src": torch.ones(1, 2)}),
    refusal("copy_rows", "columns apart", "contiguous last axis", **{**BAD[6][2], "dst": torch.ones(4, 4)[:, ::2]}),
    refusal("select_rows", "one axis", "expected x of shape [N, ...]", x=torch.ones(4), indices=torch.tensor([1])),
    refusal("select_rows", "float indices", "expected indices of dtype", x=torch.ones(4, 2), indices=torch.ones(1)),
]  # fmt: skip

APART = ("[3, 1, 4] of 5, bf16, int32", "[3, 1, 4] of 5, bf16")
CASES += [apart(case, "cache") for case in CASES if case.name in APART]
