"""Generation: greedy equal to transformers, batches equal to single runs, seeds, stops, streams, log probabilities."""

import json
from itertools import pairwise

import pytest
import torch
from small_models import KINDS, build, byte_tokenizer, tokens

import narrowgate as ng
from narrowgate.errors import FileError, InputError

PROMPTS = ["the cat", "d", "def f(x): return x and the dog ran on the mat"]


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """(transformers' model, ours): random, with a tokenizer, its end-of-text id out of the way."""
    folder = tmp_path_factory.mktemp("talker")
    theirs = build("qwen3_5_text", folder, seed=3, vocab_size=300, eos_token_id=0)
    byte_tokenizer(folder)
    return theirs, ng.load(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_transformers(kind, tmp_path):
    theirs = build(kind, tmp_path, seed=5)
    ids = tokens(17, seed=7)
    expected = theirs.generate(ids[None], max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=7)[0, 17:]
    (got,) = ng.load(tmp_path).complete([ids.tolist()], max_new_tokens=24)
    assert list(got.token_ids) == expected.tolist()
    assert got.text == ""  # no tokenizer in the folder


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.9, "seed": 4}, {"temperature": 1.2, "top_k": 9, "top_p": 0.8, "seed": 1}]
)
def test_a_batch_equals_single_runs(talker, settings):
    _, ours = talker
    alone = [ours.generate(p, max_new_tokens=13, return_logprobs=True, **settings) for p in PROMPTS]
    together = ours.generate(PROMPTS, max_new_tokens=13, return_logprobs=True, **settings)
    for a, b in zip(alone, together, strict=True):
        assert a.token_ids == b.token_ids
        assert a.text == b.text
        assert torch.allclose(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-5)


def test_lengths_of_the_prompts_do_not_matter_to_each_other(talker):
    """Prompts of 3, 17 and 64 tokens (KNOWN_FAILURES G34); the one that ends early leaves the others alone."""
    _, ours = talker
    prompts = [tokens(n, seed=n, vocab=300).tolist() for n in (3, 17, 64)]
    alone = [ours.complete([p], max_new_tokens=9)[0] for p in prompts]
    assert ours.complete(prompts, max_new_tokens=9) == alone
    early = ours.complete([prompts[0]], max_new_tokens=9)[0].token_ids[2]
    saved, ours.eos_ids = ours.eos_ids, frozenset([early])
    try:
        again = ours.complete(prompts, max_new_tokens=9)
        assert again == [ours.complete([p], max_new_tokens=9)[0] for p in prompts]
        assert (again[0].finished, len(again[0].token_ids)) == ("eos", 3)
    finally:
        ours.eos_ids = saved


def test_seeds(talker):
    _, ours = talker
    draw = [ours.generate("the", temperature=1.5, seed=s, max_new_tokens=12) for s in (1, 1, 2)]
    assert draw[0] == draw[1] != draw[2]
    assert len({ours.generate("the", temperature=1.5, max_new_tokens=12) for _ in range(3)}) > 1


def test_text_and_lists(talker):
    _, ours = talker
    one = ours.generate("the cat", max_new_tokens=5)
    assert isinstance(one, str)
    assert ours.generate(["the cat"], max_new_tokens=5) == [one]
    assert ours.generate([], max_new_tokens=5) == []
    assert ours.generate("the cat", max_new_tokens=0) == ""


def stop_across_tokens(ours):
    """(settings, completion, a string of two characters that two neighbouring tokens share)."""
    for seed in range(50):
        settings = {"max_new_tokens": 30, "temperature": 1.0, "seed": seed}
        whole = ours.generate("the cat", return_logprobs=True, **settings)
        pieces = [ours.tokenizer.decode([t]) for t in whole.token_ids]
        for before, after in pairwise(pieces[3:]):
            stop = before[-1:] + after[:1]
            if len(stop) == 2 and "\ufffd" not in stop and not any(stop in piece for piece in pieces):
                return settings, whole, stop
    raise AssertionError("no two neighbouring tokens that end and begin with whole characters")


def test_stop_strings_are_removed_and_may_span_tokens(talker):
    _, ours = talker
    settings, whole, stop = stop_across_tokens(ours)
    expected = whole.text[: whole.text.index(stop)]
    got = ours.generate("the cat", stop=stop, return_logprobs=True, **settings)
    assert got.text == expected
    assert got.finished == "stop"
    assert len(got.token_ids) == len(got.logprobs) <= len(whole.token_ids)
    assert got.token_ids == whole.token_ids[: len(got.token_ids)]
    assert "".join(ours.stream("the cat", stop=[stop, "never comes"], **settings)) == expected
    assert ours.generate("the cat", stop="never comes", **settings) == whole.text


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.3, "seed": 11}])
def test_a_stream_joined_is_the_text(talker, settings):
    """A random model over bytes emits many characters in halves: no piece may hold a broken one that the text has not."""
    _, ours = talker
    for prompt in PROMPTS:
        text = ours.generate(prompt, max_new_tokens=40, **settings)
        pieces = list(ours.stream(prompt, max_new_tokens=40, **settings))
        assert "".join(pieces) == text
        assert all(pieces)


def test_log_probabilities_are_the_model_s_own(talker):
    theirs, ours = talker
    got = ours.generate("the cat", max_new_tokens=6, return_logprobs=True, temperature=0.5, seed=1)
    prompt = ours.tokenizer.encode("the cat")
    with torch.no_grad():
        logits = theirs(torch.tensor([[*prompt, *got.token_ids]])).logits[0]
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(got.token_ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(got.logprobs), expected, atol=1e-4)
    assert got.finished == "length"
    assert ours.complete([prompt], max_new_tokens=1)[0].logprobs is None


@pytest.mark.parametrize("eos", [5, [3, 5]])
def test_end_of_text_ids_come_from_generation_config(eos, tmp_path):
    build("qwen3_5_text", tmp_path, vocab_size=300)
    byte_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    ours = ng.load(tmp_path)
    assert ours.eos_ids == frozenset([5] if eos == 5 else [3, 5])
    first = ours.generate("the", max_new_tokens=1, return_logprobs=True).token_ids[0]
    ours.eos_ids = frozenset([first])
    ended = ours.generate("the", return_logprobs=True)
    assert (ended.text, ended.token_ids, ended.finished) == ("", (first,), "eos")
    (tmp_path / "generation_config.json").unlink()
    assert ng.load(tmp_path).eos_ids == frozenset([7])  # config.json's


def test_chat(talker):
    _, ours = talker
    messages = [{"role": "user", "content": 'a "b" <c>'}]
    prompt = '<|start|>user: "a \\"b\\" <c>"\nassistant:'
    ids = ours.tokenizer.encode(prompt, special=False)
    assert ids[0] == 1
    (expected,) = ours.complete([ids], max_new_tokens=8)
    assert ours.chat(messages, max_new_tokens=8) == expected.text
    assert "".join(ours.stream(messages, max_new_tokens=8)) == expected.text
    assert ours.chat(messages, max_new_tokens=8, template_arguments={"add_generation_prompt": False}) != expected.text


@pytest.mark.parametrize("messages", ["hello", [], [{"content": "no role"}], {"role": "user"}, [5]])
def test_wrong_messages(talker, messages):
    with pytest.raises(InputError, match="expected a list of messages"):
        talker[1].chat(messages)


def test_a_template_cannot_reach_out_of_its_sandbox(talker, monkeypatch):
    _, ours = talker
    for template, text in [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('only one turn') }}", "only one turn"),
        ("{% for %}", "Expected an expression"),
        ("{{ messages.append(1) }}", "unsafe"),
    ]:
        monkeypatch.setattr(ours.tokenizer, "chat_template", template)
        with pytest.raises(InputError, match="chat template refused") as caught:
            ours.chat([{"role": "user", "content": "x"}])
        assert text in str(caught.value)
    monkeypatch.setattr(ours.tokenizer, "chat_template", None)
    with pytest.raises(FileError, match="chat template"):
        ours.chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("prompt", "settings", "text"),
    [
        ("", {}, "at least one token"),
        (["the", ""], {}, "at least one token"),
        (5, {}, "text"),
        ([5], {}, "expected text"),
        ("the", {"max_new_tokens": -1}, "max_new_tokens"),
        ("the", {"max_new_tokens": 1.5}, "max_new_tokens"),
        ("the", {"temperature": -1}, "temperature"),
        ("the", {"temperature": float("nan")}, "temperature"),
        ("the", {"temperature": float("inf")}, "temperature"),
        ("the", {"top_k": 0}, "top_k"),
        ("the", {"top_p": 0.0}, "top_p"),
        ("the", {"top_p": 1.5}, "top_p"),
        ("the", {"seed": "x"}, "seed"),
        ("the", {"stop": ""}, "stop strings"),
        ("the", {"stop": ["a", 5]}, "stop strings"),
    ],
)
def test_wrong_settings(talker, prompt, settings, text):
    with pytest.raises(InputError, match=text):
        talker[1].generate(prompt, **settings)


def test_wrong_ids(talker):
    _, ours = talker
    for ids in ([300], [-1], [0, 1 << 40]):
        with pytest.raises(InputError, match=r"token ids in \[0, 300\)"):
            ours.logits(ids)
    for ids in ([0.5], "abc", [[1, 2], [3]], None):
        with pytest.raises(InputError, match="token_ids"):
            ours.logits(ids)
    with pytest.raises(InputError, match=r"\[T\] or \[B, T\]"):
        ours.logits(torch.zeros(1, 2, 3, dtype=torch.int64))
    with pytest.raises(InputError, match="at least one token"):
        ours.complete([[]])
    with pytest.raises(InputError, match="expected every sequence to bring a token"):
        ours.logits([], last_only=True)
    assert ours.logits([]).shape == (0, 300)


def test_wrong_steps(talker):
    _, ours = talker
    cache = ours.new_cache(2)
    for ids, edges in [
        (torch.arange(2), None),
        (torch.zeros(3, 1, dtype=torch.int64), None),
        (torch.arange(4), [0, 4]),
        (torch.arange(4), [0, 3, 3]),
        (torch.arange(4), [1, 2, 4]),
        (torch.arange(4), [0, 5, 4]),
        (torch.zeros(2, 2, dtype=torch.int64), [0, 2, 4]),
    ]:
        with pytest.raises(InputError, match="step: expected"):
            ours.step(ids, cache, edges)
    assert cache.lengths == [0, 0]
    with pytest.raises(InputError, match="batch of at least 1"):
        ours.new_cache(0)
