"""Model families, one file each: which config keys, which checkpoint names, which tensors are never packed, which modules."""

from __future__ import annotations

import importlib
from typing import Any

from narrowgate.errors import FileError

_FAMILIES = {
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "qwen3_next": "qwen3_next",
}


def family(config: dict[str, Any], where: str = "config.json") -> Any:
    """The module of the family that a raw config belongs to. Raises FileError for a model_type that we do not know.

    A family module has `read_config(raw, where)`, `canonical(name)`, `projections` and `build_projection`.
    """
    model_type = config.get("model_type")
    name = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if name is None:
        raise FileError(f"{where}: expected model_type to be one of {', '.join(_FAMILIES)}, got {model_type!r}")
    return importlib.import_module(f"narrowgate.models.{name}")
