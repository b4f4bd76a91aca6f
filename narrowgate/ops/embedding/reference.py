"""embedding, to be read: pick the rows, decode them, add +0.0."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.packing import PackedTensor, gather_rows, unflatten


def embedding(ids: Tensor, table: list[Tensor], table_format: str, *, dtype: torch.dtype | None = None, out: Tensor) -> None:
    packed = unflatten(table, table_format)
    flat = ids.reshape(-1)
    inside = (flat >= 0) & (flat < packed.shape[0])
    rows = torch.where(inside, flat, 0).long()
    values = gather_rows(packed, rows) if isinstance(packed, PackedTensor) else packed[rows].float()
    values = torch.where(inside[:, None], values, 0.0) + 0.0
    out.copy_(values.view(out.shape))
