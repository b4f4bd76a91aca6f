"""The products, to be read: every weight decoded, then one rounded product and one rounded addition for each k, in order.

Nothing is fused and nothing is reordered, so a result depends on neither the number of rows nor the machine. Integer activations
on a weight of integers follow the contract of integer.py instead."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.ops.linear.activations import as_rows, quantize_input, read_input, row_scaled
from narrowgate.ops.linear.integer import NAME, integer_product, integer_table, integer_weight
from narrowgate.packing import PackedTensor, unflatten


def _product(x: Tensor, w: Tensor) -> Tensor:
    """x [M, K] times w [K, N], both float32, summed over k = 0, 1, ... in that order."""
    total = x.new_zeros(x.shape[0], w.shape[1])
    term = torch.empty_like(total)
    for k in range(w.shape[0]):
        total += torch.mul(x[:, k, None], w[k], out=term)
    return total


def _packed(w: list[Tensor], w_format: str) -> PackedTensor:
    packed = unflatten(w, w_format)
    assert isinstance(packed, PackedTensor)
    return packed


@row_scaled
def linear(
    x: list[Tensor], x_format: str, w: list[Tensor], w_format: str, bias: Tensor | None = None, *,
    input_scheme: str | None = None, out_dtype: torch.dtype | None = None, batch_invariant: bool = False, out: Tensor,
) -> None:  # fmt: skip
    whole, _ = integer_weight(w, w_format, input_scheme)
    if whole is not None:
        y = integer_product(quantize_input(as_rows(x[0]), NAME), _packed(w, w_format), whole, *integer_table(whole, w))
    else:
        rows = read_input(unflatten(x, x_format), input_scheme)
        y = _product(as_rows(rows), read_input(unflatten(w, w_format), None).T.contiguous())
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
    weight, whole = unflatten(w, w_format), integer_weight(w, w_format, input_scheme)[0]
    rows = x[0] if whole is not None else read_input(unflatten(x, x_format), input_scheme)
    y = x[0].new_zeros(out.shape, dtype=torch.float32)
    start = 0
    for e, size in enumerate(group_sizes.tolist()):
        mine = rows[start : start + size]
        expert = weight.select(e) if isinstance(weight, PackedTensor) else weight[e]
        if whole is not None and isinstance(expert, PackedTensor):
            product = integer_product(quantize_input(mine, NAME), expert, whole, *integer_table(whole, w))
        else:
            product = _product(mine, read_input(expert, None).T.contiguous())
        y[start : start + size] = product
        start += size
    out.copy_(y)
