"""The bench of packed products: it times what checks, says why it times nothing else, and says when the peer is absent."""

import json

import pytest

pytest.importorskip("numba")

import narrowgate as ng
from narrowgate.bench import packed, timing
from narrowgate.cli.app import run

ARGUMENTS = ["bench", "packed", "--shapes", "48x64", "--rows", "1,3", "--seconds", "0.01", "--json"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(timing, "COLD", 1 << 16)
    monkeypatch.setattr(packed, "roofs", lambda device: {"read": 1e9})
    monkeypatch.setattr(timing, "roofs", packed.roofs)


def test_it_measures_each_product_and_says_that_the_peer_is_absent(capsys, tmp_path):
    assert run([*ARGUMENTS, "--scheme", "int4_g32", "--ggml", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["notes"][0].startswith("peer: ggml: no libggml-base.so in")
    cases = [f"int4_g32 {a} 48x64 M={m}" for a in ("exact", "int8_g32") for m in (1, 3)]
    assert [(r["case"], r["who"]) for r in found["measured"]] == [(case, "narrowgate") for case in cases]
    assert all(r["microseconds"] > 0 for r in found["measured"])


def test_a_wrong_product_is_not_timed(monkeypatch, capsys, tmp_path):
    right = ng.ops.linear
    monkeypatch.setattr(packed.ops, "linear", lambda x, w, **k: right(x, w, **k) * (1.001 if k.get("impl") == "cpu" else 1))
    assert run([*ARGUMENTS, "--scheme", "int4_g32", "--ggml", str(tmp_path)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["measured"]
    assert [note.partition(": not timed, ")[2] for note in found["notes"][2:]] == [
        "product outside the float32 bound", "product outside the float32 bound",
        "integer product differs from the reference", "integer product differs from the reference",
    ]  # fmt: skip


def test_wrong_arguments_are_refused(capsys):
    assert run(["bench", "packed", "--scheme", "mxfp3"]) == 2
    assert run(["bench", "packed", "--shapes", "64"]) == 2
    assert "expected" in capsys.readouterr().err
