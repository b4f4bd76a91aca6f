"""`experts_kernel`, whose language no interpreter runs, executed as the Python that it also is: every lane of every program, memory as
bytes, the assembly statement by statement. Held: which bytes a lane reads, how the assembly takes them, and where sums go."""

import inspect
import re
from types import SimpleNamespace

import pytest
import test_linear_few as assembly
import torch

import narrowgate as ng
from narrowgate.ops.linear.prepare import for_gpu
from narrowgate.packing import flatten

pytest.importorskip("triton")

_STORED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Pointer:
    """Bytes, and where in them something of `kind` begins."""

    def __init__(self, data, kind, at=0):
        self.data, self.kind, self.at = data, kind, torch.as_tensor(at)
        self.dtype = SimpleNamespace(element_ty=kind)

    def __add__(self, count):
        return Pointer(self.data, self.kind, self.at + torch.as_tensor(count) * self.kind.itemsize)

    def to(self, kind, bitcast):
        assert bitcast
        return Pointer(self.data, kind, self.at)

    def bytes_at(self, mask):
        at, size = self.at[mask].reshape(-1), self.kind.itemsize
        assert ((at >= 0) & (at + size <= len(self.data)) & (at % size == 0)).all()
        return at[:, None] + torch.arange(size)


def load(pointer, mask=None, other=0, cache_modifier=""):
    """Integers come as int64, those of fewer bits unsigned."""
    mask = torch.as_tensor(True if mask is None else mask).expand_as(pointer.at)
    found = torch.zeros(pointer.at.shape, dtype=pointer.kind if pointer.kind.is_floating_point else torch.int64)
    raw = pointer.data[pointer.bytes_at(mask)]
    if pointer.kind.is_floating_point:
        found[mask] = raw.view(pointer.kind)[:, 0]
    else:
        bits = raw.view(_STORED[pointer.kind.itemsize])[:, 0].long()
        found[mask] = bits if pointer.kind.itemsize == 8 else bits & ((1 << 8 * pointer.kind.itemsize) - 1)
    return found


def store(pointer, value, mask=None):
    value = torch.as_tensor(value).expand_as(pointer.at)
    mask = torch.as_tensor(True if mask is None else mask).expand_as(pointer.at)
    pointer.data[pointer.bytes_at(mask)] = value[mask].reshape(-1, 1).to(pointer.kind).view(torch.uint8)


def added(pointer, count, sem, scope):
    assert (sem, scope) == ("acq_rel", "gpu")
    before = load(pointer)
    store(pointer, before + count)
    return before


def reduced(parts, axis, combine):
    total = [part[0] for part in parts]
    for i in range(1, len(parts[0])):
        total = combine(*total, *(part[i] for part in parts))
    return total


def unit(text, constraints, operands, dtype, is_pure, pack):
    """One assembly statement, warp by warp."""
    kinds, sums = constraints.split(","), [[] for _ in dtype]
    assert len(kinds) == len(sums) + len(operands)
    for warp in range(len(operands[0])):
        given = {}
        for i, operand in enumerate(operands):
            kind, value = kinds[len(sums) + i], operand[warp]
            if kind == "f":
                value = assembly._bits(value)
            elif kind == "l":
                value = torch.stack((value & (2**32 - 1), value >> 32 & (2**32 - 1)))
            given[f"${len(sums) + i}"] = value
        found = assembly._run(text, given)
        for i, total in enumerate(sums):
            total.append(assembly._floats(found[f"${i}"]))
    return tuple(map(torch.stack, sums))


def _difference(a, b):
    low, high = (assembly._bfloat16(a) - assembly._bfloat16(b).view(2, -1)).bfloat16().view(torch.int16).long() & 0xFFFF
    return low | high << 16


def silu(x):
    return x / (1 + torch.exp(-x))


def executed(module):
    """The module's functions as Python, and the ids of the program that runs."""
    program = SimpleNamespace(ids=(), grid=())
    language = SimpleNamespace(
        constexpr=None, BlockedLayout=lambda *_: None, SliceLayout=lambda *_: None, static_range=range, load=load, store=store,
        arange=lambda first, end, layout: torch.arange(first, end), broadcast=torch.broadcast_tensors, thread_barrier=lambda: None,
        program_id=lambda axis: torch.tensor(program.ids[axis]), num_programs=lambda axis: program.grid[axis],
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype), cdiv=lambda a, b: -(-a // b), reduce=reduced,
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)), pointer_type=lambda kind: kind,
        atomic_add=added, inline_asm_elementwise=unit,
        int64=torch.int64, int32=torch.int32, uint16=torch.uint16, uint32=torch.uint32, float32=torch.float32,
    )  # fmt: skip
    text = re.sub(r"^(from (triton|narrowgate)|@gluon).*\n", "", inspect.getsource(module), flags=re.MULTILINE)
    names = {
        "gl": language, "silu": silu, "_code": lambda stored: stored,
        "_pieces": lambda pointer, mask, count, *_: tuple(load(pointer + i, mask) for i in range(count)),
    }  # fmt: skip
    exec(text.replace(".to(gl.uint32)", ".long()"), names)
    names["_wait"] = lambda lane: None
    return names["experts_kernel"], program


@pytest.mark.parametrize(
    ("name", "hidden", "width", "top_k"),
    [
        ("mxfp4", 128, 64, 2),
        ("mxfp4", 1088, 64, 1),
        ("int4_g128", 256, 256, 1),
        ("int4_g32", 128, 64, 2),
        ("mxfp6_e3m2", 256, 128, 1),
    ],
)
@torch.no_grad()
def test_every_lane(name, hidden, width, top_k, monkeypatch):
    from narrowgate.ops.experts import gpu_experts, gpu_experts_run

    monkeypatch.setitem(assembly._STEPS, "sub", _difference)  # of two bfloat16 at a time: the integers' formats have no other
    kernel, program = executed(gpu_experts)

    def launch(_, grid, on, *given, num_warps, overlap, **options):
        program.grid = grid
        given = [Pointer(t.view(-1).view(torch.uint8), t.dtype) if isinstance(t, torch.Tensor) else t for t in given]
        for i in range(grid[0]):
            for j in range(grid[1]):
                program.ids = (i, j)
                kernel(*given, **options, FOLLOWS=True)

    monkeypatch.setattr(gpu_experts_run, "launch", launch)
    experts, tokens, g = 3, 2, torch.Generator().manual_seed(0)
    shapes = ((experts, 2 * width, hidden), (experts, hidden, width), (2 * width, hidden), (hidden, width))
    held = [ng.quantize(torch.randn(*shape, generator=g) * 0.05, name) for shape in shapes]
    weights, described = zip(*(flatten(for_gpu(w)) for w in held), strict=True)
    found, reason = gpu_experts_run.experts(*described)
    assert found is not None, reason
    x = torch.randn(tokens, hidden, generator=g).bfloat16()
    chosen = torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(tokens)]).int()
    mixing = torch.rand(tokens, top_k + 1, generator=g)
    counts = torch.zeros(tokens, hidden // 32, dtype=torch.int32)
    got = gpu_experts_run.run(found, x, chosen, mixing, counts, *weights)
    gate_up, down, own_gate_up, own_down = (w.dequantize(torch.float32).double() for w in held)
    want = torch.zeros(tokens, hidden, dtype=torch.float64)
    for t in range(tokens):
        pairs = [(gate_up[e], down[e]) for e in chosen[t]] + [(own_gate_up, own_down)]
        for (first, second), weight in zip(pairs, mixing[t], strict=True):
            gate, up = (first @ x[t].double()).bfloat16().float().chunk(2)
            want[t] += (second @ (silu(gate) * up).bfloat16().double()).bfloat16() * weight
    assert (got - want).norm() <= 3e-3 * want.norm()  # roundings to bfloat16
    assert not counts.any()
