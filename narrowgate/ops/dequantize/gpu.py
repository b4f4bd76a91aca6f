"""dequantize on the GPU: every row of the operand through narrowgate.tile's row kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.tile.gpu_arg import bind
from narrowgate.tile.gpu_rows import decode_rows


def dequantize(w: list[Tensor], w_format: str, *, dtype: torch.dtype | None = None, out: Tensor) -> None:
    if out.numel():
        decode_rows(bind(w, w_format), out)
