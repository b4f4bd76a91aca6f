"""Which scheme each tensor gets: a default, and ordered exceptions of the form "pattern=scheme" (SPEC B39).

Patterns are shell-style and match a tensor's name with or without its leading "model." and its ending ".weight". The first
match wins. Left out: patterns from the environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from narrowgate.errors import InputError
from narrowgate.formats import schemes


@dataclass(frozen=True)
class SchemeChoice:
    """`default`: a scheme, or None to leave tensors as they are. `overrides`: (pattern, scheme), in order."""

    default: str | None
    overrides: tuple[tuple[str, str], ...] = ()

    def __call__(self, *modules: str) -> str | None:
        """The scheme of a tensor that goes by any of these names (a table that is both embedding and head has two)."""
        names = {spelling for module in modules for spelling in _spellings(module)}
        for pattern, scheme in self.overrides:
            if any(fnmatchcase(name, pattern) for name in names):
                return scheme
        return self.default

    def check_used(self, modules: Iterable[str]) -> None:
        """Raise InputError for a pattern that matches no tensor: most likely a slip of the pen."""
        names = {spelling for module in modules for spelling in _spellings(module)}
        for pattern, scheme in self.overrides:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise InputError(f"overrides: {pattern}={scheme}: expected to match a tensor that can be packed, got none")


def parse(scheme: str | None, overrides: str | Sequence[str] = ()) -> SchemeChoice:
    """Check names and patterns. Raises InputError for an unknown scheme, an empty pattern or a missing "=".

    >>> parse("mxfp4", ["lm_head=mxfp8_e4m3", "*.down_proj=bf16"])("model.layers.0.mlp.down_proj")
    'bf16'
    """
    if scheme is not None:
        _known(scheme, f"scheme {scheme!r}")
    pairs = []
    for item in [overrides] if isinstance(overrides, str) else overrides:
        if not isinstance(item, str) or "=" not in item:
            raise InputError(f"overrides: expected 'pattern=scheme', got {item!r}")
        pattern, _, name = (part.strip() for part in item.rpartition("="))
        if not pattern:
            raise InputError(f"overrides: expected a pattern before '=', got {item!r}")
        _known(name, f"overrides: {item!r}")
        pairs.append((pattern, name))
    return SchemeChoice(scheme, tuple(pairs))


def _known(name: str, where: str) -> None:
    if name not in schemes():
        raise InputError(f"{where}: expected one of the schemes {', '.join(schemes())}, got {name!r}")


def _spellings(module: str) -> set[str]:
    short = module.removeprefix("model.")
    return {module, short, module + ".weight", short + ".weight"}
