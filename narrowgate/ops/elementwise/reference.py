"""The elementwise steps, to be read. Math in float32 (exp in float64, rounded once); NaN stays NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.ops import rounded


def silu(x: Tensor, *, out: Tensor) -> None:
    out.copy_(rounded.silu(x))


def silu_mul(x: Tensor, *, out: Tensor) -> None:
    gate, up = x.float().chunk(2, dim=-1)
    out.copy_(rounded.silu(gate) * up)


def relu2(x: Tensor, *, out: Tensor) -> None:
    out.copy_(x.float().relu().square())


def scale(x: Tensor, s: float, *, out: Tensor) -> None:
    out.copy_(x.float() * torch.tensor(s, dtype=torch.float32, device=x.device))


def convert(x: Tensor, dtype: torch.dtype, *, out: Tensor) -> None:
    if dtype == torch.bfloat16 and x.dtype != torch.bfloat16:
        out.copy_(_to_bfloat16(x.float()))
    else:
        out.copy_(x if dtype == x.dtype else x.float().to(dtype))


def _to_bfloat16(x: Tensor) -> Tensor:
    """Round to nearest, ties to even, on the bits; a NaN keeps its sign and upper payload, made quiet (SPEC C16)."""
    u = x.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    rounded_up = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
    code = torch.where((u & 0x7FFFFFFF) > 0x7F800000, (u >> 16) | 64, rounded_up)
    return code.to(torch.uint16).view(torch.bfloat16)
