"""The fixed tables that index elements look up, by name.

`nf4`: sixteen quantiles of a normal distribution, scaled to [-1, 1] (bitsandbytes' NF4, FORMATS 2.3). `iq4_nl`: the sixteen
integers of ggml's IQ4_NL (FORMATS 2.5). Both ascend, which the nearest-entry encoder relies on.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from narrowgate.errors import InputError

_TABLES: dict[str, tuple[float, ...]] = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "iq4_nl": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}  # fmt: skip


@cache
def _table(name: str) -> Tensor:
    return torch.tensor(_TABLES[name], dtype=torch.float32)


def codebook(name: str) -> Tensor:
    """The table called `name` as float32 [entries] on the CPU (a fresh copy: nobody can change ours)."""
    if name not in _TABLES:
        raise InputError(f"codebook: expected one of {', '.join(_TABLES)}, got {name!r}")
    return _table(name).clone()


@cache
def thresholds(name: str) -> Tensor:
    """float32 [entries - 1]: x is nearest to entry i, ties to the lower, if exactly i of them are below x. Not to be changed."""
    table = _table(name).to(torch.float64)
    middle = (table[:-1] + table[1:]) / 2  # exact: 24-bit numbers of like size have room in 53 bits
    rounded = middle.to(torch.float32)
    above = rounded.to(torch.float64) > middle
    return torch.where(above, torch.nextafter(rounded, torch.full_like(rounded, -torch.inf)), rounded)


def nearest_index(name: str, values: Tensor) -> Tensor:
    """Index (uint8) of the table entry nearest to each float32 value, ties to the lower index.

    The threshold between two entries is the largest float32 not above their exact middle, so the answer is exact.
    """
    return torch.bucketize(values, thresholds(name).to(values.device), right=False, out_int32=True).to(torch.uint8)
