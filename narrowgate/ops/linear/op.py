"""linear, matmul, grouped_linear: products of dense and packed operands, accumulated in float32, rounded once."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgate.dispatch import Kernel, Operator, checks_values
from narrowgate.errors import InputError
from narrowgate.ops import checks
from narrowgate.ops.linear.activations import INPUT_SCHEMES
from narrowgate.ops.ready import Ready, plain
from narrowgate.packing import Operand, flatten, operand_shape, unflatten
from narrowgate.packing.operand import fits

WORKSPACE = 256 << 20  # bytes of decoded weight that a kernel may hold at a time

Flat = list[Tensor]


def _dtype(x: Flat, x_format: str, out_dtype: torch.dtype | None) -> torch.dtype:
    if out_dtype is not None:
        return out_dtype
    return x[0].dtype if x_format == "dense" else torch.float32


def _check_operand(op: str, name: str, tensors: Flat, fmt: str) -> tuple[int, ...]:
    if fmt == "dense":
        checks.dtype(op, name, tensors[0])
        checks.rows(op, name, tensors[0])
    elif not fits(tensors, fmt):
        unflatten(tensors, fmt)  # says what does not fit
    return operand_shape(tensors, fmt)


def _check_common(op: str, device: Tensor, out_dtype: torch.dtype | None, **operands: Tensor) -> None:
    checks.device(op, device, **operands)
    if out_dtype is not None and out_dtype not in checks.FLOATS:
        raise InputError(f"{op}: expected out_dtype float32, bfloat16 or float16, got {out_dtype}")


def _check_input_scheme(op: str, name: str | None, x_format: str) -> None:
    if name is None:
        return
    if name not in INPUT_SCHEMES:
        raise InputError(f"{op}: expected input_scheme to be None or one of {', '.join(INPUT_SCHEMES)}, got {name!r}")
    checks.expect(op, x_format == "dense", f"expected a dense x where input_scheme is given, got a packed one and {name!r}")


# ---- linear


def _check_linear(
    x: Flat, x_format: str, w: Flat, w_format: str, bias: Tensor | None = None, *,
    input_scheme: str | None = None, out_dtype: torch.dtype | None = None, batch_invariant: bool = False,
) -> None:  # fmt: skip
    xs, ws = _check_operand("linear", "x", x, x_format), _check_operand("linear", "w", w, w_format)
    _check_common("linear", x[0], out_dtype, w=w[0], **({} if bias is None else {"bias": bias}))
    _check_input_scheme("linear", input_scheme, x_format)
    checks.expect("linear", len(ws) == 2, f"expected w of shape [N, K], got {list(ws)}")
    checks.expect("linear", len(xs) >= 1 and xs[-1] == ws[1], f"expected x of shape [..., {ws[1]}], got {list(xs)}")
    if bias is not None:
        checks.shape("linear", "bias", bias, ws[0])
        checks.dtype("linear", "bias", bias)


def _allocate_linear(
    x: Flat, x_format: str, w: Flat, w_format: str, bias: Tensor | None = None, *,
    input_scheme: str | None = None, out_dtype: torch.dtype | None = None, batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    rows, (n, _) = operand_shape(x, x_format)[:-1], operand_shape(w, w_format)
    return x[0].new_empty((*rows, n), dtype=_dtype(x, x_format, out_dtype))


def _flatten_linear(
    x: Operand, w: Operand, bias: Tensor | None = None, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (*flatten(x), *flatten(w), bias), kwargs


_linear = Operator(
    "linear",
    "Tensor[] x, str x_format, Tensor[] w, str w_format, Tensor? bias=None, *, str? input_scheme=None, "
    "ScalarType? out_dtype=None, bool batch_invariant=False",
    "narrowgate.ops.linear.reference:linear", allocate=_allocate_linear, check=_check_linear, flatten=_flatten_linear,
    remember=True,
)  # fmt: skip


def linear(
    x: Operand, w: Operand, bias: Tensor | None = None, *, input_scheme: str | None = None,
    out_dtype: torch.dtype | None = None, batch_invariant: bool = False, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """y = x w^T + bias, with w as it is stored.

    x: [..., K] dense (float32, bfloat16, float16) or packed. w: [N, K] dense or packed. bias: [N], added in float32 before
    the one rounding. Returns [..., N] in `out_dtype`, else x's dtype (float32 where x is packed).
    Products and sums are float32, never TF32; weights are decoded exactly. `input_scheme` quantizes x first (None: it is
    read exactly). `batch_invariant=True`: a row's bits do not depend on how many rows there are.
    K = 0 or no rows give zeros plus bias. Raises InputError. Source: SPEC A20-A37.

    >>> import narrowgate as ng
    >>> w = ng.quantize(torch.eye(32) * 6, "mxfp4")
    >>> torch.equal(linear(torch.eye(32), w), w.dequantize(torch.float32).T)
    True
    """
    calls, key = _ready.find(w) if impl is None else None, None
    if calls is not None and plain(x) and (bias is None or plain(bias)):
        key = (x.shape, x.dtype, input_scheme, out_dtype, None if bias is None else (bias.shape, bias.dtype))
        if (call := calls.get(key)) is not None:
            return call(x, bias)
    args, kwargs = _flatten_linear(x, w, bias, input_scheme=input_scheme, out_dtype=out_dtype, batch_invariant=batch_invariant)
    y = _linear(*args, **kwargs, impl=impl)
    if calls is not None and key is not None and key not in calls:
        _ready.make(calls, key, x.shape, input_scheme, y.dtype)
    return y


# ---- matmul


def _check_matmul(
    a: Flat, a_format: str, b: Flat, b_format: str, *, out_dtype: torch.dtype | None = None, batch_invariant: bool = False
) -> None:
    left, right = _check_operand("matmul", "a", a, a_format), _check_operand("matmul", "b", b, b_format)
    _check_common("matmul", a[0], out_dtype, b=b[0])
    shapes = f"got a {list(left)} and b {list(right)}"
    checks.expect("matmul", len(left) == 2 and len(right) == 2, f"expected a [M, K] and b [K, N], {shapes}")
    checks.expect("matmul", left[1] == right[0], f"expected a [M, K] and b [K, N] with one K, {shapes}")


def _allocate_matmul(
    a: Flat, a_format: str, b: Flat, b_format: str, *, out_dtype: torch.dtype | None = None, batch_invariant: bool = False
) -> Tensor:
    shape = (operand_shape(a, a_format)[0], operand_shape(b, b_format)[1])
    return a[0].new_empty(shape, dtype=_dtype(a, a_format, out_dtype))


def _flatten_matmul(a: Operand, b: Operand, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (*flatten(a), *flatten(b)), kwargs


_matmul = Operator(
    "matmul", "Tensor[] a, str a_format, Tensor[] b, str b_format, *, ScalarType? out_dtype=None, bool batch_invariant=False",
    "narrowgate.ops.linear.reference:matmul", allocate=_allocate_matmul, check=_check_matmul, flatten=_flatten_matmul,
    remember=True,
)  # fmt: skip


def matmul(
    a: Operand, b: Operand, *, out_dtype: torch.dtype | None = None, batch_invariant: bool = False, impl: str | None = None
) -> Tensor:
    """c = a b, either operand packed or both; scales may be blocked along both axes and come in several levels.

    a: [M, K], b: [K, N], dense (float32, bfloat16, float16) or packed. Returns [M, N] in `out_dtype`, else a's dtype
    (float32 where a is packed). Float32 products and sums, never TF32. Raises InputError. Source: SPEC A20-A36.

    >>> import narrowgate as ng
    >>> b = ng.pack(torch.tensor([[15, 1], [2, 3]]), "int4")
    >>> matmul(torch.tensor([[1.0, 2.0]]), b)
    tensor([[3., 7.]])
    """
    args, kwargs = _flatten_matmul(a, b, out_dtype=out_dtype, batch_invariant=batch_invariant)
    return _matmul(*args, **kwargs, impl=impl)


# ---- grouped_linear


def _check_grouped(
    x: Flat, x_format: str, w: Flat, w_format: str, group_sizes: Tensor, *,
    input_scheme: str | None = None, out_dtype: torch.dtype | None = None, batch_invariant: bool = False,
) -> None:  # fmt: skip
    op = "grouped_linear"
    xs, ws = _check_operand(op, "x", x, x_format), _check_operand(op, "w", w, w_format)
    _check_common(op, x[0], out_dtype, w=w[0], group_sizes=group_sizes)
    _check_input_scheme(op, input_scheme, x_format)
    checks.expect(op, len(ws) == 3, f"expected w of shape [E, N, K], got {list(ws)}")
    checks.expect(op, len(xs) == 2 and xs[1] == ws[2], f"expected x of shape [T, {ws[2]}], got {list(xs)}")
    checks.shape(op, "group_sizes", group_sizes, ws[0])
    checks.dtype(op, "group_sizes", group_sizes, checks.INDICES)


def _check_grouped_values(x: Flat, x_format: str, w: Flat, w_format: str, group_sizes: Tensor, **kwargs: Any) -> None:
    if checks_values(group_sizes) and group_sizes.numel():
        total, tokens = int(group_sizes.sum()), operand_shape(x, x_format)[0]
        fits = int(group_sizes.min()) >= 0 and total <= tokens
        checks.expect(
            "grouped_linear", fits, f"expected group_sizes >= 0 that sum to at most {tokens}, got {group_sizes.tolist()}"
        )


def _allocate_grouped(
    x: Flat, x_format: str, w: Flat, w_format: str, group_sizes: Tensor, *,
    input_scheme: str | None = None, out_dtype: torch.dtype | None = None, batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    shape = (operand_shape(x, x_format)[0], operand_shape(w, w_format)[1])
    return x[0].new_empty(shape, dtype=_dtype(x, x_format, out_dtype))


def _flatten_grouped(x: Operand, w: Operand, group_sizes: Tensor, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (*flatten(x), *flatten(w), group_sizes), kwargs


_grouped = Operator(
    "grouped_linear",
    "Tensor[] x, str x_format, Tensor[] w, str w_format, Tensor group_sizes, *, str? input_scheme=None, "
    "ScalarType? out_dtype=None, bool batch_invariant=False",
    "narrowgate.ops.linear.reference:grouped_linear",
    allocate=_allocate_grouped, check=_check_grouped, check_values=_check_grouped_values, flatten=_flatten_grouped,
    remember=True,
)  # fmt: skip


def grouped_linear(
    x: Operand, w: Operand, group_sizes: Tensor, *, input_scheme: str | None = None, out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """Each token times its expert's matrix: y_t = x_t w_e^T, where tokens come sorted by expert.

    x: [T, K] dense or packed, the first group_sizes[0] rows for expert 0, and so on. w: [E, N, K] dense or packed.
    group_sizes: int32 or int64 [E]; rows past their sum are zero. Returns [T, N] in `out_dtype`, else x's dtype.
    Same arithmetic as `linear`. Raises InputError, also for sizes that are negative or sum to more than T (on the CPU).

    >>> w = torch.stack([torch.eye(2), 2 * torch.eye(2)])
    >>> grouped_linear(torch.ones(3, 2), w, torch.tensor([1, 1]))
    tensor([[1., 1.],
            [2., 2.],
            [0., 0.]])
    """
    args, kwargs = _flatten_grouped(
        x, w, group_sizes, input_scheme=input_scheme, out_dtype=out_dtype, batch_invariant=batch_invariant
    )
    return _grouped(*args, **kwargs, impl=impl)


# ---- the kernels


def _describe(impl: str, op: str) -> Callable[..., dict[str, Any]]:
    def describe(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return importlib.import_module(f"narrowgate.ops.linear.{impl}").describe(op, *args, **kwargs)

    return describe


def _refuse(op: str) -> Callable[..., Sequence[str]]:
    def refuse(*args: Any, **kwargs: Any) -> Sequence[str]:
        return importlib.import_module("narrowgate.ops.linear.gpu").refuse(op, *args, **kwargs)

    return refuse


for _operator in (_linear, _matmul, _grouped):
    _name = _operator.name
    _operator.add(Kernel("cpu", f"narrowgate.ops.linear.cpu:{_name}", describe=_describe("cpu", _name)))
    _operator.add(Kernel("gpu", f"narrowgate.ops.linear.gpu:{_name}", _refuse(_name), _describe("gpu", _name)))

_ready = Ready(_linear, "narrowgate.ops.linear.cpu:ready")
