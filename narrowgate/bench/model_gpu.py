"""The bench of models on a GPU: the decoding step as one CUDA graph, and every kind of layer as a graph of its own, each beside
its floor.

The floor of a kind is its bytes at the rates that were measured just before: weights (of experts the chosen ones), keys and values
at the rate of reading, states read and written at the rate of copying. A kind's graph runs the modules of all layers in turn on
random activations; where these together fit into the card's cache (attention of the smallest model) the kind is timed warm.
What a replayed step takes beyond the sum of the kinds is what lies between them; what a step by the clock takes beyond the replay
is Python and the way to the card and back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from narrowgate.bench.model import layer_times, named_parts
from narrowgate.bench.timing import replayed
from narrowgate.engine.graph import StaticStep
from narrowgate.engine.measure import Speed, speed
from narrowgate.engine.model import Model
from narrowgate.models.hybrid import EMBEDDING
from narrowgate.nn.batch import static
from narrowgate.nn.state import Mixer


@dataclass(frozen=True)
class Kind:
    """All layers of one kind in one step: microseconds, and the bytes that must be read, and copied (both directions)."""

    microseconds: float
    read: int
    copied: int

    def floor(self, roofs: dict[str, float]) -> float:
        """Microseconds."""
        return (self.read / roofs["read"] + self.copied / roofs["copy"]) * 1e6


@dataclass(frozen=True)
class Found:
    """Everything that one run says. Times in microseconds."""

    speed: Speed
    prompt_kinds: dict[str, float]  # seconds of a prompt, by kind of layer, the device awaited after each
    step: float  # by the clock, from token to logits
    replay: float  # of the captured step alone
    capture: float  # seconds
    kinds: dict[str, Kind]
    peak_bytes: int  # of the device's memory


def measure(model: Model, *, prompt: int = 512, steps: int = 32) -> Found:
    """Prefill and decode rates, then the parts of both."""
    torch.cuda.reset_peak_memory_stats(model.device)
    rates = speed(model, [1, 2, 3, 5, 8, 13, 21], prompt=prompt, steps=steps)
    cache, ids, one = (
        model.new_cache(capacity=prompt + steps + 2),
        torch.arange(prompt) % model.config.vocab_size,
        torch.tensor([7]),
    )

    def now() -> float:
        torch.cuda.synchronize(model.device)
        return time.perf_counter()

    with layer_times(model, now) as prompt_kinds:
        model.step(ids, cache, last_only=True)
    model.step(one, cache, last_only=True)
    began = now()
    model.step(one, cache, last_only=True)
    capture = now() - began
    whole = []
    for _ in range(steps):
        began = now()
        model.step(one, cache, last_only=True)
        whole.append((now() - began) * 1e6)
    (step,) = cache.recordings.values()
    replay = _replay(step)
    kinds = _kinds(model, cache.states, cache.lengths[0])
    return Found(
        rates, dict(prompt_kinds), statistics.median(whole), replay, capture, kinds, torch.cuda.max_memory_allocated(model.device)
    )  # fmt: skip


def _replay(step: StaticStep, repeats: int = 20) -> float:
    found = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step.replay()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(found)


@torch.no_grad()
def _kinds(model: Model, states: Sequence[Any], length: int) -> dict[str, Kind]:
    """Each kind of layer captured and replayed by itself."""
    device, hidden = model.device, model.config.hidden_size
    x = torch.randn(1, hidden, device=device, dtype=model.dtype)
    slots, position = torch.zeros(1, dtype=torch.int64, device=device), torch.full((1,), length - 1, device=device)
    batch = static(slots, position, torch.tensor([0, 1], dtype=torch.int32, device=device), model.decoder.frequencies)
    state_of = dict(zip((layer.mixer for layer in model.decoder.layers), states, strict=True))
    calls: dict[str, list[Callable[[], Tensor]]] = {}
    for module, kind in named_parts(model):
        if isinstance(module, Mixer):
            call: Callable[[], Tensor] = partial(module, x, batch, state_of[module])
        elif kind == "head":
            call = partial(module, x, out_dtype=torch.float32)
        else:
            call = partial(module, slots if kind == "embedding" else x)
        calls.setdefault(kind, []).append(call)
    read, copied = _bytes(model, states, length)
    return {
        kind: Kind(replayed([partial(_all, parts)], least=4), read.get(kind, 0), copied.get(kind, 0))
        for kind, parts in calls.items()
    }  # fmt: skip


def _all(calls: Sequence[Callable[[], Tensor]]) -> None:
    for call in calls:
        call()


def _bytes(model: Model, states: Sequence[Any], length: int) -> tuple[dict[str, int], dict[str, int]]:
    """(bytes that each kind of layer must read, and that it must read and write) for one token."""
    c, read, copied = model.config, dict[str, int](), dict[str, int]()
    for r in model.report():
        if r.name == EMBEDDING.removesuffix(".weight"):
            read["embedding"] = r.nbytes // c.vocab_size
            kind = "head" if c.tied else ""
        else:
            kind = _kind(r.name)
        share = c.moe.top_k / c.moe.experts if c.moe is not None and ".experts." in r.name else 1.0
        if kind:
            read[kind] = read.get(kind, 0) + int(r.nbytes * share)
    for state in states:
        if hasattr(state, "rule"):
            copied["gated delta"] = copied.get("gated delta", 0) + 2 * state.nbytes
        else:
            read["attention"] = read.get("attention", 0) + state.nbytes * length // state.capacity
    return read, copied


def _kind(name: str) -> str:
    if ".mlp." in name:
        dense = not any(part in name for part in (".experts.", ".shared_expert", ".mlp.gate."))
        return "feed-forward" if dense and not name.endswith(".mlp.gate") else "experts"
    parts = (("linear_attn", "gated delta"), ("self_attn", "attention"), ("lm_head", "head"))
    return next((kind for part, kind in parts if part in name), "norms")
