"""Every code of every element decoded, every tie, neighbour and boundary encoded, against ml_dtypes and written tables."""

import element_oracle as oracle
import numpy as np
import pytest
import torch

from narrowgate.errors import InputError
from narrowgate.formats import element, elements


def equal_bits(ours, theirs):
    """Bit equality of float32, any NaN equal to any NaN."""
    theirs = torch.from_numpy(np.ascontiguousarray(theirs))
    same = ours.view(torch.int32) == theirs.view(torch.int32)
    return bool((same | (ours.isnan() & theirs.isnan())).all())


def encode(name, x):
    return element(name).encode(torch.from_numpy(np.asarray(x, np.float32))).numpy().astype(np.int64)


@pytest.mark.spec("A10", "B3", "B4", "F16")
@pytest.mark.parametrize("name", oracle.TYPES)
def test_every_code_decodes_as_ml_dtypes_says(name):
    codes = torch.arange(2 ** oracle.WIDTH[name])
    assert element(name).bits == oracle.WIDTH[name]
    assert equal_bits(element(name).decode(codes), oracle.decoded(name))


def test_the_oracle_covers_every_element_but_the_indices():
    covered = {*oracle.TYPES, "float32", "ue8m0_zero", "index2", "index4", "index8", "index16"}
    assert covered == set(elements())


@pytest.mark.spec("A8", "B3", "B4", "B5")
def test_written_tables():
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    e3m2 = [0, 0.0625, 0.125, 0.1875, 0.25, 0.3125, 0.375, 0.4375, 0.5, 0.625, 0.75, 0.875, 1, 1.25, 1.5, 1.75,
            2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28]  # fmt: skip
    e2m3 = [i / 8 for i in range(16)] + [2 + i / 4 for i in range(8)] + [4 + i / 2 for i in range(8)]
    for name, table in (("float4_e2m1fn", e2m1), ("float6_e3m2fn", e3m2), ("float6_e2m3fn", e2m3)):
        codes = torch.arange(2 * len(table))
        got = element(name).decode(codes)
        want = torch.tensor(table + [-v for v in table], dtype=torch.float32)
        assert torch.equal(got, want)
        assert torch.signbit(got).tolist() == [False] * len(table) + [True] * len(table)  # code 8 / 32 is -0


@pytest.mark.spec("Z4", "F16", "R3", "R9")
def test_rivals_of_decoding_are_visible():
    codes = torch.arange(16)
    nibble = ((codes ^ 8) - 8).float()
    assert element("float4_e2m1fn").decode(codes)[7] == 6.0
    assert nibble[7] == 7.0
    one_bias_for_both = (1 + torch.arange(4) / 4) * 2.0 ** (3 - 1)  # e3m2's codes 12..15 with bias 1 (SPEC Z4)
    assert not torch.equal(element("float6_e3m2fn").decode(torch.arange(12, 16)), one_bias_for_both)
    as_normals = (1 + torch.arange(8) / 8) * 2.0**-7  # E4M3 subnormals read as normals (F16: 0x01 gave .0087890625)
    assert element("float8_e4m3fn").decode(torch.tensor([1])).item() == 2.0**-9
    assert as_normals[1] == 0.0087890625


@pytest.mark.spec("B1")
def test_constants():
    expected = {
        "float4_e2m1fn": (6.0, 2, 1), "float6_e2m3fn": (7.5, 2, 1), "float6_e3m2fn": (28.0, 4, 3),
        "float8_e4m3fn": (448.0, 8, 7), "float8_e5m2": (57344.0, 15, 15),
    }  # fmt: skip
    for name, (largest, emax, bias) in expected.items():
        assert (element(name).max, element(name).emax, element(name).bias) == (largest, emax, bias)
    assert element("float8_e8m0fnu").max == 2.0**127
    assert [element(n).max for n in ("int2", "int4", "int8", "uint2", "uint4", "uint8")] == [1, 7, 127, 3, 15, 255]


@pytest.mark.spec("B7")
@pytest.mark.parametrize("name", oracle.FLOATS)
def test_ties_neighbours_and_boundaries(name):
    x = oracle.probes(name)
    if not element(name).saturates:  # float16 and bfloat16 overflow to infinity: numpy's and ml_dtypes' own rounding
        with np.errstate(over="ignore"):
            want = x.astype(oracle.TYPES[name]).view(np.uint16).astype(np.int64)
        assert np.array_equal(encode(name, x), want)
        return
    assert np.array_equal(encode(name, x), oracle.nearest_code(name, x))


@pytest.mark.spec("B7")
@pytest.mark.parametrize("name", oracle.FLOATS)
def test_random_bit_patterns_against_ml_dtypes(name):
    u = np.random.default_rng(7).integers(0, 2**32, 1 << 16, dtype=np.uint32)
    x = u.view(np.float32)
    x = x[~np.isnan(x)]
    with np.errstate(over="ignore", invalid="ignore"):
        theirs = x.astype(oracle.TYPES[name])
    agreed = np.isfinite(x) if name in oracle.SMALL_FLOATS else np.full(x.shape, True)
    if name in ("float8_e4m3fn", "float8_e5m2"):  # ml_dtypes does not saturate these two
        agreed &= np.abs(x) <= element(name).max
    stored = np.uint8 if oracle.WIDTH[name] <= 8 else np.uint16
    assert agreed.sum() > 1000
    assert np.array_equal(encode(name, x)[agreed], theirs.view(stored).astype(np.int64)[agreed])


@pytest.mark.parametrize("name", oracle.SMALL_FLOATS)
def test_every_float16_input(name):
    x = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    x = x[~np.isnan(x)]
    got = encode(name, x)
    assert np.array_equal(got, oracle.nearest_code(name, x))
    half = element(name).encode(torch.from_numpy(x).half())  # narrow inputs are widened exactly
    assert np.array_equal(half.numpy().astype(np.int64), got)


@pytest.mark.parametrize("name", oracle.FLOATS)
def test_every_value_encodes_to_its_own_code(name):
    values = oracle.decoded(name)
    kept = ~np.isnan(values) & (np.isfinite(values) | (not element(name).saturates))
    assert np.array_equal(encode(name, values[kept]), np.arange(len(values))[kept])


@pytest.mark.spec("B7", "F1", "F19")
def test_spec_ties():
    cases = {  # SPEC B7, FORMATS 1.1, F1
        "float6_e3m2fn": {0.03125: 0, 0.09375: 2, 0.3: 5, 18.0: 28, 22.0: 30, 26.0: 30, 29.0: 31, 14.0: 27},
        "float6_e2m3fn": {0.0625: 0, 0.1875: 2, 2.125: 16, 4.25: 24, 6.75: 30, 7.25: 30, 8.0: 31, 0.3125: 2},
        "float4_e2m1fn": {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6},
        "float8_e4m3fn": {256.0: 0x78, 288.0: 0x79, 400.0: 0x7C, 464.0: 0x7E, 1e9: 0x7E, 2.0**-10: 0},  # F19
    }
    for name, table in cases.items():
        x = np.array(list(table), np.float32)
        want = np.array(list(table.values()))
        assert np.array_equal(encode(name, x), want), name
        sign = 1 << (oracle.WIDTH[name] - 1)
        assert np.array_equal(encode(name, -x), want | sign), name


@pytest.mark.spec("F1", "R10", "R11")
def test_rivals_of_rounding_are_visible():
    """Ties to the lower value, and ties away from zero, differ on the fixtures that SPEC R names."""
    fixtures = {
        "float6_e3m2fn": ((0.09375, 22.0), (0.03125, 18.0, 26.0)),
        "float6_e2m3fn": ((0.1875, 6.75), (0.0625, 2.125, 4.25, 7.25)),
    }
    for name, (lower_sees, away_sees) in fixtures.items():
        values = oracle.positive_values(name)
        for x in lower_sees:
            rival = np.searchsorted(values, x) - 1
            assert encode(name, [x])[0] == rival + 1
        for x in away_sees:
            rival = np.searchsorted(values, x)
            assert encode(name, [x])[0] == rival - 1
    add_half = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # F1: every midpoint goes up
    assert encode("float4_e2m1fn", [0.25, 1.25, 2.5, 5.0]).tolist() == [0, 2, 4, 6]
    assert [add_half[i] for i in (1, 3, 5, 7)] == [0.5, 1.5, 3, 6]


@pytest.mark.spec("B8")
def test_the_sign_of_zero_is_kept():
    for name in oracle.FLOATS:
        sign = 1 << (oracle.WIDTH[name] - 1)
        assert encode(name, [-0.0, -(2.0**-149)]).tolist() == [sign, sign]
    assert encode("float6_e3m2fn", [-0.03125, -0.02]).tolist() == [0x20, 0x20]  # SPEC B8: -min/2 <= x < 0


@pytest.mark.spec("B8")
def test_infinity_saturates_small_floats_and_stays_in_wide_ones():
    for name in oracle.SMALL_FLOATS:
        assert element(name).decode(torch.from_numpy(encode(name, [np.inf, -np.inf]))).tolist() == [
            element(name).max,
            -element(name).max,
        ]
    assert encode("float16", [np.inf, 65520.0, 65519.0]).tolist() == [0x7C00, 0x7C00, 0x7BFF]
    assert encode("bfloat16", [-np.inf]).tolist() == [0xFF80]


@pytest.mark.spec("B8")
def test_nan_encodes_to_nan_or_is_refused():
    nan = torch.tensor([1.0, float("nan")])
    for name in ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"):
        assert element(name).decode(element(name).encode(nan)).isnan().tolist() == [False, True]
    for name in ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "int4", "uint8"):
        with pytest.raises(InputError, match=r"NaN has no code in this element \(1 NaN"):
            element(name).encode(nan)


@pytest.mark.spec("A10")
def test_nan_codes_of_fp8_decode_to_nan():
    e4m3, e5m2 = element("float8_e4m3fn"), element("float8_e5m2")
    assert e4m3.decode(torch.tensor([0x7F, 0xFF])).isnan().all()
    assert e5m2.decode(torch.tensor([0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF])).isnan().all()
    assert e5m2.decode(torch.tensor([0x7C, 0xFC])).tolist() == [float("inf"), -float("inf")]
    codes = torch.arange(256, dtype=torch.uint8)
    for ours, dtype in ((e4m3, torch.float8_e4m3fn), (e5m2, torch.float8_e5m2)):
        assert equal_bits(ours.decode(codes), codes.view(dtype).float().numpy())


C16 = {  # SPEC C16: float32 bits -> bfloat16 bits
    0x7FFFFFFF: 0x7FFF, 0xFFFFFFFF: 0xFFFF, 0x7F800001: 0x7FC0, 0xFF800001: 0xFFC0, 0x7FBFFFFF: 0x7FFF,
    0x7F800000: 0x7F80, 0x7F7FFFFF: 0x7F80, 0x3F808000: 0x3F80, 0x3F818000: 0x3F82, 0x00008000: 0x0000,
    0x7F7F8000: 0x7F80, 0x80000000: 0x8000, 0x7FC00000: 0x7FC0, 0xFF800000: 0xFF80, 0x00000000: 0x0000,
}  # fmt: skip


@pytest.mark.spec("C16", "R25")
def test_c16_vectors_and_their_rival():
    u = np.array(list(C16), np.uint32)
    fill = np.random.default_rng(3).integers(0, 2**32, 4096 - len(u), dtype=np.uint32)
    u = np.concatenate([u, fill]).astype(np.int64)
    nan = (u & 0x7FFFFFFF) > 0x7F800000
    plain = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16) & 0xFFFF
    want = np.where(nan, (u >> 16) | 64, plain)
    assert want[: len(C16)].tolist() == list(C16.values())
    got = element("bfloat16").encode(torch.from_numpy(u.astype(np.uint32).view(np.float32)))
    assert np.array_equal(got.numpy(), want)
    assert plain[0] == 0x8000  # rounding the payload as a number turns this NaN into -0
    assert plain[2] == 0x7F80  # and this one into infinity


def test_float32_is_the_identity():
    u = torch.from_numpy(np.random.default_rng(4).integers(-(2**31), 2**31, 999).astype(np.int32))
    assert torch.equal(element("float32").encode(u.view(torch.float32)), u)
    assert torch.equal(element("float32").decode(u).view(torch.int32), u)


def test_integers_round_to_even_and_clamp():
    x = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 1e9, -1e9, float("inf"), -float("inf"), 6.5, -7.5]
    signed = {"int2": (-2, 1), "int4": (-8, 7), "int8": (-128, 127)}
    for name, (low, high) in signed.items():
        want = np.clip(np.rint(np.array(x)), low, high)
        codes = encode(name, x)
        assert codes.min() >= 0
        assert np.array_equal(element(name).decode(torch.from_numpy(codes)).numpy(), want)
    for name, high in {"uint2": 3, "uint4": 15, "uint8": 255}.items():
        assert np.array_equal(encode(name, x), np.clip(np.rint(np.array(x)), 0, high))


@pytest.mark.spec("F2", "F9", "B21")
def test_e8m0_decodes_every_byte_and_never_rounds():
    bytes_ = torch.arange(256)
    want = [np.ldexp(1.0, i - 127) for i in range(255)]
    assert element("float8_e8m0fnu").decode(bytes_)[:255].tolist() == want  # F9
    assert element("float8_e8m0fnu").decode(bytes_)[255].isnan()
    zero = element("ue8m0_zero").decode(bytes_)
    assert zero[0] == 0  # SPEC B21
    assert zero[1:255].tolist() == want[1:]
    exact = torch.tensor(want, dtype=torch.float32)
    assert element("float8_e8m0fnu").encode(exact).tolist() == list(range(255))
    assert element("float8_e8m0fnu").encode(torch.tensor([float("nan")])).tolist() == [255]
    assert element("ue8m0_zero").encode(torch.cat([torch.zeros(1), exact[1:]])).tolist() == list(range(255))
    for value in (3.0, 1.5, -1.0, 0.0, float("inf"), 2.0**-128):  # F2: casts disagree on these, so there is no cast
        with pytest.raises(InputError, match="exact powers of two"):
            element("float8_e8m0fnu").encode(torch.tensor([value]))
    with pytest.raises(InputError, match="exact powers of two"):
        element("ue8m0_zero").encode(torch.tensor([2.0**-127]))


@pytest.mark.spec("B5")
def test_codes_are_masked_and_of_any_integer_dtype():
    want = element("float6_e2m3fn").decode(torch.tensor([5, 63]))
    assert torch.equal(element("float6_e2m3fn").decode(torch.tensor([5 + 64, 63 + 192])), want)  # SPEC B5
    assert element("int8").decode(torch.tensor([-1, -128], dtype=torch.int8)).tolist() == [-1, -128]
    with pytest.raises(InputError, match="integer codes"):
        element("int4").decode(torch.tensor([1.0]))
    with pytest.raises(InputError, match="float32, bfloat16 or float16"):
        element("int4").encode(torch.tensor([1]))
    with pytest.raises(InputError, match="codebook"):
        element("index4").decode(torch.tensor([1]))
    with pytest.raises(InputError, match="codebook"):
        element("index4").encode(torch.tensor([1.0]))


def test_unknown_names_are_refused():
    with pytest.raises(InputError, match=r"expected one of int2, .*, got 'fp5'"):
        element("fp5")


def test_elements_are_frozen_and_shapes_survive():
    with pytest.raises(AttributeError):
        element("int4").bits = 5
    for name in ("float8_e5m2", "int4", "float16"):
        for shape in ((0,), (), (2, 0, 3), (2, 3)):
            codes = element(name).encode(torch.zeros(shape))
            assert codes.shape == torch.Size(shape)
            assert element(name).decode(codes).shape == torch.Size(shape)
            assert codes.dtype == element(name).code_dtype
