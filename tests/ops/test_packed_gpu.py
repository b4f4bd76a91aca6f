"""dequantize, embedding and the quantizers on the GPU: chosen cases under the interpreter, the PTX, and what needs a card."""

import pytest
import torch
from gpu_scripts import run_script

import narrowgate as ng
from narrowgate import ops
from narrowgate.packing import PackedTensor, same_bits

pytest.importorskip("triton")

CHOSEN = {
    "dequantize": ("int4", "exponent bytes", "index16, odd width", "zero point, two levels, offset", "groups far below the largest"),
    "embedding": ("4 bits, group 16, n 320", "4 bits, group 16, n 320, offset", "int4 K=7 words@1"),
    "quantize": ("ties to even", "nvfp4, small blocks", "int4_g32, scale rounded up", "refuses NaN and inf",
                 "saturation and a tie, mse", "a short last block"),
    "quantize_grouped": ("silu_mul into e4m3, float16", "relu2 into e4m3, bfloat16", "global scale 0",
                         "no row that counts", "refuses an overflow"),
}  # fmt: skip
CASES = f"""
    import narrowgate.ops as ops
    from narrowgate.conformance.run import all_cases, run
    for op, names in {CHOSEN!r}.items():
        cases = {{case.name: case for case in all_cases()[op]}}
        for name in names:
            result = run(cases[name], getattr(ops, op), device="cpu", impl="gpu")
            assert result.status == "held", (op, name, result.status, result.detail)
"""
SCHEMES = """
    import torch, narrowgate as ng
    from narrowgate.formats import scheme
    from narrowgate.ops.quantize.op import quantize
    g = torch.Generator().manual_seed(1)
    x = torch.randn(4, 160, generator=g) * torch.exp(3 * torch.randn(4, 160, generator=g))
    x[0, :32], x[1, 3], x[3, 128:] = 0.0, -0.0, 7.0
    for name in ng.schemes():
        for values in (x, x[:, :100].bfloat16()) if scheme(name).k_multiple == 1 else (x, x[:, :96].bfloat16()):
            got, want = quantize(values, name, impl="gpu"), quantize(values, name, impl="reference")
            assert ng.same_bits(got, want), (name, values.shape)
    both = lambda name, **how: (quantize(x, name, impl=impl, **how) for impl in ("gpu", "reference"))
    assert all(ng.same_bits(*both("mxfp6_e2m3", layout=layout)) for layout in ("bytes@1", "lanes16@1"))
    assert all(ng.same_bits(*both("nvfp4", global_scale=s)) for s in (3.0, torch.tensor([1.0, 2.0, 0.5, 4.0]), "per_row"))
"""
SATURATING = """
    import torch, narrowgate as ng
    from narrowgate.formats import scheme
    from narrowgate.ops.quantize import gpu
    from narrowgate.ops.quantize.op import template
    from narrowgate.quantize import quantize as by_rule
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    x[0, 5], x[1, 40], x[2, 70], x[2, 3] = float("nan"), float("inf"), -3e38, float("-inf")
    for name in ("mxfp4", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "int8_g32", "int4_g32", "int8_channel"):
        record = scheme(name)
        out = template(tuple(x.shape), name, device="cpu").tensors()
        gpu.encode_rows(x, record, record.scale_rules[0], out, torch.ones(1), record.layout, tuple(x.shape), None)
        want = by_rule(x, name, non_finite="saturate").tensors()
        assert all(torch.equal(a, b) for a, b in zip(out, want, strict=True)), name
"""
COMPILED = """
    import sys, torch, narrowgate as ng
    from narrowgate.formats import scheme
    from narrowgate.ops.quantize import gpu
    from narrowgate.ops.quantize.op import template
    from narrowgate.ops.quantize_grouped.gpu import quantize_grouped
    from narrowgate.ops.quantize_grouped.op import _allocate
    from narrowgate.tile.gpu_offline import compiling, inexact
    sys.modules["narrowgate.ops.quantize_grouped.gpu"].checks_values = lambda x: False
    x = torch.randn(64, 512)  # float32: bfloat16 goes to gpu_pairs, whose quotients are corrected by a fused multiply-add on purpose
    with compiling() as kernels:
        for name in ("mxfp4", "mxfp6_e2m3", "mxfp8_e5m2", "nvfp4", "int4_g128", "int8_channel", "nf4_g64", "q8_0", "q4_0", "iq4_nl"):
            record, out = scheme(name), template((64, 512), name, device="cpu").tensors()
            gpu.encode_rows(x, record, record.scale_rules[0], out, torch.ones(1), record.layout, (64, 512), None)
        counts, gs, groups = torch.tensor([128, 3]), torch.ones(2), torch.randn(2, 128, 64).bfloat16()
        for fmt, activation in (("e3m2", None), ("e4m3", "relu2"), ("e2m3", "silu_mul")):
            out = _allocate(groups, counts, fmt, global_scale=gs, activation=activation)
            quantize_grouped(groups, counts, fmt, global_scale=gs, activation=activation, out=out)
    found = [inexact(kernel) for kernel in kernels]
    assert len(found) == 13 and not any(found[:12]), found  # the last has an exp, whose home is elsewhere
    assert "cvt.rn.satfinite.e5m2x2.f32" in kernels[2].asm["ptx"]  # from float32 at once: through float16 it would round twice
    assert all("div.rn.f32" in kernel.asm["ptx"] for kernel in kernels)
"""


@pytest.mark.parametrize(
    ("script", "interpret"), [(CASES, True), (SCHEMES, True), (SATURATING, True), (COMPILED, False)],
    ids=["cases", "every scheme", "values that are not finite", "compiled"],
)  # fmt: skip
@pytest.mark.spec("A13", "A39", "A40", "B20", "B22", "B34", "C12")
def test_without_a_gpu(script, interpret, tmp_path):
    run_script(tmp_path, script, interpret=interpret)


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.spec("C13", "C15", "Z18")
def test_embedding_in_a_captured_graph(cuda):
    """On the caller's own stream; poisoned and with other codes between the direct run and the replay."""
    g = torch.Generator().manual_seed(2)
    first, second = (ng.quantize(torch.randn(64, 320, generator=g), "int4_g32") for _ in range(2))
    table, ids = first.to(cuda), torch.tensor([3, 0, 63, 3], device=cuda)
    whole = torch.full((4 * 320 + 2,), -12345.0, device=cuda)
    out = whole[1:-1].view(4, 320)
    ops.embedding(ids, table, out=out, impl="gpu")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        ops.embedding(ids, table, out=out, impl="gpu")
        out.mul_(2.0)
    for t, s in zip(table.tensors(), second.tensors(), strict=True):
        t.copy_(s)
    ids.copy_(torch.tensor([1, 70, -1, 63]))  # two that are no row
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    want = ops.embedding(torch.tensor([1, 63]), second, impl="reference") * 2
    assert torch.equal(out[[0, 3]].cpu(), want)
    assert not out[1:3].any()
    assert whole[0] == whole[-1] == -12345.0


@pytest.mark.gpu
@pytest.mark.spec("D79", "F33")
def test_quantizers_in_a_captured_graph(cuda):
    """No value is looked at: a NaN marks its block. Replayed over other values."""
    x, counts = torch.randn(6, 128, device=cuda), torch.tensor([2, 0, 1], device=cuda)
    grouped = lambda: ops.quantize_grouped(x.view(3, 2, 128), counts, "mxfp6_e2m3", global_scale=scale, impl="gpu")  # noqa: E731
    scale = torch.ones(1, device=cuda)
    ops.quantize(x, "mxfp8_e4m3", impl="gpu"), grouped()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        w, (codes, scales) = ops.quantize(x, "mxfp8_e4m3", impl="gpu"), grouped()
    fresh = torch.randn(6, 128, generator=torch.Generator().manual_seed(3))
    x.copy_(fresh)
    x[5, 40] = torch.nan
    graph.replay()
    want = ops.quantize(fresh, "mxfp8_e4m3", impl="reference")
    assert w.scales[0].data[5, 1] == 255
    assert torch.equal(w.codes()[:5].cpu(), want.codes()[:5])
    expected = ops.quantize_grouped(fresh.view(3, 2, 128), counts.cpu(), "mxfp6_e2m3", global_scale=1.0, impl="reference")
    assert torch.equal(codes.cpu()[:, :, :2], expected[0][:, :, :2])
    assert torch.equal(scales.view(torch.uint8).cpu()[..., :2], expected[1].view(torch.uint8)[..., :2])


@pytest.mark.gpu
@pytest.mark.spec("F45")
def test_traced_whole_with_open_sizes(cuda):
    table = ng.quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(4)), "nvfp4").to(cuda)
    tensors, described = ng.packing.flatten(table)

    def layer(ids, counts):
        rows = torch.ops.narrowgate.embedding(ids, tensors, described, dtype=torch.bfloat16)
        one = torch.ones(1, device=rows.device)
        return torch.ops.narrowgate.quantize_grouped(rows[None], counts, "e3m2", global_scale=one, activation="relu2")

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for count in (5, 3, 17):
            ids, counts = torch.arange(count, device=cuda), torch.tensor([count - 1], device=cuda)
            for want, got in zip(layer(ids, counts), compiled(ids, counts), strict=True):
                assert torch.equal(want.view(torch.uint8), got.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.spec("F36")
def test_a_table_past_two_to_the_31(cuda):
    """248320 x 8704 values: the last rows by embedding, and the whole by dequantize at its end."""
    rows, width = 248320, 8704
    data = torch.empty(rows * width // 8, dtype=torch.int32, device=cuda)
    table = PackedTensor("int4", "words@1", data, (rows, width))
    last = ng.pack(torch.randint(0, 16, (8, width), generator=torch.Generator().manual_seed(5)), "int4")
    data[-last.data.numel() :] = last.data.to(cuda)
    data[: last.data.numel()] = ~last.data.to(cuda)
    want = ops.dequantize(last, impl="reference")
    ids = torch.tensor([rows - 1, rows - 8], device=cuda)
    assert torch.equal(ops.embedding(ids, table, impl="gpu").cpu(), want[[7, 0]] + 0.0)
    whole = ops.dequantize(table, dtype=torch.bfloat16, impl="gpu")
    assert torch.equal(whole[-8:].cpu(), want.bfloat16())
    back = ops.quantize(whole, "bf16", impl="gpu")
    assert torch.equal(back.data[-8:].cpu(), want.bfloat16().view(torch.int16))
    again = ops.quantize(whole, "mxfp4", impl="gpu").rows(rows - 8, rows)
    assert same_bits(again.to("cpu"), ops.quantize(want.bfloat16(), "mxfp4", impl="reference"))
