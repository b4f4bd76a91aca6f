"""bfloat16 quantizers that work two values at a time: the reference's codes where rounding, range and sign are hard, and the PTX."""

import pytest
from gpu_scripts import run_script

pytest.importorskip("triton")

SCHEMES = ("mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8_e4m3", "mxfp8_e5m2", "int4_g32", "int4_g128", "int8_g32")
VALUES = f"""
    import torch, narrowgate as ng
    from narrowgate.formats import scheme
    from narrowgate.ops.quantize import gpu
    from narrowgate.ops.quantize.op import quantize
    g = torch.Generator().manual_seed(1)
    shape = (3, 256)
    bits = torch.randint(0, 65536, shape, generator=g, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    ties = torch.randint(-14, 15, shape, generator=g) / 2 * 2.0 ** torch.randint(-133, 120, (shape[0], 1), generator=g)
    tiny = torch.randn(shape, generator=g) * 2.0**-128
    tiny[0], tiny[0, :5] = 0.0, -0.0
    taken, inner = [], gpu._encode_pairs
    gpu._encode_pairs = lambda *a: (taken.append(a[1].name), inner(*a))
    for name in {SCHEMES!r}:
        rules = [r for r in scheme(name).scale_rules if r != "mse"]
        for x in (torch.randn(shape, generator=g), bits.nan_to_num(1.0, 3e38, -3e38), ties, tiny):
            for rule in rules:
                x = x.bfloat16()
                got, want = quantize(x, name, scale_rule=rule, impl="gpu"), quantize(x, name, scale_rule=rule, impl="reference")
                assert ng.same_bits(got, want), (name, rule)
    assert set(taken) == set({SCHEMES!r})
"""
NON_FINITE = f"""
    import torch
    from narrowgate.formats import scheme
    from narrowgate.ops.quantize import gpu
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    x[1, 3], x[2, 40], x[3, 77], x[4] = torch.nan, torch.inf, -torch.inf, 3e38
    def encoded(record):
        bits, group, wide = record.value_element.bits, record.group_size, record.scales[0].element == "bfloat16"
        out = [torch.full((6 * 128 * bits // 32,), -1, dtype=torch.int32)]
        out.append(torch.zeros(6, 128 // group, dtype=torch.int16 if wide else torch.uint8))
        gpu.encode_rows(x, record, record.scale_rules[0], out, torch.ones(1), record.layout, (6, 128), None)
        return out
    for name in {SCHEMES!r}:  # inside a capture: the same as the kernel of single values
        pairs = encoded(scheme(name))
        taken, gpu._by_pairs = gpu._by_pairs, lambda *a: False
        single = encoded(scheme(name))
        gpu._by_pairs = taken
        assert all(torch.equal(a, b) for a, b in zip(pairs, single)), name
"""
COMPILED = """
    import torch
    from narrowgate.formats import scheme
    from narrowgate.ops.quantize import gpu
    from narrowgate.tile.gpu_offline import compiling
    x = torch.zeros(64, 5120).bfloat16()
    for name in ("mxfp4", "mxfp6_e3m2", "mxfp8_e4m3", "int4_g128"):
        record = scheme(name)
        out = [torch.zeros(64 * 5120, dtype=torch.int32), torch.zeros(64, 160, dtype=torch.int16)]
        with compiling() as kernels:
            gpu.encode_rows(x, record, record.scale_rules[0], out, torch.ones(1), record.layout, (64, 5120), None)
        (kernel,) = kernels
        text = kernel.asm["ptx"]
        assert kernel.metadata.name == "pairs_kernel" and "max.u16x2" in text and "v4" in text and ".approx" not in text
"""


@pytest.mark.parametrize(
    ("script", "interpret"), [(VALUES, True), (NON_FINITE, True), (COMPILED, False)], ids=["values", "non-finite", "compiled"]
)
def test_pairs(script, interpret, tmp_path):
    run_script(tmp_path, script, interpret=interpret)
