"""The bench of the gated delta family, which needs a GPU: here its cases run once on the CPU's kernels, and are not timed."""

import pytest
import torch

pytest.importorskip("numba")

from narrowgate.bench import gdn
from narrowgate.cli.app import run


@pytest.fixture(autouse=True)
def small(monkeypatch):
    def once(calls):
        for call in calls:
            call()
        return 2.0

    small = {"DEVICE": "cpu", "IMPL": "cpu", "HK": 2, "K": 16, "V": 16, "CHANNELS": 24, "replayed": once}
    for name, value in {**small, "copies": lambda nbytes, device: 2}.items():
        monkeypatch.setattr(gdn, name, value)
    gdn._pass_over.cache_clear()
    yield
    gdn._pass_over.cache_clear()


def test_every_case_checks_and_is_timed():
    with torch.no_grad():
        found, refused = gdn.measure([3], [4], [70])
    assert refused == []
    kinds = ["step", "packed", "speculative", "decode", "prefill", "causal", "post-conv", "gated", "l2"]
    assert [m.case.split()[0] for m in found] == kinds
    assert all(m.share == 1.0 for m in found)


@pytest.mark.parametrize("op", ["gated_delta_rule_step", "rms_norm_gated", "decode_layer"])
def test_what_does_not_check_is_not_timed(monkeypatch, op):
    home = gdn if op == "decode_layer" else gdn.ops
    right = getattr(home, op)
    monkeypatch.setattr(home, op, lambda *a, **k: right(*a, **k) * (1 if k.get("impl") == "reference" else 1.1))
    with torch.no_grad():
        found, refused = gdn.measure([3], [4], [70])
    assert refused
    assert all("is off by" in line for line in refused)
    assert not {m.case for m in found} & {line.split(":")[0] for line in refused}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_needs_a_gpu(capsys):
    assert run(["bench", "gdn"]) == 2
    assert "expected a GPU" in capsys.readouterr().err
