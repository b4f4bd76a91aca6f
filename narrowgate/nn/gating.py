"""The sigmoid of the gates. torch.sigmoid's vector body and scalar tail differ in the last bit, so that a row would depend on
where in the batch it lies; exp, a sum and a division do not."""

from __future__ import annotations

from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), float32."""
    return 1.0 / (1.0 + (-x.float()).exp())
