"""exp and its kin in float32 lanes against float64: the stated bounds, the ends of the range, NaN, and the branch of softplus."""

import numpy as np
import pytest
import torch

numba = pytest.importorskip("numba")
from numba import types  # noqa: E402

from narrowgate.simd import cpu as simd  # noqa: E402
from narrowgate.simd import cpu_math as math  # noqa: E402
from narrowgate.simd.cpu_compile import compiled  # noqa: E402


def all_four(x, out, n):
    for i in range(0, n, 16):
        value, to = simd.load_f32(x + 4 * i), out + 4 * i
        simd.store_f32(to, math.exp(value))
        simd.store_f32(to + 4 * n, math.sigmoid(value))
        simd.store_f32(to + 8 * n, math.silu(value))
        simd.store_f32(to + 12 * n, math.softplus(value))


def values(x):
    """exp, sigmoid, silu and softplus of x by the kernels."""
    padded = torch.nn.functional.pad(x, (0, -len(x) % 16))
    out = torch.full((4, len(padded)), torch.nan)
    compiled(all_four, (types.int64,) * 3, "test")(padded.data_ptr(), out.data_ptr(), len(padded))
    return out[:, : len(x)]


def exact(x):
    x = x.double()
    e = torch.exp(-x.abs())
    sigmoid = torch.where(x < 0, e, torch.ones_like(e)) / (1 + e)
    return torch.stack([x.exp(), sigmoid, x * sigmoid, x.clamp(min=0) + torch.log1p(e)])


def ulps(got, want):
    """|got - want| in units of the last place of float32 at `want`, which are those of subnormals at the least."""
    exponent = torch.frexp(want.abs().clamp(min=2.0**-126)).exponent.double() - 24
    return ((got.double() - want) / 2.0**exponent).abs()


BOUNDS = torch.tensor([1.1, 2.5, 3.0, 3.0], dtype=torch.float64)


def test_bounds():
    g = torch.Generator().manual_seed(1)
    tiny = 2.0 ** (-torch.rand(20000, generator=g) * 140) * torch.randn(20000, generator=g).sign()
    x = torch.cat([(torch.rand(400000, generator=g) - 0.5) * 176, torch.randn(200000, generator=g) * 3, tiny])
    worst = ulps(values(x), exact(x)).amax(1)
    assert (worst <= BOUNDS).all(), worst
    assert (ulps(exact(x).float() * (1 + 2.0**-21), exact(x)).amax(1) > BOUNDS).all()  # four units would be seen


def test_ends():
    x = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, 89.0, 88.7, -87.4, -100.0, -103.0, -104.0, 1e30, -1e30, torch.nan, 20.001, 118.0]
    )
    exp, sigmoid, silu, softplus = values(x)
    want = exact(x).float()
    assert exp[:2].tolist() == [1.0, 1.0]
    assert exp[2:5].tolist() == [torch.inf, 0.0, torch.inf]
    assert exp[5].isfinite()
    assert ((exp[6:10].double() - want[0, 6:10].double()).abs() <= 2.0**-149).all()  # subnormal results are right
    assert sigmoid[[2, 3, 10, 11]].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert silu[[2, 10]].tolist() == [torch.inf, x[10].item()]
    assert softplus[[2, 3, 13, 14]].tolist() == [torch.inf, 0.0, np.float32(20.001), 118.0]  # the branch at 20
    assert all(t[12].isnan() for t in (exp, sigmoid, silu, softplus))
