"""The bench of what moves memory: every operator is timed once it checks, and not if it does not."""

import json

import pytest

pytest.importorskip("numba")

import narrowgate as ng
from narrowgate.bench import memory, timing
from narrowgate.cli.app import run

ARGUMENTS = ["bench", "memory", "--shape", "24x64", "--scheme", "mxfp6_e3m2", "--seconds", "0.01", "--json"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(timing, "COLD", 1 << 14)
    monkeypatch.setattr(memory, "roofs", lambda device: {"copy": 1e9})
    monkeypatch.setattr(timing, "roofs", memory.roofs)


def test_it_times_every_operator(capsys):
    assert run(ARGUMENTS) == 0
    found = json.loads(capsys.readouterr().out)["measured"]
    assert {r["case"].split()[0] for r in found} == {"quantize", "dequantize", "embedding", "quantize_grouped"}
    assert all(r["microseconds"] > 0 for r in found)
    one = next(r for r in found if r["case"] == "dequantize mxfp6_e3m2 bfloat16")
    assert one["floor"] == pytest.approx((24 * 64 * 6 / 8 + 24 * 2 + 24 * 64 * 2) / 1e3)


def test_what_does_not_check_is_not_timed(monkeypatch, capsys):
    right = ng.ops.embedding
    monkeypatch.setattr(memory.ops, "embedding", lambda *a, **k: right(*a, **k) * 1.5)
    assert run(ARGUMENTS) == 1
    document = json.loads(capsys.readouterr().out)
    assert not any(r["case"].startswith("embedding") for r in document["measured"])
    assert document["notes"] == [
        f"embedding mxfp6_e3m2 {dtype}: not timed, values differ from the reference" for dtype in ("bfloat16", "float32")
    ]
    assert run(["bench", "memory", "--shape", "24x65"]) == 2
