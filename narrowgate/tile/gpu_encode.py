"""Device encode: float32 values to codes and scale bytes, the same bits as narrowgate.formats and narrowgate.quantize.

A small float is rounded by adding and taking away a power of two whose last place is the one wanted: float32 addition is then
the rounding, to nearest even, subnormal codes included. Scale bytes come from exponent fields, never from a logarithm (SPEC
B23), and divisions are correctly rounded. `pack_words` and `pack_triples` turn codes into the words of the layouts."""

# mypy: allow-untyped-defs
import triton
import triton.language as tl

from narrowgate.tile import gpu_math
from narrowgate.tile.gpu_decode import from_bits

LARGEST = tl.constexpr(2.0**127)  # what an infinity is read as where nothing may be raised (narrowgate.quantize.non_finite)


@triton.jit
def to_bits(x):
    """The bit patterns of float32 as uint32."""
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def divide(x, y):
    """x / y rounded once; y may be a number."""
    return tl.div_rn(x, tl.zeros_like(x) + y)


@triton.jit
def quotient(x, scale):
    """x / scale rounded once, 0 where the scale is 0."""
    zero = scale == 0.0
    return tl.where(zero, 0.0, divide(x, tl.where(zero, 1.0, scale)))


@triton.jit
def nearest_float(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr):
    """|x| rounded to the nearest value of a small float, ties to the even code, saturating at MAX; float32, no NaN."""
    size = tl.minimum(tl.abs(x), MAX)
    field = tl.maximum(to_bits(size) & 0x7F800000, (128 - BIAS) << 23)
    anchor = from_bits(field + ((23 - MANTISSA) << 23))
    return gpu_math.sub_rn(gpu_math.add_rn(size, anchor), anchor)


@triton.jit
def encode_float(x, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr):
    """The saturating code of x (no NaN) in a float of at most 8 bits, the sign kept, that of zero too; uint32."""
    if BITS == 8 and not gpu_math.INTERPRETED:  # the device's conversion is this very rounding; one instruction for two values
        kind: tl.constexpr = tl.float8e4nv if MANTISSA == 3 else tl.float8e5
        size = tl.minimum(tl.maximum(x, -MAX), MAX)
        return size.to(kind).to(tl.uint8, bitcast=True).to(tl.uint32)
    else:
        DROP: tl.constexpr = 2.0 ** (BIAS - 127)
        placed = to_bits(nearest_float(x, MANTISSA, BIAS, MAX) * DROP) >> (23 - MANTISSA)
        return placed | ((to_bits(x) >> 31) << (BITS - 1))


@triton.jit
def encode_integer(x, LOW: tl.constexpr, HIGH: tl.constexpr, BITS: tl.constexpr):
    """x rounded to nearest even and clamped, as the low BITS of two's complement; uint32."""
    whole = gpu_math.add_rn(tl.minimum(tl.maximum(x, LOW), HIGH), 12582912.0)  # 1.5 * 2^23: one unit of the mantissa is 1
    return to_bits(whole) & (2**BITS - 1)


@triton.jit
def nearest_entry(x, thresholds, ENTRIES: tl.constexpr):
    """Index of the entry of an ascending table nearest to x, ties to the lower, by the ENTRIES - 1 thresholds between them."""
    index = tl.zeros_like(to_bits(x))
    for i in tl.static_range(ENTRIES - 1):
        index += (x > tl.load(thresholds + i)).to(tl.uint32)
    return index


@triton.jit
def ceil_ratio(t, MAX: tl.constexpr):
    """SPEC B20: the exponent byte of f32(t / MAX), rounded up; 0 for t <= 0, 255 where the ratio is infinite or NaN."""
    ratio = divide(t, MAX)
    bits = to_bits(ratio)
    byte = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.uint32)
    return tl.where(ratio <= 0.0, 0, tl.minimum(byte, 255))


@triton.jit
def scale_byte(amax, RULE: tl.constexpr, MANTISSA: tl.constexpr, EMAX: tl.constexpr, MAX: tl.constexpr):
    """E8M0 byte of a block's largest magnitude by "rceil", "floor" or "even" (narrowgate.quantize.scale_rules); uint32."""
    if RULE == "floor" or RULE == "even":
        bits = to_bits(amax)
        if RULE == "even":
            bits = bits + (1 << (22 - MANTISSA))
        byte = tl.minimum(tl.maximum((bits >> 23).to(tl.int32) - EMAX, 0), 254).to(tl.uint32)
        return tl.where(amax > 0.0, byte, 0)
    else:
        return tl.minimum(ceil_ratio(amax, MAX), 254)


@triton.jit
def inverse_power(byte):
    """2^(127 - byte), exactly, for bytes 0 to 254."""
    return from_bits(tl.where(byte >= 254, 0x00400000, (254 - byte) << 23))


@triton.jit
def bfloat16_up(scale):
    """Code of the smallest bfloat16 whose magnitude is >= |scale|, saturating (SPEC A40); uint32."""
    bits = to_bits(scale)
    return tl.minimum(((bits & 0x7FFFFFFF) + 0xFFFF) >> 16, 0x7F7F) | ((bits >> 31) << 15)


@triton.jit
def half_bits(x):
    """Code of the nearest float16; uint32."""
    return x.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def pack_words(codes, BITS: tl.constexpr):
    """Codes [R, G, B] -> words [R, G, B * BITS / 32], the first code lowest."""
    PER: tl.constexpr = 32 // BITS
    fields = tl.reshape(codes, [codes.shape[0], codes.shape[1], codes.shape[2] // PER, PER])
    return tl.sum(fields << (tl.arange(0, PER) * BITS).to(tl.uint32), axis=3)


@triton.jit
def pack_triples(codes):
    """6-bit codes [R, G, B] -> three tensors of words [R, G, B / 16]: word 0, 1 and 2 of each run of sixteen codes."""
    R: tl.constexpr = codes.shape[0]
    G: tl.constexpr = codes.shape[1]
    RUNS: tl.constexpr = codes.shape[2] // 16
    fours = tl.reshape(codes, [R, G, RUNS, 4, 4])
    lanes = tl.sum(fours << (tl.arange(0, 4) * 6).to(tl.uint32), axis=4)  # 24 bits each
    i = tl.arange(0, 4)
    first = tl.sum(tl.where(i == 0, lanes, tl.where(i == 1, lanes << 24, 0)), axis=3)
    second = tl.sum(tl.where(i == 1, lanes >> 8, tl.where(i == 2, lanes << 16, 0)), axis=3)
    third = tl.sum(tl.where(i == 2, lanes >> 16, tl.where(i == 3, lanes << 8, 0)), axis=3)
    return first, second, third
