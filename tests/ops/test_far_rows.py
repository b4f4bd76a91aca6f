"""Rows past 2^31 elements are found where they are (KNOWN_FAILURES F36): strided views and tables of which little is touched."""

import pytest
import torch

import narrowgate as ng
from narrowgate.ops import dequantize, embedding, linear, quantize_grouped, relu2
from narrowgate.packing import PackedTensor, read

FAR = 2**31 + 64


@pytest.fixture(scope="module")
def rows():
    """bfloat16 [2, 64] whose second row begins past 2^31 elements, and a close copy. Only two pages of the 4 GiB are touched."""
    try:
        memory = torch.empty(FAR + 64, dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"no address space for a far row: {error}")
    far = memory.as_strided((2, 64), (FAR, 1))
    near = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    far.copy_(near)
    return far, near


@pytest.mark.spec("F36")
@pytest.mark.parametrize("impl", ["reference", None])
def test_activations(rows, impl):
    far, near = rows
    assert far.stride(0) > 2**31
    w = ng.quantize(torch.randn(5, 64, generator=torch.Generator().manual_seed(2)), "mxfp4")
    for scheme in (None, "mxfp6_e3m2_row"):
        assert torch.equal(linear(far, w, input_scheme=scheme, impl=impl), linear(near, w, input_scheme=scheme, impl=impl))
    assert torch.equal(relu2(far), relu2(near))
    counts = torch.tensor([1, 1])
    for a, b in zip(quantize_grouped(far[:, None], counts, "mxfp6_e3m2", global_scale=1.0),
                    quantize_grouped(near[:, None], counts, "mxfp6_e3m2", global_scale=1.0), strict=True):  # fmt: skip
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.spec("F36")
def test_packed_tables():
    """2^31 + 64 values and more of two bits: the last rows by embedding, by a read, and in a product of the last outputs."""
    width, count = 64, 2**25 + 9  # the last row begins at 2^31 + 512
    try:
        data = torch.empty(width * count // 16, dtype=torch.int32)
    except RuntimeError as error:
        pytest.skip(f"no address space for the table: {error}")
    table = PackedTensor("int2", "words@1", data, (count, width))
    codes = torch.randint(0, 4, (8, width), generator=torch.Generator().manual_seed(3))
    last = ng.pack(codes, "int2")
    data[-last.data.numel() :] = last.data
    data[: 8 * width // 16] = ~last.data  # what a wrapped offset would find
    want = dequantize(last)
    assert not torch.equal(dequantize(ng.pack(3 - codes, "int2")), want)
    ids = torch.tensor([count - 1, count - 8, count - 3])
    assert torch.equal(embedding(ids, table), want[[7, 0, 5]] + 0.0)
    assert torch.equal(read(table, ids, torch.tensor([0, 48]), width=16), want[[7, 0, 5]].view(3, 4, 16)[:, [0, 3]])
    x = torch.randn(2, width, generator=torch.Generator().manual_seed(4))
    assert torch.equal(linear(x, table.rows(count - 8, count)), linear(x, last))
