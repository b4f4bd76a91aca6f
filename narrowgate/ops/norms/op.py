"""Norms over the last axis. Math in float32, one rounding to the output's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.dispatch import Kernel, Operator
from narrowgate.ops import checks
from narrowgate.ops.host import host_kernel
from narrowgate.strides import scattered

_REFERENCE = "narrowgate.ops.norms.reference"


def _like(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _check_x(op: str, x: Tensor, eps: float) -> None:
    checks.expect(op, x.ndim >= 1, f"expected x with at least one axis, got {x.ndim}")
    checks.expect(op, eps >= 0, f"expected eps >= 0, got {eps}")
    checks.floats(op, x=x)


def _check_l2_norm(x: Tensor, *, eps: float = 1e-6) -> None:
    _check_x("l2_norm", x, eps)


def _check_rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float, weight_bias: float = 0.0) -> None:
    op = "rms_norm"
    _check_x(op, x, eps)
    if weight is not None:
        checks.shape(op, "weight", weight, x.shape[-1])
        checks.floats(op, weight=weight)
        checks.device(op, x, weight=weight)


def _check_rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, activation: str = "silu") -> None:
    op = "rms_norm_gated"
    _check_x(op, x, eps)
    rows, want = gate.numel() == x.numel(), f"expected gate with the rows of x, {list(x.shape)}, got {list(gate.shape)}"
    checks.expect(op, gate.ndim >= 1 and gate.shape[-1] == x.shape[-1] and rows, want)
    checks.shape(op, "weight", weight, x.shape[-1])
    checks.floats(op, gate=gate, weight=weight)
    checks.device(op, x, gate=gate, weight=weight)
    good = activation in ("silu", "sigmoid")
    checks.expect(op, good, f"expected activation to be 'silu' or 'sigmoid', got {activation!r}")


def _unfit(x: Tensor, *args: Tensor | None, **_: object) -> list[str]:
    """Why the GPU kernel, which keeps a row in registers, cannot take a call."""
    rows = [x, *(t for t in args if t is not None and t.ndim > 1)]
    return scattered(*rows) + ([f"expected rows of at most 65536, got {x.shape[-1]}"] if x.shape[-1] > 65536 else [])


_l2_norm = Operator(
    "l2_norm", "Tensor x, *, float eps=1e-6", f"{_REFERENCE}:l2_norm", allocate=_like, check=_check_l2_norm, remember=True,
)  # fmt: skip
_rms_norm = Operator(
    "rms_norm", "Tensor x, Tensor? weight=None, *, float eps, float weight_bias=0.0",
    f"{_REFERENCE}:rms_norm", allocate=_like, check=_check_rms_norm, remember=True,
)  # fmt: skip
_rms_norm_gated = Operator(
    "rms_norm_gated", 'Tensor x, Tensor gate, Tensor weight, *, float eps, str activation="silu"',
    f"{_REFERENCE}:rms_norm_gated", allocate=_like, check=_check_rms_norm_gated, remember=True,
)  # fmt: skip

for _operator in (_l2_norm, _rms_norm, _rms_norm_gated):
    _operator.add(host_kernel(f"narrowgate.ops.norms.cpu:{_operator.name}"))
    _operator.add(Kernel("gpu", f"narrowgate.ops.norms.gpu:{_operator.name}", refuse=_unfit))


def l2_norm(x: Tensor, *, eps: float = 1e-6, out: Tensor | None = None, impl: str | None = None) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis: the sum, not the mean, and eps inside the root.

    x: [..., K] float32, bfloat16 or float16, rows may be strided. Returns x's shape and dtype, or fills `out` (any of
    the three dtypes). Accumulates in float32. Raises InputError. Source: SPEC D26.

    >>> l2_norm(torch.tensor([3.0, 4.0]), eps=0.0)
    tensor([0.6000, 0.8000])
    """
    return _l2_norm(x, eps=eps, impl=impl, out=out)


def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float, weight_bias: float = 0.0,
    out: Tensor | None = None, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """x / sqrt(mean(x^2) + eps) * (weight + weight_bias) over the last axis; without a weight, the plain norm.

    x: [..., K] and weight: [K], each float32, bfloat16 or float16. `weight_bias=1.0` is the (1 + w) norm of some model
    families. Returns x's shape and dtype, or fills `out` (any of the three dtypes; `out=x` works in place).
    Accumulates in float32. Raises InputError. Source: SPEC C7, C9.

    >>> rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([2.0, 0.5]), eps=0.0)
    tensor([1.6971, 0.5657])
    """
    return _rms_norm(x, weight, eps=eps, weight_bias=weight_bias, impl=impl, out=out)


def rms_norm_gated(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, activation: str = "silu",
    out: Tensor | None = None, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """x / sqrt(mean(x^2) + eps) * weight * act(gate): the norm first, then the gate; act is "silu" or "sigmoid".

    x: [..., D]; gate: the same rows, of x's shape or split over more axes (such as [T, Hv, D] for x [T * Hv, D]), strided
    as it likes outside the last axis; weight: [D]. Each float32, bfloat16 or float16. Returns x's shape and dtype, or
    fills `out` (any of the three dtypes). Accumulates in float32. Raises InputError. Source: SPEC D27, D28.

    >>> x, gate, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, -1.0]]), torch.tensor([2.0, 0.5])
    >>> rms_norm_gated(x, gate, weight, eps=0.0)
    tensor([[ 1.2406, -0.1521]])
    """
    return _rms_norm_gated(x, gate, weight, eps=eps, activation=activation, impl=impl, out=out)
