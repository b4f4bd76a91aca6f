"""What a format costs, part one: bits per byte of text, and the distance from a reference model.

The protocol, the same as lab/demo_model's. Each document is encoded alone, after the start token (what the tokenizer puts
before every text; else `<|endoftext|>`, its beginning or its end token if it has one). Windows of `context` tokens do not
overlap: window j reads tokens [c j, c (j + 1)) and predicts tokens [c j + 1, c (j + 1) + 1), so every token of the document
is predicted once, and the start token never. Bits per byte = the sum of -log2 p over all predicted tokens, divided by the
UTF-8 bytes of the text. Several windows may go through the model together; their states do not meet.

KL is that of the candidate from the reference, mean over tokens of sum_i p_i (ln p_i - ln q_i), in nats, over the whole
vocabulary, p being the reference. One model is in memory at a time: the reference's logits wait in a temporary file, which
has no name and so is gone when the process is. Left out: memory for a whole text's logits, and timing (measure.py)."""

from __future__ import annotations

import hashlib
import math
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from narrowgate.engine.model import Model
from narrowgate.errors import FileError, InputError

CONTEXT = 2048
_FORWARD_TOKENS = 2048  # tokens of one forward pass
_LOGIT_BYTES = 1 << 27  # float32 logits of one forward pass
_BLOCK = 1 << 22  # values that are in float64 at a time


# ---- the text
@dataclass(frozen=True)
class Passage:
    """The text to score. `total_bytes`: of the text that it was cut from. `sha256`: of the scored documents, one after the
    other, in UTF-8. `python`: the version whose standard library it is, None for a file."""

    origin: str
    names: tuple[str, ...]
    documents: tuple[str, ...]
    total_bytes: int
    python: str | None = None

    @property
    def nbytes(self) -> int:
        return sum(len(text.encode("utf-8")) for text in self.documents)

    @property
    def sha256(self) -> str:
        return hashlib.sha256("".join(self.documents).encode("utf-8")).hexdigest()


def file_passage(path: str | Path, max_bytes: int = 0) -> Passage:
    """A text file as one document, its first `max_bytes` at most (0: all). Raises FileError if it is no UTF-8 text."""
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path}: expected text in UTF-8, got byte 0x{error.object[error.start]:02x} at {error.start}"
        ) from None
    if not text:
        raise FileError(f"{path}: expected some text, got an empty file")
    return _passage(str(path), (path.name,), (text,), max_bytes, None)


def held_out_passage(model: str | Path, max_bytes: int = 0) -> Passage:
    """The modules of the running Python's standard library that the model's held_out.json lists."""
    from narrowgate.engine.held_out import held_out

    text = held_out(model)
    return _passage(
        "held-out modules of the standard library", text.names, text.documents, max_bytes, platform.python_version()
    )


def _passage(origin: str, names: Sequence[str], texts: Sequence[str], max_bytes: int, python: str | None) -> Passage:
    sizes = [len(text.encode("utf-8")) for text in texts]
    if max_bytes < 0:
        raise InputError(f"evaluate: expected max_bytes >= 0 (0: everything), got {max_bytes}")
    share = _share(sizes, max_bytes) if max_bytes else max(sizes)
    return Passage(origin, tuple(names), tuple(_cut(text, share) for text in texts), sum(sizes), python)


def _share(sizes: Sequence[int], total: int) -> int:
    """The most bytes that each document may give so that together they give at most `total`."""
    left, share = total, 0
    for i, size in enumerate(sorted(sizes)):
        share = left // (len(sizes) - i)
        if size > share:
            return share
        left -= size
    return max(sizes)


def _cut(text: str, most: int) -> str:
    """The first `most` bytes at most, up to the end of a line where there is one."""
    data = text.encode("utf-8")
    if len(data) <= most:
        return text
    kept = data[:most].decode("utf-8", errors="ignore")
    return kept[: kept.rfind("\n") + 1] or kept


# ---- tokens and windows
@dataclass(frozen=True)
class Window:
    """`inputs` are read, `targets` predicted: one each."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """The windows of a passage for one tokenizer. `scored_bytes`: what bits are divided by, the passage's bytes, less the
    first token of each document where the tokenizer has no start token to predict it from."""

    windows: tuple[Window, ...]
    scored_bytes: int
    context: int
    start: str | None

    @property
    def tokens(self) -> int:
        return sum(len(window.targets) for window in self.windows)


def task(model: Model, passage: Passage, context: int | None = None) -> Task:
    """Encode the documents. context None: CONTEXT, or the model's own limit if that is less."""
    if model.tokenizer is None:
        raise InputError(f"evaluate: {model.path} has no tokenizer.json, and bits per byte need one")
    limit = min(CONTEXT, model.config.max_positions or CONTEXT) if context is None else context
    if limit < 1:
        raise InputError(f"evaluate: expected a context of at least one token, got {context}")
    start = start_tokens(model.tokenizer)
    windows: list[Window] = []
    scored = passage.nbytes
    for text in passage.documents:
        plain = model.tokenizer.encode(text, special=False)
        if not start and plain:
            scored -= len(model.tokenizer.decode(plain[:1], skip_special=False).encode("utf-8"))
        windows += _windows([*start, *plain], max(len(start), 1), limit)
    if not windows or scored < 1:
        raise InputError("evaluate: expected a text of at least two tokens to score")
    name = model.tokenizer.decode(start, skip_special=False) if start else None
    return Task(tuple(windows), scored, limit, name)


def start_tokens(tokenizer: Any) -> list[int]:
    """The ids before every document: what the tokenizer itself puts there, else one end-of-text token, else none."""
    full, plain = tokenizer.encode("a"), tokenizer.encode("a", special=False)
    for at in range(len(full) - len(plain) + 1):
        if at and full[at : at + len(plain)] == plain:
            return full[:at]
    for text in ("<|endoftext|>", tokenizer.special.get("bos_token"), tokenizer.special.get("eos_token")):
        ids = tokenizer.encode(text, special=False) if text else []
        if len(ids) == 1:
            return list(ids)
    return []


def _windows(ids: Sequence[int], first: int, context: int) -> list[Window]:
    """Every token from position `first` on is predicted once; of several start tokens the last one is read."""
    skipped = ids[first - 1 :]
    starts = range(0, len(skipped) - 1, context)
    return [
        Window(tuple(skipped[i : i + context][: len(skipped) - 1 - i]), tuple(skipped[i + 1 : i + context + 1])) for i in starts
    ]


def logits(model: Model, windows: Sequence[Window]) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits float32 [n, vocab], targets [n]), both on the model's device, for all targets in order, in pieces."""
    most = max(1, min(_FORWARD_TOKENS, _LOGIT_BYTES // (4 * model.config.vocab_size)))
    for group in _groups(windows, most):
        ids = torch.tensor([token for window in group for token in window.inputs])
        targets = torch.tensor([token for window in group for token in window.targets], device=model.device)
        cache = model.new_cache(len(group))
        if len(group) > 1:
            edges = torch.tensor([0, *(len(window.inputs) for window in group)]).cumsum(0)
            yield model.step(ids, cache, edges), targets
        else:
            for piece, wanted in zip(ids.split(most), targets.split(most), strict=True):
                yield model.step(piece, cache), wanted


def _groups(windows: Sequence[Window], most: int) -> Iterator[list[Window]]:
    """Windows in order, together as long as they have at most `most` tokens; a longer one is alone."""
    group: list[Window] = []
    for window in windows:
        if group and sum(len(w.inputs) for w in group) + len(window.inputs) > most:
            yield group
            group = []
        group.append(window)
    if group:
        yield group


# ---- scores
class Reference:
    """The reference's logits on disk, float32, read back in the order in which they were written, however they are cut."""

    def __init__(self, tokens: int, vocab: int) -> None:
        self.nbytes, self._vocab = 4 * tokens * vocab, vocab
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        if self.nbytes > free:
            raise FileError(
                f"evaluate: the reference's logits need {self.nbytes:,} bytes in {folder}, which has {free:,} free: "
                "score fewer bytes, or set TMPDIR to another folder"
            )
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by __exit__)

    def write(self, rows: Tensor) -> None:
        self._file.write(rows.detach().float().cpu().contiguous().numpy().tobytes())

    def rewind(self) -> None:
        self._file.seek(0)

    def read(self, rows: int) -> Tensor:
        data = self._file.read(4 * rows * self._vocab)
        if len(data) != 4 * rows * self._vocab:
            raise InputError("evaluate: the reference has fewer tokens than the candidate")
        return torch.frombuffer(bytearray(data), dtype=torch.float32).view(rows, self._vocab)

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


@dataclass(frozen=True)
class Score:
    """bits: the sum of -log2 p. kl: mean, nats. top1: the share of tokens where both models put the same token first."""

    tokens: int
    bits: float
    bits_per_byte: float
    kl: float
    top1: float


@torch.no_grad()
def score(
    model: Model, work: Task, reference: Reference | None = None, *, write: bool = False,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Score:  # fmt: skip
    """Score a model. With `write` it is the reference: its logits go to `reference` and it is compared with itself.

    progress(n) is called after each n tokens. Raises InputError for logits that are not finite.
    """
    if reference is not None:
        reference.rewind()
    nats = kl = 0.0
    same = 0
    for found, targets in logits(model, work.windows):
        rows = max(1, _BLOCK // found.shape[-1])
        for block, wanted in zip(found.split(rows), targets.split(rows), strict=True):
            q = block.double().log_softmax(dim=-1)
            nats -= float(q.gather(1, wanted[:, None]).sum())
            if write and reference is not None:
                reference.write(block)
            elif reference is not None:
                known = reference.read(len(block)).to(block.device)
                p = known.double().log_softmax(dim=-1)
                kl += float((p.exp() * (p - q)).sum())
                same += int((known.argmax(dim=-1) == block.argmax(dim=-1)).sum())
        progress(len(targets))
    if not math.isfinite(nats):
        raise InputError(f"evaluate: {model.path}, scheme {model.scheme}: the logits are not finite, so there is no score")
    n, bits = work.tokens, nats / math.log(2)
    if reference is None:
        return Score(n, bits, bits / work.scored_bytes, math.nan, math.nan)
    return Score(n, bits, bits / work.scored_bytes, kl / n, 1.0 if write else same / n)
