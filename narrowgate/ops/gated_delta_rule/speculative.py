"""Several drafted tokens a request in one call, with a snapshot of the state after each, so that any of them can be
rejected afterwards: the next call starts from the snapshot of the last accepted token. Nothing is copied or undone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from narrowgate.dispatch import Kernel, Operator, checks_values
from narrowgate.errors import InputError
from narrowgate.ops import checks, sequences
from narrowgate.ops.gated_delta_rule.op import CPU_KEYS, GPU_KEYS, check_inputs, check_state, keys_over, like_v
from narrowgate.ops.host import host_kernel

_OP = "gated_delta_rule_speculative_step"


def _check(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor, state_indices: Tensor,
    num_accepted: Tensor, *, scale: float | None,
) -> None:  # fmt: skip
    check_inputs(_OP, q, k, v, g, beta, scale)
    check_state(_OP, state, q, v)
    checks.index(_OP, "num_accepted", num_accepted, None)
    requests = num_accepted.shape[0]
    checks.index(_OP, "cu_seqlens", cu_seqlens, requests + 1)
    checks.index(_OP, "state_indices", state_indices, requests, None)
    checks.rows(_OP, "state_indices", state_indices)
    checks.device(_OP, q, cu_seqlens=cu_seqlens, state_indices=state_indices, num_accepted=num_accepted)


def _check_values(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor, state_indices: Tensor,
    num_accepted: Tensor, **_: Any,
) -> None:  # fmt: skip
    if not checks_values(cu_seqlens):
        return
    checks.offsets(_OP, cu_seqlens, q.shape[0])
    columns = state_indices.shape[1]
    owners: dict[int, tuple[int, bool]] = {}
    spans = sequences.spans(cu_seqlens, q.shape[0])
    for i, ((a, b), slots, accepted) in enumerate(zip(spans, state_indices.tolist(), num_accepted.tolist(), strict=True)):
        if b == a:
            continue  # inert: whatever else its row holds is not looked at
        checks.expect(_OP, b - a <= columns, f"expected at most {columns} tokens a request, got {b - a} in request {i}")
        good = 1 <= accepted <= columns
        checks.expect(_OP, good, f"num_accepted_tokens out of range: expected 1..{columns}, got {accepted} in request {i}")
        top = max(slots)
        good = top < state.shape[0]
        checks.expect(_OP, good, f"state_indices out of range: expected below {state.shape[0]}, got {top} in request {i}")
        if slots[accepted - 1] >= 0:
            _claim(owners, i, slots[accepted - 1], writes=False)
            for slot in slots[: b - a]:
                _claim(owners, i, slot, writes=True)


def _claim(owners: dict[int, tuple[int, bool]], request: int, slot: int, writes: bool) -> None:
    """Two requests may start from one slot, but what one writes no other may touch."""
    if slot < 0:
        return
    owner, written = owners.get(slot, (request, writes))
    if owner != request and (writes or written):
        raise InputError(f"{_OP}: duplicate live state_indices: slot {slot} belongs to requests {owner} and {request}")
    owners[slot] = (request, writes or written)


_speculative_step = Operator(
    _OP,
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor cu_seqlens, Tensor state_indices, "
    "Tensor num_accepted, *, float? scale",
    f"narrowgate.ops.gated_delta_rule.reference:{_OP}", allocate=like_v, check=_check, check_values=_check_values,
)  # fmt: skip

_speculative_step.add(host_kernel(f"narrowgate.ops.gated_delta_rule.cpu:{_OP}", refuse=keys_over(CPU_KEYS)))
_speculative_step.add(
    Kernel("gpu", "narrowgate.ops.gated_delta_rule.gpu_sequence:gated_delta_rule_speculative_step", refuse=keys_over(GPU_KEYS))
)


def gated_delta_rule_speculative_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor, state_indices: Tensor,
    num_accepted: Tensor, *, scale: float, out: Tensor | None = None, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """Request i starts from slot state_indices[i, num_accepted[i] - 1], takes its tokens one after another by the rule,
    and after its token t stores the state into slot state_indices[i, t].

    The start is read whole before anything is stored, so a snapshot may overwrite it. A state of 16 bits is rounded after
    every token, as a chain of single steps would: outputs and snapshots equal that chain bit for bit.

    q, k: [T, Hk, K]; v: [T, Hv, V]; g (LOG decay, <= 0), beta: [T, Hv] float32; state: [slots, Hv, V, K] float32, bfloat16 or
    float16, changed in place; cu_seqlens: [R + 1]; state_indices: [R, columns]; num_accepted: [R], 1..columns; int32 or
    int64. A request has at most `columns` tokens; one without tokens is inert. A negative start slot gives zero rows and
    stores nothing; a negative snapshot column skips that store alone. Returns v's shape and dtype, or fills `out` (any of
    the three dtypes). Raises InputError. Source: SPEC D64 to D71.

    >>> import torch
    >>> q = k = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    >>> v, g, beta = torch.tensor([[[2.0]], [[3.0]]]), torch.zeros(2, 1), torch.ones(2, 1)
    >>> state = torch.zeros(2, 1, 1, 2)
    >>> cu_seqlens, state_indices, num_accepted = torch.tensor([0, 2]), torch.tensor([[0, 1]]), torch.tensor([1])
    >>> y = gated_delta_rule_speculative_step(
    ...     q, k, v, g, beta, state, cu_seqlens, state_indices, num_accepted, scale=1.0
    ... )
    >>> y.flatten(), state.reshape(2, 2)
    (tensor([2., 3.]), tensor([[2., 0.],
            [2., 3.]]))
    """
    return _speculative_step(
        q, k, v, g, beta, state, cu_seqlens, state_indices, num_accepted, scale=scale, impl=impl, out=out
    )  # fmt: skip
