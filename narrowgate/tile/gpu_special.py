"""exp and what is made of it, the one home: every kernel that needs one takes it from here, so that fused equals composed.

Bounds, in units of the last place of float32: `exp` 1 (a polynomial; it decays the state, where an error would repeat at every
token), `sigmoid` and `silu` 4 (the card's own ex2 and reciprocal, each put right by a step of its own: the convolution and the
gated norm would otherwise wait for arithmetic, not for memory). Below -87.3, where the true value is under 1e-36, sigmoid gives
0. `softplus` 4. `activated` is for results that 16 bits will hold: ex2 and the reciprocal as the card gives them, off by
4e-7 + 6e-8 |x| of themselves, a thousandth of what the rounding then takes away. Why not float64 for the gates, a handful of
values a head: every program of the packed step computes its head's, and the double-precision exp and log then cost a fifth of
the step."""

# mypy: allow-untyped-defs
import triton
import triton.language as tl

from narrowgate.tile.gpu_math import INTERPRETED


@triton.jit
def exp(x):
    """e^x, float32: n = round(x / ln 2), a polynomial of degree 7 in the rest, times 2^n in two exact halves, so that results
    below the normal range are rounded once too. NaN stays NaN."""
    x = tl.where(x > 89.0, 89.0, x)  # beyond it infinity, below -104 zero
    x = tl.where(x < -104.0, -104.0, x)
    n = tl.fma(x, 1.44269502, 12582912.0) - 12582912.0  # adding 1.5 * 2^23 rounds to an integer
    r = tl.fma(n, -0.693145751953125, x)  # exact: ln 2 to 15 bits
    r = tl.fma(n, -1.42860677e-6, r)
    p = tl.fma(r, 1.98412701e-4, 1.38888892e-3)
    p = tl.fma(p, r, 8.33333377e-3)
    p = tl.fma(p, r, 4.16666679e-2)
    p = tl.fma(p, r, 0.166666672)
    p = tl.fma(p, r, 0.5)
    p = tl.fma(p, r * r, r) + 1.0
    whole = n.to(tl.int32)
    half = whole >> 1
    return p * _power(half) * _power(whole - half)


@triton.jit
def _power(n):
    """2^n for n in -126..127."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _minus(x):
    """-x, for which the compiler has a sign in the next instruction; what Triton makes of `-x` is a subtraction from zero."""
    return x * -1.0


@triton.jit
def _sigmoid(x):
    """1 / (1 + 2^t), t = -x log2(e) in two parts: the second corrects the power of the first. A NaN gives 0 or 1."""
    z = tl.minimum(tl.maximum(_minus(x), -88.0), 88.0)
    t = z * 1.44269502
    rest = tl.fma(z, 1.92596299e-8, tl.fma(z, 1.44269502, _minus(t)))
    e = tl.exp2(t)
    return _reciprocal(1.0 + tl.fma(e, rest * 0.693147182, e))


@triton.jit
def _reciprocal(d):
    """1 / d for d in 1..2^127, by one step of Newton's."""
    r = _reciprocal_near(d)
    return tl.fma(r, tl.fma(_minus(d), r, 1.0), r)


@triton.jit
def _reciprocal_near(d):
    if INTERPRETED:
        return tl.div_rn(1.0, d)
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def sigmoid(x):
    return tl.where(x == x, _sigmoid(x), x)


@triton.jit
def silu(x):
    """x / (1 + exp(-x))."""
    return x * _sigmoid(x)


@triton.jit
def activate(x, name: tl.constexpr):
    if name == "silu":
        return silu(x)
    elif name == "sigmoid":
        return sigmoid(x)
    else:
        return x


@triton.jit
def activated(x, name: tl.constexpr, dtype: tl.constexpr):
    """activate(x, name) to be rounded to `dtype`, by fewer steps where that has 16 bits."""
    if dtype == tl.float32 or name == "none":
        return activate(x, name)
    else:
        y = _reciprocal_near(1.0 + tl.exp2(x * -1.44269502))
        return x * y if name == "silu" else y


@triton.jit
def inverse_root(x):
    """1 / sqrt(x) to one unit of the last place: the card's own and a step of Newton's, which 0 and infinity are spared."""
    if INTERPRETED:
        return tl.div_rn(1.0, tl.sqrt_rn(x))
    else:
        r = tl.inline_asm_elementwise("rsqrt.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        better = tl.fma(r * 0.5, tl.fma(_minus(x * r), r, 1.0), r)
        return tl.where(better == better, better, r)


@triton.jit
def softplus(x):
    """log(1 + e^x) as max(x, 0) + log1p(e^-|x|): nothing overflows, and above 20 the second part is lost in rounding, which is
    the definition's branch. log1p(z) is twice the inverse hyperbolic tangent of s = z / (2 + z), s at most 1/3, by its series."""
    z = exp(-tl.abs(x))
    s = z * _reciprocal(2.0 + z)
    u = s * s
    p = tl.fma(u, 0.0588235294, 0.0666666667)
    p = tl.fma(p, u, 0.0769230769)
    p = tl.fma(p, u, 0.0909090909)
    p = tl.fma(p, u, 0.111111111)
    p = tl.fma(p, u, 0.142857143)
    p = tl.fma(p, u, 0.2)
    p = tl.fma(p, u, 0.333333333)
    log1p = 2.0 * tl.fma(p * u, s, s)
    return tl.where(x < 0.0, 0.0, x) + log1p


@triton.jit
def log_decay(a, dt_bias, neg_a):
    """softplus(a + dt_bias) * neg_a."""
    return softplus(a.to(tl.float32) + dt_bias.to(tl.float32)) * neg_a
