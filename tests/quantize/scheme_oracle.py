"""What each scheme must store, one block at a time, from numpy, ml_dtypes and exact fractions: shares no code with the package."""

from fractions import Fraction

import ml_dtypes
import numpy as np

F32 = np.float32
MX = {  # element type, largest value, exponent of it, mantissa bits
    "mxfp4": (ml_dtypes.float4_e2m1fn, 6.0, 2, 1),
    "mxfp6_e2m3": (ml_dtypes.float6_e2m3fn, 7.5, 2, 3),
    "mxfp6_e3m2": (ml_dtypes.float6_e3m2fn, 28.0, 4, 2),
    "mxfp8_e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 8, 3),
    "mxfp8_e5m2": (ml_dtypes.float8_e5m2, 57344.0, 15, 2),
}
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], F32)  # fmt: skip
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], F32)


def log2_floor(value):
    """floor(log2(value)) of a positive Fraction, exactly."""
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


def mx_byte(amax, scheme, rule):
    """The scale byte of FORMATS 1.3 and SPEC B20 by exact rational arithmetic."""
    _, largest, emax, mantissa = MX[scheme]
    if amax == 0:
        return 0
    a = Fraction(float(amax))
    if rule == "rceil":
        ratio = a / Fraction(largest)
        if ratio < Fraction(2) ** -126:  # a subnormal float32: byte 1, unless it rounds to 0 (the tie goes to even)
            return 0 if ratio <= Fraction(2) ** -150 else 1
        power = log2_floor(ratio)
        return min(power + (ratio != Fraction(2) ** power) + 127, 254)
    if rule == "even":
        a += Fraction(2) ** (log2_floor(a) - mantissa - 1)
    return min(max(log2_floor(a) - emax + 127, 0), 254)


def encode(scaled, scheme):
    """Saturating RNE codes of float32 values, by ml_dtypes."""
    kind, largest, _, _ = MX[scheme]
    return np.clip(scaled, -largest, largest).astype(kind).view(np.uint8)


def mx_block(block, scheme, rule):
    """(codes, byte) of one block of float32 values."""
    amax = np.abs(block).max()
    if rule != "mse":
        byte = mx_byte(amax, scheme, rule)
        return encode((block * F32(2.0 ** (127 - byte))).astype(F32), scheme), byte
    best = None
    coarse = mx_byte(amax, scheme, "rceil")
    for byte in (coarse, coarse - 1) if coarse > 1 else (coarse,):
        codes = encode((block * F32(2.0 ** (127 - byte))).astype(F32), scheme)
        decoded = codes.view(MX[scheme][0]).astype(np.float64) * 2.0 ** (byte - 127)
        error = 0.0
        for x, y in zip(block.astype(np.float64), decoded, strict=True):
            error += (x - y) ** 2
        if best is None or error < best[0]:
            best = (error, codes, byte)
    return best[1], best[2]


def e4m3_nearest(value):
    return int(np.clip(F32(value), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def nvfp4_block(block, outer, rule):
    amax = np.abs(block).max()
    byte = e4m3_nearest(amax / (F32(6) * outer))
    if rule == "nearest_nonzero" and amax > 0:
        byte = max(byte, 1)
    scale = F32(np.uint8(byte).view(ml_dtypes.float8_e4m3fn)) * outer
    if scale == 0:
        return np.zeros(len(block), np.uint8), byte
    return encode((block / scale).astype(F32), "mxfp4"), byte


def bf16_up(value):
    """bfloat16 bits of the smallest bfloat16 whose magnitude is >= |value|, sign kept."""
    bits = int(np.array(abs(value), F32).view(np.uint32))
    return ((bits + 0xFFFF) >> 16) | (0x8000 if value < 0 else 0)


def bf16(bits):
    return np.array(bits << 16, np.uint32).view(F32)


def integer_block(block, top, width):
    code = bf16_up(np.abs(block).max() / F32(top))
    scale = bf16(code)
    q = np.zeros(len(block)) if scale == 0 else np.clip(np.rint((block / scale).astype(F32)), -top, top)
    return (q.astype(np.int64) & (2**width - 1)).astype(np.uint8), code


def channel_row(row):
    scale = np.abs(row).max() / F32(127)
    q = np.zeros(len(row)) if scale == 0 else np.clip(np.rint((row / scale).astype(F32)), -127, 127)
    return (q.astype(np.int64) & 255).astype(np.uint8), int(np.array(scale, F32).view(np.int32))


def int2_block(block):
    signed = block[np.abs(block).argmax()]
    code = bf16_up(signed / F32(-2)) if signed != 0 else 0
    scale = bf16(code)
    q = np.zeros(len(block)) if scale == 0 else np.clip(np.rint((block / scale).astype(F32)), -2, 1)
    return (q.astype(np.int64) & 3).astype(np.uint8), code


def nearest(table, values):
    """Lower index on a tie: argmin of exact distances takes the first."""
    return np.array([min(range(16), key=lambda i: abs(Fraction(float(v)) - Fraction(float(table[i])))) for v in values])


def nf4_block(block):
    amax = np.abs(block).max()
    codes = np.zeros(len(block)) if amax == 0 else nearest(NF4, (block / amax).astype(F32))
    return codes.astype(np.uint8), int(np.array(amax, F32).view(np.int32))


def iq4_block(block):
    signed = block[np.abs(block).argmax()]
    d = np.float16(signed / F32(-127)) if signed != 0 else np.float16(0)
    codes = np.zeros(len(block)) if d == 0 else nearest(IQ4, (block / F32(d)).astype(F32))
    return codes.astype(np.uint8), int(d.view(np.uint16))


def blocks_of(row, width):
    """The row cut into blocks; the last one may be short."""
    return [row[i : i + width] for i in range(0, len(row), width)]


def reference(x, scheme, rule=None):
    """(codes [rows, K], innermost scale codes [rows, groups]) of a scheme over x [rows, K]; nvfp4 with its own outer scale."""
    if scheme in MX:
        width, one = 32, lambda b: mx_block(b, scheme, rule or "rceil")
    elif scheme == "nvfp4":
        amax = np.abs(x).max()
        outer = F32(1) if amax == 0 else (amax / F32(2688)).astype(F32)
        width, one = 16, lambda b: nvfp4_block(b, outer, rule or "nearest_nonzero")
    elif scheme.startswith("int4"):
        width, one = int(scheme.split("_g")[1]), lambda b: integer_block(b, 7, 4)
    else:
        width, one = {
            "int8_g32": (32, lambda b: integer_block(b, 127, 8)),
            "int2_g32": (32, int2_block),
            "int8_channel": (x.shape[1], channel_row),
            "nf4_g64": (64, nf4_block),
            "iq4_nl": (32, iq4_block),
        }[scheme]
    done = [[one(block) for block in blocks_of(row, width)] for row in x]
    codes = np.stack([np.concatenate([c for c, _ in row]) for row in done])
    return codes, np.array([[s for _, s in row] for row in done])
