"""Linear layers and embeddings over a weight that may be packed or dense. All the arithmetic is in the operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from narrowgate import ops
from narrowgate.nn.weight import Weight
from narrowgate.packing import PackedTensor
from narrowgate.packing.join import join_rows


class PackedLinear(nn.Module):
    """y = x @ w.T + bias, x [..., K], w [N, K] packed or dense, read exactly and accumulated in float32."""

    def __init__(self, weight: Weight, bias: Weight | None = None, *, batch_invariant: bool = False) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.batch_invariant = batch_invariant

    @property
    def rows(self) -> int:
        """How many outputs."""
        return self.weight.shape[0]

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        bias = None if self.bias is None else self.bias.dense()
        return ops.linear(x, self.weight(), bias, out_dtype=out_dtype, batch_invariant=self.batch_invariant)


class Projections(nn.Module):
    """Several linear layers of one input: one product where `join` found that their weights fit under one another."""

    def __init__(self, *parts: PackedLinear) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.whole: PackedLinear | None = None

    def join(self) -> None:
        """Store the (prepared) weights in one piece of memory, of which each is then a part."""
        layers: list[PackedLinear] = list(self.parts)  # type: ignore[arg-type]
        found = _joined([layer.weight() for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        if found is None or len(biases) not in (0, len(layers)):
            return
        whole, views = Weight(found[0]), found[1]
        edges = torch.tensor([0, *(layer.rows for layer in layers)]).cumsum(0).tolist()
        for i, layer in enumerate(layers):
            if views is None:
                layer.weight.lend(whole, edges[i], edges[i + 1])
            else:
                layer.weight.share(views[i])
        bias = Weight(torch.cat([b.dense() for b in biases])) if biases else None
        self.whole = PackedLinear(whole, bias, batch_invariant=layers[0].batch_invariant)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of the parts side by side, [..., sum of their rows]."""
        return torch.cat([part(x) for part in self.parts], dim=-1) if self.whole is None else self.whole(x)

    def apart(self, x: Tensor) -> Sequence[Tensor]:
        """The outputs of the parts; rows may be strided."""
        if self.whole is None:
            return [part(x) for part in self.parts]
        return self.whole(x).split([part.rows for part in self.parts], dim=-1)


def _joined(
    values: Sequence[PackedTensor | Tensor],
) -> tuple[PackedTensor | Tensor, Sequence[PackedTensor | Tensor] | None] | None:
    """(the matrices one under another, views of it that they are, if they are), or None where they do not fit."""
    packed = [v for v in values if isinstance(v, PackedTensor)]
    if len(packed) == len(values):
        return join_rows(packed)
    dense = [v for v in values if isinstance(v, Tensor)]
    if packed or len({v.dtype for v in dense}) > 1:
        return None
    whole = torch.cat(dense)
    return whole, whole.split([len(v) for v in dense])


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
