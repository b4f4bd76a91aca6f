"""What the bits of one stored field mean: a frozen record per element, with `decode` to float32 and `encode` from it.

An element is a field width and a meaning, nothing else: no scale, no block, no place in memory. Codes are always the raw,
unsigned field bits: uint8 tensors up to 8 bits, int32 tensors above (a 32-bit field comes as its int32 bit pattern).
Names follow ml_dtypes. `decode` is exact. `encode` of a float rounds to nearest, ties to the even code, and keeps the sign
of zero; elements of at most 8 bits saturate (infinity too), float16 and bfloat16 overflow to infinity as IEEE says.
Integers round to nearest even and clamp. Left out: anything with a scale (narrowgate.quantize), packing (narrowgate.packing).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgate.errors import InputError
from narrowgate.formats import minifloat
from narrowgate.formats.minifloat import INFINITY_BITS, MAGNITUDE_MASK, QUIET_NAN_BITS, float_bits, from_bits

_INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32)


@dataclass(frozen=True)
class Element:
    """One stored field: `bits` wide, read as `kind` says.

    kind: "int" (two's complement), "uint", "index" (a row of a codebook), "float", "exponent" (a power of two, no sign).
    specials (floats): "none" (every code is a number), "nan" (only the all-ones magnitude is NaN), "ieee" (infinities too).
    zero_is_zero (exponents): byte 0 means 0 and not 2^-127 (SPEC B21).
    """

    name: str
    kind: str
    bits: int
    exponent_bits: int = 0
    mantissa_bits: int = 0
    bias: int = 0
    specials: str = "none"
    zero_is_zero: bool = False

    @property
    def code_dtype(self) -> torch.dtype:
        """The dtype of a codes tensor: uint8 up to 8 bits, int32 above."""
        return torch.uint8 if self.bits <= 8 else torch.int32

    @property
    def max_code(self) -> int:
        """The largest finite magnitude's code (floats), the largest value (integers), the last index."""
        if self.kind == "float":
            top = (1 << (self.bits - 1)) - 1
            return {"none": top, "nan": top - 1, "ieee": top - (1 << self.mantissa_bits)}[self.specials]
        if self.kind == "exponent":
            return 254
        return (1 << (self.bits - 1)) - 1 if self.kind == "int" else (1 << self.bits) - 1

    @property
    def max(self) -> float:
        """The largest finite value."""
        if self.kind in ("int", "uint", "index"):
            return float(self.max_code)
        return float(self.decode(torch.tensor([self.max_code], dtype=torch.int64)).item())

    @property
    def emax(self) -> int:
        """The exponent of the largest finite value (floats only): max lies in [2^emax, 2^(emax+1))."""
        if self.kind != "float":
            raise InputError(f"{self.name}: only float elements have an emax, this one is of kind {self.kind}")
        return (self.max_code >> self.mantissa_bits) - self.bias

    @property
    def saturates(self) -> bool:
        """Whether encode maps what is too large to the largest finite value; float16, bfloat16 and float32 give infinity."""
        return self.bits <= 8

    @property
    def has_nan(self) -> bool:
        """Whether some code is NaN."""
        return self.kind == "exponent" or self.specials != "none"

    def decode(self, codes: Tensor) -> Tensor:
        """The float32 value of every code, exactly; same shape. Bits above the field are ignored (SPEC B5).

        codes: any integer dtype. NaN codes give NaN, -0 gives -0. Raises InputError for floating codes and for index
        elements, which have no value without their codebook (narrowgate.packing.decode looks it up).

        >>> element("float4_e2m1fn").decode(torch.tensor([0, 7, 15])).tolist()
        [0.0, 6.0, -6.0]
        """
        code = _as_int32(self, codes)
        if self.kind == "index":
            raise InputError(f"{self.name}: an index has no value without its codebook")
        if self.kind == "float" and self.exponent_bits == 8:  # float32 itself, or its upper half
            return from_bits(code << (32 - self.bits))
        code = code & ((1 << self.bits) - 1)
        if self.kind == "int":
            sign = 1 << (self.bits - 1)
            return ((code ^ sign) - sign).to(torch.float32)
        if self.kind == "uint":
            return code.to(torch.float32)
        return self._decode_exponent(code) if self.kind == "exponent" else self._decode_float(code)

    def encode(self, values: Tensor) -> Tensor:
        """The code of every value: the nearest element, ties to even; same shape, `code_dtype`.

        values: float32, bfloat16 or float16. Exponent elements take exact powers of two alone, because every rounding of
        a scale is a named rule (narrowgate.quantize). Raises InputError for NaN where the element has no NaN.

        >>> element("float4_e2m1fn").encode(torch.tensor([0.25, 0.75, -9.0])).tolist()
        [0, 2, 15]
        """
        if values.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise InputError(f"{self.name}: encode expects float32, bfloat16 or float16 values, got {values.dtype}")
        values = values.to(torch.float32)
        if not self.has_nan and bool(values.isnan().any()):
            raise InputError(f"{self.name}: NaN has no code in this element ({int(values.isnan().sum())} NaN values given)")
        return self.encode_unchecked(values)

    def encode_unchecked(self, values: Tensor) -> Tensor:
        """`encode` of float32 values without the look for NaN (no device synchronisation); NaN in, some code out."""
        if self.kind == "float":
            return self._encode_float(float_bits(values)).to(self.code_dtype)
        if self.kind == "exponent":
            return self._encode_exponent(values).to(self.code_dtype)
        if self.kind == "index":
            raise InputError(f"{self.name}: an index is not encoded by itself; a scheme with a codebook does it")
        low = -self.max_code - 1 if self.kind == "int" else 0
        integers = values.round().clamp(low, self.max_code).to(torch.int32)
        return (integers & ((1 << self.bits) - 1)).to(self.code_dtype)

    def _decode_float(self, code: Tensor) -> Tensor:
        top = 1 << (self.bits - 1)
        magnitude = code & (top - 1)
        bits = minifloat.decode_magnitude(magnitude, self.mantissa_bits, self.bias)
        if self.specials == "nan":
            bits = torch.where(magnitude == top - 1, QUIET_NAN_BITS, bits)
        elif self.specials == "ieee":
            payload = (magnitude & ((1 << self.mantissa_bits) - 1)) << (23 - self.mantissa_bits)
            bits = torch.where(magnitude > self.max_code, INFINITY_BITS | payload, bits)
        return from_bits(bits | ((code >> (self.bits - 1)) << 31))

    def _encode_float(self, bits: Tensor) -> Tensor:
        if self.bits == 32:
            return bits.clone()
        if self.exponent_bits == 8:
            return _upper_half(bits)
        magnitude = bits & MAGNITUDE_MASK
        code = minifloat.round_magnitude(magnitude, self.mantissa_bits, self.bias)
        code = code.clamp(max=self.max_code if self.saturates else self.max_code + 1)
        if self.specials == "nan":
            code = torch.where(magnitude > INFINITY_BITS, self.max_code + 1, code)
        elif self.specials == "ieee":  # keep the payload's head, set the quiet bit
            infinity = ((1 << self.exponent_bits) - 1) << self.mantissa_bits
            head = (magnitude >> (23 - self.mantissa_bits)) & ((1 << self.mantissa_bits) - 1)
            code = torch.where(magnitude > INFINITY_BITS, infinity | head | (1 << (self.mantissa_bits - 1)), code)
        return code | ((bits >> 31) & 1) << (self.bits - 1)

    def _decode_exponent(self, code: Tensor) -> Tensor:
        bits = code << 23
        bits = torch.where(code == 0, 0 if self.zero_is_zero else 0x00400000, bits)
        return from_bits(torch.where(code == 255, QUIET_NAN_BITS, bits))

    def _encode_exponent(self, values: Tensor) -> Tensor:
        bits = float_bits(values)
        smallest = 0 if self.zero_is_zero else 0x00400000
        nan = (bits & MAGNITUDE_MASK) > INFINITY_BITS
        power = (bits >= 0x00800000) & (bits < INFINITY_BITS) & ((bits & minifloat.MANTISSA_MASK) == 0)
        if not bool((power | nan | (bits == smallest)).all()):
            allowed = "0 and 2^-126..2^127" if self.zero_is_zero else "2^-127..2^127"
            raise InputError(
                f"{self.name}: encode takes exact powers of two ({allowed}) or NaN; to round a scale name a rule "
                "(narrowgate.quantize: floor, rceil, even, mse, or round_up)"
            )
        return torch.where(nan, 255, bits >> 23)


def _upper_half(bits: Tensor) -> Tensor:
    """float32 bits to bfloat16's, as SPEC C16 says: RNE, overflow to infinity, NaN keeps its head and becomes quiet."""
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return torch.where((bits & MAGNITUDE_MASK) > INFINITY_BITS, (bits >> 16) | 64, rounded) & 0xFFFF


def _as_int32(element: Element, codes: Tensor) -> Tensor:
    if codes.dtype not in _INTEGER_DTYPES:
        raise InputError(f"{element.name}: decode expects integer codes, got {codes.dtype}")
    return codes if codes.dtype == torch.int32 else codes.to(torch.int32)


def _float(name: str, exponent_bits: int, mantissa_bits: int, specials: str) -> Element:
    bias = (1 << (exponent_bits - 1)) - 1
    return Element(name, "float", 1 + exponent_bits + mantissa_bits, exponent_bits, mantissa_bits, bias, specials)


_ELEMENTS: dict[str, Element] = {
    e.name: e
    for e in (
        *(Element(f"int{bits}", "int", bits) for bits in (2, 4, 8)),
        *(Element(f"uint{bits}", "uint", bits) for bits in (2, 4, 8)),
        *(Element(f"index{bits}", "index", bits) for bits in (2, 4, 8, 16)),
        _float("float4_e2m1fn", 2, 1, "none"),  # 0 .5 1 1.5 2 3 4 6
        _float("float6_e2m3fn", 2, 3, "none"),  # bias 1, up to 7.5
        _float("float6_e3m2fn", 3, 2, "none"),  # bias 3, up to 28
        _float("float8_e4m3fn", 4, 3, "nan"),  # bias 7, up to 448; S.1111.111 is NaN
        _float("float8_e5m2", 5, 2, "ieee"),  # bias 15, up to 57344
        Element("float8_e8m0fnu", "exponent", 8, exponent_bits=8, bias=127),
        Element("ue8m0_zero", "exponent", 8, exponent_bits=8, bias=127, zero_is_zero=True),
        _float("float16", 5, 10, "ieee"),
        _float("bfloat16", 8, 7, "ieee"),
        _float("float32", 8, 23, "ieee"),
    )
}


def element(name: str | Element) -> Element:
    """The record of the element called `name`. Raises InputError with the known names for any other.

    >>> element("float8_e4m3fn").max
    448.0
    """
    if isinstance(name, Element):
        return name
    try:
        return _ELEMENTS[name]
    except (KeyError, TypeError):
        raise InputError(f"element: expected one of {', '.join(_ELEMENTS)}, got {name!r}") from None


def elements() -> tuple[str, ...]:
    """The names of all elements."""
    return tuple(_ELEMENTS)
