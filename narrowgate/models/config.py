"""The numbers of a hybrid model, read from raw JSON: what is missing is an error, never a silent default.

Only what the published files themselves leave out has a default here. Two spellings are read: `rope_parameters` with
`dtype`, and the older top-level `rope_theta`, `partial_rotary_factor`, `rope_scaling` with `torch_dtype`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from narrowgate.errors import FileError

MAX_LAYERS = 4096
MAX_EXTENT = 1 << 32
LINEAR, FULL = "linear_attention", "full_attention"
_ROPE_TYPES = (None, "default", "mrope")  # mrope has three position rows, which are one for text


@dataclass(frozen=True)
class MoEConfig:
    """`experts` experts of width `intermediate`, `top_k` a token, and a shared one; `normalise`: a token's weights sum to 1."""

    experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int
    normalise: bool


@dataclass(frozen=True)
class HybridConfig:
    """Sizes of a stack of gated delta layers and gated attention layers. `moe_layers[i]`: whether layer i has experts."""

    model_type: str
    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    attention_bias: bool
    rope_theta: float
    rotary_dim: int
    norm_eps: float
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int
    intermediate_size: int
    tied: bool
    dtype: str | None
    moe: MoEConfig | None
    moe_layers: tuple[bool, ...]
    max_positions: int | None

    @property
    def layers(self) -> int:
        return len(self.layer_types)


class Raw:
    """Typed reads of a raw JSON object, with errors that name the key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.values.get(key, default)
        if value is None:
            raise FileError(f"{self.where}: missing key {key!r}")
        if type(value) is not int or not least <= value < MAX_EXTENT:
            raise FileError(f"{self.where}: {key}: expected a whole number of at least {least}, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if value is None:
            raise FileError(f"{self.where}: missing key {key!r}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise FileError(f"{self.where}: {key}: expected a positive number, got {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise FileError(f"{self.where}: {key}: expected true or false, got {value!r}")
        return value

    def expect(self, key: str, *allowed: object) -> None:
        """The key is absent or has one of the allowed values."""
        if key in self.values and self.values[key] not in allowed:
            raise FileError(f"{self.where}: {key}: expected {' or '.join(repr(a) for a in allowed)}, got {self.values[key]!r}")


def read_hybrid(raw: Mapping[str, Any], where: str, *, moe: bool, normalise: bool | None) -> HybridConfig:
    """The part that the families share. `normalise`: None reads norm_topk_prob."""
    outer = Raw(raw, where)
    inner = raw.get("text_config", raw)
    if not isinstance(inner, dict):
        raise FileError(f"{where}: text_config: expected an object, got {type(inner).__name__}")
    text = Raw(inner, where)
    text.expect("hidden_act", "silu")
    text.expect("attn_output_gate", True)
    tied = (outer if "tie_word_embeddings" in raw else text).flag("tie_word_embeddings", False)
    layer_types = _layer_types(text)
    head_dim = text.count("head_dim")
    theta, rotary_dim = _rope(text, head_dim)
    experts = _moe(text, normalise) if moe else None
    moe_layers = _moe_layers(text, len(layer_types)) if experts else (False,) * len(layer_types)
    config = HybridConfig(
        model_type=str(raw["model_type"]), vocab_size=text.count("vocab_size"), hidden_size=text.count("hidden_size"),
        layer_types=layer_types, heads=text.count("num_attention_heads"), kv_heads=text.count("num_key_value_heads"),
        head_dim=head_dim, attention_bias=text.flag("attention_bias", False), rope_theta=theta, rotary_dim=rotary_dim,
        norm_eps=text.number("rms_norm_eps", 1e-6), k_heads=text.count("linear_num_key_heads"),
        v_heads=text.count("linear_num_value_heads"), k_dim=text.count("linear_key_head_dim"),
        v_dim=text.count("linear_value_head_dim"), conv_width=text.count("linear_conv_kernel_dim", least=2),
        intermediate_size=0 if all(moe_layers) else text.count("intermediate_size"), tied=tied,
        dtype=inner.get("dtype") or inner.get("torch_dtype") or raw.get("dtype") or raw.get("torch_dtype"),
        moe=experts, moe_layers=moe_layers, max_positions=inner.get("max_position_embeddings"),
    )  # fmt: skip
    for many, few in (("heads", "kv_heads"), ("v_heads", "k_heads")):
        if getattr(config, many) % getattr(config, few):
            raise FileError(
                f"{where}: expected {many} divisible by {few}, got {getattr(config, many)} and {getattr(config, few)}"
            )
    return config


def _layer_types(text: Raw) -> tuple[str, ...]:
    layers = text.count("num_hidden_layers")
    if layers > MAX_LAYERS:
        raise FileError(f"{text.where}: num_hidden_layers: expected at most {MAX_LAYERS}, got {layers}")
    given = text.values.get("layer_types")
    if given is None:
        interval = text.count("full_attention_interval", 4)
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers))
    if not isinstance(given, list) or len(given) != layers or any(t not in (LINEAR, FULL) for t in given):
        raise FileError(f"{text.where}: layer_types: expected {layers} of {LINEAR!r} or {FULL!r}, got {str(given)[:80]}")
    return tuple(given)


def _rope(text: Raw, head_dim: int) -> tuple[float, int]:
    rope = text.values.get("rope_parameters")
    scaling = text.values.get("rope_scaling") if rope is None else rope
    if not isinstance(scaling, (dict, type(None))):
        raise FileError(f"{text.where}: rope_parameters: expected an object, got {type(scaling).__name__}")
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type"))
    if kind not in _ROPE_TYPES:
        raise FileError(f"{text.where}: rope_type: expected 'default', got {kind!r}")
    merged = Raw({**text.values, **(scaling or {})}, text.where)
    share = merged.number("partial_rotary_factor", 0.25)
    rotary_dim = int(head_dim * share)
    if share > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise FileError(f"{text.where}: expected an even rotary part of head_dim {head_dim}, got {rotary_dim} of it ({share})")
    return merged.number("rope_theta"), rotary_dim


def _moe(text: Raw, normalise: bool | None) -> MoEConfig:
    moe = MoEConfig(
        text.count("num_experts"), text.count("num_experts_per_tok"), text.count("moe_intermediate_size"),
        text.count("shared_expert_intermediate_size"),
        text.flag("norm_topk_prob", True) if normalise is None else normalise,
    )  # fmt: skip
    if moe.top_k > moe.experts or moe.experts > 1 << 16:
        raise FileError(f"{text.where}: expected {moe.top_k} of at most 65536 experts, got {moe.experts} experts")
    return moe


def _moe_layers(text: Raw, layers: int) -> tuple[bool, ...]:
    step, dense = text.count("decoder_sparse_step", 1), text.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise FileError(f"{text.where}: mlp_only_layers: expected a list of layers, got {str(dense)[:80]}")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
