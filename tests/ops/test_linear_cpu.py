"""The CPU's products: every scheme, odd sizes, tails; bounds in float64, bits where bits are promised, nothing written beside."""

import os
import subprocess
import sys

import pytest
import torch

import narrowgate as ng
from narrowgate.conformance.guards import guard
from narrowgate.packing import Scale

pytest.importorskip("numba")

M = (1, 2, 3, 7, 8, 16, 17, 40)
SCHEMES = ng.schemes()
AVX2 = "+avx2,+fma,+f16c,+avx,+sse4.2,+sse4.1,+ssse3,+popcnt,+bmi,+bmi2,+lzcnt,+movbe,+cx16,-avx512f"


def weight(scheme, n, k, seed=0):
    g = torch.Generator().manual_seed(seed)
    return ng.quantize(torch.randn(n, k, generator=g) * torch.rand(n, 1, generator=g) * 3, scheme)


def tail(scheme, k):
    """A K whose last block is short, where the scheme allows one."""
    multiple = 4 if "mxfp6" in scheme else ng.scheme(scheme).k_multiple
    return k // multiple * multiple


def bound(x, d, k):
    return k * 2.0**-24 * (x.double().abs() @ d.double().abs().T) + 1e-30


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_with_odd_sizes(scheme):
    for n, k in ((53, 203), (130, 352)):
        k = tail(scheme, k)
        w = weight(scheme, n, k)
        p, d = ng.prepare(w), w.dequantize()
        for m in M:
            x = torch.randn(m, k + 5)[:, 2 : k + 2]  # rows with gaps between them
            y = ng.linear(x, p, impl="cpu")
            assert torch.equal(y, ng.linear(x, w, impl="cpu"))
            assert ((y.double() - x.double() @ d.double().T).abs() <= bound(x, d, k)).all()
            rolled = x.double() @ d.roll(1, 0).double().T
            assert ((rolled - x.double() @ d.double().T).abs() > bound(x, d, k)).any()  # a wrong row would be seen


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_hot_reveals_each_weight(scheme):
    k = tail(scheme, 171)
    w = weight(scheme, 19, k)
    assert torch.equal(ng.linear(torch.eye(k), ng.prepare(w), impl="cpu"), w.dequantize().T + 0.0)


@pytest.mark.parametrize("scheme", ["int4_g64", "mxfp6_e3m2", "nvfp4", "bf16"])
def test_a_row_does_not_depend_on_its_company(scheme):
    w = ng.prepare(weight(scheme, 67, 328))
    x = torch.randn(128, 328)
    y = ng.linear(x, w, batch_invariant=True, impl="cpu")
    for m in (1, 2, 3, 4, 5, 8, 9, 16, 33):
        assert torch.equal(ng.linear(x[:m], w, batch_invariant=True, impl="cpu"), y[:m])
    assert torch.equal(ng.linear(x, w, impl="cpu"), y)  # there is only one order


def test_threads_change_no_bit():
    w, x, before = ng.prepare(weight("int4_g32", 531, 192)), torch.randn(5, 192), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = ng.linear(x, w)
        torch.set_num_threads(2)
        assert torch.equal(ng.linear(x, w), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_of_each_dtype_with_bias_into_gaps(dtype):
    w, x = weight("nvfp4", 37, 96), torch.randn(3, 96)
    bias = torch.randn(37)
    want = (ng.linear(x, w) + bias).to(dtype)
    for use in (w, ng.prepare(w)):
        assert torch.equal(ng.linear(x, use, bias, out_dtype=dtype), want)
        assert torch.equal(ng.linear(x[None], use, bias, out_dtype=dtype), want[None])
        spot = guard(torch.empty(3, 41, dtype=dtype)[:, :37], poison=True)
        from narrowgate.packing import flatten

        torch.ops.narrowgate.linear.out([x], "dense", *flatten(use), bias, out_dtype=dtype, out=spot.tensor)
        assert torch.equal(spot.tensor, want)
        assert not spot.broken()
    assert torch.equal(ng.linear(x.to(dtype), w, bias), ng.linear(x.to(dtype).float(), w, bias).to(dtype))


def test_codes_that_are_no_numbers_reach_the_output():
    codes = torch.zeros(3, 33, dtype=torch.uint8)
    codes[1, 4], codes[2, 32] = 0x7F, 0x7C
    for element, seen in (("float8_e4m3fn", [False, True, False]), ("float8_e5m2", [False, True, True])):
        w = ng.pack(codes, element)  # rows that do not start on a word, so the bits after a row's end are another's
        for use in (w, ng.prepare(w)):
            y = ng.linear(torch.ones(2, 33), use, impl="cpu")
            assert (~y.isfinite())[0].tolist() == seen


def test_zero_points_codebooks_and_row_factors():
    codes = (torch.arange(21 * 50).view(21, 50) * 7 + 3) % 16
    zero = Scale.from_codes(torch.full((1, 1), 5), "uint8", (21, 50))
    rows = Scale.from_values(torch.rand(21, 1) + 0.5, "float32", (1, 50))
    block = Scale.from_values((torch.arange(21 * 4).view(21, 4) + 1) / 3.0, "float32", (1, 16))
    book = torch.randn(16)
    for w in (
        ng.pack(codes, "uint4", scales=(block, rows), zero_points=zero), ng.pack(codes, "uint4", zero_points=zero),
        ng.pack(codes, "index4", scales=(rows,), codebook=book), ng.pack(codes % 4, "index2", codebook=book[:4]),
        ng.pack(codes * 16 + 3, "uint8", scales=(block,), zero_points=zero), ng.pack(codes * 999, "float16", scales=(block,)),
    ):  # fmt: skip
        assert "plain" not in ng.plan("linear", torch.ones(1, 50), w).contract
        for use in (w, ng.prepare(w)):
            assert torch.equal(ng.linear(torch.eye(50), use, impl="cpu"), w.dequantize().T + 0.0)


def test_what_the_kernel_does_not_take_is_in_the_plan():
    codes = torch.arange(64).view(4, 16) % 16
    by_rows = ng.pack(codes, "int4", scales=(Scale.from_values(torch.rand(2, 2), "float32", (2, 8)),))
    plan = ng.plan("linear", torch.ones(1, 16), by_rows)
    assert "plain torch (scales in blocks of [2, 8])" in plan.contract
    assert ng.prepare(by_rows) is by_rows
    assert torch.equal(ng.linear(torch.eye(16), by_rows, impl="cpu"), by_rows.dequantize().T + 0.0)


@pytest.mark.parametrize("scheme", ["mxfp4", "q4_0", "int8_channel", "mxfp6_e2m3"])
def test_grouped_linear_is_linear_expert_by_expert(scheme):
    g = torch.Generator().manual_seed(3)
    w = ng.quantize(torch.randn(4, 21, 96, generator=g), scheme)
    x, sizes = torch.randn(12, 96, generator=g), torch.tensor([3, 0, 1, 6])
    want = torch.zeros(12, 21)
    want[:3], want[3:4] = ng.linear(x[:3], w.select(0)), ng.linear(x[3:4], w.select(2))
    want[4:10] = ng.linear(x[4:10], w.select(3))
    for use in (w, ng.prepare(w)):
        assert torch.equal(ng.grouped_linear(x, use, sizes, impl="cpu"), want)


@pytest.mark.parametrize("shape", [(1, 16, 5), (3, 35, 41), (9, 70, 130)])
def test_matmul_equals_dequantize_then_multiply_bit_for_bit(shape):
    m, k, n = shape
    b = ng.pack((torch.arange(k * n).view(k, n) * 5 + 1) % 16, "int4",
                scales=(Scale.from_values((torch.arange(k * n).view(k, n) % 29 + 1) / 3.0, "float32", (1, 1)),))  # fmt: skip
    a = torch.randn(m, k)
    want = ng.matmul(a, b.dequantize(), impl="reference")
    assert torch.equal(ng.matmul(a, b, impl="cpu"), want)
    fused = (a.double()[:, :, None] * b.dequantize().double()).float()  # another order shows
    if k > 20:
        assert not torch.equal(fused.flip(1).sum(1), want)


INTEGERS = ["mxfp4", "nvfp4", "int4_g32", "int4_g128", "int8_g32", "int2_g32", "int8_channel", "q8_0", "q4_0", "iq4_nl"]


@pytest.mark.parametrize("scheme", INTEGERS)
def test_integer_activations_equal_the_reference_bit_for_bit(scheme):
    for n, k in ((53, 203), (130, 352)):
        k = tail(scheme, k)
        w = weight(scheme, n, k)
        bias, x = torch.randn(n), torch.randn(40, k + 3)[:, 1 : k + 1] * torch.rand(40, 1)
        x[0, 3:67] = 0  # a block of zeros
        want = ng.linear(x, w, bias, input_scheme="int8_g32", impl="reference")
        for m in M:
            for use in (w, ng.prepare(w)):
                assert torch.equal(ng.linear(x[:m], use, bias, input_scheme="int8_g32", impl="cpu"), want[:m])
        values = ng.quantize(x, "int8_g32").dequantize().double() @ w.dequantize().double().T + bias
        assert ((want - values).norm() / values.norm()) < 1e-5
        assert scheme == "mxfp4" or not torch.equal(want, values.float())  # roundings show, but where scales are powers of two
        assert "byte dot products" in ng.plan("linear", x, w, input_scheme="int8_g32").contract


def test_integer_activations_by_expert_and_what_is_not_finite():
    w = ng.quantize(torch.randn(3, 21, 96), "q4_0")
    x, sizes = torch.randn(7, 96), torch.tensor([2, 0, 4])
    want = ng.grouped_linear(x, w, sizes, input_scheme="int8_g32", impl="reference")
    for use in (w, ng.prepare(w)):
        assert torch.equal(ng.grouped_linear(x, use, sizes, input_scheme="int8_g32", impl="cpu"), want)
    x[1, 40], one = float("inf"), w.select(0)
    assert torch.equal(
        ng.linear(x, one, input_scheme="int8_g32", impl="cpu"), ng.linear(x, one, input_scheme="int8_g32", impl="reference")
    )
    x[1, 40] = float("nan")
    with pytest.raises(ng.InputError, match="integer codes have no NaN"):
        ng.linear(x, one, input_scheme="int8_g32", impl="cpu")


def test_what_has_no_integer_product_says_so_and_is_exact():
    for scheme, reason in (
        ("nf4_g64", "a codebook that is not one of integers"),
        ("mxfp8_e4m3", "no element of small integers"),
    ):
        w, x = weight(scheme, 20, 64), torch.randn(3, 64)
        assert reason in ng.plan("linear", x, w, input_scheme="int8_g32").contract
        values = ng.quantize(x, "int8_g32").dequantize()
        assert torch.equal(ng.linear(x, w, input_scheme="int8_g32", impl="cpu"), ng.linear(values, w, impl="cpu"))


def test_avx2_alone(tmp_path):
    """The same bits on an older processor: sums have one order, and a fused multiply-add is one."""
    code = f"""
import sys, torch
sys.path.insert(0, {os.path.dirname(__file__)!r})
import test_linear_cpu as t
from narrowgate.simd.cpu_features import FEATURES
assert FEATURES.level == "avx2"
for s in ("mxfp4", "mxfp6_e2m3", "mxfp8_e4m3", "int8_g32", "bf16"):
    t.test_one_hot_reveals_each_weight(s)
for s in ("mxfp4", "int8_g32"):
    t.test_integer_activations_equal_the_reference_bit_for_bit(s)
y = [t.ng.linear(torch.ones(m, 64) / 3, t.ng.prepare(t.weight("mxfp4", 18, 64))) for m in (1, 2, 8)]
torch.save(y, {str(tmp_path / "y.pt")!r})
"""
    environment = {**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": AVX2}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    w = ng.prepare(weight("mxfp4", 18, 64))
    for m, y in zip((1, 2, 8), torch.load(tmp_path / "y.pt"), strict=True):
        assert torch.equal(ng.linear(torch.ones(m, 64) / 3, w), y)


def test_without_numba_the_plan_says_so():
    code = """
import sys, torch
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numba", "llvmlite"):
            raise ImportError("No module named 'numba'")
sys.meta_path.insert(0, Block())
import narrowgate as ng
w = ng.quantize(torch.randn(9, 40), "mxfp4")
x = torch.randn(3, 40)
torch.testing.assert_close(ng.linear(x, w), x @ w.dequantize().T)
torch.testing.assert_close(ng.matmul(x, w.dequantize().T.contiguous()), x @ w.dequantize().T)
print(ng.plan("linear", x, w))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "plain torch (No module named 'numba')" in ran.stdout
    assert ran.stderr.count("products run as plain torch") == 1


def test_the_plain_route_holds_a_tile_of_a_weight_and_not_the_matrix(monkeypatch):
    from narrowgate.ops.linear import cpu

    monkeypatch.setattr(cpu, "TILE", 4 * 64 * 5)  # five rows
    codes = torch.arange(33 * 64).view(33, 64) % 16
    half = Scale.from_values(torch.rand(33, 4).half().float(), "float16", (1, 16))
    w = ng.pack(codes, "int4", scales=(half,), offset=(half,))
    d, x, taken = w.dequantize(), torch.randn(3, 64), []
    decode = cpu._decode
    monkeypatch.setattr(cpu, "_decode", lambda w, start, into: (taken.append((start, len(into))), decode(w, start, into)))
    for use, dense in ((w, d), (d.bfloat16(), d.bfloat16().float())):
        taken.clear()
        torch.testing.assert_close(ng.linear(x, use, impl="cpu"), x @ dense.T)
        assert taken == [*((i, 5) for i in range(0, 30, 5)), (30, 3)]
        many = ng.linear(x, use, batch_invariant=True, impl="cpu")
        assert torch.equal(ng.linear(x[:1], use, batch_invariant=True, impl="cpu"), many[:1])
    assert torch.equal(ng.matmul(torch.eye(33), w, impl="cpu"), d)


def test_a_large_weight_moves_to_large_pages_with_its_values():
    from narrowgate.packing.pages import SMALLEST, on_large_pages

    small = torch.arange(64)
    assert on_large_pages(small) is small
    large = torch.arange(SMALLEST // 4 + 5, dtype=torch.int32)
    moved = on_large_pages(large)
    assert torch.equal(moved, large)
    assert moved.data_ptr() != large.data_ptr() or not sys.platform.startswith("linux")
