"""embedding on the CPU: the rows asked for, decoded in place with no fused operation, and +0.0 added."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.packing import PackedTensor, unflatten
from narrowgate.packing.decode_run_cpu import decode_into


def embedding(ids: Tensor, table: list[Tensor], table_format: str, *, dtype: torch.dtype | None = None, out: Tensor) -> None:
    packed, rows = unflatten(table, table_format), ids.reshape(-1)
    if out.numel() == 0:
        return
    if not isinstance(packed, PackedTensor):
        out.copy_((packed.index_select(0, rows).float() + 0.0).view(out.shape))
        return
    whole = out.is_contiguous()
    dense = out if whole else torch.empty_like(out, memory_format=torch.contiguous_format)
    decode_into(packed, dense.view(-1, dense.shape[-1]), ids=rows.to(torch.int64).contiguous(), positive=True)
    if not whole:
        out.copy_(dense)
