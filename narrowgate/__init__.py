"""narrowgate: hybrid language models from low-bit weights, with numbers that you can check."""

from narrowgate import ops
from narrowgate._version import __version__
from narrowgate.dispatch import Plan, debug_checks, plan, strict
from narrowgate.errors import FallbackWarning, FileError, InputError, NarrowgateError, UnsupportedError

__all__ = [
    "__version__",
    "FallbackWarning",
    "FileError",
    "InputError",
    "NarrowgateError",
    "Plan",
    "UnsupportedError",
    "debug_checks",
    "ops",
    "plan",
    "strict",
]
