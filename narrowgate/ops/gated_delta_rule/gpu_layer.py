"""One decoding step of a whole layer on the GPU: convolution step, norms and gates, the rule, the gated norm; in one launch.

A program takes a key head of a row, or a part of its value rows. It computes q and k, convolves its own rows of v into `out`,
walks its tiles of the state, and leaves o in `out`. A key head's last program to arrive replaces the taps of q and k, which by
then nobody reads any more, and norms the value heads; `arrivals` counts, and is zero again afterwards. Every value is formed by
the functions of the kernels that it replaces, on tiles of their layout, and rounded where they store it: hence the same bits.
Keys and values have at most 128 values: there a row lies in one warp, here and there, and warps change no sum."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from narrowgate.ops.causal_conv1d.gpu import convolved, shift, stored, window
from narrowgate.ops.gated_delta_rule import gpu_token as token
from narrowgate.strides import aligned
from narrowgate.tile.gpu_launch import fetch, follow, launch
from narrowgate.tile.gpu_math import bound, round_to, through
from narrowgate.tile.gpu_special import activated, exp, log_decay, sigmoid
from narrowgate.tile.gpu_sums import block, columns, inverse_norm, steady


@triton.jit
def _row(x, which):
    """The row of x [R, C] that `which` [R, 1] marks, as [1, C], bit for bit."""
    bits = tl.where(which, x.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, axis=0, keep_dims=True).to(tl.float32, bitcast=True)


@triton.jit
def _pick(values, i, N: tl.constexpr):
    """values[i] of a tuple of N scalars."""
    found = values[0]
    for n in tl.static_range(1, N):
        found = tl.where(i == n, values[n], found)
    return found


@triton.jit(do_not_specialize=["limit", "v_limit"])
def _layer_kernel(
    mixed, z, a, b, weight, taps, A_log, dt_bias, norm, state, indices, arrivals, out,
    scale, eps, norm_eps, share, slots, limit, v_limit,
    stride_m, stride_zt, stride_zh, stride_a, stride_b, stride_A, stride_dt, stride_w, stride_ts, stride_tc,
    stride_s, stride_sh, stride_sv, stride_i,
    W: tl.constexpr, RATIO: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, SPLIT: tl.constexpr, QK_ROWS: tl.constexpr, OWN: tl.constexpr, HEADS: tl.constexpr,
    ALIGNED: tl.constexpr, NORM_ALIGNED: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = (V + BV - 1) // BV
    TILES: tl.constexpr = (RATIO * PARTS + SPLIT - 1) // SPLIT
    HV: tl.constexpr = HK * RATIO
    dtype: tl.constexpr = mixed.dtype.element_ty
    part, head = tl.program_id(0) % SPLIT, tl.program_id(0) // SPLIT % HK
    row = (tl.program_id(0) // (SPLIT * HK)).to(tl.int64)
    first, last = part * TILES, tl.minimum(part * TILES + TILES, RATIO * PARTS)
    if AHEAD:  # the state comes into the second cache while the kernel before still runs
        soon = tl.load(indices + row * stride_i).to(tl.int64)
        if (soon >= 0) & (soon < slots):
            WIDE: tl.constexpr = 1024 // state.dtype.element_ty.primitive_bitwidth
            LINE: tl.constexpr = WIDE if WIDE < BK else BK
            lines = tl.arange(0, BK // LINE)[None, :] * LINE
            f = tl.arange(0, AHEAD)[:, None]
            its, rows = first + f // BV, (first + f // BV) % PARTS * BV + f % BV
            far = (head * RATIO + its // PARTS).to(tl.int64) * stride_sh + rows.to(tl.int64) * stride_sv + lines
            fetch(state + soon * stride_s, far, (its < last) & (rows < V) & (lines < K))
    follow(FOLLOWS)
    slot = tl.load(indices + row * stride_i).to(tl.int64)  # again: what was read before the wait may have been the old one
    live = (slot >= 0) & (slot < slots)
    x, to = mixed + row * stride_m, out + row * (HV * V)
    taps += tl.where(live, slot, 0) * stride_ts
    # what the gated norm takes, ahead of its use
    h = tl.arange(0, HEADS)[:, None]
    d, d_ok = columns(BD, V, v_limit, NORM_ALIGNED)
    heads, h_ok = head * RATIO + h, (h < RATIO) & d_ok
    gate = tl.load(steady(z, row * stride_zt + heads * stride_zh + d), h_ok, other=0.0).to(tl.float32)
    factor = tl.load(steady(norm, d), d_ok, other=0.0).to(tl.float32)
    # q and k are rows 0 and 1 of a tile, whose other rows only keep each of them within a warp
    j = tl.arange(0, QK_ROWS)[:, None]
    k = tl.arange(0, BK)[None, :]
    c, c_ok = tl.where(j == 0, head, HK + head) * K + k, (j < 2) & (k < limit)
    finish = part == 0
    if live:
        i = tl.arange(0, OWN)  # own rows of v
        tile, v = first + i // BV, (first + i // BV) % PARTS * BV + i % BV
        own, own_ok = (head * RATIO + tile // PARTS) * V + v, (tile < last) & (v < V)
        VALUES: tl.constexpr = 2 * HK * K
        mine = window(x, taps, VALUES + own, own_ok, stride_tc, W, False)
        shared = window(x, taps, c, c_ok, stride_tc, W, True)
        decays, betas = (), ()
        for n in tl.static_range(RATIO):
            at = head * RATIO + n
            neg_a = -exp(tl.load(A_log + at * stride_A).to(tl.float32))
            g = log_decay(tl.load(a + row * stride_a + at), tl.load(dt_bias + at * stride_dt), neg_a)
            decays = decays + (exp(g),)  # type: ignore[assignment]  # noqa: RUF005
            betas = betas + (sigmoid(tl.load(b + row * stride_b + at).to(tl.float32)),)  # type: ignore[assignment]  # noqa: RUF005
        values = convolved(tl.zeros([OWN], tl.float32), mine, weight, VALUES + own, own_ok, stride_w, W, False)
        both = convolved(tl.zeros([QK_ROWS, BK], tl.float32), shared, weight, c, c_ok, stride_w, W, True)
        values, both = stored(values, "silu", dtype), stored(both, "silu", dtype).to(tl.float32)
        both = through(both * inverse_norm(both, 1.0, eps), dtype)
        q_t, k_t = _row(both, j == 0) * scale, _row(both, j == 1)
        tl.debug_barrier()  # what has been read may be replaced
        tl.store(to + own, values, own_ok)
        shift(mine, taps, VALUES + own, own_ok, stride_tc, W, False)
        if SPLIT == 1:
            shift(shared, taps, c, c_ok, stride_tc, W, True)
        tl.debug_barrier()
        for t in tl.range(bound(first), bound(last), num_stages=STAGES):
            at = head * RATIO + t // PARTS
            inside, ok, vs, v_ok, _, _ = token.tile(at, t % PARTS, stride_sh, stride_sv, limit, K, V, BK, BV, ALIGNED)
            S = token.load(state + slot * stride_s, inside, ok)
            v_t = token.load_column(to + at * V + vs, v_ok)
            S, o = token.advance(S, q_t, k_t, v_t, _pick(decays, t // PARTS, RATIO), _pick(betas, t // PARTS, RATIO))
            token.store_column(to + at * V + vs, o, v_ok)
            token.store(state + slot * stride_s, inside, S, ok)
        tl.debug_barrier()
        finish = finish | True
        if SPLIT > 1:
            counter = arrivals + slot * HK + head
            finish = tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT - 1
            tl.debug_barrier()
            if finish:
                shared = window(x, taps, c, c_ok, stride_tc, W, True)
                tl.debug_barrier()
                shift(shared, taps, c, c_ok, stride_tc, W, True)
                tl.store(counter, 0)
    if finish:
        y = tl.load(steady(to, heads * V + d), h_ok & live, other=0.0, cache_modifier=".cg").to(tl.float32)
        y = y * inverse_norm(y, share, norm_eps)
        y = y * (factor + 0.0)
        y = y * activated(gate, "silu", dtype)
        tl.store(steady(to, heads * V + d), round_to(y, dtype), h_ok)


TILE, WARPS, STAGES, AHEAD = 2048, 4, 3, 64  # AHEAD: rows of the state that a program asks for before it waits


def parts(rows: int, key_heads: int, tiles: int) -> int:
    """Programs a key head: enough for a card's multiprocessors, never more than it has tiles. It changes no bit."""
    return max(1, min(tiles, triton.next_power_of_2(-(-512 // max(rows * key_heads, 1)))))


def one_launch(
    mixed: Tensor, z: Tensor, a: Tensor, b: Tensor, weight: Tensor, taps: Tensor, A_log: Tensor, dt_bias: Tensor, norm: Tensor,
    state: Tensor, state_indices: Tensor, arrivals: Tensor, *, scale: float, norm_eps: float, eps: float = 1e-6, out: Tensor,
    split: int | None = None,
) -> None:  # fmt: skip
    rows, (slots, heads, values, keys) = mixed.shape[0], state.shape
    key_heads = (mixed.shape[1] - heads * values) // (2 * keys)
    bk, bd, ratio = block(keys), block(values), heads // key_heads
    bv = min(TILE // bk, max(WARPS * 128 // bk, triton.next_power_of_2(values)))
    tiles = ratio * triton.cdiv(values, bv)
    split = split or parts(rows, key_heads, tiles)
    whole = WARPS * 128  # values of a tile in which every thread has four of one row
    launch(
        _layer_kernel, rows * key_heads * split, mixed, mixed, z, a, b, weight, taps, A_log, dt_bias, norm, state, state_indices,
        arrivals, out, scale, eps, norm_eps, 1.0 / values, slots, keys, values, mixed.stride(0), *z.stride()[:2], a.stride(0),
        b.stride(0), A_log.stride(0), dt_bias.stride(0), weight.stride(0), *taps.stride()[:2], *state.stride()[:3],
        state_indices.stride(0), W=weight.shape[1], RATIO=ratio, HK=key_heads, K=keys, V=values, BK=bk, BD=bd, BV=bv, SPLIT=split,
        QK_ROWS=max(2, whole // bk), OWN=triton.next_power_of_2(triton.cdiv(tiles, split) * bv),
        HEADS=max(triton.next_power_of_2(ratio), whole // bd), ALIGNED=aligned(state, mixed), NORM_ALIGNED=aligned(z, norm, out),
        STAGES=STAGES, AHEAD=min(AHEAD, triton.next_power_of_2(triton.cdiv(tiles, split) * bv)), num_warps=WARPS, overlap=True,
    )  # fmt: skip
