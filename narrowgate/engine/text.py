"""From token ids to text as it grows: whole characters only, and never past a stop string.

A token may end inside a character, and a stop string may begin in one token and end in another. So text is held back as
long as its last character is unfinished, or as its end may still become a stop.
"""

from __future__ import annotations

from collections.abc import Sequence

from narrowgate.io.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"


class TextStream:
    """`push(id)` gives the text that is certain by now, `finish()` the rest. `stopped`: the stop string that came, or None.

    The pieces joined are the decoded ids, cut before the stop string that is complete first; the stop itself is not part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._ids: list[int] = []
        self._start = 0  # decoding starts here: one group of whole characters back, for tokenizers that look at what was before
        self._read = 0  # ids before this one are text already
        self._held = ""
        self.stopped: str | None = None

    def push(self, token: int) -> str:
        self._ids.append(token)
        return self._release(self._fresh(final=False), final=False)

    def finish(self) -> str:
        return self._release(self._fresh(final=True), final=True)

    def _fresh(self, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._read])
        now = self._tokenizer.decode(self._ids[self._start :])
        if not final and (now.endswith(_UNFINISHED) or len(now) <= len(before)):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def _release(self, fresh: str, final: bool) -> str:
        if self.stopped is not None:
            return ""
        text = self._held + fresh
        found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:  # the first to be complete, and of those the longest: however the text was cut into tokens
            end, _, self.stopped = min(found)
            self._held = ""
            return text[: end - len(self.stopped)]
        keep = 0 if final else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
