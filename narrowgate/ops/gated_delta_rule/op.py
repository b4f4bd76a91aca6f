"""The gated delta rule over whole sequences, and one token a row.

For each value head, with state S [V, K] (rows v, columns k) and each token t in turn:

    S = exp(g_t) S                      the state decays
    S = S + beta_t (v_t - S k_t) k_t^T  what k_t reads is moved towards v_t
    o_t = S (scale q_t)                 the new state is read out

Value head h reads key head h // (Hv / Hk)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from narrowgate.dispatch import Kernel, Operator
from narrowgate.ops import checks, sequences
from narrowgate.ops.host import host_kernel

_REFERENCE = "narrowgate.ops.gated_delta_rule.reference"
_COMPRESSED = "gdn_prefill: state must be f32; gather compressed cache rows first"
FORMS = ("auto", "chunk", "recurrent")
CPU_KEYS, GPU_KEYS = 2048, 1024  # values of a key that the kernels take


def like_v(q: Tensor, k: Tensor, v: Tensor, *args: object, **kwargs: object) -> Tensor:
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


def check_inputs(op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None) -> None:
    checks.shape(op, "q", q, None, None, None)
    checks.shape(op, "k", k, *q.shape)
    checks.shape(op, "v", v, q.shape[0], None, None)
    check_heads(op, v.shape[1], q.shape[1])
    checks.floats(op, q=q, k=k, v=v)
    for name, t in (("g", g), ("beta", beta)):
        checks.expect(op, t.dtype == torch.float32, f"g/beta must be f32 [T, Hv], got {name} of dtype {t.dtype}")
        checks.shape(op, name, t, q.shape[0], v.shape[1])
        checks.rows(op, name, t)
    checks.device(op, q, k=k, v=v, g=g, beta=beta)
    check_scale(op, scale)


def check_heads(op: str, values: int, keys: int) -> None:
    good = keys > 0 and values % keys == 0
    checks.expect(op, good, f"Hv must be a multiple of Hk (GQA broadcast), got {values} and {keys}")


def check_scale(op: str, scale: float | None) -> None:
    good = scale is not None and 0 < scale < float("inf")
    checks.expect(op, good, f"args.scale must be set (> 0), got {scale}")


def check_state(op: str, state: Tensor, q: Tensor, v: Tensor) -> None:
    checks.shape(op, "state", state, None, v.shape[1], v.shape[2], q.shape[2])
    checks.dtype(op, "state", state)
    checks.writable(op, "state", state)
    checks.device(op, q, state=state)


def keys_over(most: int) -> Callable[..., tuple[str, ...]]:
    """Why a kernel does not take a call, whose sixth argument is the state: its keys have more values than it holds."""

    def refuse(*args: Any, **kwargs: Any) -> tuple[str, ...]:
        state = args[5] if len(args) > 5 else kwargs["state"]
        return () if state.shape[3] <= most else (f"keys of at most {most} values, got {state.shape[3]}",)

    return refuse


def _check_prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor | None, *,
    scale: float | None, state_indices: Tensor | None = None, has_initial_state: Tensor | None = None, form: str = "auto",
) -> None:  # fmt: skip
    op = "gated_delta_rule"
    check_inputs(op, q, k, v, g, beta, scale)
    checks.expect(op, state.dtype not in (torch.float16, torch.bfloat16), _COMPRESSED)
    checks.dtype(op, "state", state, (torch.float32,))
    check_state(op, state, q, v)
    checks.index(op, "cu_seqlens", cu_seqlens, None)
    checks.expect(op, cu_seqlens is None or len(cu_seqlens) > 0, "expected cu_seqlens of shape [N + 1], got [0]")
    n = sequences.count(cu_seqlens)
    checks.index(op, "state_indices", state_indices, n)
    checks.index(op, "has_initial_state", has_initial_state, n, allowed=checks.FLAGS)
    if state_indices is None:
        checks.expect(op, state.shape[0] == n, f"expected one state row per sequence, {n}, got {state.shape[0]}")
    checks.device(op, q, cu_seqlens=cu_seqlens, state_indices=state_indices, has_initial_state=has_initial_state)
    checks.expect(op, form in FORMS, f"expected form to be one of {', '.join(FORMS)}, got {form!r}")


def _check_prefill_values(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor | None, *,
    state_indices: Tensor | None = None, **_: object,
) -> None:  # fmt: skip
    checks.offsets("gated_delta_rule", cu_seqlens, q.shape[0])
    checks.slots("gated_delta_rule", state_indices, state.shape[0])


def _check_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, scale: float | None,
    state_indices: Tensor | None = None,
) -> None:  # fmt: skip
    op = "gated_delta_rule_step"
    check_inputs(op, q, k, v, g, beta, scale)
    check_state(op, state, q, v)
    checks.index(op, "state_indices", state_indices, q.shape[0])
    checks.device(op, q, state_indices=state_indices)
    rows, slots = q.shape[0], state.shape[0]
    if state_indices is None:
        checks.expect(op, slots == rows, f"one state row per token required, got {slots} for {rows} tokens")
    else:
        checks.expect(op, slots >= rows, f"indexed cache must have >= batch rows, got {slots} for {rows} tokens")


def _check_step_values(*args: Any, state_indices: Tensor | None = None, **_: object) -> None:
    checks.slots("gated_delta_rule_step", state_indices, args[5].shape[0])


_gated_delta_rule = Operator(
    "gated_delta_rule",
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor? cu_seqlens, *, float? scale, "
    'Tensor? state_indices=None, Tensor? has_initial_state=None, str form="auto"',
    f"{_REFERENCE}:gated_delta_rule", allocate=like_v, check=_check_prefill, check_values=_check_prefill_values,
)  # fmt: skip
_gated_delta_rule.add(
    Kernel(
        "reference",
        f"{_REFERENCE}:gated_delta_rule",
        describe=lambda *_, form="auto", **__: {"contract": f"form {'chunk' if form == 'auto' else form}"},
    )
)
_gated_delta_rule.add(
    Kernel(
        "gpu",
        "narrowgate.ops.gated_delta_rule.gpu:gated_delta_rule",
        refuse=lambda *args, form="auto", **kwargs: keys_over(GPU_KEYS)(*args, **kwargs) if form == "recurrent" else (),
        describe=lambda *_, form="auto", **__: {"contract": f"form {'chunk' if form == 'auto' else form}"},
    )
)
_gated_delta_rule_step = Operator(
    "gated_delta_rule_step",
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, *, float? scale, Tensor? state_indices=None",
    f"{_REFERENCE}:gated_delta_rule_step", allocate=like_v, check=_check_step, check_values=_check_step_values,
)  # fmt: skip

_gated_delta_rule.add(
    host_kernel(
        "narrowgate.ops.gated_delta_rule.cpu:gated_delta_rule",
        refuse=keys_over(CPU_KEYS),
        describe=lambda *_, form="auto", **__: {"contract": f"form {'recurrent' if form == 'auto' else form}"},
    )
)
_gated_delta_rule_step.add(host_kernel("narrowgate.ops.gated_delta_rule.cpu:gated_delta_rule_step", refuse=keys_over(CPU_KEYS)))
_gated_delta_rule_step.add(
    Kernel("gpu", "narrowgate.ops.gated_delta_rule.gpu_step:gated_delta_rule_step", refuse=keys_over(GPU_KEYS))
)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor | None, *, scale: float,
    state_indices: Tensor | None = None, has_initial_state: Tensor | None = None, form: str = "auto",
    out: Tensor | None = None, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """The rule over whole sequences: S = exp(g) S; S += beta (v - S k) k^T; o = S (scale q), token after token.

    q, k: [T, Hk, K] and v: [T, Hv, V], the tokens of all sequences, each float32, bfloat16 or float16, rows may be strided;
    k should have norm near 1. g (LOG decay, <= 0) and beta: [T, Hv] float32. state: [slots, Hv, V, K] float32, rows v,
    columns k, changed in place. cu_seqlens: [N + 1], int32 or int64; None is one sequence; output rows after cu_seqlens[-1]
    are zero. state_indices: [N], the slot of each sequence (None: sequence i has slot i); a negative one gives zero rows
    and stores nothing. has_initial_state: [N] bool, int8 or int32; False starts from zeros whatever the slot holds.
    form: "recurrent" (token by token), "chunk" (64 tokens at a time) or "auto", which chooses by dtype, head sizes and
    device only: the CPU kernel takes "recurrent", the reference "chunk". The two agree within tolerance, not bit for bit.
    Returns v's shape and dtype, or fills `out` (any of the three dtypes). Math in float32. Raises InputError.
    Source: SPEC D1 to D9, D49; Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024).

    >>> q, k, v = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[2.0, 1.0]]])
    >>> g, beta = torch.tensor([[0.5]]).log(), torch.tensor([[0.5]])
    >>> state = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    >>> gated_delta_rule(q, k, v, g, beta, state, None, scale=0.5)
    tensor([[[0.2500, 0.7500]]])
    >>> state
    tensor([[[[0.5000, 1.5000],
              [1.5000, 1.5000]]]])
    """
    return _gated_delta_rule(
        q, k, v, g, beta, state, cu_seqlens, scale=scale, state_indices=state_indices,
        has_initial_state=has_initial_state, form=form, impl=impl, out=out,
    )  # fmt: skip


def gated_delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, scale: float,
    state_indices: Tensor | None = None, out: Tensor | None = None, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """The rule for one token a row: `gated_delta_rule(form="recurrent")` on sequences of length 1, bit for bit.

    q, k: [B, Hk, K]; v: [B, Hv, V]; g (LOG decay, <= 0), beta: [B, Hv] float32. state: [slots, Hv, V, K] float32, bfloat16 or
    float16: read to float32, stored rounded, changed in place; the output comes from the unrounded one. state_indices:
    [B] int32 or int64, the slot of each row (None: row i has slot i, and there are as many); a negative one gives a zero
    row and leaves the states alone. Slot 0 is a slot like any other. The rest is as in `gated_delta_rule`.
    Raises InputError. Source: SPEC D1, D3, D11, D12.

    >>> q, k, v = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[2.0, 1.0]]])
    >>> g, beta = torch.tensor([[0.5]]).log(), torch.tensor([[0.5]])
    >>> gated_delta_rule_step(q, k, v, g, beta, torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), scale=0.5)
    tensor([[[0.2500, 0.7500]]])
    """
    return _gated_delta_rule_step(q, k, v, g, beta, state, scale=scale, state_indices=state_indices, impl=impl, out=out)
