"""The tensors of a model folder, one `model.safetensors` or several with an index, read lazily and one at a time.

`read` maps the file and copies nothing, so a model costs memory as it is touched; `copy` reads into fresh memory, so a
stream through a large file keeps no more than one tensor. Left out: pickled weights (they run code when loaded).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgate.errors import FileError
from narrowgate.io.header import TensorInfo, plain_file_name, read_header
from narrowgate.io.json_file import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Checkpoint:
    """`names()`, `info(name)`, `read(name)`, `copy(name)`. Opening it reads and checks every header and no data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._where: dict[str, tuple[Path, TensorInfo]] = {}
        self._open: dict[Path, Any] = {}
        for path in _files(folder):
            for name, info in read_header(path).items():
                if name in self._where:
                    raise FileError(f"{path}: tensor {name!r} is also in {self._where[name][0].name}")
                self._where[name] = (path, info)
        _check_index(folder, self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def names(self) -> list[str]:
        return list(self._where)

    def info(self, name: str) -> TensorInfo:
        return self._place(name)[1]

    def read(self, name: str) -> Tensor:
        """The tensor, mapped from the file: private pages, so writing to it would not change the file."""
        path, info = self._place(name)
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        try:
            return self._handle(path).get_tensor(name)
        except Exception as error:  # safetensors raises a class of its own
            raise FileError(f"{path}: tensor {name!r} cannot be read: {_one_line(error)}") from None

    def copy(self, name: str) -> Tensor:
        """The tensor in memory of its own."""
        path, info = self._place(name)
        data = torch.empty(info.nbytes, dtype=torch.uint8)
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(info.begin)
                view, done = data.numpy().data, 0
                while done < info.nbytes:
                    got = file.readinto(view[done:])
                    if not got:
                        raise FileError(f"{path}: tensor {name!r}: the file ended early: truncated")
                    done += got
        except FileError:
            raise
        except OSError as error:
            raise FileError(f"{path}: tensor {name!r} cannot be read: {error.strerror or error}") from None
        return data.view(info.dtype).reshape(info.shape)

    def close(self) -> None:
        """Drop the mappings that no tensor holds any more."""
        self._open.clear()

    def _place(self, name: str) -> tuple[Path, TensorInfo]:
        if name not in self._where:
            raise FileError(f"{self.folder}: missing tensor {name!r}")
        return self._where[name]

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            from safetensors import safe_open

            self._open[path] = safe_open(str(path), framework="pt")
        return self._open[path]


def _files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        names = sorted(set(_weight_map(folder).values()))
        for name in names:
            if not (folder / name).is_file():
                raise FileError(f"{folder / INDEX}: names the file {name!r}, which is missing")
        return [folder / name for name in names]
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern))
    if pickled:
        raise FileError(f"{folder}: expected {SINGLE}, got only pickled weights ({pickled[0]}), which are never loaded")
    raise FileError(f"{folder}: expected {SINGLE} or {INDEX}, got neither")


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    found = read_json(path).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise FileError(f"{path}: expected a weight_map of tensor names to file names")
    for name, file in found.items():
        if not plain_file_name(file):
            raise FileError(f"{path}: tensor {name!r}: expected a file name in the same folder, got {str(file)[:80]!r}")
    return found


def _check_index(folder: Path, where: dict[str, tuple[Path, TensorInfo]]) -> None:
    if (folder / SINGLE).is_file():
        return
    for name, file in _weight_map(folder).items():
        if name not in where or where[name][0].name != file:
            raise FileError(f"{folder / INDEX}: tensor {name!r} is said to be in {file}, but is not there")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
