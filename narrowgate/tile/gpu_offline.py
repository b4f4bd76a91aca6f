"""Compile what a call would launch, for a GPU that is not here: `with compiling() as kernels: host_function(...)`.

The host function runs as it is, on CPU tensors; each launch compiles for the target and is then left out. What comes back
holds the PTX and the resources of exactly the configurations that ship. Tests read fused multiply-adds and approximate
divisions out of it, and shared memory that no such card has. Not for use beside real launches in one process."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit


class _Absent:
    """Enough of a driver to compile with."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiling(capability: int = 90) -> Iterator[list[Any]]:
    """Within it, launches compile for `capability` (90 is an H100 or H200) and run nothing. Yields the compiled kernels in
    the order of their launches: `.asm["ptx"]`, `.metadata.name`, `.metadata.shared`, `.metadata.num_warps`."""
    launched: list[Any] = []
    run, before = jit.JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        launched.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return launched[-1]

    jit.JITFunction.run = compile_only
    driver.set_active(_Absent(capability))
    try:
        yield launched
    finally:
        jit.JITFunction.run = run
        driver._active = before


# Instructions that a kernel which promises bits has no use for.
_INEXACT = re.compile(r"\b(fma\.rn\.(?:ftz\.)?f32|div\.full\S*|div\.approx\S*|\S+\.approx\.(?:ftz\.)?f32|\S+\.ftz\.\S+)")


def inexact(kernel: Any) -> set[str]:
    """The fused, approximate and flushing float32 instructions in a compiled kernel's PTX."""
    return {found.group(1) for found in _INEXACT.finditer(kernel.asm["ptx"])}
