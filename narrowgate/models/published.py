"""Sizes of published models, as their config.json would say them: for benchmarks that need a geometry and no weights."""

from __future__ import annotations

from typing import Any

from narrowgate.errors import InputError

_QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "head_dim": 256, "rms_norm_eps": 1e-6, "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "tie_word_embeddings": False,
    "max_position_embeddings": 262144,
}  # fmt: skip
_MOE: dict[str, Any] = {"num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}


def _sizes(hidden: int, layers: int, attention: tuple[int, int], linear: tuple[int, int], **more: Any) -> dict[str, Any]:
    return {
        **_QWEN3_5, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": attention[0], "num_key_value_heads": attention[1],
        "linear_num_key_heads": linear[0], "linear_num_value_heads": linear[1], **more,
    }  # fmt: skip


PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": _sizes(1024, 24, (8, 2), (16, 16), intermediate_size=3584, tie_word_embeddings=True),
    "qwen3.5-4b": _sizes(2560, 32, (16, 4), (16, 32), intermediate_size=9216, tie_word_embeddings=True),
    "qwen3.5-27b": _sizes(5120, 64, (24, 4), (16, 48), intermediate_size=17408),
    "qwen3.5-35b-a3b": _sizes(2048, 40, (16, 2), (16, 32), model_type="qwen3_5_moe_text", num_experts=256, **_MOE),
    "qwen3-next-80b-a3b": _sizes(
        2048, 48, (16, 2), (16, 32), model_type="qwen3_next", vocab_size=151936, num_experts=512, **{**_MOE, "num_experts_per_tok": 10}
    ),
}  # fmt: skip


def published(name: str, layers: int | None = None) -> dict[str, Any]:
    """The raw config of a published geometry, `layers` of its layers. Raises InputError for a name that is not here.

    >>> published("qwen3.5-0.8b")["hidden_size"]
    1024
    """
    if name not in PUBLISHED:
        raise InputError(f"expected a geometry of {', '.join(PUBLISHED)}, got {name!r}")
    raw = PUBLISHED[name]
    if layers is not None and not 1 <= layers <= raw["num_hidden_layers"]:
        raise InputError(f"expected 1 to {raw['num_hidden_layers']} layers of {name}, got {layers}")
    return raw if layers is None else {**raw, "num_hidden_layers": layers}
