"""Elementwise steps between products: activations, a scale, and conversion between float types that keeps NaN a NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.dispatch import Kernel, Operator
from narrowgate.ops import checks
from narrowgate.ops.host import host_kernel
from narrowgate.strides import scattered

_REFERENCE = "narrowgate.ops.elementwise.reference"


def _like(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _half(x: Tensor) -> Tensor:
    return torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)


def _in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _check_silu_mul(x: Tensor) -> None:
    even = x.ndim >= 1 and x.shape[-1] % 2 == 0
    checks.expect("silu_mul", even, f"expected x of shape [..., 2 * I], got {list(x.shape)}")
    checks.floats("silu_mul", x=x)


def _check_convert(x: Tensor, dtype: torch.dtype) -> None:
    checks.floats("convert", x=x)
    checks.expect("convert", dtype in checks.FLOATS, f"expected dtype float32, bfloat16 or float16, got {dtype}")


def _unfit(x: Tensor, *_: object) -> list[str]:
    return scattered(x)


_silu = Operator(
    "silu", "Tensor x", f"{_REFERENCE}:silu", allocate=_like, check=lambda x: checks.floats("silu", x=x), remember=True,
)  # fmt: skip
_silu_mul = Operator("silu_mul", "Tensor x", f"{_REFERENCE}:silu_mul", allocate=_half, check=_check_silu_mul, remember=True)
_relu2 = Operator(
    "relu2", "Tensor x", f"{_REFERENCE}:relu2", allocate=_like, check=lambda x: checks.floats("relu2", x=x), remember=True,
)  # fmt: skip
_scale = Operator(
    "scale", "Tensor x, float s", f"{_REFERENCE}:scale", allocate=_like, check=lambda x, s: checks.floats("scale", x=x)
)  # fmt: skip
_convert = Operator(
    "convert", "Tensor x, ScalarType dtype", f"{_REFERENCE}:convert", allocate=_in_dtype, check=_check_convert,
    out_dtype="same",
)  # fmt: skip


for _operator in (_silu, _silu_mul, _relu2, _scale, _convert):
    _operator.add(host_kernel(f"narrowgate.ops.elementwise.cpu:{_operator.name}"))
    _operator.add(Kernel("gpu", f"narrowgate.ops.elementwise.gpu:{_operator.name}", refuse=_unfit))


def silu(x: Tensor, out: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """x / (1 + exp(-x)).

    x: any shape, float32, bfloat16 or float16, rows may be strided. Returns x's shape and dtype, or fills `out` (any of the
    three dtypes; `out=x` works in place). The reference rounds once, from float64. Raises InputError. Source: SPEC C4.

    >>> silu(torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.7311])
    """
    return _silu(x, impl=impl, out=out)


def silu_mul(x: Tensor, out: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """silu(x[..., :I]) * x[..., I:]: the first half is the gate, the second is gated.

    x: [..., 2 * I] float32, bfloat16 or float16, rows may be strided. silu is rounded to float32, multiplied in float32,
    rounded once more to the output's dtype: x's, or that of `out` (any of the three). Raises InputError. Source: SPEC B27.

    >>> silu_mul(torch.tensor([0.0, 1.0, 5.0, 2.0]))
    tensor([0.0000, 1.4621])
    """
    return _silu_mul(x, impl=impl, out=out)


def relu2(x: Tensor, out: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """max(x, 0)^2.

    x: any shape, float32, bfloat16 or float16, rows may be strided. Returns x's shape and dtype, or fills `out` (any of
    the three dtypes). Squared in float32. Raises InputError. Source: SPEC B27.

    >>> relu2(torch.tensor([-2.0, 3.0]))
    tensor([0., 9.])
    """
    return _relu2(x, impl=impl, out=out)


def scale(x: Tensor, s: float, out: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """x * s, where s is first rounded to float32: one float32 product.

    x: any shape, float32, bfloat16 or float16, rows may be strided. Returns x's shape and dtype, or fills `out` (any of
    the three dtypes; `out=x` works in place). Raises InputError. Source: SPEC C5.

    >>> scale(torch.tensor([1.0, -2.0]), 0.5)
    tensor([ 0.5000, -1.0000])
    """
    return _scale(x, s, impl=impl, out=out)


def convert(x: Tensor, dtype: torch.dtype, out: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """x in another float dtype: to nearest, ties to even, and a NaN stays a NaN (with the upper bits of its payload).

    x: any shape, float32, bfloat16 or float16, rows may be strided. dtype: one of the three; `out`, if given, has it.
    Overflow gives an infinity. Raises InputError. Source: SPEC C6, C16.

    >>> convert(torch.tensor([1.0, float("nan")]), torch.bfloat16)
    tensor([1., nan], dtype=torch.bfloat16)
    """
    return _convert(x, dtype, impl=impl, out=out)
