"""The short convolution on the GPU: over whole sequences, one token a row, and drafted tokens. Taps are added to the bias from
the oldest to the newest in float32 by fused multiply-adds, whatever the form: hence the same bits.

Whole sequences: a program takes BT tokens of one sequence and BC channels. The program of a sequence's first tokens is the only
one that looks at its state, and so also the one that replaces it: nothing races, at any length. Which sequence and which tokens
are its own a program finds in cu_seqlens: sequence i owns the programs from cu[i] // BT + i on, which are at least as many
as its tokens need. A work descriptor names them outright.

What replaces a tap has been read before, and a barrier stands between: which thread reads and which writes is the compiler's
choice. One element a thread there, so that it has no reason to choose differently."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from narrowgate.tile.gpu_launch import flags, follow, launch
from narrowgate.tile.gpu_math import bound, round_to
from narrowgate.tile.gpu_special import activated
from narrowgate.tile.gpu_sums import single, steady

CHUNK = 8  # tokens of an entry of a work descriptor
BT, GROUPS, BC, WARPS = 8, 8, 128, 1  # a program takes BT tokens at a time, GROUPS times, of BC channels
STEP = 128  # channels of a program of a step


@triton.jit
def _place(base, offsets, STEADY: tl.constexpr):
    """base + offsets. STEADY claims neighbours for the sake of the layout: only under a mask of which nothing is known."""
    if STEADY:
        return steady(base, offsets)
    else:
        return base + offsets


@triton.jit
def window(x, taps, c, ok, stride_c, W: tl.constexpr, STEADY: tl.constexpr):
    """One token's old taps and its input, of channels c: W tensors of c's shape."""
    found = ()
    for j in tl.static_range(W - 1):
        tap = tl.load(_place(taps, c.to(tl.int64) * stride_c + j, STEADY), ok, other=0.0).to(tl.float32)
        found = found + (tap,)  # type: ignore[assignment]  # noqa: RUF005 (the compiler knows no unpacking)
    return found + (tl.load(_place(x, c, STEADY), ok, other=0.0).to(tl.float32),)  # noqa: RUF005


@triton.jit
def convolved(y, taps, weight, c, ok, stride_w, W: tl.constexpr, STEADY: tl.constexpr):
    """The bias y and W taps times their weights, before the activation."""
    for j in tl.static_range(W):
        y = tl.fma(tl.load(_place(weight, c * stride_w + j, STEADY), ok, other=0.0).to(tl.float32), taps[j], y)
    return y


@triton.jit
def stored(y, activation: tl.constexpr, dtype: tl.constexpr):
    """What a token's sum becomes: activated and rounded."""
    return round_to(activated(y, activation, dtype), dtype)


@triton.jit
def shift(window, taps, c, ok, stride_c, W: tl.constexpr, STEADY: tl.constexpr):
    """All but the oldest tap of a window, one place to the left. Between its reads and this stands a barrier."""
    for j in tl.static_range(W - 1):
        tl.store(_place(taps, c.to(tl.int64) * stride_c + j, STEADY), round_to(window[j + 1], taps.dtype.element_ty), ok)


@triton.jit
def _clamped(offsets, i, tokens):
    return tl.minimum(tl.maximum(tl.load(offsets + i).to(tl.int64), 0), tokens)


@triton.jit
def _own(offsets, sequences, tokens, BT: tl.constexpr, BLOCK: tl.constexpr):
    """The sequence that owns a program, and which of its programs it is."""
    program, before = tl.program_id(0), tl.program_id(0) * 0
    for b in range(0, bound(sequences), BLOCK):
        i = b + tl.arange(0, BLOCK)
        start = tl.load(offsets + i, i < sequences, other=0).to(tl.int64)
        first = tl.minimum(tl.maximum(start, 0), tokens) // BT + i
        before += tl.sum(((first <= program) & (i < sequences)).to(tl.int32), axis=0)
    i = tl.maximum(before - 1, 0)
    return i.to(tl.int64), program - (_clamped(offsets, i, tokens) // BT + i)


@triton.jit
def _window(x, taps, first, start, m, c, stride_x, here, held, W: tl.constexpr):
    """Entry m [BC] of the old taps from `start` on, W - 1 of them (zeros where not `held`), followed by the sequence's tokens."""
    old = tl.load(single(taps, start + m + c * 0), held & (m < W - 1), other=0.0).to(tl.float32)
    new = tl.load(single(x + (first + m - (W - 1)) * stride_x, c), here & (m >= W - 1), other=0.0).to(tl.float32)
    return tl.where(m < W - 1, old, new)


@triton.jit
def _dot(
    x, weight, bias, taps, first, start, t, c, stride_x, stride_w, here, held, W: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Token t [BC] before the activation, wherever its window lies."""
    y = tl.zeros([c.shape[0]], tl.float32)
    if BIAS:
        y += tl.load(single(bias, c), here, other=0.0).to(tl.float32)
    for j in tl.static_range(W):
        tap = _window(x, taps, first, start, t - first + j, c, stride_x, here, held, W)
        y = tl.fma(tl.load(single(weight + j, c * stride_w), here, other=0.0).to(tl.float32), tap, y)
    return y


@triton.jit
def _weights(weight, c, here, stride_w, W: tl.constexpr):
    """One tensor [BC] a tap."""
    weights = ()
    for j in tl.static_range(W):
        tap = tl.load(weight + c * stride_w + j, here, other=0.0).to(tl.float32)
        weights = weights + (tap,)  # type: ignore[assignment]  # noqa: RUF005 (the compiler knows no unpacking)
    return weights


@triton.jit
def _run(
    x, out, bias, weights, at, first, last, c, here, stride_x, stride_o,
    W: tl.constexpr, ACTIVATION: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Tokens at..at+BT-1 of those whose windows hold inputs only. A row is read and widened once, for its W tokens."""
    rows = ()
    for j in tl.static_range(BT + W - 1):
        t = at + j - (W - 1)
        row = tl.load(x + t * stride_x + c, here & (t >= first) & (t < last), other=0.0).to(tl.float32)
        rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005
    for j in tl.static_range(BT):
        y = bias
        for i in tl.static_range(W):
            y = tl.fma(weights[i], rows[j + i], y)
        ok = here & (at + j >= first + W - 1) & (at + j < last)
        tl.store(out + (at + j) * stride_o + c, stored(y, ACTIVATION, out.dtype.element_ty), ok)


@triton.jit(do_not_specialize=["tokens", "sequences", "entries"])
def _conv_kernel(
    x, weight, bias, state, offsets, flags, indices, batch_ptr, token_chunk_offset, out, tokens, sequences, entries, slots,
    channels, stride_x, stride_w, stride_s, stride_c, stride_i, stride_o,
    W: tl.constexpr, ACTIVATION: tl.constexpr, VARLEN: tl.constexpr, FLAGGED: tl.constexpr, INDEXED: tl.constexpr,
    WORK: tl.constexpr, BIAS: tl.constexpr, BT: tl.constexpr, GROUPS: tl.constexpr, BC: tl.constexpr,
    SEARCH: tl.constexpr,
):  # fmt: skip
    tokens = tokens.to(tl.int64)
    i, chunk = tl.program_id(0).to(tl.int64) * 0, tl.program_id(0).to(tl.int64)
    if WORK:
        if tl.program_id(0) < entries:
            i = tl.load(batch_ptr + tl.program_id(0)).to(tl.int64)
            chunk = tl.load(token_chunk_offset + tl.program_id(0)).to(tl.int64)
        else:  # one more program a sequence, for those without a token: they have no entry, but a state
            i, chunk = tl.program_id(0).to(tl.int64) - entries, chunk * 0
    elif VARLEN:
        i, chunk = _own(offsets, sequences, tokens, BT * GROUPS, SEARCH)
    known = (i >= 0) & (i < sequences)
    i = tl.where(known, i, 0)
    first, last = tokens * 0, tokens
    if VARLEN:
        first = _clamped(offsets, i, tokens)
        last = tl.maximum(first, _clamped(offsets, i + 1, tokens))
    if WORK:
        known = known & ((tl.program_id(0) < entries) | (first == last))
    slot = tl.load(indices + i * stride_i).to(tl.int64) if INDEXED else i
    live = known & (slot >= 0) & (slot < slots) & (chunk >= 0)
    keep = live
    if FLAGGED:
        keep = keep & (tl.load(flags + i) != 0)
    at = first + chunk * (BT * GROUPS)
    if live & ((at < last) | (chunk == 0)):
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        here = c < channels
        taps = state + slot * stride_s + c.to(tl.int64) * stride_c
        y = tl.zeros([BC], tl.float32)
        if BIAS:
            y += tl.load(bias + c, here, other=0.0).to(tl.float32)
        weights = _weights(weight, c, here, stride_w, W)
        for group in range(GROUPS):
            _run(x, out, y, weights, at + group * BT, first, last, c, here, stride_x, stride_o, W, ACTIVATION, BT)
        if chunk == 0:  # the first tokens, whose windows reach into the state; then the state itself, reads ahead of writes
            held = here & keep
            for t in range(bound(first), bound(tl.minimum(first + W - 1, last))):
                y = _dot(x, weight, bias, taps, first, 0, t, c, stride_x, stride_w, here, held, W, BIAS)
                tl.store(single(out + t * stride_o, c), stored(y, ACTIVATION, out.dtype.element_ty), here)
            for m in tl.static_range(W - 1):
                tap = _window(x, taps, first, 0, last - first + m, c, stride_x, here, held, W)
                tl.debug_barrier()
                tl.store(single(taps, m + c * 0), round_to(tap, state.dtype.element_ty), here)


@triton.jit
def _step_kernel(
    x, weight, bias, state, indices, out, slots, channels, stride_x, stride_w, stride_s, stride_c, stride_i, stride_o,
    W: tl.constexpr, ACTIVATION: tl.constexpr, INDEXED: tl.constexpr, BIAS: tl.constexpr, BC: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    follow(FOLLOWS)
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    slot = tl.load(indices + row * stride_i).to(tl.int64) if INDEXED else row
    here = (c < channels) & (slot >= 0) & (slot < slots)
    taps = state + tl.where(slot >= 0, slot, 0) * stride_s
    y = tl.zeros([BC], tl.float32)
    if BIAS:
        y += tl.load(bias + c, here, other=0.0).to(tl.float32)
    old = window(x + row * stride_x, taps, c, here, stride_c, W, False)
    y = convolved(y, old, weight, c, here, stride_w, W, False)
    tl.debug_barrier()
    shift(old, taps, c, here, stride_c, W, False)
    tl.store(out + row * stride_o + c, stored(y, ACTIVATION, out.dtype.element_ty), here)


@triton.jit(do_not_specialize=["tokens", "columns"])
def _speculative_kernel(
    x, weight, bias, state, offsets, indices, accepted, out, tokens, slots, channels, columns,
    stride_x, stride_w, stride_s, stride_c, stride_i, stride_n, stride_o,
    W: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    tokens = tokens.to(tl.int64)
    first = _clamped(offsets, i, tokens)
    longest = columns - (W - 2)
    last = tl.minimum(tl.maximum(first, _clamped(offsets, i + 1, tokens)), first + longest)
    slot = tl.load(indices + i * stride_i).to(tl.int64)
    start = tl.load(accepted + i * stride_n).to(tl.int64) - 1
    live = (slot >= 0) & (slot < slots) & (start >= 0) & (start < longest) & (last > first)
    last = tl.where(live, last, first)
    here = (c < channels) & live
    taps = state + tl.where(live, slot, 0) * stride_s + c.to(tl.int64) * stride_c
    for t in range(bound(first), bound(last)):
        y = _dot(x, weight, bias, taps, first, start, t, c, stride_x, stride_w, here, here, W, BIAS)
        tl.store(single(out + t * stride_o, c), stored(y, ACTIVATION, out.dtype.element_ty), here)
    for m in range(0, bound(tl.where(live, last - first + W - 2, 0))):  # reads run ahead of writes
        tap = _window(x, taps, first, start, m + 1, c, stride_x, here, here, W)
        tl.debug_barrier()
        tl.store(single(taps, m + c * 0), round_to(tap, state.dtype.element_ty), here)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor | None = None,
    has_initial_state: Tensor | None = None, *, activation: str | None = "silu", state_indices: Tensor | None = None,
    batch_ptr: Tensor | None = None, token_chunk_offset: Tensor | None = None, out: Tensor,
) -> None:  # fmt: skip
    tokens, channels = x.shape
    sequences = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    work = batch_ptr is not None
    bt, groups, bc = (CHUNK, 1, BC) if work else (BT, GROUPS, BC)
    entries = batch_ptr.shape[0] if batch_ptr is not None else 0
    programs = (entries if work else tokens // (bt * groups)) + sequences
    launch(
        _conv_kernel, (programs if sequences else 0, triton.cdiv(channels, bc)), x, x, weight, bias, state, cu_seqlens,
        flags(has_initial_state), state_indices, batch_ptr, token_chunk_offset, out, tokens, sequences, entries, state.shape[0],
        channels, x.stride(0), weight.stride(0), *state.stride()[:2], 0 if state_indices is None else state_indices.stride(0),
        out.stride(0), W=weight.shape[1], ACTIVATION=activation or "none", VARLEN=cu_seqlens is not None,
        FLAGGED=has_initial_state is not None, INDEXED=state_indices is not None, WORK=work, BIAS=bias is not None,
        BT=bt, GROUPS=groups, BC=bc, SEARCH=min(1024, max(16, triton.next_power_of_2(sequences))), num_warps=WARPS,
    )  # fmt: skip


def causal_conv1d_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, activation: str | None = "silu",
    state_indices: Tensor | None = None, out: Tensor,
) -> None:  # fmt: skip
    rows, channels = x.shape
    launch(
        _step_kernel, (rows, triton.cdiv(channels, STEP)), x, x, weight, bias, state, state_indices, out, state.shape[0],
        channels, x.stride(0), weight.stride(0), *state.stride()[:2], 0 if state_indices is None else state_indices.stride(0),
        out.stride(0), W=weight.shape[1], ACTIVATION=activation or "none", INDEXED=state_indices is not None,
        BIAS=bias is not None, BC=STEP, overlap=True,
    )  # fmt: skip


def causal_conv1d_speculative_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor, state_indices: Tensor,
    num_accepted: Tensor, *, activation: str | None = "silu", out: Tensor,
) -> None:  # fmt: skip
    requests, channels = state_indices.shape[0], x.shape[1]
    launch(
        _speculative_kernel, (requests, triton.cdiv(channels, STEP)), x, x, weight, bias, state, cu_seqlens, state_indices,
        num_accepted, out, x.shape[0], state.shape[0], channels, state.shape[2], x.stride(0), weight.stride(0),
        *state.stride()[:2], state_indices.stride(0), num_accepted.stride(0), out.stride(0), W=weight.shape[1],
        ACTIVATION=activation or "none", BIAS=bias is not None, BC=STEP,
    )  # fmt: skip
