"""Gated attention: per-head norms, rotary embedding of a part of each head, grouped heads, a sigmoid gate on the output.

Each sequence attends to its own past only; scores, softmax and sums are float32. Queries go in slices, so that the scores
of a long prompt never need more than a fixed amount of memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from narrowgate.nn.apart import apart
from narrowgate.nn.batch import Ragged, rotate
from narrowgate.nn.gating import sigmoid
from narrowgate.nn.linear import PackedLinear, Projections
from narrowgate.nn.norm import RMSNorm
from narrowgate.nn.state import KeyValues, Mixer, PooledKeyValues
from narrowgate.ops.host import missing

_SCORES = 1 << 24  # scores held at once


@dataclass(frozen=True)
class AttentionShape:
    """Query head h reads key head h // (heads // kv_heads)."""

    heads: int
    kv_heads: int
    dim: int


class GatedAttention(Mixer):
    """x [T, hidden] -> [T, hidden]. The rows of q_proj are, head by head, [dim of query | dim of gate]."""

    def __init__(
        self, shape: AttentionShape, q_proj: PackedLinear, k_proj: PackedLinear, v_proj: PackedLinear,
        o_proj: PackedLinear, q_norm: RMSNorm, k_norm: RMSNorm,
    ) -> None:  # fmt: skip
        super().__init__()
        self.shape = shape
        self.qkv, self.o_proj = Projections(q_proj, k_proj, v_proj), o_proj
        self.q_norm, self.k_norm = q_norm, k_norm

    def new_state(
        self, slots: int, dtype: torch.dtype, device: torch.device, pooled: bool = False
    ) -> KeyValues | PooledKeyValues:  # fmt: skip
        kind = PooledKeyValues if pooled else KeyValues
        return kind(slots, self.shape.kv_heads, self.shape.dim, dtype, device)

    def forward(self, x: Tensor, batch: Ragged, state: KeyValues | PooledKeyValues) -> Tensor:
        s, tokens = self.shape, x.shape[0]
        mixed, k, v = self.qkv.apart(x)
        q, gate = mixed.view(tokens, s.heads, 2 * s.dim).chunk(2, dim=-1)
        k = self.k_norm(k.view(tokens, s.kv_heads, s.dim))
        read = partial(self._read, batch, state)
        y = apart(read, self.q_norm(q), gate, k, v.view(tokens, s.kv_heads, s.dim))
        return self.o_proj(y.view(tokens, s.heads * s.dim))

    def _read(
        self, batch: Ragged, state: KeyValues | PooledKeyValues, q: Tensor, gate: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:  # fmt: skip
        """Rotate, remember, attend, gate: [T, heads, dim] in the dtype of k."""
        if batch.positions is not None:
            assert isinstance(state, PooledKeyValues)
            return attend_pooled(q, gate, k, v, state.pool, batch)
        if batch.one_each and isinstance(state, KeyValues) and _has_kernel(q, k):
            from narrowgate.nn.attention_cpu import step

            buffers = [state.room(slot, past, 1) for slot, past in zip(batch.slots, batch.past, strict=True)]
            return step(q, gate, k, v, buffers, batch.past, batch.cos, batch.sin)
        q, dtype = rotate(q.float(), batch.cos, batch.sin), k.dtype
        k = rotate(k.float(), batch.cos, batch.sin).to(dtype)
        y = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        for start, length, slot, past in zip(batch.starts, batch.lengths, batch.slots, batch.past, strict=True):
            rows = slice(start, start + length)
            if length:
                keys, values = state.append(slot, past, k[rows], v[rows])
                if q.is_cuda and not past and dtype != torch.float32:
                    _library(q[rows], keys, values, y[rows])
                else:
                    attend(q[rows], keys, values, y[rows])
        return (y * sigmoid(gate)).to(dtype)


def _has_kernel(q: Tensor, k: Tensor) -> bool:
    """Whether a step on the CPU has a compiled kernel: for q [n, H, D] and k [n, Hkv, D]."""
    if q.device.type != "cpu" or q.shape[0] == 0 or missing():
        return False
    from narrowgate.nn.attention_cpu import takes

    return takes(q, k)


def attend_pooled(q: Tensor, gate: Tensor, k: Tensor, v: Tensor, pool: Tensor, batch: Ragged) -> Tensor:
    """`_read` for one new token each of n sequences, the same work whatever their lengths: q, gate [n, H, D], k, v [n, Hkv, D],
    pool [slots, 2, Hkv, capacity, D], which takes the new keys and values at `batch.positions`. Nothing is read by Python.

    On a GPU three kernels (attention_gpu.py); elsewhere all of the capacity is read and what is not yet there masked."""
    assert batch.positions is not None
    if q.is_cuda:
        from narrowgate.nn.attention_gpu import step

        return step(q, gate, k, v, pool, batch.state_indices, batch.positions, batch.cos, batch.sin)
    slots, positions, dtype = batch.state_indices.long(), batch.positions, k.dtype
    q, k = rotate(q.float(), batch.cos, batch.sin), rotate(k.float(), batch.cos, batch.sin).to(dtype)
    (n, heads, dim), kv_heads = q.shape, k.shape[1]
    pool[slots, 0, :, positions] = k
    pool[slots, 1, :, positions] = v
    keys, values = pool[slots].float().unbind(1)
    scores = torch.matmul(q.view(n, kv_heads, heads // kv_heads, dim) * dim**-0.5, keys.transpose(-1, -2))
    ahead = torch.arange(pool.shape[3], device=q.device) > positions[:, None]
    weights = scores.masked_fill(ahead[:, None, None], float("-inf")).softmax(dim=-1)
    return (torch.matmul(weights, values).view(n, heads, dim) * sigmoid(gate)).to(dtype)


def _library(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """`attend` for a sequence without a past in a 16-bit dtype: the library's kernel, 16-bit operands, float32 sums."""
    q, k, v = (t.to(k.dtype).transpose(0, 1)[None] for t in (q, k, v))
    found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out.copy_(found[0].transpose(0, 1))


def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """softmax(q k^T / sqrt(D)) v, causal, the last query at the last key: q, out [t, H, D], k, v [S, Hkv, D], float32 math."""
    (t, heads, dim), (past, kv_heads) = q.shape, (k.shape[0] - q.shape[0], k.shape[1])
    group = heads // kv_heads
    step = max(1, _SCORES // (heads * k.shape[0]))
    for i in range(0, t, step):
        n, seen = min(step, t - i), past + min(i + step, t)
        queries = q[i : i + n].view(n, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * n, dim)
        keys, values = k[:seen].float().permute(1, 2, 0), v[:seen].float().transpose(0, 1)
        scores = torch.bmm(queries * dim**-0.5, keys).view(kv_heads, group, n, seen)
        if n > 1:
            hidden = torch.arange(seen, device=q.device) > torch.arange(past + i, past + i + n, device=q.device)[:, None]
            scores.masked_fill_(hidden, float("-inf"))
        read = torch.bmm(scores.softmax(dim=-1).view(kv_heads, group * n, seen), values)
        out[i : i + n] = read.view(kv_heads, group, n, dim).permute(2, 0, 1, 3).reshape(n, heads, dim)
