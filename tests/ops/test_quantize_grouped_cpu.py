"""quantize_grouped on the CPU: bytes equal to the reference's for every format, dtype and shape, and its refusals."""

import itertools

import pytest
import torch

import narrowgate as ng
from narrowgate import ops

pytest.importorskip("numba")

SHAPES = ((1, 1, 32), (3, 130, 160), (2, 5, 1056), (1, 33, 2048))  # [G, R, C]: less and more than a tile, than a span
SCALES = (1.0, 0.0, 1e-30, -2.0, (0.3, 2500.0, 7.0))


def draw(groups, rows, width, dtype, seed=0):
    """(x over many binades, with zero blocks and both zeros, NaN beyond the counts; the counts)."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(groups, rows, width, generator=g) * torch.exp2(torch.randint(-6, 6, (groups, rows, 1), generator=g).float())
    x[..., :32], x[..., 4:9] = 0.0, -0.0
    counts = torch.randint(0, rows + 1, (groups,), generator=g)
    counts[0] = rows
    for group, count in enumerate(counts.tolist()):
        x[group, count:] = torch.nan
    return x.to(dtype), counts


def same(a, b):
    return torch.equal(a.codes, b.codes) and torch.equal(a.scales.view(torch.uint8), b.scales.view(torch.uint8))


@pytest.mark.parametrize("fmt", ["mxfp6_e3m2", "mxfp6_e2m3", "mxfp8_e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_equal_the_reference(fmt, dtype):
    for (groups, rows, width), activation, scale in itertools.product(SHAPES, (None, "relu2"), SCALES):
        x, counts = draw(groups, rows, width, dtype)
        gs = torch.tensor(scale[:groups]) if isinstance(scale, tuple) else scale
        for bf16_round, index in ((False, torch.int64), (True, torch.int32)):
            given = {"global_scale": gs, "activation": activation, "bf16_round": bf16_round}
            cpu, want = (ops.quantize_grouped(x, counts.to(index), fmt, **given, impl=i) for i in ("cpu", "reference"))
            assert same(cpu, want), (groups, rows, width, activation, scale, bf16_round)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["silu_mul", "relu2"])
def test_fused_equals_composed(activation, dtype):
    x, counts = draw(3, 130, 320, dtype)
    fused = ops.quantize_grouped(x, counts, "mxfp6_e3m2", global_scale=2.0, activation=activation, impl="cpu")
    made = getattr(ops, activation)(x, impl="cpu")
    assert same(fused, ops.quantize_grouped(made, counts, "mxfp6_e3m2", global_scale=2.0, impl="cpu"))
    counted = torch.where(torch.arange(130)[:, None] < counts[:, None, None], made, 0)
    assert same(fused, ops.quantize_grouped(counted, counts, "mxfp6_e3m2", global_scale=2.0, impl="reference"))


def test_strided_rows_and_a_product_in_two_steps():
    x, counts = draw(2, 5, 64, torch.bfloat16)
    wide = torch.full((4, 9, 80), 9.0, dtype=torch.bfloat16)
    wide[::2, ::2, 8:72] = x
    part = wide[::2, ::2, 8:72]
    assert same(*(ops.quantize_grouped(t, counts, "e2m3", global_scale=1.5, impl="cpu") for t in (part, x)))
    tiny = torch.full((1, 1, 32), 1e-42)  # gs * 2^(127 - byte) overflows: SPEC B20's product in two steps
    for fmt in ("e3m2", "e2m3", "e4m3"):
        found = [ops.quantize_grouped(tiny, torch.tensor([1]), fmt, global_scale=3e38, impl=i) for i in ("cpu", "reference")]
        assert same(*found)
        assert found[0].codes.any()


@pytest.mark.parametrize(
    ("bad", "activation"),
    [(b, a) for b in (torch.nan, torch.inf, 3e38) for a in (None, "silu_mul", "relu2")] + [(-torch.inf, None)],
)
def test_what_is_not_finite_is_refused_as_by_the_reference(bad, activation):
    x = torch.ones(2, 3, 64)
    x[1, 2, 40] = bad
    said = []
    for impl in ("cpu", "reference"):
        with pytest.raises(ng.InputError) as refused:
            ops.quantize_grouped(x, torch.tensor([3, 3]), "e3m2", global_scale=10.0, activation=activation, impl=impl)
        said.append(str(refused.value))
    assert said[0] == said[1]
    ops.quantize_grouped(x, torch.tensor([3, 2]), "e3m2", global_scale=10.0, activation=activation, impl="cpu")


def test_the_cpu_takes_it():
    assert ng.plan("quantize_grouped", torch.ones(1, 1, 32), torch.tensor([1]), "e3m2", global_scale=1.0).impl == "cpu"
