"""How every kernel is launched: on the tensor's own device, on the caller's stream, and never with fused multiply-adds.

A kernel that begins with `follow(FOLLOWS)` may be launched with overlap=True. Where its programs are few they then take their
places while the kernel before them on the stream still runs (programmatic dependent launch, capability 9.0 and up), and wait
there for all that it wrote. That hides most of a launch, and with it half a microsecond of a small step. Many programs would
pay more for the two instructions, each of them, than one launch costs: they are launched plainly."""

# mypy: allow-untyped-defs
from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl

from narrowgate.tile.gpu_math import INTERPRETED

MOST = 2112  # programs that overlap: what an H200 holds at once, 16 a multiprocessor


@triton.jit
def follow(FOLLOWS: tl.constexpr):
    """Wait for the launch before, of whatever kind, and let the next one take its place. The first act of every program."""
    if FOLLOWS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch(base, offsets, ok):
    """Ask for memory that will be read soon: a hint, which moves nothing into registers."""
    if not INTERPRETED:
        where = base.to(tl.int64) + tl.where(ok, offsets, 0) * (base.dtype.element_ty.primitive_bitwidth // 8)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [where], dtype=tl.int32, is_pure=False, pack=1
        )


def launch(
    kernel: Any, programs: int | tuple[int, ...], on: torch.Tensor, *args: Any, overlap: bool = False, **options: Any
) -> None:
    """One launch; none where there is nothing to do. A grid's second and third extents must be below 65536."""
    grid = (programs,) if isinstance(programs, int) else programs
    if 0 in grid:
        return
    options.setdefault("enable_fp_fusion", False)
    if overlap:
        options["FOLLOWS"] = options["launch_pdl"] = math.prod(grid) <= MOST and _overlaps(on.device)
    if on.device.type == "cuda" and on.device.index != torch.cuda.current_device():
        with torch.cuda.device(on.device):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


@functools.cache
def _overlaps(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def flags(t: torch.Tensor | None) -> torch.Tensor | None:
    """Flags as a type that kernels load."""
    return t.view(torch.uint8) if t is not None and t.dtype == torch.bool else t
