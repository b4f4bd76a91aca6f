"""Kernels for the host's processor: they take every call that passes the checks, or none at all, on machines where Numba or the
instructions that they are compiled for are missing. Then they say so, and nothing of Numba has been loaded."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from narrowgate.dispatch import Kernel
from narrowgate.errors import UnsupportedError


@functools.cache
def missing() -> tuple[str, ...]:
    """Why no kernel can be compiled here; empty where they can."""
    try:
        from narrowgate.simd import cpu_compile  # noqa: F401
        from narrowgate.simd.cpu_features import require

        require()
    except (ImportError, UnsupportedError) as error:
        return (str(error),)
    return ()


@functools.cache
def has_triton() -> bool:
    """Whether there is a language for kernels of a GPU."""
    return importlib.util.find_spec("triton") is not None


def host_kernel(target: str, **options: Callable[..., Any]) -> Kernel:
    """The CPU kernel at "module:function". Options: `refuse`, further reasons; `describe`, as in `Kernel`."""
    more = options.pop("refuse", None)

    def refuse(*args: Any, **kwargs: Any) -> Sequence[str]:
        return missing() or (more(*args, **kwargs) if more else ())

    return Kernel("cpu", target, refuse=refuse, **options)
