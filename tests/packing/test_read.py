"""Reads by position, in lines of any width, masked, unchecked and staged (SPEC A16-A19, A27, A45, Z19)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import narrowgate as ng
from narrowgate.packing import Scale, decode, pack, read, read_unchecked

A16 = [(8, 4), (4, 4), (2, 4), (4, 2), (16, 4), (8, 8), (4, 16)]


def row_scaled(bits, shape=(4, 64), step=37):
    """SPEC A16: an index operand under the scale (m + 1) / 4 of its row, and its values from the plain table."""
    count = torch.arange(shape[0] * shape[1]).view(shape)
    index = (step * count + 3) % 2**bits
    table = (torch.arange(2**bits) - 127.5) / 3
    s = (torch.arange(shape[0]) + 1) / 4
    scale = Scale.from_codes(s.view(torch.int32)[:, None], "float32", (1, shape[1]), "words@1")
    return pack(index, f"index{bits}", codebook=table, scales=(scale,)), table[index] * s[:, None], index, table


@pytest.mark.spec("A16", "A17", "Z19")
@pytest.mark.parametrize(("bits", "width"), A16)
def test_index_lines_of_part_of_a_word_a_word_and_several(bits, width):
    step = 25743 if bits == 16 else 37
    w, values, index, table = row_scaled(bits, step=step)
    rows, cols = torch.tensor([2, 0, 3]), torch.arange(0, 64, width)
    want = values[rows].view(3, -1, width)
    got = read(w, rows, cols, width=width)
    assert torch.equal(got, want)
    assert torch.equal(read_unchecked(w, rows, cols, width=width), want)
    signed = torch.where(index >= 2 ** (bits - 1), index - 2**bits, index).clamp(min=0)
    assert not torch.equal(table[signed] * ((torch.arange(4) + 1) / 4)[:, None], values)  # R4's rival, on this fixture
    assert not torch.equal(want, values[rows].flip(1).view(3, -1, width))


@pytest.mark.spec("A18")
def test_a_quarter_of_a_word():
    v = torch.arange(4 * 64).view(4, 64) % 16 - 8
    s = (torch.arange(4) + 1) / 4
    w = pack(v, "int4", scales=(Scale.from_codes(s.view(torch.int32)[:, None], "float32", (1, 64)),))
    want = v * s[:, None]
    got = read(w, torch.arange(4), torch.arange(0, 64, 2), width=2)
    assert torch.equal(got, want.view(4, 32, 2))
    assert not torch.equal((v % 16) * s[:, None], want)  # zero-extended


@pytest.mark.spec("A17", "A45", "Z3")
@pytest.mark.parametrize(("bits", "width"), [(8, 4), (2, 4), (16, 4), (4, 8), (2, 16)])
def test_the_overhang_reads_zero_and_rows_start_inside_words(bits, width):
    w, values, _, _ = row_scaled(bits, shape=(5, 37), step=25743 if bits == 16 else 37)
    rows = torch.tensor([4, -1, 0, 5, 2])
    cols = torch.tensor([-width, 0, 36 // width * width, 40 // width * width + width])
    got = read(w, rows, cols, width=width)
    want = torch.zeros(5, 4, width)
    for i, r in enumerate(rows.tolist()):
        for j, c in enumerate(cols.tolist()):
            for lane in range(width):
                if 0 <= r < 5 and 0 <= c + lane < 37:
                    want[i, j, lane] = values[r, c + lane]
    assert torch.equal(got, want)
    spill = values.reshape(-1)[1 * 37 - 1 :][:width]  # the rival reads on into the next row
    assert not torch.equal(got[2, 2, 36 % width :], spill[: width - 36 % width])
    for bad in ((rows, cols[:1]), (torch.tensor([0]), cols[2:3]), (torch.tensor([5]), torch.tensor([0]))):
        with pytest.raises(ng.InputError, match=r"expected (rows|columns) in"):
            read_unchecked(w, *bad, width=width)


@pytest.mark.spec("A19", "R8")
@pytest.mark.parametrize("stage", [torch.float16, torch.bfloat16])
def test_staging_rounds_and_only_staging(stage):
    values = 1 + torch.arange(128).view(8, 16) * 2.0**-12
    w = pack(values.view(torch.int32), "float32")
    assert not torch.equal(values.to(stage).float(), values)  # the rounding is observable
    rows, cols = torch.arange(8), torch.arange(0, 16, 4)
    assert torch.equal(read(w, rows, cols, width=4, stage=stage), values.to(stage).float().view(8, 4, 4))
    assert torch.equal(read_unchecked(w, rows, cols, width=4, stage=stage), values.to(stage).float().view(8, 4, 4))
    assert torch.equal(read(w, rows, cols, width=4), values.view(8, 4, 4))
    assert torch.equal(read(w, rows, cols, width=4, stage=torch.float32), values.view(8, 4, 4))


@pytest.mark.spec("A19")
def test_staging_rounds_the_scaled_value():
    v = torch.full((2, 4), 3)
    s = torch.tensor([[1 / 3], [1 / 7]])
    w = pack(v, "int8", scales=(Scale.from_codes(s.view(torch.int32), "float32", (1, 4)),))
    got = read(w, torch.arange(2), torch.tensor([0]), width=4, stage=torch.bfloat16)[:, 0]
    assert torch.equal(got, (v * s).bfloat16().float())
    assert not torch.equal(got, v * s.bfloat16().float())


@pytest.mark.spec("A27", "A41")
def test_what_cannot_be_served_is_refused():
    v = torch.arange(64).view(2, 32)
    block = lambda n: (Scale.from_codes(torch.ones(2, 32 // n).view(torch.int32), "float32", (1, n)),)  # noqa: E731
    rows, cols = torch.tensor([0]), torch.tensor([0])
    for width, n in ((8, 4), (16, 8), (32, 16)):
        with pytest.raises(ng.InputError, match="scale blocks must cover whole lines"):
            read(pack(v, "int8", scales=block(n)), rows, cols, width=width)
        with pytest.raises(ng.InputError, match="scale blocks must cover whole lines"):
            read_unchecked(pack(v, "int8", scales=block(n)), rows, cols, width=width)
    assert read(pack(v, "int8", scales=block(32)), rows, cols, width=32).shape == (1, 1, 32)  # spans the row: fine
    assert read(pack(v, "int8", scales=block(4)), rows, cols, width=4).shape == (1, 1, 4)
    w = pack(v, "int8")
    for call, message in (
        (lambda: read(w, rows, cols, width=3), "divides the 4 values of a word"),
        (lambda: read(w, rows, cols, width=0), "width of at least 1"),
        (lambda: read(w, rows, torch.tensor([2]), width=4), "starts at a multiple of its width"),
        (lambda: read(w, torch.tensor([0.5]), cols), "expected rows as int32 or int64"),
        (lambda: read(w, rows, torch.tensor([[0]])), "expected cols as int32 or int64"),
        (lambda: read(w, rows, cols, stage=torch.float64), "expected stage"),
        (lambda: Scale.from_codes(torch.ones(2, 32, 1, dtype=torch.int32), "float32", (1, 1, 1)).check((2, 32), "w"),
         "spans no other axis"),
    ):  # fmt: skip
        with pytest.raises(ng.InputError, match=message):
            call()


@pytest.mark.spec("A3")
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_line_is_a_cut_of_the_decoded_tensor(data):
    name, bits = data.draw(st.sampled_from([("int2", 2), ("int4", 4), ("int8", 8), ("float4_e2m1fn", 4), ("float16", 16)]))
    n, k = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 41))
    width = data.draw(st.sampled_from([1, 2, 4, 8, 16, 32]))
    codes = torch.randint(0, 2 ** min(bits, 14), (n, k), generator=torch.Generator().manual_seed(n * 100 + k))
    w = pack(codes, name)
    rows = torch.tensor(data.draw(st.lists(st.integers(-2, n + 1), max_size=4)), dtype=torch.int32)
    cols = torch.tensor(data.draw(st.lists(st.integers(-1, 3), max_size=3)), dtype=torch.int64) * width
    wide = torch.zeros(n + 4, k + 6 * 32 + 32)
    wide[2 : 2 + n, 64 : 64 + k] = decode(w)
    want = wide[(rows.long() + 2)[:, None, None], (cols[:, None] + torch.arange(width) + 64)[None]]
    assert torch.equal(read(w, rows, cols, width=width), want)
