"""What a gated delta layer does to one token a row between its products, as one call: below the operators, for a runner whose
shapes were checked when it was built. On a GPU few rows take one launch; elsewhere the four operators run one after another. The
bits are theirs in any case."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.ops.causal_conv1d.op import causal_conv1d_step
from narrowgate.ops.gated_delta_rule.op import gated_delta_rule_step
from narrowgate.ops.host import has_triton
from narrowgate.ops.norms.op import rms_norm_gated
from narrowgate.ops.post_conv.op import gdn_post_conv

FEW = 4  # rows
WIDEST = 128  # values of a key and of a value that the one launch takes


def decode_layer(
    mixed: Tensor, z: Tensor, a: Tensor, b: Tensor, weight: Tensor, taps: Tensor, A_log: Tensor, dt_bias: Tensor, norm: Tensor,
    state: Tensor, arrivals: Tensor, state_indices: Tensor, *, num_k_heads: int, scale: float, eps: float,
) -> Tensor:  # fmt: skip
    """`causal_conv1d_step` (silu, no bias), `gdn_post_conv`, `gated_delta_rule_step`, `rms_norm_gated` (silu), bit for bit.

    mixed: [B, 2 * Hk * K + Hv * V], rows of [q | k | v]; z: [B, Hv, V]; a, b: [B, Hv]; of one dtype, rows may be strided.
    weight: [C, W]; A_log, dt_bias: [Hv]; norm: [V]. taps: [slots, C, W - 1] and state: [slots, Hv, V, K], both changed in
    place at state_indices [B], where a negative one is no slot. arrivals: int32 [slots, Hk], zeros, which the programs of a
    launch count in and leave zero: two calls at once may share it only as they may share states. Returns [B, Hv, V]."""
    if not in_one_launch(mixed, taps, state):
        return composed(
            mixed, z, a, b, weight, taps, A_log, dt_bias, norm, state, state_indices,
            num_k_heads=num_k_heads, scale=scale, eps=eps,
        )  # fmt: skip
    from narrowgate.ops.gated_delta_rule import gpu_layer

    out = torch.empty(mixed.shape[0], *state.shape[1:3], dtype=mixed.dtype, device=mixed.device)
    gpu_layer.one_launch(
        mixed, z, a, b, weight, taps, A_log, dt_bias, norm, state, state_indices, arrivals, scale=scale, norm_eps=eps, out=out
    )
    return out


def in_one_launch(mixed: Tensor, taps: Tensor, state: Tensor) -> bool:
    """Whether one launch takes a call, and wins: with many rows the operators keep a card as busy."""
    _, _, values, keys = state.shape
    fits = WIDEST // 2 < keys <= WIDEST and values <= WIDEST and taps.shape[0] == state.shape[0]
    return fits and mixed.shape[0] <= FEW and mixed.is_cuda and has_triton()


def composed(
    mixed: Tensor, z: Tensor, a: Tensor, b: Tensor, weight: Tensor, taps: Tensor, A_log: Tensor, dt_bias: Tensor, norm: Tensor,
    state: Tensor, state_indices: Tensor, *, num_k_heads: int, scale: float, eps: float, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """The four operators: what `decode_layer` is held to."""
    _, _, v_dim, k_dim = state.shape
    x = causal_conv1d_step(mixed, weight, None, taps, state_indices=state_indices, impl=impl)
    q, k, v, g, beta = gdn_post_conv(
        x, a, b, A_log, dt_bias, num_k_heads=num_k_heads, head_k_dim=k_dim, head_v_dim=v_dim, impl=impl
    )
    y = gated_delta_rule_step(q, k, v, g, beta, state, scale=scale, state_indices=state_indices, impl=impl)
    return rms_norm_gated(y, z, norm, eps=eps, impl=impl)
