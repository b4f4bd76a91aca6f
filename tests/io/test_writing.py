"""Writing is all or nothing: a whole file or folder under its name, or no trace."""

import os

import pytest
import torch
from safetensors.torch import load_file

from narrowgate.errors import FileError, InputError
from narrowgate.io.writer import TensorWriter, new_folder, write_json

ENTRIES = {"a": (torch.uint8, (3,)), "b": (torch.int32, (2, 5)), "c": (torch.bfloat16, ()), "d": (torch.float32, (0, 4))}
VALUES = {
    "a": torch.tensor([1, 2, 255], dtype=torch.uint8),
    "b": torch.arange(10, dtype=torch.int32).view(5, 2).T,
    "c": torch.tensor(1.5, dtype=torch.bfloat16),
    "d": torch.zeros(0, 4),
}


def write_all(path, order="cbda"):
    with TensorWriter(path, ENTRIES) as writer:
        for name in order:
            writer.write(name, VALUES[name])


def test_any_order_gives_the_same_file_and_the_library_reads_it(tmp_path):
    write_all(tmp_path / "one.safetensors")
    write_all(tmp_path / "two.safetensors", "abcd")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()
    found = load_file(tmp_path / "one.safetensors")
    assert all(torch.equal(found[n], VALUES[n]) and found[n].dtype == VALUES[n].dtype for n in VALUES)


@pytest.mark.parametrize(
    ("writes", "message"),
    [
        ([("a", VALUES["a"])], "3 announced tensors never came, such as 'b'"),
        ([("z", VALUES["a"])], "'z' was not announced"),
        ([("a", VALUES["a"]), ("a", VALUES["a"])], "already written"),
        ([("a", VALUES["a"].int())], "expected torch.uint8"),
        ([("a", VALUES["a"][:2])], "got torch.uint8 .2."),
    ],
)
def test_a_wrong_tensor_leaves_nothing(writes, message, tmp_path):
    def go():
        with TensorWriter(tmp_path / "x.safetensors", ENTRIES) as writer:
            for name, tensor in writes:
                writer.write(name, tensor)

    with pytest.raises(InputError, match=message):
        go()
    assert not list(tmp_path.iterdir())


def test_any_exception_leaves_nothing(tmp_path):
    def go():
        with new_folder(tmp_path / "out") as folder, TensorWriter(folder / "x.safetensors", ENTRIES) as writer:
            writer.write("a", VALUES["a"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go()
    assert not list(tmp_path.iterdir())


def test_the_file_has_its_name_only_when_it_is_whole(tmp_path):
    path = tmp_path / "x.safetensors"
    with TensorWriter(path, ENTRIES) as writer:
        for name in VALUES:
            writer.write(name, VALUES[name])
            assert not path.exists()
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("fresh", "empty"):
        with new_folder(tmp_path / name) as folder:
            write_json(folder / "a.json", {"x": "é"})
        assert (tmp_path / name / "a.json").read_text(encoding="utf-8") == '{\n  "x": "é"\n}\n'
    with pytest.raises(FileError, match="holds something"), new_folder(tmp_path / "fresh"):
        pass
    with pytest.raises(FileError, match="the source itself"), new_folder(tmp_path / "fresh", source=tmp_path / "fresh"):
        pass
    with pytest.raises(FileError, match="holds something"), new_folder(tmp_path / "fresh" / "a.json"):
        pass
    with pytest.raises(FileError, match="no such folder"), new_folder(tmp_path / "no" / "where"):
        pass
    assert sorted(os.listdir(tmp_path)) == ["empty", "fresh"]
