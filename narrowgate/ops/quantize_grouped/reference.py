"""quantize_grouped, to be read: the activation (if any), the rows that count, one block after the other, the two byte orders.

Nothing on the way reads a value back, except that on the CPU the block quantizer looks for what is not finite and raises."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.dispatch import checks_values
from narrowgate.ops.elementwise import reference as elementwise
from narrowgate.packing import pack_fp6_grouped, swizzle_128x4
from narrowgate.packing.swizzle import swizzled_view
from narrowgate.quantize import quantize_microscaling


def quantize_grouped(
    x: Tensor, row_counts: Tensor, fmt: str, *, global_scale: Tensor, activation: str | None = None,
    bf16_round: bool = False, out: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    groups, rows = x.shape[:2]
    counted = torch.arange(rows, device=x.device) < row_counts[:, None]  # [G, R]
    x = torch.where(counted[..., None], x, 0)  # whatever lies beyond, NaN too, is dropped before it meets anything
    if activation is not None:
        made = x.new_empty(*x.shape[:-1], x.shape[-1] // 2) if activation == "silu_mul" else torch.empty_like(x)
        getattr(elementwise, activation)(x, out=made)  # rounds to x's dtype
        x = made
    scale = global_scale.expand(groups)[:, None].expand(groups, rows)
    codes, bytes_ = quantize_microscaling(
        x, scale, fmt, bf16_round=bf16_round, non_finite="raise" if checks_values(x) else "saturate"
    )
    out[0].copy_(codes.permute(1, 2, 0) if fmt == "e4m3" else pack_fp6_grouped(codes))
    out[1].view(torch.uint8).copy_(swizzled_view(swizzle_128x4(bytes_), rows, bytes_.shape[-1]))
