"""What follows the convolution, to be read: the parts of a row, and the three steps that the fused operator joins."""

from __future__ import annotations

from torch import Tensor

from narrowgate.ops.gates.reference import gdn_gate
from narrowgate.ops.norms.reference import l2_norm


def parts(mixed: Tensor, num_k_heads: int, head_k_dim: int, head_v_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q [T, Hk, K], k [T, Hk, K] and v [T, Hv, V] in rows of [q | k | v]."""
    keys = num_k_heads * head_k_dim
    values = mixed.shape[1] - 2 * keys
    q, k, v = mixed.split([keys, keys, values], dim=1)
    heads = (num_k_heads, head_k_dim)
    return q.unflatten(1, heads), k.unflatten(1, heads), v.unflatten(1, (values // head_v_dim, head_v_dim))


def split_qkv(mixed: Tensor, *, num_k_heads: int, head_k_dim: int, head_v_dim: int, out: tuple[Tensor, Tensor, Tensor]) -> None:
    for to, part in zip(out, parts(mixed, num_k_heads, head_k_dim, head_v_dim), strict=True):
        to.copy_(part)


def gdn_post_conv(
    conv_out: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, num_k_heads: int, head_k_dim: int,
    head_v_dim: int, eps: float = 1e-6, out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    q, k, v = parts(conv_out, num_k_heads, head_k_dim, head_v_dim)
    l2_norm(q, eps=eps, out=out[0])
    l2_norm(k, eps=eps, out=out[1])
    out[2].copy_(v)
    gdn_gate(a, b, A_log, dt_bias, out=out[3:])
