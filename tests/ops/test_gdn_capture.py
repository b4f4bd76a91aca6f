"""On a GPU: the family's operators inside a CUDA graph, which would show a sync, a hidden allocation or a baked-in value; and the
same bits from every one of many runs (SPEC D40, D45, D46, D58, D79). Cases enrol themselves."""

import pytest
import torch

import narrowgate.ops as ops
from narrowgate.conformance.guards import guard, map_tensors
from narrowgate.conformance.run import all_cases
from narrowgate.dispatch import OPERATORS

OPS = (
    "gated_delta_rule_step", "gated_delta_rule_packed_step", "gated_delta_rule_speculative_step", "causal_conv1d",
    "causal_conv1d_step", "causal_conv1d_speculative_step", "l2_norm", "rms_norm", "rms_norm_gated", "gdn_gate", "gdn_decay",
    "split_qkv", "gdn_post_conv", "silu_mul", "gather_state", "scatter_state", "select_rows", "copy_rows",
)  # fmt: skip
POISON = 0xA5


def bytes_of(t):
    return t.contiguous().view(torch.uint8).clone()


def draw(op):
    """The arguments of the operator's largest cases that have an oracle."""
    cases = [c for c in all_cases()[op] if c.oracle is not None and not c.full]
    size = lambda c: sum(t.numel() for t in c.draw().values() if isinstance(t, torch.Tensor))  # noqa: E731
    return [{k: v for k, v in c.draw().items() if k != "out"} for c in sorted(cases, key=size)[-3:]]


def captured(op, drawn):
    """Replayed twice, its outputs poisoned and its state put back, a captured call does what the plain call did; then what
    another plain call does with other inputs."""
    guards = []

    def place(t):
        guards.append(guard(t, "cuda"))
        return guards[-1].tensor

    given = map_tensors(drawn, place)
    tensors = {k: t for k, t in given.items() if isinstance(t, torch.Tensor)}
    before = {k: bytes_of(t) for k, t in tensors.items()}
    function, operator = getattr(ops, op), OPERATORS[op]

    def restore(values):
        for k, t in tensors.items():
            t.copy_(values[k].view(t.dtype).view(t.shape))

    def plain():
        result = function(**given, impl="gpu")
        return [bytes_of(t) for t in ([] if result is None else [result] if isinstance(result, torch.Tensor) else result)]

    def after():
        return {k: bytes_of(t) for k, t in tensors.items()}

    with torch.no_grad():
        want, changed = plain(), after()  # compiles too
        for _ in range(50):
            restore(before)
            again = plain()
            assert all(torch.equal(a, b) for a, b in zip(want, again, strict=True)), f"{op}: another run, other bits"
            assert all(torch.equal(changed[k], b) for k, b in after().items()), f"{op}: another run, another state"
        restore(before)
        into = {}
        if operator.has_out:
            result = function(**given, impl="gpu")
            into = {"out": torch.zeros_like(result)}
            restore(before)
            function(**given, **into, impl="gpu")
            restore(before)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            made = torch.cuda.memory_stats()["allocation.all.allocated"]
            result = function(**given, **into, impl="gpu")
            made = torch.cuda.memory_stats()["allocation.all.allocated"] - made
        if into:
            assert made == 0, f"{op}: {made} allocations with a given out"
        outputs = [] if result is None else [result] if isinstance(result, torch.Tensor) else list(result)
        zeroed = op.startswith("causal_conv1d")  # rows without a slot are left alone: there poison would stay
        for _ in range(2):
            for t in outputs:
                t.zero_() if zeroed else t.view(torch.uint8).fill_(POISON)
            restore(before)
            graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(a, bytes_of(b)) for a, b in zip(want, outputs, strict=True)), f"{op}: a replay differs"
            assert all(torch.equal(changed[k], b) for k, b in after().items()), f"{op}: a replay leaves another state"
        other = {k: bytes_of(t.flip(0)) if t.is_floating_point() else before[k] for k, t in tensors.items()}
        restore(other)
        want, changed = plain(), after()
        restore(other)
        for t in outputs:
            t.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, bytes_of(b)) for a, b in zip(want, outputs, strict=True)), (
            f"{op}: old values are in the graph"
        )
        assert all(torch.equal(changed[k], b) for k, b in after().items()), f"{op}: the old state is in the graph"
    assert not any(g.broken() for g in guards), f"{op}: memory beside a buffer was written"


@pytest.mark.gpu
@pytest.mark.spec("D40", "D45", "D46", "D58", "D79")
@pytest.mark.parametrize("op", OPS)
def test_capture(op):
    for drawn in draw(op):
        captured(op, drawn)
