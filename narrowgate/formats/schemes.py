"""The catalogue of quantization schemes: one frozen record each, and nothing to run.

A record says which element the codes are, which part of its range is used, which scales there are, over how many values
and how they are stored, and in which layout the codes go. narrowgate.quantize reads the records; tests, reports and the
command line enumerate them, so that adding a scheme of a known method is adding one record. Formats that interleave codes
and scales in a file (ggml's blocks) are kept apart here and joined at the file's edge (narrowgate.packing.ggml).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from narrowgate.errors import InputError
from narrowgate.formats.elements import Element, element

TENSOR = "tensor"  # one factor for the whole tensor
ROW = "row"  # one factor for each row


@dataclass(frozen=True)
class ScaleSpec:
    """One level of scales: `element` stored once for every `span` values of the last axis (or per ROW, or per TENSOR)."""

    element: str
    span: int | str

    def block(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Extents of one scale's block over a tensor of this shape, one per value axis."""
        if self.span == TENSOR:
            return tuple(max(extent, 1) for extent in shape)
        width = max(shape[-1], 1) if self.span == ROW else int(self.span)
        return (1,) * (len(shape) - 1) + (width,)


@dataclass(frozen=True)
class Scheme:
    """How a tensor becomes codes and scales.

    method: the family of narrowgate.quantize.methods. scales: innermost first. code_range: the integers used (None: the
    whole element). zero_point: subtracted from every code (None: nothing is). scale_rules: legal names, default first.
    """

    name: str
    element: str
    method: str
    scales: tuple[ScaleSpec, ...] = ()
    code_range: tuple[int, int] | None = None
    zero_point: int | None = None
    codebook: str | None = None
    scale_rules: tuple[str, ...] = ()
    layout: str = "words@1"
    k_multiple: int = 1

    @property
    def group_size(self) -> int | None:
        """Values of one innermost scale along the last axis; None where a scale spans the row or there is none."""
        span = self.scales[0].span if self.scales else None
        return span if isinstance(span, int) else None

    @property
    def value_element(self) -> Element:
        """The record of the element that the codes are."""
        return element(self.element)

    def bits_per_value(self, shape: Sequence[int]) -> float:
        """Stored bits a value for a tensor of this shape: codes, scales, zero point and codebook, no layout's padding."""
        total = prod(shape) * self.value_element.bits
        for level in self.scales:
            grid = (-(-extent // block) for extent, block in zip(shape, level.block(shape), strict=True))
            total += prod(grid) * element(level.element).bits
        total += 0 if self.zero_point is None else 8
        total += 32 * 2**self.value_element.bits if self.codebook else 0
        return total / max(prod(shape), 1)


_MX_RULES = ("rceil", "floor", "even", "mse")


def _mx(name: str, value: str, layout: str = "words@1") -> Scheme:
    scales = (ScaleSpec("float8_e8m0fnu", 32),)
    return Scheme(name, value, "microscaling", scales, scale_rules=_MX_RULES, layout=layout)


def _integer(name: str, bits: int, span: int | str, scale: str = "bfloat16") -> Scheme:
    top = 2 ** (bits - 1) - 1
    rules = ("round_up",) if scale == "bfloat16" else ("nearest",)
    return Scheme(name, f"int{bits}", "integer", (ScaleSpec(scale, span),), code_range=(-top, top), scale_rules=rules)


_F16_32 = (ScaleSpec("float16", 32),)

_SCHEMES: dict[str, Scheme] = {
    s.name: s
    for s in (
        _mx("mxfp4", "float4_e2m1fn"),
        _mx("mxfp6_e2m3", "float6_e2m3fn", "fp6_bytes@1"),
        _mx("mxfp6_e3m2", "float6_e3m2fn", "fp6_bytes@1"),
        _mx("mxfp8_e4m3", "float8_e4m3fn"),
        _mx("mxfp8_e5m2", "float8_e5m2"),
        Scheme(
            "nvfp4", "float4_e2m1fn", "nvfp4", (ScaleSpec("float8_e4m3fn", 16), ScaleSpec("float32", TENSOR)),
            scale_rules=("nearest_nonzero", "nearest"),
        ),
        _integer("int4_g32", 4, 32),
        _integer("int4_g64", 4, 64),
        _integer("int4_g128", 4, 128),
        _integer("int8_g32", 8, 32),
        Scheme(
            "int2_g32", "int2", "signed_integer", (ScaleSpec("bfloat16", 32),), code_range=(-2, 1),
            scale_rules=("round_up",),
        ),
        _integer("int8_channel", 8, ROW, "float32"),
        Scheme(
            "nf4_g64", "index4", "table", (ScaleSpec("float32", 64),), codebook="nf4", scale_rules=("amax",),
        ),
        Scheme("q8_0", "int8", "q8_0", _F16_32, code_range=(-127, 127), scale_rules=("nearest",), k_multiple=32),
        Scheme("q4_0", "uint4", "q4_0", _F16_32, zero_point=8, scale_rules=("nearest",), k_multiple=32),
        Scheme("iq4_nl", "index4", "iq4_nl", _F16_32, codebook="iq4_nl", scale_rules=("nearest",), k_multiple=32),
        Scheme("bf16", "bfloat16", "plain", layout="rows@1"),
    )
}  # fmt: skip


def scheme(name: str | Scheme) -> Scheme:
    """The record of the scheme called `name`. Raises InputError with the known names for any other.

    >>> scheme("nvfp4").group_size
    16
    """
    if isinstance(name, Scheme):
        return name
    try:
        return _SCHEMES[name]
    except (KeyError, TypeError):
        raise InputError(f"scheme: expected one of {', '.join(_SCHEMES)}, got {name!r}") from None


def schemes() -> tuple[str, ...]:
    """The names of all schemes, in the catalogue's order."""
    return tuple(_SCHEMES)
