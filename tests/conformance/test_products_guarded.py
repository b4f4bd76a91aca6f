"""Products write nothing but their output, read nothing beside their operands, and give the type that was asked for."""

import itertools

import pytest
import torch

import narrowgate as ng
import narrowgate.ops as ops
from narrowgate.conformance.compare import bits, close
from narrowgate.conformance.guards import guard, map_tensors
from narrowgate.conformance.run import all_cases
from narrowgate.dispatch import OPERATORS
from narrowgate.packing import Scale, pack

PRODUCTS = ("linear", "matmul", "grouped_linear")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
KERNELS = [(op, impl) for op in PRODUCTS for impl in OPERATORS[op].kernels if impl != "gpu"]


@pytest.mark.spec("A43")
@pytest.mark.parametrize(("op", "impl"), KERNELS)
def test_nothing_beside_the_output_is_written_and_all_of_it_is(op, impl):
    """The overload that fills a given output: strided rows between canaries, poisoned, on every shipped case."""
    operator = OPERATORS[op]
    for case in all_cases()[op]:
        if case.raises or case.law or case.full:
            continue
        inputs = map_tensors(case.draw(), lambda t: guard(t).tensor)
        args, kwargs = operator.flatten(**inputs)
        with torch.no_grad():
            want = operator(*args, **kwargs, impl=impl)
            wide = torch.zeros(*want.shape[:-1], want.shape[-1] + 3, dtype=want.dtype)[..., : want.shape[-1]]
            into = guard(wide, poison=True)
            torch.ops.narrowgate.__getattr__(op).out(*args, **kwargs, impl=impl, out=into.tensor)
        assert not into.broken(), case.id
        verdict = (bits() if impl == "reference" else close(abs=1e-4, rel=1e-5))(want, into.tensor)
        assert verdict.ok, f"{case.id}: {verdict}"


@pytest.mark.spec("F28")
@pytest.mark.parametrize("impl", [impl for op, impl in KERNELS if op == "linear"])
@pytest.mark.parametrize("n", [12448, 12544])
def test_scales_are_not_read_past_their_end(impl, n):
    """N that tiles do not divide: the weight lies between canaries, which as scales would be large; rows at the end are right."""
    k = 256
    g = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
    scale = Scale.from_codes(torch.randint(110, 130, (n, k // 32), generator=g).to(torch.uint8), "float8_e8m0fnu", (1, 32))
    w = pack(codes, "float4_e2m1fn", scales=(scale,))
    x = torch.randn(2, k, generator=g)
    placed = map_tensors(w, lambda t: guard(t, shifted=True).tensor)
    y = ops.linear(x, placed, impl=impl)
    assert y.isfinite().all()
    last = w.rows(n - 96, n)
    want = x.double() @ last.dequantize().double().T
    assert close(abs=1e-2, rel=1e-4)(want, y[:, -96:]).ok
    assert torch.equal(placed.scales[0].data, w.scales[0].data)


@pytest.mark.spec("F41")
@pytest.mark.parametrize(("op", "impl"), KERNELS)
def test_the_output_has_the_type_asked_for(op, impl):
    """bfloat16 and float16 are the float32 result rounded once, whatever the type of the activations."""
    g = torch.Generator().manual_seed(7)
    w = ng.quantize(torch.randn(3, 5, 64, generator=g), "int4_g32")
    single = w.select(0)
    sizes = torch.tensor([2, 0, 1])
    for dtype, asked in itertools.product(FLOATS, (None, *FLOATS)):
        x = torch.randn(3, 64, generator=g).to(dtype)
        given = {"linear": (x, single), "matmul": (single, x.T.contiguous()), "grouped_linear": (x, w, sizes)}[op]
        function = getattr(ops, op)
        exact = function(*given, out_dtype=torch.float32, impl=impl)
        y = function(*given, impl=impl, **({} if asked is None else {"out_dtype": asked}))
        natural = torch.float32 if op == "matmul" else dtype  # matmul's left operand is packed here
        assert y.dtype == (asked or natural)
        assert bits()(exact.to(y.dtype), y).ok


@pytest.mark.spec("F41")
@pytest.mark.parametrize("asked", FLOATS)
def test_decoding_has_the_type_asked_for(asked):
    w = ng.quantize(torch.randn(5, 96, generator=torch.Generator().manual_seed(8)), "nf4_g64")
    assert bits()(w.dequantize(torch.float32).to(asked), w.dequantize(asked)).ok
    ids = torch.tensor([4, 0])
    assert bits()((w.dequantize(torch.float32)[ids] + 0.0).to(asked), ops.embedding(ids, w, dtype=asked)).ok


@pytest.mark.spec("F12")
@pytest.mark.parametrize("impl", [impl for op, impl in KERNELS if op == "linear"])
def test_sums_leave_float32_only_after_the_global_scale(impl):
    """448 * 6 * 64 is past float16's end; times 1e-5 it is 1.72032."""
    outer = torch.full((1, 1), 1e-5).view(torch.int32)
    scales = (
        Scale.from_codes(torch.full((3, 4), 0x7E, dtype=torch.uint8), "float8_e4m3fn", (1, 16)),
        Scale.from_codes(outer, "float32", (3, 64)),
    )
    w = pack(torch.full((3, 64), 7), "float4_e2m1fn", scales=scales)
    x = torch.ones(2, 64, dtype=torch.float16)
    y = ops.linear(x, w, impl=impl)
    assert y.dtype == torch.float16
    assert close(rel=2**-11)(torch.full((2, 3), 448 * 6 * 64 * 1e-5, dtype=torch.float64), y).ok
    assert torch.isinf(torch.full((), 448.0 * 6 * 64).half())  # the rival: the sum in float16 before the global scale


@pytest.mark.spec("F36")
def test_rows_past_two_to_the_31():
    """Rows so far apart that the last begins behind 2^31 elements; pages that nobody touches cost nothing."""
    rows, columns, apart = 18, 5, 2**27
    x = torch.empty(apart * (rows - 1) + columns, dtype=torch.uint8).as_strided((rows, columns), (apart, 1))
    assert apart * (rows - 1) > 2**31
    x[0], x[rows - 1] = torch.arange(5), torch.arange(5) + 7
    index = torch.tensor([rows - 1, 0], dtype=torch.int32)
    assert ops.select_rows(x, index).tolist() == [[7, 8, 9, 10, 11], [0, 1, 2, 3, 4]]
    ops.copy_rows(x, torch.full((1, 5), 99, dtype=torch.uint8), torch.tensor([rows - 1]))
    assert x[rows - 1].tolist() == [99] * 5
    assert x[0].tolist() == [0, 1, 2, 3, 4]
    wide = torch.empty(apart * (rows - 1) + columns, dtype=torch.bfloat16).as_strided((rows, columns), (apart, 1))
    wide[:] = 0
    wide[rows - 1] = torch.arange(5) + 2
    assert ops.embedding(torch.tensor([rows - 1]), wide).tolist() == [[2, 3, 4, 5, 6]]
    for impl in [impl for op, impl in KERNELS if op == "linear"]:
        assert ops.linear(torch.ones(1, 5), wide, impl=impl)[0, -2:].tolist() == [0, 20]
    assert torch.equal(ops.l2_norm(wide)[rows - 1], ops.l2_norm(wide[rows - 1 :].contiguous())[0])


@pytest.mark.spec("B43")
@pytest.mark.parametrize(("shape", "fmt", "step"), [
    ((256, 512), "mxfp6_e3m2", 2**-2), ((128, 512), "mxfp6_e2m3", 2**-3), ((256, 256), "mxfp6_e3m2", 2**-2),
])  # fmt: skip
def test_a_bound_of_one_step_is_relative(shape, fmt, step):
    """A stride fault that moves small values shows under a relative bound of one step and hides under an absolute one."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x[shape[0] // 2 :] *= 2.0**-9  # a second tile of rows, far smaller than the first
    w = ng.quantize(x, fmt)
    y = w.dequantize()
    codes = w.codes().view(torch.uint8).to(torch.int64)
    magnitude = codes & 31
    near = torch.where((magnitude > 1) & (magnitude < 31), codes + 1, codes)
    neighbour = pack(near, w.element, scales=w.scales, layout="fp6_bytes@1").dequantize()
    small = {"mxfp6_e3m2": 4, "mxfp6_e2m3": 8}[fmt]  # below it codes are subnormal, and a step is no share of the value
    normal = (magnitude >= small) | (near == codes)
    one_step = close(rel=step)
    assert one_step(y[normal], neighbour[normal]).ok
    fault = y.clone()
    fault[shape[0] // 2 :] = y[shape[0] // 2 :].roll(1, 1)
    assert close(abs=float(y.abs().max()) * step)(y, fault).ok  # an absolute floor sees nothing
    assert not one_step(y, fault).ok


@pytest.mark.spec("F21")
@pytest.mark.parametrize("impl", [impl for op, impl in KERNELS if op == "linear"])
def test_small_groups_beside_large_ones_are_kept(impl):
    """Scale bytes 110 and 127 side by side, and 255: what a step through 8-bit floats under one scale a tile would lose."""
    codes = torch.arange(3 * 64).view(3, 64) % 8
    scale = Scale.from_codes(torch.tensor([[110, 127], [127, 110], [127, 255]]), "float8_e8m0fnu", (1, 32))
    w = pack(codes, "float4_e2m1fn", scales=(scale,))
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    factor = torch.tensor([[2.0**-17, 1], [1, 2.0**-17], [1, torch.nan]]).repeat_interleave(32, 1)
    want = table[codes] * factor
    assert bits()(want, w.dequantize()).ok
    assert bits()(want[:2].T + 0.0, ops.linear(torch.eye(64), w.rows(0, 2), impl=impl)).ok
    assert ops.linear(torch.eye(64), w, impl=impl)[:, 2].isnan().all()  # a NaN scale shows in whatever sums over it
    tile = (want[:2] / want[:2].max() * 448).to(torch.float8_e4m3fn).float() * (want[:2].max() / 448)
    assert not torch.equal(tile, want[:2])  # the rival
