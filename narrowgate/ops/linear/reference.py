"""The products, to be read: every weight decoded, then one rounded product and one rounded addition for each k, in order.

Nothing is fused and nothing is reordered, so a result depends on neither the number of rows nor the machine."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.ops.linear.activations import as_rows, read_input, row_scaled
from narrowgate.packing import unflatten


def _product(x: Tensor, w: Tensor) -> Tensor:
    """x [M, K] times w [K, N], both float32, summed over k = 0, 1, ... in that order."""
    total = x.new_zeros(x.shape[0], w.shape[1])
    term = torch.empty_like(total)
    for k in range(w.shape[0]):
        total += torch.mul(x[:, k, None], w[k], out=term)
    return total


@row_scaled
def linear(
    x: list[Tensor], x_format: str, w: list[Tensor], w_format: str, bias: Tensor | None = None, *,
    input_scheme: str | None = None, out_dtype: torch.dtype | None = None, batch_invariant: bool = False, out: Tensor,
) -> None:  # fmt: skip
    rows = read_input(unflatten(x, x_format), input_scheme)
    weight = read_input(unflatten(w, w_format), None)
    y = _product(as_rows(rows), weight.T.contiguous())
    if bias is not None:
        y += bias.float()
    out.copy_(y.view(out.shape))


def matmul(
    a: list[Tensor], a_format: str, b: list[Tensor], b_format: str, *,
    out_dtype: torch.dtype | None = None, batch_invariant: bool = False, out: Tensor,
) -> None:  # fmt: skip
    out.copy_(_product(read_input(unflatten(a, a_format), None), read_input(unflatten(b, b_format), None)))


@row_scaled
def grouped_linear(
    x: list[Tensor], x_format: str, w: list[Tensor], w_format: str, group_sizes: Tensor, *,
    input_scheme: str | None = None, out_dtype: torch.dtype | None = None, batch_invariant: bool = False, out: Tensor,
) -> None:  # fmt: skip
    rows = read_input(unflatten(x, x_format), input_scheme)
    weight = read_input(unflatten(w, w_format), None)
    y = rows.new_zeros(out.shape)
    start = 0
    for e, size in enumerate(group_sizes.tolist()):
        y[start : start + size] = _product(rows[start : start + size], weight[e].T.contiguous())
        start += size
    out.copy_(y)
