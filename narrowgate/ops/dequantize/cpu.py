"""dequantize on the CPU: one pass over the rows, decoded and rounded once; every layout is read where it lies."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.packing import PackedTensor, unflatten
from narrowgate.packing.decode_run_cpu import decode_into


def dequantize(w: list[Tensor], w_format: str, *, dtype: torch.dtype | None = None, out: Tensor) -> None:
    packed = unflatten(w, w_format)
    assert isinstance(packed, PackedTensor)
    if out.numel() == 0:
        return
    whole = out.is_contiguous()
    dense = out if whole else torch.empty_like(out, memory_format=torch.contiguous_format)
    decode_into(packed, dense.view(-1, dense.shape[-1]))
    if not whole:
        out.copy_(dense)
