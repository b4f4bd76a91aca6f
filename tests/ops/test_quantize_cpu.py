"""quantize on the CPU: every scheme, rule, input type and layout, bytes equal to the reference's, and its refusals."""

import os
import subprocess
import sys

import pytest
import torch

import narrowgate as ng
from narrowgate.packing import same_bits
from narrowgate.packing.registry import layout, layouts

pytest.importorskip("numba")

SHAPES = ((1, 1), (3, 7), (5, 32), (4, 100), (2, 1024), (3, 1056), (2, 2500), (2, 3, 64))
CASES = [(s, rule) for s in ng.schemes() for rule in (ng.scheme(s).scale_rules or (None,))]


def draw(shape, seed):
    """Values over many binades, with zeros, zero blocks, halves, ties and both signs of the largest."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-12, 12, (*shape[:-1], 1), generator=g).float())
    x[..., ::7] = 0.0
    x[0, ..., : shape[-1] // 2] = torch.randint(-12, 13, x[0, ..., : shape[-1] // 2].shape, generator=g) / 2
    if shape[-1] > 64:
        x[..., 32:64] = -0.0
    return x


@pytest.mark.parametrize(("scheme", "rule"), CASES)
def test_bytes_equal_the_reference(scheme, rule):
    multiple = 4 if "mxfp6" in scheme else ng.scheme(scheme).k_multiple
    for i, shape in enumerate(SHAPES):
        shape = (*shape[:-1], -(-shape[-1] // multiple) * multiple)
        x = draw(shape, i)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            y = x.to(dtype)
            want = ng.ops.quantize(y, scheme, scale_rule=rule, impl="reference")
            assert same_bits(ng.ops.quantize(y, scheme, scale_rule=rule, impl="cpu"), want), (shape, dtype)
        gaps = torch.nn.functional.pad(x, (1, 2))[..., 1 : shape[-1] + 1]
        assert same_bits(ng.ops.quantize(gaps, scheme, scale_rule=rule, impl="cpu"), ng.quantize(x, scheme, scale_rule=rule))


@pytest.mark.parametrize("scheme", ["int4_g32", "mxfp6_e3m2", "nvfp4", "int2_g32", "int8_channel", "bf16"])
def test_every_layout(scheme):
    x = draw((20, 72), 1)
    for where in layouts():
        if where not in ("swizzle_128x4@1", "lanes16_units@1") and not layout(where).refusal(
            (20, 72), ng.scheme(scheme).value_element.bits
        ):
            want = ng.ops.quantize(x, scheme, layout=where, impl="reference")
            assert same_bits(ng.ops.quantize(x, scheme, layout=where, impl="cpu"), want), where


@pytest.mark.parametrize("scheme", ng.schemes())
def test_hard_values(scheme):
    """Every binade, the largest and the smallest magnitudes, and scales that are tiny."""
    bits = torch.arange(0, 0x7F00, 3).repeat_interleave(32).view(-1, 32) << 16
    x = (bits + torch.arange(32) * 0x1357).to(torch.int32).view(torch.float32)
    if scheme in ("q8_0", "q4_0", "iq4_nl"):
        x = x[x.amax(1) < 1e5]
    x = torch.where(torch.arange(32) % 3 == 1, -x, x)
    assert same_bits(ng.ops.quantize(x, scheme, impl="cpu"), ng.ops.quantize(x, scheme, impl="reference"))


def test_outer_scales():
    x = draw((6, 80), 2)
    for given in (0.25, torch.rand(6) + 0.1, "per_row"):
        want = ng.ops.quantize(x, "nvfp4", global_scale=given, impl="reference")
        assert same_bits(ng.ops.quantize(x, "nvfp4", global_scale=given, impl="cpu"), want)


def test_refusals_are_the_references():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for bad in (float("nan"), float("inf"), -float("inf")):
            x = torch.zeros(3, 40, dtype=dtype)
            x[2, 37] = x[1, 5] = bad
            with pytest.raises(ng.InputError, match=r"2 of 120 values are not finite, the first at index \[1, 5\]"):
                ng.ops.quantize(x, "int4_g32", impl="cpu")
    with pytest.raises(ng.InputError, match="stores its scale in float16"):
        ng.ops.quantize(torch.full((1, 32), 1e9), "q8_0", impl="cpu")
    assert ng.ops.quantize(torch.zeros(0, 32), "mxfp4", impl="cpu").shape == (0, 32)
    assert ng.ops.quantize(torch.zeros(3, 0), "int8_channel", impl="cpu").shape == (3, 0)


AVX2 = "+avx2,+fma,+f16c,+avx,+sse4.2,+sse4.1,+ssse3,+popcnt,+bmi,+bmi2,+lzcnt,+movbe,+cx16,-avx512f"


def test_avx2_alone():
    """The same bytes, and the same values back, on an older processor."""
    code = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import test_decode_cpu as d, test_quantize_cpu as q
from narrowgate.simd.cpu_features import FEATURES
assert FEATURES.level == "avx2"
for scheme in ("nvfp4", "mxfp6_e3m2", "mxfp8_e4m3", "nf4_g64", "q8_0", "int2_g32"):
    q.test_bytes_equal_the_reference(scheme, None)
    d.test_every_scheme_prepared_and_not(scheme)
d.test_levels_of_every_kind()
"""
    environment = {**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": AVX2}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
