"""Chat templates: a Jinja program from the model's folder that turns messages into a prompt, run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from narrowgate.errors import FileError, InputError
from narrowgate.io.tokenizer import Tokenizer


def render(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
    """The prompt for `messages` ({"role": ..., "content": ...}), ending where the assistant speaks next."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if tokenizer.chat_template is None:
        raise FileError("chat: expected a chat template in the model's folder, got none")
    listed = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
    if not listed or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise InputError("chat: expected a list of messages with a role and content, such as {'role': 'user', 'content': 'Hi'}")

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    values = {"add_generation_prompt": True, **tokenizer.special, **arguments}
    try:
        return environment.from_string(tokenizer.chat_template).render(messages=list(messages), **values)
    except TemplateError as error:
        raise InputError(f"chat: the chat template refused the messages: {' '.join(str(error).split())}") from None


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **rest: Any) -> str:
    """Plain JSON: the library's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **rest)
