"""The bench of models: a small geometry through the command, and random weights that are what a scheme would have made."""

import json

import pytest
import torch

pytest.importorskip("numba")

import narrowgate as ng
from narrowgate.bench import model as bench
from narrowgate.bench import model_gpu, timing
from narrowgate.cli.app import run
from narrowgate.models import published

SMALL = {"vocab_size": 320, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
         "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch):
    dense = {**published.PUBLISHED["qwen3.5-0.8b"], **SMALL, "num_hidden_layers": 4, "intermediate_size": 96}
    moe = {
        **published.PUBLISHED["qwen3.5-35b-a3b"],
        **SMALL,
        "num_hidden_layers": 4,
        "num_experts": 16,
        "moe_intermediate_size": 32,
    }
    monkeypatch.setattr(published, "PUBLISHED", {"dense": dense, "moe": moe})
    monkeypatch.setattr(timing, "roofs", lambda device: {"read": 1e9})


@pytest.mark.parametrize("config", ["dense", "moe"])
def test_the_command_reports_every_part(config, capsys):
    assert run(["bench", "model", "--config", config, "--scheme", "mxfp4", "--prompt", "9", "--steps", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["decode_microseconds_by_layer"]) == set(found["prefill_seconds_by_layer"])
    assert {"gated delta", "attention", "head", "embedding", "norms"} <= set(found["decode_microseconds_by_layer"])
    assert ("experts" if config == "moe" else "feed-forward") in found["decode_microseconds_by_layer"]
    assert all(v > 0 for v in found["decode_microseconds_by_layer"].values())
    assert 0 <= found["outside_kernels"] < 1
    assert found["calls"] > 30
    assert found["token_bytes"] == found["weight_bytes"] + found["state_bytes"] < found["peak_bytes"]
    assert found["all_layers"]


def test_the_table_and_wrong_arguments(capsys):
    assert run(["bench", "model", "--config", "dense", "--layers", "2", "--prompt", "3", "--steps", "2"]) == 0
    shown = capsys.readouterr().out
    assert "dense, 2 of its layers, int4_g32" in shown
    assert "gated delta" in shown
    for wrong in (["--config", "gpt"], ["--scheme", "int3"], ["--layers", "9"], ["--steps", "0"]):
        assert run(["bench", "model", "--config", "dense", *wrong]) == 2
    assert capsys.readouterr().err.count("expected") == 4


@pytest.mark.parametrize("config", ["dense", "moe"])
def test_bytes_of_a_token_by_kind_are_those_of_the_whole(config):
    """What the bench of a GPU divides by: every tensor counted once, states both ways, keys and values as far as they go."""
    model = bench.random_model(config, "mxfp4")
    states = model.decoder.new_states(1, torch.bfloat16, torch.device("cpu"), pooled=True)
    for state in states:
        if hasattr(state, "pool"):
            state.reserve(500)
    read, copied = model_gpu._bytes(model, states, 128)
    heads = model.config.kv_heads * model.config.head_dim
    row = model.report()[0].nbytes // model.config.vocab_size
    assert sum(read.values()) == bench.token_bytes(model) + row + 2 * 128 * heads * 2
    assert copied == {"gated delta": 2 * sum(s.nbytes for s in states if hasattr(s, "rule"))}
    assert set(read) == {kind for _, kind in bench.named_parts(model)}


def test_a_device_that_is_not_there(capsys):
    assert run(["bench", "model", "--config", "dense", "--device", "cuda:63"]) == 2
    assert "--device" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("config", ["dense", "moe"])
def test_the_command_on_a_card(config, monkeypatch, capsys):
    monkeypatch.setattr(timing, "roofs", lambda device: {"read": 4e12, "copy": 4e12})
    arguments = ["bench", "model", "--device", "cuda", "--config", config, "--scheme", "mxfp4", "--prompt", "9", "--steps", "3"]
    assert run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["decode_microseconds_by_layer"]) == set(found["floor_microseconds_by_layer"])
    assert all(v > 0 for v in found["decode_microseconds_by_layer"].values())
    assert 0 < found["floor_microseconds"] < found["replay_microseconds"] <= found["step_microseconds"]
    assert run(arguments) == 0
    assert "one CUDA graph a step" in capsys.readouterr().out


@pytest.mark.parametrize("scheme", ng.schemes())
def test_repeated_rows_are_what_the_scheme_makes(scheme, monkeypatch):
    monkeypatch.setattr(bench, "_TILE", 16)
    for name, slot in bench.random_model("moe", scheme)._bound.items():
        if slot.source.slot.packable:
            value = slot.weight.stored()
            dense = value if isinstance(value, torch.Tensor) else value.dequantize()
            assert dense.isfinite().all(), name
            assert tuple(value.shape) == slot.source.slot.shape
            if dense.shape[-2] > 16:
                assert torch.equal(dense[..., 16:32, :], dense[..., :16, :][..., : dense[..., 16:32, :].shape[-2], :])
            assert slot.weight().shape == value.shape
