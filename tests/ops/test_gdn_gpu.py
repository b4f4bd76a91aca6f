"""The GPU kernels of the gated delta family where there is no GPU: chosen cases under the interpreter, and what was compiled, read.

All cases run on a card: `narrowgate check --device cuda --impl gpu`."""

import pytest
from gpu_scripts import run_script

pytest.importorskip("triton")

OPS = {
    "gated_delta_rule_step": 9, "gated_delta_rule_packed_step": 12, "gated_delta_rule_speculative_step": 9, "causal_conv1d": 6,
    "causal_conv1d_step": 6, "causal_conv1d_speculative_step": 8, "l2_norm": 4, "rms_norm": 4, "rms_norm_gated": 6, "gdn_gate": 5,
    "gdn_decay": 2, "split_qkv": 5, "gdn_post_conv": 16, "silu": 3, "silu_mul": 3, "relu2": 3, "scale": 1, "convert": 4,
    "gather_state": 4, "scatter_state": 2, "select_rows": 4, "copy_rows": 2,
}  # fmt: skip
"""operator: every how manyth of its small cases is run"""

INTERPRETED = """
    import sys
    import narrowgate.ops as ops
    from narrowgate.conformance.guards import tensors
    from narrowgate.conformance.run import all_cases, run

    held = 0
    for op, every in OPS.items():
        small = [c for c in all_cases()[op] if not c.raises and not c.full and sum(t.numel() for t in tensors(c.draw())) < 3000]
        for case in small[::every]:
            result = run(case, getattr(ops, op), impl="gpu")
            assert result.status == "held", f"{case.id}: {result.detail}"
            held += 1
    print(held)
"""


def test_cases_under_the_interpreter(tmp_path):
    assert int(run_script(tmp_path, f"OPS = {OPS}", INTERPRETED, interpret=True)) > 60


SPECIAL = """
    import torch, triton, triton.language as tl
    from narrowgate.tile import gpu_special

    @triton.jit
    def kernel(x, y, s, z, N: tl.constexpr):
        i = tl.arange(0, N)
        a = tl.load(x + i)
        tl.store(y + i, gpu_special.exp(a))
        tl.store(s + i, gpu_special.silu(a))
        tl.store(z + i, gpu_special.softplus(a))

    N = 1 << 16
    x = torch.cat([torch.linspace(-110, 95, N // 2), torch.randn(N // 2, generator=torch.Generator().manual_seed(0)) * 3])
    x[:5] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    x = x.to(DEVICE)
    y, s, z = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    kernel[(1,)](x, y, s, z, N=N, enable_fp_fusion=False)
    x, y, s, z = x.cpu(), y.cpu(), s.cpu(), z.cpu()

    def ulps(got, want):
        near = want.float().abs()
        unit = (torch.nextafter(near, torch.tensor(torch.inf)) - near).double()
        return ((got.double() - want).abs() / unit)[near.isfinite() & got.isfinite()].max().item()

    wide = x.double()
    assert y[0] == torch.inf and y[1] == 0 and y[2].isnan() and (y[3:5] == 1).all(), y[:5]
    assert torch.equal(y.isinf(), wide.exp().float().isinf())
    assert ulps(y, wide.exp()) < 1, ulps(y, wide.exp())
    inner = wide.abs() < MOST  # the interpreter's fma rounds twice, and so corrects nothing: there the error grows with |x|
    assert ulps(s[inner], (wide / (1 + torch.exp(-wide)))[inner]) < ULPS, ulps(s[inner], (wide / (1 + torch.exp(-wide)))[inner])
    want = torch.where(wide > 20, wide, torch.log1p(wide.clamp(max=20).exp()))
    assert z[0] == torch.inf and z[1] == 0 and z[2].isnan(), z[:3]
    inner = wide > -87  # below it values and units are subnormal
    assert ulps(z[inner], want[inner]) < ULPS, ulps(z[inner], want[inner])
"""


def test_bounds_of_exp_and_its_kin(tmp_path):
    run_script(tmp_path, 'DEVICE, MOST, ULPS = "cpu", 4, 8', SPECIAL, interpret=True)


@pytest.mark.gpu
def test_bounds_of_exp_and_its_kin_on_a_gpu(tmp_path):
    run_script(tmp_path, 'DEVICE, MOST, ULPS = "cuda", 87, 4', SPECIAL, interpret=False)


COMPILED = """
    import re
    import torch
    from narrowgate.ops.causal_conv1d import gpu as conv
    from narrowgate.ops.gated_delta_rule import cases_inputs, gpu_layer, gpu_sequence, gpu_step
    from narrowgate.ops.norms import gpu as norms
    from narrowgate.ops.post_conv import gpu as post_conv
    from narrowgate.tile.gpu_offline import compiling, inexact

    BF16, WIDE = torch.bfloat16, re.compile(r"(?:ld|st)\\.global\\.v")
    g = torch.Generator().manual_seed(0)

    def compiled(function, *args, **kwargs):
        with compiling() as kernels:
            function(*args, **kwargs)
        (kernel,) = kernels  # one launch
        # multiply-adds that are asked for; what sigmoid and norms correct
        found = inexact(kernel) - {"fma.rn.f32", "ex2.approx.ftz.f32", "rcp.approx.ftz.f32", "rsqrt.approx.f32"}
        assert not found, (function.__name__, found)
        return kernel

    def off_by_one(t):
        return torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape)

    def layouts(kernel):
        return re.findall(r"#blocked\\d* = (.*)", kernel.asm["ttgir"])

    def summed(kernel):
        # how the tiles lie that are summed along their rows: columns a thread, columns of a warp, warps along a row
        ir = kernel.asm["ttgir"]
        names = dict(re.findall(r"(#blocked\\d*) = #ttg.blocked<(.*)>", ir))
        found = re.findall(r'axis = 1 : i32.*?\\}\\) : \\(tensor<[^,]*, (#blocked\\d*)>', ir, re.DOTALL)
        assert found
        lies = r"sizePerThread = \\[1, (\\d+)\\], threadsPerWarp = \\[\\d+, (\\d+)\\], warpsPerCTA = \\[\\d+, (\\d+)\\]"
        return {re.search(lies, names[name]).groups() for name in found}

    def sums(kernel):
        return [kernel.asm["ptx"].count(i) for i in ("shfl.sync", "add.f32", "add.rn.f32")]

    def step(state, shift=False):
        given = cases_inputs.step(g, 2, (1, 2), (128, 16), state=state)
        if shift:
            given = {k: off_by_one(t) if k in ("q", "k", "v", "state") else t for k, t in given.items()}
        return compiled(gpu_step.gated_delta_rule_step, **given, out=torch.empty_like(given["v"]))

    # one order of summation, whatever the state's dtype and alignment; and no wide access where memory is not aligned
    kernels = [step(state, shift) for state in (torch.float32, BF16) for shift in (False, True)]
    four = "sizePerThread = [1, 4], threadsPerWarp = [1, 32]"
    assert all(any(four in layout for layout in layouts(k)) for k in kernels), [layouts(k) for k in kernels]
    assert all(sums(k)[0] == sums(kernels[0])[0] > 0 for k in kernels), [sums(k) for k in kernels]
    assert [bool(WIDE.search(k.asm["ptx"])) for k in kernels] == [True, False, True, False]
    assert all(not re.search(r"ld\\.shared", k.asm["ptx"]) for k in kernels)

    given = cases_inputs.packed(g, 2, (1, 2), (128, 16), dtype=BF16)
    compiled(gpu_step.gated_delta_rule_packed_step, **given, out=torch.empty(2, 2, 16))
    several = []  # sequences compile once for whatever heads, rows, lengths and strides
    for heads, keys, lengths in (((1, 2), (128, 16), [2]), ((3, 9), (128, 37), [1, 2, 1])):
        given = cases_inputs.speculative(g, lengths, [1] * len(lengths), [[0, 1]] * len(lengths), 2, heads, keys)
        several.append(compiled(gpu_sequence.gated_delta_rule_speculative_step, **given, out=torch.empty_like(given["v"])))
    assert several[0] is several[1]
    x, w, state = torch.zeros(32, 512, dtype=BF16), torch.zeros(512, 4, dtype=BF16), torch.zeros(1, 512, 3)
    compiled(conv.causal_conv1d, x, w, None, state, out=x.clone())
    rows, gate, weight = x.view(-1, 128), x.view(-1, 128), torch.ones(128)
    compiled(norms.rms_norm_gated, rows, gate, weight, eps=1e-6, out=rows.clone())
    plain, fused = rows.clone(), [torch.empty(32, 1, 128, dtype=BF16) for _ in range(2)] + [torch.empty(32, 2, 128, dtype=BF16)]
    a, gates = torch.zeros(32, 2), [torch.empty(32, 2) for _ in range(2)]
    one = compiled(norms.l2_norm, rows, out=plain)
    all_ = compiled(
        post_conv.gdn_post_conv, x, a, a, a[0], a[0], num_k_heads=1, head_k_dim=128, head_v_dim=128, out=(*fused, *gates)
    )
    assert sums(one)[0] == sums(all_)[0] == 5  # a row is summed in the same order alone and fused

    # and in one order whether the rows are few or many
    for width in (16, 64, 128, 256, 2048):
        few, many = (torch.empty(1, dtype=BF16).expand(rows, width) for rows in (1, 2048 * 4096 // width))
        orders = [summed(compiled(norms.l2_norm, t, out=t)) for t in (few, many)]
        assert orders[0] == orders[1], (width, orders)
        assert len(orders[0]) == 1

    # the whole layer sums as its parts do
    for split in (1, 4):
        layer = compiled(
            gpu_layer.one_launch, torch.zeros(2, 512, dtype=BF16), torch.zeros(2, 2, 128, dtype=BF16), torch.zeros(2, 2),
            torch.zeros(2, 2), torch.zeros(512, 4), torch.zeros(2, 512, 3), torch.zeros(2), torch.zeros(2), torch.zeros(128),
            torch.zeros(2, 2, 128, 128), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32), scale=1.0,
            norm_eps=1e-6, out=torch.zeros(2, 2, 128, dtype=BF16), split=split,
        )
        assert summed(layer) == summed(one) == summed(kernels[0]) == {("4", "32", "1")}, summed(layer)
"""


def test_what_is_compiled(tmp_path):
    run_script(tmp_path, COMPILED, interpret=False)
