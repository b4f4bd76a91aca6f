"""The (1 + w) RMS norm that this family of models uses everywhere but inside the linear layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from narrowgate import ops
from narrowgate.nn.weight import Weight
from narrowgate.ops.host import has_triton


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (1 + w) over the last axis, in float32, one rounding to x's dtype."""

    def __init__(self, weight: Weight, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """The norm of x, or with `delta` of x += delta, which is left in x."""
        if delta is not None and x.is_cuda and has_triton():
            from narrowgate.ops.norms.gpu import add_rms_norm

            out = torch.empty_like(x)
            add_rms_norm(x, delta, self.weight.dense(), eps=self.eps, weight_bias=1.0, out=out)
            return out
        if delta is not None:
            x += delta
        return ops.rms_norm(x, self.weight.dense(), eps=self.eps, weight_bias=1.0)
