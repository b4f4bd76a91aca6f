"""Rows in and out of caches, to be read. On the CPU every index has been checked; on a GPU a bad one
reads zeros and writes nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.ops.sequences import live_mask

_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gather_state(cache: Tensor, indices: Tensor, has_initial_state: Tensor | None = None, *, out: Tensor) -> None:
    wanted = live_mask(indices, cache.shape[0])
    if has_initial_state is not None:
        wanted &= has_initial_state.to(torch.bool)
    out.zero_()  # rather than a product with 0, which a NaN in a stale row would survive
    out[wanted] = cache[indices[wanted].long()].float()


def scatter_state(cache: Tensor, rows: Tensor, indices: Tensor) -> None:
    live = live_mask(indices, cache.shape[0])
    cache[indices[live].long()] = rows[live].to(cache.dtype)


def select_rows(x: Tensor, indices: Tensor, *, out: Tensor) -> None:
    x, out = (t.view(_BYTES[t.element_size()]) for t in (x, out))  # bytes: a NaN keeps its payload
    live = live_mask(indices, x.shape[0])
    out.zero_()
    out[live] = x[indices[live].long()]


def copy_rows(dst: Tensor, src: Tensor, indices: Tensor) -> None:
    dst, src = (t.view(_BYTES[t.element_size()]) for t in (dst, src))
    live = live_mask(indices, dst.shape[0])
    dst[indices[live].long()] = src[live]
