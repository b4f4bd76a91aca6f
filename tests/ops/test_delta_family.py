"""What cases cannot say: memory that overlaps, bits of the reference alone, and random walks through the family."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import narrowgate as ng
from narrowgate import ops
from narrowgate.errors import InputError
from narrowgate.ops.gated_delta_rule import cases_inputs as inputs


def generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.spec("C4")
def test_silu_of_the_reference_is_the_double_rule_to_the_bit():
    x = torch.randn(4096, generator=generator(0)) * 3
    exact = (x.double() / (1 + torch.exp(-x.double()))).float()
    got = ops.silu(x, impl="reference")
    assert torch.equal(got, exact)
    assert not torch.equal(x / (1 + torch.exp(-x)), exact)  # float32 math would have shown


@pytest.mark.spec("D10")
def test_states_that_overlap_are_refused_and_left_alone():
    call = inputs.prefill(generator(1), [0, 2, 5])
    one = call["state"][:1].clone()
    with pytest.raises(InputError, match="expected state without overlap"):
        ops.gated_delta_rule(**{**call, "state": one.expand(2, -1, -1, -1)})
    assert torch.equal(one, call["state"][:1])
    x, weight, taps = torch.ones(2, 3), torch.ones(3, 4), torch.ones(1, 3, 3)
    with pytest.raises(InputError, match="expected state without overlap"):
        ops.causal_conv1d_step(x, weight, None, taps.expand(2, -1, -1))
    with pytest.raises(InputError, match="expected cache without overlap"):
        ops.scatter_state(torch.ones(1, 3).expand(4, 3), torch.ones(1, 3), torch.tensor([1]))
    with pytest.raises(InputError, match="expected out without overlap"):
        ops.l2_norm(torch.ones(4, 3), out=torch.ones(3).expand(4, 3))


def test_gradients_are_refused():
    with pytest.raises(ng.UnsupportedError, match="inference only"):
        ops.rms_norm(torch.ones(2, 3, requires_grad=True), eps=1e-6)


CHUNKS = st.lists(st.sampled_from([0, 1, 2, 3, 5, 17, 63, 64, 65, 70]), min_size=1, max_size=4)


@settings(max_examples=25)
@given(lengths=CHUNKS, form=st.sampled_from(["chunk", "recurrent"]), seed=st.integers(0, 99))
@pytest.mark.spec("D6")
def test_sequences_together_equal_sequences_alone(lengths, form, seed):
    ends = [0]
    for n in lengths:
        ends.append(ends[-1] + n)
    call = inputs.prefill(generator(seed), ends, (1, 2), (5, 3), form=form)
    singles = [call["state"][i : i + 1].clone() for i in range(len(lengths))]
    alone = [
        ops.gated_delta_rule(*(call[k][a:b] for k in ("q", "k", "v", "g", "beta")), singles[i], None, scale=0.5, form=form)
        for i, (a, b) in enumerate(itertools.pairwise(ends))
    ]
    together = ops.gated_delta_rule(**{**call, "scale": 0.5})
    assert torch.equal(torch.cat(alone), together)
    assert torch.equal(torch.cat(singles), call["state"])


@settings(max_examples=25)
@given(
    accepted=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    drafted=st.lists(st.integers(1, 4), min_size=6, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
@pytest.mark.spec("D68", "D71", "D73", "G48")
def test_speculation_with_any_acceptance_equals_never_having_speculated(accepted, drafted, dtype, seed):
    """A convolution and the rule, drafting and rejecting at random, against one token at a time."""
    g, channels, columns = generator(seed), 2 * 4 + 2 * 4 + 2 * 3, 4
    weight = torch.rand(channels, 4, generator=g) - 0.5
    taps = torch.rand(1, channels, 3, generator=g) - 0.5
    state = inputs.states(g, 1, (2, 2), (4, 3), dtype)
    wide, pool = torch.zeros(1, channels, 3 + columns - 1), torch.zeros(columns, 2, 3, 4, dtype=dtype)
    wide[..., :3], pool[:1] = taps, state
    slots, offset = torch.arange(columns)[None], 1

    def gates(x):
        q, k, v = ops.split_qkv(x, num_k_heads=2, head_k_dim=4, head_v_dim=3)
        return ops.l2_norm(q), ops.l2_norm(k), v, -x[:, :2].abs().contiguous(), x[:, 2:4].sigmoid().contiguous()

    for keep, n in zip(accepted, drafted, strict=False):
        x, cu = torch.rand(n, channels, generator=g) * 4 - 2, torch.tensor([0, n])
        count = torch.tensor([offset])
        y = ops.causal_conv1d_speculative_step(x, weight, None, wide, cu, torch.tensor([0]), count)
        o = ops.gated_delta_rule_speculative_step(*gates(y), pool, cu, slots, count, scale=0.5)
        keep = min(keep, n)
        for t in range(keep):
            y1 = ops.causal_conv1d_step(x[t : t + 1], weight, None, taps)
            o1 = ops.gated_delta_rule_step(*gates(y1), state, scale=0.5)
            assert torch.equal(y1[0], y[t])
            assert torch.equal(o1[0], o[t])
        assert torch.equal(pool[keep - 1], state[0])
        assert torch.equal(wide[..., keep - 1 : keep + 2], taps)
        offset = keep
