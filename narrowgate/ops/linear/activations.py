"""Quantizing the activations of a product on purpose: what `input_scheme` may name, and what happens to a value that is no number.

All of it can run inside a captured graph: an infinity saturates (read as 2^127), a NaN makes its block (row) of outputs NaN, by
scale byte 255 under an exponent scale and by an E4M3 code NaN under `float8_e4m3fn_token`. Integer codes have no NaN: on the CPU,
where values may be looked at, such an x is refused; elsewhere the scale of that block becomes NaN. Never a plausible number.

The `_row` schemes are the batch-independent recipe of SPEC B34: a global scale for each row, the product multiplied by its inverse."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from narrowgate.dispatch import checks_values
from narrowgate.errors import InputError
from narrowgate.formats import element, scheme
from narrowgate.packing import PackedTensor, Scale, decode, flatten, pack
from narrowgate.quantize import quantize
from narrowgate.quantize.arithmetic import divide
from narrowgate.quantize.non_finite import NAN_CODE, saturated

ROW_SCHEMES = {"mxfp8_e4m3_row": "mxfp8_e4m3", "mxfp6_e2m3_row": "mxfp6_e2m3", "mxfp6_e3m2_row": "mxfp6_e3m2"}
INPUT_SCHEMES = (
    "int8_g32", "int8_channel", "float8_e4m3fn_token", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4",
    *ROW_SCHEMES,
)  # fmt: skip
SMALLEST_AMAX = 1e-6  # of a row: a zero row gets a finite global scale and stays zero (SPEC B38)


def quantize_input(x: Tensor, name: str) -> PackedTensor:
    """x [..., K] in the input scheme called `name`; each row depends on itself alone.

    A name of the catalogue: that scheme. `float8_e4m3fn_token`: a float32 scale a row, amax / 448 (1 where it is 0). A `_row`
    scheme: gs = f32(448 max / f32(max(amax_r, 1e-6))), the values bf16(f32(x) gs) in the scheme named before `_row`, and an
    outer bfloat16 scale bf16(1 / gs). Raises InputError for a NaN under integer codes, where values may be looked at.
    """
    if name == "float8_e4m3fn_token":
        return _token(x)
    if name in ROW_SCHEMES:
        packed, factor = quantize_rows(x, name)
        outer = Scale(factor.view(torch.int16), "bfloat16", _row_block(x))
        return replace(packed, scales=(*packed.scales, outer))
    if scheme(name).value_element.kind == "int" and checks_values(x) and bool(x.isnan().any()):
        raise InputError(
            f"input_scheme {name}: integer codes have no NaN, {int(x.isnan().sum())} of {x.numel()} values are NaN"
        )
    return _saturating(x, name)


def _saturating(x: Tensor, name: str) -> PackedTensor:
    six = scheme(name).value_element.bits == 6  # fp6_bytes@1 would refuse some K, and activations are read once
    return quantize(x, name, layout="bytes@1" if six else None, non_finite="saturate")


def quantize_rows(x: Tensor, name: str) -> tuple[PackedTensor, Tensor]:
    """A `_row` scheme in its two parts: bf16(x gs_r) quantized, and bf16(1 / gs_r) [..., 1], by which outputs are multiplied."""
    base = ROW_SCHEMES[name]
    clean, nan = saturated(x)
    numerator = 448.0 * scheme(base).value_element.max
    gs = divide(numerator, _amax(clean).clamp(min=SMALLEST_AMAX))
    scaled = torch.where(nan, torch.nan, clean * gs).to(torch.bfloat16)
    return _saturating(scaled, base), divide(1.0, gs).to(torch.bfloat16)


def _token(x: Tensor) -> PackedTensor:
    clean, nan = saturated(x)
    scale = divide(_amax(clean), 448.0)
    scale = torch.where(scale > 0, scale, 1.0)
    codes = element("float8_e4m3fn").encode_unchecked(divide(clean, scale.expand_as(clean)))
    codes = torch.where(nan, NAN_CODE, codes)
    rows = Scale(scale.view(torch.int32), "float32", _row_block(x))
    return pack(codes, "float8_e4m3fn", scales=(rows,), layout="bytes@1")


def _amax(x: Tensor) -> Tensor:
    """float32 [..., 1], 0 for rows of no values."""
    return x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros((*x.shape[:-1], 1))


def _row_block(x: Tensor) -> tuple[int, ...]:
    return (1,) * (x.ndim - 1) + (max(x.shape[-1], 1),)


def row_scaled(product: Callable[..., None]) -> Callable[..., None]:
    """`linear` or `grouped_linear` of one implementation, with the `_row` schemes: its own product of the quantized rows without
    their row scale, times that, plus the bias, all in float32, then the one rounding (SPEC B34)."""
    has_bias = product.__name__ == "linear"

    @functools.wraps(product)
    def run(
        x: list[Tensor], x_format: str, w: list[Tensor], w_format: str, last: Tensor | None = None, *,
        input_scheme: str | None = None, out: Tensor, **options: Any,
    ) -> None:  # fmt: skip
        if input_scheme not in ROW_SCHEMES:
            product(x, x_format, w, w_format, last, input_scheme=input_scheme, out=out, **options)
            return
        packed, factor = quantize_rows(x[0], input_scheme)
        total = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        product(*flatten(packed), w, w_format, None if has_bias else last, input_scheme=None, out=total, **options)
        total *= factor.to(torch.float32)
        if has_bias and last is not None:
            total += last.to(torch.float32)
        out.copy_(total)

    return run


def as_rows(x: Tensor) -> Tensor:
    """[..., K] as [M, K], also where K is 0."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def read_input(x: Tensor | PackedTensor, input_scheme: str | None) -> Tensor:
    """What the product multiplies by, in float32."""
    if input_scheme is not None:
        assert isinstance(x, Tensor)
        x = quantize_input(x, input_scheme)
    return decode(x) if isinstance(x, PackedTensor) else x.float()
