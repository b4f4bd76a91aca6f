"""The gated delta layer: projections, short convolution, gates, the rule, gated norm, output projection.

The order of the math is the published one. Prefill and decoding use one arithmetic (float32 beta, q scaled after the norm),
so that they agree. The two families store the projections differently; each has a small module that gives the same four
tensors, and reorders activations rather than weights, so that a weight on disk, in memory and saved again is one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from narrowgate import ops
from narrowgate.nn.batch import Ragged
from narrowgate.nn.linear import PackedLinear, Projections
from narrowgate.nn.state import DeltaState, Mixer
from narrowgate.nn.weight import Weight
from narrowgate.ops.gated_delta_rule.layer import decode_layer


@dataclass(frozen=True)
class DeltaShape:
    """Value head h reads key head h // (v_heads // k_heads)."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int

    @property
    def key_size(self) -> int:
        return self.k_heads * self.k_dim

    @property
    def value_size(self) -> int:
        return self.v_heads * self.v_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_size + self.value_size


class SplitProjection(nn.Module):
    """Four matrices; the rows of `qkv` are all of q, then all of k, then all of v."""

    def __init__(self, qkv: PackedLinear, z: PackedLinear, b: PackedLinear, a: PackedLinear) -> None:
        super().__init__()
        self.qkvz, self.ba = Projections(qkv, z), Projections(b, a)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mixed, z = self.qkvz.apart(x)
        b, a = self.ba.apart(x)
        return mixed, z, b, a


class GroupedProjection(nn.Module):
    """Two matrices whose rows are grouped by KEY head: [q | k | its v's | its z's] and [its b's | its a's]."""

    def __init__(self, qkvz: PackedLinear, ba: PackedLinear, shape: DeltaShape) -> None:
        super().__init__()
        self.qkvz, self.ba, self.shape = qkvz, ba, shape

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        s, tokens = self.shape, x.shape[0]
        values = s.value_size // s.k_heads
        grouped = self.qkvz(x).view(tokens, s.k_heads, 2 * s.k_dim + 2 * values)
        q, k, v, z = grouped.split([s.k_dim, s.k_dim, values, values], dim=-1)
        b, a = self.ba(x).view(tokens, s.k_heads, -1).chunk(2, dim=-1)
        mixed = torch.cat([t.reshape(tokens, -1) for t in (q, k, v)], dim=-1)
        return mixed, z.reshape(tokens, -1), b.reshape(tokens, -1), a.reshape(tokens, -1)


class GatedDeltaNet(Mixer):
    """x [T, hidden] -> [T, hidden]; the state's slots are updated in place."""

    def __init__(
        self, shape: DeltaShape, project: nn.Module, conv: Weight, A_log: Weight, dt_bias: Weight, norm: Weight,
        out_proj: PackedLinear, eps: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.shape, self.eps = shape, eps
        self.project, self.out_proj = project, out_proj
        self.conv, self.A_log, self.dt_bias, self.norm = conv, A_log, dt_bias, norm

    def new_state(self, slots: int, dtype: torch.dtype, device: torch.device, pooled: bool = False) -> DeltaState:
        s = self.shape
        return DeltaState(slots, s.conv_channels, s.conv_width, s.k_heads, s.v_heads, s.v_dim, s.k_dim, device)

    def forward(self, x: Tensor, batch: Ragged, state: DeltaState) -> Tensor:
        s, tokens = self.shape, x.shape[0]
        mixed, z, b, a = self.project(x)
        weight, norm = self.conv.dense().view(s.conv_channels, s.conv_width), self.norm.dense()
        A_log, dt_bias, scale = self.A_log.dense(), self.dt_bias.dense(), s.k_dim**-0.5
        z, indices = z.view(tokens, s.v_heads, s.v_dim), batch.state_indices
        if batch.one_each:
            y = decode_layer(
                mixed, z, a, b, weight, state.conv, A_log, dt_bias, norm, state.rule, state.arrivals, indices,
                num_k_heads=s.k_heads, scale=scale, eps=self.eps,
            )  # fmt: skip
        else:
            mixed = ops.causal_conv1d(mixed, weight, None, state.conv, batch.cu_seqlens, state_indices=indices)
            q, k, v, g, beta = ops.gdn_post_conv(
                mixed, a, b, A_log, dt_bias, num_k_heads=s.k_heads, head_k_dim=s.k_dim, head_v_dim=s.v_dim
            )
            y = ops.gated_delta_rule(q, k, v, g, beta, state.rule, batch.cu_seqlens, scale=scale, state_indices=indices)
            y = ops.rms_norm_gated(y, z, norm, eps=self.eps)
        return self.out_proj(y.reshape(tokens, s.value_size))
