"""Comparers: how a result is held to its oracle. Each one refuses NaN where the oracle has none, and says where it was worst.

They take tensors of any shape and any dtype (integers, bool and the 8-bit floats too) and never look at strides. A comparer
that cannot fail is worthless, so each has planted faults in the tests. Left out: complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # signed: the sign bit tells the two zeros apart


@dataclass(frozen=True)
class Verdict:
    """`error` and `limit` are in the comparer's own unit; `index`, `expected` and `got` are of the worst element."""

    ok: bool
    error: float
    limit: float
    index: tuple[int, ...] = ()
    expected: float | int | None = None
    got: float | int | None = None
    note: str = ""

    def __str__(self) -> str:
        where = f" at {list(self.index)}: expected {self.expected!r}, got {self.got!r}" if self.expected is not None else ""
        return f"error {self.error:.3g} (limit {self.limit:.3g}){where}{'; ' + self.note if self.note else ''}"


@dataclass(frozen=True)
class Comparer:
    """`measure(expected, got)` gives (error, per-element badness); the worst element is the one of largest badness."""

    name: str
    limit: float
    measure: Callable[[Tensor, Tensor], tuple[float, Tensor]]
    exact_dtype: bool = False

    def __call__(self, expected: Tensor, got: Tensor) -> Verdict:
        if not isinstance(got, Tensor):
            return Verdict(False, float("inf"), self.limit, note=f"expected a tensor, got {type(got).__name__}")
        expected, got = expected.detach().cpu(), got.detach().cpu()
        if expected.shape != got.shape:
            note = f"expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
            return Verdict(False, float("inf"), self.limit, note=note)
        if self.exact_dtype and expected.dtype != got.dtype:
            return Verdict(False, float("inf"), self.limit, note=f"expected {expected.dtype}, got {got.dtype}")
        if expected.numel() == 0:
            return Verdict(True, 0.0, self.limit)
        if got.is_floating_point() and expected.is_floating_point():
            astray = _isnan(got) != _isnan(expected)
            if bool(astray.any()):
                return self._verdict(False, float("nan"), astray.double(), expected, got, f"{int(astray.sum())} NaN astray")
        error, badness = self.measure(expected, got)
        return self._verdict(error <= self.limit, error, badness, expected, got)

    def _verdict(self, ok: bool, error: float, badness: Tensor, expected: Tensor, got: Tensor, note: str = "") -> Verdict:
        flat = int(torch.argmax(torch.nan_to_num(badness, nan=torch.inf).reshape(-1)))
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), expected.shape)) if expected.ndim else ()
        return Verdict(ok, error, self.limit, index, expected[index].item(), got[index].item(), note)


def _as_int(t: Tensor) -> Tensor:
    return t.contiguous().view(_BITS[t.element_size()]).to(torch.int64) if t.is_floating_point() else t.to(torch.int64)


def _isnan(t: Tensor) -> Tensor:
    return torch.isnan(t.double())  # float64 holds every dtype's NaN, and isnan does not know the 8-bit floats


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| in float64, equal infinities counted as no distance, two NaN likewise; whole numbers that differ are 1 apart
    at least, also above 2^53."""
    whole = not (a.is_floating_point() or b.is_floating_point())
    other = _as_int(a) != _as_int(b) if whole else None
    a, b = a.double(), b.double()
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    distance = torch.where(same, torch.zeros_like(a), (a - b).abs())
    return distance if other is None else torch.where(other, distance.clamp(min=1.0), distance)


def _finite(t: Tensor) -> Tensor:
    """In float64, with NaN and infinities as 0: what a sum over the whole tensor may count as its size."""
    return torch.nan_to_num(t.double(), nan=0.0, posinf=0.0, neginf=0.0)


def share_of(error: float, limit: float) -> float:
    """The error as a share of its limit: above 1 fails. An error that is no number is beyond any limit."""
    if error != error:
        return float("inf")
    return error / limit if limit else (0.0 if error == 0 else 1.0 + error)


def bits(nan_payload: bool = False) -> Comparer:
    """Every bit equal, -0.0 told from +0.0; NaN payloads count only if asked for. The error is how many elements differ."""

    def measure(expected: Tensor, got: Tensor) -> tuple[float, Tensor]:
        differ = _as_int(expected) != _as_int(got)
        if not nan_payload and expected.is_floating_point():
            differ &= ~(_isnan(expected) & _isnan(got))
        return float(differ.sum()), differ.double()

    return Comparer("bits", 0.0, measure, exact_dtype=True)


def ulp(limit: float = 1.0) -> Comparer:
    """Distance in units of the last place of the dtype, counted over the ordered bit patterns. Whole numbers: in ones.
    Two bools that differ are beyond any limit."""

    def ordered(t: Tensor) -> Tensor:
        i = _as_int(t)
        if not t.is_floating_point() or t.dtype == torch.float8_e8m0fnu:  # that one has no sign bit
            return i if t.dtype != torch.float8_e8m0fnu else i & 0xFF
        low = -(2 ** (8 * t.element_size() - 1))
        return torch.where(i < 0, low - i, i)  # -0 and +0 both become 0

    def measure(expected: Tensor, got: Tensor) -> tuple[float, Tensor]:
        steps = (ordered(expected) - ordered(got)).abs().double()
        if expected.dtype == torch.bool:
            steps = torch.where(steps > 0, torch.inf, steps)
        if expected.is_floating_point():
            steps[_isnan(expected) & _isnan(got)] = 0.0
        return float(steps.max()), steps

    return Comparer("ulp", limit, measure, exact_dtype=True)


def close(abs: float = 0.0, rel: float = 0.0) -> Comparer:
    """|expected - got| <= abs + rel * max(|expected|, |got|); the error is the worst distance as a share of that bound."""

    def measure(expected: Tensor, got: Tensor) -> tuple[float, Tensor]:
        size = torch.maximum(expected.double().abs(), got.double().abs())
        bound = abs + rel * torch.where(torch.isfinite(size), size, torch.zeros_like(size))
        distance = _distance(expected, got)
        share = torch.where(distance == 0, torch.zeros_like(distance), distance / bound)
        return float(share.max()), share

    return Comparer(f"close(abs={abs:g}, rel={rel:g})", 1.0, measure)


def rel_l1(limit: float) -> Comparer:
    """sum |expected - got| / max(sum |expected|, 1e-30) (SPEC C19)."""

    def measure(expected: Tensor, got: Tensor) -> tuple[float, Tensor]:
        distance = _distance(expected, got)
        return float(distance.sum() / max(float(_finite(expected).abs().sum()), 1e-30)), distance

    return Comparer("rel_l1", limit, measure)


def rmse_ratio(limit: float) -> Comparer:
    """rms(expected - got) / (rms(expected) + 1e-30): sees a small signal that an absolute bound would drown (SPEC Z15)."""

    def measure(expected: Tensor, got: Tensor) -> tuple[float, Tensor]:
        distance = _distance(expected, got)
        size = float(_finite(expected).pow(2).mean().sqrt())
        return float(distance.pow(2).mean().sqrt()) / (size + 1e-30), distance

    return Comparer("rmse_ratio", limit, measure)


def mean_abs(limit: float) -> Comparer:
    """mean |expected - got|: sees a small error that is everywhere."""

    def measure(expected: Tensor, got: Tensor) -> tuple[float, Tensor]:
        distance = _distance(expected, got)
        return float(distance.mean()), distance

    return Comparer("mean_abs", limit, measure)


def all_of(*comparers: Comparer) -> Comparer:
    """Holds when all of them hold; reports the worst of them, as a share of its limit."""
    if not comparers:
        raise ValueError("all_of: expected a comparer at least; nothing would be compared")

    def measure(expected: Tensor, got: Tensor) -> tuple[float, Tensor]:
        worst, shown = -1.0, torch.zeros(expected.shape, dtype=torch.float64)
        for comparer in comparers:
            error, badness = comparer.measure(expected, got)
            share = share_of(error, comparer.limit)
            if share > worst:
                worst, shown = share, badness
        return worst, shown

    return Comparer(" and ".join(c.name for c in comparers), 1.0, measure, any(c.exact_dtype for c in comparers))
