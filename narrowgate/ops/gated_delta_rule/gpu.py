"""The gated delta rule over whole sequences on the GPU: which kernel a form takes."""

from __future__ import annotations

from typing import Any

from narrowgate.ops.gated_delta_rule import gpu_chunk


def gated_delta_rule(*args: Any, form: str = "auto", **kwargs: Any) -> None:
    gpu_chunk.gated_delta_rule(*args, **kwargs)
