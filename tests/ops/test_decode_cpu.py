"""dequantize and embedding on the CPU, bit for bit decode.py: every scheme, layout and level, odd sizes, nothing written beside."""

import warnings
from functools import partial

import pytest
import torch

import narrowgate as ng
from narrowgate.conformance.guards import guard
from narrowgate.errors import FallbackWarning
from narrowgate.formats.elements import elements
from narrowgate.packing import Scale, decode, flatten
from narrowgate.packing.decode import RUNS
from narrowgate.packing.registry import SCALE_LAYOUTS, layout, layouts

pytest.importorskip("numba")

SHAPES = ((1, 1), (3, 7), (5, 16), (17, 33), (40, 1024), (18, 1100), (2, 2049))


def same(got, want):
    """Equal bits, any NaN for any NaN."""
    kind = torch.int32 if got.dtype == torch.float32 else torch.int16
    nan = want.isnan()
    return torch.equal(nan, got.isnan()) and torch.equal(got.view(kind)[~nan], want.view(kind)[~nan])


def check(w):
    want = decode(w)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert same(ng.ops.dequantize(w, dtype=dtype, impl="cpu"), want.to(dtype)), (w, dtype)
    if len(w.shape) == 2 and w.numel:
        ids = torch.randint(0, w.shape[0], (2, 5))
        for dtype in (torch.float32, torch.bfloat16):
            assert same(ng.ops.embedding(ids.int(), w, dtype=dtype, impl="cpu"), (want[ids] + 0.0).to(dtype)), w


@pytest.mark.parametrize("name", [n for n in elements() if not n.startswith("index")])
def test_every_code_of_every_element_in_every_layout(name):
    bits = ng.formats.element(name).bits
    for n, k in SHAPES:
        codes = (torch.arange(n * k, dtype=torch.int64).view(n, k) * 40503 + 7) & ((1 << bits) - 1)
        for where in layouts():
            if where not in RUNS or layout(where).refusal((n, k), bits):
                continue
            if bits == 32:
                codes = codes.to(torch.int32)
            check(ng.pack(codes, name, layout=where))


@pytest.mark.parametrize("scheme", ng.schemes())
def test_every_scheme_prepared_and_not(scheme):
    multiple = 4 if "mxfp6" in scheme else ng.scheme(scheme).k_multiple
    for n, k in SHAPES:
        k = -(-k // multiple) * multiple
        w = ng.quantize(torch.randn(n, k) * torch.rand(n, 1), scheme)
        check(w)
        check(ng.prepare(w))


def f32(values, block, where="rows@1"):
    return Scale.from_codes(values.float().contiguous().view(torch.int32), "float32", block, where)


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_codebooks(bits):
    for n, k in ((3, 7), (5, 130)):
        codes = (torch.arange(n * k).view(n, k) * 25743 + 3) % 2**bits
        book = (torch.arange(2**bits) - 2 ** (bits - 1) + 0.5) / 3
        check(ng.pack(codes, f"index{bits}", codebook=book, scales=(f32(torch.rand(n, -(-k // 5)), (1, 5)),)))


def test_levels_of_every_kind():
    n, k = 24, 1300
    codes = (torch.arange(n * k).view(n, k) * 7 + 1) % 16
    near, rows, whole = f32(torch.rand(n, 163) + 0.1, (1, 8)), f32(torch.rand(n, 1), (1, k)), f32(torch.rand(1, 1), (n, k))
    both, columns = f32(torch.rand(3, 21), (8, 64)), f32(torch.rand(1, 41), (n, 32))
    words = Scale.from_values((torch.arange(n * 41).view(n, 41) % 15 + 1) / 4, "float8_e4m3fn", (1, 32), "words@1")
    tiled = Scale.from_codes(torch.arange(n * 41).view(n, 41) % 255, "float8_e8m0fnu", (1, 32), "swizzle_128x4@1")
    zero = Scale.from_codes(torch.arange(n * 41).view(n, 41) % 16, "uint4", (1, 32), "words@1")
    for scales in ((near,), (near, rows), (near, rows, whole), (both, columns), (words, whole), (tiled, rows)):
        check(ng.pack(codes, "uint4", scales=scales, zero_points=zero, offset=(near, columns)))
        check(ng.pack(codes, "uint4", scales=scales, offset=(whole,)))


def test_stacks_empty_tensors_and_outputs_with_gaps():
    stack = ng.quantize(torch.randn(3, 5, 70), "nvfp4")
    check(stack)
    check(ng.prepare(stack))
    for shape in ((0, 5), (5, 0), (0, 0)):
        assert ng.ops.dequantize(ng.pack(torch.zeros(shape, dtype=torch.uint8), "int4"), impl="cpu").shape == shape
    w, ids = ng.quantize(torch.randn(9, 37), "int4_g32"), torch.tensor([8, 0, 8])
    spot = guard(torch.empty(9, 41)[:, :37], poison=True)
    torch.ops.narrowgate.dequantize.out(*flatten(w), impl="cpu", out=spot.tensor)
    assert same(spot.tensor.contiguous(), decode(w))
    assert not spot.broken()
    spot = guard(torch.empty(3, 39)[:, 1:38], poison=True)
    torch.ops.narrowgate.embedding.out(ids, *flatten(w), impl="cpu", out=spot.tensor)
    assert same(spot.tensor.contiguous(), decode(w)[ids] + 0.0)
    assert not spot.broken()


def test_a_layout_that_the_kernel_does_not_know_is_refused_and_decoded_by_the_reference():
    unknown = [where for where in layouts() if where not in RUNS and not layout(where).refusal((20, 70), 8)]
    assert "planes16@1" in unknown
    codes = torch.arange(20 * 70).view(20, 70) % 256
    for where in unknown:
        if where in SCALE_LAYOUTS:
            continue
        w = ng.pack(codes, "int8", layout=where)
        for call in (partial(ng.ops.dequantize, w), partial(ng.embedding, torch.arange(20), w)):
            with pytest.raises(ng.UnsupportedError, match=f"rows of the layout {where}"):
                call(impl="cpu")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FallbackWarning)
                assert torch.equal(call(), decode(w))
        assert torch.equal(ng.linear(torch.eye(70), w, impl="cpu"), decode(w).T)
