"""embedding on the GPU: rows by id through narrowgate.tile's row kernel; a dense table is read as one of 16- or 32-bit codes."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from narrowgate.tile.gpu_arg import bind
from narrowgate.tile.gpu_rows import decode_rows

_INTEGERS = {2: torch.int16, 4: torch.int32}


def embedding(ids: Tensor, table: list[Tensor], table_format: str, *, dtype: torch.dtype | None = None, out: Tensor) -> None:
    if out.numel() == 0:
        return
    if table_format == "dense":
        dense = table[0]
        record = {
            "element": str(dense.dtype).removeprefix("torch."),
            "layout": "rows@1",
            "shape": list(dense.shape),
            "scales": [],
        }
        table, table_format = [dense.view(_INTEGERS[dense.element_size()])], json.dumps(record)
    decode_rows(bind(table, table_format), out, ids.reshape(-1))
