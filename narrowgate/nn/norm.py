"""The (1 + w) RMS norm that this family of models uses everywhere but inside the linear layers."""

from __future__ import annotations

from torch import Tensor, nn

from narrowgate import ops
from narrowgate.nn.weight import Weight


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (1 + w) over the last axis, in float32, one rounding to x's dtype."""

    def __init__(self, weight: Weight, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight.dense(), eps=self.eps, weight_bias=1.0)
