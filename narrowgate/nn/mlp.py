"""The two feed-forward blocks: one gated MLP, or a router over many of them with one that all tokens share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from narrowgate import ops
from narrowgate.nn.apart import apart
from narrowgate.nn.gating import sigmoid
from narrowgate.nn.linear import PackedExperts, PackedLinear, Projections
from narrowgate.nn.weight import Weight
from narrowgate.packing import flatten

FEW = 128  # pairs of a token and an expert: as many as are multiplied where they are, each reading its expert's weight


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, gate the first half of the last axis and up the second, in float32, rounded once."""
    return ops.silu_mul(gate_up)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, gate_proj: PackedLinear, up_proj: PackedLinear, down_proj: PackedLinear) -> None:
        super().__init__()
        self.gate_up, self.down_proj = Projections(gate_proj, up_proj), down_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_up(x)))


class MoE(nn.Module):
    """Each token goes to its `top_k` experts, weighted by the router, and to the shared expert, weighted by its own gate.

    The rows of gate_up [E, 2I, hidden] are an expert's gate, then its up. `normalise`: the weights of a token sum to 1.
    """

    def __init__(
        self, router: PackedLinear, gate_up: PackedExperts, down: PackedExperts, shared: MLP, shared_gate: PackedLinear,
        top_k: int, normalise: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.router, self.gate_up, self.down = router, gate_up, down
        self.shared, self.shared_gate = shared, shared_gate
        self.top_k, self.normalise = top_k, normalise

    def forward(self, x: Tensor) -> Tensor:
        return apart(self._mix, x)

    def _mix(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.shape[0]:
            return self._mix_on_gpu(x)
        logits = self.router(x, out_dtype=torch.float32)
        weights, experts = route(logits, self.top_k, self.normalise)
        order = experts.reshape(-1).argsort(stable=True)
        sizes = torch.zeros(logits.shape[-1], dtype=torch.int32, device=x.device)  # bincount would read values
        sizes.scatter_add_(0, experts.reshape(-1), torch.ones_like(order, dtype=torch.int32))
        rows = self.down(gated(self.gate_up(x[order // self.top_k], sizes)), sizes)
        spread = torch.empty_like(rows)
        spread[order] = rows
        chosen = (spread.view(*experts.shape, -1).float() * weights[..., None]).sum(1)
        shared = self.shared(x).float() * sigmoid(self.shared_gate(x, out_dtype=torch.float32))
        return (chosen + shared).to(x.dtype)

    def _mix_on_gpu(self, x: Tensor) -> Tensor:
        """The same without a wait for the host. A few tokens meet their experts where they are; more of them are sorted."""
        from narrowgate.ops.experts import gpu_routing

        if x.shape[0] * self.top_k <= FEW and (found := self._in_place(x)) is not None:
            return gpu_routing.experts(found[0], x, found[1], found[2], self.top_k, self.normalise, *found[3])
        logits, gate = (layer(x, out_dtype=torch.float32) for layer in (self.router, self.shared_gate))
        weights, chosen = gpu_routing.choose(logits, gate, self.top_k, self.normalise)
        places, sizes = gpu_routing.sort(chosen, logits.shape[1])
        rows = self.down(gated(self.gate_up(gpu_routing.spread(x, places), sizes)), sizes)
        return gpu_routing.mix(rows, weights, places, self.shared(x), x.dtype)

    def _in_place(self, x: Tensor) -> tuple[Any, Tensor, Tensor, list[list[Tensor]]] | None:
        """What gpu_routing.experts takes: e, router, gate and the products' weights; None where it does not take these."""
        from narrowgate.ops.experts import gpu_experts_run

        router, gate = self.router.weight(), self.shared_gate.weight()
        whole = self.shared.gate_up.whole
        if self.gate_up.batch_invariant or x.dtype not in (torch.bfloat16, torch.float16) or whole is None:
            return None
        layers = (self.router, self.shared_gate, whole, self.shared.down_proj)
        if not isinstance(router, Tensor) or not isinstance(gate, Tensor) or any(layer.bias is not None for layer in layers):
            return None
        tensors, described = zip(*(flatten(w()) for w in self._products(whole)), strict=True)
        found, _ = gpu_experts_run.experts(*described)
        return None if found is None else (found, router, gate, list(tensors))

    def _products(self, whole: PackedLinear) -> list[Weight]:
        return [self.gate_up.weight, self.down.weight, whole.weight, self.shared.down_proj.weight]


def route(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Router logits [T, E] float32 -> weights float32 and expert ids int64, [T, top_k], heaviest first.

    Softmax over ALL experts, then the choice. Equal probabilities: the lower index first.

    >>> route(torch.tensor([[0.0, 1.0, 1.0, 0.0]]), 3, True)[1]
    tensor([[1, 2, 0]])
    """
    ranked, experts = logits.float().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    weights = ranked[:, :top_k]
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts[:, :top_k]
