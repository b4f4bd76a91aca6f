"""Packed operands inside a user's own Triton kernel (docs/tile.md).

`arg(w)` makes a PackedTensor one kernel argument; `read`, `read_unchecked` and `read_block` decode and scale its values in
registers. Triton is imported when one of them is first asked for, never with the package."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "arg": "gpu_arg", "Operand": "gpu_arg",
    "read": "gpu_read", "read_unchecked": "gpu_read", "read_block": "gpu_read",
}  # fmt: skip
__all__ = ["Operand", "arg", "read", "read_block", "read_unchecked"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
