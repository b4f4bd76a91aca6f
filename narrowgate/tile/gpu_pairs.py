"""Two bfloat16 in one 32-bit register: the arithmetic that lets a quantizer keep up with memory.

A Hopper multiprocessor reads about two values a clock and does integer operations for 64; one value at a time, a 4-bit encoder
has no time. Everything here is exact or is one rounding, in both halves at once: comparisons of magnitudes as 16-bit integers,
products with powers of two (a bfloat16 stays a bfloat16), and float rounding by adding a power of two whose last place is the
wanted one. The interpreter, which has no inline assembly, computes each half by itself."""

# mypy: allow-untyped-defs
import triton
import triton.language as tl

from narrowgate.tile import gpu_math
from narrowgate.tile.gpu_decode import from_bits
from narrowgate.tile.gpu_math import INTERPRETED

BOTH = tl.constexpr(0x10001)  # times a 16-bit pattern: that pattern in both halves
MAGNITUDE = tl.constexpr(0x7FFF7FFF)
SIGN = tl.constexpr(0x80008000)


@triton.jit
def low(pair):
    """The first value, as float32."""
    return from_bits(pair << 16)


@triton.jit
def high(pair):
    """The second value, as float32."""
    return from_bits(pair & 0xFFFF0000)


@triton.jit
def of(first, second):
    """A pair of two float32 that are bfloat16 numbers."""
    a, b = first.to(tl.uint32, bitcast=True), second.to(tl.uint32, bitcast=True)
    return (a >> 16) | (b & 0xFFFF0000)


@triton.jit
def larger(a, b):
    """The larger 16-bit number in each half."""
    if INTERPRETED:
        return tl.maximum(a & 0xFFFF, b & 0xFFFF) | (tl.maximum(a >> 16, b >> 16) << 16)
    else:
        return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def smaller(a, b):
    """The smaller 16-bit number in each half."""
    b = tl.zeros_like(a) + b
    if INTERPRETED:
        return tl.minimum(a & 0xFFFF, b & 0xFFFF) | (tl.minimum(a >> 16, b >> 16) << 16)
    else:
        return tl.inline_asm_elementwise("min.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def fma(a, b, c):
    """a * b + c rounded once to bfloat16, in each half; b is a power of two. No NaN."""
    b, c = tl.zeros_like(a) + b, tl.zeros_like(a) + c
    if INTERPRETED:  # the product is exact, and a sum that float32 rounds is no tie of bfloat16's afterwards
        first = gpu_math.through(low(a) * low(b) + low(c), tl.bfloat16)
        return of(first, gpu_math.through(high(a) * high(b) + high(c), tl.bfloat16))
    else:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def scaled(a, power):
    """a * power rounded once to bfloat16, in each half, the sign of zero kept."""
    return fma(a, power, SIGN)


@triton.jit
def round_float(size, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Codes (in each half, no sign) of magnitudes that do not exceed the small float's largest value, to nearest even."""
    LEAST: tl.constexpr = ((128 - BIAS) << 7) * BOTH  # the exponent of the subnormals' places
    REACH: tl.constexpr = ((127 + 7 - MANTISSA) << 7) * BOTH
    OFFSET: tl.constexpr = (((7 - MANTISSA) << 7) + ((128 - BIAS) << MANTISSA)) * BOTH
    field = larger(size & 0x7F807F80, tl.zeros_like(size) + LEAST)
    rounded = fma(field, REACH, size)  # its low bits count places of the exponent; a carry goes on to the next one
    return rounded - field + (field >> (7 - MANTISSA)) - OFFSET


@triton.jit
def pack_nibbles(c):
    """Codes of 4 bits in the halves of four pairs -> a word of eight, the first lowest."""
    a, b = c[0] | (c[1] << 8), c[2] | (c[3] << 8)
    return ((a | (a >> 12)) & 0xFFFF) | ((b | (b >> 12)) << 16)


@triton.jit
def pack_bytes(c):
    """Codes of 8 bits in the halves of four pairs -> two words."""
    return _bytes(c[0]) | (_bytes(c[1]) << 16), _bytes(c[2]) | (_bytes(c[3]) << 16)


@triton.jit
def _bytes(pair):
    return (pair | (pair >> 8)) & 0xFFFF


@triton.jit
def pack_sixes(c):
    """Codes of 6 bits in the halves of eight pairs -> three words."""
    a, b, d, e = _twelve(c[0]), _twelve(c[1]), _twelve(c[2]), _twelve(c[3])
    f, g, h, i = _twelve(c[4]), _twelve(c[5]), _twelve(c[6]), _twelve(c[7])
    return a | (b << 12) | (d << 24), (d >> 8) | (e << 4) | (f << 16) | (g << 28), (g >> 4) | (h << 8) | (i << 20)


@triton.jit
def _twelve(pair):
    return (pair | (pair >> 10)) & 0xFFF


@triton.jit
def split_four(x):
    """[..., 4] -> its four columns."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2], 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d
