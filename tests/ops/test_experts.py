"""A few tokens and their experts (gpu_experts): what is compiled for sm_90, and on a card the bits of the operators one by one."""

import pytest
import torch
from gpu_scripts import run_script

import narrowgate as ng

pytest.importorskip("triton")

GEOMETRY = """
    import torch
    import narrowgate as ng
    from narrowgate.ops.experts import gpu_experts_run
    from narrowgate.ops.linear.prepare import for_gpu
    from narrowgate.packing import flatten

    def prepared(name, *shape):
        return flatten(for_gpu(ng.quantize(torch.randn(*shape, generator=torch.Generator().manual_seed(shape[-1])) * 0.1, name)))
"""
COMPILED = """
    from narrowgate.tile import gpu_launch
    from narrowgate.tile.gpu_offline import compiling

    gpu_launch._overlaps = lambda device: True
    hidden, width, top_k = 1024, 512, 3
    with compiling() as kernels:
        for name in ("mxfp4", "int4_g128", "nvfp4", "mxfp6_e3m2", "int8_channel"):
            shapes = ((2, 2 * width, hidden), (2, hidden, width), (2 * width, hidden), (hidden, width))
            weights, described = zip(*(prepared(name, *shape) for shape in shapes))
            found, reason = gpu_experts_run.experts(*described)
            assert found is not None, reason
            gpu_experts_run.run(
                found, torch.zeros(1, hidden, dtype=torch.bfloat16), torch.zeros(1, top_k, dtype=torch.int32),
                torch.zeros(1, top_k + 1), torch.zeros(1, hidden // 32, dtype=torch.int32), *weights,
            )
    assert len(kernels) == 10
    for i, kernel in enumerate(kernels):
        ptx = kernel.asm["ptx"]
        assert "mma.sync.aligned.m16n8k16" in ptx and ".local" not in ptx
        first = min(ptx.index(load) for load in ("ld.global.b64", "ld.global.v2.b64", "ld.global.b32") if load in ptx)
        assert ptx.count("griddepcontrol.wait") == 1 and ("atom.global" in ptx) == (i % 2 == 1)
        assert (first < ptx.index("griddepcontrol.wait")) == (i % 2 == 1)  # `down` asks for its weight before it waits for x
"""
REFUSED = """
    for name, other, width, why in (
        ("mxfp4", "int4_g32", 256, "shared expert"), ("mxfp4", "mxfp4", 24, "outputs"), ("q4_0", "q4_0", 256, "few_kernel"),
        ("nf4_g64", "nf4_g64", 256, "element"),
    ):
        shapes = ((name, 2, 2 * width, 256), (name, 2, 256, width), (other, 2 * width, 256), (other, 256, width))
        found, reason = gpu_experts_run.experts(*(prepared(*shape)[1] for shape in shapes))
        assert found is None and why in reason, (name, reason)
"""


def test_experts_compile_for_a_card(tmp_path):
    run_script(tmp_path, GEOMETRY, COMPILED, interpret=False)


def test_what_is_not_taken_is_said(tmp_path):
    run_script(tmp_path, GEOMETRY, REFUSED, interpret=False)


# ---- on a card


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in ("mxfp4", "int4_g128", "nvfp4", "mxfp6_e3m2", "mxfp8_e4m3", "int8_channel")),
     ("mxfp4", torch.float16), ("int4_g32", torch.float16)],
)  # fmt: skip
def test_the_bits_of_the_products_one_by_one(name, dtype):
    from narrowgate.ops.experts import gpu_experts_run, gpu_routing
    from narrowgate.ops.linear import gpu_run
    from narrowgate.packing import flatten

    g = torch.Generator().manual_seed(0)
    experts, hidden, width, top_k = 20, 1024, 512, 3
    shapes = ((experts, 2 * width, hidden), (experts, hidden, width), (2 * width, hidden), (hidden, width))
    held = [ng.prepare(ng.quantize(torch.randn(*shape, generator=g) * 0.1, name), "cuda") for shape in shapes]
    weights, described = zip(*map(flatten, held), strict=True)
    found, reason = gpu_experts_run.experts(*described)
    assert found is not None, reason

    def product(f, w, x, chosen):
        y = torch.full((len(x), f.n), torch.nan, dtype=dtype, device="cuda")
        rows = torch.arange(len(x), dtype=torch.int32, device="cuda")
        plan = None if chosen is None else torch.stack([chosen.flatten(), rows, rows + 1], 1).contiguous()
        gpu_run.packed(f, w, x, None, y, gpu_run.Tile(32, 8, gpu_experts_run.warps(f), 1, few=True), plan)
        return y

    for tokens in (1, 3, 12):
        x = torch.randn(tokens, hidden, generator=g).cuda().to(dtype)
        router, gate = (torch.randn(n, hidden, generator=g).cuda().to(dtype) for n in (experts, 1))
        scores = gpu_routing.score(x, router, gate)
        assert (scores - x.double() @ torch.cat([router, gate]).double().T).abs().max() < 1e-3
        counts = torch.full((tokens, hidden // 32), -1, dtype=torch.int32, device="cuda")
        mixing, chosen = gpu_routing.choose(scores[:, :-1], scores[:, -1:], top_k, True, counts)
        between = ng.ops.silu_mul(product(found.gate_up, weights[0], x.repeat_interleave(top_k, 0), chosen))
        rows = product(found.down, weights[1], between, chosen)
        shared = torch.cat([product(found.down, weights[3], ng.ops.silu_mul(product(found.gate_up, weights[2], r, None)), None)
                            for r in x.split(1)])  # fmt: skip
        places = torch.arange(tokens * top_k, dtype=torch.int32, device="cuda").view(tokens, top_k)
        want = gpu_routing.mix(rows, mixing, places, shared, dtype)
        assert torch.equal(gpu_experts_run.run(found, x, chosen, mixing, counts, *weights), want), tokens
        for _ in range(20):
            got = gpu_routing.experts(found, x, router, gate, top_k, True, *weights)
            assert torch.equal(got, want), tokens


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mxfp4", "int4_g128"])
def test_in_place_and_sorted_agree(name, monkeypatch):
    """The block as a module, eager and captured: a few tokens in place, and the same tokens sorted."""
    from narrowgate.nn import mlp
    from narrowgate.nn.linear import PackedExperts, PackedLinear
    from narrowgate.nn.weight import Weight
    from narrowgate.ops.experts import gpu_routing

    g = torch.Generator().manual_seed(1)
    experts, hidden, width, top_k = 64, 512, 256, 8

    def packed(*shape):
        return Weight(ng.prepare(ng.quantize(torch.randn(*shape, generator=g) * 0.05, name), "cuda"))

    def dense(*shape):
        return PackedLinear(Weight(torch.randn(*shape, generator=g).cuda().bfloat16() * 0.1))

    shared = mlp.MLP(
        PackedLinear(packed(width, hidden)), PackedLinear(packed(width, hidden)), PackedLinear(packed(hidden, width))
    )
    shared.gate_up.join()
    block = mlp.MoE(
        dense(experts, hidden), PackedExperts(packed(experts, 2 * width, hidden)), PackedExperts(packed(experts, hidden, width)),
        shared, dense(1, hidden), top_k, True,
    )  # fmt: skip
    calls = []
    inner = gpu_routing.experts
    monkeypatch.setattr(gpu_routing, "experts", lambda *given: calls.append(1) or inner(*given))
    for tokens in (1, 5, 16):
        x = torch.randn(tokens, hidden, generator=g).cuda().bfloat16()
        calls.clear()
        y = block(x)
        assert calls
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = block(x)
        for _ in range(20):
            held.fill_(torch.nan)
            graph.replay()
            assert torch.equal(held, y)
        with monkeypatch.context() as patch:
            patch.setattr(mlp, "FEW", 0)
            calls.clear()
            other = block(x)
            assert not calls
        assert (y.double() - other.double()).norm() <= 6e-3 * other.double().norm()
        assert torch.equal(block(x[:1]), y[:1])
