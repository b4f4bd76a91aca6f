"""Texts, windows and the reference on disk."""

import hashlib

import pytest
import torch

from narrowgate.engine import evaluate
from narrowgate.engine.evaluate import Reference, _cut, _groups, _share, _windows, file_passage
from narrowgate.errors import FileError


def test_every_token_is_predicted_once():
    """Held to the demo model's own protocol: window j reads [c j, c (j+1)) and predicts one further."""
    for length in range(2, 40):
        for context in (1, 3, 7, 64):
            ids = list(range(100, 100 + length))
            windows = _windows(ids, 1, context)
            assert [t for w in windows for t in w.targets] == ids[1:]
            assert [t for w in windows for t in w.inputs] == ids[:-1]
            assert all(len(w.inputs) == len(w.targets) <= context for w in windows)
            assert all(w.targets[0] == w.inputs[0] + 1 for w in windows)


def test_groups_keep_order_and_limit():
    windows = [w for n in (5, 3, 4, 11, 1) for w in _windows(list(range(n + 1)), 1, 100)]
    groups = list(_groups(windows, 8))
    assert [len(w.inputs) for g in groups for w in g] == [5, 3, 4, 11, 1]
    assert [len(g) for g in groups] == [2, 1, 1, 1]


@pytest.mark.parametrize("total", [1, 10, 59, 60, 61, 99, 100, 101, 1000])
def test_shares_are_even_and_within_the_total(total):
    sizes = [50, 10, 40]
    given = [min(size, _share(sizes, total)) for size in sizes]
    assert sum(given) <= total
    assert sum(given) > min(total, 100) - len(sizes)
    if total >= 100:
        assert given == sizes


def test_a_cut_keeps_characters_and_lines_whole():
    assert _cut("ab\ncdé\nf", 6) == "ab\n"
    assert _cut("ab\ncdé\nf", 8) == "ab\ncdé\n"
    assert _cut("éé", 3) == "é"
    assert _cut("abc", 3) == "abc"


def test_a_file_is_one_document(tmp_path):
    (tmp_path / "t").write_bytes("à\nb\n".encode())
    passage = file_passage(tmp_path / "t")
    assert (passage.documents, passage.nbytes, passage.total_bytes) == (("à\nb\n",), 5, 5)
    assert passage.sha256 == hashlib.sha256("à\nb\n".encode()).hexdigest()
    (tmp_path / "t").write_bytes(b"\xe9")
    with pytest.raises(FileError, match="expected text in UTF-8"):
        file_passage(tmp_path / "t")


def test_the_reference_reads_back_in_other_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate.tempfile, "tempdir", str(tmp_path))
    rows = torch.randn(11, 7)
    with Reference(11, 7) as reference:
        for piece in rows.split(4):
            reference.write(piece)
        reference.rewind()
        again = torch.cat([reference.read(n) for n in (5, 1, 5)])
    assert torch.equal(again, rows)
    assert reference.nbytes == 11 * 7 * 4
    assert not list(tmp_path.iterdir())


def test_a_reference_that_does_not_fit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(FileError, match="TMPDIR"):
        Reference(1 << 40, 1 << 20)


class Plain:
    """A tokenizer that adds nothing by itself."""

    special: dict = {}  # noqa: RUF012

    def encode(self, text, special=True):
        return [7] if text == "<|endoftext|>" else list(text.encode())


class Adds(Plain):
    def encode(self, text, special=True):
        return [9] * special + list(text.encode()) + [8] * special


def test_start_tokens():
    assert evaluate.start_tokens(Plain()) == [7]
    assert evaluate.start_tokens(Adds()) == [9]
