"""The chunk form on the GPU: under the interpreter against the recurrence, compiled by reading the PTX, and on a GPU for bits."""

import itertools

import pytest
import torch
from gpu_scripts import run_script

import narrowgate as ng

pytest.importorskip("triton")

CASES = """
    from narrowgate.conformance.run import all_cases, run
    from narrowgate.ops import gated_delta_rule

    names = ["hand, 3 tokens, chunk", "2 key heads, 6 value heads, chunk", "a plunge to -inf, chunk", "65 tokens, chunk",
             "ends [0, 0, 64], chunk", "fresh [0, 1, 1], int8, chunk", "slots of a pool, int64, chunk", "no tokens, fresh True, chunk",
             "idle slots and dead rows, chunk", "rows past the end, chunk", "strides, packed, chunk"]
    cases = [case for case in all_cases()["gated_delta_rule"] if case.name in names]
    assert len(cases) == len(names)
    for case in cases:
        result = run(case, gated_delta_rule, impl="gpu")
        assert result.status == "held", (case.name, result.detail)
"""
RUNS = """
    import torch
    from narrowgate.ops.gated_delta_rule import gpu_chunk, reference

    joined = gpu_chunk.choose({torch.float32}, 2, 12, 9)._replace(run=64, join="ieee")
    cut = joined._replace(join="")
    draws = [(joined, [0, 150], None, 0.02), (joined, [0, 64, 64, 200], [1, 0, 1], 0.01), (joined, [0, 130, 131], [0, 1], 0.3),
             (cut, [0, 250], None, 3.0), (cut, [0, 64, 64, 200, 331], [1, 0, 1, 1], 1.5), (cut, [0, 150], None, 0.02)]
    for config, ends, initial, decay in draws:
        g = torch.Generator().manual_seed(1)
        tokens, n = ends[-1] + 3, len(ends) - 1
        q, k = (torch.nn.functional.normalize(torch.randn(tokens, 1, 12, generator=g), dim=-1) for _ in range(2))
        v, beta = torch.randn(tokens, 2, 9, generator=g), torch.rand(tokens, 2, generator=g)
        decays = -decay * torch.rand(tokens, 2, generator=g) * torch.tensor([1.0, 0.3])
        args = q, k, v, decays, beta
        states = [torch.randn(n, 2, 9, 12, generator=g)]
        states.append(states[0].clone())
        outs = [torch.full(v.shape, torch.nan) for _ in states]
        kwargs = {"scale": 0.3, "has_initial_state": initial and torch.tensor(initial).bool()}
        gpu_chunk.gated_delta_rule(*args, states[0], torch.tensor(ends), **kwargs, out=outs[0], config=config)
        reference.gated_delta_rule(*args, states[1], torch.tensor(ends), **kwargs, form="recurrent", out=outs[1])
        torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=2e-6)
        torch.testing.assert_close(states[0], states[1], rtol=0, atol=2e-6)
"""
COMPILED = """
    import torch
    from narrowgate.ops.gated_delta_rule import gpu_chunk
    from narrowgate.tile.gpu_offline import compiling

    def kernels(dtype, heads, K, V, tokens=128):
        q, v, g = torch.zeros(tokens, 1, K, dtype=dtype), torch.zeros(tokens, heads, V, dtype=dtype), torch.zeros(tokens, heads)
        with compiling() as found:
            state = torch.zeros(1, heads, V, K)
            gpu_chunk.gated_delta_rule(q, q, v, g, g, state, None, scale=0.1, out=torch.empty_like(v))
        return found

    for kernel in (*kernels(torch.bfloat16, 32, 128, 128), *kernels(torch.float32, 1, 16, 16)):
        assert kernel.metadata.shared <= 227 * 1024
        assert "tf32" not in kernel.asm["ptx"]
    assert "wgmma" in kernels(torch.bfloat16, 32, 128, 128)[1].asm["ptx"]
    names = [kernel.metadata.name for kernel in kernels(torch.bfloat16, 2, 16, 16, tokens=2 * gpu_chunk.JOINED_RUN)]
    assert names == ["_solve_kernel", "_carry_kernel", "_join_kernel", "_carry_kernel"], names
"""


@pytest.mark.parametrize("script", [CASES, RUNS], ids=["cases", "runs"])
def test_interpreted(script, tmp_path):
    run_script(tmp_path, script, interpret=True)


def test_compiled_for_an_absent_gpu(tmp_path):
    run_script(tmp_path, COMPILED, interpret=False)


def draw(ends, heads, dtype, decay):
    g = torch.Generator().manual_seed(5)
    tokens, (hk, hv) = ends[-1], heads
    q, k = (torch.nn.functional.normalize(torch.randn(tokens, hk, 128, generator=g), dim=-1).to(dtype) for _ in range(2))
    v, beta = torch.randn(tokens, hv, 128, generator=g).to(dtype), torch.rand(tokens, hv, generator=g)
    flow = q, k, v, -decay * torch.rand(tokens, hv, generator=g), beta
    state = 0.3 * torch.randn(len(ends) - 1, hv, 128, 128, generator=g)
    return [t.cuda() for t in flow], state.cuda(), torch.tensor(ends).cuda()


def call(flow, state, ends, form="chunk", impl="gpu", out=None):
    state = state.clone()
    return ng.ops.gated_delta_rule(*flow, state, ends, scale=128**-0.5, form=form, impl=impl, out=out), state


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(2, 4), (16, 32)], ids=["in runs", "whole"])
def test_bits_repeat_and_do_not_depend_on_the_batch(heads):
    ends = [0, 5000, 5001, 5001, 9192]
    flow, state, offsets = draw(ends, heads, torch.bfloat16, 0.05)
    o, after = call(flow, state, offsets)
    for _ in range(50):
        again, after_again = call(flow, state, offsets)
        assert torch.equal(o, again)
        assert torch.equal(after, after_again)
    for i, (a, b) in enumerate(itertools.pairwise(ends)):
        alone, after_alone = call([t[a:b] for t in flow], state[i : i + 1], None)
        assert torch.equal(alone, o[a:b])
        assert torch.equal(after_alone[0], after[i])
        head, _ = call([t[a : (a + b) // 2] for t in flow], state[i : i + 1], None)  # nor on what comes later
        assert torch.equal(head, o[a : (a + b) // 2])


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(2, 4), (16, 32)], ids=["in runs", "whole"])
@pytest.mark.parametrize("decay", [0.02, 1.0])
def test_accuracy(heads, decay):
    """Against the recurrence in float32: as near as products of bfloat16 operands come."""
    flow, state, offsets = draw([0, 4500], heads, torch.bfloat16, decay)
    want, want_after = call(flow, state, offsets, "recurrent", "reference", out=torch.empty_like(flow[2], dtype=torch.float32))
    o, after = call(flow, state, offsets, out=torch.empty_like(want))
    rounded, _ = call(flow, state, offsets)
    for got, expected, limit in ((o, want, 4e-3), (after, want_after, 4e-3), (rounded.float(), want, 4.5e-3)):
        assert (got - expected).square().mean().sqrt() <= limit * expected.square().mean().sqrt()
