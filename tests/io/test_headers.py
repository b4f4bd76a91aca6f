"""A safetensors file is believed only as far as it can be checked: every way of being wrong is one FileError, one line."""

import json

import pytest
import torch
from safetensors.torch import save_file

from narrowgate.errors import FileError
from narrowgate.io import header
from narrowgate.io.checkpoint import Checkpoint
from narrowgate.io.header import DTYPES, read_header


def file(path, head, data=b"", length=None):
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def tensor(begin, end, shape, dtype="U8"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_reads_what_the_library_writes(tmp_path):
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.zeros(0, 4, dtype=torch.int16),
        "d": torch.tensor(5, dtype=torch.int64),
        "e": torch.randn(2, 3).to(torch.float8_e4m3fn),
        "f": torch.arange(11, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = Checkpoint(tmp_path)
    assert set(found) == set(tensors)
    for name, want in tensors.items():
        for got in (found.read(name), found.copy(name)):
            assert got.dtype == want.dtype
            assert got.shape == want.shape
            assert torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))


def test_every_dtype_of_the_library_is_known(tmp_path):
    from safetensors.torch import _TYPES

    assert {k: v for k, v in _TYPES.items() if k in DTYPES} == {k: v for k, v in DTYPES.items() if k in _TYPES}


WRONG = {
    "no bytes": (lambda p: p.write_bytes(b""), "truncated"),
    "seven bytes": (lambda p: p.write_bytes(b"\0" * 7), "truncated"),
    "header longer than the file": (lambda p: file(p, {}, length=1000), "claims 1000 bytes"),
    "header over the cap": (lambda p: file(p, {}, length=1 << 40), "limit"),
    "not JSON": (lambda p: file(p, b"{nonsense"), "not JSON"),
    "not UTF-8": (lambda p: file(p, b'{"\xff": 1}'), "not JSON"),
    "deep nesting": (lambda p: file(p, b"[" * 200_000), "not JSON"),
    "not an object": (lambda p: file(p, [1]), "object"),
    "a name twice": (lambda p: file(p, b'{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"x":{}}'), "twice"),
    "no dtype": (lambda p: file(p, {"x": {"shape": [1], "data_offsets": [0, 1]}}, b"a"), "dtype, shape"),
    "unknown dtype": (lambda p: file(p, {"x": tensor(0, 1, [2], "F4")}, b"a"), "'F4'"),
    "dtype is a list": (lambda p: file(p, {"x": tensor(0, 1, [1], ["U8"])}, b"a"), "dtypes"),
    "negative extent": (lambda p: file(p, {"x": tensor(0, 1, [-1])}, b"a"), "shape"),
    "extent is true": (lambda p: file(p, {"x": tensor(0, 1, [True])}, b"a"), "shape"),
    "rank over the cap": (lambda p: file(p, {"x": tensor(0, 1, [1] * 17)}, b"a"), "16 extents"),
    "offsets fall": (lambda p: file(p, {"x": tensor(1, 0, [1])}, b"a"), "rising"),
    "three offsets": (lambda p: file(p, {"x": {**tensor(0, 1, [1]), "data_offsets": [0, 1, 1]}}, b"a"), "two rising"),
    "claims more than the file": (lambda p: file(p, {"x": tensor(0, 1 << 40, [1 << 40])}, b"a"), "claims bytes up to"),
    "shape does not fit": (lambda p: file(p, {"x": tensor(0, 4, [3])}, b"abcd"), "is 3 bytes, its range has 4"),
    "shape overflows": (lambda p: file(p, {"x": tensor(0, 0, [1 << 33, 1 << 33])}), "its range has 0"),
    "overlap": (lambda p: file(p, {"x": tensor(0, 3, [3]), "y": tensor(2, 4, [2])}, b"abcd"), "overlaps"),
    "same bytes": (lambda p: file(p, {"x": tensor(0, 2, [2]), "y": tensor(0, 2, [2])}, b"ab"), "overlaps"),
    "hole": (lambda p: file(p, {"x": tensor(0, 1, [1]), "y": tensor(2, 4, [2])}, b"abcd"), "hole"),
    "bytes after the end": (lambda p: file(p, {"x": tensor(0, 1, [1])}, b"abcd"), "after the last tensor"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files(name, tmp_path):
    path = tmp_path / "model.safetensors"
    write, text = WRONG[name]
    write(path)
    with pytest.raises(FileError) as caught:
        Checkpoint(tmp_path)
    assert text in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_truncation_is_refused(tmp_path):
    save_file({"a": torch.randn(3), "b": torch.zeros(2, 2, dtype=torch.int8)}, tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    cut = tmp_path / "cut.safetensors"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(FileError):
            read_header(cut)


def test_every_damaged_byte_of_the_header_is_refused_or_harmless(tmp_path):
    """Whatever a flipped byte makes of a header: a FileError, or tensors whose ranges lie inside the file and fit."""
    save_file({"a": torch.randn(3, 2), "b": torch.zeros(4, dtype=torch.int16)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    damaged = tmp_path / "damaged.safetensors"
    refused = 0
    for at in range(8 + int.from_bytes(whole[:8], "little")):
        damaged.write_bytes(whole[:at] + bytes([whole[at] ^ 0x15]) + whole[at + 1 :])
        try:
            found = read_header(damaged)
        except FileError:
            refused += 1
        else:
            assert sum(info.nbytes for info in found.values()) == 32
    assert refused > 50


def test_a_file_cut_after_it_was_opened(tmp_path):
    save_file({"a": torch.randn(1000)}, tmp_path / "model.safetensors")
    found = Checkpoint(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-8])
    with pytest.raises(FileError, match="truncated"):
        found.copy("a")
    with pytest.raises(FileError):
        found.read("a")


def test_header_of_our_own(tmp_path):
    entries = {"odd": (torch.uint8, (3,)), "wide": (torch.int32, (2, 2)), "half": (torch.bfloat16, (5,))}
    head, places = header.encode_header(entries, {"format": "pt"})
    assert len(head) % 8 == 0
    assert [places[n].begin - len(head) for n in ("wide", "half", "odd")] == [0, 16, 26]
    (tmp_path / "x.safetensors").write_bytes(head + bytes(29))
    assert read_header(tmp_path / "x.safetensors") == places
