"""dequantize, to be read: narrowgate.packing.decode is the definition, here a slice of rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.packing import PackedTensor, decode_rows, unflatten

ROWS = 1 << 22  # values decoded at a time, so that memory stays bounded


def dequantize(w: list[Tensor], w_format: str, *, dtype: torch.dtype | None = None, out: Tensor) -> None:
    packed = unflatten(w, w_format)
    assert isinstance(packed, PackedTensor)
    if out.numel() == 0:
        return
    flat = out.reshape(-1, out.shape[-1]) if out.is_contiguous() else torch.empty_like(out).view(-1, out.shape[-1])
    step = max(1, ROWS // out.shape[-1])
    for start in range(0, flat.shape[0], step):
        stop = min(start + step, flat.shape[0])
        flat[start:stop] = decode_rows(packed, start, stop)
    if not out.is_contiguous():
        out.copy_(flat.view(out.shape))
