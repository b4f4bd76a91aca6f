"""Model folders: one file or shards with an index, what is refused, tokenizers, and the two kinds of reading."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_models import byte_tokenizer

from narrowgate.errors import FileError, InputError
from narrowgate.io.checkpoint import Checkpoint
from narrowgate.io.folder import ModelFolder
from narrowgate.io.json_file import read_json
from narrowgate.io.tokenizer import Tokenizer


def shards(folder, weight_map=None):
    save_file({"a": torch.arange(6.0).view(2, 3)}, folder / "model-1.safetensors")
    save_file({"b": torch.arange(4), "c": torch.ones(1)}, folder / "model-2.safetensors")
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    index = {"metadata": {}, "weight_map": names if weight_map is None else weight_map(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_read_as_one(tmp_path):
    found = Checkpoint(shards(tmp_path))
    assert sorted(found.names()) == ["a", "b", "c"]
    assert "a" in found
    assert found.read("b").tolist() == [0, 1, 2, 3]
    assert found.info("a").shape == (2, 3)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda n: {**n, "d": "model-3.safetensors"}, "'model-3.safetensors', which is missing"),
        (lambda n: {**n, "d": "model-1.safetensors"}, "'d' is said to be in model-1.safetensors"),
        (lambda n: {**n, "a": "model-2.safetensors"}, "'a' is said to be in model-2.safetensors"),
        (lambda n: {**n, "a": "../model-1.safetensors"}, "same folder"),
        (lambda n: {**n, "a": 5}, "same folder"),
        (lambda n: {}, "weight_map"),
        (lambda n: [1], "weight_map"),
    ],
)
def test_wrong_index(change, text, tmp_path):
    with pytest.raises(FileError, match=text):
        Checkpoint(shards(tmp_path, change))


def test_a_tensor_in_two_shards(tmp_path):
    shards(tmp_path)
    save_file({"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)}, tmp_path / "model-2.safetensors")
    with pytest.raises(FileError, match="also in model-1"):
        Checkpoint(tmp_path)


def test_no_weights(tmp_path):
    with pytest.raises(FileError, match="got neither"):
        Checkpoint(tmp_path)


def test_pickled_weights_are_never_loaded(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(FileError, match=r"pickled weights \(pytorch_model.bin\)"):
        Checkpoint(tmp_path)


def in_the_file(tensor, folder):
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(edge, 16) for edge in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return str(folder) in line
    return False


def test_read_maps_and_copy_copies(tmp_path):
    save_file({"a": torch.arange(1000.0), "b": torch.arange(1000.0)}, tmp_path / "model.safetensors")
    found = Checkpoint(tmp_path)
    mapped = found.read("a")
    if Path("/proc/self/maps").exists():
        assert in_the_file(mapped, tmp_path)
        assert not in_the_file(found.copy("a"), tmp_path)
    mapped.zero_()  # private pages
    assert found.copy("a")[5] == 5.0
    found.close()
    assert found.read("b")[7] == 7.0
    with pytest.raises(FileError, match="missing tensor 'z'"):
        found.read("z")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object, got list"),
        ('{"a": ' * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_wrong_json(text, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FileError, match=message) as caught:
        read_json(path)
    assert "\n" not in str(caught.value)


def test_missing_folder_and_config(tmp_path):
    with pytest.raises(FileError, match="expected a model folder, got nothing there"):
        ModelFolder(tmp_path / "nowhere")
    with pytest.raises(FileError, match=r"config\.json: no such file"):
        ModelFolder(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="got a file"):
        ModelFolder(tmp_path / "file")


def test_huge_json_is_refused_by_size(tmp_path, monkeypatch):
    monkeypatch.setattr("narrowgate.io.json_file.MAX_JSON_BYTES", 10)
    (tmp_path / "config.json").write_text('{"a": "0123456789"}')
    with pytest.raises(FileError, match="at most 10 bytes"):
        ModelFolder(tmp_path)


def test_tokenizer(tmp_path):
    byte_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    text = "the cat é 猫 🐈"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([0, *ids, 1]) == text
    assert tokenizer.decode([0, *ids], skip_special=False) == "<|end|>" + text
    assert tokenizer.special == {"eos_token": "<|end|>", "bos_token": "<|start|>"}
    assert 256 < tokenizer.vocab_size <= 300
    with pytest.raises(InputError, match="surrogates"):
        tokenizer.encode("\ud800")
    with pytest.raises(InputError, match="expected text"):
        tokenizer.encode(5)


def test_wrong_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FileError, match="not a tokenizer") as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_chat_template_places(tmp_path):
    byte_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert Tokenizer(tmp_path).chat_template == "J"
