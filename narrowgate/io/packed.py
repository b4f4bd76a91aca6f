"""Packed tensors in a checkpoint: which safetensors hold one, how config.json describes it, and reading it back.

`NAME.data`, `NAME.scales.0`, ... lie beside the dense tensors; `quantization_config` in config.json says element, layout,
shape and blocks of each NAME, so that nothing is guessed from dtypes. A description is held against the real dtypes and
shapes before any data is read. A quantization_config of another method, or of a newer version, is refused by name: read as
ours it would load as noise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from narrowgate.errors import FileError, InputError
from narrowgate.io.checkpoint import Checkpoint
from narrowgate.packing import PackedTensor, describe, flatten, unflatten

METHOD = "narrowgate"
VERSION = 1
KEYS = ("quantization_config", "compression_config")


def quantization(config: Mapping[str, Any], where: str = "config.json") -> dict[str, Any] | None:
    """Our quantization_config, or None where the config has none. Raises FileError for any other."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        for key in KEYS:
            if part.get(key) is not None:
                return _ours(part[key], key, where)
    return None


def _ours(found: Any, key: str, where: str) -> dict[str, Any]:
    method = found.get("quant_method") if isinstance(found, dict) else None
    if method != METHOD:
        raise FileError(f"{where}: {key}: cannot read quantization method {method!r}, expected {METHOD!r} or none")
    if found.get("format_version") != VERSION:
        raise FileError(f"{where}: {key}: expected format_version {VERSION}, got {found.get('format_version')!r}")
    if not isinstance(found.get("tensors"), dict):
        raise FileError(f"{where}: {key}: expected tensors, an object of name and description")
    return found


def parts(w: PackedTensor) -> dict[str, Tensor]:
    """The stored tensors of `w` by the end of their name: "data", "scales.0", ..., "zero_points", "offset.0", "codebook"."""
    return dict(zip(_suffixes(json.loads(describe(w))), flatten(w)[0], strict=True))


def entry(w: PackedTensor) -> dict[str, Any]:
    """What config.json says about `w`."""
    return {"scheme": w.scheme, **json.loads(describe(w))}


def _suffixes(record: Mapping[str, Any]) -> list[str]:
    names = ["data", *(f"scales.{i}" for i in range(len(record["scales"])))]
    names += ["zero_points"] if record.get("zero_points") else []
    names += [f"offset.{i}" for i in range(len(record.get("offset", ())))]
    return names + (["codebook"] if record.get("codebook") else [])


class Store:
    """The tensors of a checkpoint by the names of the model: dense ones as they are, packed ones put together.

    `names()`, `packed(name)`, `shape(name)`, `read(name)`; a packed tensor's name has no ".weight".
    """

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
        self._checkpoint = checkpoint
        self._where = f"{checkpoint.folder / 'config.json'}"
        self.quantization = quantization(config, self._where)
        self._records: dict[str, dict[str, Any]] = {}
        used: set[str] = set()
        for name, described in (self.quantization or {}).get("tensors", {}).items():
            record = _checked(described, f"{self._where}: quantization_config: {name!r}")
            self._records[name] = record
            self._compare(name, record)
            used |= {f"{name}.{suffix}" for suffix in _suffixes(record)}
        self._dense = [name for name in checkpoint if name not in used]
        for name in self._dense:
            if name.removesuffix(".weight") in self._records:
                raise FileError(f"{checkpoint.folder}: tensor {name!r} is there twice, packed and dense")

    def __iter__(self) -> Iterator[str]:
        yield from self._dense
        yield from self._records

    def packed(self, name: str) -> bool:
        return name in self._records

    def shape(self, name: str) -> tuple[int, ...]:
        record = self._records.get(name)
        return self._checkpoint.info(name).shape if record is None else tuple(record["shape"])

    def dtype(self, name: str) -> torch.dtype | None:
        """Of a dense tensor; None for a packed one."""
        return None if name in self._records else self._checkpoint.info(name).dtype

    def read(self, name: str, *, copy: bool = False) -> Tensor | PackedTensor:
        """The tensor, mapped from the file, or with `copy` in memory of its own."""
        take = self._checkpoint.copy if copy else self._checkpoint.read
        record = self._records.get(name)
        if record is None:
            return take(name)
        w = _unflattened([take(f"{name}.{suffix}") for suffix in _suffixes(record)], record, f"{self._where}: {name!r}")
        self._is_named(name, w)
        return w

    def _is_named(self, name: str, w: PackedTensor) -> None:
        said = self._records[name]["scheme"]
        if said != w.scheme:
            raise FileError(f"{self._where}: {name!r}: said to be {said!r}, but holds {w.scheme!r}")

    def close(self) -> None:
        """Drop the mappings that no tensor holds any more."""
        self._checkpoint.close()

    def _compare(self, name: str, record: Mapping[str, Any]) -> None:
        """Hold the description to the dtypes and shapes in the file's header; reads no data."""
        stand_ins = []
        for suffix in _suffixes(record):
            info = self._checkpoint.info(f"{name}.{suffix}")
            stand_ins.append(torch.empty(info.shape, dtype=info.dtype, device="meta"))
        w = _unflattened(stand_ins, record, f"{self._where}: quantization_config: {name!r}")
        if w.codebook is None and w.zero_points is None:  # else values decide the name, and `read` looks at them
            self._is_named(name, w)


def _unflattened(tensors: list[Tensor], record: Mapping[str, Any], where: str) -> PackedTensor:
    described = json.dumps({k: v for k, v in record.items() if k != "scheme"}, separators=(",", ":"))
    try:
        w = unflatten(tensors, described)
    except InputError as error:
        raise FileError(f"{where}: {error}") from None
    assert isinstance(w, PackedTensor)
    return w


def _checked(described: Any, where: str) -> dict[str, Any]:
    """The description with only the keys that we know, each of the type that it must have."""
    if not isinstance(described, dict) or not {"element", "layout", "shape", "scales"} <= described.keys():
        raise FileError(f"{where}: expected element, layout, shape and scales")
    shape, scheme = described["shape"], described.get("scheme")
    if not _counts(shape) or not isinstance(described["element"], str) or not isinstance(described["layout"], str):
        raise FileError(
            f"{where}: expected element and layout as names and a shape of 1 to 8 extents, got {str(described)[:80]}"
        )
    if prod(shape) >= 1 << 48:
        raise FileError(f"{where}: expected fewer than 2**48 values, got shape {shape}")
    if scheme is not None and not isinstance(scheme, str):
        raise FileError(f"{where}: expected a scheme's name, got {str(scheme)[:80]}")
    record: dict[str, Any] = {"scheme": scheme, "element": described["element"], "layout": described["layout"], "shape": shape}
    record["scales"] = _scales(described["scales"], where)
    if described.get("zero_points") is not None:
        record["zero_points"] = _scales([described["zero_points"]], where)[0]
    if described.get("offset"):
        record["offset"] = _scales(described["offset"], where)
    if described.get("codebook"):
        record["codebook"] = True
    return record


def _scales(found: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(found, list) or len(found) > 8:
        raise FileError(f"{where}: expected a list of up to 8 scales, got {str(found)[:80]}")
    for scale in found:
        fits = isinstance(scale, dict) and {"element", "block", "layout"} <= scale.keys()
        if not fits or not _counts(scale["block"]) or not all(isinstance(scale[k], str) for k in ("element", "layout")):
            raise FileError(f"{where}: expected a scale's element, block and layout, got {str(scale)[:80]}")
    return [{k: scale[k] for k in ("element", "block", "layout")} for scale in found]


def _counts(value: Any) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= 8 and all(type(v) is int and 0 <= v < 1 << 48 for v in value)
