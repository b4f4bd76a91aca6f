"""The header of a safetensors file, checked before anything in the file is trusted.

A file is 8 bytes of header length (little-endian), that many bytes of JSON, then the tensors' bytes without gaps. A claim
that the file cannot keep is refused here, with the tensor's name, before any memory is allocated for it: readers that
allocate first can be made to ask for any amount. Left out: sub-byte dtypes, which ours are stored without.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from narrowgate.errors import FileError

MAX_HEADER_BYTES = 100_000_000  # safetensors' own cap
MAX_RANK = 16

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: its dtype and shape, and where its bytes lie, counted from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Name -> place of every tensor in `path`. Raises FileError, one line, if the file is not exactly what it claims."""
    try:
        size = path.stat().st_size
        if not path.is_file():  # a pipe or a device would be read for ever
            raise FileError(f"{path}: expected a file")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8:
                raise FileError(f"{path}: expected a safetensors file, got {size} bytes: truncated")
            if length > MAX_HEADER_BYTES:
                raise FileError(f"{path}: corrupt header: it claims {length} bytes, the limit is {MAX_HEADER_BYTES}")
            if length > size - 8:
                raise FileError(f"{path}: corrupt or truncated: the header claims {length} bytes, the file has {size}")
            text = file.read(length)
    except FileNotFoundError:
        raise FileError(f"{path}: no such file") from None
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from None
    start = 8 + length
    tensors = {name: _entry(path, name, value, start, size) for name, value in _parse(path, text).items()}
    _no_overlap(path, tensors, start, size)
    return tensors


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise FileError(f"{path}: corrupt header: {key!r} is listed twice")
            found[key] = value
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: corrupt header: not JSON ({str(error).splitlines()[0]})") from None
    if not isinstance(header, dict):
        raise FileError(f"{path}: corrupt header: expected a JSON object, got {type(header).__name__}")
    header.pop("__metadata__", None)
    return header


def _entry(path: Path, name: str, value: Any, start: int, size: int) -> TensorInfo:
    where = f"{path}: tensor {name!r}"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise FileError(f"{where}: corrupt header: expected dtype, shape and data_offsets")
    dtype = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise FileError(f"{where}: expected one of the dtypes {', '.join(DTYPES)}, got {value['dtype']!r}")
    shape, offsets = value["shape"], value["data_offsets"]
    if not _naturals(shape) or len(shape) > MAX_RANK:
        raise FileError(f"{where}: corrupt header: expected a shape of up to {MAX_RANK} extents, got {str(shape)[:80]}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FileError(f"{where}: corrupt header: expected two rising data_offsets, got {str(offsets)[:80]}")
    begin, end = offsets
    if start + end > size:
        raise FileError(f"{where}: claims bytes up to {start + end}, the file has {size}: truncated or corrupt")
    needed = prod(shape) * dtype.itemsize
    if needed != end - begin:
        raise FileError(f"{where}: corrupt header: {value['dtype']} {shape} is {needed} bytes, its range has {end - begin}")
    return TensorInfo(dtype, tuple(shape), start + begin, start + end)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _no_overlap(path: Path, tensors: Mapping[str, TensorInfo], start: int, size: int) -> None:
    """The ranges tile the data: no two share a byte, and no byte is hidden between them."""
    last, before = start, "the header"
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != last:
            what = "overlaps" if info.begin < last else "leaves a hole after"
            raise FileError(f"{path}: tensor {name!r} {what} {before}: corrupt header")
        last, before = info.end, repr(name)
    if last != size:
        raise FileError(f"{path}: {size - last} bytes after the last tensor: corrupt or not a safetensors file")


def encode_header(
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorInfo]]:
    """The first bytes of a file that will hold `entries`, and where each goes. Wide dtypes come first, so that every tensor
    is aligned to its own element."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    places: dict[str, TensorInfo] = {}
    offset = 0
    for name, (dtype, shape) in sorted(entries.items(), key=lambda item: -item[1][0].itemsize):
        if dtype not in NAMES:
            raise FileError(f"tensor {name!r}: expected one of the dtypes {', '.join(DTYPES)}, got {dtype}")
        end = offset + prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        places[name] = TensorInfo(dtype, tuple(shape), offset, end)
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    placed = {n: TensorInfo(i.dtype, i.shape, start + i.begin, start + i.end) for n, i in places.items()}
    return len(text).to_bytes(8, "little") + text, placed


def plain_file_name(name: object) -> bool:
    """Whether `name` names a file in its own folder and nowhere else."""
    return isinstance(name, str) and name not in ("", ".", "..") and os.path.basename(name) == name and "\\" not in name
