"""The norms, to be read. Each writes into `out`, so that it has the kernels' signature."""

from __future__ import annotations

from torch import Tensor

from narrowgate.ops.rounded import activate


def l2_norm(x: Tensor, *, eps: float = 1e-6, out: Tensor) -> None:
    x = x.float()
    out.copy_(x / (x.square().sum(-1, keepdim=True) + eps).sqrt())


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float, weight_bias: float = 0.0, out: Tensor) -> None:
    y = _over_rms(x, eps)
    out.copy_(y if weight is None else y * (weight.float() + weight_bias))


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, activation: str = "silu", out: Tensor) -> None:
    y = _over_rms(x, eps) * weight.float()
    out.copy_(y * activate(gate.float().reshape(x.shape), activation))


def _over_rms(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x / (x.square().sum(-1, keepdim=True) / max(x.shape[-1], 1) + eps).sqrt()
