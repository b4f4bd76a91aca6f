"""Products of two packed operands of different elements, one exponent byte for 32 values of each (SPEC B33): every pair.

D = (A 2^(sa - 127)) (B 2^(sb - 127)) in float32, scale byte 0 meaning 2^-127 here. The oracle decodes with written tables and
torch's own 8-bit floats, and sums in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from narrowgate.conformance.case import Case, Rival
from narrowgate.conformance.compare import Comparer
from narrowgate.packing import Scale, pack

_E2M1 = [0.0, 0.5, 1, 1.5, 2, 3, 4, 6]
_E2M3 = [i / 8 for i in range(16)] + [2 + i / 4 for i in range(8)] + [4 + i / 2 for i in range(8)]
_E3M2 = [i / 16 for i in range(8)] + [2.0**e * (1 + m / 4) for e in range(-1, 5) for m in range(4)]


def _both(magnitudes: list[float]) -> Tensor:
    return torch.tensor(magnitudes + [-m for m in magnitudes], dtype=torch.float64)


def _native(dtype: torch.dtype) -> Tensor:
    return torch.arange(256).to(torch.uint8).view(dtype).double()


TABLES = {
    "float4_e2m1fn": _both(_E2M1), "float6_e2m3fn": _both(_E2M3), "float6_e3m2fn": _both(_E3M2),
    "float8_e4m3fn": _native(torch.float8_e4m3fn), "float8_e5m2": _native(torch.float8_e5m2),
}  # fmt: skip
LIKE = {  # what each could be taken for: another element of the same width, or the same bits as a signed integer
    "float4_e2m1fn": torch.tensor([*range(8), *range(-8, 0)], dtype=torch.float64), "float6_e2m3fn": TABLES["float6_e3m2fn"],
    "float6_e3m2fn": TABLES["float6_e2m3fn"], "float8_e4m3fn": TABLES["float8_e5m2"], "float8_e5m2": TABLES["float8_e4m3fn"],
}  # fmt: skip
LAYOUT = {4: "words@1", 6: "fp6_bytes@1", 8: "words@1"}


def drawn(name: str, rows: int, k: int, seed: int) -> Tensor:
    """Codes [rows, k] of finite values, every one with an equal chance."""
    finite = torch.nonzero(TABLES[name].isfinite()).reshape(-1)
    return finite[torch.randint(0, len(finite), (rows, k), generator=Generator().manual_seed(seed))]


def by_size(size: Tensor) -> Comparer:
    """|expected - got| <= 1e-5 of the sum of |terms|: what float32 sums in any order keep, row by row of any magnitude."""

    def measure(expected: Tensor, got: Tensor) -> tuple[float, Tensor]:
        distance = (expected.double() - got.double()).abs().nan_to_num(torch.inf, torch.inf)
        share = torch.where(distance == 0, 0.0, distance / (1e-5 * size))
        return float(share.max()), share

    return Comparer("1e-5 of the sum of the terms' sizes", 1.0, measure)


def pair(left: str, right: str, op: str) -> Case:
    """a [3, 76] times b [76, 8]: two whole blocks and a short one; a row whose scale bytes are 0, columns scaled up by 2^60."""
    m, n, k = 3, 8, 76
    seed = sorted(TABLES).index(left) * 5 + sorted(TABLES).index(right)
    a, b = drawn(left, m, k, seed), drawn(right, n, k, seed + 100)
    sa = 125 + torch.arange(3 * m).view(m, 3) % 5
    sa[1] = 0
    sb = 185 + (torch.arange(3 * n).view(n, 3) * 3 + 1) % 5

    def decoded(codes: Tensor, table: Tensor, byte: Tensor, zero: float = 2.0**-127) -> Tensor:
        power = torch.where(byte == 0, zero, torch.exp2(byte.double() - 127))
        return table[codes] * power.repeat_interleave(32, 1)[:, :k]

    x, w = decoded(a, TABLES[left], sa), decoded(b, TABLES[right], sb)
    readings = {
        "byte 0 as a zero block": (decoded(a, TABLES[left], sa, 0.0), w),
        "scales of the row before": (decoded(a, TABLES[left], sa.roll(1, 0)), w),
        "scales of the block before": (x, decoded(b, TABLES[right], sb.roll(1, 1))),
        "the left element misread": (decoded(a, LIKE[left].nan_to_num(0.0, 0.0, 0.0), sa), w),
        "the right element misread": (x, decoded(b, LIKE[right].nan_to_num(0.0, 0.0, 0.0), sb)),
    }
    if left != right:
        swapped = TABLES[left][b % len(TABLES[left])].nan_to_num(0.0, 0.0, 0.0)
        readings["one element for both"] = (x, swapped * torch.exp2(sb.double() - 127).repeat_interleave(32, 1)[:, :k])
    lhs = _packed(a, left, sa, (1, 32))
    rhs = _packed(b, right, sb, (1, 32)) if op == "linear" else _packed(b.T, right, sb.T, (32, 1))
    inputs: dict[str, Any] = {"x": lhs, "w": rhs} if op == "linear" else {"a": lhs, "b": rhs}
    rivals = tuple(Rival(name, lambda p=p, **_: {"y": p[0] @ p[1].T}) for name, p in readings.items())
    return Case(
        op, f"{left} by {right}", lambda g: dict(inputs), lambda **_: {"y": x @ w.T}, by_size(x.abs() @ w.abs().T), rivals,
        spec=("B33",),
    )  # fmt: skip


def _packed(codes: Tensor, name: str, byte: Tensor, block: tuple[int, int]) -> Any:
    bits = {16: 4, 64: 6, 256: 8}[len(TABLES[name])]
    scale = Scale.from_codes(byte, "float8_e8m0fnu", block)
    return pack(codes, name, scales=(scale,), layout=LAYOUT[bits])


CASES: list[Case] = [pair(left, right, op) for op in ("matmul", "linear") for left in TABLES for right in TABLES]
