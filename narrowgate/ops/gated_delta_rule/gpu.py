"""The gated delta rule over whole sequences on the GPU: which kernel a form takes. "auto" is the chunk form."""

from __future__ import annotations

from typing import Any

from narrowgate.ops.gated_delta_rule import gpu_chunk, gpu_sequence


def gated_delta_rule(*args: Any, form: str = "auto", **kwargs: Any) -> None:
    take = gpu_sequence.recurrent if form == "recurrent" else gpu_chunk.gated_delta_rule
    take(*args, **kwargs)
