"""PackedTensor as a container: what it refuses, what it counts, how it is cut, moved, renamed and carried over a schema."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgate import ops
from narrowgate.errors import InputError
from narrowgate.packing import (
    PackedTensor,
    Scale,
    check_lines,
    decode,
    decode_rows,
    flatten,
    pack,
    same_bits,
    unflatten,
)


def int4(shape=(6, 40), block=(1, 16), layout="words@1", scale_layout="rows@1"):
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(-8, 8, shape, generator=generator)
    grid = [-(-e // b) for e, b in zip(shape, block, strict=True)]
    values = torch.arange(1, torch.Size(grid).numel() + 1, dtype=torch.float32).view(grid) / 4
    scale = Scale.from_values(values, "float32", block, scale_layout)
    expanded = values
    for axis, b in enumerate(block):
        expanded = expanded.repeat_interleave(b, dim=axis).narrow(axis, 0, shape[axis])
    return pack(codes, "int4", scales=[scale], layout=layout), codes * expanded


@pytest.mark.spec("A1")
def test_stored_tensors_are_integers_and_shape_counts_values():
    w, want = int4()
    assert w.shape == (6, 40)
    assert w.numel == 240
    assert w.nbytes == 30 * 4 + 18 * 4
    assert w.bits_per_value == 8 * w.nbytes / 240
    assert w.scheme is None
    assert torch.equal(decode(w), want)
    assert all(not t.is_floating_point() for t in w.tensors())
    table = pack(torch.arange(4), "index2", codebook=torch.tensor([1.0, 2.0, 4.0, -0.0]))
    assert table.codebook.dtype == torch.int32
    assert torch.signbit(decode(table)).tolist() == [False, False, False, True]
    with pytest.raises(AttributeError):
        w.element = "int8"


def test_torch_operations_on_it_fail_loudly():
    w, _ = int4()
    for operation in (lambda: torch.nn.functional.linear(torch.ones(2, 40), w), lambda: torch.ones(2, 6) @ w, lambda: w + 1):
        with pytest.raises(TypeError):
            operation()


@pytest.mark.spec("A15", "A41")
def test_refusals_of_pack():
    codes = torch.zeros(4, 40, dtype=torch.int64)
    table = torch.zeros(16)
    scale = Scale.from_values(torch.ones(4, 3), "float32", (1, 16))
    for call, text in (
        (lambda: pack(codes, "int4", codebook=table), "codebook needs index codes, got element int4"),  # A15
        (lambda: pack(codes, "index4"), "needs a codebook"),
        (lambda: pack(codes, "index4", codebook=table[:15]), "at least 16, got 15"),
        (lambda: pack(codes, "index4", codebook=table.view(4, 4)), "plain 1-D float tensor"),
        (lambda: pack(codes, "index4", codebook=table.to(torch.int32)), "plain 1-D float tensor"),
        (lambda: pack(codes.float(), "int4"), "expected integer codes, got torch.float32"),
        (lambda: pack(codes[0, 0], "int4"), "at least one axis"),
        (lambda: pack(codes, "int5"), "expected one of int2"),
        (lambda: pack(codes, "int4", layout="words"), "expected one of words@1"),
        (lambda: pack(codes, "int4", scales=[Scale(scale.data, "float32", (16,))]), "one block extent for each axis"),  # A41
        (lambda: pack(codes, "int4", scales=[Scale(scale.data, "float32", (1, 1, 16))]), "spans no other axis"),
        (lambda: pack(codes, "int4", scales=[Scale(scale.data, "float32", (1, 8))]), r"storage of shape \[4, 5\]"),
        (lambda: Scale(scale.data, "index4", (1, 16)), "a value of its own"),
        (lambda: Scale(scale.data, "float32", (1, 0)), "positive"),
        (lambda: Scale(scale.data, "float32", (1, 16), "fp6_bytes@1"), "expected a layout among"),
        (lambda: Scale.from_values(torch.tensor([0.1]), "bfloat16", (1,)), "not exact in bfloat16"),
    ):
        with pytest.raises(InputError, match=text):
            call()
    kept = pack(codes, "index4", codebook=torch.arange(20.0))  # more entries than indices: the first 16 are kept
    assert kept.codebook.shape == (16,)


@pytest.mark.spec("A38")
def test_a_packed_operand_is_bound_at_its_words():
    w, _ = int4()
    text = "a packed operand is bound at the 32-bit words its buffer holds, not at the element given"  # A38
    for dtype in (torch.int8, torch.int16, torch.float32):
        with pytest.raises(InputError, match=text):
            PackedTensor("int4", "words@1", w.data.view(dtype), w.shape, w.scales)
    with pytest.raises(InputError, match=r"expected words@1 storage of shape \[30\]"):
        PackedTensor("int4", "words@1", w.data[:-1], w.shape, w.scales)
    with pytest.raises(InputError, match="contiguous"):
        PackedTensor("int4", "words@1", w.data.repeat(2)[::2], w.shape, w.scales)
    with pytest.raises(InputError, match="negative extent"):
        PackedTensor("int4", "words@1", w.data, (-6, 40))


@pytest.mark.spec("A27")
def test_scale_blocks_must_cover_whole_lines():
    """A27: along the last axis a block must be a multiple of the line; a block over the whole axis covers anything."""
    w, _ = int4(block=(1, 16))
    check_lines(w, 1)
    check_lines(w, 16)
    for width in (3, 32):
        with pytest.raises(InputError, match="scale blocks must cover whole lines"):
            check_lines(w, width)
    check_lines(int4(block=(2, 40))[0], 32)
    zero = Scale.from_values(torch.zeros(6, 4), "uint4", (1, 10))
    with pytest.raises(InputError, match="scale blocks must cover whole lines"):
        check_lines(pack(torch.zeros(6, 40, dtype=torch.uint8), "uint4", zero_points=zero), 4)


BLOCKS = [(1, 16), (2, 8), (6, 40), (1, 40), (4, 7)]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("scale_layout", ["rows@1", "words@1"])
@pytest.mark.parametrize("layout", ["words@1", "bytes@1"])
def test_rows_at_every_cut(block, layout, scale_layout):
    w, want = int4(block=block, layout=layout, scale_layout=scale_layout)
    for start in range(7):
        for stop in range(start, 7):
            assert torch.equal(decode_rows(w, start, stop), want[start:stop])
            if start % block[0] and block[0] < 6:
                with pytest.raises(InputError, match="cuts a scale block"):
                    w.rows(start, stop)
                continue
            cut = w.rows(start, stop)
            assert cut.shape == (stop - start, 40)
            assert torch.equal(decode(cut), want[start:stop])
    for bad in ((-1, 2), (3, 2), (0, 7)):
        with pytest.raises(InputError, match="rows: expected 0 <= start <= stop <= 6"):
            w.rows(*bad)
        with pytest.raises(InputError, match="decode_rows: expected"):
            decode_rows(w, *bad)


def test_rows_share_memory_where_whole_words_allow_it():
    w, _ = int4((6, 40))
    assert w.rows(1, 4).data.data_ptr() == w.data.data_ptr() + 20
    odd, want = int4((6, 5), (1, 5))
    assert torch.equal(decode(odd.rows(1, 4)), want[1:4])  # a row of 20 bits: repacked


@pytest.mark.spec("F31")
@pytest.mark.parametrize("block", [(1, 1, 32), (3, 6, 64), (1, 6, 64), (2, 4, 32)])
def test_expert_stacks(block):
    """F31, and every axis of another size."""
    w, want = int4((3, 6, 64), block)
    assert torch.equal(decode(w), want)
    for expert in range(3):
        one = w.select(expert)
        assert one.shape == (6, 64)
        assert torch.equal(decode(one), want[expert])
    assert torch.equal(decode_rows(w, 4, 17), want.view(18, 64)[4:17])
    if block[0] != 2:
        assert torch.equal(decode(w.rows(1, 3)), want[1:3])
    with pytest.raises(InputError, match="select: expected 0 <= index < 3"):
        w.select(3)


def test_swizzled_scales_of_a_stack():
    codes = torch.randint(0, 16, (2, 130, 160), generator=torch.Generator().manual_seed(0))
    powers = torch.randint(120, 135, (2, 130, 5), generator=torch.Generator().manual_seed(1))
    plain = Scale.from_codes(powers, "float8_e8m0fnu", (1, 1, 32))
    w = pack(codes, "float4_e2m1fn", scales=[plain])
    swizzled = w.with_layout("bytes@1", scales="swizzle_128x4@1")
    assert swizzled.scales[0].data.numel() == 2 * 256 * 8
    assert torch.equal(decode(swizzled), decode(w))
    assert torch.equal(decode(swizzled.select(1)), decode(w)[1])
    assert torch.equal(decode_rows(swizzled, 100, 150), decode_rows(w, 100, 150))
    assert same_bits(swizzled.with_layout("words@1", scales="rows@1"), w)


def test_layouts_change_and_come_back():
    w, want = int4()
    for name in ("bytes@1", "rows@1", "words@1"):
        other = w.with_layout(name)
        assert other.layout == name
        assert torch.equal(decode(other), want)
        assert same_bits(other.with_layout("words@1"), w)
    with pytest.raises(InputError, match="with_layout: fp6_bytes@1 holds 6-bit codes, got 4"):
        w.with_layout("fp6_bytes@1")


def test_same_bits_sees_every_part():
    w, _ = int4()
    again, _ = int4()
    assert same_bits(w, again)
    again.data[3] ^= 1
    assert not same_bits(w, again)
    assert not same_bits(w, w.with_layout("bytes@1"))
    assert not same_bits(w, PackedTensor("int4", "words@1", w.data, w.shape))
    assert not same_bits(w, PackedTensor("int4", "words@1", w.data, (40, 6)))


def full_house():
    """A tensor with every part that a packed tensor can have."""
    codes = torch.arange(36).view(3, 12)
    return pack(
        codes,
        "index8",
        scales=[
            Scale.from_values(torch.rand(3, 3), "float32", (1, 4)),
            Scale.from_values(torch.ones(1, 1), "float16", (3, 12)),
        ],
        zero_points=Scale.from_values(torch.tensor([[3.0]]), "uint4", (3, 12)),
        offset=[Scale.from_values(torch.rand(3, 1), "float32", (1, 12), "words@1")],
        codebook=torch.linspace(-1, 1, 256),
    )


def test_operand_form_round_trips():
    for w in (int4()[0], full_house(), pack(torch.arange(8), "float8_e5m2")):
        tensors, described = flatten(w)
        assert json.loads(described)["shape"] == list(w.shape)
        back = unflatten(tensors, described)
        assert same_bits(back, w)
        assert back.tensors()[0] is w.data
    x = torch.ones(2)
    assert flatten(x) == ([x], "dense")
    assert unflatten([x], "dense") is x


def test_operand_form_refuses_what_does_not_fit():
    tensors, described = flatten(full_house())
    assert len(tensors) == 6
    with pytest.raises(InputError, match="names 6 tensors, got 5"):
        unflatten(tensors[:-1], described)
    with pytest.raises(InputError, match="not a packed tensor's description"):
        unflatten(tensors, described[:-2])
    with pytest.raises(InputError, match="not a packed tensor's description"):
        unflatten(tensors, "{}")
    with pytest.raises(InputError, match="a dense operand is one tensor"):
        unflatten(tensors, "dense")
    with pytest.raises(InputError, match="expected a tensor or a PackedTensor, got list"):
        flatten([1])
    for wrong in ([tensors[1], tensors[0], *tensors[2:]], [tensors[0][:-1], *tensors[1:]], [tensors[0].long(), *tensors[1:]]):
        with pytest.raises(InputError, match="PackedTensor data: expected words@1 storage"):
            unflatten(wrong, described)
    for broken, text in (
        (described.replace("[1,4]", "[1,0]"), "positive"), (described.replace("[1,4]", "[4]"), "one block extent"),
        (described.replace("index8", "index9"), "expected one of int2"), (described.replace("words@1", "words@9"), "expected"),
        (described.replace('"codebook":true', '"codebook":false'), "needs a codebook"),
    ):  # fmt: skip
        assert broken != described
        for _ in range(2):
            with pytest.raises(InputError, match=text):
                unflatten(tensors, broken)


def test_casting_a_module_cannot_touch_it():
    class Holder(torch.nn.Module):
        def __init__(self, w):
            super().__init__()
            for i, t in enumerate(w.tensors()):
                self.register_buffer(f"t{i}", t)

    w = full_house()
    before = [t.clone() for t in w.tensors()]
    module = Holder(w).to(torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(before, module.buffers(), strict=True))


@pytest.mark.spec("A6", "R5")
@given(
    rows=st.integers(0, 5), cols=st.integers(0, 20), block_rows=st.integers(1, 6), block_cols=st.integers(1, 24),
    element=st.sampled_from(["int2", "int4", "uint8", "float4_e2m1fn", "float16"]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_decode_by_blocks_is_decode_by_values(rows, cols, block_rows, block_cols, element, seed):
    """value[i, j] = code * scale[i // br, j // bc], for any blocks, short ones at the ends included."""
    from narrowgate.formats import element as find

    generator = torch.Generator().manual_seed(seed)
    bits = find(element).bits
    codes = torch.randint(0, 2 ** min(bits, 14), (rows, cols), generator=generator)
    grid = (-(-rows // block_rows), -(-cols // block_cols))
    values = torch.randn(grid, generator=generator)
    w = pack(codes, element, scales=[Scale.from_values(values, "float32", (block_rows, block_cols))])
    expanded = values.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(block_cols, 1)[:, :cols]
    assert torch.equal(decode(w), find(element).decode(codes) * expanded)


@pytest.mark.spec("B38")
def test_scales_and_codes_that_do_not_fit_their_rows():
    """A row's scale for each row, three bytes for four codes; and a packed x takes no input scheme on top."""
    codes = torch.zeros(5, 32, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"expected rows@1 storage of shape \[5, 1\]"):
        pack(codes, "int8", scales=(Scale(torch.zeros(4, 1, dtype=torch.int16), "bfloat16", (1, 32)),))
    with pytest.raises(ValueError, match=r"expected fp6_bytes@1 storage of shape \[5, 24\]"):
        PackedTensor("float6_e3m2fn", "fp6_bytes@1", torch.zeros(5, 23, dtype=torch.uint8), (5, 32))
    with pytest.raises(ValueError, match="expected a dense x where input_scheme is given"):
        ops.linear(pack(codes, "int8"), pack(codes, "int8"), input_scheme="mxfp6_e3m2_row")
