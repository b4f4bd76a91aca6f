"""The CPU's plain fast route: decode a slice of the weight to float32, multiply with the library's float32 product.

Exact like the reference but for the order of the sums, which is the library's. With `batch_invariant` every row is a
matrix-vector product of its own: the same shape, so the same order, whatever the number of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.ops.linear.activations import as_rows, read_input, row_scaled
from narrowgate.ops.linear.op import WORKSPACE
from narrowgate.packing import Operand, PackedTensor, decode_rows, unflatten


def _into(x: Tensor, w: Tensor, y: Tensor, batch_invariant: bool) -> None:
    """y [M, N] = x [M, K] w[N, K]^T, all float32."""
    if not batch_invariant:
        torch.mm(x, w.T, out=y) if y.is_contiguous() else y.copy_(torch.mm(x, w.T))
        return
    for i in range(x.shape[0]):
        y[i] = torch.mv(w, x[i].clone())  # a copy, since an aligned vector may be summed in another order than an unaligned one


def _slice(w: Operand, start: int, stop: int) -> Tensor:
    return decode_rows(w, start, stop) if isinstance(w, PackedTensor) else w[start:stop].float()


def _product(x: Tensor, w: Operand, batch_invariant: bool) -> Tensor:
    """x [M, K] float32 times w [N, K], a slice of rows of w at a time."""
    n, k = w.shape
    y = torch.empty(x.shape[0], n)
    step = max(1, WORKSPACE // (4 * max(k, 1)))
    if k == 0:
        return y.zero_()
    for start in range(0, n, step):
        stop = min(start + step, n)
        _into(x, _slice(w, start, stop), y[:, start:stop], batch_invariant)
    return y


@row_scaled
def linear(
    x: list[Tensor], x_format: str, w: list[Tensor], w_format: str, bias: Tensor | None = None, *,
    input_scheme: str | None = None, out_dtype: torch.dtype | None = None, batch_invariant: bool = False, out: Tensor,
) -> None:  # fmt: skip
    weight = unflatten(w, w_format)
    rows = as_rows(read_input(unflatten(x, x_format), input_scheme))
    y = _product(rows, weight, batch_invariant)
    if bias is not None:
        y += bias.float()
    out.copy_(y.view(out.shape))


def matmul(
    a: list[Tensor], a_format: str, b: list[Tensor], b_format: str, *,
    out_dtype: torch.dtype | None = None, batch_invariant: bool = False, out: Tensor,
) -> None:  # fmt: skip
    left, right = read_input(unflatten(a, a_format), None), read_input(unflatten(b, b_format), None)
    out.copy_(_product(left, right.T.contiguous(), batch_invariant))


@row_scaled
def grouped_linear(
    x: list[Tensor], x_format: str, w: list[Tensor], w_format: str, group_sizes: Tensor, *,
    input_scheme: str | None = None, out_dtype: torch.dtype | None = None, batch_invariant: bool = False, out: Tensor,
) -> None:  # fmt: skip
    rows = read_input(unflatten(x, x_format), input_scheme)
    weight = unflatten(w, w_format)
    start = 0
    for e, size in enumerate(group_sizes.tolist()):
        if size:
            expert = weight.select(e) if isinstance(weight, PackedTensor) else weight[e]
            out[start : start + size] = _product(rows[start : start + size], expert, batch_invariant)
        start += size
    out[start:] = 0
