"""The reference decode against SPEC A's reads, C10-C14's rows of two roundings, and the failures seen elsewhere."""

import numpy as np
import pytest
import torch

from narrowgate.formats import element, elements
from narrowgate.packing import Scale, decode, decode_rows, gather_rows, pack


def f32(values, block):
    return Scale.from_values(torch.as_tensor(values, dtype=torch.float32), "float32", block)


def cycle(bits, shape):
    """SPEC A's fixture: v_i = -2^(bits-1) + (i mod 2^bits), row-major."""
    return (torch.arange(torch.Size(shape).numel()) % 2**bits - 2 ** (bits - 1)).view(shape)


@pytest.mark.spec("A7", "Z2", "R1")
@pytest.mark.parametrize(("bits", "shape"), [(8, (8, 8)), (4, (8, 32)), (2, (4, 32)), (8, (16, 17)), (4, (3, 21)), (2, (5, 7))])
def test_integers_are_sign_extended_over_the_full_range(bits, shape):
    """A7, with widths that are no multiple of a word and, at 8 bits, positive values too (Z2)."""
    values = cycle(bits, shape)
    assert torch.equal(decode(pack(values, f"int{bits}")), values.float())
    unsigned = values.numpy() & (2**bits - 1)
    assert not np.array_equal(unsigned, values.numpy())  # rival: zero extension
    if shape != (8, 8):
        assert int(values.max()) == 2 ** (bits - 1) - 1  # rival: sign bits always on


@pytest.mark.spec("A8")
def test_e2m1_by_table():
    codes = torch.arange(128).view(4, 32) % 16  # A8
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    want = torch.cat([positive, -positive])[codes]
    got = decode(pack(codes, "float4_e2m1fn"))
    assert torch.equal(got, want)
    assert torch.equal(torch.signbit(got), codes >= 8)


@pytest.mark.spec("A10")
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_every_code_bit_exact(name):
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)  # A10
    want = codes.view(getattr(torch, name)).float()
    got = decode(pack(codes, name))
    same = got.view(torch.int32) == want.view(torch.int32)
    assert bool((same | (got.isnan() & want.isnan())).all())
    assert int(got.isnan().sum()) == (2 if name == "float8_e4m3fn" else 6)


@pytest.mark.spec("A13")
def test_scaled_copy():
    """A13: out = v * s[m, n/16], with rivals n % 2, transposed grid, one scale."""
    values = cycle(8, (8, 32))
    s = (torch.arange(16).view(8, 2) + 1) / 4
    got = decode(pack(values, "int8", scales=[f32(s, (1, 16))]))
    want = values * s.repeat_interleave(16, 1)
    assert torch.equal(got, want)
    for rival in (s.repeat(1, 16), s.reshape(2, 8).t().repeat_interleave(16, 1), s[0, 0]):
        assert not torch.allclose(values * rival, want, atol=1e-6)


@pytest.mark.spec("A14", "R4")
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_codebook_reads(bits):
    """A14: raw unsigned indices, table[idx] * scale with one rounding."""
    index = (37 * torch.arange(256) + 3).view(8, 32) % 2**bits
    table = (torch.arange(2**bits) - 127.5) / 3
    s = (torch.arange(16).view(8, 2) + 1) / 4
    got = decode(pack(index, f"index{bits}", scales=[f32(s, (1, 16))], codebook=table))
    assert torch.equal(got, table[index] * s.repeat_interleave(16, 1))
    if bits == 8:
        assert int((index > 127).sum()) > 0
        signed = table[((index + 128) % 256 - 128).clamp(min=0)]  # rival: a signed field, held at the first entry
        assert not torch.equal(got, signed * s.repeat_interleave(16, 1))


@pytest.mark.spec("A16", "Z19")
@pytest.mark.parametrize(("bits", "step"), [(8, 37), (2, 37), (4, 37), (16, 37), (16, 25743)])
def test_rows_under_a_row_scale(bits, step):
    """A16 over [4, 64] and, for widths that are no whole word (Z19), over [4, 61]."""
    for width in (64, 61):
        index = (step * torch.arange(4 * width) + 3).view(4, width) % 2**bits
        table = torch.linspace(-3, 3, 2**bits)
        s = (torch.arange(4.0) + 1) / 4
        got = decode(pack(index, f"index{bits}", scales=[f32(s[:, None], (1, width))], codebook=table))
        assert torch.equal(got, table[index] * s[:, None])
        if step == 25743:
            assert int(index.max()) > 60000


@pytest.mark.spec("A18")
def test_int4_under_a_row_scale():
    """A18: the raw field (37 i + 3) mod 16, sign-extended."""
    field = (37 * torch.arange(256) + 3).view(4, 64) % 16
    s = (torch.arange(4.0) + 1) / 4
    got = decode(pack(field, "int4", scales=[f32(s[:, None], (1, 64))]))
    assert torch.equal(got, ((field ^ 8) - 8) * s[:, None])


def test_float32_fields_decode_exactly_and_staging_is_visible():
    """A19: values 1 + i 2^-12 are exact in float32 and not in float16."""
    x = (1 + torch.arange(128) * 2.0**-12).view(8, 16)
    got = decode(pack(x.view(torch.int32), "float32"))
    assert torch.equal(got, x)
    assert not torch.equal(got.half().float(), x)


@pytest.mark.spec("A5", "A6")
def test_two_levels_multiply_innermost_first():
    """A20's operand: E2M1 codes i mod 16, block 16, s[4, 2], global 0.25; every product one float32 rounding."""
    codes = torch.arange(128).view(4, 32) % 16
    s = (torch.arange(8).view(4, 2) + 1) / 2
    w = pack(codes, "float4_e2m1fn", scales=[f32(s, (1, 16)), f32([[0.25]], (4, 32))])
    want = element("float4_e2m1fn").decode(codes) * s.repeat_interleave(16, 1) * 0.25
    assert torch.equal(decode(w), want)
    thirds = torch.tensor([[1.1, 0.7]])
    a, b = f32(thirds, (1, 16)), f32([[0.3]], (1, 32))
    row = torch.arange(32).view(1, 32)
    x = row.float()
    inner_first = x * thirds.repeat_interleave(16, 1) * 0.3
    outer_first = x * 0.3 * thirds.repeat_interleave(16, 1)
    assert torch.equal(decode(pack(row, "uint8", scales=[a, b])), inner_first)
    assert not torch.equal(inner_first, outer_first)  # the order is visible here


@pytest.mark.spec("A6", "R6")
def test_weights_with_blocks_of_rows_and_columns():
    """A24's rhs: s[(k/8) * blocks_n + n/bn] with 4 x 2 blocks."""
    values = cycle(4, (32, 16))
    s = (torch.arange(8.0) + 1).view(4, 2) / 2
    got = decode(pack(values, "int4", scales=[f32(s, (8, 8))]))
    want = values * s.repeat_interleave(8, 0).repeat_interleave(8, 1)
    assert torch.equal(got, want)
    rival = s.reshape(2, 4).t().repeat_interleave(8, 0).repeat_interleave(8, 1)
    assert not torch.equal(values * rival, want)


@pytest.mark.spec("A32", "A33", "A34", "A35")
@pytest.mark.parametrize("scale_element", ["float8_e8m0fnu", "float8_e4m3fn", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["rows@1", "words@1"])
def test_scales_of_every_stored_type(scale_element, layout):
    """A32-A35's stored scales: four bytes, two halves or one float a word, at a grid of 3 x 5."""
    values = torch.pow(2.0, (torch.arange(15) % 5 - 2).float()).view(3, 5)  # exact in all of them
    codes = cycle(8, (3, 40))
    w = pack(codes, "int8", scales=[Scale.from_values(values, scale_element, (1, 8), layout)])
    assert torch.equal(decode(w), codes * values.repeat_interleave(8, 1))


@pytest.mark.spec("A5")
def test_zero_points_and_offsets_in_order():
    """(code - zero) * s0 * s1 + (o0 * o1), each step rounded to float32: against numpy, with the fused rival visible."""
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 256, (5, 48), generator=generator)
    zero = torch.randint(0, 256, (5, 3), generator=generator)
    s0, s1 = torch.rand(5, 3, generator=generator), torch.rand(1, 1, generator=generator)
    o0, o1 = torch.randn(5, 3, generator=generator), torch.rand(1, 1, generator=generator)
    whole = (5, 48)
    w = pack(
        codes, "uint8", scales=[f32(s0, (1, 16)), f32(s1, whole)],
        zero_points=Scale.from_codes(zero, "uint8", (1, 16)), offset=[f32(o0, (1, 16)), f32(o1, whole)],
    )  # fmt: skip
    wide = lambda t: t.numpy().repeat(48 // t.shape[1], 1)  # noqa: E731
    product = (codes.numpy() - wide(zero)).astype(np.float32) * wide(s0) * wide(s1)
    added = wide(o0) * wide(o1)
    assert np.array_equal(decode(w).numpy(), product + added)
    fused = (product.astype(np.float64) + wide(o0).astype(np.float64) * wide(o1)).astype(np.float32)
    assert not np.array_equal(fused, product + added)


ROWS = [(bits, bias, group, n, with_offset)
        for bits, bias in ((2, -1), (4, -7), (8, -16)) for group in (16, 32, 64) for n in (320, 2560)
        for with_offset in (False, True)]  # fmt: skip


def embedding_row(bits, bias, group, n, with_offset):
    """C10, C11: a packed table of three rows and its pieces."""
    flat = np.arange(3 * n)
    code = ((13 * flat + 7 * (flat // n)) & (2**bits - 1)).reshape(3, n)
    rng = np.random.default_rng(n + group + bits)
    s = rng.uniform(-2, 2, (3, n // group)).astype(np.float32)
    o = rng.uniform(-2, 2, (3, n // group)).astype(np.float32)
    s[0, 0], o[0, 0] = -0.0, 0.0
    w = pack(
        torch.from_numpy(code), f"uint{bits}", scales=[f32(s, (1, group))],
        zero_points=Scale.from_values(torch.full((1, 1), float(-bias)), "uint8", (3, n)),
        offset=[f32(o, (1, group))] if with_offset else (),
    )  # fmt: skip
    return w, (code + bias).astype(np.float32), s.repeat(group, 1), o.repeat(group, 1)


@pytest.mark.spec("C10", "C11", "C12")
@pytest.mark.parametrize(("bits", "bias", "group", "n", "with_offset"), ROWS)
def test_packed_rows_round_twice(bits, bias, group, n, with_offset):
    w, value, s, o = embedding_row(bits, bias, group, n, with_offset)
    want = value * s + o if with_offset else value * s
    assert np.array_equal(decode(w).numpy().view(np.uint32), want.view(np.uint32))
    if not with_offset:  # C12: the "+ 0.0" is embedding's; decode alone keeps the -0.0 of a negative product
        assert np.signbit(decode(w).numpy()[0, : min(group, 4)]).any()
        assert not np.signbit((decode(w) + 0.0).numpy()[want == 0]).any()


@pytest.mark.spec("C14", "Z11")
def test_the_fused_rival_is_visible_over_all_rows():
    """C14, Z11: with offsets a fused multiply-add differs at 4 and 8 bits; without them, and at 2 bits, it never does."""
    differs = {}
    for case in ROWS:
        _, value, s, o = embedding_row(*case)
        if case[4]:
            fused = (value.astype(np.float64) * s + o).astype(np.float32)
            differs[case[0]] = differs.get(case[0], 0) + int((fused != value * s + o).sum())
    assert differs[2] == 0
    assert differs[4] > 0
    assert differs[8] > 0


@pytest.mark.spec("F14", "F15")
def test_scale_bytes_103_to_112_survive_a_float16_output():
    """F15: 2^-24 .. 2^-15 are float16 subnormals, rounded once from float32; F14: 2^-127 times a value is no zero."""
    grid = torch.arange(103, 113).view(10, 1)
    w = pack(torch.full((10, 32), 2), "float4_e2m1fn", scales=[Scale.from_codes(grid, "float8_e8m0fnu", (1, 32))])
    want = torch.pow(2.0, torch.arange(-24, -14).double())
    assert torch.equal(decode(w).half()[:, 0].double(), want)
    tiny = pack(torch.arange(8).view(1, 8), "float4_e2m1fn", scales=[Scale.from_codes(torch.zeros(1, 1, dtype=int),
                "float8_e8m0fnu", (1, 32))])  # fmt: skip
    assert decode(tiny)[0].double().tolist() == [v * 2.0**-127 for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


@pytest.mark.spec("Z14", "B21", "R15")
def test_byte_0_is_a_power_or_a_zero_by_element():
    """Z14, B21: 2^-127 under float8_e8m0fnu, 0 under ue8m0_zero."""
    byte = torch.zeros(1, 1, dtype=torch.uint8)
    codes = torch.full((1, 32), 31)
    plain = decode(pack(codes, "float6_e2m3fn", scales=[Scale(byte, "float8_e8m0fnu", (1, 32))], layout="bytes@1"))
    zero = decode(pack(codes, "float6_e2m3fn", scales=[Scale(byte, "ue8m0_zero", (1, 32))], layout="bytes@1"))
    assert plain[0, 0].double() == 7.5 * 2.0**-127
    assert not zero.any()


@pytest.mark.spec("F42")
def test_scale_grid_of_float32_bfloat16_float16():
    """F42 at decode level: the same factors stored three ways give the same values."""
    codes = cycle(4, (3, 64))
    values = torch.tensor([[0.5, 1.25], [-3.0, 0.0078125], [1.0, 96.0]])
    results = [
        decode(pack(codes, "int4", scales=[Scale.from_values(values, name, (1, 32))]))
        for name in ("float32", "bfloat16", "float16")
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.spec("A45")
@pytest.mark.parametrize("name", ["int4", "uint4", "float4_e2m1fn", "index4", "int2", "int8"])
def test_rows_of_odd_width_at_every_cut(name):
    """Five fields a row: rows start inside a byte, where the look-up of two nibbles at a time must not slip."""
    bits = element(name).bits
    codes = (torch.arange(45) * 7 + 3).view(9, 5) % 2**bits
    table = torch.randn(16, generator=torch.Generator().manual_seed(1)) if name == "index4" else None
    s = (torch.arange(27.0) + 1).view(9, 3) / 3
    w = pack(codes, name, scales=[f32(s, (1, 2))], codebook=table)
    values = element(name).decode(codes) if table is None else table[codes]
    want = values * s.repeat_interleave(2, 1)[:, :5]
    assert torch.equal(decode(w), want)
    assert torch.equal(decode(w.with_layout("bytes@1")), want)
    for start in range(10):
        for stop in range(start, 10):
            assert torch.equal(decode_rows(w, start, stop), want[start:stop])
    index = torch.tensor([8, 0, 3, 3])
    assert torch.equal(gather_rows(w, index), want[index])


@pytest.mark.parametrize("name", [n for n in elements() if not n.startswith("index")])
@pytest.mark.parametrize("layout", ["words@1", "rows@1"])
def test_decoding_changes_nothing_that_is_stored(name, layout):
    bits = element(name).bits
    if layout == "words@1" and bits == 6:
        layout = "bytes@1"
    codes = torch.arange(2, 8, dtype=torch.int32).view(2, 3) << max(bits - 8, 0)
    w = pack(codes, name, scales=[f32([[3.0]], (2, 3))], offset=[f32([[0.5]], (2, 3))], layout=layout)
    before = [t.clone() for t in w.tensors()]
    first = decode(w)
    again = decode(w)
    assert torch.equal(first.view(torch.int32), again.view(torch.int32))
    assert all(torch.equal(a, b) for a, b in zip(before, w.tensors(), strict=True))
