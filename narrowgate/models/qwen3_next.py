"""Qwen3-Next: mixture of experts, and input projections of the gated delta layers whose rows are grouped by key head.

The multi-token-prediction head is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from narrowgate.models.config import HybridConfig, read_hybrid
from narrowgate.models.hybrid import Builder, Slot, delta_shape
from narrowgate.nn.delta import GroupedProjection

SKIPPED = ("mtp.",)


def read_config(raw: Mapping[str, Any], where: str = "config.json") -> HybridConfig:
    """num_experts 0 is a dense model."""
    return read_hybrid(raw, where, moe=raw.get("num_experts") != 0, normalise=None)


def canonical(name: str) -> str | None:
    """The name as it is; None for parts that are skipped."""
    return None if name.startswith(SKIPPED) else name


def projections(c: HybridConfig, at: str) -> list[Slot]:
    s = delta_shape(c)
    return [
        Slot(at + "in_proj_qkvz.weight", (s.conv_channels + s.value_size, c.hidden_size), True),
        Slot(at + "in_proj_ba.weight", (2 * s.v_heads, c.hidden_size)),
    ]


def build_projection(build: Builder, at: str) -> nn.Module:
    return GroupedProjection(build.linear(at + "in_proj_qkvz"), build.linear(at + "in_proj_ba"), delta_shape(build.config))
