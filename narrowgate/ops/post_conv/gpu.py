"""What follows the convolution on the GPU: one launch, whose programs each take rows of q and k, rows of v, or gates.

The norm is the code of l2_norm and the gates that of gdn_gate, on tiles of the same layout: hence the same bits."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from narrowgate.ops.gates.gpu import BLOCK as GATES
from narrowgate.ops.gates.gpu import gate
from narrowgate.ops.norms.gpu import shape
from narrowgate.strides import aligned
from narrowgate.tile.gpu_launch import follow, launch
from narrowgate.tile.gpu_math import round_to
from narrowgate.tile.gpu_sums import columns, inverse_norm, steady

VALUES = 2048  # values of v that a program copies


@triton.jit(do_not_specialize=["limit"])
def _post_conv_kernel(
    mixed, q, k, v, a, b, A_log, dt_bias, g, beta, tokens, limit, norm_programs, value_programs, eps,
    stride_m, stride_a, stride_b, stride_A, stride_dt, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    NORM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr, VALUES: tl.constexpr, GATES: tl.constexpr,
    FOLLOWS: tl.constexpr,
):  # fmt: skip
    follow(FOLLOWS)
    program = tl.program_id(0)
    if program < norm_programs:  # rows of q and k: head after head, they lie one behind the other
        row = (program.to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
        c, inside = columns(BLOCK, K, limit, ALIGNED)
        t, head = row // (2 * HK), row % (2 * HK)
        ok = (t < tokens) & inside
        x = tl.load(steady(mixed, t * stride_m + head * K + c), ok, other=0.0)
        if NORM:
            x = x.to(tl.float32)
            x = round_to(x * inverse_norm(x, 1.0, eps), mixed.dtype.element_ty)
        tl.store(steady(q, (t * HK + head) * K + c), x, ok & (head < HK))
        tl.store(steady(k, (t * HK + head - HK) * K + c), x, ok & (head >= HK))
    elif program < norm_programs + value_programs:
        i = (program - norm_programs).to(tl.int64) * VALUES + tl.arange(0, VALUES)
        ok = i < tokens * (HV * V)
        x = tl.load(mixed + i // (HV * V) * stride_m + 2 * HK * K + i % (HV * V), ok)
        tl.store(v + i, x, ok)
    elif NORM:
        part = program - norm_programs - value_programs
        gate(part, a, b, A_log, dt_bias, g, beta, tokens, stride_a, stride_b, stride_A, stride_dt, HV, GATES)


def split_qkv(mixed: Tensor, *, num_k_heads: int, head_k_dim: int, head_v_dim: int, out: tuple[Tensor, ...]) -> None:
    _run(mixed, (None, None, None, None), (*out, None, None), num_k_heads, head_k_dim, head_v_dim, 0.0)


def gdn_post_conv(
    conv_out: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, num_k_heads: int, head_k_dim: int,
    head_v_dim: int, eps: float = 1e-6, out: tuple[Tensor, ...],
) -> None:  # fmt: skip
    _run(conv_out, (a, b, A_log, dt_bias), out, num_k_heads, head_k_dim, head_v_dim, eps)


def _run(
    mixed: Tensor, gates: tuple[Tensor | None, ...], out: tuple[Tensor | None, ...], hk: int, keys: int, values: int, eps: float
) -> None:
    tokens, hv = mixed.shape[0], (mixed.shape[1] - 2 * hk * keys) // values
    constants = shape(keys, tokens * 2 * hk)
    norms, copies = triton.cdiv(tokens * 2 * hk, constants["ROWS"]), triton.cdiv(tokens * hv * values, VALUES)
    rest = triton.cdiv(tokens * hv, GATES) if gates[0] is not None else 0
    strides = (0 if t is None else t.stride(0) for t in gates)
    q, k, v, g, beta = out
    assert q is not None
    assert k is not None
    launch(
        _post_conv_kernel, norms + copies + rest, mixed, mixed, q, k, v, *gates, g, beta, tokens, keys, norms, copies, eps,
        mixed.stride(0), *strides, HK=hk, HV=hv, K=keys, V=values, NORM=gates[0] is not None,
        ALIGNED=aligned(mixed, q, k), VALUES=VALUES, GATES=GATES, **constants, overlap=True,
    )  # fmt: skip
