"""words@1: golden words, the rivals of field order, rows that start inside a word, and round trips of every width."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgate.errors import InputError
from narrowgate.packing import Scale, decode, layout, pack

WORDS = layout("words@1")


def words(w):
    return [word & 0xFFFFFFFF for word in w.data.tolist()]


@pytest.mark.spec("A2", "A3")
def test_golden_words():
    """SPEC A2, written by hand."""
    assert words(pack(torch.arange(-8, 8), "int4")) == [0xFEDCBA98, 0x76543210]
    assert words(pack(torch.arange(-128, -120), "int8")) == [0x83828180, 0x87868584]
    assert words(pack(torch.tensor([-2, -1, 0, 1] * 4), "int2")) == [0x4E4E4E4E]
    assert words(pack(torch.arange(16), "float4_e2m1fn")) == [0x76543210, 0xFEDCBA98]
    assert words(pack(torch.tensor([0x1234, 0xABCD, 0x8001]), "float16")) == [0xABCD1234, 0x00008001]
    assert words(pack(torch.tensor([0x3F800000, -1], dtype=torch.int32), "float32")) == [0x3F800000, 0xFFFFFFFF]
    assert words(pack(torch.arange(16).view(2, 8), "uint4")) == [0x76543210, 0xFEDCBA98]


@pytest.mark.spec("A2", "R2")
def test_rival_orders_are_visible():
    codes = torch.arange(16)
    ours = words(pack(codes, "uint4"))
    high_first = [sum(int(c) << (28 - 4 * j) for j, c in enumerate(codes[8 * i : 8 * i + 8])) for i in range(2)]
    swapped = [int.from_bytes(word.to_bytes(4, "little"), "big") for word in ours]
    assert ours not in (high_first, swapped)
    assert high_first[0] == 0x01234567


@pytest.mark.spec("A45", "A3")
@pytest.mark.parametrize("bits", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 7), (5, 1), (0, 4), (3, 0), (4, 33)])
def test_flat_index_arithmetic(bits, shape):
    """Value i is field i % per_word of word i // per_word, whatever the rows are; the rest of the last word is zero."""
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits if bits < 32 else 2**31, shape, generator=generator)
    stored = WORDS.pack(codes.to(torch.uint8 if bits <= 8 else torch.int32), bits)
    assert tuple(stored.shape) == WORDS.storage_shape(shape, bits)
    per_word = 32 // bits
    unsigned = [word & 0xFFFFFFFF for word in stored.tolist()]
    flat = codes.reshape(-1).tolist()
    for i in range(len(unsigned) * per_word):
        field = unsigned[i // per_word] >> (bits * (i % per_word)) & (2**bits - 1)
        assert field == (flat[i] if i < len(flat) else 0)
    back = WORDS.unpack(stored, bits, shape)
    assert torch.equal(back.to(torch.int64), codes)


@pytest.mark.spec("A45")
@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_rows_that_start_inside_a_word(bits):
    """SPEC A45: K = 5 is no whole word at any of these widths."""
    codes = (torch.arange(35).view(7, 5) * 37 + 3) % 2**bits
    stored = WORDS.pack(codes.to(torch.uint8 if bits <= 8 else torch.int32), bits)
    for start in range(8):
        for stop in range(start, 8):
            got = WORDS.unpack_rows(stored, bits, (7, 5), start, stop)
            assert torch.equal(got.to(torch.int64), codes[start:stop])


@pytest.mark.spec("A45")
@pytest.mark.parametrize(("element", "grid"), [("float16", (3, 3)), ("float8_e4m3fn", (3, 5))])
def test_scale_rows_that_start_inside_a_word(element, grid):
    """SPEC A45's two grids. The rival that gives every row a word of its own needs more words, and reads others."""
    values = (torch.arange(grid[0] * grid[1]).view(grid) + 1) * 0.5
    in_words = Scale.from_values(values, element, (1, 8), "words@1")
    by_row = Scale.from_values(values, element, (1, 8))
    shape = (grid[0], grid[1] * 8)
    assert torch.equal(in_words.values(shape), values)
    assert in_words.data.numel() < grid[0] * -(-grid[1] * by_row.data.element_size() // 4)
    codes = torch.arange(-8, 8).repeat(shape[0] * shape[1] // 16 + 1)[: shape[0] * shape[1]].view(shape)
    a, b = pack(codes, "int4", scales=[in_words]), pack(codes, "int4", scales=[by_row])
    assert torch.equal(decode(a), decode(b))
    assert torch.equal(decode(a), codes * values.repeat_interleave(8, dim=1))


def test_six_bits_are_refused():
    with pytest.raises(InputError, match="words@1 holds fields of 2, 4, 8, 16 or 32 bits, got 6"):
        pack(torch.zeros(4, dtype=torch.uint8), "float6_e2m3fn")


@given(
    bits=st.sampled_from([2, 4, 8, 16, 32]),
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    seed=st.integers(0, 2**31),
)
def test_round_trip(bits, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2 ** min(bits, 31), shape, generator=generator)
    codes = codes.to(torch.uint8 if bits <= 8 else torch.int32)
    assert torch.equal(WORDS.unpack(WORDS.pack(codes, bits), bits, tuple(shape)), codes)
