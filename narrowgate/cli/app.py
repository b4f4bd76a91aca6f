"""The Typer application, and the one place where errors become a line on stderr and an exit code.

0: done. 2: the user can mend it (every NarrowgateError, and wrong usage): one line, no traceback. 1: a real failure (memory,
disk, a fault of ours, which alone shows its traceback). 130: Ctrl-C. 143: asked to end (SIGTERM), temporary files removed.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from narrowgate._version import __version__
from narrowgate.cli import bench, check
from narrowgate.cli.compare import compare
from narrowgate.cli.generate import generate
from narrowgate.cli.inspect import inspect
from narrowgate.cli.quantize import quantize
from narrowgate.cli.warmup import warmup
from narrowgate.errors import FallbackWarning, NarrowgateError

app = typer.Typer(
    name="narrowgate", add_completion=False, pretty_exceptions_enable=False,
    help="Hybrid language models from low-bit weights: what a format costs, in numbers that you can check.",
)  # fmt: skip
for command in (compare, quantize, generate, inspect, warmup):
    app.command()(command)
check.register(app)
app.add_typer(bench.app)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"narrowgate {__version__}")
        raise typer.Exit


@app.callback()
def narrowgate(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


def run(argv: Sequence[str] | None = None) -> int:
    """The command line `argv` (without the program's name; None: the process's own); gives the exit code."""
    _prepare_streams()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = app(args=None if argv is None else list(argv), prog_name="narrowgate", standalone_mode=False)
        sys.stdout.flush()
        return _say("interrupted", 130) if code == 130 else code if isinstance(code, int) else 0
    except NarrowgateError as error:
        return _say(error, 2)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except BrokenPipeError:
        return _reader_gone()
    except (MemoryError, OSError) as error:
        return _say(f"{type(error).__name__}: {error}", 1)
    except Exception as error:
        return _other(error)


def _other(error: Exception) -> int:
    """Typer's own errors are known by their form: it carries a copy of click since 0.29, and uses click before that."""
    if hasattr(error, "format_message"):
        return _say(f"{error.format_message()} (see narrowgate --help)", 2)
    if type(error).__name__ == "Abort":
        return _say("interrupted", 130)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, on a GPU
        return _say(f"{type(error).__name__}: {error}", 1)
    traceback.print_exc()
    return _say(f"a fault of narrowgate itself, please report it: {type(error).__name__}: {error}", 1)


def _say(message: object, code: int) -> int:
    print("narrowgate: " + " ".join(str(message).splitlines()), file=sys.stderr)
    return code


def _show_warning(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
    if issubclass(category, FallbackWarning):
        _say(f"note: {message}", 0)


def _reader_gone() -> int:
    """`narrowgate ... | head`: nobody reads any more. Python must not complain about it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _prepare_streams() -> None:
    """A terminal that cannot show a character gets a question mark, not a crash; SIGTERM unwinds like Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)


class Terminated(SystemExit):
    """Asked to end from outside. A kernel under test that leaves the process raises a plain SystemExit."""


def _terminate(number: int, frame: Any) -> None:
    _say("terminated", 0)
    raise Terminated(128 + number)
