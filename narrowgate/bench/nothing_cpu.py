"""A kernel that does nothing, to know what entering one costs."""

# mypy: allow-untyped-defs
from __future__ import annotations

import time

from numba import types

from narrowgate.simd.cpu_compile import compiled


def nothing(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t):
    return


def enter(times: int) -> float:
    """Microseconds a call, the loop of a replay included."""
    run, arguments = compiled(nothing, (types.int64,) * 20, ""), tuple(range(1 << 40, (1 << 40) + 20))
    calls = [(run, arguments)] * times
    began = time.perf_counter()
    for function, given in calls:
        function(*given)
    return (time.perf_counter() - began) / times * 1e6
