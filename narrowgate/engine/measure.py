"""What a format costs, part two: tokens a second, bytes, and the contract that its products ran under.

Prefill: the same prompt of `PROMPT` tokens, logits of the last one only, once unmeasured and then three times; the median.
Decode: single-token steps after that prompt, two unmeasured, then `STEPS` or as many as four seconds allow (five at
least); the median. Wall-clock time, the device synchronised. Left out: batches (the bench command)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from narrowgate.dispatch import Plan, plan
from narrowgate.engine.model import Model

PROMPT, STEPS, DECODE_SECONDS = 512, 32, 4.0


@dataclass(frozen=True)
class Speed:
    """Tokens a second, and over what they were measured."""

    prefill: float
    decode: float
    prompt_tokens: int
    steps: int


def speed(model: Model, tokens: Sequence[int], *, prompt: int = PROMPT, steps: int = STEPS) -> Speed:
    """Measure with the first `prompt` of `tokens`, repeated if there are fewer."""
    length = max(1, min(prompt, (model.config.max_positions or prompt + steps) - steps - 2))
    ids = torch.tensor([tokens[i % len(tokens)] for i in range(length)])
    caches = [model.new_cache() for _ in range(4)]
    prefill = [_timed(partial(model.step, ids, cache, last_only=True), model.device) for cache in caches]
    one, decode = ids[-1:], []
    began = time.perf_counter()
    for i in range(steps + 2):
        if i >= 7 and time.perf_counter() - began > DECODE_SECONDS:
            break
        decode.append(_timed(partial(model.step, one, caches[0], last_only=True), model.device))
    kept = decode[2:] or decode
    return Speed(length / statistics.median(prefill[1:]), 1 / statistics.median(kept), length, len(kept))


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    _settle(device)
    began = time.perf_counter()
    call()
    _settle(device)
    return time.perf_counter() - began


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Size:
    """Bytes of the model, and what of it is packed. bits_per_value: every stored byte of the packed tensors, scales counted,
    over their values; of the tensors that could be packed where none is."""

    nbytes: int
    packed_tensors: int
    packed_values: int
    packed_bytes: int
    kept_tensors: int
    kept_bytes: int
    bits_per_value: float


def size(model: Model) -> Size:
    """Of the weights in memory."""
    report = model.report()
    packed = [r for r in report if r.packed]
    counted = packed or [r for r in report if r.packable]
    values = sum(torch.Size(r.shape).numel() for r in counted)
    nbytes = sum(r.nbytes for r in counted)
    kept = [r for r in report if not r.packed]
    return Size(
        model.nbytes, len(packed), values if packed else 0, nbytes if packed else 0, len(kept), sum(r.nbytes for r in kept),
        8 * nbytes / max(1, values),
    )  # fmt: skip


def packed_ends(model: Model) -> list[str]:
    """ "embedding" and "head", as far as they are packed; a tied table is both."""
    packed = {name.rsplit(".", 1)[-1] for name in model.packed_tensors()}
    ends = {"embedding": "embed_tokens", "head": "embed_tokens" if model.config.tied else "lm_head"}
    return [end for end, name in ends.items() if name in packed]


def contracts(model: Model, tokens: int = 1) -> dict[Plan, int]:
    """The different plans of the model's packed (or packable) matrices, and how many tensors run under each.

    A table that is both embedding and head is planned as both.
    """
    found: dict[Plan, int] = {}
    for report in model.report():
        if not report.packable:
            continue
        plans = []
        if report.name.endswith("embed_tokens"):
            w = model.packed_tensors().get(report.name)
            if w is not None:
                plans.append(plan("embedding", torch.zeros(tokens, dtype=torch.int64, device=model.device), w))
        if not report.name.endswith("embed_tokens") or model.config.tied:
            plans.append(model.plan(report.name, tokens))
        for one in plans:
            found[one] = found.get(one, 0) + 1
    return found
