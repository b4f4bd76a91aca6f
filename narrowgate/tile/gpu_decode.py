"""Device decode: the float32 value of a raw code, exactly, for every element of narrowgate.formats.

Two ways, the same bits (SPEC A9, A11). `placed` puts a code's bits where float32 keeps such bits: integers into the mantissa of
2^23 (one exact subtraction takes it away again), small floats under float32's own exponent (one exact product with a power of
two lifts them; what is subnormal there stays subnormal here, float32 arithmetic in Triton flushes nothing). `native` uses the
device's conversion. Every step is exact, so no launch option can change a value. Scales decode by the same function.

Codes come as int32 or uint32 with nothing above the field. A codebook is read by `look_up`; the table decoder of SPEC A9 is the
same look-up, in a table of the element's values."""

# mypy: allow-untyped-defs
import triton
import triton.language as tl

from narrowgate.tile.gpu_math import INTERPRETED

MAGIC = tl.constexpr(0x4B000000)  # the bits of 2^23: one unit of the mantissa is 1
QUIET_NAN = tl.constexpr(0x7FC00000)
INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def from_bits(bits):
    """uint32 or int32 bit patterns as float32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def integer(code, BITS: tl.constexpr, SIGNED: tl.constexpr):
    """Two's complement or unsigned, of up to 22 bits: no integer conversion, whose rate is a quarter of an addition's."""
    HALF: tl.constexpr = (1 << (BITS - 1)) if SIGNED else 0
    return from_bits((code ^ HALF) | MAGIC) - (8388608.0 + HALF)


@triton.jit
def small_float(code, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SPECIALS: tl.constexpr):
    """A float of 2 to 5 exponent bits. SPECIALS: "none", "nan" (only the all-ones magnitude) or "ieee"."""
    magnitude = code & ((1 << (BITS - 1)) - 1)
    placed = magnitude << (23 - MANTISSA)
    LIFT: tl.constexpr = 2.0 ** (127 - BIAS)
    value = from_bits(placed) * LIFT
    if SPECIALS == "nan":
        value = tl.where(magnitude == (1 << (BITS - 1)) - 1, float("nan"), value)
    elif SPECIALS == "ieee":
        TOP: tl.constexpr = ((1 << (BITS - 1 - MANTISSA)) - 1) << MANTISSA
        value = tl.where(magnitude >= TOP, from_bits(placed | INFINITY), value)
    return from_bits(value.to(tl.uint32, bitcast=True) | ((code >> (BITS - 1)) << 31))


@triton.jit
def exponent(code, ZERO_IS_ZERO: tl.constexpr):
    """2^(code - 127); 255 is NaN; 0 is 2^-127, a subnormal, or zero (SPEC B21)."""
    smallest = 0 if ZERO_IS_ZERO else 0x00400000
    bits = tl.where(code == 0, smallest, code << 23)
    return from_bits(tl.where(code == 255, QUIET_NAN, bits))


@triton.jit
def decode(code, ELEMENT: tl.constexpr, NATIVE: tl.constexpr = False):
    """float32 values of raw codes of the element of that name. NATIVE: by the device's conversion."""
    code = code.to(tl.uint32, bitcast=True)
    if ELEMENT == "float32":
        return from_bits(code)
    elif ELEMENT == "bfloat16":
        return from_bits(code << 16)
    elif ELEMENT == "float16":
        return code.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    elif ELEMENT == "float8_e8m0fnu":
        return exponent(code, False)
    elif ELEMENT == "ue8m0_zero":
        return exponent(code, True)
    elif ELEMENT == "int2":
        return integer(code, 2, True)
    elif ELEMENT == "int4":
        return integer(code, 4, True)
    elif ELEMENT == "int8":
        if NATIVE:
            return code.to(tl.int8).to(tl.float32)
        return integer(code, 8, True)
    elif ELEMENT == "uint2" or ELEMENT == "uint4" or ELEMENT == "uint8":
        if NATIVE:
            return code.to(tl.uint8).to(tl.float32)
        return integer(code, 8, False)
    elif ELEMENT == "float4_e2m1fn":
        return small_float(code, 4, 1, 1, "none")
    elif ELEMENT == "float6_e2m3fn":
        return small_float(code, 6, 3, 1, "none")
    elif ELEMENT == "float6_e3m2fn":
        return small_float(code, 6, 2, 3, "none")
    elif ELEMENT == "float8_e4m3fn":
        if NATIVE and not INTERPRETED:
            return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        return small_float(code, 8, 3, 7, "nan")
    elif ELEMENT == "float8_e5m2":
        if NATIVE and not INTERPRETED:
            return code.to(tl.uint8).to(tl.float8e5, bitcast=True).to(tl.float32)
        return small_float(code, 8, 2, 15, "ieee")
    else:
        tl.static_assert(False, "an index element is decoded by look_up")


@triton.jit
def look_up(table, code):
    """float32 values from int32 bit patterns at `table` (a codebook): `code` is unsigned."""
    return from_bits(tl.load(table + code.to(tl.int32)))
