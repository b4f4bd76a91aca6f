"""Text that grows by tokens: whole characters, stops held back, nothing lost (property tests over random bytes)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import byte_tokenizer

from narrowgate.engine.text import TextStream
from narrowgate.io.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(folder)
    return Tokenizer(folder)


def pushed(tokenizer, ids, stops=()):
    stream = TextStream(tokenizer, stops)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces, stream
    return [*pieces, stream.finish()], stream


@given(text=st.text(max_size=20))
def test_pieces_are_whole_characters(tokenizer, text):
    pieces, _ = pushed(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, 255), max_size=25))
def test_any_ids_give_their_decoding(tokenizer, ids):
    pieces, _ = pushed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_characters_of_several_tokens_come_when_they_are_whole(tokenizer):
    text = "a猫🐈é"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text)
    pieces, _ = pushed(tokenizer, ids)
    assert [p for p in pieces if p] == ["a", "猫", "🐈", "é"]


@given(text=st.text(alphabet="ab", max_size=30), stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop(tokenizer, text, stops):
    pieces, stream = pushed(tokenizer, tokenizer.encode(text), stops)
    found = [(text.index(s) + len(s), text.index(s)) for s in stops if s in text]
    assert "".join(pieces) == (text[: min(found)[1]] if found else text)
    assert (stream.stopped in stops) if found else stream.stopped is None


def test_what_may_still_become_a_stop_is_held_back(tokenizer):
    ids = [tokenizer.encode(c)[0] for c in "xabab!"]
    stream = TextStream(tokenizer, ["abac"])
    pieces = [stream.push(t) for t in ids]
    assert pieces[0] == "x"
    assert pieces[1] == pieces[2] == pieces[3] == ""
    assert "".join(pieces) == "xabab!"
