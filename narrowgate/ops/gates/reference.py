"""The gates, to be read: float64 inside, one rounding at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.ops import rounded


def gdn_decay(alpha: Tensor, dt_bias: Tensor, neg_a: Tensor, *, out: Tensor) -> None:
    x = alpha.double() + dt_bias.double()
    out.copy_((rounded.softplus64(x) * neg_a.double()).float())


def gdn_gate(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, out: tuple[Tensor, Tensor]) -> None:
    g, beta = out
    gdn_decay(a, dt_bias, -torch.exp(A_log.double()), out=g)
    beta.copy_(rounded.sigmoid(b))
