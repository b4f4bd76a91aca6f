"""Large pages for large weights on the CPU: a product of one row reads several runs of memory at once, each on a page of its own.

With pages of 4 KiB the address look-ups then cost an eighth of its time. Linux gives 2 MiB pages to memory that asks for them before
it is touched, so the tensor is copied once, when it is prepared. Elsewhere, or where the kernel has none left, nothing is lost."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

PAGE = 2 << 20
SMALLEST = 2 * PAGE  # smaller tensors are mostly edges
_MADV_HUGEPAGE = 14


@cache
def _madvise() -> Any:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return function


def on_large_pages(t: Tensor) -> Tensor:
    """The same values in memory that lies on large pages where that is possible; `t` itself where it is small or not on the CPU."""
    nbytes = t.numel() * t.element_size()
    if t.device.type != "cpu" or nbytes < SMALLEST or not sys.platform.startswith("linux"):
        return t
    made = torch.empty_like(t, memory_format=torch.contiguous_format)
    first = -(-made.data_ptr() // PAGE) * PAGE
    _madvise()(first, (made.data_ptr() + nbytes - first) // PAGE * PAGE, _MADV_HUGEPAGE)  # advice: a refusal changes nothing
    return made.copy_(t)
