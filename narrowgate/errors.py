"""Every way narrowgate says no, in one family.

A message says what was expected and what was got, after the public name of whoever complains: "linear: expected ..."."""


class NarrowgateError(Exception):
    """Anything narrowgate raises on purpose."""


class InputError(NarrowgateError, ValueError):
    """An argument is wrong: a shape, a dtype, a value, a name. Nothing has been written."""


class UnsupportedError(NarrowgateError, RuntimeError):
    """The call is legal, but no implementation that was allowed to run can take it."""


class FileError(NarrowgateError, OSError):
    """A file is missing, truncated, corrupt, or says something that we cannot read."""


class FallbackWarning(UserWarning):
    """The reference runs where a kernel was expected; said once per operator and reason."""
