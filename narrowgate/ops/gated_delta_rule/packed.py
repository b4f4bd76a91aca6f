"""One decode step from the convolution's own output: rows of [q | k | v] and the raw gates a, b.

Its numbers are its own (SPEC D31 to D34, D48): q and k are normalized in float32 without a rounding between, and beta is
rounded through b's dtype. A host that mixes it with the other path mixes two arithmetics; ours never does."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.dispatch import Kernel, Operator
from narrowgate.ops import checks
from narrowgate.ops.gated_delta_rule.op import CPU_KEYS, GPU_KEYS, check_scale, keys_over
from narrowgate.ops.host import host_kernel

_OP = "gated_delta_rule_packed_step"


def _allocate(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor, *_: object, **__: object
) -> Tensor:
    rows = (mixed_qkv.shape[0], state.shape[1], state.shape[2])
    return torch.empty(rows, dtype=mixed_qkv.dtype, device=mixed_qkv.device)


def key_heads(mixed_qkv: Tensor, state: Tensor) -> int:
    """Hk, which only the width tells: 2 * Hk * K + Hv * V."""
    _, heads, values, keys = state.shape
    rest = mixed_qkv.shape[1] - heads * values
    got = f"got {mixed_qkv.shape[1]} columns for state {list(state.shape)}"
    checks.expect(_OP, rest > 0 and rest % 2 == 0, f"invalid packed mixed_qkv width: expected 2 * Hk * K + Hv * V, {got}")
    checks.expect(_OP, keys > 0 and rest // 2 % keys == 0, f"packed Q width must be divisible by Dk, {got}")
    found = rest // 2 // keys
    checks.expect(_OP, heads % found == 0, f"Hv must be a multiple of inferred Hk, got {heads} and {found}")
    return found


def _check(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor, state_indices: Tensor, *,
    scale: float | None, round_beta: bool = True,
) -> None:  # fmt: skip
    checks.shape(_OP, "mixed_qkv", mixed_qkv, None, None)
    checks.shape(_OP, "state", state, None, None, None, None)
    key_heads(mixed_qkv, state)
    rows, heads = mixed_qkv.shape[0], state.shape[1]
    for name, gate in (("a", a), ("b", b)):
        checks.shape(_OP, name, gate, rows, heads)
    for name, per_head in (("A_log", A_log), ("dt_bias", dt_bias)):
        checks.shape(_OP, name, per_head, heads)
    checks.floats(_OP, mixed_qkv=mixed_qkv, a=a, b=b, A_log=A_log, dt_bias=dt_bias, state=state)
    checks.writable(_OP, "state", state)
    checks.index(_OP, "state_indices", state_indices, rows)
    checks.device(
        _OP, mixed_qkv, a=a, b=b, A_log=A_log, dt_bias=dt_bias, state=state, state_indices=state_indices
    )  # fmt: skip
    check_scale(_OP, scale)


def _check_values(*args: Tensor, **_: object) -> None:
    checks.slots(_OP, args[6], args[5].shape[0])


_packed_step = Operator(
    _OP,
    "Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor(a!) state, Tensor state_indices, *, "
    "float? scale, bool round_beta=True",
    f"narrowgate.ops.gated_delta_rule.reference:{_OP}", allocate=_allocate, check=_check, check_values=_check_values,
)  # fmt: skip

_packed_step.add(host_kernel(f"narrowgate.ops.gated_delta_rule.cpu:{_OP}", refuse=keys_over(CPU_KEYS)))
_packed_step.add(
    Kernel("gpu", "narrowgate.ops.gated_delta_rule.gpu_step:gated_delta_rule_packed_step", refuse=keys_over(GPU_KEYS))
)


def gated_delta_rule_packed_step(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor, state_indices: Tensor, *,
    scale: float, round_beta: bool = True, out: Tensor | None = None, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """Norms, gates and one step of the rule, from what the convolution gives.

    q = q * (scale / sqrt(sum q^2 + 1e-6)) and k = k / sqrt(sum k^2 + 1e-6), in float32 throughout;
    decay = exp(-exp(A_log) * softplus(a + dt_bias)); beta = sigmoid(b), rounded through b's dtype if `round_beta`; then
    `gated_delta_rule_step`.

    mixed_qkv: [B, 2 * Hk * K + Hv * V], rows of [q | k | v]; a, b: [B, Hv]; rows may be strided (views of one merged
    buffer); A_log, dt_bias: [Hv]. state: [slots, Hv, V, K], changed in place. Each float32, bfloat16 or float16, whatever the
    others are; the state is read to float32 and stored rounded, the output comes from the unrounded one. Hk follows from
    the width. state_indices: [B] int32 or int64; a negative one gives a zero row and leaves the states alone.
    Returns [B, Hv, V] of mixed_qkv's dtype, or fills `out` (any of the three). Raises InputError. Source: SPEC D30 to D42.

    >>> state = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    >>> row, a, b = torch.tensor([[3.0, 4.0, 0.0, 2.0, 1.0, -1.0]]), torch.tensor([[0.5]]), torch.tensor([[1.0]])
    >>> gated_delta_rule_packed_step(row, a, b, torch.zeros(1), a[0], state, torch.tensor([0]), scale=0.5)
    tensor([[[0.4310, 0.0654]]])
    """
    return _packed_step(
        mixed_qkv, a, b, A_log, dt_bias, state, state_indices, scale=scale, round_beta=round_beta, impl=impl, out=out
    )  # fmt: skip
