"""The calls of the rule's CPU kernel (cpu_rule.py), and the chunk form.

The kernel's recurrent form does 7 operations a state value and token out of the first caches, fewer than the products of the
chunk form need, and is never slower here; so "auto" is recurrent. "chunk" runs the three stages of chunk.py on torch's float32
products, a sequence at a time."""

from __future__ import annotations

import functools
from typing import Any

import torch
from numba import types
from torch import Tensor

from narrowgate.ops import sequences
from narrowgate.ops.gated_delta_rule import chunk, cpu_rule
from narrowgate.simd.cpu_compile import compiled
from narrowgate.simd.cpu_rows import team
from narrowgate.simd.cpu_values import KINDS, optional

_NO_HEADS = (0, 0, 0, 0)


@functools.cache
def kernel() -> Any:
    word, real = types.int64, types.float32
    two, three, four, five, seven = (types.UniTuple(word, n) for n in (2, 3, 4, 5, 7))
    shape = (
        word, four, four, four, three, three, four, four, five, seven, word, two, two, two, two, word, real, word, word
    )  # fmt: skip
    return compiled(cpu_rule.delta_rule, shape, "")


def _heads(t: Tensor) -> tuple[int, int, int, int]:
    size, strides = t.element_size(), t.stride()
    return t.data_ptr(), strides[0] * size, strides[1] * size, KINDS[t.dtype]


def _row(t: Tensor) -> tuple[int, int, int]:
    return t.data_ptr(), t.stride(0) * t.element_size(), KINDS[t.dtype]


def _state(t: Tensor) -> tuple[int, int, int, int, int]:
    size, strides = t.element_size(), t.stride()
    return t.data_ptr(), strides[0] * size, strides[1] * size, strides[2] * size, KINDS[t.dtype]


def _run(
    mode: int, q: Any, k: Any, v: Any, a: Tensor, b: Tensor, state: Tensor, out: Tensor, tokens: int, key_heads: int, count: int,
    scale: float, cu: Tensor | None = None, indices: Tensor | None = None, flags: Tensor | None = None,
    accepted: Tensor | None = None, per_head: tuple[int, int, int, int] = _NO_HEADS, workspace: Tensor | None = None,
    round_beta: bool = False,
) -> None:  # fmt: skip
    slots, heads, width, n = state.shape
    if count == 0 or heads * width == 0:
        return
    kept = [None if t is None else t.contiguous() for t in (cu, indices, flags, accepted)]
    columns = 1 if indices is None or indices.dim() == 1 else indices.shape[1]
    kernel()(
        mode, q, k, v, _row(a), _row(b), per_head, _heads(out), _state(state), (tokens, key_heads, heads, n, width, slots, columns),
        count, *map(optional, kept), 0 if workspace is None else workspace.data_ptr(), scale, int(round_beta),
        team(tokens * heads * width * n),
    )  # fmt: skip


def gated_delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, scale: float,
    state_indices: Tensor | None = None, out: Tensor,
) -> None:  # fmt: skip
    count, key_heads, _ = q.shape
    _run(
        cpu_rule.STEPS, _heads(q), _heads(k), _heads(v), g, beta, state, out, count, key_heads, count, scale, indices=state_indices
    )  # fmt: skip


def gated_delta_rule_packed_step(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor, state_indices: Tensor, *,
    scale: float, round_beta: bool = True, out: Tensor,
) -> None:  # fmt: skip
    count, columns = mixed_qkv.shape
    _, heads, width, n = state.shape
    keys, size = (columns - heads * width) // 2, mixed_qkv.element_size()
    address, stride, kind = _row(mixed_qkv)
    q, k = (address, stride, n * size, kind), (address + keys * size, stride, n * size, kind)
    v = (address + 2 * keys * size, stride, width * size, kind)
    per_head = (A_log.data_ptr(), KINDS[A_log.dtype], dt_bias.data_ptr(), KINDS[dt_bias.dtype])
    _run(
        cpu_rule.PACKED, q, k, v, a, b, state, out, count, keys // n, count, scale, indices=state_indices, per_head=per_head,
        round_beta=round_beta,
    )  # fmt: skip


def gated_delta_rule_speculative_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor, state_indices: Tensor,
    num_accepted: Tensor, *, scale: float, out: Tensor,
) -> None:  # fmt: skip
    tokens, key_heads, _ = q.shape
    requests = num_accepted.shape[0]
    _zero_after(cu_seqlens, tokens, out)
    skips = requests > 0 and state_indices.numel() > 0 and bool((state_indices < 0).any())
    workspace = torch.empty(requests, *state.shape[1:], dtype=state.dtype) if skips else None
    _run(
        cpu_rule.DRAFTS, _heads(q), _heads(k), _heads(v), g, beta, state, out, tokens, key_heads, requests, scale, cu_seqlens,
        state_indices, None, num_accepted, workspace=workspace,
    )  # fmt: skip


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor | None, *,
    scale: float, state_indices: Tensor | None = None, has_initial_state: Tensor | None = None,
    form: str = "auto", out: Tensor,
) -> None:  # fmt: skip
    tokens, key_heads, _ = q.shape
    if form == "chunk":
        _chunked(q, k, v, g, beta, state, cu_seqlens, scale, state_indices, has_initial_state, out)
        return
    count = 1
    if cu_seqlens is not None:
        count = cu_seqlens.shape[0] - 1
        _zero_after(cu_seqlens, tokens, out)
    _run(
        cpu_rule.SEQUENCES, _heads(q), _heads(k), _heads(v), g, beta, state, out, tokens, key_heads, count, scale, cu_seqlens,
        state_indices, has_initial_state,
    )  # fmt: skip


def _zero_after(cu_seqlens: Tensor, tokens: int, out: Tensor) -> None:
    """Rows outside of every sequence."""
    end = int(cu_seqlens[-1])
    if end < tokens:
        out[end:].zero_()


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor | None, scale: float,
    state_indices: Tensor | None, has_initial_state: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    n = sequences.count(cu_seqlens)
    spans = sequences.spans(cu_seqlens, q.shape[0])
    slots = sequences.live_slots(state_indices, n, state.shape[0])
    q, k, v = q.float() * scale, k.float(), v.float()
    result = out if out.dtype == torch.float32 else torch.empty(out.shape)
    result.zero_()
    for span, slot, keeps in zip(spans, slots, sequences.flags(has_initial_state, n), strict=True):
        if slot is not None:
            row = state[slot : slot + 1]
            if not keeps:
                row.zero_()
            chunk.prefill(q, k, v, g, beta, row, [span], result)
    if result is not out:
        out.copy_(result)
