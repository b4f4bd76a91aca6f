"""Few rows times a small dense matrix (a router, the gates' projections): a program an output, a row of the weight in registers.

The vendor's library takes two launches for these (it splits k), and 4 to 6 microseconds where the weight's bytes take one. Here a
program asks for its row before it waits for the kernel that writes x, and the sums of all rows of x are formed beside one
another: k in steps of STEP, eight values a thread, float32, then over the threads. Left out: anything larger, which the
vendor's product is made for."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from narrowgate.tile.gpu_launch import follow, launch
from narrowgate.tile.gpu_math import round_to

ROWS, OUTPUTS, LONGEST = 8, 1024, 8192  # the most rows of x, of w, and values of k
STEP = 1024


@triton.jit(do_not_specialize=["M", "N"])
def thin_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, M, N, stride_xm, stride_wn, stride_om, stride_on,
    K: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, BIAS: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, STEP)
    m = tl.arange(0, ROWS)
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    whole: tl.constexpr = K % STEP == 0
    parts = ()
    for i in tl.static_range(STEPS):
        at = w_ptr + n * stride_wn + i * STEP + k
        parts = parts + (tl.load(at) if whole else tl.load(at, i * STEP + k < K, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    follow(FOLLOWS)
    acc = tl.zeros([ROWS, STEP], tl.float32)
    for i in tl.static_range(STEPS):
        there = (m < M)[:, None] & ((i * STEP + k) < K)[None, :]
        x = tl.load(x_ptr + m.to(tl.int64)[:, None] * stride_xm + (i * STEP + k)[None, :], there, other=0.0)
        acc += x.to(tl.float32) * parts[i].to(tl.float32)[None, :]
    total = tl.sum(acc, 1)
    if BIAS:
        total += tl.load(bias_ptr + n).to(tl.float32)
    tl.store(out_ptr + m.to(tl.int64) * stride_om + n * stride_on, round_to(total, out_ptr.dtype.element_ty), m < M)


def takes(rows: int, outputs: int, k: int) -> bool:
    return rows <= ROWS and outputs <= OUTPUTS and k <= LONGEST


def product(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [M, N] = x [M, K] w[N, K]^T + bias, 16-bit operands of one dtype with contiguous rows, sizes that `takes` takes."""
    (m, k), n = x.shape, w.shape[0]
    launch(
        thin_kernel, n, x, x, w, bias, out, m, n, x.stride(0), w.stride(0), out.stride(0), out.stride(1),
        K=k, ROWS=triton.next_power_of_2(m), STEP=min(STEP, triton.next_power_of_2(k)), BIAS=bias is not None, num_warps=4,
        overlap=True, enable_fp_fusion=True,
    )  # fmt: skip
