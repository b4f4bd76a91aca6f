"""The stopwatch: it sees a difference that is there, touches every copy, and its report says where it was measured."""

import json
import time

import pytest

from narrowgate.bench.timing import Measured, copies, interleaved
from narrowgate.cli.bench_report import plot, report


def test_interleaved_sees_the_slower_one_and_uses_every_copy():
    used = set()
    slow = [lambda i=i: (used.add(i), time.sleep(0.002)) for i in range(3)]
    found = interleaved({"slow": slow, "fast": [lambda: None]}, seconds=0.2, blocks=3)
    assert used == {0, 1, 2}
    assert found["slow"] > 1900 > found["fast"]


def test_copies_fill_more_than_a_cache():
    assert copies(1 << 20) * (1 << 20) > 600 << 20
    assert copies(1 << 40) == 2


FOUND = [
    Measured("linear M=1", "narrowgate", 100.0, 80.0),
    Measured("linear M=1", "a peer", 200.0, 80.0, details={"version": "1"}),
]


def test_report_in_json(capsys):
    report(FOUND, device="cpu", command="narrowgate bench packed", roofs={"read": 1e10}, notes=["x"], as_json=True)
    document = json.loads(capsys.readouterr().out)
    ours, peer = document["measured"]
    assert ours["share"] == pytest.approx(0.8)
    assert ours["ratio"] is None
    assert peer["ratio"] == pytest.approx(0.5)
    assert document["machine"]["torch"]


def test_report_as_a_table(capsys):
    report(FOUND, device="cpu", command="narrowgate bench packed", roofs={"read": 1e10}, notes=["no peer"])
    text = capsys.readouterr().out
    assert "80 %" in text
    assert "0.50" in text
    assert "note: no peer" in text
    assert "machine: " in text


def test_plot(tmp_path):
    plot(FOUND, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 1000
