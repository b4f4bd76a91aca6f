"""Compiling a kernel for one signature, once for a machine: our own use of Numba's cache.

A compiled kernel is kept under the user's cache directory in a folder of its own, named after everything that it was
made from: narrowgate's version, the sources of the SIMD layer and of the kernel's file, the versions of Numba and llvmlite,
the processor's name and features, the kernel's name and signature. A changed source or a moved home therefore cannot meet a
stale kernel, and since a folder holds one signature, processes that write at the same time write the same thing (Numba
replaces files atomically). Where the directory cannot be written, a temporary one serves for the life of the process, and
a log line says so. The first compilation of a kernel says what it is (logger "narrowgate", and `on_compile`)."""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import types
from numba.core import caching
from numba.core.registry import cpu_target

from narrowgate._version import __version__
from narrowgate.simd.cpu_features import require

LOG = logging.getLogger("narrowgate")
SPECIALISATIONS: dict[str, float] = {}  # every kernel that this process has compiled or loaded: name -> seconds it took
COMPILED: list[str] = []  # those of them that were compiled, not found in the cache
on_compile: list[Callable[[str], None]] = []  # called with a line of text before a compilation
tape: ContextVar[list[Any] | None] = ContextVar("narrowgate_tape", default=None)  # takes (entry point, arguments) of each call


def cache_directory() -> Path:
    """Where compiled kernels are kept; made if need be, and never inside the package."""
    return _directory()


@functools.cache
def _directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(base) / "narrowgate" / "kernels"
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
        return path
    except OSError as error:
        short = Path(tempfile.mkdtemp(prefix="narrowgate-kernels-"))
        LOG.warning("narrowgate: cannot keep compiled kernels in %s (%s); using %s for this process", path, error, short)
        return short


@functools.cache
def _sources(file: str) -> str:
    """A digest of the SIMD layer, of what reads packed codes, and of the kernel files of every folder beside the given one's:
    operators share the functions of each other's kernels."""
    digest, ours = hashlib.sha256(), Path(__file__).parent
    beside = {path for path in Path(file).parents[1].iterdir() if path.is_dir()}
    for folder in sorted({ours, ours.parent / "packing", Path(file).parent, *beside}):
        for path in sorted(folder.glob("*cpu*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


class _Locator(caching._CacheLocator):
    """Points at one folder; freshness is the folder's name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get_cache_path(self) -> str:
        return str(self.path)

    def get_source_stamp(self) -> str:
        return "named by content"

    def get_disambiguator(self) -> str:
        return "1"


class _Stored(caching.CompileResultCacheImpl):
    def __init__(self, name: str, path: Path) -> None:
        self._locator = _Locator(path)
        self._filename_base = name


class _Store(caching.FunctionCache):
    """Numba's function cache in a folder that we name."""

    def __init__(self, function: Callable[..., Any], path: Path) -> None:
        self._name, self._py_func = repr(function), function
        self._impl = _Stored(function.__name__, path)
        self._cache_path = str(path)
        self._cache_file = caching.IndexDataCacheFile(str(path), function.__name__, "named by content")
        self.enable()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # whatever reading a damaged file raises
            LOG.warning("narrowgate: a stored kernel cannot be read (%s: %s); compiling it again", type(error).__name__, error)
            for path in Path(self._cache_path).iterdir():
                path.unlink(missing_ok=True)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            LOG.warning("narrowgate: cannot keep a compiled kernel in %s: %s", self._cache_path, error)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return str(sig), codegen.magic_tuple()


def _folder(function: Callable[..., Any], signature: tuple[types.Type, ...]) -> Path:
    codegen = cpu_target.target_context.codegen()
    parts = (
        __version__, numba.__version__, llvmlite.__version__, sys.version_info[:2], codegen.magic_tuple(),
        _sources(inspect.getfile(function)), function.__module__, function.__qualname__, signature,
    )  # fmt: skip
    return cache_directory() / hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@functools.cache
def compiled(function: Callable[..., Any], signature: tuple[types.Type, ...], what: str) -> Callable[..., Any]:
    """The entry point of a kernel (a plain Python function) for one signature: called with positional arguments, and no
    type resolution. `what` names the specialisation in messages and counts."""
    require()
    start = time.perf_counter()
    name = f"{function.__name__}[{what}]" if what else function.__name__
    folder = _folder(function, signature)
    dispatcher = numba.njit(nogil=True, error_model="numpy")(function)
    if not folder.is_dir():
        line = f"compiling {name} (first use on this machine, kept in {folder.parent})"
        LOG.info("narrowgate: %s", line)
        for tell in on_compile:
            tell(line)
        COMPILED.append(name)
    dispatcher._cache = _Store(function, folder)
    dispatcher.compile(signature)
    SPECIALISATIONS[name] = time.perf_counter() - start
    entry = dispatcher.overloads[signature].entry_point

    def call(*arguments: Any) -> Any:
        calls = tape.get()
        if calls is not None:
            calls.append((entry, arguments))
        return entry(*arguments)

    return call
