"""The convolution of drafted tokens: one wide row of taps a request serves every outcome of the draft.

A row holds W - 1 + k taps, k drafted tokens. The number that was accepted last time says where in it the true past ends; the
call then moves the row by one tap only and appends its inputs, so that the next call can choose again."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from narrowgate.dispatch import Operator, checks_values
from narrowgate.ops import checks, sequences
from narrowgate.ops.causal_conv1d.op import add_kernels, check_common, zeros_like_x

_OP = "causal_conv1d_speculative_step"


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor, state_indices: Tensor,
    num_accepted: Tensor, *, activation: str | None = "silu",
) -> None:  # fmt: skip
    check_common(_OP, x, weight, bias, state, activation)
    checks.expect(_OP, weight.shape[1] >= 2, f"expected weight of shape [C, W] with W >= 2, got {list(weight.shape)}")
    checks.index(_OP, "state_indices", state_indices, None)
    checks.index(_OP, "num_accepted", num_accepted, state_indices.shape[0])
    checks.index(_OP, "cu_seqlens", cu_seqlens, state_indices.shape[0] + 1)
    checks.device(_OP, x, cu_seqlens=cu_seqlens, state_indices=state_indices, num_accepted=num_accepted)


def _check_values(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor, state_indices: Tensor,
    num_accepted: Tensor, **_: Any,
) -> None:  # fmt: skip
    if not checks_values(cu_seqlens):
        return
    checks.offsets(_OP, cu_seqlens, x.shape[0])
    longest = state.shape[2] - weight.shape[1] + 2
    spans = sequences.spans(cu_seqlens, x.shape[0])
    active = [i for i, (a, b) in enumerate(spans) if b > a]  # an empty request is inert, whatever its row holds
    accepted = num_accepted.tolist()
    for i in active:
        n = spans[i][1] - spans[i][0]
        checks.expect(_OP, n <= longest, f"expected at most {longest} tokens a request, got {n} in request {i}")
        good = 1 <= accepted[i] <= longest
        checks.expect(_OP, good, f"num_accepted_tokens out of range: expected 1..{longest}, got {accepted[i]} in request {i}")
    checks.slots(_OP, state_indices[active], state.shape[0], "state_indices")


_speculative_step = Operator(
    _OP,
    "Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor cu_seqlens, Tensor state_indices, "
    'Tensor num_accepted, *, str? activation="silu"',
    f"narrowgate.ops.causal_conv1d.reference:{_OP}", allocate=zeros_like_x, check=_check, check_values=_check_values,
)  # fmt: skip

add_kernels(_speculative_step)


def causal_conv1d_speculative_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor, state_indices: Tensor,
    num_accepted: Tensor, *, activation: str | None = "silu", out: Tensor | None = None, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """`causal_conv1d` over each request's tokens, its past being the W - 1 taps at num_accepted[i] - 1 in its row.

    With o = num_accepted[i] - 1 and n tokens: window = row[o : o + W - 1] ++ x; the row becomes row[o + 1 : o + W - 1] ++ x in
    its first W - 2 + n columns and keeps the rest. Read at offset j afterwards, it is the row after j + 1 tokens.

    x: [T, C], all requests' tokens; weight: [C, W], W >= 2; bias: [C] or None; each float32, bfloat16 or float16. state:
    [slots, C, L], float32 or bfloat16, changed in place. cu_seqlens: [R + 1]; state_indices: [R]; num_accepted: [R],
    1..L - W + 2, which is also the most tokens a request may have; int32 or int64. A negative slot leaves its output rows and
    all slots untouched; a request without tokens is inert. Outputs equal `causal_conv1d_step` taken one token at a time, bit
    for bit. Returns x's shape and dtype, or fills `out` (any of the three). Raises InputError. Source: SPEC D72 to D75.

    >>> import torch
    >>> x, weight = torch.tensor([[5.0], [6.0]]), torch.tensor([[0.25, 0.5, 1.0, 2.0]])
    >>> state, cu_seqlens = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.tensor([0, 2])
    >>> y = causal_conv1d_speculative_step(
    ...     x, weight, None, state, cu_seqlens, torch.tensor([0]), torch.tensor([2]), activation="none"
    ... )
    >>> y.flatten(), state.flatten()
    (tensor([16.0000, 19.7500]), tensor([3., 4., 5., 6.]))
    """
    return _speculative_step(
        x, weight, bias, state, cu_seqlens, state_indices, num_accepted, activation=activation, impl=impl, out=out
    )  # fmt: skip
