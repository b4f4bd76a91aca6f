"""dequantize: the packed operand as a dense tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.dispatch import Kernel, Operator
from narrowgate.errors import InputError
from narrowgate.ops import checks
from narrowgate.ops.host import host_kernel
from narrowgate.packing import PackedTensor, flatten, operand_shape
from narrowgate.packing.decode import rows_refusal


def _check(w: list[Tensor], w_format: str, *, dtype: torch.dtype | None = None) -> None:
    checks.expect("dequantize", w_format != "dense", "expected a packed tensor, got a dense one")
    if dtype is not None and dtype not in checks.FLOATS:
        raise InputError(f"dequantize: expected dtype float32, bfloat16 or float16, got {dtype}")


def _allocate(w: list[Tensor], w_format: str, *, dtype: torch.dtype | None = None) -> Tensor:
    return w[0].new_empty(operand_shape(w, w_format), dtype=dtype or torch.float32)


def _flatten(w: PackedTensor, *, dtype: torch.dtype | None = None):  # type: ignore[no-untyped-def]
    return flatten(w), {"dtype": dtype}


_dequantize = Operator(
    "dequantize", "Tensor[] w, str w_format, *, ScalarType? dtype=None",
    "narrowgate.ops.dequantize.reference:dequantize", allocate=_allocate, check=_check, flatten=_flatten, remember=True,
)  # fmt: skip
_dequantize.add(Kernel("gpu", "narrowgate.ops.dequantize.gpu:dequantize"))


def dequantize(
    w: PackedTensor, *, dtype: torch.dtype = torch.float32, out: Tensor | None = None, impl: str | None = None
) -> Tensor:
    """Decode every code, subtract the zero point, multiply by each scale, innermost first, add the offset; round once.

    Each of those is one float32 rounding, never fused, so the float32 bits are the same everywhere (NaN payloads aside).
    w: packed, any shape. Returns the same shape in `dtype` (float32, bfloat16, float16), or fills `out`. Raises InputError.
    Source: SPEC A7-A14, C10.

    >>> import narrowgate as ng
    >>> dequantize(ng.pack(torch.tensor([[1, 15]]), "int4"))
    tensor([[ 1., -1.]])
    """
    return _dequantize(*flatten(w), dtype=dtype, out=out, impl=impl)


def _refuse(w: list[Tensor], w_format: str, *, dtype: torch.dtype | None = None) -> tuple[str, ...]:
    return rows_refusal(w_format)


_dequantize.add(host_kernel("narrowgate.ops.dequantize.cpu:dequantize", refuse=_refuse))
