"""A recorded decoding step: the bits of the step that was not recorded, whatever ran in between; and what is not replayed."""

import logging

import pytest
import torch
from small_models import KINDS, build, tokens

pytest.importorskip("numba")

import narrowgate as ng
from narrowgate.engine import recording
from narrowgate.nn.mlp import MLP

PIECES = ((1, 1, 1), (1, 1, 1), (3, 0, 1), (1, 1, 1), (1, 1, 1), (2, 2, 2), (1, 1, 1))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in made.items():
        build(kind, folder, seed=4)
    return made


def run(model, pieces=PIECES):
    """Logits of feeding three sequences piece by piece, and the cache."""
    ids, cache, found, at = tokens(100, seed=3), model.new_cache(3), [], 0
    for lengths in pieces:
        edges = torch.tensor([0, *lengths]).cumsum(0)
        found.append(model.step(ids[at : at + sum(lengths)], cache, edges))
        at += sum(lengths)
    return found, cache


def unrecorded(monkeypatch):
    monkeypatch.setattr(recording, "missing", lambda: ("switched off by the test",))


@pytest.mark.parametrize("scheme", [None, "int4_g32", "nvfp4", "q4_0", "mxfp6_e3m2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_replayed_step_has_the_bits_of_a_plain_one(kind, scheme, folders, monkeypatch):
    model = ng.load(folders[kind], scheme)
    recorded, cache = run(model)
    (made,) = cache.recordings.values()
    assert made.refused is None
    assert len(made.calls) > 20
    with monkeypatch.context() as m:
        unrecorded(m)
        plain, _ = run(model)
    assert all(torch.equal(a, b) for a, b in zip(recorded, plain, strict=True))  # none overwritten by a later step either


def test_some_sequences_of_a_batch(folders):
    """Those that are left when others have ended: other slots, another number, the same states."""
    model = ng.load(folders["qwen3_5_text"])
    prompts = [tokens(n, seed=n).tolist() for n in (3, 9, 5)]
    _, cache = run(model)
    model.advance(torch.tensor([5, 6]), cache, [1, 1], [2, 0], last_only=True)
    model.advance(torch.tensor([5, 6]), cache, [1, 1], [1, 2], last_only=True)
    assert {n for n, _ in cache.recordings} == {2, 3}
    assert cache.lengths == [11, 8, 10]
    alone = [model.complete([p], max_new_tokens=6)[0].token_ids for p in prompts]
    assert [c.token_ids for c in model.complete(prompts, max_new_tokens=6)] == alone


def test_a_step_that_reads_a_value_is_not_replayed(folders, monkeypatch, caplog):
    right, reads = MLP.forward, {"tolist": lambda x: x.sum().tolist(), "float": lambda x: float(x.sum())}
    for name, read in reads.items():
        model = ng.load(folders["qwen3_5_text"])
        with monkeypatch.context() as m:
            m.setattr(MLP, "forward", lambda self, x, read=read: right(self, x) * read(x))
            with caplog.at_level(logging.WARNING, "narrowgate"):
                recorded, cache = run(model)
            assert all("reads a value" in r.refused or "depends on values" in r.refused for r in cache.recordings.values()), (
                name
            )
            unrecorded(m)
            plain, _ = run(model)
        assert all(torch.equal(a, b) for a, b in zip(recorded, plain, strict=True))
    assert "decoding runs step by step" in caplog.text


def test_another_number_of_threads_is_another_recording(folders):
    model = ng.load(folders["qwen3_5_text"])
    _, cache = run(model)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        model.step(torch.tensor([1, 2, 3]), cache, [0, 1, 2, 3])
    finally:
        torch.set_num_threads(before)
    assert len(cache.recordings) == 2
    for threads in range(50, 60):
        cache.recordings[3, threads] = next(iter(cache.recordings.values()))
    model.advance(torch.tensor([5, 6]), cache, [1, 1], [2, 0], last_only=True)
    assert len(cache.recordings) == recording.KEPT


@pytest.mark.parametrize("scheme", [None, "int4_g32", "nvfp4"])
def test_projections_of_one_input_are_one_product(scheme, folders):
    model = ng.load(folders["qwen3_5_text"], scheme, overrides=("*.0.mlp.up_proj=int8_g32",) if scheme else ())
    first, second = model.decoder.layers[0], model.decoder.layers[1]
    assert second.mixer.project.qkvz.whole is not None
    assert (first.mlp.gate_up.whole is None) == (scheme is not None)  # two schemes do not meet
    whole, part = (m.weight().tensors()[0] for m in (second.mixer.project.qkvz.whole, second.mixer.project.qkvz.parts[1]))
    assert whole.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
