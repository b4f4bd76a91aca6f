"""The quantizer's kernel: tiles of whole blocks, from values to packed codes and scale codes in one pass over memory.

One body for every family of narrowgate.quantize.methods; which lines of it a kernel contains is decided when it is compiled. A
block lies along the last axis of the tile, so its largest magnitude is one reduction, mostly inside a thread."""

# mypy: allow-untyped-defs
import triton
import triton.language as tl

from narrowgate.tile import gpu_decode, gpu_encode, gpu_math


@triton.jit
def largest(x, amax, B: tl.constexpr):
    """The first value of largest magnitude of each block, with its sign: x [R, G, B], amax [R, G]."""
    lane = tl.arange(0, B)
    first = tl.min(tl.where(tl.abs(x) == amax[:, :, None], lane, B), axis=2)
    bits = tl.where(lane == first[:, :, None], gpu_encode.to_bits(x), 0)  # as bits, which keep the sign of a zero
    return gpu_decode.from_bits(tl.sum(bits, axis=2))


@triton.jit
def _squared_error(x, byte, S: tl.constexpr):
    inverse = gpu_encode.inverse_power(byte)
    v = gpu_math.mul_rn(x, inverse)
    near = gpu_encode.nearest_float(v, S.mantissa, S.bias, S.maximum)
    decoded = gpu_math.mul_rn(tl.where(v < 0.0, -near, near), gpu_decode.exponent(byte, False))
    error = x.to(tl.float64) - decoded.to(tl.float64)
    return error * error


@triton.jit
def least_error_byte(x, mask, amax, B: tl.constexpr, S: tl.constexpr):
    """SPEC B35: the byte of rceil, or the next lower one where that leaves the smaller error; summed in order of index.

    x: pointers to the first value of each block; mask [R, G]; a lane past the row's end is zero and adds nothing."""
    byte = gpu_encode.scale_byte(amax, "rceil", S.mantissa, S.emax, S.maximum)
    finer = tl.where(byte > 0, byte - 1, byte)
    coarse_error, fine_error = tl.zeros_like(amax).to(tl.float64), tl.zeros_like(amax).to(tl.float64)
    for i in range(B):
        value = gpu_math.widen(tl.load(x + i, mask=mask > i, other=0.0))
        coarse_error += _squared_error(value, byte, S)
        fine_error += _squared_error(value, finer, S)
    return tl.where((fine_error < coarse_error) & (byte > 1), finer, byte)


@triton.jit
def scale_codes(x, amax, outer, B: tl.constexpr, S: tl.constexpr):
    """(scale codes, scales as they decode, what the values meet) of blocks x [R, G, B]: families that divide by their scale
    meet the scale, those of ggml the unrounded reciprocal."""
    if S.method == "nvfp4":
        code = gpu_encode.encode_float(gpu_encode.divide(amax, gpu_math.mul_rn(outer, S.maximum)), 8, 3, 7, 448.0)
        if S.rule == "nearest_nonzero":
            code = tl.where((amax > 0.0) & (code == 0), 1, code)
        return code, gpu_math.mul_rn(gpu_decode.decode(code, "float8_e4m3fn"), outer)
    elif S.method == "table":
        return gpu_encode.to_bits(amax), amax
    else:
        top = amax if S.signed == 0 else largest(x, amax, B)
        scale = gpu_encode.divide(top, S.divisor)
        if S.method != "q4_0":  # gguf's keeps the sign of a zero scale
            scale = tl.where(scale == 0.0, 0.0, scale)
        if S.method == "q8_0" or S.method == "q4_0":
            inverse = gpu_encode.quotient(tl.zeros_like(scale) + 1.0, scale)
            return gpu_encode.half_bits(scale), tl.where(tl.abs(inverse) == float("inf"), 0.0, inverse)
        elif S.method == "iq4_nl":
            code = gpu_encode.half_bits(scale)
            return code, gpu_decode.decode(code, "float16")
        elif S.scale_bits == 32:
            return gpu_encode.to_bits(scale), scale
        else:
            code = gpu_encode.bfloat16_up(scale)
            return code, gpu_decode.decode(code, "bfloat16")


@triton.jit
def value_codes(x, meets, thresholds, S: tl.constexpr):
    """Codes (uint32) of values [R, G, B] that meet their block's factor [R, G, 1]."""
    if S.method == "microscaling":
        return gpu_encode.encode_float(gpu_math.mul_rn(x, meets), S.bits, S.mantissa, S.bias, S.maximum)
    elif S.method == "nvfp4":
        return gpu_encode.encode_float(gpu_encode.quotient(x, meets), S.bits, S.mantissa, S.bias, S.maximum)
    elif S.method == "integer" or S.method == "signed_integer":
        return gpu_encode.encode_integer(gpu_encode.quotient(x, meets), S.low, S.high, S.bits)
    elif S.method == "table" or S.method == "iq4_nl":
        index = gpu_encode.nearest_entry(gpu_encode.quotient(x, meets), thresholds, 16)
        return tl.where(meets == 0.0, 0, index)
    elif S.method == "q8_0":
        product = gpu_math.mul_rn(x, meets)
        size = tl.abs(product)
        whole = size.to(tl.int32).to(tl.float32)  # the floor, of what is not negative
        whole = whole + (2.0 * (size - whole)).to(tl.int32).to(tl.float32)
        return tl.where(product < 0.0, -whole, whole).to(tl.int32).to(tl.uint32, bitcast=True) & 255
    else:  # q4_0
        shifted = gpu_math.add_rn(gpu_math.mul_rn(x, meets), 8.5).to(tl.int32)
        return tl.minimum(tl.maximum(shifted, 0), 15).to(tl.uint32)


@triton.jit
def store_codes(data, codes, row, group, counted, cols, B: tl.constexpr, BITS: tl.constexpr, STORE: tl.constexpr):
    """Codes [R, G, B] of the blocks at (row [R], group [G]) as the layout stores them; `cols` values a row."""
    if STORE == "triples":
        run = group[:, None] * (B // 16) + tl.arange(0, B // 16)[None, :]
        at = data.to(tl.pointer_type(tl.uint32)) + (row[:, None, None] * (cols // 16) + run[None, :, :]) * 3
        mask = counted[:, None, None] & (run < cols // 16)[None, :, :]
        first, second, third = gpu_encode.pack_triples(codes)
        tl.store(at, first, mask=mask)
        tl.store(at + 1, second, mask=mask)
        tl.store(at + 2, third, mask=mask)
    elif STORE == "words":
        PER: tl.constexpr = 32 // BITS
        word = group[:, None] * (B // PER) + tl.arange(0, B // PER)[None, :]
        at = data.to(tl.pointer_type(tl.uint32)) + row[:, None, None] * (cols // PER) + word[None, :, :]
        tl.store(at, gpu_encode.pack_words(codes, BITS), mask=counted[:, None, None] & (word < cols // PER)[None, :, :])
    else:
        col = group[:, None] * B + tl.arange(0, B)[None, :]
        at = data.to(tl.pointer_type(tl.uint8)) + row[:, None, None] * cols + col[None, :, :]
        tl.store(at, codes.to(tl.uint8), mask=counted[:, None, None] & (col < cols)[None, :, :])


@triton.jit
def blocks_kernel(
    x, data, scales, outer, thresholds, flag, rows, cols, pitch, groups, group_tiles, outer_step,
    S: tl.constexpr, R: tl.constexpr, G: tl.constexpr, B: tl.constexpr, STORE: tl.constexpr, RAISES: tl.constexpr,
):  # fmt: skip
    """x [rows, cols] -> data, scales [rows, groups]. RAISES: set flag where a value is not finite or a float16 scale
    overflows; else an infinity saturates and a NaN marks its block."""
    program = tl.program_id(0).to(tl.int64)
    row = (program // group_tiles) * R + tl.arange(0, R)
    group = (program % group_tiles).to(tl.int32) * G + tl.arange(0, G)
    counted = row < rows
    first = x + row[:, None] * pitch + group[None, :] * B
    left = tl.where(counted[:, None], cols - group[None, :] * B, 0)  # values of the row from this block on
    lane = tl.arange(0, B)
    v = gpu_math.widen(tl.load(first[:, :, None] + lane, mask=lane < left[:, :, None], other=0.0))
    most = tl.max(gpu_encode.to_bits(v) & 0x7FFFFFFF, axis=2)  # as bits, which order like magnitudes and keep a NaN on top
    if RAISES:
        broken = tl.max(tl.max((most >= gpu_decode.INFINITY).to(tl.int32), axis=1), axis=0)
        tl.atomic_max(flag, broken, mask=broken > 0)
        amax = gpu_decode.from_bits(most)
    else:
        amax = tl.minimum(gpu_decode.from_bits(tl.minimum(most, gpu_decode.INFINITY)), gpu_encode.LARGEST)
        clean = tl.minimum(tl.maximum(v, -gpu_encode.LARGEST), gpu_encode.LARGEST)  # what a NaN becomes does not matter
    factor = tl.load(outer + row * outer_step, mask=counted, other=1.0)[:, None] + tl.zeros_like(amax)
    if S.method == "microscaling":
        if S.rule == "mse":
            code = least_error_byte(first, left, amax, B, S)
        else:
            code = gpu_encode.scale_byte(amax, S.rule, S.mantissa, S.emax, S.maximum)
        meets = gpu_encode.inverse_power(code)
    else:
        code, meets = scale_codes(v if RAISES else clean, amax, factor, B, S)
    codes = value_codes(v if RAISES else clean, meets[:, :, None] + tl.zeros_like(v), thresholds, S)
    if RAISES:
        if S.half:
            over = tl.max(tl.max(((code & 0x7FFF) == 0x7C00).to(tl.int32), axis=1), axis=0)
            tl.atomic_max(flag, over, mask=over > 0)
    else:
        marked = most > gpu_decode.INFINITY
        code = tl.where(marked, S.nan_scale, code)
        codes = codes & tl.where(marked, 0, 0xFFFFFFFF).to(tl.uint32)[:, :, None]
        if S.nan_code > 0:
            codes = tl.where(v != v, S.nan_code, codes)
    store_codes(data, codes, row, group, counted, cols, B, S.bits, STORE)
    tl.store(
        scales + row[:, None] * groups + group[None, :], code.to(scales.dtype.element_ty),
        mask=counted[:, None] & (group < groups)[None, :],
    )  # fmt: skip


@triton.jit
def row_amax_kernel(x, out, flag, cols, pitch, CHUNK: tl.constexpr, RAISES: tl.constexpr):
    """The largest magnitude of each row; a NaN counts as 0, an infinity as 2^127 unless flagged."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    most = tl.zeros([CHUNK], tl.float32)
    for start in range(0, gpu_math.bound(cols), CHUNK):
        v = tl.abs(gpu_math.widen(tl.load(x + row * pitch + start + lane, mask=start + lane < cols, other=0.0)))
        most = tl.maximum(most, tl.where(v == v, v, float("inf") if RAISES else 0.0))
    amax = tl.max(most, axis=0)
    if RAISES:
        tl.atomic_max(flag, 1, mask=amax == float("inf"))
    tl.store(out + row, tl.minimum(amax, gpu_encode.LARGEST) if not RAISES else amax)


@triton.jit
def channel_kernel(
    x, data, scales, flag, cols, pitch, S: tl.constexpr, CHUNK: tl.constexpr, STORE: tl.constexpr, RAISES: tl.constexpr
):  # fmt: skip
    """One integer scale a row, however long: a pass for the largest magnitude, a pass (out of the cache) for the codes."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    lane = tl.arange(0, CHUNK)[None, None, :]
    most, nans = tl.zeros([1, 1, CHUNK], tl.float32), tl.zeros([1, 1, CHUNK], tl.int32)
    start_of_row = x + (row * pitch)[:, None, None]
    for start in range(0, gpu_math.bound(cols), CHUNK):
        v = gpu_math.widen(tl.load(start_of_row + start + lane, mask=start + lane < cols, other=0.0))
        nans = nans | (v != v).to(tl.int32)
        v = tl.where(v == v, tl.abs(v), float("inf") if RAISES else 0.0)
        most = tl.maximum(most, v if RAISES else tl.minimum(v, gpu_encode.LARGEST))
    amax = tl.max(most, axis=2)
    if RAISES:
        broken = tl.max(tl.max((amax == float("inf")).to(tl.int32), axis=1), axis=0)
        tl.atomic_max(flag, broken, mask=broken > 0)
    code, meets = scale_codes(most, amax, amax, CHUNK, S)
    marked = tl.max(nans, axis=2) > 0
    for start in range(0, gpu_math.bound(cols), CHUNK):
        v = gpu_math.widen(tl.load(start_of_row + start + lane, mask=start + lane < cols, other=0.0))
        if not RAISES:
            v = tl.minimum(tl.maximum(tl.where(v == v, v, 0.0), -gpu_encode.LARGEST), gpu_encode.LARGEST)
        codes = value_codes(v, meets[:, :, None] + tl.zeros_like(v), scales, S)
        codes = tl.where(marked[:, :, None], 0, codes)
        group = start // CHUNK + tl.arange(0, 1)
        store_codes(data, codes, row, group, row >= 0, cols, CHUNK, S.bits, STORE)
    code = tl.where(marked, S.nan_scale, code)
    tl.store(scales + row[:, None], code.to(scales.dtype.element_ty))
