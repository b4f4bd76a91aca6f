"""Arithmetic of the GPU kernels where the last bit is promised: one rounding a step, never fused, never approximate.

A launch that passes enable_fp_fusion=False keeps `a * b + c` apart; these functions keep it apart whatever the launch says,
so that a user's own kernel gets the same bits. Under Triton's interpreter, which has no inline assembly and truncates where
it should round to bfloat16, they compute the same values by other means."""

# mypy: allow-untyped-defs
import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # fixed at import, as Triton's own decorator is


@triton.jit
def mul_rn(a, b):
    """a * b rounded once; float32."""
    if INTERPRETED:
        return a * b
    else:
        return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def add_rn(a, b):
    """a + b rounded once; float32."""
    if INTERPRETED:
        return a + b
    else:
        return tl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def sub_rn(a, b):
    """a - b rounded once; float32."""
    if INTERPRETED:
        return a - b
    else:
        return tl.inline_asm_elementwise("sub.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def fma_rn(a, b, c):
    """a * b + c rounded once; float32. The interpreter rounds by way of float64, whose 53 bits hold the product exactly."""
    if INTERPRETED:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def widen(x):
    """bfloat16, float16 or float32 as float32, exactly; the interpreter loses bfloat16's subnormals on its own way."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """float32 to `dtype` (float32, bfloat16, float16), nearest even; NaN stays NaN."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40
        return tl.where(x == x, rounded, quiet).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def through(x, dtype: tl.constexpr):
    """float32 rounded to `dtype` and read back."""
    return round_to(x, dtype).to(tl.float32)


@triton.jit
def bound(n):
    """A scalar as the bound of a loop. The interpreter holds it as an array of one element, which numpy 2.4 makes no integer of."""
    if INTERPRETED:
        return n.handle.data.item()
    else:
        return n
