"""Writing: safetensors one tensor at a time, and folders that appear whole or not at all.

The shapes must be known before the first byte, because the header comes first; the tensors may then come in any order,
each written at its own place, so that no more than one needs to be in memory. Left out: shards (one file of any size is
legal, and every reader that maps files can take it).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgate.errors import FileError, InputError
from narrowgate.io.header import encode_header

Entries = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class TensorWriter:
    """A safetensors file in the making. As a context it ends in a whole file at `path`, or in none.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.safetensors"
    >>> with TensorWriter(path, {"x": (torch.int16, (2, 3))}) as writer:
    ...     writer.write("x", torch.ones(2, 3, dtype=torch.int16))
    >>> path.stat().st_size % 4
    0
    """

    def __init__(self, path: Path, entries: Entries, metadata: Mapping[str, str] | None = None) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        head, self._places = encode_header(entries, metadata or {"format": "pt"})
        self._left = set(self._places)
        with _as_file_error(path):
            self._file = self._temporary.open("xb")
            self._file.write(head)

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self._finish()
        except BaseException:
            self.discard()
            raise

    def write(self, name: str, tensor: Tensor) -> None:
        """Put one tensor at its place. It must have the dtype and shape that were announced."""
        place = self._places.get(name)
        if place is None or name not in self._left:
            raise InputError(f"write: tensor {name!r} was {'not announced' if place is None else 'already written'}")
        if tensor.dtype != place.dtype or tuple(tensor.shape) != place.shape:
            raise InputError(
                f"write: tensor {name!r}: expected {place.dtype} {list(place.shape)}, got {tensor.dtype} {list(tensor.shape)}"
            )
        with _as_file_error(self._path):
            self._file.seek(place.begin)
            if tensor.numel():
                self._file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._left.remove(name)

    def discard(self) -> None:
        """Leave nothing behind."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _finish(self) -> None:
        if self._left:
            raise InputError(f"write: {len(self._left)} announced tensors never came, such as {min(self._left)!r}")
        with _as_file_error(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._temporary, self._path)


@contextlib.contextmanager
def new_folder(path: str | Path, *, source: Path | None = None) -> Iterator[Path]:
    """A folder to fill. It gets its name only when the block ends well; otherwise nothing is left.

    Raises FileError if `path` already holds something, or if it is `source`, which would be written over while it is read.
    """
    path = Path(path)
    if source is not None and path.exists() and path.resolve() == source.resolve():
        raise FileError(f"{path}: expected a folder other than the source, got the source itself")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileError(f"{path}: expected a new or empty folder, got one that holds something")
    if not path.absolute().parent.is_dir():
        raise FileError(f"{path.absolute().parent}: no such folder to write into")
    temporary = path.absolute().with_name(f".{path.absolute().name}.{secrets.token_hex(4)}.part")
    with _as_file_error(path):
        temporary.mkdir()
    try:
        yield temporary
        with _as_file_error(path):
            _sync_folder(temporary)
            os.replace(temporary, path)
            _sync_folder(path.absolute().parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    with _as_file_error(path), path.open("x", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _as_file_error(path: Path) -> Iterator[None]:
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from None
