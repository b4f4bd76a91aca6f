"""The command line: one command a file, registered by one line of app.py. `main` is the console script."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit code: 0, 1 for a failure, 2 for a user's error, 130 for Ctrl-C."""
    from narrowgate.cli.app import run

    return run(argv)
