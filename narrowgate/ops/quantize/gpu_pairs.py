"""The quantizer's kernel for bfloat16 rows: eight values a thread step, two in a register, no exchange but a block's maximum.

A thread reads whole 16-byte words of x (8 values, 16 for 6-bit codes) and writes their codes as whole words. Families of
powers of two stay in bfloat16, which such a product leaves exact. Families that divide take a reciprocal a block and two
corrections with fused multiply-adds: x and the stored scale have 8 significant bits, so a quotient that is no tie lies
2^-17 or more away from one, and a tie comes out exactly."""

# mypy: allow-untyped-defs
import triton
import triton.language as tl

from narrowgate.tile import gpu_decode, gpu_encode, gpu_math, gpu_pairs


@triton.jit
def _block(pairs):
    """The larger magnitude, in each half, of four pairs."""
    a = gpu_pairs.larger(pairs[0] & gpu_pairs.MAGNITUDE, pairs[1] & gpu_pairs.MAGNITUDE)
    return gpu_pairs.larger(a, gpu_pairs.larger(pairs[2] & gpu_pairs.MAGNITUDE, pairs[3] & gpu_pairs.MAGNITUDE))


@triton.jit
def _float_code(pair, inverse, sign, S: tl.constexpr, RAISES: tl.constexpr):
    """Codes in each half of a pair that meets 2^k (a pattern in both halves)."""
    size = pair & gpu_pairs.MAGNITUDE
    if not RAISES:
        size = gpu_pairs.smaller(size, 0x7F007F00)  # an infinity is read as 2^127
    size = gpu_pairs.scaled(size, inverse)
    if S.rule != "rceil":  # whose scale contains every value
        size = gpu_pairs.smaller(size, S.top)
    return gpu_pairs.round_float(size, S.bits, S.mantissa, S.bias) | ((pair >> (16 - S.bits)) & sign)


@triton.jit
def _integer_code(pair, lift, scale, inverse, S: tl.constexpr, RAISES: tl.constexpr):
    """Codes in each half of a pair divided by the block's scale."""
    if not RAISES:
        pair = gpu_pairs.smaller(pair & gpu_pairs.MAGNITUDE, 0x7F007F00) | (pair & gpu_pairs.SIGN)
    pair = gpu_pairs.scaled(pair, lift)
    a = _whole(gpu_pairs.low(pair), scale, inverse, S.low, S.high)
    b = _whole(gpu_pairs.high(pair), scale, inverse, S.low, S.high)
    return ((a & 0xFFFF) | (b << 16)) & ((2**S.bits - 1) * gpu_pairs.BOTH)


@triton.jit
def _whole(x, scale, inverse, LOW: tl.constexpr, HIGH: tl.constexpr):
    q = gpu_math.mul_rn(x, inverse)
    q = gpu_math.fma_rn(gpu_math.fma_rn(-q, scale, x), inverse, q)
    return gpu_encode.to_bits(gpu_math.add_rn(tl.minimum(tl.maximum(q, LOW), HIGH), 12582912.0))


@triton.jit
def pairs_kernel(
    x, data, scales, flag, rows, groups, pitch, S: tl.constexpr, R: tl.constexpr, G: tl.constexpr, B: tl.constexpr,
    V: tl.constexpr, RAISES: tl.constexpr,
):  # fmt: skip
    """x uint32 [rows, groups * B / 2] -> data (words), scales [rows, groups]; V values a thread step. RAISES: as blocks_kernel."""
    RUNS: tl.constexpr = B // V
    group_tiles = tl.cdiv(groups, G)
    program = tl.program_id(0).to(tl.int64)
    row = ((program // group_tiles) * R + tl.arange(0, R))[:, None, None]
    group = ((program % group_tiles).to(tl.int32) * G + tl.arange(0, G))[None, :, None]
    inside = (row < rows) & (group < groups)
    run = group * RUNS + tl.arange(0, RUNS)[None, None, :]
    mask = inside & (run >= 0)
    at = (x + row * pitch + run * (V // 2))[:, :, :, None] + tl.arange(0, 4)
    first = gpu_pairs.split_four(tl.load(at, mask=mask[:, :, :, None], other=0))
    most = _block(first)
    if V == 16:
        second = gpu_pairs.split_four(tl.load(at + 4, mask=mask[:, :, :, None], other=0))
        most = gpu_pairs.larger(most, _block(second))
    most = tl.max(tl.maximum(most & 0xFFFF, most >> 16), axis=2)[:, :, None]
    held = tl.minimum(most, 0x7F80 if RAISES else 0x7F00)
    if RAISES:
        tl.atomic_max(flag, 1, mask=tl.max(tl.max(tl.max(most, axis=2), axis=1), axis=0) >= 0x7F80)
        marked = most < 0
    else:
        marked = most > 0x7F80
    amax = gpu_decode.from_bits(held << 16)
    if S.method == "microscaling":
        if S.rule == "rceil":  # without a division: the exponent, one more where the mantissa exceeds that of the largest value
            code = tl.maximum(((held + (127 - (S.top & 127))) >> 7).to(tl.int32) - S.emax, 1)
            code = tl.where(held == 0, 0, code).to(tl.uint32)
        else:
            code = gpu_encode.scale_byte(amax, S.rule, S.mantissa, S.emax, S.maximum)
        power = tl.where(marked, 0, (gpu_encode.to_bits(gpu_encode.inverse_power(code)) >> 16) * gpu_pairs.BOTH)
        sign = tl.where(marked, 0, (1 << (S.bits - 1)) * gpu_pairs.BOTH).to(tl.uint32)
        c = (
            _float_code(first[0], power, sign, S, RAISES), _float_code(first[1], power, sign, S, RAISES),
            _float_code(first[2], power, sign, S, RAISES), _float_code(first[3], power, sign, S, RAISES),
        )  # fmt: skip
        if V == 16:
            d = (
                _float_code(second[0], power, sign, S, RAISES), _float_code(second[1], power, sign, S, RAISES),
                _float_code(second[2], power, sign, S, RAISES), _float_code(second[3], power, sign, S, RAISES),
            )  # fmt: skip
    else:
        code = gpu_encode.bfloat16_up(gpu_encode.divide(amax, S.divisor))
        scale = gpu_decode.decode(code, "bfloat16")
        tiny = scale < 2.0**-60
        lift = tl.where(tiny, 0x71807180, 0x3F803F80).to(tl.uint32)  # 2^100, so that no correction underflows
        scale = gpu_math.mul_rn(scale, tl.where(tiny, 2.0**100, 1.0))
        scale = tl.where(scale == 0.0, 1.0, scale)
        inverse = tl.where(marked, 0.0, gpu_encode.divide(tl.zeros_like(scale) + 1.0, scale))
        c = (
            _integer_code(first[0], lift, scale, inverse, S, RAISES), _integer_code(first[1], lift, scale, inverse, S, RAISES),
            _integer_code(first[2], lift, scale, inverse, S, RAISES), _integer_code(first[3], lift, scale, inverse, S, RAISES),
        )  # fmt: skip
    code = tl.where(marked, S.nan_scale, code)
    place = row * (groups * RUNS) + run
    if S.bits == 4:
        tl.store(data.to(tl.pointer_type(tl.uint32)) + place, gpu_pairs.pack_nibbles(c), mask=mask)
    elif S.bits == 8:
        words = data.to(tl.pointer_type(tl.uint32)) + place[:, :, :, None] * 2 + tl.arange(0, 2)
        one, two = gpu_pairs.pack_bytes(c)
        if S.nan_code > 0 and not RAISES:
            one, two = _with_nans(one, first[0], first[1], S.nan_code), _with_nans(two, first[2], first[3], S.nan_code)
        tl.store(words, tl.join(one, two), mask=mask[:, :, :, None])
    else:
        words = data.to(tl.pointer_type(tl.uint32)) + place * 3
        one, two, three = gpu_pairs.pack_sixes((c[0], c[1], c[2], c[3], d[0], d[1], d[2], d[3]))
        tl.store(words, one, mask=mask)
        tl.store(words + 1, two, mask=mask)
        tl.store(words + 2, three, mask=mask)
    tl.store(scales + row * groups + group, code.to(scales.dtype.element_ty), mask=inside)


@triton.jit
def _with_nans(word, a, b, CODE: tl.constexpr):
    """Four 8-bit codes with the NaN's where the values a, b are NaN."""
    return word | ((_nans(a) | (_nans(b) << 16)) * CODE)


@triton.jit
def _nans(pair):
    """1 in the bytes whose values of a pair are NaN."""
    over = gpu_pairs.larger(pair & gpu_pairs.MAGNITUDE, tl.zeros_like(pair) + 0x7F807F80) - 0x7F807F80
    one = gpu_pairs.smaller(over, 0x10001)
    return (one | (one >> 8)) & 0xFFFF
