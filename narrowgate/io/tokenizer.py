"""tokenizer.json through the `tokenizers` library, and the chat template that lies beside it.

Text goes in and out; which ids end a generation is generation_config's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from narrowgate.errors import FileError, InputError
from narrowgate.io.json_file import read_json


class Tokenizer:
    """`encode(text)`, `decode(ids)`, `special` (bos_token, eos_token, ... as strings), `chat_template` (or None)."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Rust

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileError(f"{path}: expected a file")
        try:
            self._rust = Rust.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise FileError(f"{path}: not a tokenizer: {' '.join(str(error).split())}") from None
        self._rust.no_truncation()
        self._rust.no_padding()
        settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
        self.special = _special_tokens(settings)
        self.chat_template = _chat_template(folder, settings)

    @property
    def vocab_size(self) -> int:
        """How many ids it can give, added tokens counted."""
        return int(self._rust.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of `text`. `special` lets the tokenizer add the tokens that it puts round every text (often none)."""
        if not isinstance(text, str):
            raise InputError(f"encode: expected text, got {type(text).__name__}")
        try:
            return list(self._rust.encode(text, add_special_tokens=special).ids)
        except (TypeError, UnicodeError):
            raise InputError("encode: expected text that is valid Unicode, got lone surrogates") from None

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that form no character yet come out as U+FFFD."""
        return str(self._rust.decode(list(ids), skip_special_tokens=skip_special))


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in settings.items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[key] = text
    return found


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja first, then the key in tokenizer_config.json: a text, or a list of which "default" is taken."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise FileError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
