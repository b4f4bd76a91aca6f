"""quantize as an operator: plain tensors out, so that it can be traced; the wrapper makes a PackedTensor of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgate.dispatch import Kernel, Operator
from narrowgate.errors import InputError
from narrowgate.formats import Scheme, element
from narrowgate.formats import scheme as find_scheme
from narrowgate.ops import checks
from narrowgate.ops.host import host_kernel
from narrowgate.packing import PackedTensor, Scale, describe, layout, unflatten


def template(
    shape: tuple[int, ...], scheme: str | Scheme, *, layout_name: str | None = None, per_row: bool = False,
    device: torch.device | str = "meta",
) -> PackedTensor:  # fmt: skip
    """A PackedTensor of the right shapes and dtypes whose bytes mean nothing: what quantizing such a tensor would give."""
    record = find_scheme(scheme)
    chosen, kind = layout(layout_name or record.layout), record.value_element
    chosen.check(shape, kind.bits, "quantize")

    def empty(where: str, extents: tuple[int, ...], bits: int) -> Tensor:
        store = layout(where)
        return torch.empty(store.storage_shape(extents, bits), dtype=store.storage_dtype(bits), device=device)

    scales = []
    for level, spec in enumerate(record.scales):
        block = (1,) * (len(shape) - 1) + (max(shape[-1], 1),) if level and per_row else spec.block(shape)
        grid = tuple(-(-extent // b) for extent, b in zip(shape, block, strict=True))
        scales.append(Scale(empty("rows@1", grid, element(spec.element).bits), spec.element, block))
    zero = None
    if record.zero_point is not None:
        zero = Scale(empty("rows@1", tuple(min(e, 1) for e in shape), 8), "uint8", tuple(max(e, 1) for e in shape))
    table = torch.empty(2**kind.bits, dtype=torch.int32, device=device) if record.codebook else None
    return PackedTensor(kind.name, chosen.name, empty(chosen.name, shape, kind.bits), shape, tuple(scales), zero, (), table)


def _check(
    x: Tensor, scheme: str, *, scale_rule: str | None = None, global_scale: Tensor | None = None, per_row: bool = False,
    layout: str | None = None,
) -> None:  # fmt: skip
    checks.dtype("quantize", "x", x)
    checks.expect("quantize", x.ndim >= 1, "expected x with at least one axis, got a scalar")
    checks.device("quantize", x, global_scale=global_scale)
    if global_scale is not None and per_row:
        raise InputError("quantize: expected global_scale as a tensor or per row, got both")


def _allocate(
    x: Tensor, scheme: str, *, scale_rule: str | None = None, global_scale: Tensor | None = None, per_row: bool = False,
    layout: str | None = None,
) -> list[Tensor]:  # fmt: skip
    rows = per_row or (global_scale is not None and global_scale.numel() > 1)
    return template(tuple(x.shape), scheme, layout_name=layout, per_row=rows, device=x.device).tensors()


def _flatten(
    x: Tensor, scheme: str | Scheme, *, scale_rule: str | None = None, global_scale: float | Tensor | str | None = None,
    layout: str | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    if isinstance(global_scale, str) and global_scale != "per_row":
        raise InputError(f"quantize: expected global_scale as a number, one number a row or 'per_row', got {global_scale!r}")
    per_row = isinstance(global_scale, str)
    given = None
    if global_scale is not None and not isinstance(global_scale, str):
        given = torch.as_tensor(global_scale, dtype=torch.float32, device=x.device).reshape(-1)
    return (x, find_scheme(scheme).name), {
        "scale_rule": scale_rule, "global_scale": given, "per_row": per_row, "layout": layout,
    }  # fmt: skip


_quantize = Operator(
    "quantize",
    "Tensor x, str scheme, *, str? scale_rule=None, Tensor? global_scale=None, bool per_row=False, str? layout=None",
    "narrowgate.ops.quantize.reference:quantize",
    allocate=_allocate, check=_check, returns="list", has_out=False, flatten=_flatten,
)  # fmt: skip
_quantize.add(Kernel("gpu", "narrowgate.ops.quantize.gpu:quantize"))


def quantize(
    x: Tensor, scheme: str | Scheme, *, scale_rule: str | None = None, global_scale: float | Tensor | str | None = None,
    layout: str | None = None, impl: str | None = None,
) -> PackedTensor:  # fmt: skip
    """Quantize x [..., K] along its last axis; codes and scale bytes are the same on every device and in every implementation.

    x: float32, bfloat16 or float16, finite, read exactly. scheme: a name of `narrowgate.schemes()`. scale_rule: one of the
    scheme's (None: its first). global_scale, for two-level schemes (nvfp4), the outer factor s2 in value = code * s * s2: a
    number, one number a row, "per_row" (amax of the row / 2688), or None (amax of the tensor / 2688). layout: of the codes.
    q = nearest element to f32(x / s), s as stored. Any K is legal; the last block is short. x is not changed.
    Raises InputError: a wrong dtype, non-finite values (count and first index), an unknown name, a K that the scheme refuses.
    Inside a captured CUDA stream no value is looked at: an infinity saturates, a NaN makes its block NaN (non_finite.py).
    Source: SPEC A39, A40, B19-B23.

    >>> w = quantize(torch.tensor([[0.0, 0.5, -3.0, 6.0]]), "mxfp4")
    >>> w.codes().tolist(), w.scales[0].data.tolist()
    ([[0, 1, 13, 7]], [[127]])
    """
    args, kwargs = _flatten(x, scheme, scale_rule=scale_rule, global_scale=global_scale, layout=layout)
    tensors = _quantize(*args, **kwargs, impl=impl)
    rows = kwargs["per_row"] or (kwargs["global_scale"] is not None and kwargs["global_scale"].numel() > 1)
    packed = unflatten(tensors, describe(template(tuple(x.shape), scheme, layout_name=layout, per_row=rows)))
    assert isinstance(packed, PackedTensor)
    return packed


_quantize.add(host_kernel("narrowgate.ops.quantize.cpu:quantize"))
