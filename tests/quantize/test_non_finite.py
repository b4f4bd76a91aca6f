"""Activations that are not finite: saturated, or marked so that a block decodes to NaN; no value is looked at (DESIGN, Schemes)."""

import pytest
import torch

import narrowgate as ng
from narrowgate.packing import decode
from narrowgate.quantize import dequantize_microscaling, quantize, quantize_microscaling
from narrowgate.quantize.non_finite import LARGEST

ONE_LEVEL = ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "int8_g32", "int4_g32", "int2_g32", "int8_channel",
             "nf4_g64"]  # fmt: skip
NAN, INF = float("nan"), float("inf")


def rows(k=100):
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(1))
    x[1, 3], x[2, 97], x[3, 40], x[4, 50] = NAN, INF, -INF, NAN
    x[4, 51] = INF
    return x


@pytest.mark.parametrize("scheme", ONE_LEVEL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_block_of_a_nan_is_lost(scheme, dtype):
    x = rows().to(dtype)
    was = x.clone()
    w = quantize(x, scheme, non_finite="saturate")
    clean = quantize(x.float().nan_to_num(0.0, LARGEST, -LARGEST), scheme)
    y, plain = decode(w), decode(clean)
    block = w.scales[0].block[-1]
    lost = x.isnan()
    for start in range(0, 100, block):
        lost[:, start : start + block] |= lost[:, start : start + block].any(-1, keepdim=True)
    assert torch.equal(y.isnan(), lost)
    assert torch.equal(y[~lost], plain[~lost])
    assert bool(torch.isfinite(y[~lost]).all())
    assert y[2, 97] > 1e38  # the infinity saturates
    assert y[3, 40] < -1e38
    assert y[2, 96].abs() < 1e37  # and its neighbours are lost in its scale
    assert torch.equal(x.view(torch.int32 if dtype == torch.float32 else torch.int16),
                       was.view(torch.int32 if dtype == torch.float32 else torch.int16))  # fmt: skip


@pytest.mark.parametrize("scheme", ONE_LEVEL)
def test_finite_values_give_the_same_bits_under_both_policies(scheme):
    x = rows().nan_to_num(0.0, 3.0, -5.0)
    assert ng.same_bits(quantize(x, scheme), quantize(x, scheme, non_finite="saturate"))


def test_codes_and_bytes_of_a_marked_block():
    x = torch.ones(2, 64)
    x[0, 5], x[1, 40] = NAN, -INF
    for scheme, own in (("mxfp8_e4m3", 0x7F), ("mxfp8_e5m2", 0x7F), ("mxfp4", 0), ("mxfp6_e3m2", 0)):
        w = quantize(x, scheme, non_finite="saturate")
        assert w.scales[0].data[0, 0] == 255
        assert w.scales[0].data[0, 1] < 255
        codes = w.codes()[0, :32].tolist()
        assert codes == [own if i == 5 else 0 for i in range(32)]


def test_the_public_quantizer_still_raises_and_unknown_policies_do():
    with pytest.raises(ng.InputError, match=r"4 of 500 values are not finite|5 of 500 values are not finite"):
        ng.quantize(rows(), "mxfp4")
    with pytest.raises(ng.InputError, match="expected non_finite"):
        quantize(rows(), "mxfp4", non_finite="ignore")
    with pytest.raises(ng.InputError, match="one scale level"):
        quantize(rows(), "nvfp4", non_finite="saturate")


@pytest.mark.parametrize("fmt", ["e3m2", "e2m3", "e4m3"])
def test_the_fp6_layer(fmt):
    """Byte 255 for a NaN or a global scale that is NaN; an overflow of amax * gs saturates and stays below 255."""
    x = torch.ones(4, 32)
    x[0, 1], x[1, 2] = NAN, INF
    gs = torch.tensor([1.0, 1.0, 3.4e38, NAN])
    x[2] = 1e10
    codes, byte = quantize_microscaling(x, gs, fmt, non_finite="saturate")
    largest = {"e3m2": 31, "e2m3": 31, "e4m3": 0x7E}[fmt]
    assert [b == 255 for b in byte[:, 0].tolist()] == [True, False, False, True]
    y = dequantize_microscaling(codes[1:2], byte[1:2], 32, 1.0, fmt, swizzled=False) if fmt == "e4m3" else None
    assert y is None or y[0, 2] == LARGEST
    assert set(codes[2].tolist()) == {largest}
    assert set(codes[3].tolist()) == {0}
    finite = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    for a, b in zip(quantize_microscaling(finite, 2.5, fmt), quantize_microscaling(finite, 2.5, fmt, non_finite="saturate"),
                    strict=True):  # fmt: skip
        assert torch.equal(a, b)


def test_e4m3_goes_back():
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    codes, byte = quantize_microscaling(x, 3.0, "e4m3")
    y = dequantize_microscaling(codes, byte, 64, 3.0, "e4m3", swizzled=False)
    assert (y - x).abs().max() <= 0.07 * x.abs().max()
