"""Linear layers and embeddings over a weight that may be packed or dense. All the arithmetic is in the operators."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from narrowgate import ops
from narrowgate.nn.weight import Weight


class PackedLinear(nn.Module):
    """y = x @ w.T + bias, x [..., K], w [N, K] packed or dense, read exactly and accumulated in float32."""

    def __init__(self, weight: Weight, bias: Weight | None = None, *, batch_invariant: bool = False) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.batch_invariant = batch_invariant

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        bias = None if self.bias is None else self.bias.dense()
        return ops.linear(x, self.weight(), bias, out_dtype=out_dtype, batch_invariant=self.batch_invariant)


class PackedExperts(nn.Module):
    """One linear layer an expert, w [E, N, K]: x [T, K] comes sorted by expert, group_sizes [E] says how many rows each has."""

    def __init__(self, weight: Weight, *, batch_invariant: bool = False) -> None:
        super().__init__()
        self.weight = weight
        self.batch_invariant = batch_invariant

    def forward(self, x: Tensor, group_sizes: Tensor) -> Tensor:
        return ops.grouped_linear(x, self.weight(), group_sizes, batch_invariant=self.batch_invariant)


class PackedEmbedding(nn.Module):
    """Rows of a table [vocab, hidden] by token id, decoded to the activations' dtype. The table may also be the head's."""

    def __init__(self, weight: Weight, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        table = self.weight()
        if isinstance(table, Tensor):
            return table[ids].to(self.dtype)
        return ops.embedding(ids, table, dtype=self.dtype)
