"""Qwen3.5 and 3.6: dense and mixture-of-experts text models, alone or as the text part of a model that also sees.

The input projections of a gated delta layer are four matrices. Text-only files name their tensors `model.layers.`, whole
models `model.language_model.layers.`; the vision tower and the multi-token-prediction head are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from narrowgate.models.config import HybridConfig, read_hybrid
from narrowgate.models.hybrid import Builder, Slot, delta_shape
from narrowgate.nn.delta import SplitProjection

SKIPPED = ("mtp.", "model.visual.", "visual.")
_WRAPPER = "model.language_model."


def read_config(raw: Mapping[str, Any], where: str = "config.json") -> HybridConfig:
    """The router's weights are always normalised in this family."""
    return read_hybrid(raw, where, moe="moe" in str(raw["model_type"]), normalise=True)


def canonical(name: str) -> str | None:
    """The name of a tensor without the wrapper of a whole model; None for parts that are skipped."""
    if name.startswith(SKIPPED):
        return None
    return "model." + name.removeprefix(_WRAPPER) if name.startswith(_WRAPPER) else name


def projections(c: HybridConfig, at: str) -> list[Slot]:
    s = delta_shape(c)
    return [
        Slot(at + "in_proj_qkv.weight", (s.conv_channels, c.hidden_size), True),
        Slot(at + "in_proj_z.weight", (s.value_size, c.hidden_size), True),
        Slot(at + "in_proj_b.weight", (s.v_heads, c.hidden_size)),
        Slot(at + "in_proj_a.weight", (s.v_heads, c.hidden_size)),
    ]


def build_projection(build: Builder, at: str) -> nn.Module:
    return SplitProjection(*(build.linear(f"{at}in_proj_{name}") for name in ("qkv", "z", "b", "a")))
