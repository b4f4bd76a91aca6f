"""How long calls take with cold caches, and how fast the machine's memory is: what every benchmark here is measured with.

A `Contender` is one way to do a case: a list of calls over different copies of its weights or states, together larger than
any cache, so that each call finds its data in memory. On the CPU the contenders of a case run in turn, block by block, so
that a slow moment meets all of them; on a GPU each is captured in a graph, so that what is timed is the kernels and not
Python. Medians. A share of the roof divides by what this machine was measured to do, not by a data sheet."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

COLD = 600 << 20  # bytes of copies on the CPU
COLD_GPU = 240 << 20

Call = Callable[[], Any]


@dataclass(frozen=True)
class Measured:
    """One contender of one case. `floor` is the time that its bytes or operations take at the roof."""

    case: str
    who: str
    microseconds: float
    floor: float | None = None
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def share(self) -> float | None:
        return None if self.floor is None else self.floor / self.microseconds

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share}


def copies(nbytes: int, device: str = "cpu") -> int:
    """How many copies of `nbytes` make the caches cold."""
    return max(2, (COLD_GPU if device == "cuda" else COLD) // max(nbytes, 1) + 1)


def interleaved(contenders: Mapping[str, Sequence[Call]], *, seconds: float = 1.0, blocks: int = 7) -> dict[str, float]:
    """Median microseconds a call of each contender, on the CPU. Each block runs one contender for a moment, then the next."""
    for calls in contenders.values():
        calls[0]()  # compile, allocate
    share = seconds / blocks / max(len(contenders), 1)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    position = dict.fromkeys(contenders, 0)
    for _ in range(blocks):
        for name, calls in contenders.items():
            began, count = time.perf_counter(), 0
            while count < 2 or time.perf_counter() - began < share:
                calls[position[name] % len(calls)]()
                position[name] += 1
                count += 1
            times[name].append((time.perf_counter() - began) / count)
    return {name: statistics.median(found) * 1e6 for name, found in times.items()}


def replayed(calls: Sequence[Call], *, least: int = 20, repeats: int = 5) -> float:
    """Median microseconds a call on the GPU, from replays of one CUDA graph over all calls. Memory that the calls allocate
    comes from the graph's pool."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in (*calls, calls[0]):  # compiled and set up before the capture
            call()
    torch.cuda.synchronize()
    graph, rounds = torch.cuda.CUDAGraph(), max(1, -(-least // len(calls)))
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize()
    found = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop) * 1e3 / (rounds * len(calls)))
    return statistics.median(found)


@functools.cache
def roofs(device: str = "cpu") -> dict[str, float]:
    """Bytes a second that this machine reads ("read") and reads and writes ("copy", both counted); on a GPU the rate of its
    bfloat16 product too ("bf16_flops"). Measured once a process, a second or two."""
    if device == "cuda":
        return _gpu_roofs()
    big = torch.ones(192 << 20)  # 768 MiB: the last-level cache of a server may hold 300
    other = torch.empty_like(big)
    times = interleaved({"read": [big.sum], "copy": [lambda: other.copy_(big)]}, seconds=2.0)
    nbytes = big.numel() * 4
    return {"read": nbytes / times["read"] * 1e6, "copy": 2 * nbytes / times["copy"] * 1e6}


def _gpu_roofs() -> dict[str, float]:
    x = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    # Not copy_: in a graph that is a memcpy node, which an H200 does at 2.7 TB/s where a kernel reaches 4.07.
    copy = replayed([lambda: torch.neg(x, out=y)], least=3)
    matrix, row = x.view(1 << 17, 1 << 13), x[: 8 << 13].view(8, 1 << 13)
    read = replayed([lambda: torch.mm(row, matrix.T)], least=3)  # the library's product of eight rows is a pure stream
    a, b = x[: 1 << 26].view(8192, 8192), x[1 << 26 : 2 << 26].view(8192, 8192)
    product = replayed([lambda: torch.mm(a, b)], least=5)
    return {"read": x.nbytes / read * 1e6, "copy": 2 * x.nbytes / copy * 1e6, "bf16_flops": 2 * 8192**3 / product * 1e6}
