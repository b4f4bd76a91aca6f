"""JSON from a model folder: size-capped, always an object, errors in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from narrowgate.errors import FileError

MAX_JSON_BYTES = 1 << 26


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, as it is written: nothing is defaulted and nothing renamed."""
    try:
        size = path.stat().st_size
        if not path.is_file():  # a pipe or a device would be read for ever
            raise FileError(f"{path}: expected a file")
        if size > MAX_JSON_BYTES:
            raise FileError(f"{path}: expected at most {MAX_JSON_BYTES} bytes of JSON, got {size}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(f"{path}: no such file") from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not JSON: {' '.join(str(error).split())}") from None
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not isinstance(value, dict):
        raise FileError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
