"""The products on the CPU: which route a call takes. The kernels are in cpu_exact.py and cpu_ordered.py, their calls in cpu_run.py.

`linear` and `grouped_linear` on a packed weight run the exact kernel; the plan says what it reads and in what order it adds.
`matmul` decodes and sums in order. The plain route decodes a tile of the weight to float32 and multiplies with torch's float32
product; the whole matrix is never unpacked. It serves dense weights, the packed ones that `reading.read_weight` refuses, and machines
where the kernels cannot run (no Numba, no AVX2): then it says so once in the log, and always in the plan. With
`batch_invariant` its rows are matrix-vector products of one shape each, so of one order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from narrowgate.errors import UnsupportedError
from narrowgate.ops.linear.activations import as_rows, read_input, row_scaled
from narrowgate.ops.linear.integer import integer_weight
from narrowgate.ops.linear.prepare import prepare
from narrowgate.ops.linear.reading import Weight, read_weight, reading
from narrowgate.packing import Operand, PackedTensor, decode_rows, flatten, unflatten
from narrowgate.packing.decode import RUNS

LOG = logging.getLogger("narrowgate")
TILE = 8 << 20  # bytes of decoded weight at a time: they stay in the caches between decoding and product


@cache
def kernels() -> tuple[Any, str]:
    """(the module that calls the compiled kernels, "") or (None, why there are none here)."""
    try:
        from narrowgate.ops.linear import cpu_run
        from narrowgate.simd.cpu_features import require

        require()
        return cpu_run, ""
    except (ImportError, UnsupportedError) as error:
        LOG.warning("narrowgate: products run as plain torch: %s", error)
        return None, str(error)


def route(w: list[Tensor], w_format: str) -> tuple[Weight | None, str]:
    """(the reading that the exact kernel works from, "") or (None, why the plain route runs)."""
    weight, reason = reading(w_format)
    if weight is None:
        return None, reason
    run, reason = kernels()
    return (weight, "") if run is not None else (None, reason)


# ---- the plain route


def _into(x: Tensor, w: Tensor, y: Tensor, batch_invariant: bool) -> None:
    """y [M, N] = x [M, K] w[N, K]^T, all float32."""
    if not batch_invariant:
        torch.mm(x, w.T, out=y) if y.is_contiguous() else y.copy_(torch.mm(x, w.T))
        return
    for i in range(x.shape[0]):
        y[i] = torch.mv(w, x[i].clone())  # a copy, since an aligned vector may be summed in another order than an unaligned one


def _slices(w: Operand) -> Iterator[tuple[int, int, Tensor]]:
    """(start, stop, rows [start, stop) of w in float32), a tile at a time; a tile is overwritten by the next."""
    n, k = w.shape
    if isinstance(w, Tensor) and w.dtype == torch.float32:
        yield 0, n, w
        return
    step = min(n, max(1, TILE // (4 * max(k, 1))))
    tile = torch.empty(step, k)
    for start in range(0, n, step):
        part = tile[: min(step, n - start)]
        _decode(w, start, part)
        yield start, start + part.shape[0], part


def _decode(w: Operand, start: int, into: Tensor) -> None:
    stop = start + into.shape[0]
    if isinstance(w, Tensor):
        into.copy_(w[start:stop])
    elif kernels()[0] is not None and w.layout in RUNS:
        from narrowgate.packing.decode_run_cpu import decode_into

        decode_into(w, into, first=start)
    else:
        into.copy_(decode_rows(w, start, stop))


def _product(x: Tensor, w: Operand, batch_invariant: bool) -> Tensor:
    """x [M, K] float32 times w [N, K], a tile of rows of w at a time."""
    y = torch.empty(x.shape[0], w.shape[0])
    if w.shape[1] == 0:
        return y.zero_()
    for start, stop, rows in _slices(w):
        _into(x, rows, y[:, start:stop], batch_invariant)
    return y


# ---- operators


def _in_place(weight: Weight, w: list[Tensor], w_format: str) -> tuple[Weight, list[Tensor]]:
    """The weight as it is where the kernels read its layout or turn it into lanes themselves; any other is prepared now."""
    if weight.prepared or weight.plain:
        return weight, w
    packed = unflatten(w, w_format)
    assert isinstance(packed, PackedTensor)
    tensors, described = flatten(prepare(packed))
    return read_weight(described), tensors


def _run(
    weight: Weight, w: list[Tensor], x: Tensor, bias: Tensor | None, out: Tensor, matrix: int = 0, integer: bool = False
) -> None:
    """out [M, N] = x w[matrix]^T + bias by a kernel; `integer`: x in int8 first, by the contract of integer.py."""
    if x.shape[0] == 0 or weight.n == 0:
        return
    if weight.k == 0:
        out.zero_() if bias is None else out.copy_(bias.float().expand_as(out))
        return
    if integer:
        from narrowgate.ops.linear import cpu_run_integer

        cpu_run_integer.integer(weight, w, x, bias, out, matrix)
    else:
        kernels()[0].exact(weight, w, x, bias, out, matrix)


@row_scaled
def linear(
    x: list[Tensor], x_format: str, w: list[Tensor], w_format: str, bias: Tensor | None = None, *,
    input_scheme: str | None = None, out_dtype: torch.dtype | None = None, batch_invariant: bool = False, out: Tensor,
) -> None:  # fmt: skip
    weight, _ = route(w, w_format)
    integer = weight is not None and integer_weight(w, w_format, input_scheme)[0] is not None
    rows = _read(x, x_format, None if integer else input_scheme)
    if weight is not None:
        weight, w = _in_place(weight, w, w_format)
        if out.is_contiguous():
            _run(weight, w, rows, bias, out if out.dim() == 2 else as_rows(out), integer=integer)
        else:
            dense = torch.empty_like(out, memory_format=torch.contiguous_format)
            _run(weight, w, rows, bias, as_rows(dense), integer=integer)
            out.copy_(dense)
        return
    y = _product(rows.float(), unflatten(w, w_format), batch_invariant)
    if bias is not None:
        y += bias.float()
    out.copy_(y.view(out.shape))


def ready(
    w: list[Tensor], w_format: str, shape: torch.Size, input_scheme: str | None, dtype: torch.dtype
) -> Callable[[Tensor, Tensor | None], Tensor] | None:
    """A call of `linear` on a contiguous x of one shape, as call(x, bias) -> y; None where a weight must be prepared first, where
    the activations are decoded on the way, or where nothing is multiplied."""
    weight, _ = route(w, w_format)
    if weight is None or not weight.prepared or 0 in (*shape, weight.n):
        return None
    if weight.outer_rows and weight.n % 16:
        return None  # the factors are copied to whole vectors at every call
    if input_scheme is None:
        return kernels()[0].ready(weight, w, shape, dtype)
    if integer_weight(w, w_format, input_scheme)[0] is None or weight.table_index is not None:
        return None
    from narrowgate.ops.linear import cpu_run_integer

    return cpu_run_integer.ready(weight, w, shape, dtype)


def _read(x: list[Tensor], x_format: str, input_scheme: str | None) -> Tensor:
    """[M, K]: a plain x as it is, anything else decoded to float32."""
    if x_format == "dense" and input_scheme is None:
        return x[0] if x[0].dim() == 2 else as_rows(x[0])
    return as_rows(read_input(unflatten(x, x_format), input_scheme))


def matmul(
    a: list[Tensor], a_format: str, b: list[Tensor], b_format: str, *,
    out_dtype: torch.dtype | None = None, batch_invariant: bool = False, out: Tensor,
) -> None:  # fmt: skip
    left, right = read_input(unflatten(a, a_format), None), unflatten(b, b_format)
    run, _ = kernels()
    if run is None:
        out.copy_(_product(left, read_input(right, None).T.contiguous(), batch_invariant))
        return
    total = torch.zeros(out.shape)
    for start, stop, rows in _slices(right):
        run.add_in_order(left[:, start:stop], rows, total)
    out.copy_(total)


@row_scaled
def grouped_linear(
    x: list[Tensor], x_format: str, w: list[Tensor], w_format: str, group_sizes: Tensor, *,
    input_scheme: str | None = None, out_dtype: torch.dtype | None = None, batch_invariant: bool = False, out: Tensor,
) -> None:  # fmt: skip
    weight, _ = route(w, w_format)
    integer = weight is not None and integer_weight(w, w_format, input_scheme)[0] is not None
    rows = _read(x, x_format, None if integer else input_scheme)
    packed = None if weight is not None else unflatten(w, w_format)
    if weight is not None:
        weight, w = _in_place(weight, w, w_format)
    start = 0
    for e, size in enumerate(group_sizes.tolist()):
        stop = start + size
        if size and packed is None:
            assert weight is not None
            _run(weight, w, rows[start:stop], None, out[start:stop], e, integer)
        elif size:
            expert = packed.select(e) if isinstance(packed, PackedTensor) else packed[e]  # type: ignore[index]
            out[start:stop] = _product(rows[start:stop].float(), expert, batch_invariant)
        start = stop
    out[start:] = 0


def describe(
    op: str, *args: Any, batch_invariant: bool = False, input_scheme: str | None = None, **kwargs: Any
) -> dict[str, Any]:
    """The plan's fields of a call: its route, and why not the kernel where it is not."""
    w, w_format = (args[2], args[3]) if len(args) > 3 else (kwargs["w"], kwargs["w_format"])
    shown = f"{input_scheme or 'exact'} activations"
    if op == "matmul":
        if kernels()[0] is not None:
            contract = "decoded exactly, one rounded product and one rounded sum a k, in order; never fused"
            return {"reveals": "float32", "batch_invariant": True, "workspace_bytes": TILE, "contract": contract}
        weight, reason = None, kernels()[1]
    else:
        weight, reason = route(w, w_format)
    if weight is None:
        contract = f"{shown}, plain torch ({reason}): weights decoded to float32 in slices, float32 sums in the library's order"
        return {
            "reveals": "float32", "batch_invariant": batch_invariant, "workspace_bytes": TILE, "contract": contract,
        }  # fmt: skip
    kept = (
        "read in place" if weight.prepared else f"{weight.layout} turned into lanes a slice at a time (ng.prepare does it once)"
    )
    shared = {
        "layout": weight.layout, "batch_invariant": True, "workspace_bytes": 0 if weight.prepared else 2 * (8 << 20),
    }  # fmt: skip
    integer, reason = integer_weight(w, w_format, input_scheme)
    if integer is not None:
        contract = "int8 activations, byte dot products: exact integers in a run, then products of scales run by run"
        return {**shared, "accumulate": "int32 in a run, then float32", "contract": f"{contract}; {kept}"}
    if input_scheme == "int8_g32":
        shown += f" as values, no integer product ({reason})"
    order = "sums of a scale block in order of k by fma, then fma with the scale, block by block"
    return {**shared, "reveals": "float32", "contract": f"{shown}, {kept}; {order}"}
