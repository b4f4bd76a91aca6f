"""A model of a published geometry with random weights: how fast it runs, and where the time of a token goes.

The weights are made packed: a tile of random rows is quantized once and repeated, so that no float copy of a matrix, let
alone of the model, ever exists; values do not matter to the time, bytes do. The floor of a decoding step is what must cross
memory: every packed byte of the matrices that a token meets, once, and each state read and written, over the measured roof.
Left out: quality (the compare command), batches of different lengths."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from narrowgate.engine.binding import Source
from narrowgate.engine.measure import Speed, speed
from narrowgate.engine.model import Bound, Model
from narrowgate.engine.overrides import SchemeChoice
from narrowgate.formats import element
from narrowgate.models import family
from narrowgate.models.hybrid import EMBEDDING, Builder, Slot, slots
from narrowgate.models.published import published
from narrowgate.nn.attention import GatedAttention
from narrowgate.nn.mlp import MoE
from narrowgate.nn.weight import Weight
from narrowgate.ops import quantize
from narrowgate.ops.host import missing
from narrowgate.packing import PackedTensor, Scale
from narrowgate.packing.registry import layout

_TILE = 512  # rows that are really drawn


def random_model(
    name: str, scheme: str, *, layers: int | None = None, device: str = "cpu", dtype: torch.dtype | None = None
) -> Model:  # fmt: skip
    """A Model of the geometry `name` (narrowgate.models.published), its packable tensors in `scheme`."""
    return from_config(published(name, layers), scheme, name=name, device=device, dtype=dtype)


def from_config(
    raw: dict[str, Any], scheme: str, *, name: str = "random", device: str = "cpu", dtype: torch.dtype | None = None
) -> Model:  # fmt: skip
    """The same from a raw config."""
    module = family(raw)
    config = module.read_config(raw, name)
    target = torch.device(device)
    dtype = dtype or (torch.float32 if target.type == "cpu" else torch.bfloat16)
    generator = torch.Generator(target).manual_seed(0)
    bound = {}
    for slot in slots(config, module.projections):
        weight = Weight(_draw(slot, scheme, generator))
        bound[slot.name] = Bound(Source(slot, (slot.name,), slot.module, slot.packable), weight)
    decoder = Builder(config, lambda n: bound[n].weight, dtype, False).decoder(module.build_projection)
    decoder.frequencies = decoder.frequencies.to(target)
    decoder.prepare()
    folder: Any = SimpleNamespace(path=Path(name), config=raw, tokenizer=None, eos_ids=frozenset())
    return Model(folder, config, decoder, bound, SchemeChoice(scheme), dtype, target, ())


def _draw(slot: Slot, scheme: str, generator: torch.Generator) -> PackedTensor | Tensor:
    """A random tensor of a slot, on the generator's device. Small ones are near what trained models hold, so that states stay
    finite."""
    device = generator.device
    if not slot.packable:
        if slot.module.endswith("A_log"):
            return torch.rand(slot.shape, generator=generator, device=device) * 2.0
        around = 1.0 if slot.module.endswith("linear_attn.norm") else 0.0
        return (around + 0.02 * torch.randn(slot.shape, generator=generator, device=device)).bfloat16()
    *stack, rows, columns = slot.shape
    some = [*(1 for _ in stack), min(rows, _TILE), columns]
    tile = torch.randn(some, generator=generator, device=device) * columns**-0.5
    packed = quantize(tile, scheme)
    if scheme == "bf16":
        return _repeat(packed.data, slot.shape).view(torch.bfloat16)
    return _repeated(packed, slot.shape)


def _repeated(w: PackedTensor, shape: tuple[int, ...]) -> PackedTensor:
    """The rows of `w` again and again, to make a tensor of `shape`: its layouts hold row after row."""

    def tiled(data: Tensor, name: str, bits: int, extents: tuple[int, ...]) -> Tensor:
        return _repeat(data, layout(name).storage_shape(extents, bits))

    def scale(s: Scale) -> Scale:
        if s.grid(w.shape) == (1,) * len(shape):  # one factor for the whole tensor
            return replace(s, block=shape)
        return replace(s, data=tiled(s.data, s.layout, element(s.element).bits, s.grid(shape)))

    data = tiled(w.data, w.layout, element(w.element).bits, shape)
    zero = None if w.zero_points is None else scale(w.zero_points)
    return replace(w, data=data, shape=shape, scales=tuple(scale(s) for s in w.scales), zero_points=zero)


def _repeat(data: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The stored numbers of `data` over and over, as a tensor of `shape`."""
    flat, count = data.reshape(-1), torch.Size(shape).numel()
    return flat.repeat(-(-count // flat.numel()))[:count].view(shape)


# ---- measuring


@dataclass(frozen=True)
class Found:
    """Everything that one run says. Times in microseconds a decoded token, the median step, after a prompt."""

    speed: Speed
    prompt_kinds: dict[str, float]  # seconds of a prompt, by kind of layer
    weight_bytes: int  # of the matrices that a token meets
    state_bytes: int  # read and written
    step: float
    kinds: dict[str, float]  # by kind of layer
    kernels: dict[str, float]  # by kernel, "again": the parts that are called anew, such as attention's
    calls: int  # of kernels and of torch's operators
    call_cost: float  # of entering a kernel from Python
    inside: float  # all calls of a step, the median of whole steps: the sum of the calls' own medians leaves out slow moments
    peak_bytes: int  # of the process, the model included

    @property
    def token_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes

    @property
    def outside(self) -> float:
        """Share of a step that is in no kernel and no such part: what Python costs, entering kernels included."""
        return max(0.0, 1 - (self.inside - self.calls * self.call_cost) / self.step) if self.calls else 1.0


def measure(model: Model, *, prompt: int = 512, steps: int = 32) -> Found:
    """Prefill and decode rates, then prompts and steps with the parts timed one by one (which costs a little itself)."""
    rates = speed(model, [1, 2, 3, 5, 8, 13, 21], prompt=prompt, steps=steps)
    cache, ids = model.new_cache(), torch.arange(prompt) % model.config.vocab_size
    with layer_times(model, time.perf_counter) as prompt_kinds:
        model.step(ids, cache, last_only=True)
    one = torch.tensor([7])
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    with _layers(model, lambda began: [(began, _noted())], _noted, spans):  # type: ignore[arg-type, return-value]
        model.step(one, cache, last_only=True)  # recorded here
    whole, parts = [], []
    recorded = next(iter(cache.recordings.values()), None)
    for _ in range(steps):
        began = time.perf_counter()
        model.step(one, cache, last_only=True)
        whole.append((time.perf_counter() - began) * 1e6)
        if recorded is not None and recorded.refused is None:
            parts.append([_timed(function, arguments) for function, arguments in recorded.calls])
    kinds: dict[str, float] = {}
    kernels: dict[str, float] = {}
    calls = 0
    if parts:
        medians, calls = [statistics.median(times) for times in zip(*parts, strict=True)], len(parts[0])
        kinds = {kind: sum(sum(medians[a:b]) for a, b in found) for kind, found in spans.items()}
        for (function, _), took in zip(recorded.calls, medians, strict=True):  # type: ignore[union-attr]
            name = getattr(function, "__name__", "torch").strip("_")
            kernels[name] = kernels.get(name, 0.0) + took
    weights, states = token_bytes(model), 2 * sum(s.nbytes for s in cache.states if hasattr(s, "rule"))
    states += sum(s.nbytes for s in cache.states if not hasattr(s, "rule"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    cost = _call_cost() if parts else 0.0
    median = statistics.median(whole)
    inside = statistics.median(map(sum, parts)) if parts else 0.0
    return Found(rates, dict(prompt_kinds), weights, states, median, kinds, kernels, calls, cost, inside, peak)


def token_bytes(model: Model) -> int:
    """Bytes of the weights that one token must read: every matrix, of experts the chosen ones, of an embedding one row."""
    total, c = 0, model.config
    for r in model.report():
        if r.name == EMBEDDING.removesuffix(".weight") and not c.tied:
            continue
        share = c.moe.top_k / c.moe.experts if c.moe is not None and ".experts." in r.name else 1.0
        total += int(r.nbytes * share)
    return total


def _timed(function: Any, arguments: Any) -> float:
    began = time.perf_counter()
    function(*arguments)
    return (time.perf_counter() - began) * 1e6


def _noted() -> int:
    """How many calls the recording under way has noted."""
    if missing():
        return 0
    from narrowgate.simd.cpu_compile import tape

    return len(tape.get() or ())


def _call_cost() -> float:
    """Microseconds to enter a compiled kernel of twenty arguments that does nothing."""
    from narrowgate.bench.nothing_cpu import enter

    enter(1000)
    return min(enter(1000) for _ in range(5))


def named_parts(model: Model) -> list[tuple[Any, str]]:
    """Every part of the model, and its kind."""
    layers = model.decoder.layers
    named: list[tuple[Any, str]] = [
        (layer.mixer, "attention" if isinstance(layer.mixer, GatedAttention) else "gated delta") for layer in layers
    ]
    named += [(layer.mlp, "experts" if isinstance(layer.mlp, MoE) else "feed-forward") for layer in layers]
    named += [(n, "norms") for layer in layers for n in (layer.before, layer.between)]
    return [*named, (model.decoder.head, "head"), (model.decoder.embed, "embedding"), (model.decoder.norm, "norms")]


def layer_times(model: Model, now: Callable[[], float]) -> Any:
    """Within it, seconds of each part of the model add up by its kind."""
    return _layers(model, lambda began: now() - began, now)


@contextmanager
def _layers(model: Model, ended: Any, begun: Any, into: Any = None) -> Iterator[Any]:
    """Within it, `ended(what begun() gave)` of each part of the model adds up by its kind."""
    into = defaultdict(float) if into is None else into
    hooks = []
    for module, kind in named_parts(model):
        started: list[Any] = []

        def before(*_: Any, started: list[Any] = started) -> None:
            started.append(begun())

        def after(*_: Any, started: list[Any] = started, kind: str = kind) -> None:
            into[kind] += ended(started.pop())

        hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield into
    finally:
        for hook in hooks:
            hook.remove()
