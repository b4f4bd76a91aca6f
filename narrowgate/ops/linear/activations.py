"""Quantizing the activations of a product on purpose: what `input_scheme` may name."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from narrowgate.formats import element
from narrowgate.packing import PackedTensor, Scale, decode, pack
from narrowgate.quantize import quantize

INPUT_SCHEMES = (
    "int8_g32", "int8_channel", "float8_e4m3fn_token", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4",
)  # fmt: skip


def quantize_input(x: Tensor, name: str) -> PackedTensor:
    """x [..., K] in the scheme called `name`. `float8_e4m3fn_token`: a float32 scale a row, amax / 448 (1 where it is 0)."""
    if name != "float8_e4m3fn_token":
        return quantize(x, name)
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros((*x.shape[:-1], 1))
    scale = torch.where(amax > 0, amax / 448.0, torch.ones_like(amax))
    codes = element("float8_e4m3fn").encode(x / scale)
    block = (1,) * (x.ndim - 1) + (max(x.shape[-1], 1),)
    return pack(codes, "float8_e4m3fn", scales=(Scale(scale.view(torch.int32), "float32", block),), layout="bytes@1")


def as_rows(x: Tensor) -> Tensor:
    """[..., K] as [M, K], also where K is 0."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def read_input(x: Tensor | PackedTensor, input_scheme: str | None) -> Tensor:
    """What the product multiplies by, in float32."""
    if input_scheme is not None:
        assert isinstance(x, Tensor)
        x = quantize_input(x, input_scheme)
    return decode(x) if isinstance(x, PackedTensor) else x.float()
