"""Scale rules over every exponent and every threshold mantissa, against exact rational arithmetic; storage that rounds up."""

import ml_dtypes
import numpy as np
import pytest
import scheme_oracle as oracle
import torch

from narrowgate.errors import InputError
from narrowgate.formats import element, scheme
from narrowgate.quantize import round_up, scale_byte
from narrowgate.quantize.arithmetic import divide, power_of_two
from narrowgate.quantize.scale_rules import ceil_ratio

THRESHOLD = {"mxfp4": 0x400000, "mxfp6_e2m3": 0x700000, "mxfp6_e3m2": 0x600000, "mxfp8_e4m3": 0x600000, "mxfp8_e5m2": 0x600000}


def every_exponent(thresholds):
    mantissas = sorted({0, 1, 0x7FFFFF, *(t + d for t in thresholds for d in (-1, 0, 1))})
    bits = np.array([e << 23 | m for e in range(255) for m in mantissas], np.uint32)
    return bits.view(np.float32)


@pytest.mark.spec("B20")
@pytest.mark.parametrize("name", oracle.MX)
@pytest.mark.parametrize("rule", ["floor", "rceil", "even"])
def test_every_exponent_and_threshold(name, rule):
    half_place = 0x800000 - (1 << (22 - oracle.MX[name][3]))
    amax = every_exponent([THRESHOLD[name], half_place])
    got = scale_byte(torch.from_numpy(amax), scheme(name).element, rule).numpy()
    want = np.array([oracle.mx_byte(a, name, rule) for a in amax])
    assert np.array_equal(got, want)
    assert got.min() >= 0
    assert got.max() <= 254


@pytest.mark.parametrize("name", oracle.MX)
def test_threshold_form_of_rceil(name):
    """FORMATS 1.3: e - emax + (m > T), where nothing is clamped or subnormal."""
    amax = every_exponent([THRESHOLD[name]])
    bits = amax.view(np.uint32).astype(np.int64)
    want = (bits >> 23) - oracle.MX[name][2] + ((bits & 0x7FFFFF) > THRESHOLD[name])
    got = scale_byte(torch.from_numpy(amax), scheme(name).element, "rceil").numpy()
    inside = want > 1
    assert np.array_equal(got[inside], want[inside])
    assert inside.sum() > 1000


@pytest.mark.spec("F8")
def test_e2m1_examples():
    amax = torch.tensor([6.0, 7.0, 7.9999995, 8.0])  # FORMATS 1.3
    for rule, want in {"floor": [127, 127, 127, 128], "rceil": [127, 128, 128, 128], "even": [127, 128, 128, 128]}.items():
        assert scale_byte(amax, "float4_e2m1fn", rule).tolist() == want
    assert scale_byte(torch.tensor([2.7, 5.5, 1.2]), "float4_e2m1fn", "rceil").tolist() == [126, 127, 125]
    assert float(np.floor(np.log2(np.float32(7.9999995)))) == 3.0  # F8: the float log2 rival is wrong here


@pytest.mark.spec("B20", "Z6", "R14")
@pytest.mark.parametrize("name", oracle.MX)
def test_one_ulp_above_the_maximum(name):
    """B20 and section R: on and one ulp above max * 2^k. A float32 log2 rounds to k where |k| is large (Z6)."""
    largest = np.float32(oracle.MX[name][1])
    blind = []
    for k in (0, 8, -8, 60, -60):
        on = largest * np.float32(2.0) ** np.float32(k)
        above, below = np.nextafter(on, np.float32(np.inf)), np.nextafter(on, np.float32(0))
        got = scale_byte(torch.tensor([below, on, above]), scheme(name).element, "rceil").tolist()
        assert got == [127 + k, 127 + k, 128 + k]
        rival = int(np.ceil(np.log2((above / largest).astype(np.float32)))) + 127
        blind.append(rival == got[2])
    assert not all(blind)


@pytest.mark.spec("B20")
def test_exact_form_with_a_global_scale():
    """B20's checks, and its ends: subnormal ratio 1, r <= 0 gives 0, infinite or NaN r gives 255."""

    def byte(amax, gs, largest):
        return int(ceil_ratio(torch.tensor([amax]), largest, gs)[0])

    above = float(np.nextafter(np.float32(28), np.float32(99)))
    assert byte(28.0, 1.0, 28.0) == 127
    assert byte(above, 1.0, 28.0) == 128
    assert byte(1.0, 12544.0, 28.0) == 136
    assert [byte(28.0 * 2.0**k, 1.0, 28.0) for k in (-100, 3, 100)] == [27, 130, 227]
    assert byte(2.0**-126, 1.0, 28.0) == 1
    assert byte(2.0**-149, 1.0, 28.0) == 0  # the ratio itself is 0
    assert byte(0.0, 1.0, 28.0) == 0
    assert byte(-1.0, 1.0, 28.0) == 0
    assert byte(3e38, 1e10, 28.0) == 255
    assert byte(float("nan"), 1.0, 28.0) == 255
    for name, largest in (("e2m3", 7.5), ("e4m3", 448.0)):
        on = np.float32(largest)
        assert byte(float(np.nextafter(on, np.float32(1e9))), 1.0, largest) == 128, name
        assert byte(float(np.nextafter(on, np.float32(0))), 1.0, largest) == 127, name


@pytest.mark.spec("F2", "B23")
def test_scales_never_come_from_a_cast():
    """F2, F9: amax 18 has ratio 3.0 in E2M1; its byte is rceil's 129, while casts of 3.0 to E8M0 disagree with each other."""
    assert int(scale_byte(torch.tensor([18.0]), "float4_e2m1fn", "rceil")) == 129
    with pytest.raises(InputError, match="exact powers of two"):
        element("float8_e8m0fnu").encode(torch.tensor([3.0]))


@pytest.mark.spec("B35")
def test_unknown_rules_raise():
    with pytest.raises(ValueError, match="expected one of floor, rceil, even, mse, got 'ceil'"):
        scale_byte(torch.ones(1), "float4_e2m1fn", "ceil")


@pytest.mark.spec("B34")
def test_division_is_rounded_once():
    """B34: torch computes number / tensor as number * (1 / tensor)."""
    assert divide(200704.0, torch.tensor([2.625])).view(torch.int32).tolist() == [0x47955555]
    x = torch.rand(10000, generator=torch.Generator().manual_seed(0)) + 0.5
    want = (200704.0 / x.double()).float()
    assert torch.equal(divide(200704.0, x), want)
    assert not torch.equal(200704.0 / x, want)  # the rival is visible
    assert torch.equal(divide(x, 7.0), (x.double() / 7).float())


@pytest.mark.spec("B22")
def test_powers_of_two():
    exponents = torch.arange(-149, 128, dtype=torch.int32)
    assert power_of_two(exponents).double().tolist() == [2.0**e for e in range(-149, 128)]


UP = {
    "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip


@pytest.mark.spec("A40")
@pytest.mark.parametrize("name", UP)
def test_round_up_is_the_smallest_not_below(name):
    """A40, at every value and its neighbours, random numbers and the ends; saturating; the nearest rival is visible."""
    half = 2 ** (element(name).bits - 1)
    table = element(name).decode(torch.arange(half)).numpy()
    table = table[np.isfinite(table)].astype(np.float64)
    rng = np.random.default_rng(1)
    pick = table if len(table) < 4096 else rng.choice(table, 4096)
    x = np.concatenate([pick, rng.lognormal(0, 8, 4096), [2.0**-149, 2.0**-126, 3.4e38, 0.0]]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf))])
    x = x[np.isfinite(x)]
    want = np.minimum(np.searchsorted(table, x.astype(np.float64), side="left"), len(table) - 1)
    got = round_up(torch.from_numpy(x), name)
    assert got.dtype == element(name).code_dtype
    assert np.array_equal(got.numpy().astype(np.int64), want)
    decoded = element(name).decode(got).numpy()
    assert (decoded >= x)[x <= table[-1]].all()
    nearest = np.abs(element(name).encode(torch.from_numpy(x)).numpy().astype(np.int64))
    assert (nearest != want).any()
    negative = round_up(torch.from_numpy(-x[x > 0]), name).numpy().astype(np.int64)
    assert np.array_equal(negative, want[x > 0] | half)


@pytest.mark.spec("A40")
def test_round_up_to_powers_of_two():
    x = torch.tensor([1.0, 1.0000001, 3.0, 2.0**127, 3.4e38, 2.0**-127, 2.0**-149, 0.0, 2.0**-126])
    assert round_up(x, "float8_e8m0fnu").tolist() == [127, 128, 129, 254, 254, 0, 0, 0, 1]
    assert round_up(x, "ue8m0_zero").tolist() == [127, 128, 129, 254, 254, 1, 1, 0, 1]
    e4m3 = round_up(torch.tensor([2.0**-6, 2.0**-9, 2.0**-9 * 1.01, 500.0]), "float8_e4m3fn")
    assert e4m3.tolist() == [8, 1, 2, 0x7E]


def test_round_up_refuses():
    for values, name, text in (
        (torch.tensor([float("nan")]), "bfloat16", "expected finite scales"),
        (torch.tensor([float("inf")]), "float8_e8m0fnu", "expected finite scales"),
        (torch.tensor([-1.0]), "float8_e8m0fnu", "has no sign"),
        (torch.tensor([1.0]), "int8", "expected a float or exponent element"),
        (torch.tensor([1.0]).half(), "bfloat16", "expected float32 scales"),
    ):
        with pytest.raises(InputError, match=text):
            round_up(values, name)
    assert round_up(torch.tensor([0.1]), "float32").view(torch.float32).tolist() == torch.tensor([0.1]).tolist()
