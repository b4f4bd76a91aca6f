"""Golden bytes: stored blocks of each format beside their values, written by hand or decoded by others (golden.json).

A round trip through our own packing proves nothing about a format; these bytes come from outside (lab/golden.py made the
file and imports nothing of the package). Each entry of "decode" is a case of `dequantize`: the bytes as they are, to values, to
the bit. Each of "encode" is a case of `quantize`: hard rows (ties, zeros of both signs, tiny, huge), to the bytes of a scheme."""

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
def _file() -> dict[str, Any]:
    return json.loads(files("narrowgate.conformance").joinpath("golden.json").read_text(encoding="utf-8"))


def records() -> tuple[dict[str, Any], ...]:
    """The entries of golden.json that are bytes with their values."""
    return tuple(_file()["decode"])


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
    """One case of `dequantize` or `quantize` an entry."""
    return (*map(_decoding, records()), *map(_encoding, _file()["encode"]))


def _reading(found: dict[str, Tensor]) -> Any:
    return lambda **_: found


def _decoding(record: dict[str, Any]) -> Case:
    rivals = [Rival(name, _reading({"values": values(record, found)})) for name, found in record["rivals"].items()]
    holds = _OF_GGML.get(record["ggml"], ()) if "ggml" in record else _HOLDS.get(record["element"], ())
    return Case(
        "dequantize", f"golden bytes, {record['name']}", lambda g: {"w": packed(record)},
        _reading({"values": values(record, record["values"])}), bits(), tuple(rivals), spec=holds,
    )  # fmt: skip


_DTYPES = {"uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32, "float32": torch.float32}


def _tensor(record: dict[str, Any]) -> Tensor:
    return stored(record["data"], _DTYPES[record["dtype"]]).view(record["shape"])


def _encoding(record: dict[str, Any]) -> Case:
    found = {t["name"]: _tensor(t) for t in record["tensors"]}
    rivals = [Rival("the scale of the block before", _reading({**found, "scales": found["scales"].roll(1, 0)}))]
    if (found["codes"] == 0x80).any() or record["scheme"].startswith("mxfp"):
        sign = {"mxfp4": 8, "mxfp6_e2m3": 32, "mxfp6_e3m2": 32}.get(record["scheme"], 128)
        lost = torch.where(found["codes"] == sign, 0, found["codes"])
        if not torch.equal(lost, found["codes"]):
            rivals.append(Rival("the sign of zero lost", _reading({**found, "codes": lost})))
    arguments = {"x": _tensor(_file()["x"]), "scheme": record["scheme"], "scale_rule": record["rule"], "layout": "bytes@1"}
    name = record["scheme"] + (f" by {record['rule']}" if record["rule"] else "")
    holds = (
        ("A39", "A40")
        if record["scheme"].startswith("int")
        else ("B7", "B8", "B20")
        if record["scheme"].startswith("mx")
        else ()
    )
    return Case("quantize", f"hard rows, {name}", lambda g: dict(arguments), _reading(found), bits(), tuple(rivals), spec=holds)
