"""Every operator is registered well: opcheck on both overloads, and the hot ones trace whole, with sizes left open.

The arguments are those of the operator's first shipped case that has an oracle, so a new operator enrols itself."""

import pytest
import torch

import narrowgate.ops as ops
from narrowgate.conformance.guards import clone, tensors
from narrowgate.conformance.run import all_cases
from narrowgate.dispatch import OPERATORS


def plain(case):
    """opcheck compares with ==, under which NaN is not itself."""
    if case.oracle is None or case.full:
        return False
    values = tensors({k: v for k, v in case.draw().items() if k != "out"})
    return not any(t.is_floating_point() and bool(t.float().isnan().any()) for t in values)


def arguments(op):
    """The operator and the schema's arguments of one call."""
    operator = OPERATORS[op]
    case = next(c for c in all_cases()[op] if plain(c))
    inputs = {k: v for k, v in clone(case.draw()).items() if k != "out"}
    args, kwargs = operator.flatten(**inputs) if operator.flatten else ((), inputs)
    return operator, args, kwargs


@pytest.mark.spec("F45")
@pytest.mark.parametrize("op", sorted(OPERATORS))
def test_opcheck(op):
    operator, args, kwargs = arguments(op)
    torch.library.opcheck(operator._default, args, kwargs)
    if operator.has_out:
        out = operator.allocate(*args, **kwargs)
        torch.library.opcheck(operator._out, args, {**kwargs, "out": out})


@pytest.mark.spec("F45")
def test_step_traces_whole_for_any_batch():
    """The norms, the convolution's step and the rule's step under torch.compile(fullgraph=True), sizes left open."""

    def layer(x, weight, conv_state, a, b, A_log, state, slots):
        y = ops.causal_conv1d_step(x, weight, None, conv_state, state_indices=slots)
        q, k, v, g, beta = ops.gdn_post_conv(y, a, b, A_log, A_log, num_k_heads=2, head_k_dim=4, head_v_dim=3)
        o = ops.gated_delta_rule_step(q, k, v, g, beta, state, scale=0.5, state_indices=slots)
        return ops.rms_norm_gated(o, v, A_log[:3], eps=1e-6), ops.rms_norm(ops.l2_norm(o), eps=1e-6)

    def inputs(batch):
        g = torch.Generator().manual_seed(batch)
        shapes = (batch, 28), (28, 4), (7, 28, 3), (batch, 4), (batch, 4), (4,), (7, 4, 3, 4)
        return [torch.rand(s, generator=g) - 0.5 for s in shapes] + [torch.randperm(7, generator=g)[:batch]]

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for batch in (2, 5, 3):
            eager, traced = inputs(batch), inputs(batch)
            for want, got in zip(layer(*eager), compiled(*traced), strict=True):
                assert torch.equal(want, got)
            for want, got in zip(eager, traced, strict=True):
                assert torch.equal(want, got)  # states too
