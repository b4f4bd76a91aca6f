"""Device decode of every code of every element, held to narrowgate.formats, and its PTX."""

import pytest
from gpu_scripts import run_script

pytest.importorskip("triton")

KERNEL = """
    import torch, triton, triton.language as tl
    from narrowgate.formats import element, elements
    from narrowgate.tile import gpu_decode

    @triton.jit
    def kernel(codes, out, ELEMENT: tl.constexpr, NATIVE: tl.constexpr, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(out + i, gpu_decode.decode(tl.load(codes + i), ELEMENT, NATIVE))

    NAMES = [name for name in elements() if element(name).kind != "index"]

    def all_codes(name):
        bits = element(name).bits
        if bits <= 16:
            return torch.arange(2**bits, dtype=torch.int32)
        return torch.randint(-2**31, 2**31 - 1, (1024,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
"""
INTERPRETED = """
    for name in NAMES:
        codes = all_codes(name)
        want = element(name).decode(codes)
        for how in (False, True):
            out = torch.empty(len(codes))
            kernel[(1,)](codes, out, ELEMENT=name, NATIVE=how, N=len(codes))
            number = ~want.isnan()
            assert torch.equal(out.isnan(), ~number), (name, how)
            assert torch.equal(out[number].view(torch.int32), want[number].view(torch.int32)), (name, how)
"""
COMPILED = """
    from narrowgate.tile.gpu_offline import compiling, inexact
    with compiling() as kernels:
        for name in NAMES:
            for how in (False, True):
                kernel[(1,)](all_codes(name), torch.empty(1), ELEMENT=name, NATIVE=how, N=256, enable_fp_fusion=True)
    assert not any(inexact(k) for k in kernels), [inexact(k) for k in kernels]
    assert any("e4m3x2" in k.asm["ptx"] for k in kernels)  # the device's own conversion
    placed = dict(zip(((n, h) for n in NAMES for h in (False, True)), kernels))
    for name in ("int2", "int4", "int8", "uint4", "float4_e2m1fn", "float6_e3m2fn", "float8_e4m3fn"):
        assert "cvt.rn.f32" not in placed[name, False].asm["ptx"], name
"""


@pytest.mark.spec("A7", "A8", "A9", "A10", "A11", "A12", "B3", "B4", "F14")
def test_every_code(tmp_path):
    run_script(tmp_path, KERNEL, INTERPRETED, interpret=True)


def test_placed_decode_converts_nothing(tmp_path):
    run_script(tmp_path, KERNEL, COMPILED, interpret=False)
