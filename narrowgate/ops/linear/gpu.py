"""The products on the GPU: which route a call takes.

* `gpu_few`, `gpu_packed`, `gpu_wide`: a prepared weight (`ng.prepare`: planes of codes, columns of scales) and few rows of a
  16-bit x, or any number of rows under `batch_invariant`. The weight is read in place, once for every tile of rows.
* `gpu_stream`: such a weight, more rows of a bfloat16 x, a Hopper GPU.
* `gpu_dense`: dense operands, and packed ones decoded into a workspace: into float32 where x is float32 or packed itself (exact),
  else into x's dtype, a slice of at most WORKSPACE bytes at a time. 16-bit operands of one dtype go to the vendor's product,
  unless the call asks for batch invariance.
* `gpu_thin`: what would go to the vendor's product, where both sides are small.
Quantized activations (`input_scheme`) are quantized, decoded and multiplied as values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from narrowgate.ops.linear import gpu_dense, gpu_run, gpu_stream_run, gpu_thin
from narrowgate.ops.linear.activations import as_rows, quantize_input, row_scaled
from narrowgate.ops.linear.integer import integer_weight
from narrowgate.ops.linear.op import WORKSPACE
from narrowgate.packing import Operand, PackedTensor, operand_shape, unflatten
from narrowgate.packing import describe as describe_operand
from narrowgate.packing.operand import DENSE

_WAVE = 132 * 128 * 128  # outputs that fill the device with the vendor's tiles: below, it may split k


def _decoded(w: PackedTensor, dtype: torch.dtype) -> Tensor:
    return w.dequantize(dtype)


def _read(x: list[Tensor], x_format: str, input_scheme: str | None) -> Tensor:
    """[M, K] dense: a plain x as it is, anything else decoded: to bfloat16 where that holds what the input scheme gives."""
    operand = unflatten(x, x_format) if input_scheme is None else quantize_input(x[0], input_scheme)
    dense = _decoded(operand, _input_dtype(input_scheme)) if isinstance(operand, PackedTensor) else operand
    return dense if dense.dim() == 2 else as_rows(dense)


def _input_dtype(input_scheme: str | None) -> torch.dtype:
    """Few bits under a power of two are bfloat16 values (down to 2^-133); anything else is decoded to float32."""
    return torch.bfloat16 if input_scheme in _SHORT else torch.float32


_SHORT = ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2")


def token_scaled(product: Callable[..., None]) -> Callable[..., None]:
    """`float8_e4m3fn_token`: the product of the codes, which are bfloat16 values, times each row's scale, plus the bias, all in
    float32, then the one rounding. The sums are exact products in float32: no 8-bit tensor core's shorter accumulator is used."""
    has_bias = product.__name__ == "linear"

    @functools.wraps(product)
    def run(
        x: list[Tensor], x_format: str, w: list[Tensor], w_format: str, last: Tensor | None = None, *,
        input_scheme: str | None = None, out: Tensor, **options: Any,
    ) -> None:  # fmt: skip
        if input_scheme != "float8_e4m3fn_token":
            product(x, x_format, w, w_format, last, input_scheme=input_scheme, out=out, **options)
            return
        packed = quantize_input(x[0], input_scheme)
        total = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        codes = _decoded(replace(packed, scales=()), torch.bfloat16)
        product([codes], DENSE, w, w_format, None if has_bias else last, input_scheme=None, out=total, **options)
        total *= packed.scales[0].values(packed.shape)
        if has_bias and last is not None:
            total += last.float()
        out.copy_(total)

    return run


def slices(w: Operand, itemsize: int) -> list[tuple[int, int]]:
    """Bounds along the first axis: as many rows (experts, k) as the workspace holds, never a part of a scale block."""
    extent, row = w.shape[0], prod(w.shape[1:]) * itemsize
    if not isinstance(w, PackedTensor) or extent * row <= WORKSPACE:
        return [(0, extent)]
    unit = 1
    for scale in w.all_scales:
        if scale.block[0] < extent:
            unit = unit * scale.block[0] // gcd(unit, scale.block[0])
    step = max(WORKSPACE // max(row, 1) // unit * unit, unit)
    if step >= 32:  # words and swizzled scales are cut without a copy at multiples of 32 rows
        step = step // (32 * unit) * 32 * unit or step
    return [(i, min(i + step, extent)) for i in range(0, extent, step)]


def _part(w: Operand, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    if not isinstance(w, PackedTensor):
        return w[start:stop]
    if w.layout == "rows@1" and w.element == str(dtype).removeprefix("torch.") and not w.all_scales:
        return w.data.view(dtype)[start:stop]  # stored as it is wanted
    form, _ = gpu_run.form(describe_operand(w))
    if form is not None and form.matrices == 1 and len(w.shape) == 2 and dtype != torch.float32:
        return gpu_run.unpack(form, w.tensors(), dtype, start, stop)
    return _decoded(w if (start, stop) == (0, w.shape[0]) else w.rows(start, stop), dtype)


def _vendor(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """By the vendor's library, float32 sums; where it may split k it writes float32, and the rounding is ours."""
    if x.shape[0] * w.shape[0] >= _WAVE and out.dtype == x.dtype and (bias is None or bias.dtype == x.dtype):
        torch.mm(x, w.T, out=out) if bias is None else torch.addmm(bias, x, w.T, out=out)
        return
    y = torch.mm(x, w.T, out_dtype=torch.float32)
    if bias is not None:
        y += bias.float()
    out.copy_(y)


def _vendor_takes(x: Tensor, w_dtype: torch.dtype, batch_invariant: bool) -> bool:
    return x.is_cuda and x.dtype == w_dtype and x.dtype != torch.float32 and not batch_invariant


def _product(x: Tensor, w: Operand, bias: Tensor | None, out: Tensor, batch_invariant: bool) -> None:
    """out [M, N] = x w^T + bias, w [N, K] as a whole or a slice of its rows at a time."""
    dtype = x.dtype if isinstance(w, PackedTensor) else w.dtype
    if x.shape[1] == 0:
        out.zero_() if bias is None else out.copy_(bias.float().expand_as(out))
        return
    for start, stop in slices(w, dtype.itemsize):
        dense, part = _part(w, start, stop, dtype), None if bias is None else bias[start:stop]
        into = out[:, start:stop]
        if not _vendor_takes(x, dtype, batch_invariant):
            gpu_dense.product(x, dense, into, part)
        elif gpu_thin.takes(x.shape[0], len(dense), x.shape[1]) and x.stride(1) == 1 == dense.stride(1):
            gpu_thin.product(x, dense, part, into)
        else:
            _vendor(x, dense, part, into)


def route(
    w_format: str, x: Tensor, dtype: torch.dtype, grouped: bool, batch_invariant: bool, as_given: bool = True
) -> tuple[gpu_run.Form | None, gpu_run.Tile | gpu_stream_run.Tile | None, str]:
    """(the weight, the tiles of the kernel that reads it in place, "") or (None, None, why this call decodes it first).

    x: what the call was given, which is multiplied in `dtype`, `as_given` or a copy.
    """
    form, reason = gpu_run.form(w_format)
    if form is not None:
        reason = "float32 activations" if dtype == torch.float32 else "no k" if form.k == 0 else ""
    if form is None or reason:
        return None, None, reason
    rows = prod(x.shape[:-1])
    few, many = (gpu_run.FEW, gpu_stream_run.many(form)) if not grouped else (form.matrices * gpu_run.FEW_EACH, rows)
    if few < rows <= many and not batch_invariant:
        reason = gpu_stream_run.why_not(form, x, dtype, as_given)
        if not reason:
            return form, gpu_stream_run.grouped_tile(form, rows) if grouped else gpu_stream_run.tile(form, rows), ""
    if grouped:
        return form, gpu_run.grouped_tile(form, rows, batch_invariant), ""
    if rows > gpu_run.SOME and not batch_invariant:
        return None, None, f"more than {gpu_run.SOME} rows" + (f", {reason}" if reason else "")
    return form, gpu_run.tile(form, rows, batch_invariant), ""


def _in_place(
    form: gpu_run.Form, chosen: gpu_run.Tile | gpu_stream_run.Tile | None, w: list[Tensor], x: Tensor, bias: Tensor | None,
    out: Tensor, plan: Tensor | None = None,
) -> None:  # fmt: skip
    if isinstance(chosen, gpu_stream_run.Tile):
        gpu_stream_run.product(form, w, x, bias, out, chosen, plan)
    elif chosen is not None:
        gpu_run.packed(form, w, x, bias, out, chosen, plan)


# ---- operators


@row_scaled
@token_scaled
def linear(
    x: list[Tensor], x_format: str, w: list[Tensor], w_format: str, bias: Tensor | None = None, *,
    input_scheme: str | None = None, out_dtype: torch.dtype | None = None, batch_invariant: bool = False, out: Tensor,
) -> None:  # fmt: skip
    rows = _read(x, x_format, input_scheme)
    if out.numel() == 0:
        return
    y = out if out.dim() == 2 else torch.empty(rows.shape[0], out.shape[-1], dtype=out.dtype, device=out.device)
    form, chosen, _ = route(w_format, rows, rows.dtype, False, batch_invariant)
    if form is not None:
        _in_place(form, chosen, w, rows, bias, y)
    else:
        _product(rows, unflatten(w, w_format), bias, y, batch_invariant)
    if y is not out:
        out.copy_(y.view(out.shape))


def matmul(
    a: list[Tensor], a_format: str, b: list[Tensor], b_format: str, *,
    out_dtype: torch.dtype | None = None, batch_invariant: bool = False, out: Tensor,
) -> None:  # fmt: skip
    left, right = unflatten(a, a_format), unflatten(b, b_format)
    if out.numel() == 0:
        return
    if left.shape[1] == 0:
        out.zero_()
        return
    dtype = torch.float32 if isinstance(left, PackedTensor) else left.dtype
    for i, j in slices(left, dtype.itemsize):
        rows, into = _part(left, i, j, dtype), out[i:j]
        cuts = slices(right, dtype.itemsize)
        total = None
        for start, stop in cuts:
            w = _part(right, start, stop, dtype).T
            last = stop == right.shape[0]
            y = into if last else torch.empty(into.shape, dtype=torch.float32, device=out.device)
            gpu_dense.product(rows[:, start:stop], w, y, total=total)
            total = y


@row_scaled
@token_scaled
def grouped_linear(
    x: list[Tensor], x_format: str, w: list[Tensor], w_format: str, group_sizes: Tensor, *,
    input_scheme: str | None = None, out_dtype: torch.dtype | None = None, batch_invariant: bool = False, out: Tensor,
) -> None:  # fmt: skip
    rows, shape = _read(x, x_format, input_scheme), operand_shape(w, w_format)
    if out.numel() == 0:
        return
    if rows.shape[1] == 0 or shape[0] == 0:
        out.zero_()
        return
    form, chosen, _ = route(w_format, rows, rows.dtype, True, batch_invariant)
    if form is not None and chosen is not None:
        _in_place(form, chosen, w, rows, None, out, gpu_dense.schedule(group_sizes, rows.shape[0], chosen.bm))
        return
    plan = gpu_dense.schedule(group_sizes, rows.shape[0], gpu_dense.block_rows())
    weight = unflatten(w, w_format)
    dtype = rows.dtype if isinstance(weight, PackedTensor) else weight.dtype
    for start, stop in slices(weight, dtype.itemsize):
        gpu_dense.product(rows, _part(weight, start, stop, dtype), out, plan=plan, first_expert=start)


# ---- what the plan says


def refuse(op: str, *args: Any, input_scheme: str | None = None, **kwargs: Any) -> tuple[str, ...]:
    """Integer activations on a weight of integers have a contract of their own (integer.py), which no kernel here follows yet."""
    if op == "matmul":
        return ()
    w, w_format = (args[2], args[3]) if len(args) > 3 else (kwargs["w"], kwargs["w_format"])
    if integer_weight(w, w_format, input_scheme)[0] is not None:
        return ("int8_g32 activations on a weight of integers",)
    return ()


def describe(
    op: str, *args: Any, batch_invariant: bool = False, input_scheme: str | None = None, **kwargs: Any
) -> dict[str, Any]:
    """The plan's fields of a call."""
    names = ("a", "a_format", "b", "b_format") if op == "matmul" else ("x", "x_format", "w", "w_format")
    x, x_format, w, w_format = (*args, *(kwargs[name] for name in names[len(args) :]))[:4]
    dtype = x[0].dtype if x_format == "dense" and input_scheme is None else _input_dtype(input_scheme)
    if input_scheme == "float8_e4m3fn_token":
        dtype = torch.bfloat16
    shape = operand_shape(x, x_format)
    rows = prod(shape[:-1])
    form, chosen, reason = None, None, ""
    if op != "matmul":
        form, chosen, reason = route(w_format, x[0], dtype, op == "grouped_linear", batch_invariant, input_scheme is None)
    if form is not None and chosen is not None:
        streamed = isinstance(chosen, gpu_stream_run.Tile)
        sums = (
            "codes times their block's scale in bfloat16, one float32 sum"
            if streamed
            else "float32 sums of a block times its scale"
        )
        return {
            "layout": f"planes{form.part}@1", "tile": (chosen.bn, chosen.bm),
            "reveals": gpu_stream_run.reveals(form) if streamed else "float32",
            "batch_invariant": batch_invariant, "workspace_bytes": chosen.splits * rows * form.n * 4 if chosen.splits > 1 else 0,
            "contract": f"{input_scheme or 'exact'} activations; read in place, codes placed exactly into 16-bit operands; {sums}",
        }  # fmt: skip
    packed = "dense" not in (x_format, w_format) or w_format != "dense"
    vendor = op == "linear" and dtype != torch.float32 and not batch_invariant
    thin = vendor and gpu_thin.takes(rows, operand_shape(w, w_format)[0], shape[-1])
    how = (
        "one kernel for few rows and outputs"
        if thin
        else "the vendor's 16-bit product"
        if vendor
        else "one kernel and one order of k for any number of rows"
    )
    because = f" ({reason})" if reason and packed else ""
    read = f"weights decoded to {str(dtype).removeprefix('torch.')} in slices{because}" if packed else "dense"
    return {
        "reveals": str(dtype).removeprefix("torch."), "batch_invariant": not vendor,
        "workspace_bytes": WORKSPACE if packed else 0,
        "contract": f"{input_scheme or 'exact'} activations; {read}; {how}; float32 sums, never TF32",
    }  # fmt: skip
