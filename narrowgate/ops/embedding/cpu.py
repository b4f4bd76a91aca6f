"""embedding on the CPU: the rows asked for, decoded in place with no fused operation, and +0.0 added."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from narrowgate.packing import PackedTensor, unflatten
from narrowgate.packing.decode import RUNS
from narrowgate.packing.decode_run_cpu import Reading, decode_into


def embedding(ids: Tensor, table: list[Tensor], table_format: str, *, dtype: torch.dtype | None = None, out: Tensor) -> None:
    packed, rows = unflatten(table, table_format), ids.reshape(-1)
    if out.numel() == 0:
        return
    if not isinstance(packed, PackedTensor):
        out.copy_((packed.index_select(0, rows).float() + 0.0).view(out.shape))
        return
    whole = out.is_contiguous()
    dense = out if whole else torch.empty_like(out, memory_format=torch.contiguous_format)
    decode_into(packed, dense.view(-1, dense.shape[-1]), ids=rows.contiguous(), positive=True)
    if not whole:
        out.copy_(dense)


def ready(
    table: list[Tensor], table_format: str, shape: torch.Size, dtype: torch.dtype
) -> Callable[[Tensor], Tensor | None] | None:
    """A call of `embedding` on contiguous ids of one shape, as call(ids) -> rows; None instead of rows where an id is none of the
    table's. None for a table whose scales are decoded for the rows that are asked for."""
    packed, n = unflatten(table, table_format), shape.numel()
    if not isinstance(packed, PackedTensor) or packed.layout not in RUNS or 0 in (*shape, packed.shape[-1]):
        return None
    reading = Reading(packed, slice(0, 1), positive=True)
    if not reading.lasting:
        return None
    size, rows = (*shape, packed.shape[-1]), (n, packed.shape[-1])

    def call(ids: Tensor) -> Tensor | None:
        nonlocal reading
        if reading.changed():
            reading = Reading(packed, slice(0, 1), positive=True)
        out = packed.data.new_empty(rows, dtype=dtype)
        if not reading.into(out, 0, ids):
            return None
        return out if len(shape) == 1 else out.view(size)

    return call
