"""Rows of [q | k | v] taken apart, with the norms and gates or without, as one kernel made of the row functions of those operators."""

# mypy: allow-untyped-defs
from __future__ import annotations

import functools
from typing import Any

import numba
from numba import types
from torch import Tensor

from narrowgate.ops.gates.cpu import gate_row
from narrowgate.ops.norms.cpu import l2_row
from narrowgate.simd.cpu_compile import compiled
from narrowgate.simd.cpu_rows import team
from narrowgate.simd.cpu_threads import parallel
from narrowgate.simd.cpu_values import KINDS, copy_bytes, size_of

TASK = 1 << 13  # values of a task


@numba.njit
def task(index, row, sizes, outs, fused, a, b, per_head, per_task, eps):
    """row: (address, stride, kind); sizes: (tokens, Hk, K, Hv, V); a, b: (address, stride, kind); per_head: A_log and dt_bias,
    (address, kind) each."""
    tokens, key_heads, k_dim, heads, v_dim = sizes
    size = size_of(row[2])
    keys, values = key_heads * k_dim, heads * v_dim
    for t in range(index * per_task, min((index + 1) * per_task, tokens)):
        source = row[0] + t * row[1]
        if fused:
            for h in range(2 * key_heads):  # q's heads, then k's
                to = outs[h // key_heads] + (t * keys + h % key_heads * k_dim) * size
                l2_row(row[2], source + h * k_dim * size, row[2], to, k_dim, eps)
            to = t * heads * 4
            gate_row(
                a[0] + t * a[1], b[0] + t * b[1], a[2], b[2], heads, per_head[0], per_head[1], per_head[2], per_head[3], 0,
                outs[3] + to, outs[4] + to,
            )  # fmt: skip
        else:
            copy_bytes(outs[0] + t * keys * size, source, keys * size)
            copy_bytes(outs[1] + t * keys * size, source + keys * size, keys * size)
        copy_bytes(outs[2] + t * values * size, source + 2 * keys * size, values * size)


def post_conv(row, sizes, outs, fused, a, b, per_head, per_task, eps, team):
    parallel(task, (row, sizes, outs, fused, a, b, per_head, per_task, eps), (sizes[0] + per_task - 1) // per_task, team)


@functools.cache
def kernel() -> Any:
    word = types.int64
    three, four, five = (types.UniTuple(word, n) for n in (3, 4, 5))
    return compiled(post_conv, (three, five, five, word, three, three, four, word, types.float32, word), "")


_NONE = (0, 0, 0)


def _row(t: Tensor) -> tuple[int, int, int]:
    return t.data_ptr(), t.stride(0) * t.element_size(), KINDS[t.dtype]


def _run(
    mixed: Tensor, outs: tuple[Tensor, ...], gates: tuple[Tensor, Tensor, Tensor, Tensor] | None = None, eps: float = 0.0
) -> None:
    tokens, width = mixed.shape
    if tokens == 0:
        return
    addresses = tuple(t.data_ptr() for t in outs)
    a, b, per_head = _NONE, _NONE, (0, 0, 0, 0)
    if gates is None:
        addresses += (0, 0)
    else:
        a, b = _row(gates[0]), _row(gates[1])
        per_head = (gates[2].data_ptr(), KINDS[gates[2].dtype], gates[3].data_ptr(), KINDS[gates[3].dtype])
    q, v = outs[0], outs[2]
    sizes = (tokens, q.shape[1], q.shape[2], v.shape[1], v.shape[2])
    kernel()(
        _row(mixed), sizes, addresses, int(gates is not None), a, b, per_head, max(1, TASK // width), eps, team(tokens * width)
    )


def split_qkv(mixed: Tensor, *, num_k_heads: int, head_k_dim: int, head_v_dim: int, out: tuple[Tensor, Tensor, Tensor]) -> None:
    _run(mixed, out)


def gdn_post_conv(
    conv_out: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, num_k_heads: int, head_k_dim: int,
    head_v_dim: int, eps: float = 1e-6, out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    _run(conv_out, out, (a, b, A_log, dt_bias), eps)
