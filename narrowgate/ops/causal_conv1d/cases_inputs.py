"""Inputs of the convolution's cases, in the ranges of SPEC D80, with canaries in columns and slots that must stay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator

from narrowgate.conformance.case import Arguments
from narrowgate.conformance.fixtures import F32, padded, uniform

WIDE, IDLE = 777.0, 555.0  # what extra columns and idle slots hold


def layer(
    g: Generator, tokens: int, channels: int, width: int = 4, *, bias: bool = True, dtype: torch.dtype = F32, pad: int = 0
) -> Arguments:
    x = uniform(g, tokens, channels, low=-3, high=3, dtype=dtype)
    return {
        "x": padded(x, pad, -12345.0) if pad else x,
        "weight": uniform(g, channels, width, dtype=dtype),
        "bias": uniform(g, channels, dtype=dtype) if bias else None,
    }


def _state(g: Generator, slots: int, channels: int, width: int, extra: int, dtype: torch.dtype) -> Arguments:
    state = torch.full((slots, channels, width - 1 + extra), WIDE)
    state[..., : width - 1] = uniform(g, slots, channels, width - 1, low=-3, high=3)
    return {"state": state.to(dtype)}


def _indexed(given: Arguments, slots: list[int] | None, index: torch.dtype) -> None:
    if slots is not None:
        given["state"][[i for i in range(len(given["state"])) if i not in slots]] = IDLE
        given["state_indices"] = torch.tensor(slots, dtype=index)


def forward(
    g: Generator, ends: list[int], channels: int, width: int = 4, *, bias: bool = True, activation: str | None = "silu",
    dtype: torch.dtype = F32, out: torch.dtype | None = None, state: torch.dtype = F32, initial: list[int] | None = None,
    flags: torch.dtype = torch.int32, slots: list[int] | None = None, pool: int = 0, extra: int = 0, pad: int = 0,
    tokens: int | None = None, index: torch.dtype = torch.int32,
) -> Arguments:  # fmt: skip
    """A call of `causal_conv1d` on sequences that end at `ends`; a slot that is not to be read holds stale values."""
    total, n = ends[-1] if tokens is None else tokens, len(ends) - 1
    given = layer(g, total, channels, width, bias=bias, dtype=dtype, pad=pad)
    given |= _state(g, pool or n, channels, width, extra, state)
    given |= {"cu_seqlens": torch.tensor(ends, dtype=index), "activation": activation}
    _indexed(given, slots, index)
    if initial is not None:
        given["has_initial_state"] = torch.tensor(initial).to(flags)
    if out is not None:
        given["out"] = torch.full((total, channels), 3.140625, dtype=out)
    return given


def step(
    g: Generator, rows: int, channels: int, width: int = 4, *, bias: bool = True, activation: str | None = "silu",
    dtype: torch.dtype = F32, out: torch.dtype | None = None, state: torch.dtype = F32, slots: list[int] | None = None,
    pool: int = 0, extra: int = 0, pad: int = 0, index: torch.dtype = torch.int32,
) -> Arguments:  # fmt: skip
    given = layer(g, rows, channels, width, bias=bias, dtype=dtype, pad=pad)
    given |= {**_state(g, pool or rows, channels, width, extra, state), "activation": activation}
    _indexed(given, slots, index)
    if out is not None:
        given["out"] = _preset(rows, channels, out)
    return given


def _preset(rows: int, channels: int, dtype: torch.dtype) -> Any:
    """An output of bytes 0x5a."""
    size = torch.empty((), dtype=dtype).element_size()
    return torch.full((rows, channels * size), 0x5A, dtype=torch.uint8).view(dtype)


def speculative(
    g: Generator, lengths: list[int], accepted: list[int], channels: int, drafted: int, width: int = 4, *,
    slots: list[int] | None = None, pool: int = 0, bias: bool = True, activation: str | None = "silu",
    dtype: torch.dtype = F32, out: torch.dtype | None = None, state: torch.dtype = F32, index: torch.dtype = torch.int32,
) -> Arguments:  # fmt: skip
    ends = [0]
    for n in lengths:
        ends.append(ends[-1] + n)
    slots = list(range(len(lengths))) if slots is None else slots
    given = layer(g, ends[-1], channels, width, bias=bias, dtype=dtype)
    held = uniform(g, pool or len(lengths), channels, width - 1 + drafted, low=-3, high=3).to(state)
    held[[i for i in range(len(held)) if i not in slots]] = IDLE
    given |= {"state": held, "cu_seqlens": torch.tensor(ends, dtype=index), "state_indices": torch.tensor(slots, dtype=index)}
    given |= {"num_accepted": torch.tensor(accepted, dtype=index), "activation": activation}
    if out is not None:
        given["out"] = _preset(ends[-1], channels, out)
    return given
