"""Golden bytes: stored blocks of each format beside their values, written by hand or decoded by others (golden.json).

A round trip through our own packing proves nothing about a format; these bytes come from outside (lab/golden.py made the
file and imports nothing of ours). Each is a case of `dequantize`: the bytes as they are, to values, to the bit."""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from narrowgate.conformance.case import Case, Rival
from narrowgate.conformance.compare import bits
from narrowgate.packing import PackedTensor, Scale
from narrowgate.packing.ggml import from_ggml_blocks

_STORED = {"words@1": torch.int32}
_WIDTH = {"float32": torch.int32, "float16": torch.int16, "bfloat16": torch.int16}
_HOLDS = {
    "int4": ("A2", "A7"), "int8": ("A2", "A7"), "int2": ("A2", "A7"), "float6_e3m2fn": ("B3", "B10", "B31"),
    "float6_e2m3fn": ("B4", "B10", "B31"), "float8_e4m3fn": ("A10",), "float8_e5m2": ("A10",), "float8_e8m0fnu": ("F9",),
    "float4_e2m1fn": ("A8",),
}  # fmt: skip
_OF_GGML = {"q8_0": ("C17",), "mxfp4": ("F23",)}


@functools.cache
def records() -> tuple[dict[str, Any], ...]:
    """The entries of golden.json."""
    return tuple(json.loads(files("narrowgate.conformance").joinpath("golden.json").read_text(encoding="utf-8")))


def packed(record: dict[str, Any]) -> PackedTensor:
    """The stored bytes of an entry as a packed tensor; nothing is encoded on the way."""
    if "ggml" in record:
        return from_ggml_blocks(stored(record["data"], torch.uint8), record["ggml"], record["shape"])
    scales = [
        Scale(_grid(s, record["shape"]), s["element"], tuple(s["block"]), s["layout"]) for s in record["scales"]
    ]  # fmt: skip
    data = stored(record["data"], _STORED.get(record["layout"], torch.uint8))
    if record["layout"] != "words@1":
        data = data.view(*record["shape"][:-1], -1)
    return PackedTensor(record["element"], record["layout"], data, tuple(record["shape"]), tuple(scales))


def _grid(scale: dict[str, Any], shape: list[int]) -> Tensor:
    grid = [-(-extent // block) for extent, block in zip(shape, scale["block"], strict=True)]
    return stored(scale["data"], _WIDTH.get(scale["element"], torch.uint8)).view(grid)


def stored(text: str, dtype: torch.dtype) -> Tensor:
    """Hexadecimal text as little-endian numbers."""
    return torch.frombuffer(bytearray.fromhex(text), dtype=dtype).clone()


def values(record: dict[str, Any], numbers: list[float | str]) -> Tensor:
    """The numbers of an entry, "nan", "inf" and "-0.0" too, in its shape."""
    return torch.tensor([float(n) for n in numbers], dtype=torch.float64).float().view(record["shape"])


def cases() -> tuple[Case, ...]:
    """One case of `dequantize` an entry."""

    def reading(record: dict[str, Any], numbers: list[float | str]) -> Any:
        return lambda **_: {"values": values(record, numbers)}

    return tuple(
        Case(
            "dequantize", f"golden bytes, {record['name']}", lambda g, record=record: {"w": packed(record)},  # type: ignore[misc]
            reading(record, record["values"]), bits(),
            tuple(Rival(name, reading(record, numbers)) for name, numbers in record["rivals"].items()),
            spec=_OF_GGML.get(record["ggml"], ()) if "ggml" in record else _HOLDS.get(record["element"], ()),
        )
        for record in records()
    )  # fmt: skip
