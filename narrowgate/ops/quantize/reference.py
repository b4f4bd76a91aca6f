"""quantize, to be read: the rules live in narrowgate.quantize, one function a family of schemes."""

from __future__ import annotations

from torch import Tensor

from narrowgate.quantize import quantize as by_rule


def quantize(
    x: Tensor, scheme: str, *, scale_rule: str | None = None, global_scale: Tensor | None = None, per_row: bool = False,
    layout: str | None = None, out: list[Tensor],
) -> None:  # fmt: skip
    outer = "per_row" if per_row else global_scale
    packed = by_rule(x, scheme, scale_rule=scale_rule, global_scale=outer, layout=layout)
    for into, made in zip(out, packed.tensors(), strict=True):
        into.copy_(made)
