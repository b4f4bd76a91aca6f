"""The exact device functions: under the interpreter against torch, and compiled, by reading the PTX."""

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("triton")

KERNEL = """
    import torch, triton, triton.language as tl
    from narrowgate.tile import gpu_math

    @triton.jit
    def kernel(x, y, z, out, b16, N: tl.constexpr):
        i = tl.arange(0, N)
        a, b, c = tl.load(x + i), tl.load(y + i), tl.load(z + i)
        tl.store(out + i, gpu_math.add_rn(gpu_math.mul_rn(a, b), c))
        tl.store(out + N + i, gpu_math.sub_rn(gpu_math.mul_rn(a, b), c))
        tl.store(b16 + i, gpu_math.round_to(a, tl.bfloat16))

    @triton.jit
    def plain(x, y, z, out, b16, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(out + i, tl.load(x + i) * tl.load(y + i) + tl.load(z + i) / tl.load(x + i))

    def tensors():
        g = torch.Generator().manual_seed(3)
        x, y = torch.randn(64, generator=g), torch.randn(64, generator=g)
        x[:4] = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7F7FFFFF, 0x3F808000]).int().view(torch.float32)
        z = -(x * y) * (1 + 2.0**-23)
        return x, y, z, torch.full((128,), torch.nan), torch.full((64,), -1.0, dtype=torch.bfloat16)
"""
INTERPRETED = """
    x, y, z, out, b16 = tensors()
    kernel[(1,)](x, y, z, out, b16, N=64)
    want = torch.cat([x * y + z, x * y - z])
    assert torch.equal(out.isnan(), want.isnan()) and torch.equal(out.nan_to_num(), want.nan_to_num())
    assert torch.equal(b16.isnan(), x.isnan()) and torch.equal(b16.nan_to_num(), x.bfloat16().nan_to_num())
"""
COMPILED = """
    from narrowgate.tile.gpu_offline import compiling, inexact
    with compiling() as kernels:
        for fused in (False, True):
            kernel[(1,)](*tensors(), N=64, enable_fp_fusion=fused)
        plain[(1,)](*tensors(), N=64, enable_fp_fusion=True)
    assert not inexact(kernels[0]) and not inexact(kernels[1]), (inexact(kernels[0]), inexact(kernels[1]))
    found = inexact(kernels[2])  # what the reader of the PTX must be able to see
    assert any("fma" in i for i in found) and any("div.full" in i for i in found), found
    assert "mul.rn.f32" in kernels[0].asm["ptx"] and kernels[0].metadata.name == "kernel"
"""


@pytest.mark.parametrize(("script", "interpret"), [(INTERPRETED, "1"), (COMPILED, "0")], ids=["interpreted", "compiled"])
def test_exact_arithmetic(script, interpret, tmp_path):
    path = tmp_path / "script.py"  # Triton reads a kernel's source from its file
    path.write_text(textwrap.dedent(KERNEL) + textwrap.dedent(script))
    environment = {**os.environ, "TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
