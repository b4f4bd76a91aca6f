"""The residual that a norm adds on its way: the bits of an addition and a norm after it, under the interpreter."""

import pytest
from gpu_scripts import run_script

pytest.importorskip("triton")

RESIDUAL = """
    import torch
    from narrowgate.ops.norms.gpu import add_rms_norm, rms_norm

    torch.manual_seed(0)
    for width, rows in ((1024, 3), (136, 5), (96, 1)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = torch.randn(rows, width).to(dtype)
            owed = torch.randn(rows, width + 8).to(dtype)[:, :width]  # rows apart
            weight = torch.randn(width).to(dtype)
            want, apart = torch.empty_like(x), x + owed
            rms_norm(apart, weight, eps=1e-6, weight_bias=1.0, out=want)
            out, kept = torch.full_like(x, torch.nan), owed.clone()
            unrounded = torch.empty_like(x)
            add_rms_norm(x, owed, weight, eps=1e-6, weight_bias=1.0, out=out)
            assert x.equal(apart) and owed.equal(kept), (width, dtype, "the sum")
            assert out.equal(want), (width, dtype)
    # the rival: a norm of the sum before it is rounded
    x, owed = torch.randn(64, 256).bfloat16(), torch.randn(64, 256).bfloat16()
    total = x.float() + owed.float()
    rival = (total / (total.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()).bfloat16()
    out = torch.empty_like(x)
    add_rms_norm(x, owed, torch.zeros(256).bfloat16(), eps=1e-6, weight_bias=1.0, out=out)
    assert not out.equal(rival)
"""


def test_sum_and_norm(tmp_path):
    run_script(tmp_path, RESIDUAL, interpret=True)
