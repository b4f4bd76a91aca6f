"""embedding: rows of a packed table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgate.dispatch import Kernel, Operator, checks_values
from narrowgate.errors import InputError
from narrowgate.ops import checks
from narrowgate.ops.host import host_kernel
from narrowgate.ops.ready import Ready, plain
from narrowgate.packing import Operand, flatten, operand_shape
from narrowgate.packing.decode import rows_refusal


def _check(ids: Tensor, table: list[Tensor], table_format: str, *, dtype: torch.dtype | None = None) -> None:
    shape = operand_shape(table, table_format)
    checks.dtype("embedding", "ids", ids, checks.INDICES)
    checks.expect("embedding", len(shape) == 2, f"expected a table of shape [rows, K], got {list(shape)}")
    checks.device("embedding", ids, table=table[0])
    if table_format == "dense":
        checks.dtype("embedding", "table", table[0])
    if dtype is not None and dtype not in checks.FLOATS:
        raise InputError(f"embedding: expected dtype float32, bfloat16 or float16, got {dtype}")


def _check_values(ids: Tensor, table: list[Tensor], table_format: str, *, dtype: torch.dtype | None = None) -> None:
    if checks_values(ids) and ids.numel():
        rows, low, high = operand_shape(table, table_format)[0], int(ids.min()), int(ids.max())
        checks.expect("embedding", low >= 0 and high < rows, f"expected ids in [0, {rows}), got {low if low < 0 else high}")


def _allocate(ids: Tensor, table: list[Tensor], table_format: str, *, dtype: torch.dtype | None = None) -> Tensor:
    return table[0].new_empty((*ids.shape, operand_shape(table, table_format)[1]), dtype=dtype or torch.float32)


def _flatten(ids: Tensor, table: Operand, *, dtype: torch.dtype = torch.float32) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (ids, *flatten(table)), {"dtype": dtype}


_embedding = Operator(
    "embedding", "Tensor ids, Tensor[] table, str table_format, *, ScalarType? dtype=None",
    "narrowgate.ops.embedding.reference:embedding",
    allocate=_allocate, check=_check, check_values=_check_values, flatten=_flatten, remember=True,
)  # fmt: skip


def _gpu_refusal(ids: Tensor, table: list[Tensor], table_format: str, *, dtype: torch.dtype | None = None) -> list[str]:
    strided = table_format == "dense" and not table[0].is_contiguous()
    return ["expected a contiguous dense table"] if strided else []


_embedding.add(Kernel("gpu", "narrowgate.ops.embedding.gpu:embedding", refuse=_gpu_refusal))


def embedding(
    ids: Tensor, table: Operand, *, dtype: torch.dtype = torch.float32, out: Tensor | None = None, impl: str | None = None
) -> Tensor:
    """Row `id` of the table, decoded: f32(f32(code - zero point) * scale) + offset, two roundings, never fused.

    Without an offset +0.0 is added all the same, so that this alone turns -0.0 into +0.0 (SPEC C12).
    ids: int32 or int64, any shape; on the CPU out-of-range ids raise, on a GPU their rows are zero. table: [rows, K] packed
    or dense. Returns ids.shape + [K] in `dtype`, rounded once, or fills `out`. Raises InputError. Source: SPEC C10-C15.

    >>> import narrowgate as ng
    >>> table = ng.quantize(torch.tensor([[1.0, -2.0], [0.0, 3.0]]), "bf16")
    >>> embedding(torch.tensor([1, 0]), table)
    tensor([[ 0.,  3.],
            [ 1., -2.]])
    """
    calls, key = _ready.find(table) if impl is None and out is None else None, None
    if calls is not None and plain(ids):
        key = (ids.shape, ids.dtype, dtype)
        if (call := calls.get(key)) is not None and (rows := call(ids)) is not None:
            return rows
    rows = _embedding(ids, *flatten(table), dtype=dtype, out=out, impl=impl)
    if calls is not None and key is not None and key not in calls:
        _ready.make(calls, key, ids.shape, dtype)
    return rows


def _refuse(ids: Tensor, table: list[Tensor], table_format: str, *, dtype: torch.dtype | None = None) -> tuple[str, ...]:
    return rows_refusal(table_format)


_embedding.add(host_kernel("narrowgate.ops.embedding.cpu:embedding", refuse=_refuse))
_ready = Ready(_embedding, "narrowgate.ops.embedding.cpu:ready")
