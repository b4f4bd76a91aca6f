"""How every kernel is launched: on the tensor's own device, on the caller's stream, and never with fused multiply-adds."""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch


def launch(kernel: Any, programs: int | tuple[int, ...], on: torch.Tensor, *args: Any, **options: Any) -> None:
    """One launch; none where there is nothing to do. A grid's second and third extents must be below 65536."""
    grid = (programs,) if isinstance(programs, int) else programs
    if 0 in grid:
        return
    options.setdefault("enable_fp_fusion", False)
    if on.device.type == "cuda" and on.device.index != torch.cuda.current_device():
        with torch.cuda.device(on.device):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


def flags(t: torch.Tensor | None) -> torch.Tensor | None:
    """Flags as a type that kernels load."""
    return t.view(torch.uint8) if t is not None and t.dtype == torch.bool else t
