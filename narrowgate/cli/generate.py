"""`narrowgate generate`: text to stdout as it comes, figures to stderr."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from narrowgate.cli import console
from narrowgate.cli.machine import machine
from narrowgate.cli.options import Device, Json, ModelPath, Overrides, Strict, running
from narrowgate.errors import InputError

if TYPE_CHECKING:
    from narrowgate.engine import Model


def generate(
    model: ModelPath,
    prompt: Annotated[str, typer.Option("--prompt", help="The text to continue; - reads it from stdin.", show_default=False)],
    scheme: Annotated[
        str | None, typer.Option("--scheme", help="Quantize while loading; default: as the checkpoint is.")
    ] = None,
    override: Overrides = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Stop after so many.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Draw from so many of the most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="Draw from the fewest tokens that reach this share.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes drawing repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text; repeatable.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message, through the chat template.")] = False,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt before its continuation.")] = False,
    device: Device = "cpu",
    strict: Strict = False,
    json: Json = False,
) -> None:
    """Continue a text."""
    from narrowgate.engine import load

    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed,
        "stop": stop or (),
    }  # fmt: skip
    with running(device, strict):
        text = _read_stdin() if prompt == "-" else prompt
        began = time.perf_counter()
        loaded = load(model, scheme, overrides=override or [], device=device)
        seconds = {"load": time.perf_counter() - began}
        _notices(loaded)
        asked: Any = [{"role": "user", "content": text}] if chat else text
        pieces = _stream(loaded, asked, settings, seconds, shown=not json, before=text if echo and not json else "")
    if json:
        document = {
            "model": str(model), "scheme": loaded.scheme, "overrides": override or [], "prompt": text, "chat": chat,
            "settings": settings, "text": pieces, "seconds": seconds, "machine": machine(device),
        }  # fmt: skip
        console.print_json(document)


def _stream(
    model: Model, asked: Any, settings: dict[str, Any], seconds: dict[str, float], *, shown: bool, before: str
) -> str:  # fmt: skip
    pieces: list[str] = []
    began = time.perf_counter()
    stream = model.stream(asked, **settings)  # what can be refused is refused here, before anything is printed
    if before:
        print(before, end="", flush=True)
    for piece in stream:
        seconds.setdefault("first", time.perf_counter() - began)
        pieces.append(piece)
        if shown:
            print(piece, end="", flush=True)
    seconds["all"] = time.perf_counter() - began
    text = "".join(pieces)
    if shown:
        print(flush=True)
        print(_figures(model, text, seconds), file=sys.stderr)
    return text


def _figures(model: Model, text: str, seconds: dict[str, float]) -> str:
    """The tokens are counted by encoding the text again, hence "about"."""
    count = 0 if model.tokenizer is None else len(model.tokenizer.encode(text, special=False))
    later = seconds["all"] - seconds.get("first", seconds["all"])
    speed = f", {console.rate((count - 1) / later)} tokens/s after it" if count > 1 and later > 0 else ""
    first = f"first text after {seconds['first']:.2f} s" if "first" in seconds else "no text"
    return f"[about {count} tokens; load {seconds['load']:.2f} s, {first}{speed}]"


def _notices(model: Model) -> None:
    for note in model.notices:
        print(f"narrowgate: note: {note}", file=sys.stderr)


def _read_stdin() -> str:
    data = sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else sys.stdin.read().encode()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError("generate: expected UTF-8 on stdin") from None
