"""Logits equal to transformers in float32, whole, in pieces, stepwise and in batches (KNOWN_FAILURES G27, G34, G35, G58)."""

import pytest
import torch
from small_models import KINDS, build, reference, relative, tokens

import narrowgate as ng

LIMIT = 1e-4


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """(transformers' model, ours) of one random checkpoint, for every family."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = build(request.param, folder)
    return theirs, ng.load(folder)


@pytest.mark.spec("G58")
@pytest.mark.parametrize("length", [1, 37, 129])
def test_logits(pair, length):
    theirs, ours = pair
    ids = tokens(length)
    expected, got = reference(theirs, ids), ours.logits(ids)
    assert got.dtype == torch.float32
    assert relative(expected, got) < LIMIT
    assert torch.equal(expected.argmax(-1), got.argmax(-1))


def test_logits_of_a_rectangle_and_of_the_last_rows_only(pair):
    theirs, ours = pair
    ids = torch.stack([tokens(19, seed=1), tokens(19, seed=2)])
    expected = reference(theirs, ids)
    assert relative(expected, ours.logits(ids)) < LIMIT
    assert relative(expected[:, -1], ours.logits(ids, last_only=True)) < LIMIT
    assert relative(expected[0, -1], ours.logits(ids[0].tolist(), last_only=True)) < LIMIT


@pytest.mark.spec("G27")
def test_prefill_and_one_step_equal_the_full_forward(pair):
    theirs, ours = pair
    ids = tokens(70, seed=3)
    expected = reference(theirs, ids)
    for length in range(60, 71):
        cache = ours.new_cache(1)
        ours.step(ids[: length - 1], cache)
        assert relative(expected[length - 1], ours.step(ids[length - 1 : length], cache)[0]) < LIMIT, length
        assert cache.lengths == [length]


@pytest.mark.spec("G35")
def test_pieces_shorter_than_the_convolution(pair):
    theirs, ours = pair
    ids = tokens(13, seed=4)
    cache, got, at = ours.new_cache(1), [], 0
    for piece in (1, 2, 1, 3, 1, 5):
        got.append(ours.step(ids[at : at + piece], cache))
        at += piece
    assert relative(reference(theirs, ids), torch.cat(got)) < LIMIT
    whole = ours.new_cache(1)
    ours.step(ids, whole)
    assert (whole.states[0].conv - cache.states[0].conv).abs().max() < 1e-5
    assert whole.states[0].conv.abs().max() > 0.1


@pytest.mark.spec("G34")
def test_batch_of_unequal_lengths_equals_single_runs(pair):
    theirs, ours = pair
    lengths = [3, 17, 64]
    prompts = [tokens(n, seed=n) for n in lengths]
    edges = torch.tensor([0, 3, 20, 84], dtype=torch.int32)
    cache = ours.new_cache(3)
    together = ours.step(torch.cat(prompts), cache, edges).split(lengths)
    step = ours.step(torch.tensor([[1], [2], [3]]), cache)
    for i, prompt in enumerate(prompts):
        alone = ours.new_cache(1)
        assert (ours.step(prompt, alone) - together[i]).abs().max() < 1e-5
        assert (ours.step(torch.tensor([i + 1]), alone) - step[i]).abs().max() < 1e-5
        assert relative(reference(theirs, prompt), together[i]) < LIMIT


@pytest.mark.parametrize("scheme", [None, "mxfp4"])
def test_with_batch_invariant_a_sequence_is_bit_identical_in_any_company(pair, scheme):
    ours = ng.load(pair[1].path, scheme, batch_invariant=True)
    lengths = [3, 17, 64]
    prompts = [tokens(n, seed=n) for n in lengths]
    cache = ours.new_cache(3)
    together = ours.step(torch.cat(prompts), cache, [0, 3, 20, 84]).split(lengths)
    step = ours.step(torch.tensor([[1], [2], [3]]), cache)
    for i, prompt in enumerate(prompts):
        alone = ours.new_cache(1)
        assert torch.equal(ours.step(prompt, alone), together[i])
        assert torch.equal(ours.step(torch.tensor([i + 1]), alone), step[i])


def test_a_sequence_may_bring_no_token(pair):
    _, ours = pair
    ids = tokens(9, seed=5)
    cache = ours.new_cache(3)
    ours.step(ids, cache, [0, 4, 4, 9])
    got = ours.step(torch.tensor([1, 2, 3]), cache, [0, 0, 2, 3])
    assert cache.lengths == [4, 2, 6]
    assert relative(ours.logits([1, 2]), got[:2]) < 1e-5
    assert relative(ours.logits([*ids[4:].tolist(), 3])[-1], got[2]) < 1e-5
