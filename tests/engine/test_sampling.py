"""The sampler: what it keeps, in which order, and how often it draws what."""

import pytest
import torch

from narrowgate.engine.sampling import Sampler, Sampling
from narrowgate.errors import UnsupportedError


def drawn(logits, count=400, **settings):
    sampler = Sampler(Sampling(seed=3, **settings))
    return torch.bincount(torch.tensor([sampler(logits) for _ in range(count)]), minlength=len(logits)) / count


def test_greedy_takes_the_lower_of_equals():
    assert Sampler(Sampling())(torch.tensor([1.0, 3.0, 3.0, 2.0])) == 1
    assert Sampler(Sampling())(torch.zeros(100_003)) == 0


def test_frequencies_follow_the_softmax():
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    for temperature in (0.5, 1.0, 2.0):
        assert (drawn(logits, 4000, temperature=temperature) - (logits / temperature).softmax(0)).abs().max() < 0.03


@pytest.mark.parametrize("k", [1, 2, 3])
def test_top_k_keeps_k_and_breaks_ties_downwards(k):
    seen = drawn(torch.tensor([0.0, 2.0, 1.0, 1.0, 1.0]), temperature=1.0, top_k=k)
    assert seen.nonzero().reshape(-1).tolist() == [1, 2, 3][:k]


def test_top_k_of_more_than_there_are():
    assert (drawn(torch.zeros(3), temperature=1.0, top_k=50) > 0).all()


def test_top_p_keeps_the_fewest_that_reach_it():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    for p, kept in ((0.3, [1]), (0.39, [1]), (0.41, [1, 3]), (0.69, [1, 3]), (0.75, [1, 2, 3]), (0.95, [0, 1, 2, 3])):
        assert drawn(logits, temperature=1.0, top_p=p).nonzero().reshape(-1).tolist() == kept, p


def test_top_p_counts_what_top_k_left():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert drawn(logits, temperature=1.0, top_k=2, top_p=0.5).nonzero().reshape(-1).tolist() == [0]  # 0.4 of 0.7 is over half
    assert drawn(logits, temperature=1.0, top_p=0.5).nonzero().reshape(-1).tolist() == [0, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_choose_nothing(bad, temperature):
    with pytest.raises(UnsupportedError, match="not finite"):
        Sampler(Sampling(temperature))(torch.tensor([1.0, bad, 0.0]))


def test_very_small_temperature_and_impossible_tokens():
    logits = torch.tensor([1.0, 1.5, float("-inf"), -40.0])
    assert drawn(logits, temperature=1e-3).tolist() == [0.0, 1.0, 0.0, 0.0]
    assert drawn(logits, 2000, temperature=5.0)[2] == 0
