"""Rows in and out of a cache: states, widened and narrowed between the cache's dtype and float32; and plain bytes.

There is no "no slot" here: a negative index is an error, as is one past the end (SPEC D63, D81)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgate.dispatch import Kernel, Operator
from narrowgate.ops import checks
from narrowgate.ops.host import host_kernel
from narrowgate.strides import scattered

_REFERENCE = "narrowgate.ops.state.reference"


def _float_rows(cache: Tensor, indices: Tensor, *args: object, **kwargs: object) -> Tensor:
    return torch.empty(indices.shape[0], *cache.shape[1:], device=cache.device)


def _rows(x: Tensor, indices: Tensor) -> Tensor:
    return torch.empty(indices.shape[0], *x.shape[1:], dtype=x.dtype, device=x.device)


def _check_gather(cache: Tensor, indices: Tensor, has_initial_state: Tensor | None = None) -> None:
    op = "gather_state"
    checks.expect(op, cache.ndim >= 2, f"expected cache of shape [slots, ...], got {list(cache.shape)}")
    checks.floats(op, cache=cache)
    checks.index(op, "indices", indices, None)
    checks.index(op, "has_initial_state", has_initial_state, indices.shape[0], allowed=checks.FLAGS)
    checks.device(op, cache, indices=indices, has_initial_state=has_initial_state)


def _check_scatter(cache: Tensor, rows: Tensor, indices: Tensor) -> None:
    op = "scatter_state"
    checks.expect(op, cache.ndim >= 2, f"expected cache of shape [slots, ...], got {list(cache.shape)}")
    checks.floats(op, cache=cache, rows=rows)
    checks.writable(op, "cache", cache)
    checks.index(op, "indices", indices, None)
    checks.shape(op, "rows", rows, indices.shape[0], *cache.shape[1:])
    checks.device(op, cache, rows=rows, indices=indices)


def _check_bytes(op: str, name: str, x: Tensor, indices: Tensor) -> None:
    checks.expect(op, x.ndim >= 2, f"expected {name} of shape [N, ...], got {list(x.shape)}")
    checks.expect(op, x.element_size() in (1, 2, 4, 8), f"expected {name} with elements of 1, 2, 4 or 8 bytes, got {x.dtype}")
    checks.rows(op, name, x)
    checks.index(op, "indices", indices, None)
    checks.device(op, x, indices=indices)


def _check_select(x: Tensor, indices: Tensor) -> None:
    _check_bytes("select_rows", "x", x, indices)


def _check_copy(dst: Tensor, src: Tensor, indices: Tensor) -> None:
    op = "copy_rows"
    _check_bytes(op, "dst", dst, indices)
    checks.writable(op, "dst", dst)
    checks.dtype(op, "src", src, (dst.dtype,))
    checks.rows(op, "src", src)
    checks.shape(op, "src", src, indices.shape[0], *dst.shape[1:])
    checks.device(op, dst, src=src)


def _unfit(x: Tensor, y: Tensor, *_: object) -> list[str]:
    return scattered(*(t[0] for t in (x, y) if t.ndim > 1 and t.shape[0]))


_gather_state = Operator(
    "gather_state", "Tensor cache, Tensor indices, Tensor? has_initial_state=None", f"{_REFERENCE}:gather_state",
    allocate=_float_rows, check=_check_gather, out_dtype="same",
    check_values=lambda cache, indices, *_: checks.selection("gather_state", indices, cache.shape[0], unique=False),
)  # fmt: skip
_scatter_state = Operator(
    "scatter_state", "Tensor(a!) cache, Tensor rows, Tensor indices", f"{_REFERENCE}:scatter_state",
    allocate=None, check=_check_scatter, returns=0, has_out=False,
    check_values=lambda cache, rows, indices: checks.selection("scatter_state", indices, cache.shape[0], unique=True),
)  # fmt: skip
_select_rows = Operator(
    "select_rows", "Tensor x, Tensor indices", f"{_REFERENCE}:select_rows",
    allocate=_rows, check=_check_select, out_dtype="same",
    check_values=lambda x, indices: checks.selection("select_rows", indices, x.shape[0], unique=False),
)  # fmt: skip
_copy_rows = Operator(
    "copy_rows", "Tensor(a!) dst, Tensor src, Tensor indices", f"{_REFERENCE}:copy_rows",
    allocate=None, check=_check_copy, returns=0, has_out=False,
    check_values=lambda dst, src, indices: checks.selection("copy_rows", indices, dst.shape[0], unique=True),
)  # fmt: skip


def _scattered(*args: Any, **kwargs: Any) -> tuple[str, ...]:
    """Slots whose rows have more than two strides between them are left to the reference."""
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dim() > 4]
    plain = all(t.is_contiguous() for t in tensors)
    return () if plain else ("slots of more than four axes that are not contiguous",)


for _operator in (_gather_state, _scatter_state, _select_rows, _copy_rows):
    _operator.add(host_kernel(f"narrowgate.ops.state.cpu:{_operator.name}", refuse=_scattered))
    _operator.add(Kernel("gpu", f"narrowgate.ops.state.gpu:{_operator.name}", refuse=_unfit))


def gather_state(
    cache: Tensor, indices: Tensor, has_initial_state: Tensor | None = None, out: Tensor | None = None, *,
    impl: str | None = None,
) -> Tensor:  # fmt: skip
    """out[i] = float32(cache[indices[i]]), or zeros where has_initial_state[i] is false, whatever the slot holds.

    cache: [slots, ...] float32, bfloat16 or float16, only the last axis need be contiguous (`cache[..., :W - 1]` takes the
    leading taps of wider rows). indices: [N] int32 or int64, any of them more than once. has_initial_state: [N] bool, int8
    or int32. Returns float32 [N, ...], or fills `out` (float32). Exact. Raises InputError, for a negative index too.
    Source: SPEC D61, D63.

    >>> gather_state(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0]))
    tensor([[3.],
            [1.]])
    """
    return _gather_state(cache, indices, has_initial_state, impl=impl, out=out)


def scatter_state(cache: Tensor, rows: Tensor, indices: Tensor, *, impl: str | None = None) -> None:
    """cache[indices[i]] = rows[i], rounded to the cache's dtype; other rows keep their bytes.

    cache: [slots, ...] float32, bfloat16 or float16, changed in place, only its last axis need be contiguous.
    rows: [N, ...], usually float32. indices: [N] int32 or int64, all different. Raises InputError, for a negative index
    too. Source: SPEC D62, D63.

    >>> cache = torch.zeros(3, 1)
    >>> scatter_state(cache, torch.tensor([[5.0]]), torch.tensor([1]))
    >>> cache.flatten()
    tensor([0., 5., 0.])
    """
    _scatter_state(cache, rows, indices, impl=impl)


def select_rows(x: Tensor, indices: Tensor, out: Tensor | None = None, *, impl: str | None = None) -> Tensor:
    """out[i] = x[indices[i]], byte for byte.

    x: [N, ...] of any dtype with 1, 2, 4 or 8 bytes an element, rows may be strided. indices: [M] int32 or int64.
    Returns [M, ...] of x's dtype, or fills `out`. Raises InputError, for a negative index too. Source: SPEC D76.

    >>> select_rows(torch.tensor([[1, 2], [3, 4]]), torch.tensor([1]))
    tensor([[3, 4]])
    """
    return _select_rows(x, indices, impl=impl, out=out)


def copy_rows(dst: Tensor, src: Tensor, indices: Tensor, *, impl: str | None = None) -> None:
    """dst[indices[i]] = src[i], byte for byte; other rows keep their bytes.

    dst: [N, ...], changed in place, and src: [M, ...], of one dtype with 1, 2, 4 or 8 bytes an element, rows may be
    strided. indices: [M] int32 or int64, all different. Raises InputError, for a negative index too. Source: SPEC D76.

    >>> dst = torch.zeros(2, 2, dtype=torch.int64)
    >>> copy_rows(dst, torch.tensor([[3, 4]]), torch.tensor([1]))
    >>> dst
    tensor([[0, 0],
            [3, 4]])
    """
    _copy_rows(dst, src, indices, impl=impl)
