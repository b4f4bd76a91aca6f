"""A Hugging Face model folder: its JSON as written, its tensors, its tokenizer, and which files travel with a copy.

config.json is read raw, never through a class that fills in defaults: a missing key must be seen as missing.
"""

from __future__ import annotations

import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

from narrowgate.errors import FileError
from narrowgate.io.checkpoint import Checkpoint
from narrowgate.io.json_file import read_json
from narrowgate.io.tokenizer import Tokenizer

COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "LICENSE",
    "LICENSE.txt", "NOTICE",
)  # fmt: skip


class ModelFolder:
    """`path`, `config` and `generation_config` (raw), `checkpoint`, `tokenizer` (None if there is no tokenizer.json)."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            what = "a file" if self.path.exists() else "nothing there"
            raise FileError(f"{self.path}: expected a model folder, got {what}")
        self.config = read_json(self.path / "config.json")

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.path)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        path = self.path / "generation_config.json"
        return read_json(path) if path.exists() else {}

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Which ids end a generation: generation_config.json first, then config.json; one id or a list."""
        inner = self.config.get("text_config") or {}
        for name, settings in (
            ("generation_config.json", self.generation_config),
            ("config.json", self.config),
            ("config.json", inner),
        ):
            found = settings.get("eos_token_id")
            if found is not None:
                ids = found if isinstance(found, list) else [found]
                if any(type(i) is not int for i in ids):
                    raise FileError(
                        f"{self.path / name}: eos_token_id: expected a token id or a list of them, got {str(found)[:80]}"
                    )
                return frozenset(ids)
        return frozenset()

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer(self.path) if (self.path / "tokenizer.json").exists() else None

    def copy_companions(self, target: Path) -> None:
        """Copy tokenizer, generation settings and licence into `target`; weights and config.json are the caller's."""
        for name in COMPANIONS:
            if (self.path / name).is_file():
                shutil.copyfile(self.path / name, target / name)
