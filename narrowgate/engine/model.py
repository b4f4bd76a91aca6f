"""`Model`: a loaded model, to be asked for logits, stepped, generated from, inspected and saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgate.dispatch import Plan, plan
from narrowgate.engine import chat, generate, graph, recording
from narrowgate.engine.binding import Source
from narrowgate.engine.cache import Cache
from narrowgate.engine.generate import Completion
from narrowgate.engine.overrides import SchemeChoice
from narrowgate.engine.sampling import Sampling
from narrowgate.errors import InputError
from narrowgate.io.folder import ModelFolder
from narrowgate.models.config import HybridConfig
from narrowgate.nn.batch import ragged
from narrowgate.nn.decoder import Decoder
from narrowgate.nn.weight import Weight
from narrowgate.packing import PackedTensor

_DENSE_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Bound:
    """A tensor of the model: where it came from and the weight that holds it."""

    source: Source
    weight: Weight


@dataclass(frozen=True)
class TensorReport:
    """One tensor: its name without ".weight", its scheme ("bf16", "f16", "f32" where it is dense), what it costs."""

    name: str
    scheme: str
    packed: bool
    packable: bool
    shape: tuple[int, ...]
    nbytes: int

    @property
    def bits_per_value(self) -> float:
        """Every stored byte over the number of values."""
        return 8 * self.nbytes / max(1, torch.Size(self.shape).numel())


class Model:
    """Made by `narrowgate.load`.

    Attributes: `path`, `config` (sizes), `raw_config` (config.json as written), `tokenizer` (or None), `scheme` (the default,
    or None), `dtype` (of the activations), `device`, `notices` (what the folder holds beside the model), `eos_ids`, `decoder`
    (the module). `report()` lists every tensor, `packed_tensors()` the packed ones, `plan(name)` what one would run.
    """

    def __init__(
        self, folder: ModelFolder, config: HybridConfig, decoder: Decoder, bound: Mapping[str, Bound], choice: SchemeChoice,
        dtype: torch.dtype, device: torch.device, notices: tuple[str, ...],
    ) -> None:  # fmt: skip
        self._folder, self._bound = folder, dict(bound)
        self.path, self.raw_config, self.tokenizer = folder.path, folder.config, folder.tokenizer
        self.config, self.decoder, self.dtype, self.device, self.notices = config, decoder, dtype, device, notices
        self.scheme, self.overrides = choice.default, choice.overrides
        self.eos_ids = folder.eos_ids

    # ---- running
    def logits(self, token_ids: Tensor | Sequence[Any], *, last_only: bool = False) -> Tensor:
        """token_ids [T] or [B, T] -> logits float32 [T, vocab] or [B, T, vocab]; with last_only [vocab] or [B, vocab]."""
        ids = self._ids(token_ids, "logits")
        if ids.ndim not in (1, 2):
            raise InputError(f"logits: expected token_ids of shape [T] or [B, T], got {list(ids.shape)}")
        rows = ids if ids.ndim == 2 else ids[None]
        batch, length = rows.shape
        cache = self.new_cache(batch)
        found = self.advance(rows.reshape(-1), cache, [length] * batch, range(batch), last_only=last_only)
        found = found if last_only else found.view(batch, length, self.config.vocab_size)
        return found if ids.ndim == 2 else found[0]

    def new_cache(self, batch: int = 1, *, capacity: int = 0) -> Cache:
        """Empty states for `batch` sequences. capacity: tokens of a sequence that there is room for from the beginning; a cache
        grows beyond it, but on a GPU the decoding step is captured again each time it does."""
        if type(batch) is not int or batch < 1:
            raise InputError(f"new_cache: expected a batch of at least 1, got {batch!r}")
        if type(capacity) is not int or capacity < 0:
            raise InputError(f"new_cache: expected a capacity of at least 0, got {capacity!r}")
        pooled = self.device.type == "cuda"
        cache = Cache(batch, self.decoder.new_states(batch, self.dtype, self.device, pooled=pooled))
        cache.reserve(capacity)
        return cache

    def step(
        self, token_ids: Tensor | Sequence[Any], cache: Cache, cu_seqlens: Tensor | Sequence[int] | None = None, *,
        last_only: bool = False,
    ) -> Tensor:  # fmt: skip
        """Feed new tokens of every sequence of the cache, one or many each; the cache advances.

        token_ids: [batch, T]; or flat [T] with cu_seqlens [batch + 1], sequence i being rows cu_seqlens[i] to
        cu_seqlens[i+1] (none is allowed); or [T] for a cache of one sequence. Returns float32 logits [..., vocab] in
        token_ids' shape; with last_only [batch, vocab], of each sequence's last token.
        """
        ids = self._ids(token_ids, "step")
        lengths = _lengths(ids, cache.batch, cu_seqlens)
        found = self.advance(ids.reshape(-1), cache, lengths, range(cache.batch), last_only=last_only)
        return found if last_only else found.view(*ids.shape, self.config.vocab_size)

    @torch.no_grad()
    def advance(
        self, ids: Tensor, cache: Cache, lengths: Sequence[int], slots: Sequence[int], *, last_only: bool
    ) -> Tensor:  # fmt: skip
        """`step` for some of the cache's sequences: ids flat, lengths[i] tokens for the sequence in slots[i]."""
        ids = self._ids(ids, "step")
        past = [cache.lengths[slot] for slot in slots]
        if last_only and 0 in lengths:
            raise InputError("step: expected every sequence to bring a token for last_only, got an empty one")
        cache.reserve(max((n + p for n, p in zip(lengths, past, strict=True)), default=0))
        one_each = bool(lengths) and all(n == 1 for n in lengths)
        if one_each and self.device.type == "cuda":
            logits = graph.step(self.decoder, ids, slots, past, cache)
        else:
            batch = ragged(lengths, slots, past, self.decoder.frequencies)
            if one_each and self.device.type == "cpu":
                logits = recording.step(self.decoder, ids, batch, cache)
            else:
                rows = batch.cu_seqlens[1:].long() - 1 if last_only else None
                logits = self.decoder(ids.to(self.device), batch, cache.states, rows)
        for slot, length in zip(slots, lengths, strict=True):
            cache.lengths[slot] += length
        return logits

    def _ids(self, token_ids: Tensor | Sequence[Any], who: str) -> Tensor:
        try:
            ids = torch.as_tensor(token_ids)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"{who}: expected token_ids as whole numbers in equal rows, got {str(token_ids)[:80]}") from None
        if ids.numel() == 0:
            ids = ids.long()
        if ids.dtype not in (torch.int32, torch.int64):
            raise InputError(f"{who}: expected token_ids of dtype int32 or int64, got {str(ids.dtype).removeprefix('torch.')}")
        if ids.numel() and ids.device.type == "cpu" and not 0 <= int(ids.min()) <= int(ids.max()) < self.config.vocab_size:
            bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise InputError(f"{who}: expected token ids in [0, {self.config.vocab_size}), got {bad}")
        return ids.long()

    # ---- text
    def generate(
        self, prompt: str | Sequence[str], *, max_new_tokens: int = 64, temperature: float = 0.0, top_k: int | None = None,
        top_p: float | None = None, seed: int | None = None, stop: str | Sequence[str] = (), return_logprobs: bool = False,
    ) -> Any:  # fmt: skip
        """Continue a text, or several at once: the completion as str, or a list of them; the prompt is not repeated.

        temperature 0 is greedy, equal logits going to the lower id. seed: each prompt has a generator of its own that
        starts from it, so a batch gives what single runs give. It ends at the model's end-of-text ids, at a stop string
        (which is removed, and may span tokens), or after max_new_tokens. return_logprobs: Completion objects instead of
        text, with token ids, their log probabilities and why it ended.
        """
        stops = generate.check(max_new_tokens, stop)
        sampling = Sampling(temperature, top_k, top_p, seed)
        if not isinstance(prompt, (str, list, tuple)):
            raise InputError(f"generate: expected text or a list of texts, got {type(prompt).__name__}")
        ids = [self._encode(text) for text in ([prompt] if isinstance(prompt, str) else prompt)]
        done = generate.run(
            self, ids, sampling, max_new_tokens=max_new_tokens, stops=stops, logprobs=return_logprobs
        )  # fmt: skip
        found: list[Any] = list(done) if return_logprobs else [c.text for c in done]
        return found[0] if isinstance(prompt, str) else found

    def complete(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int = 64, temperature: float = 0.0,
        top_k: int | None = None, top_p: float | None = None, seed: int | None = None, stop: str | Sequence[str] = (),
        return_logprobs: bool = False,
    ) -> list[Completion]:  # fmt: skip
        """`generate` for prompts that are token ids already; it needs no tokenizer (the texts are empty without one)."""
        stops = generate.check(max_new_tokens, stop)
        sampling = Sampling(temperature, top_k, top_p, seed)
        ids = [self._ids(p, "complete").tolist() for p in prompts]
        return generate.run(self, ids, sampling, max_new_tokens=max_new_tokens, stops=stops, logprobs=return_logprobs)

    def stream(
        self, prompt: str | Sequence[Message], *, max_new_tokens: int = 64, temperature: float = 0.0,
        top_k: int | None = None, top_p: float | None = None, seed: int | None = None, stop: str | Sequence[str] = (),
    ) -> Iterator[str]:  # fmt: skip
        """The completion of a text, or of a chat's messages, piece by piece: whole characters, joined equal to `generate`."""
        stops = generate.check(max_new_tokens, stop)
        sampling = Sampling(temperature, top_k, top_p, seed)
        ids = self._encode(prompt) if isinstance(prompt, str) else self._encode_chat(prompt, {})
        return generate.stream(self, ids, sampling, max_new_tokens=max_new_tokens, stops=stops)

    def chat(
        self, messages: Sequence[Message], *, max_new_tokens: int = 64, temperature: float = 0.0, top_k: int | None = None,
        top_p: float | None = None, seed: int | None = None, stop: str | Sequence[str] = (),
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str:  # fmt: skip
        """The assistant's answer to messages [{"role": "user", "content": ...}, ...], through the folder's chat template."""
        ids = self._encode_chat(messages, template_arguments or {})
        return self.complete(
            [ids], max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop
        )[0].text  # fmt: skip

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise InputError("generate: text needs a tokenizer.json, and the model's folder has none")
        if not isinstance(text, str):
            raise InputError(f"generate: expected text, got {type(text).__name__}")
        ids = self.tokenizer.encode(text)
        if not ids:
            raise InputError("generate: expected a prompt of at least one token, got an empty one")
        return ids

    def _encode_chat(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> list[int]:
        if self.tokenizer is None:
            raise InputError("chat: needs a tokenizer.json, and the model's folder has none")
        return self.tokenizer.encode(chat.render(self.tokenizer, messages, **arguments), special=False)

    # ---- looking inside, and saving
    def report(self) -> list[TensorReport]:
        """Every tensor, in the order of the stack. A table that is both embedding and head is there once."""
        found = []
        for bound in self._bound.values():
            weight, slot = bound.weight, bound.source.slot
            scheme = weight.scheme or _DENSE_NAMES[weight.dtype]  # type: ignore[index]
            found.append(TensorReport(slot.module, scheme, weight.packed, slot.packable, slot.shape, weight.nbytes))
        return found

    def packed_tensors(self) -> dict[str, PackedTensor]:
        """The packed tensors by name, in the layouts that files use."""
        values = {b.source.slot.module: b.weight.stored() for b in self._bound.values() if b.weight.packed}
        return {name: value for name, value in values.items() if isinstance(value, PackedTensor)}

    def plan(self, name: str, tokens: int = 1) -> Plan:
        """What a product of `tokens` activations with the tensor `name` would run."""
        by_name = {bound.source.slot.module: bound for bound in self._bound.values()}
        if name not in by_name or len(by_name[name].source.slot.shape) < 2:
            raise InputError(f"plan: expected the name of a matrix of this model, got {name!r}")
        shape, w = by_name[name].source.slot.shape, by_name[name].weight()
        x = torch.empty(tokens, shape[-1], dtype=self.dtype, device=self.device)
        if len(shape) == 3:
            sizes = torch.zeros(shape[0], dtype=torch.int32, device=self.device)
            return plan("grouped_linear", x, w, sizes)
        return plan("linear", x, w)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, every scale counted."""
        return sum(bound.weight.nbytes for bound in self._bound.values())

    def save(self, path: str | Path) -> None:
        """Write the model as it is held: packed tensors packed, dense ones with the checkpoint's bits and names.

        `path` must be new or empty; it appears whole or not at all. Raises FileError.
        """
        from narrowgate.engine.save import save

        save(path, self._folder, list(self._bound.values()), self.scheme)

    def __repr__(self) -> str:
        c = self.config
        return (
            f"Model({c.model_type}, {c.layers} layers, scheme={self.scheme}, {self.nbytes} bytes, {self.dtype}, {self.device})"
        )


def _lengths(ids: Tensor, batch: int, cu_seqlens: Tensor | Sequence[int] | None) -> list[int]:
    if cu_seqlens is None:
        if ids.ndim == 2 and ids.shape[0] == batch:
            return [ids.shape[1]] * batch
        if ids.ndim == 1 and batch == 1:
            return [ids.shape[0]]
        raise InputError(f"step: expected token_ids [{batch}, T], or flat with cu_seqlens, got shape {list(ids.shape)}")
    edges = torch.as_tensor(cu_seqlens).tolist()
    if ids.ndim != 1 or not isinstance(edges, list) or len(edges) != batch + 1:
        raise InputError(
            f"step: expected flat token_ids and cu_seqlens of {batch + 1} numbers, got {list(ids.shape)} and {edges}"
        )
    lengths = [b - a for a, b in pairwise(edges)]
    if edges[0] != 0 or edges[-1] != ids.shape[0] or any(type(n) is not int or n < 0 for n in lengths):
        raise InputError(f"step: expected cu_seqlens rising from 0 to {ids.shape[0]}, got {edges}")
    return lengths
