"""Each stage of the chunk form against float64 loops, alone; and the plan that says which form runs."""

import importlib.util

import pytest
import torch

import narrowgate as ng
from narrowgate.ops.gated_delta_rule import chunk, oracle

H, N, C, K, V = 2, 3, 64, 12, 20


@pytest.fixture(scope="module")
def flow():
    g = torch.Generator().manual_seed(3)
    q, k = (torch.nn.functional.normalize(torch.randn(H, N, C, K, generator=g), dim=-1) for _ in range(2))
    v, beta = torch.rand(H, N, C, V, generator=g) * 2 - 1, torch.rand(H, N, C, 1, generator=g) * 0.9 + 0.05
    decay, state = -torch.rand(H, N, C, generator=g) * 0.1, torch.rand(H, V, K, generator=g) - 0.5
    return q, k, v, decay, beta, state


def chain(flow, chunks=N):
    """(outputs, state at each chunk's start, the last state) of `chunks` chunks, token by token."""
    q, k, v, decay, beta, state = (t.double() for t in flow)
    outputs, starts = torch.zeros(H, chunks, C, V, dtype=torch.float64), []
    for c in range(chunks):
        starts.append(state)
        for t in range(C):
            o, state = oracle.token(state, q[:, c, t], k[:, c, t], v[:, c, t], decay[:, c, t], beta[:, c, t, 0], 1.0)
            outputs[:, c, t] = o
    return outputs, torch.stack(starts, dim=1), state


def written(flow):
    """What each token adds to the state along its key, from the exact chain."""
    q, k, v, decay, beta, state = (t.double() for t in flow)
    rows = torch.zeros(H, N, C, V, dtype=torch.float64)
    for c in range(N):
        for t in range(C):
            kept = state * decay[:, c, t].exp()[:, None, None]
            rows[:, c, t] = (v[:, c, t] - (kept * k[:, c, t][:, None]).sum(-1)) * beta[:, c, t]
            state = oracle.token(state, q[:, c, t], k[:, c, t], v[:, c, t], decay[:, c, t], beta[:, c, t, 0], 1.0)[1]
    return rows


def close(expected, got):
    torch.testing.assert_close(got.double(), expected.double(), rtol=1e-5, atol=2e-6)


@pytest.mark.spec("D51")
def test_solve_alone(flow):
    _q, k, v, decay, beta, _state = flow
    u, w = chunk.solve(k, v, chunk.running(decay), beta)
    starts = chain(flow)[1]
    close(written(flow), u.double() - w.double() @ starts.transpose(-1, -2))
    # with the undecayed Gram matrix in w, or u taken for what is written, it would show
    assert (written(flow) - u).abs().max() > 1e-2
    ungated = chunk.solve(k, v, torch.zeros_like(chunk.running(decay)), beta)[1]
    assert (ungated - w).abs().max() > 1e-2


@pytest.mark.spec("D51")
def test_carry_alone(flow):
    _q, k, _v, decay, _beta, state = flow
    _, starts, last = chain(flow)
    exact = written(flow)
    total, now = chunk.running(decay), state.clone()
    zero = torch.zeros(H, N, C, K)
    got, new = chunk.carry(k, exact.float(), zero, total, now)
    close(exact, new)
    close(starts, got)
    close(last, now)


@pytest.mark.spec("D51")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_read_out_alone(flow, dtype):
    q, k, _v, decay, _beta, _state = flow
    outputs, starts, _ = chain(flow)
    got = chunk.read_out(q, k, written(flow).float(), chunk.running(decay), starts.float()).to(dtype)
    torch.testing.assert_close(got.double(), outputs, rtol=1e-5 if dtype == torch.float32 else 2**-8, atol=2e-6)


def _call(form, tokens):
    flow = [torch.zeros(tokens, 2, 4), torch.zeros(tokens, 2, 4), torch.zeros(tokens, 4, 3)]
    gates = [torch.zeros(tokens, 4), torch.zeros(tokens, 4), torch.zeros(1, 4, 3, 4)]
    return ng.plan("gated_delta_rule", *flow, *gates, None, scale=0.5, form=form)


@pytest.mark.spec("D53", "D60")
def test_plan_names_form_and_kernel():
    assert _call("recurrent", 5).contract == "form recurrent"
    assert _call("auto", 5) == _call("auto", 500)  # never by lengths
    assert _call("auto", 5).contract == ("form recurrent" if _call("auto", 5).impl == "cpu" else "form chunk")
    rows = torch.zeros(3, 40), torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(4), torch.zeros(4)
    pool, slots = torch.zeros(3, 4, 4, 3), torch.zeros(3, dtype=torch.int32)
    planned = ng.plan("gated_delta_rule_packed_step", torch.zeros(3, 2 * 2 * 3 + 16), *rows[1:], pool, slots, scale=1.0)
    assert planned.kernel == "gated_delta_rule_packed_step"
    assert planned.impl == ("cpu" if importlib.util.find_spec("numba") else "reference")
