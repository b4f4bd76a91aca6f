"""The two feed-forward blocks: one gated MLP, or a router over many of them with one that all tokens share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from narrowgate import ops
from narrowgate.nn.apart import apart
from narrowgate.nn.gating import sigmoid
from narrowgate.nn.linear import PackedExperts, PackedLinear, Projections

FEW = 128  # pairs of a token and an expert that mlp_gpu.py's kernels compare with one another


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
        logits = self.router(x, out_dtype=torch.float32)
        if x.is_cuda and not self.gate_up.batch_invariant and 0 < x.shape[0] * self.top_k <= FEW:
            return self._mix_few(x, logits)
        weights, experts = route(logits, self.top_k, self.normalise)
        order = experts.reshape(-1).argsort(stable=True)
        sizes = torch.zeros(logits.shape[-1], dtype=torch.int32, device=x.device)  # not bincount, which makes a GPU wait
        sizes.scatter_add_(0, experts.reshape(-1), torch.ones_like(order, dtype=torch.int32))
        rows = self.down(gated(self.gate_up(x[order // self.top_k], sizes)), sizes)
        spread = torch.empty_like(rows)
        spread[order] = rows
        chosen = (spread.view(*experts.shape, -1).float() * weights[..., None]).sum(1)
        shared = self.shared(x).float() * sigmoid(self.shared_gate(x, out_dtype=torch.float32))
        return (chosen + shared).to(x.dtype)

    def _mix_few(self, x: Tensor, logits: Tensor) -> Tensor:
        """The same in few launches (mlp_gpu.py), for the tokens of a decoding step."""
        from narrowgate.nn.mlp_gpu import choose, mix

        weights, tokens, places, sizes = choose(logits, self.top_k, self.normalise)
        rows = self.down(gated(self.gate_up(x.index_select(0, tokens), sizes)), sizes)
        return mix(rows, weights, places, self.shared(x), self.shared_gate(x, out_dtype=torch.float32), x.dtype)


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
