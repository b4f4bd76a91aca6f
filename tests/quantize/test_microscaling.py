"""The FP6 layer with its global scale and zero byte (SPEC B1-B9, B19-B24, B26, B28, B30-B32), rivals shown visible."""

import ml_dtypes
import numpy as np
import pytest
import torch

from narrowgate.formats import microscaling as fp6
from narrowgate.packing import pack_fp6, swizzle_128x4, unpack_fp6
from narrowgate.packing.swizzle import swizzled_view
from narrowgate.quantize import dequantize_microscaling, quantize_block, quantize_microscaling
from narrowgate.quantize.microscaling import block_multiplier, block_scale_byte

TYPE = {"e3m2": ml_dtypes.float6_e3m2fn, "e2m3": ml_dtypes.float6_e2m3fn, "e4m3": ml_dtypes.float8_e4m3fn}
LARGEST = {"e3m2": 28.0, "e2m3": 7.5, "e4m3": 448.0}
ALL_CODES = {  # SPEC B31: x_i = i/4 - 4
    "e3m2": (125, [60, 60, 59, 58, 58, 58, 57, 56, 56, 55, 54, 53, 52, 50, 48, 44,
                   0, 12, 16, 18, 20, 21, 22, 23, 24, 24, 25, 26, 26, 26, 27, 28]),
    "e2m3": (127, [*range(56, 48, -1), 48, 46, 44, 42, 40, 38, 36, 34, *range(0, 16, 2), *range(16, 24)]),
}  # fmt: skip


def oracle(x, gs, fmt, bf16_round=False):
    """Codes and bytes of rows of 32 in numpy: float32 products, ml_dtypes' rounding."""
    f32 = np.float32
    amax = np.abs(x).max(-1)
    ratio = ((amax * f32(gs)).astype(f32) / f32(LARGEST[fmt])).astype(f32)
    bits = ratio.view(np.uint32)
    byte = np.where(ratio <= 0, 0, (bits >> 23) + ((bits & 0x7FFFFF) != 0)).astype(np.int64)
    power = np.where((byte == 0) | (byte == 254), 0, 2.0 ** (127.0 - byte)).astype(f32)
    scaled = (x * (f32(gs) * power)[:, None]).astype(f32)
    if bf16_round:
        scaled = scaled.astype(ml_dtypes.bfloat16).astype(f32)
    return np.clip(scaled, -LARGEST[fmt], LARGEST[fmt]).astype(TYPE[fmt]).view(np.uint8), byte


@pytest.mark.spec("B1", "B2", "B5", "Z8")
def test_constants_and_tables():
    assert [fp6.global_scale_numerator(f) for f in ("e3m2", "e2m3", "e4m3")] == [12544.0, 3360.0, 200704.0]
    assert fp6.BLOCK == 32
    for fmt, size in (("e3m2", 64), ("e2m3", 64), ("e4m3", 256)):
        table = fp6.decode_table(fmt)
        want = np.arange(size, dtype=np.uint8).view(TYPE[fmt]).astype(np.float32)
        assert np.array_equal(table.numpy(), want, equal_nan=True)
        assert fp6.decode_table(fmt, torch.bfloat16).dtype == torch.bfloat16
    assert torch.signbit(fp6.decode_table("e3m2"))[32]  # B5: code 32 is -0
    for bad in ("e4m3fn", "e5m2", "", "E3M2"):  # Z8
        with pytest.raises(ValueError, match="expected one of e3m2, e2m3, e4m3"):
            fp6.microscaling_element(bad)


@pytest.mark.spec("B6", "B9", "B30")
def test_words_pairs_octets():
    word = torch.tensor([5 | 10 << 8 | (21 | 64) << 16 | (63 | 192) << 24], dtype=torch.int64).to(torch.int32)
    table = fp6.decode_table("e3m2")
    assert torch.equal(fp6.decode_word(word, "e3m2"), table[torch.tensor([[5, 10, 21, 63]])])  # B6: masked byte by byte
    pair = fp6.encode_pair(torch.tensor([28.0]), torch.tensor([-0.0625]), "e3m2")  # B30
    assert pair.tolist() == [31 << 8 | 33]
    values = torch.tensor([0.0, 1.0, -1.0, 448.0, 1000.0, -448.0, 2.0**-9, 240.0])
    octet = int(fp6.encode_octet(values, "e4m3"))
    codes = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    assert octet & (2**64 - 1) == int.from_bytes(bytes(codes), "little")
    assert fp6.quantize_values(torch.tensor([[0.3, 29.0], [-0.09375, 18.0]])).tolist() == [[0.3125, 28.0], [-0.125, 16.0]]


@pytest.mark.spec("B31")
def test_b31_block():
    x = (torch.arange(32) / 4 - 4.0).view(1, 32)
    for fmt, (byte, codes) in ALL_CODES.items():
        got, scale = quantize_microscaling(x, 1.0, fmt)
        assert scale.tolist() == [[byte]]
        assert got[0].tolist() == codes
    e3m2, byte = quantize_microscaling(x)  # e3m2 is the default
    assert bytes(pack_fp6(e3m2)[0, :6].tolist()).hex(" ") == "3c bf eb ba 9e e3"
    back = dequantize_microscaling(pack_fp6(e3m2), byte, 32, swizzled=False)
    assert back[0, :5].tolist() == [-4, -4, -3.5, -3, -3]
    e2m3, byte = quantize_microscaling(x, 1.0, "e2m3")
    assert bytes(pack_fp6(e2m3)[0, :6].tolist()).hex(" ") == "f8 6d d7 f4 2c c7"
    assert torch.equal(dequantize_microscaling(pack_fp6(e2m3), byte, 32, fmt="e2m3", swizzled=False), x)


@pytest.mark.spec("B19", "B20", "B26", "B28")
@pytest.mark.parametrize("fmt", TYPE)
@pytest.mark.parametrize("gs", [1.0, 12544.0 / 3.7, 0.013])
@pytest.mark.parametrize("bf16_round", [False, True])
def test_blocks_against_numpy(fmt, gs, bf16_round):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((300, 32)).astype(np.float32) * (2.0 ** rng.integers(-20, 20, (300, 1))).astype(np.float32)
    x[7] = 0
    codes, byte = quantize_microscaling(torch.from_numpy(x), gs, fmt, bf16_round=bf16_round)
    want, scale = oracle(x, gs, fmt, bf16_round)
    assert np.array_equal(byte[:, 0].numpy(), scale)
    assert np.array_equal(codes.numpy(), want)
    if bf16_round:  # B26: it can move boundary values by a code
        assert (want != oracle(x, gs, fmt)[0]).any()
    assert torch.equal(
        quantize_microscaling(torch.from_numpy(x), gs, "e2m3", activation_fmt=fmt, bf16_round=bf16_round)[0], codes
    )


@pytest.mark.spec("B19", "B20", "B22")
def test_scale_byte_and_multiplier():
    """B20-B22, B28: exact exponents, containment, the powers built in the exponent field, and what is refused."""
    above = float(np.nextafter(np.float32(28), np.float32(99)))
    assert block_scale_byte(torch.tensor([28.0, above, 0.0]), 1.0, "e3m2").tolist() == [127, 128, 0]
    assert block_scale_byte(torch.tensor([1.0]), 12544.0, "e3m2").tolist() == [136]
    byte = torch.tensor([0, 1, 127, 130, 253, 254], dtype=torch.uint8)
    assert block_multiplier(byte, 3.0).double().tolist() == [0, 3 * 2.0**126, 3.0, 3 / 8, 3 * 2.0**-126, 0]
    top = float(np.finfo(np.float32).max)
    for fmt, limit in (("e3m2", 251), ("e2m3", 253), ("e4m3", 247)):
        assert int(block_scale_byte(torch.tensor([top]), 1.0, fmt)) == limit
        for bad in (float("inf"), float("nan")):
            with pytest.raises(ValueError, match="amax \\* global_scale must be finite, 1 blocks"):
                block_scale_byte(torch.tensor([bad]), 1.0, fmt)
    with pytest.raises(ValueError, match="must be finite"):
        block_scale_byte(torch.tensor([3e38]), 2.0, "e3m2")


@pytest.mark.spec("B28")
def test_zero_global_scale_zero_blocks_and_given_maxima():
    x = torch.linspace(-3, 3, 32).view(1, 32)
    codes, byte = quantize_block(x, torch.tensor([3.0]), 0.0, "e3m2")
    assert not codes.any()
    assert not byte.any()
    codes, byte = quantize_block(x * 100, torch.tensor([3.0]), 1.0, "e2m3")  # amax is the caller's: values above it saturate
    assert byte.tolist() == [126]
    assert set(codes[0, [0, 31]].tolist()) == {63, 31}
    tiny = torch.zeros(1, 32)
    tiny[0, 3] = 2.0**-149
    codes, byte = quantize_microscaling(tiny)
    assert not codes.any()
    assert byte.tolist() == [[0]]


def test_a_huge_global_scale_over_a_tiny_block():
    """gs * 2^(127 - byte) overflows although every product is finite: no NaN for the zeros of the block."""
    x = torch.zeros(2, 32)
    x[0, :3] = torch.tensor([2.0**-140, -(2.0**-141), 0.0])
    x[1, 0] = 1.0
    codes, byte = quantize_microscaling(x, 12544.0)
    assert byte[0, 0] == 1
    want = (x[0].double() * 12544 * 2.0**126).float()
    assert codes[0, 2] == 0
    assert torch.equal(fp6.decode_table("e3m2")[codes[0].long()], fp6.quantize_values(want))


@pytest.mark.spec("B32")
def test_errors():
    with pytest.raises(ValueError, match="cols must be divisible by 32, got 48"):
        quantize_microscaling(torch.zeros(2, 48))
    packed = torch.zeros(3, 24, dtype=torch.uint8)
    scales = torch.zeros(2, 1, dtype=torch.uint8)
    for call, text in (
        (lambda: dequantize_microscaling(packed, scales, 36), "num_fp6 must be divisible by 32, got 36"),
        (
            lambda: dequantize_microscaling(packed, scales, 32, swizzled=False),
            "scale row count does not match packed row count",
        ),
        (lambda: dequantize_microscaling(packed, scales, 32), "scale row count does not match packed row count"),
        (lambda: dequantize_microscaling(packed, scales, 64), r"packed last dim 24 != 3\*num_fp6/4 \(48\)"),
        (lambda: dequantize_microscaling(packed, scales, 32, fmt="e4m3"), "expected 32 bytes a row for e4m3, got 24"),
        (lambda: quantize_microscaling(torch.full((1, 32), float("nan"))), "must be finite"),
        (lambda: quantize_microscaling(torch.ones(1, 32), 1.0, "e4m3fn"), "expected one of e3m2, e2m3, e4m3"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


@pytest.mark.spec("B32", "R16")
@pytest.mark.parametrize("fmt", ["e3m2", "e2m3"])
def test_dequantize_divides_once(fmt):
    """B32: y = f32(code * 2^(byte - 127) / gs). Rivals: multiply by gs, multiply by f32(1 / gs), row-major scales."""
    rng = np.random.default_rng(2)
    rows, width, gs = 130, 160, 12544.0 / 3.3
    x = torch.from_numpy(rng.standard_normal((rows, width)).astype(np.float32) * 2.0 ** rng.integers(-9, 9, (rows, 1)))
    x = x.float()
    codes, byte = quantize_microscaling(x, gs, fmt)
    packed = pack_fp6(codes)
    assert len(set(byte.flatten().tolist())) > 5
    exact = fp6.decode_table(fmt)[codes.long()].double() * torch.pow(2.0, byte.double() - 127).repeat_interleave(32, 1)
    want = (exact / np.float32(gs)).float()
    got = dequantize_microscaling(packed, byte, width, gs, fmt, swizzled=False)
    assert torch.equal(got, want)
    assert torch.equal(dequantize_microscaling(packed, swizzle_128x4(byte), width, gs, fmt), want)
    assert (x - got).abs().max() < 0.1 * x.abs().max()
    differ = []
    for other in 12544.0 / np.arange(1.1, 4.0, 0.1):  # a code has few mantissas, so one global scale may show nothing
        divided = dequantize_microscaling(packed[:4], byte[:4], width, float(other), fmt, swizzled=False)
        inverse = exact[:4].float() * float(np.float32(1) / np.float32(other))
        differ.append(float((inverse != divided).double().mean()))
    assert 0.1 < np.mean(differ) < 0.4  # 1 ulp on about a fifth of the values
    assert (exact * gs - x).abs().max() > 1e3 * x.abs().max()
    flat = torch.nn.functional.pad(byte.flatten(), (0, 256 * 8 - byte.numel()))  # row-major bytes read as swizzled ones
    assert not torch.equal(dequantize_microscaling(packed, flat, width, gs, fmt), want)


@pytest.mark.spec("Z9")
def test_groups_need_their_own_global_scales():
    """Z9: two stacked groups, swizzled apart, dequantized with one global scale each."""
    x = torch.randn(2, 33, 64, generator=torch.Generator().manual_seed(3)) * torch.tensor([1.0, 50.0])[:, None, None]
    gs = fp6.global_scale_numerator("e3m2") / x.abs().amax((1, 2))
    codes, byte = quantize_microscaling(x, gs[:, None].expand(2, 33))
    view = swizzled_view(swizzle_128x4(byte), 33, 2)
    assert view.shape == (32, 4, 1, 4, 1, 2)
    stacked = dequantize_microscaling(pack_fp6(codes).view(66, 48), view, 64, gs)
    one_by_one = [dequantize_microscaling(pack_fp6(codes[g]), byte[g], 64, float(gs[g]), swizzled=False) for g in range(2)]
    assert torch.equal(stacked, torch.cat(one_by_one))
    rival = dequantize_microscaling(pack_fp6(codes).view(66, 48), view, 64, float(gs[0]))
    assert not torch.allclose(rival, stacked)
    assert not dequantize_microscaling(pack_fp6(codes).view(66, 48), view, 64, 0.0).any()


@pytest.mark.spec("B21", "R15")
def test_zero_byte_is_a_zero_block_whatever_its_codes():
    """B21: rival 2^-127 gives 31 * 2^-127-ish values under a global scale of 1."""
    codes = torch.full((1, 32), 31, dtype=torch.uint8)
    zero = torch.zeros(1, 1, dtype=torch.uint8)
    assert not dequantize_microscaling(pack_fp6(codes), zero, 32, swizzled=False).any()
    assert dequantize_microscaling(pack_fp6(codes), zero + 1, 32, swizzled=False)[0, 0].double() == 28 * 2.0**-126
    assert torch.equal(unpack_fp6(pack_fp6(codes), 32), codes)
