"""The product of few rows and few outputs: under the interpreter beside float64, compiled, and on a card within the operator."""

import pytest
import torch
from gpu_scripts import run_script

import narrowgate as ng

pytest.importorskip("triton")

CLOSE = """
    import torch
    from narrowgate.ops.linear import gpu_thin

    torch.manual_seed(0)
    for m, n, k in ((1, 5, 48), (3, 7, 1024), (8, 2, 2056), (5, 1, 1)):
        for dtype in (torch.bfloat16, torch.float16):
            x = torch.randn(m, k + 8).to(dtype)[:, :k]
            w, bias = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
            for given in (None, bias):
                guarded = torch.full((m + 2, n + 3), 7.0)
                out = guarded[1:-1, 1 : n + 1]
                gpu_thin.product(x, w, given, out)
                want = x.double() @ w.double().T + (0 if given is None else given.double())
                assert (out - want).abs().max() <= 2e-6 * (1 + want.abs().max()), (m, n, k, dtype)
                out.fill_(7.0)
                assert (guarded == 7).all(), "a canary"
                short = torch.empty(m, n, dtype=dtype)
                gpu_thin.product(x, w, given, short)
                assert (short - want).abs().max() <= 2.0**-8 * want.abs().max() + 1e-6
    # the rival: a sum that was rounded to 16 bits on its way
    x, w = torch.ones(1, 4096).bfloat16(), torch.ones(1, 4096).bfloat16()
    out = torch.empty(1, 1)
    gpu_thin.product(x, w, None, out)
    rival = torch.zeros(()).bfloat16()
    for _ in range(300):
        rival += 1
    assert out.item() == 4096 and rival.item() == 256
"""
COMPILED = """
    import torch
    from narrowgate.ops.linear import gpu_thin
    from narrowgate.tile.gpu_offline import compiling

    with compiling() as kernels:
        for m, n, k in ((1, 96, 5120), (8, 96, 2048), (1, 257, 2048)):
            x, w = torch.zeros(m, k).bfloat16(), torch.zeros(n, k).bfloat16()
            gpu_thin.product(x, w, None, torch.zeros(m, n))
    for kernel in kernels:
        ptx = kernel.asm["ptx"]
        assert ".local" not in ptx and "ld.global.v4" in ptx
"""


def test_close_to_float64(tmp_path):
    run_script(tmp_path, CLOSE, interpret=True)


def test_compiled(tmp_path):
    run_script(tmp_path, COMPILED, interpret=False)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "outputs", "k"), [(1, 96, 5120), (2, 257, 2048), (8, 33, 1000), (9, 96, 512), (4, 1025, 64)])
def test_on_a_card(rows, outputs, k):
    x, w = torch.randn(rows, k).bfloat16().cuda(), torch.randn(outputs, k).bfloat16().cuda()
    y = ng.linear(x, w, out_dtype=torch.float32, impl="gpu")
    want = x.double() @ w.double().T
    assert (y - want).abs().max() <= 4e-6 * want.abs().max()
    few = "few rows and outputs" in ng.plan("linear", x, w, out_dtype=torch.float32).contract
    assert few == (rows <= 8 and outputs <= 1024)
