"""Each comparer passes what it should and catches a planted fault: a wrong value, NaN, a wrong shape, a wrong dtype."""

import math

import pytest
import torch

from narrowgate.conformance.compare import all_of, bits, close, rel_l1, rmse_ratio, ulp

X = torch.linspace(-3, 5, 77).reshape(7, 11)
COMPARERS = [
    bits(),
    ulp(1),
    close(abs=1e-6),
    close(rel=1e-6),
    rel_l1(1e-7),
    rmse_ratio(1e-6),
    all_of(close(abs=1e-5), rmse_ratio(1e-6)),
]


@pytest.mark.parametrize("comparer", COMPARERS, ids=lambda c: c.name)
def test_passes_the_same_and_catches_faults(comparer):
    assert comparer(X, X.clone()).ok
    wrong = X.clone()
    wrong[4, 9] += 0.25
    verdict = comparer(X, wrong)
    assert not verdict.ok
    assert verdict.index == (4, 9)
    assert verdict.got == pytest.approx(verdict.expected + 0.25)
    lost = X.clone()
    lost[6, 10] = math.nan
    assert not comparer(X, lost).ok
    assert comparer(X, lost).index == (6, 10)
    assert not comparer(lost, X).ok
    assert comparer(lost, lost.clone()).ok
    assert not comparer(X, X[:, :-1]).ok
    assert comparer(X[:0], X[:0]).ok


def test_bits_tells_zeros_apart_and_dtypes():
    zero = torch.zeros(3)
    assert not bits()(zero, -zero).ok
    assert not bits()(zero, zero.bfloat16()).ok
    assert ulp(0)(zero, -zero).ok
    quiet = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert bits()(quiet, quiet.flip(0)).ok
    assert not bits(nan_payload=True)(quiet, quiet.flip(0)).ok


def test_ulp_counts_steps_across_zero():
    a = torch.tensor([1.0, 2.0**-149])
    b = torch.tensor([1.0 + 2.0**-23, -(2.0**-149)])
    assert ulp(2)(a, b).error == 2
    assert not ulp(1)(a, b).ok


def test_infinities_agree_with_themselves_only():
    inf = torch.tensor([math.inf, -math.inf, 1.0])
    for comparer in COMPARERS[2:]:
        assert comparer(inf, inf.clone()).ok
        assert not comparer(inf, -inf).ok


def test_a_relative_bound_sees_what_an_absolute_one_drowns():
    small = X * 1e-4
    assert close(abs=2e-2)(small, torch.zeros_like(small)).ok
    assert not rmse_ratio(1e-2)(small, torch.zeros_like(small)).ok
