"""Each comparer passes what it should and catches a planted fault: a wrong value, NaN, a wrong shape, a wrong dtype."""

import math

import pytest
import torch

from narrowgate.conformance.compare import Comparer, all_of, bits, close, mean_abs, rel_l1, rmse_ratio, ulp

X = torch.linspace(-3, 5, 77).reshape(7, 11)
COMPARERS = [
    bits(),
    ulp(1),
    close(abs=1e-6),
    close(rel=1e-6),
    rel_l1(1e-7),
    mean_abs(1e-6),
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


def test_takes_every_dtype_and_shape():
    """0-d, bool, integers on both sides of zero, the 8-bit floats, integers against floats."""
    for comparer in COMPARERS:
        assert comparer(torch.tensor(1.0), torch.tensor(1.0)).ok
        verdict = comparer(torch.tensor(1.0), torch.tensor(5.0))
        assert not verdict.ok
        assert verdict.index == ()
        assert verdict.got == 5.0
        assert not comparer(torch.tensor([True, False]), torch.tensor([True, True])).ok
        assert not comparer(torch.tensor([-1, 3]), torch.tensor([1, 3])).ok
        assert not comparer(torch.zeros(3, 1), torch.zeros(1, 3)).ok
        assert not comparer(torch.zeros(0, 3), torch.zeros(3, 0)).ok
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu):
            every = torch.arange(256, dtype=torch.uint8)
            assert comparer(every.view(dtype), every.view(dtype).clone()).ok
            assert not comparer(every.view(dtype), every.flip(0).view(dtype)).ok
        assert not comparer(X, [1.0]).ok
    assert close(abs=0)(torch.tensor([3.0]), torch.tensor([3])).ok
    assert not close(abs=0)(torch.tensor([math.nan]), torch.tensor([3])).ok
    assert not close(abs=0)(torch.tensor([2**53]), torch.tensor([2**53 + 1])).ok
    assert not bits()(torch.tensor([2**53]), torch.tensor([2**53 + 1])).ok


def test_ulp_counts_in_each_dtype():
    assert ulp(9)(torch.tensor([-1, 5]), torch.tensor([1, 5])).error == 2
    negative = torch.tensor([0x81, 0x83], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert ulp(9)(negative, torch.tensor([0x02, 0x83], dtype=torch.uint8).view(torch.float8_e4m3fn)).error == 3
    exponents = torch.tensor([1, 200], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert ulp(9)(exponents, torch.tensor([1, 204], dtype=torch.uint8).view(torch.float8_e8m0fnu)).error == 4
    assert ulp(9)(torch.tensor([1.0]).bfloat16(), torch.tensor([1.0078125]).bfloat16()).error == 1


def test_an_infinity_is_never_near():
    """Where the oracle is finite the result must be, however loose the bound, and the other way round."""
    inf = torch.full((7, 11), math.inf)
    for comparer in [close(abs=1e300), close(rel=0.9), rel_l1(1e300), rmse_ratio(1e300), all_of(rmse_ratio(1e300))]:
        lost = X.clone()
        lost[3, 4] = math.inf
        assert not comparer(X, lost).ok
        assert comparer(X, lost).index == (3, 4)
        assert not comparer(lost, X).ok
        assert not comparer(inf, -inf).ok


def test_all_of_counts_an_error_that_is_no_number_and_refuses_to_compare_nothing():
    broken = Comparer("broken", 1.0, lambda expected, got: (math.nan, torch.zeros(expected.shape)))
    assert not all_of(broken)(X, X).ok
    assert not all_of(close(abs=1), broken)(X, X).ok
    with pytest.raises(ValueError, match="nothing would be compared"):
        all_of()


@pytest.mark.spec("C19")
def test_what_the_relative_l1_error_is():
    """Distances over sizes, both summed over the whole, the oracle's size alone, and never over less than 1e-30."""
    want, got = torch.tensor([3.0, -4.0, 0.0]), torch.tensor([3.5, -3.0, 0.25])
    assert rel_l1(1)(want, got).error == 1.75 / 7
    assert rel_l1(1)(got, want).error == 1.75 / 6.75
    assert rel_l1(1)(torch.zeros(3), torch.full((3,), 1e-31)).error == pytest.approx(0.3, rel=1e-6)
    assert not rel_l1(1)(torch.zeros(3), torch.full((3,), 1e-30)).ok
    assert rel_l1(0)(torch.zeros(3), torch.zeros(3)).ok
