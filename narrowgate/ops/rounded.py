"""exp and its kin, computed in float64 and rounded once to float32.

Why not torch.sigmoid: its vector body and its scalar tail differ in the last bit, so that a value's result would depend on
where in the tensor it lies, and a row's on its neighbours. Through float64 the float32 result is the correctly rounded one
(but for about one value in 2^29), the same on every machine. Only references use this; kernels have their own exp."""

from __future__ import annotations

import torch
from torch import Tensor


def exp(x: Tensor) -> Tensor:
    return x.double().exp().float()


def sigmoid(x: Tensor) -> Tensor:
    return (1.0 / (1.0 + torch.exp(-x.double()))).float()


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x))."""
    x = x.double()
    return (x / (1.0 + torch.exp(-x))).float()


def softplus64(x: Tensor) -> Tensor:
    """x above 20, else log(1 + exp x): exp never overflows (SPEC C1, Z10). Stays in float64 for what follows."""
    x = x.double()
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x.clamp(max=20.0))))


def activate(x: Tensor, activation: str | None) -> Tensor:
    """silu, sigmoid, or nothing ("none", None). x is float32."""
    if activation in (None, "none"):
        return x
    return silu(x) if activation == "silu" else sigmoid(x)
