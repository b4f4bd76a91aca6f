"""FP6 bytes, byte containers, plain rows and the scale swizzle: golden bytes, error texts, rivals, round trips."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgate.errors import InputError
from narrowgate.packing import (
    expand_fp6,
    layout,
    layouts,
    pack_fp6,
    pack_fp6_grouped,
    swizzle_128x4,
    unpack_fp6,
    unswizzle_128x4,
)
from narrowgate.packing.fp6 import containers_to_u64, pack_container_u64, pack_fp6_u64
from narrowgate.packing.layout import code_dtype
from narrowgate.packing.swizzle import swizzled_view


def some_codes(*shape, bits=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 ** min(bits, 31), shape, generator=generator).to(code_dtype(bits))


# ---- four codes in three bytes
@pytest.mark.spec("B10", "R12")
def test_fp6_golden_bytes():
    codes = [5, 10, 21, 63]  # SPEC B10
    assert [hex(b) for b in pack_fp6(torch.tensor(codes)).tolist()] == ["0x85", "0x52", "0xfd"]
    big_endian = int("".join(f"{c:06b}" for c in codes), 2).to_bytes(3, "big")
    assert list(big_endian) != [0x85, 0x52, 0xFD]
    e3m2 = torch.tensor([60, 60, 59, 58, 58, 58, 57, 56])  # SPEC B31
    assert bytes(pack_fp6(e3m2).tolist()).hex(" ") == "3c bf eb ba 9e e3"
    assert bytes(pack_fp6(torch.arange(56, 48, -1)).tolist()).hex(" ") == "f8 6d d7 f4 2c c7"


@pytest.mark.spec("B11")
def test_fp6_codes_are_masked():
    codes = some_codes(3, 8)
    assert torch.equal(pack_fp6(codes | 0xC0), pack_fp6(codes))
    assert torch.equal(pack_fp6(codes.to(torch.int64)), pack_fp6(codes))


@pytest.mark.spec("B11", "B12", "B13")
@pytest.mark.parametrize("shape", [(4,), (3, 8), (2, 5, 12), (0, 4), (3, 0)])
def test_fp6_round_trip_and_expand(shape):
    codes = some_codes(*shape)
    packed = pack_fp6(codes)
    assert tuple(packed.shape) == (*shape[:-1], 3 * shape[-1] // 4)
    assert torch.equal(unpack_fp6(packed, shape[-1]), codes)
    assert torch.equal(expand_fp6(packed, shape[-1]), codes)  # SPEC B13: identical, top bits 0


@pytest.mark.spec("B11", "B12", "B13", "B16")
def test_fp6_error_texts():
    packed = torch.zeros(2, 6, dtype=torch.uint8)
    for call, text in (
        (lambda: pack_fp6(some_codes(2, 6)), "last dim must be divisible by 4, got 6"),
        (lambda: unpack_fp6(packed, 7), "num_fp6 must be divisible by 4, got 7"),
        (lambda: expand_fp6(packed, 7), "num_fp6 must be divisible by 4, got 7"),
        (lambda: unpack_fp6(packed, 12), r"packed last dim 6 != 3\*num_fp6/4 \(9\)"),
        (lambda: expand_fp6(packed, 12), r"packed last dim 6 != 3\*num_fp6/4 \(9\)"),
        (lambda: pack_fp6_grouped(some_codes(2, 3, 6)), "cols must be divisible by 4 for FP6 packing, got 6"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(InputError, match="integer codes"):
        pack_fp6(torch.zeros(4))


@pytest.mark.spec("B16")
def test_fp6_grouped_puts_the_group_last():
    codes = some_codes(3, 5, 8)
    packed = pack_fp6_grouped(codes)
    assert tuple(packed.shape) == (5, 6, 3)
    for group in range(3):
        assert torch.equal(packed[:, :, group], pack_fp6(codes[group]))


@pytest.mark.spec("B14")
def test_u64_lanes():
    codes = some_codes(2, 32)
    lanes = pack_fp6_u64(codes)
    packed = pack_fp6(codes)
    for row in range(2):
        for lane in range(3):
            want = int.from_bytes(bytes(packed[row, 8 * lane : 8 * lane + 8].tolist()), "little")
            assert int(lanes[row, lane]) & (2**64 - 1) == want
    octets = some_codes(2, 32, bits=8)
    whole = containers_to_u64(octets)  # E4M3 codes use all eight bits: no mask
    for lane in range(4):
        want = int.from_bytes(bytes(octets[1, 8 * lane : 8 * lane + 8].tolist()), "little")
        assert int(whole[1, lane]) & (2**64 - 1) == want
    with pytest.raises(InputError, match=r"expected codes \[..., 32\]"):
        pack_fp6_u64(some_codes(2, 16))


@pytest.mark.spec("B15", "Z7")
def test_eight_containers_to_six_bytes():
    """SPEC B15, Z7: the broken reading shifts by 36 and 42 in 32-bit arithmetic."""
    codes = torch.tensor([1, 2, 3, 4, 5, 60, 61, 63], dtype=torch.uint8)
    got = int(pack_container_u64(codes.view(torch.int64))[0])
    want = int.from_bytes(bytes(pack_fp6(codes).tolist()), "little")
    assert got == want
    rival = sum((int(c) << (6 * i)) & 0xFFFFFFFF for i, c in enumerate(codes)) & (2**48 - 1)
    assert rival != want


# ---- scale swizzle
def offset(row, col, cpd4):
    return ((((row // 128) * cpd4 + col // 4) * 32 + row % 32) * 4 + (row % 128) // 32) * 4 + col % 4


@pytest.mark.spec("B17", "R13")
def test_swizzle_offsets():
    spec = {1: {(0, 1): 1, (1, 0): 16, (32, 0): 4, (33, 2): 22, (127, 3): 511, (128, 0): 512},
            2: {(0, 4): 512, (128, 4): 1536, (129, 5): 1553}}  # fmt: skip
    for cpd4, table in spec.items():
        for (row, col), want in table.items():
            assert offset(row, col, cpd4) == want
    rows, cols = 131, 6
    scales = some_codes(rows, cols, bits=8)
    stored = swizzle_128x4(scales)
    assert tuple(stored.shape) == (256 * 8,)
    seen = torch.zeros_like(stored, dtype=torch.bool)
    for row in range(rows):
        for col in range(cols):
            assert stored[offset(row, col, 2)] == scales[row, col]
            seen[offset(row, col, 2)] = True
    assert not stored[~seen].any()  # padding is zero
    assert not torch.equal(stored[: rows * cols], scales.reshape(-1))  # the row-major rival


@pytest.mark.spec("B17")
def test_swizzle_agrees_with_the_view_form():
    """FORMATS 1.6: R = 300, C = 90 is 384 x 92 = 35328 bytes."""
    scales = some_codes(300, 90, bits=8)
    full = torch.nn.functional.pad(scales, (0, 2, 0, 84))
    want = full.view(3, 4, 32, 23, 4).permute(0, 3, 2, 1, 4).reshape(-1)
    assert want.numel() == 35328
    assert torch.equal(swizzle_128x4(scales), want)


@pytest.mark.spec("B18")
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (33, 5), (128, 4), (130, 9)])
def test_unswizzle_takes_every_form(rows, cols):
    scales = some_codes(3, rows, cols, bits=8)
    stored = swizzle_128x4(scales)
    view = swizzled_view(stored, rows, cols)
    padded = (-(-rows // 128) * 128, -(-cols // 4) * 4)
    assert tuple(view.shape) == (32, 4, padded[0] // 128, 4, padded[1] // 4, 3)
    assert torch.equal(unswizzle_128x4(view, rows, cols), scales.reshape(-1, cols))
    assert torch.equal(unswizzle_128x4(stored[1], rows, cols), scales[1])
    assert torch.equal(unswizzle_128x4(stored[1].view(padded), rows, cols), scales[1])
    with pytest.raises(InputError, match=r"expected .* bytes"):
        unswizzle_128x4(stored[1][:-1], rows, cols)
    with pytest.raises(InputError, match="expected a view"):
        unswizzle_128x4(view[:16], rows, cols)


@pytest.mark.spec("F27")
def test_padding_bytes_are_no_data():
    """F27: poisoned padding does not reach the scales. 2880/32 = 90 columns are stored as 92."""
    scales = some_codes(130, 90, bits=8)
    stored = swizzle_128x4(scales)
    kept = swizzle_128x4(torch.ones_like(scales)).bool()
    stored[~kept] = 0xFF
    assert torch.equal(unswizzle_128x4(stored, 130, 90), scales)
    assert torch.equal(layout("swizzle_128x4@1").unpack(stored, 8, (130, 90)), scales)


# ---- every layout as a bijection
WIDTHS = {"words@1": (2, 4, 8, 16, 32), "fp6_bytes@1": (6,), "bytes@1": (2, 4, 6, 8),
          "rows@1": (2, 4, 6, 8, 16, 32), "swizzle_128x4@1": (8,),
          "lanes16@1": (2, 4, 6, 8, 16, 32), "lanes16_units@1": (8, 16, 32),
          "planes16@1": (2, 4, 6, 8), "planes32@1": (2, 4, 6, 8), "planes64@1": (2, 4, 6, 8), "columns@1": (8, 16, 32)}  # fmt: skip


def test_the_registry_is_covered():
    assert set(WIDTHS) == set(layouts())
    with pytest.raises(InputError, match="expected one of words@1"):
        layout("words@2")


@pytest.mark.parametrize("name", WIDTHS)
@given(shape=st.lists(st.integers(0, 20), min_size=2, max_size=3), seed=st.integers(0, 2**31), choice=st.integers(0, 9))
def test_layouts_round_trip(name, shape, seed, choice):
    bits = WIDTHS[name][choice % len(WIDTHS[name])]
    chosen = layout(name)
    shape = (*shape[:-1], shape[-1] * 4) if name == "fp6_bytes@1" else tuple(shape)
    codes = some_codes(*shape, bits=bits, seed=seed)
    before = codes.clone()
    stored = chosen.pack(codes, bits)
    assert tuple(stored.shape) == chosen.storage_shape(shape, bits)
    assert stored.dtype == chosen.storage_dtype(bits)
    assert stored.is_contiguous()
    assert stored.data_ptr() != codes.data_ptr() or codes.numel() == 0
    back = chosen.unpack(stored, bits, shape)
    assert torch.equal(back, before)
    assert torch.equal(codes, before)
    rows = codes.reshape(-1, shape[-1]) if codes.numel() else torch.zeros(torch.Size(shape[:-1]).numel(), shape[-1])
    start, stop = sorted((seed % (len(rows) + 1), choice % (len(rows) + 1)))
    assert torch.equal(chosen.unpack_rows(stored, bits, shape, start, stop), rows[start:stop].to(back.dtype))


@pytest.mark.parametrize("name", [n for n in WIDTHS if layout(n).appendable])
def test_appendable_layouts_append(name):
    for bits in WIDTHS[name]:
        codes = some_codes(70, 12, bits=bits)
        parts = [layout(name).pack(codes[i:j], bits) for i, j in ((0, 32), (32, 64), (64, 70))]
        assert torch.equal(torch.cat(parts), layout(name).pack(codes, bits))


@pytest.mark.parametrize("name", WIDTHS)
def test_layouts_work_on_shapes_alone(name):
    bits = WIDTHS[name][0]
    codes = torch.empty(5, 8, dtype=code_dtype(bits), device="meta")
    stored = layout(name).pack(codes, bits)
    assert tuple(stored.shape) == layout(name).storage_shape((5, 8), bits)
    assert layout(name).unpack(stored, bits, (5, 8)).shape == (5, 8)


def test_rows_stand_side_by_side_in_lanes():
    codes = (torch.arange(18 * 9).view(18, 9) * 7 + 3) % 16
    stored = layout("lanes16@1").pack(codes.to(torch.uint8), 4)
    assert tuple(stored.shape) == (2, 2, 16)  # 18 rows in two tiles, 9 values in two words
    word = sum(int(c) << 4 * j for j, c in enumerate(codes[17, :8]))
    assert stored[1, 0, 1].item() & 0xFFFFFFFF == word
    assert stored[1, 1, 1].item() == codes[17, 8]
    assert not stored[1, :, 2:].any()
    scales = layout("lanes16_units@1").pack(codes.int() * 500, 16)
    assert scales[1, 8, 1].item() == codes[17, 8] * 500


@pytest.mark.parametrize("bits", [4, 6])
def test_an_expert_in_lanes_is_a_view(bits):
    codes = some_codes(3, 18, 9, bits=bits)
    lanes = layout("lanes16@1")
    stored = lanes.pack(codes, bits)
    for e in range(3):
        part = lanes.take_rows(stored, bits, (3, 18, 9), e * 18, (e + 1) * 18, (18, 9))
        assert part.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
        assert torch.equal(lanes.unpack(part, bits, (18, 9)), codes[e])
    assert torch.equal(lanes.take_rows(stored[:2], bits, (18, 9), 3, 11, (8, 9)), lanes.pack(codes[0, 3:11].contiguous(), bits))


def test_parts_stand_above_each_other_in_planes():
    codes = torch.arange(2 * 40).view(2, 40) % 16
    stored = layout("planes16@1").pack(codes.to(torch.uint8), 4)
    assert tuple(stored.shape) == (2, 1, 2, 16)  # two units of 32 values, the second one short
    assert int(stored[0, 0, 1, 3]) == int(codes[1, 3]) | int(codes[1, 19]) << 4
    assert int(stored[1, 0, 0, 7]) == int(codes[0, 39])
    assert int(stored[1, 0, 0, 8]) == 0
    six = torch.arange(64).view(1, 64)
    first, second, third = layout("planes16@1").pack(six.to(torch.uint8), 6)[0, :, 0, 5].tolist()
    assert (first & 63, second & 63, third & 63) == (5, 21, 37)
    assert (first >> 6) | (second >> 6) << 2 | (third >> 6) << 4 == 53
    scales = layout("columns@1").pack(torch.arange(6).view(2, 3).int() * 500, 16)
    assert scales.tolist() == [[0, 1500], [500, 2000], [1000, 2500]]
