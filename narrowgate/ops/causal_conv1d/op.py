"""The short convolution before the rule: over whole sequences, and one token a row; with its own small state.

A state row is [C, L] with L >= W - 1; only its first W - 1 columns are used here, oldest tap first, and they hold raw
inputs, from before the activation. Rows may be wider: speculation keeps more taps there."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.dispatch import Kernel, Operator, checks_values
from narrowgate.ops import checks, sequences
from narrowgate.ops.host import host_kernel

_REFERENCE = "narrowgate.ops.causal_conv1d.reference"
STATES = (torch.float32, torch.bfloat16)
CHUNK = 8  # tokens of one entry of a work descriptor
WIDEST = 16  # taps that the CPU kernel takes


def zeros_like_x(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)  # rows without a slot are not written


def _like_x(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor | None = None, *args: object,
    state_indices: Tensor | None = None, **kwargs: object,
) -> Tensor:  # fmt: skip
    """Where every row is written there is nothing to clear first."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device) if cu_seqlens is None is state_indices else zeros_like_x(x)


def check_common(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str | None) -> None:
    checks.shape(op, "x", x, None, None)
    checks.shape(op, "weight", weight, x.shape[1], None)
    width = weight.shape[1]
    checks.expect(op, width >= 1, f"expected weight of shape [C, W] with W >= 1, got {list(weight.shape)}")
    checks.shape(op, "state", state, None, x.shape[1], None)
    wide = state.shape[2] >= width - 1
    checks.expect(op, wide, f"expected state of shape [slots, C, >= {width - 1}], got {list(state.shape)}")
    checks.floats(op, x=x, weight=weight)
    checks.dtype(op, "state", state, STATES)
    checks.writable(op, "state", state)
    if bias is not None:
        checks.shape(op, "bias", bias, x.shape[1])
        checks.floats(op, bias=bias)
    checks.device(op, x, weight=weight, bias=bias, state=state)
    good = activation in ("silu", "none", None)
    checks.expect(op, good, f"expected activation to be 'silu', 'none' or None, got {activation!r}")


def add_kernels(operator: Operator) -> None:
    operator.add(host_kernel(f"narrowgate.ops.causal_conv1d.cpu:{operator.name}", refuse=_too_wide))
    operator.add(Kernel("gpu", f"narrowgate.ops.causal_conv1d.gpu:{operator.name}"))


def _too_wide(x: Tensor, weight: Tensor, *args: object, **kwargs: object) -> tuple[str, ...]:
    return () if weight.shape[1] <= WIDEST else (f"at most {WIDEST} taps, got {weight.shape[1]}",)


def _check_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor | None = None,
    has_initial_state: Tensor | None = None, *, activation: str | None = "silu", state_indices: Tensor | None = None,
    batch_ptr: Tensor | None = None, token_chunk_offset: Tensor | None = None,
) -> None:  # fmt: skip
    op = "causal_conv1d"
    check_common(op, x, weight, bias, state, activation)
    checks.index(op, "cu_seqlens", cu_seqlens, None)
    checks.expect(op, cu_seqlens is None or len(cu_seqlens) > 0, "expected cu_seqlens of shape [N + 1], got [0]")
    n = sequences.count(cu_seqlens)
    checks.index(op, "has_initial_state", has_initial_state, n, allowed=checks.FLAGS)
    checks.index(op, "state_indices", state_indices, n)
    if state_indices is None:
        checks.expect(op, state.shape[0] == n, f"expected one state row per sequence, {n}, got {state.shape[0]}")
    both = (batch_ptr is None) == (token_chunk_offset is None)
    checks.expect(op, both, "expected both parts of work or neither, got one")
    if batch_ptr is not None and token_chunk_offset is not None:
        checks.index(op, "batch_ptr", batch_ptr, None)
        checks.index(op, "token_chunk_offset", token_chunk_offset, batch_ptr.shape[0])
        checks.expect(op, batch_ptr.shape[0] > 0, "expected work with at least one entry, got none")
    checks.device(
        op, x, cu_seqlens=cu_seqlens, has_initial_state=has_initial_state, state_indices=state_indices, batch_ptr=batch_ptr,
        token_chunk_offset=token_chunk_offset,
    )  # fmt: skip


def _check_conv_values(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor | None = None,
    has_initial_state: Tensor | None = None, *, state_indices: Tensor | None = None, batch_ptr: Tensor | None = None,
    token_chunk_offset: Tensor | None = None, **_: object,
) -> None:  # fmt: skip
    op = "causal_conv1d"
    checks.offsets(op, cu_seqlens, x.shape[0])
    checks.slots(op, state_indices, state.shape[0])
    if batch_ptr is not None and token_chunk_offset is not None and checks_values(batch_ptr):
        want = _entries(sequences.spans(cu_seqlens, x.shape[0]))
        got = list(zip(batch_ptr.tolist(), token_chunk_offset.tolist(), strict=True))
        checks.expect(op, sorted(got) == want, f"expected work to name each chunk of {CHUNK} tokens once, got {got[:20]}")


def _entries(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(i, c) for i, (a, b) in enumerate(spans) for c in range(-(-(b - a) // CHUNK))]


def _check_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, activation: str | None = "silu",
    state_indices: Tensor | None = None,
) -> None:  # fmt: skip
    op = "causal_conv1d_step"
    check_common(op, x, weight, bias, state, activation)
    checks.index(op, "state_indices", state_indices, x.shape[0])
    checks.device(op, x, state_indices=state_indices)
    if state_indices is None:
        good = state.shape[0] == x.shape[0]
        checks.expect(op, good, f"expected one state row per token, {x.shape[0]}, got {state.shape[0]}")


def _check_step_values(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, **options: object) -> None:
    checks.slots("causal_conv1d_step", options.get("state_indices"), state.shape[0])  # type: ignore[arg-type]


def _flatten(*args: object, work: tuple[Tensor, Tensor] | None = None, **kwargs: object) -> tuple[tuple, dict]:
    batch_ptr, token_chunk_offset = (None, None) if work is None else work
    return args, {**kwargs, "batch_ptr": batch_ptr, "token_chunk_offset": token_chunk_offset}


_causal_conv1d = Operator(
    "causal_conv1d",
    "Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor? cu_seqlens=None, Tensor? has_initial_state=None, *, "
    'str? activation="silu", Tensor? state_indices=None, Tensor? batch_ptr=None, Tensor? token_chunk_offset=None',
    f"{_REFERENCE}:causal_conv1d", allocate=_like_x, check=_check_conv, check_values=_check_conv_values, flatten=_flatten,
)  # fmt: skip
_causal_conv1d_step = Operator(
    "causal_conv1d_step",
    'Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, *, str? activation="silu", Tensor? state_indices=None',
    f"{_REFERENCE}:causal_conv1d_step", allocate=_like_x, check=_check_step, check_values=_check_step_values,
)  # fmt: skip

add_kernels(_causal_conv1d)
add_kernels(_causal_conv1d_step)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, cu_seqlens: Tensor | None = None,
    has_initial_state: Tensor | None = None, *, activation: str | None = "silu", state_indices: Tensor | None = None,
    work: tuple[Tensor, Tensor] | None = None, out: Tensor | None = None, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """out[t, c] = act(bias[c] + sum_j weight[c, j] * window[t - W + 1 + j, c]): the last tap meets the current token.

    Left of a sequence lie the taps of its state row, or zeros where `has_initial_state` is False.

    x: [T, C], the tokens of all sequences, rows may be strided; weight: [C, W]; bias: [C] or None; each float32, bfloat16
    or float16. state: [slots, C, L >= W - 1], float32 or bfloat16, changed in place: its first W - 1 columns become the last
    W - 1 raw inputs (old ones shifted where the sequence is short). cu_seqlens: [N + 1], int32 or int64, sequence i is
    x[cu[i]:cu[i + 1]]; None is one sequence. has_initial_state: [N] bool, int8 or int32. state_indices: [N], the slot of each
    sequence; a negative one leaves its output rows and all slots untouched, as do tokens after cu[-1]; in an output that the
    operator allocates those rows are zero. activation: "silu", "none" or None. work: (batch_ptr, token_chunk_offset), int32
    or int64, which 8-token chunk of which sequence each entry takes: it splits the work and changes no bit.
    Returns x's shape and dtype, or fills `out` (any of the three dtypes). Accumulates in float32, oldest tap first.
    Raises InputError. Source: SPEC D15 to D23.

    >>> state = torch.tensor([[[3.0, 4.0]]])
    >>> causal_conv1d(
    ...     torch.tensor([[1.0], [2.0]]), torch.tensor([[0.25, 0.5, 1.0]]), torch.tensor([0.5]), state, activation="none"
    ... )
    tensor([[4.2500],
            [4.0000]])
    >>> state
    tensor([[[1., 2.]]])
    """
    batch_ptr, token_chunk_offset = (None, None) if work is None else work
    return _causal_conv1d(
        x, weight, bias, state, cu_seqlens, has_initial_state, activation=activation, state_indices=state_indices,
        batch_ptr=batch_ptr, token_chunk_offset=token_chunk_offset, impl=impl, out=out,
    )  # fmt: skip


def causal_conv1d_work(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The `work` of `causal_conv1d`: an entry for every 8 tokens of each sequence. It looks at values, so it synchronises.

    cu_seqlens: [N + 1]. Returns (batch_ptr, token_chunk_offset) of its dtype and on its device. Source: SPEC D23.

    >>> causal_conv1d_work(torch.tensor([0, 2, 19, 28]))
    (tensor([0, 1, 1, 1, 2, 2]), tensor([0, 0, 1, 2, 0, 1]))
    """
    tokens = int(cu_seqlens[-1])
    entries = torch.tensor(_entries(sequences.spans(cu_seqlens, tokens)), dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    batch_ptr, token_chunk_offset = entries.reshape(-1, 2).unbind(1)
    return batch_ptr.contiguous(), token_chunk_offset.contiguous()


def causal_conv1d_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, activation: str | None = "silu",
    state_indices: Tensor | None = None, out: Tensor | None = None, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """`causal_conv1d` for one token a row: read the old taps, then shift them left and append the raw token.

    x: [B, C]; weight: [C, W]; bias: [C] or None; state: [slots, C, L >= W - 1], changed in place. state_indices: [B], the
    slot of each row (None: row i has slot i); a negative one leaves output row and state untouched. The rest is as in
    `causal_conv1d`, and so are the bits. Raises InputError. Source: SPEC D18 to D22.

    >>> state = torch.tensor([[[1.0, 2.0]]])
    >>> weight, bias = torch.tensor([[0.25, 0.5, 1.0]]), torch.tensor([0.5])
    >>> causal_conv1d_step(torch.tensor([[5.0]]), weight, bias, state, activation="none"), state
    (tensor([[6.7500]]), tensor([[[2., 5.]]]))
    """
    return _causal_conv1d_step(x, weight, bias, state, activation=activation, state_indices=state_indices, impl=impl, out=out)
