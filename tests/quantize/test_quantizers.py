"""Every scheme against an outside oracle, over short blocks, stacks, every scale rule, zeros and extremes; and its speed."""

import sys
import time

import numpy as np
import pytest
import scheme_oracle as oracle
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgate.errors import InputError
from narrowgate.formats import element, scheme, schemes
from narrowgate.packing import decode, same_bits
from narrowgate.quantize import quantize

FREE = tuple(name for name in schemes() if name not in ("q8_0", "q4_0", "bf16"))  # gguf and bf16 have tests of their own


def hard_rows(rows, width, seed=0):
    """Normal rows, one heavy-tailed, one tiny, one huge, one with a zero block, one of exact ties, one of one value."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, width)).astype(np.float32)
    x[1] = rng.standard_t(2, width)
    x[2] *= np.float32(1e-38)
    x[3] *= np.float32(1e4)
    x[4, :32] = 0
    x[5] = np.resize([0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5.0, 6.0], width)
    x[6] = 3.0
    x[7] = np.resize([7.5, -7.5, 0.0, -0.0], width)
    return x


def check(x, name, rule=None):
    w = quantize(torch.from_numpy(x), name, scale_rule=rule, layout="bytes@1")
    codes, scales = oracle.reference(x, name, rule)
    stored = w.scales[0].codes(w.shape).numpy().astype(np.int64)
    mask = (1 << element(w.scales[0].element).bits) - 1
    assert np.array_equal(stored & mask, scales.astype(np.int64) & mask)
    assert np.array_equal(w.codes().numpy(), codes)
    return w


@pytest.mark.parametrize("name", FREE)
@pytest.mark.parametrize("width", [128, 100, 17])
def test_against_the_oracle(name, width):
    if name == "iq4_nl":
        width = 96
    check(hard_rows(9, width), name)


@pytest.mark.parametrize("name", oracle.MX)
@pytest.mark.parametrize("rule", ["floor", "even", "mse"])
def test_other_scale_rules(name, rule):
    check(hard_rows(9, 100, seed=1), name, rule)


def test_nvfp4_rounded_to_nearest():
    check(hard_rows(9, 100, seed=2), "nvfp4", "nearest")


@pytest.mark.parametrize("name", FREE)
def test_rows_do_not_depend_on_each_other(name):
    """Every row alone gives what it gives among others (nvfp4: under a scale a row), and slices give what one pass gives."""
    x = torch.from_numpy(hard_rows(9, 96, seed=3))
    outer = "per_row" if name == "nvfp4" else None
    w = quantize(x, name, global_scale=outer)
    for i in (0, 3, 4):
        assert same_bits(w.rows(i, i + 1), quantize(x[i : i + 1], name, global_scale=outer))


@pytest.mark.parametrize("name", schemes())
def test_slices_of_rows_change_nothing(name, monkeypatch):
    x = torch.randn(70, 96, generator=torch.Generator().manual_seed(4))
    whole = quantize(x, name)
    monkeypatch.setattr(sys.modules["narrowgate.quantize.quantize"], "_SLICE_VALUES", 1)
    assert same_bits(quantize(x, name), whole)


@pytest.mark.spec("F31")
@pytest.mark.parametrize("name", schemes())
def test_expert_stacks_and_strides(name):
    """F31: [3, 6, 64] as a stack, as its rows, and through a strided view; the input is left alone."""
    x = torch.randn(3, 6, 64, generator=torch.Generator().manual_seed(5))
    before = x.clone()
    w = quantize(x, name)
    flat = quantize(x.view(18, 64), name)
    assert torch.equal(decode(w).view(18, 64), decode(flat))
    wide = torch.randn(3, 6, 130)[:, :, ::2][:, :, :64]
    wide.copy_(x)
    assert not wide.is_contiguous()
    assert same_bits(quantize(wide, name), w)
    assert torch.equal(x, before)
    if name != "nvfp4":  # there the stack shares one outer scale
        for e in range(3):
            assert same_bits(w.select(e), quantize(x[e], name))


@pytest.mark.spec("F33")
@pytest.mark.parametrize("name", schemes())
def test_narrow_inputs_are_read_exactly(name):
    """F33: values that bfloat16, float16 and float32 all hold give equal bytes."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(6)).bfloat16()
    x = torch.where(x.abs() < 2**-14, 0.0, x)
    assert torch.equal(x.half().float(), x.float())
    w = quantize(x.float(), name)
    assert same_bits(quantize(x, name), w)
    assert same_bits(quantize(x.half(), name), w)


@pytest.mark.spec("F10", "F22")
@pytest.mark.parametrize("name", schemes())
def test_zeros(name):
    """F10, F22: no NaN byte, codes 0 (q4_0: its zero point 8), decoded to exactly 0; -0.0 does not disturb that."""
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(7))
    x[1] = 0
    for zeros in (x, torch.zeros(3, 64)):
        w = quantize(zeros, name)
        y = decode(w)
        assert y.isfinite().all()
        assert not y[1].any()
        assert set(w.codes()[1].tolist()) == {8 if name == "q4_0" else 0}
        if w.scales and name != "int8_channel":
            low = w.scales[0].codes(w.shape)[1].to(torch.int64) & 0x7FFF
            assert not low.any()
    assert decode(quantize(torch.full((1, 64), -0.0), name)).abs().max() == 0


@pytest.mark.spec("F14", "F18")
@pytest.mark.parametrize("name", schemes())
def test_tiny_and_huge_blocks_stay_finite(name):
    """F14, F18: amax 2^-149, 2^-126 and 1e38 (6e4 where the scale is a float16) decode to finite values.

    Above 2^127 * 1.75 a value may round up to 2^128, which float32 does not hold: mxfp4 turns 3e38 into 4 * 2^126.
    """
    huge = 1e38 if name not in ("q8_0", "q4_0", "iq4_nl") else 6e4
    x = torch.zeros(4, 64)
    x[0, 3], x[1, 3], x[2, 3], x[3, 3] = 2.0**-149, 2.0**-126, huge, -(2.0**-127)
    y = decode(quantize(x, name, global_scale="per_row" if name == "nvfp4" else None))
    assert y.isfinite().all()
    assert abs(float(y[2, 3]) / huge - 1) < 0.2
    assert (y.abs() <= x.abs().amax(1, keepdim=True) * 1.34).all()


@pytest.mark.spec("F18")
def test_f18_and_f14_bytes():
    x = torch.zeros(2, 32)
    x[0, 0] = 2.0**-126
    w = quantize(x, "mxfp4", scale_rule="floor")
    assert w.scales[0].data.tolist() == [[0], [0]]  # others wrap to 255
    assert decode(w)[0, 0].double() == 2.0**-126


# ---- the published failures, by number
def one_block(*values, length=32):
    x = torch.zeros(1, length)
    x[0, : len(values)] = torch.tensor(values)
    return x


@pytest.mark.spec("F1")
def test_f1_midpoints():
    ties = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    w = quantize(one_block(*ties), "mxfp4")
    assert w.scales[0].data.tolist() == [[127]]
    assert decode(w)[0, :7].tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert decode(quantize(-one_block(*ties), "mxfp4"))[0, :7].tolist() == [-0.0, -1, -1, -2, -2, -4, -4]


@pytest.mark.spec("F4", "F5", "F7", "F8")
@pytest.mark.parametrize(("name", "value", "rule", "byte", "decoded"), [
    ("mxfp4", 7.0, "rceil", 128, 8.0), ("mxfp4", 7.0, "floor", 127, 6.0),  # F4
    ("mxfp8_e4m3", 957.0, "floor", 128, 896.0), ("mxfp8_e4m3", 957.0, "rceil", 129, 960.0),  # F5
    ("mxfp4", 6.0, "floor", 127, 6.0),  # F7
    ("mxfp4", 7.9999995, "floor", 127, 6.0),  # F8
])  # fmt: skip
def test_f4_f5_f7_f8(name, value, rule, byte, decoded):
    w = quantize(one_block(value), name, scale_rule=rule)
    assert w.scales[0].data.tolist() == [[byte]]
    assert float(decode(w)[0, 0]) == decoded


@pytest.mark.spec("F34")
def test_f34_short_blocks():
    """K = 10944 with groups of 128 has half a block at the end; K = 100 with groups of 32 has four values."""
    x = torch.randn(2, 10944, generator=torch.Generator().manual_seed(8))
    w = quantize(x, "int4_g128")
    assert w.scales[0].data.shape == (2, 86)
    assert torch.equal(decode(w)[:, 10880:], decode(quantize(x[:, 10880:].contiguous(), "int4_g128")))
    w = quantize(x[:, :100].contiguous(), "int4_g32")
    assert w.scales[0].data.shape == (2, 4)
    assert torch.equal(decode(w)[:, 96:], decode(quantize(x[:, 96:100].contiguous(), "int4_g32")))
    assert w.data.numel() == 25


@pytest.mark.spec("A39")
def test_a39_ranges():
    """Quantizers use the symmetric range (int2: -2..1, from the scale's sign); decoding takes the whole field."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(9))
    for name, (low, high) in {"int4_g32": (-7, 7), "int8_g32": (-127, 127), "int2_g32": (-2, 1)}.items():
        codes = element(scheme(name).element).decode(quantize(x, name).codes())
        assert (codes.min(), codes.max()) == (low, high)


@pytest.mark.spec("A40")
def test_a40_scales_cover_the_block():
    """No value needs more than the largest code; with the scale rounded to nearest some would (the visible rival)."""
    x = torch.rand(400, 32, generator=torch.Generator().manual_seed(10)) + 0.5
    w = quantize(x, "int4_g32")
    s = w.scales[0].values(w.shape)
    assert ((x / s).abs() <= 7.0000005).all()
    nearest = (x.amax(1, keepdim=True) / 7).bfloat16().float()
    assert ((x / nearest).abs() > 7.0000005).any()


@pytest.mark.spec("B35")
def test_b35_mse_never_worse_and_its_example():
    x = torch.from_numpy(hard_rows(9, 128, seed=11))
    for name in oracle.MX:
        error = {}
        for rule in ("rceil", "mse"):
            y = decode(quantize(x, name, scale_rule=rule))
            error[rule] = (x.double() - y.double()).square().view(-1, 32).sum(-1)
        assert (error["mse"] <= error["rceil"] * (1 + 1e-7)).all()
    block = one_block(7.6, *[0.3, -0.2, 0.45, 0.6, -0.7] * 6, 0.11)
    coarse = quantize(block, "mxfp6_e2m3").scales[0].data
    fine = quantize(block, "mxfp6_e2m3", scale_rule="mse").scales[0].data
    assert int(fine) == int(coarse) - 1 == 127
    with pytest.raises(ValueError, match="expected a scale rule of mxfp4"):
        quantize(block, "mxfp4", scale_rule="mean")


# ---- nvfp4's two levels
def test_nvfp4_small_blocks():
    """FORMATS 1.4: with s2 = 1 a block of amax 6 * 2^-9 has byte 1 and code 7; the non-zero floor keeps smaller blocks."""
    x = torch.zeros(3, 16)
    x[0, 0], x[1, 0], x[2, 5] = 6 * 2.0**-9, 6 * 2.0**-10, 1e-3
    kept = quantize(x, "nvfp4", global_scale=1.0)
    assert kept.scales[0].data.tolist() == [[1], [1], [1]]
    assert kept.codes()[0, 0] == 7
    assert float(decode(kept)[0, 0]) == 6 * 2.0**-9
    plain = quantize(x, "nvfp4", global_scale=1.0, scale_rule="nearest")
    assert plain.scales[0].data.tolist() == [[1], [0], [0]]  # 2^-10 ties to 0
    assert not decode(plain)[1:].any()
    y = torch.zeros(1, 32)
    y[0, 0], y[0, 16] = 1000.0, 1e-3
    w = quantize(y, "nvfp4")
    assert w.scales[0].data.tolist() == [[126, 1]]
    assert w.codes()[0, 16] == 3  # 1.5
    assert float(decode(w)[0, 16]) == pytest.approx(1.09e-3, rel=1e-3)


def test_nvfp4_divides_by_the_rounded_scale():
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(12))
    w = quantize(x, "nvfp4")
    s2 = w.scales[1].values(w.shape)
    unrounded = x.abs().amax(1, keepdim=True) / (6 * s2) * s2
    rival = element("float4_e2m1fn").encode(x / unrounded)
    assert not torch.equal(rival, w.codes())


def test_nvfp4_outer_scales():
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(13))
    amax = x.abs().amax()
    whole = quantize(x, "nvfp4")
    assert whole.scales[1].block == (2, 3, 32)
    assert float(whole.scales[1].values(x.shape)) == float(amax / 2688)
    rows = quantize(x, "nvfp4", global_scale="per_row")
    assert rows.scales[1].block == (1, 1, 32)
    assert torch.equal(rows.scales[1].values(x.shape)[..., 0], x.abs().amax(-1) / 2688)
    given = quantize(x, "nvfp4", global_scale=rows.scales[1].values(x.shape))
    assert same_bits(given, rows)
    assert same_bits(quantize(x, "nvfp4", global_scale=float(amax / 2688)), whole)
    assert rows.scheme == whole.scheme == "nvfp4"
    zero = quantize(torch.zeros(2, 32), "nvfp4")
    assert float(zero.scales[1].values((2, 32))) == 1.0
    for bad, text in (
        (0.0, "positive finite"), (float("nan"), "positive finite"), (-1.0, "positive finite"),
        (torch.ones(5), "1 or 6 numbers, got 5"), ("per_tensor", "got 'per_tensor'"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=text):
            quantize(x, "nvfp4", global_scale=bad)
    with pytest.raises(InputError, match="mxfp4 has no second scale level"):
        quantize(x, "mxfp4", global_scale=1.0)


# ---- refusals
@pytest.mark.spec("B8")
def test_non_finite_weights_are_counted_and_placed():
    x = torch.zeros(2, 3, 64)
    x[0, 2, 5], x[1, 0, 0], x[1, 2, 63] = float("inf"), float("nan"), -float("inf")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for name in schemes():
            with pytest.raises(InputError, match=r"3 of 384 values are not finite, the first at index \[0, 2, 5\]"):
                quantize(x.to(dtype), name)


def test_refusals():
    x = torch.ones(2, 33)
    for call, text in (
        (lambda: quantize(x, "mxfp6_e3m2"), "last dim must be divisible by 4, got 33"),
        (lambda: quantize(x, "q8_0"), "q8_0 needs K divisible by 32, got 33"),
        (lambda: quantize(x, "mxfp3"), "expected one of mxfp4"),
        (lambda: quantize(x.double(), "mxfp4"), "expected a float32, bfloat16 or float16 tensor, got torch.float64"),
        (lambda: quantize(x.int(), "mxfp4"), "got torch.int32"),
        (lambda: quantize(x[0, 0], "mxfp4"), "at least one axis"),
        (lambda: quantize(x, "bf16", scale_rule="rceil"), r"expected a scale rule of bf16 \(none\)"),
        (lambda: quantize(x, "mxfp4", layout="fp6_bytes@1"), "fp6_bytes@1 holds 6-bit codes, got 4"),
        (lambda: quantize(torch.full((1, 32), 1e7), "q8_0"), "stores its scale in float16, whose maximum 65504"),
    ):
        with pytest.raises(InputError, match=text):
            call()
    assert quantize(x, "mxfp6_e3m2", layout="bytes@1").shape == (2, 33)  # any K is legal in a layout that can hold it


def test_bf16_is_rne():
    x = torch.from_numpy(np.random.default_rng(14).integers(0, 2**32, 999, dtype=np.uint32).view(np.float32))
    x = x[x.isfinite()]
    assert torch.equal(quantize(x, "bf16").data.view(torch.bfloat16), x.bfloat16())
    assert quantize(x, "bf16").bits_per_value == 16


# ---- properties and speed
@given(
    name=st.sampled_from([n for n in FREE if n != "iq4_nl"]), rows=st.integers(1, 4), width=st.integers(1, 70),
    exponent=st.integers(-20, 20), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_containment(name, rows, width, exponent, seed):
    """Under the default rules nothing saturates: the error is at most half the element's widest step, at the block's scale.

    Two schemes may clip by design: int2 has no +2 (an error of one step), nvfp4 rounds its block scale to nearest (1/16).
    """
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    w = quantize(x, name, layout="bytes@1", global_scale="per_row" if name == "nvfp4" else None)
    step = {"float4_e2m1fn": 2.0, "float6_e2m3fn": 0.5, "float6_e3m2fn": 4.0, "float8_e4m3fn": 32.0, "float8_e5m2": 8192.0,
            "index4": 0.304}.get(scheme(name).element, 2.0 if name == "int2_g32" else 1.0)  # fmt: skip
    scale = torch.ones(rows, 1)
    for level in w.scales:
        scale = scale * level.values(w.shape).repeat_interleave(min(level.block[-1], width), 1)[:, :width]
    slack = x.abs() / 16 if name == "nvfp4" else 1e-6 * x.abs() + 1e-37
    assert ((x - decode(w)).abs() <= step / 2 * scale.abs() + slack).all()


@pytest.mark.parametrize("name", schemes())
def test_a_million_weights_in_well_under_a_second(name):
    x = torch.randn(512, 2048, generator=torch.Generator().manual_seed(15))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        quantize(x[:32], name)
        best = min(_seconds(lambda: quantize(x, name)) for _ in range(3))
        w = quantize(x, name)
        back = min(_seconds(lambda: decode(w)) for _ in range(3))
    finally:
        torch.set_num_threads(threads)
    assert best < 1.0
    assert back < 1.0


def _seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
