"""The text that a demo model has never seen: chosen modules of the running Python's own standard library.

A model folder may hold `held_out.json`, which names the modules that its training left out, in every Python version. The
text is read from the user's own installation, so none of it has to be shipped; it therefore differs a little between
Python versions, and whoever reports a score on it must report `sha256` and `python` too.

Left out: tokenizing and scoring (they live with the engine's other users of a model). No torch here."""

import hashlib
import json
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from narrowgate.errors import FileError

LIST_NAME = "held_out.json"


@dataclass(frozen=True)
class HeldOut:
    """The held-out documents, sorted by module name. `sha256` is of their UTF-8 bytes one after the other."""

    names: tuple[str, ...]
    documents: tuple[str, ...]
    sha256: str
    python: str

    @property
    def nbytes(self) -> int:
        """UTF-8 bytes of all documents: what bits per byte are divided by."""
        return sum(len(text.encode("utf-8")) for text in self.documents)


def held_out_modules(model_dir: str | Path) -> tuple[str, ...]:
    """The sorted dotted names listed under "modules" in `model_dir/held_out.json`.

    Raises FileError if the list is missing or is not a list of names.
    """
    path = Path(model_dir) / LIST_NAME
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["modules"]
    except OSError as error:
        raise FileError(f"held_out: expected a list of modules at {path}, got {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(f'held_out: expected a JSON object with "modules" in {path}, got {error!r}') from error
    if not isinstance(listed, list) or not listed or not all(isinstance(name, str) and name for name in listed):
        raise FileError(f'held_out: expected "modules" in {path} to be a list of module names, got {listed!r}')
    return tuple(sorted(set(listed)))


def module_path(name: str, stdlib: str | Path | None = None) -> Path:
    """The source file of module `name` under `stdlib` (default: the running Python's). Raises FileError if it is absent."""
    root = Path(stdlib if stdlib is not None else sysconfig.get_path("stdlib"))
    parts = name.split(".")
    for path in (root.joinpath(*parts).with_suffix(".py"), root.joinpath(*parts, "__init__.py")):
        if path.is_file():
            return path
    raise FileError(f"held_out: expected the source of module {name!r} under {root}, got no such file")


def read_module(path: Path) -> str:
    """The module's text, decoded as UTF-8, line ends made "\\n" (Python's Windows installer ships "\\r\\n")."""
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except OSError as error:
        raise FileError(f"held_out: expected to read {path}, got {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"held_out: expected UTF-8 in {path}, got {error}") from error


def held_out(model_dir: str | Path, stdlib: str | Path | None = None) -> HeldOut:
    """Read every module that `model_dir/held_out.json` lists from `stdlib` (default: the running Python's own).

    Raises FileError naming the first module that is missing or unreadable; imports none of them.

    >>> held_out("demo/model").names[0]  # doctest: +SKIP
    'asyncio.format_helpers'
    """
    names = held_out_modules(model_dir)
    documents = tuple(read_module(module_path(name, stdlib)) for name in names)
    digest = hashlib.sha256("".join(documents).encode("utf-8")).hexdigest()
    return HeldOut(names, documents, digest, platform.python_version())
