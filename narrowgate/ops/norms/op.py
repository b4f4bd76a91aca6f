"""Norms over the last axis. Math in float32, one rounding to the output's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.dispatch import Operator
from narrowgate.ops import checks

_REFERENCE = "narrowgate.ops.norms.reference"


def _like(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _check_l2_norm(x: Tensor, *, eps: float = 1e-6) -> None:
    checks.expect("l2_norm", x.ndim >= 1, f"expected x with at least one axis, got {x.ndim}")
    checks.expect("l2_norm", eps >= 0, f"expected eps >= 0, got {eps}")
    checks.dtype("l2_norm", "x", x)
    checks.rows("l2_norm", "x", x)


_l2_norm = Operator(
    "l2_norm", "Tensor x, *, float eps=1e-6", f"{_REFERENCE}:l2_norm", allocate=_like, check=_check_l2_norm
)  # fmt: skip


def l2_norm(x: Tensor, *, eps: float = 1e-6, out: Tensor | None = None, impl: str | None = None) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis: the sum, not the mean, and eps inside the root.

    x: [..., K] float32, bfloat16 or float16, rows may be strided. Returns x's shape and dtype, or fills `out` (any of
    the three dtypes). Accumulates in float32. Raises InputError. Source: SPEC D26.

    >>> l2_norm(torch.tensor([3.0, 4.0]), eps=0.0)
    tensor([0.6000, 0.8000])
    """
    return _l2_norm(x, eps=eps, impl=impl, out=out)
