"""The gated delta family on a GPU: each kernel beside a plain pass over as many bytes, and beside flash-linear-attention's.

Every call finds its states and activations cold in memory (copies taken in turn), from a CUDA graph. The floor of a kernel that
works in place is an in-place pass over its bytes, of any other a copy of as many, both measured here. Nothing is timed that
does not agree with the reference on the same card first. The last case is a layer's whole decode glue: convolution, post-conv,
step and gated norm, whose floor is the step's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import narrowgate.ops as ops
from narrowgate.bench.timing import Call, Measured, copies, replayed
from narrowgate.ops.gated_delta_rule.layer import composed, decode_layer, in_one_launch

OURS = "narrowgate"
HK, K, V, W = 16, 128, 128, 4
CHANNELS = 10240  # of the convolution
DEVICE, IMPL = "cuda", "gpu"
BF16 = torch.bfloat16
FEW = 48  # copies at most: beyond it the launches, not the caches, are what changes


@dataclass(frozen=True)
class Timed:
    """One case: its calls, what it moves, and pairs (what the reference gives, what the kernel gives) on inputs like its own."""

    case: str
    calls: Sequence[Call]
    nbytes: int
    check: Callable[[], list[tuple[Tensor, Tensor]]]
    in_place: bool = False
    peers: dict[str, Sequence[Call]] = field(default_factory=dict)
    note: str = ""


def measure(
    batches: Sequence[int], heads: Sequence[int], lengths: Sequence[int], *, tell: Callable[[str], None] = lambda case: None
) -> tuple[list[Measured], list[str]]:
    """(every kernel and peer that checked, timed; what did not check)."""
    found: list[Measured] = []
    refused = []
    for timed in _all(batches, heads, lengths):
        tell(timed.case)
        problem = _complaint(timed)
        if problem:
            refused.append(f"{timed.case}: not timed, {problem}")
            continue
        floor = _pass_over(timed.nbytes, timed.in_place)
        for who, calls in {OURS: timed.calls, **timed.peers}.items():
            spent = replayed(calls)
            note = timed.note or f"{timed.nbytes / spent / 1e6:.2f} TB/s"
            found.append(Measured(timed.case, who, spent, floor, note if who == OURS else ""))
    return found, refused


def _complaint(timed: Timed) -> str:
    for i, (want, got) in enumerate(timed.check()):
        error = float((want.double() - got.double()).pow(2).mean().sqrt() / want.double().pow(2).mean().sqrt().clamp(min=1e-30))
        limit = 1e-5 if got.dtype == torch.float32 and not timed.case.startswith("prefill") else 5e-3
        if not error <= limit:
            return f"output {i} is off by {error:.2g}"
    return ""


@functools.cache
def _pass_over(nbytes: int, in_place: bool) -> float:
    """Microseconds that reading and writing `nbytes` in all take, half of them each."""
    n = max(1, nbytes // 4)
    many = [torch.ones(n, dtype=BF16, device=DEVICE) for _ in range(min(FEW, copies(nbytes, DEVICE)))]
    if in_place:
        return replayed([functools.partial(x.mul_, 1.0) for x in many])
    return replayed([functools.partial(torch.empty_like(x).copy_, x) for x in many])


def _all(batches: Sequence[int], heads: Sequence[int], lengths: Sequence[int]) -> Iterator[Timed]:
    for hv in heads:
        for b in batches:
            yield _step(b, hv)
            yield _packed(b, hv)
            yield _speculative(b, hv, 4)
            yield _glue(b, hv)
        for t in lengths:
            yield _prefill(t, hv)
    for t in lengths:
        yield _conv(t, CHANNELS)
        yield from _rows(t)


def _flow(tokens: int, hv: int) -> dict[str, Any]:
    g = torch.Generator(device=DEVICE).manual_seed(tokens + hv)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=DEVICE)

    q, k = (ops.l2_norm(normal(tokens, HK, K)).to(BF16) for _ in range(2))
    decay = torch.nn.functional.logsigmoid(normal(tokens, hv))
    return {"q": q, "k": k, "v": normal(tokens, hv, V).to(BF16), "g": decay, "beta": normal(tokens, hv).sigmoid()}


def _states(rows: int, hv: int) -> list[Tensor]:
    return [torch.randn(rows, hv, V, K, device=DEVICE) * 0.1 for _ in range(min(FEW, copies(rows * hv * V * K * 4, DEVICE)))]


def _both(function: Callable[..., Any], state: Tensor, **given: Any) -> list[tuple[Tensor, Tensor]]:
    """What the reference and the kernel give, and what becomes of the state."""
    found = []
    for impl in ("reference", IMPL):
        held = state.clone()
        found.append((function(**given, state=held, impl=impl), held))
    return list(zip(*found, strict=True))


def _step(b: int, hv: int) -> Timed:
    flow, states, slots = _flow(b, hv), _states(b, hv), torch.arange(b, device=DEVICE, dtype=torch.int32)
    out = torch.empty_like(flow["v"])
    given: dict[str, Any] = {**flow, "scale": K**-0.5, "state_indices": slots}
    calls = [functools.partial(ops.gated_delta_rule_step, **given, state=s, out=out) for s in states]
    fla = _fla("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule")
    peers: dict[str, Sequence[Call]] = {}
    if fla is not None:
        q, k, v, g, beta = (flow[n][:, None] for n in ("q", "k", "v", "g", "beta"))
        peers["fla"] = [
            functools.partial(fla, q, k, v, g, beta=beta, scale=K**-0.5, initial_state=s, output_final_state=True)
            for s in states
        ]
    check = functools.partial(_both, ops.gated_delta_rule_step, states[0], **given)
    return Timed(f"step B={b} Hv={hv}", calls, 2 * states[0].nbytes, check, True, peers)


def _packed(b: int, hv: int) -> Timed:
    states, slots = _states(b, hv), torch.arange(b, device=DEVICE, dtype=torch.int32)
    given: dict[str, Any] = {**_projection(b, hv), "state_indices": slots, "scale": K**-0.5}
    out = torch.empty(b, hv, V, dtype=BF16, device=DEVICE)
    given["mixed_qkv"] = given.pop("mixed")
    calls = [functools.partial(ops.gated_delta_rule_packed_step, **given, state=s, out=out) for s in states]
    check = functools.partial(_both, ops.gated_delta_rule_packed_step, states[0], **given)
    return Timed(f"packed step B={b} Hv={hv}", calls, 2 * states[0].nbytes, check, True)


def _speculative(b: int, hv: int, tokens: int) -> Timed:
    flow, slots = _flow(b * tokens, hv), torch.arange(b * tokens, device=DEVICE, dtype=torch.int32).view(b, tokens)
    pools = _states(b * tokens, hv)
    ends = torch.arange(0, b * tokens + 1, tokens, device=DEVICE, dtype=torch.int32)
    given: dict[str, Any] = {
        **flow,
        "cu_seqlens": ends,
        "state_indices": slots,
        "num_accepted": torch.ones_like(slots[:, 0]),
        "scale": K**-0.5,
    }
    out = torch.empty_like(flow["v"])
    calls = [functools.partial(ops.gated_delta_rule_speculative_step, **given, state=s, out=out) for s in pools]
    check = functools.partial(_both, ops.gated_delta_rule_speculative_step, pools[0], **given)
    nbytes = pools[0].nbytes * (tokens + 1) // tokens  # a start read, a snapshot a token written
    return Timed(f"speculative step of {tokens} B={b} Hv={hv}", calls, nbytes, check, True)


def _projection(b: int, hv: int) -> dict[str, Any]:
    g = torch.Generator(device=DEVICE).manual_seed(b)
    width = 2 * HK * K + hv * V
    mixed, gates = (torch.randn(b, n, generator=g, device=DEVICE).to(BF16) for n in (width, 2 * hv))
    per_head = torch.randn(2, hv, generator=g, device=DEVICE) * 0.3
    return {"mixed": mixed, "a": gates[:, :hv], "b": gates[:, hv:], "A_log": per_head[0], "dt_bias": per_head[1]}


def _glue(b: int, hv: int) -> Timed:
    """A layer's decode but for its products, as the runner does it; where that is one launch, beside the four operators."""
    given, states, slots = _projection(b, hv), _states(b, hv), torch.arange(b, device=DEVICE, dtype=torch.int32)
    mixed = given.pop("mixed")
    weight = torch.randn(mixed.shape[1], W, device=DEVICE).to(BF16)
    gate, norm = torch.randn(b, hv, V, device=DEVICE).to(BF16), torch.ones(V, device=DEVICE, dtype=BF16)
    taps = torch.zeros(b, mixed.shape[1], W - 1, device=DEVICE)
    arrivals = torch.zeros(b, HK, dtype=torch.int32, device=DEVICE)
    given = {"mixed": mixed, "z": gate, **given, "weight": weight, "norm": norm, "state_indices": slots}
    given |= {"num_k_heads": HK, "scale": K**-0.5, "eps": 1e-6}

    def check() -> list[tuple[Tensor, Tensor]]:
        found = []
        for layer in (functools.partial(composed, impl="reference"), functools.partial(decode_layer, arrivals=arrivals)):
            t, s = taps.clone(), states[0].clone()
            found.append((layer(**given, taps=t, state=s), t, s))
        return list(zip(*found, strict=True))

    pools: list[dict[str, Any]] = [{"state": s, "taps": taps.clone()} for s in states]
    calls = [functools.partial(decode_layer, **given, arrivals=arrivals, **p) for p in pools]
    four: dict[str, Sequence[Call]] = {}
    if in_one_launch(mixed, taps, states[0]):
        four["four launches"] = [functools.partial(composed, **given, **p) for p in pools]
    floor = "floor: the step's states alone"
    return Timed(f"decode glue B={b} Hv={hv}", calls, 2 * states[0].nbytes, check, True, four, note=floor)


def _prefill(t: int, hv: int) -> Timed:
    flow, state = _flow(t, hv), torch.zeros(1, hv, V, K, device=DEVICE)
    out, few = torch.empty_like(flow["v"]), {n: x[:256] for n, x in flow.items()}
    given: dict[str, Any] = {"cu_seqlens": None, "scale": K**-0.5}
    calls = [functools.partial(ops.gated_delta_rule, **flow, state=state, **given, out=out)]
    chunk = _fla("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    peers: dict[str, Sequence[Call]] = {}
    if chunk is not None:
        q, k, v, g, beta = (flow[n][None] for n in ("q", "k", "v", "g", "beta"))
        peers["fla"] = [functools.partial(chunk, q, k, v, g, beta, scale=K**-0.5, initial_state=state, output_final_state=True)]
    nbytes = sum(x.nbytes for x in flow.values()) + out.nbytes
    check = functools.partial(_both, ops.gated_delta_rule, state, **few, **given)
    return Timed(f"prefill T={t} Hv={hv}", calls, nbytes, check, peers=peers)


def _conv(t: int, channels: int) -> Timed:
    x, weight = torch.randn(t, channels, device=DEVICE).to(BF16), torch.randn(channels, W, device=DEVICE).to(BF16)
    state, out = torch.zeros(1, channels, W - 1, device=DEVICE), torch.empty_like(x)
    given: dict[str, Any] = {"x": x, "weight": weight, "bias": None}
    fla = _fla("fla.modules.convolution", "causal_conv1d")
    peers: dict[str, Sequence[Call]] = (
        {} if fla is None else {"fla": [functools.partial(fla, x[None], weight=weight, activation="silu")]}
    )
    check = functools.partial(_both, ops.causal_conv1d, state, **{**given, "x": x[:64]})
    calls = [functools.partial(ops.causal_conv1d, **given, state=state, out=out)]
    return Timed(f"causal conv {t}x{channels}", calls, 2 * x.nbytes, check, peers=peers)


def _rows(t: int) -> Iterator[Timed]:
    """Post-conv and the norms of a prefill of t tokens."""
    given = _projection(t, 32)
    conv_out = given.pop("mixed")
    sizes: dict[str, Any] = {"num_k_heads": HK, "head_k_dim": K, "head_v_dim": V}
    x = torch.randn(t * 32, V, device=DEVICE).to(BF16)
    gate, weight, out = torch.randn_like(x), torch.ones(V, device=DEVICE, dtype=BF16), torch.empty_like(x)

    def pairs(function: Callable[..., Any], *args: Any, **options: Any) -> list[tuple[Tensor, Tensor]]:
        want, got = (function(*args, **options, impl=impl) for impl in ("reference", IMPL))
        if isinstance(want, Tensor) and isinstance(got, Tensor):
            return [(want, got)]
        return list(zip(want, got, strict=True))

    post = functools.partial(ops.gdn_post_conv, conv_out, **given, **sizes)
    check = functools.partial(pairs, ops.gdn_post_conv, conv_out, **given, **sizes)
    yield Timed(f"post-conv T={t}", [post], 2 * conv_out.nbytes, check)
    norm = functools.partial(ops.rms_norm_gated, x, gate, weight, eps=1e-6, out=out)
    check = functools.partial(pairs, ops.rms_norm_gated, x, gate, weight, eps=1e-6)
    yield Timed(f"gated norm {t}x32 rows", [norm], 3 * x.nbytes, check)
    check = functools.partial(pairs, ops.l2_norm, x)
    yield Timed(f"l2 norm {t}x32 rows", [functools.partial(ops.l2_norm, x, out=out)], 2 * x.nbytes, check)


def _fla(module: str, name: str) -> Callable[..., Any] | None:
    """A function of flash-linear-attention, or None where it is not installed."""
    import importlib

    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        return None


def peer() -> str:
    import importlib.metadata

    try:
        return f"fla {importlib.metadata.version('flash-linear-attention')}"
    except importlib.metadata.PackageNotFoundError:
        return "none: flash-linear-attention is not installed"
