"""quantize_grouped: activations of groups of rows (experts) to FP6 or E4M3 codes, with scales in the order that tensor cores read.

The two tensors that come back are the ones that a block-scaled grouped product takes, and no PackedTensor: its scales multiply,
while the global scale here is divided by, with one rounding (SPEC B32), and a PackedTensor stores integers only."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgate.dispatch import Kernel, Operator, checks_values
from narrowgate.errors import InputError
from narrowgate.formats.microscaling import BLOCK
from narrowgate.ops import checks
from narrowgate.ops.host import host_kernel
from narrowgate.packing.swizzle import padded_extents

_OP = "quantize_grouped"
FORMATS = {"mxfp6_e3m2": "e3m2", "mxfp6_e2m3": "e2m3", "mxfp8_e4m3": "e4m3", "e3m2": "e3m2", "e2m3": "e2m3", "e4m3": "e4m3"}
ACTIVATIONS = ("silu_mul", "relu2")


class GroupedCodes(NamedTuple):
    """codes: uint8 [R, 3C/4, G] ([R, C, G] for e4m3). scales: float8_e8m0fnu (32, 4, Rp/128, 4, Cp/4, G), a view of bytes."""

    codes: Tensor
    scales: Tensor


def _width(x: Tensor, activation: str | None) -> int:
    return x.shape[-1] // 2 if activation == "silu_mul" else x.shape[-1]


def _check(
    x: Tensor, row_counts: Tensor, fmt: str, *, global_scale: Tensor, activation: str | None = None, bf16_round: bool = False
) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        raise InputError(f"{_OP}: expected activation to be None or one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if fmt not in FORMATS.values():
        raise InputError(f"{_OP}: expected one of {', '.join(FORMATS)}, got {fmt!r}")
    checks.floats(_OP, x=x)
    checks.shape(_OP, "x", x, None, None, None)
    odd = activation == "silu_mul" and x.shape[-1] % 2
    checks.expect(_OP, not odd, f"expected x of shape [G, R, 2 * C] under silu_mul, got {list(x.shape)}")
    width = _width(x, activation)
    checks.expect(_OP, width % BLOCK == 0, f"cols must be divisible by 32, got {width}")
    checks.index(_OP, "row_counts", row_counts, x.shape[0])
    checks.dtype(_OP, "global_scale", global_scale, (torch.float32,))
    fits = global_scale.ndim == 1 and global_scale.numel() in (1, x.shape[0])
    checks.expect(_OP, fits, f"expected global_scale of 1 or {x.shape[0]} numbers, got shape {list(global_scale.shape)}")
    checks.device(_OP, x, row_counts=row_counts, global_scale=global_scale)


def _check_values(x: Tensor, row_counts: Tensor, fmt: str, **kwargs: Any) -> None:
    if checks_values(row_counts) and row_counts.numel():
        fits = int(row_counts.min()) >= 0 and int(row_counts.max()) <= x.shape[1]
        checks.expect(_OP, fits, f"expected row_counts of 0..{x.shape[1]}, got {row_counts.tolist()}")


def _allocate(
    x: Tensor, row_counts: Tensor, fmt: str, *, global_scale: Tensor, activation: str | None = None, bf16_round: bool = False
) -> tuple[Tensor, Tensor]:
    groups, rows, _ = x.shape
    width = _width(x, activation)
    stored = width if fmt == "e4m3" else width // 4 * 3
    codes = torch.empty(groups, rows, stored, dtype=torch.uint8, device=x.device)
    padded_rows, padded_cols = padded_extents(rows, width // BLOCK)
    tiles = (groups, padded_rows // 128, padded_cols // 4, 32, 4, 4)
    scales = torch.empty(tiles, dtype=torch.uint8, device=x.device).view(torch.float8_e8m0fnu)
    return codes.permute(1, 2, 0), scales.permute(3, 4, 1, 5, 2, 0)


def _flatten(
    x: Tensor, row_counts: Tensor, scheme: str, *, global_scale: float | Tensor, activation: str | None = None,
    bf16_round: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    if not isinstance(global_scale, Tensor):
        global_scale = torch.full((1,), float(global_scale), device=x.device)
    scale = global_scale.to(torch.float32).reshape(-1)
    kwargs = {"global_scale": scale, "activation": activation, "bf16_round": bf16_round}
    return (x, row_counts, FORMATS.get(scheme, str(scheme))), kwargs


_quantize_grouped = Operator(
    _OP, "Tensor x, Tensor row_counts, str fmt, *, Tensor global_scale, str? activation=None, bool bf16_round=False",
    "narrowgate.ops.quantize_grouped.reference:quantize_grouped",
    allocate=_allocate, check=_check, check_values=_check_values, returns=2, has_out=False, flatten=_flatten,
)  # fmt: skip
_quantize_grouped.add(host_kernel(f"narrowgate.ops.{_OP}.cpu:{_OP}"))
_quantize_grouped.add(Kernel("gpu", f"narrowgate.ops.{_OP}.gpu:{_OP}"))


def quantize_grouped(
    x: Tensor, row_counts: Tensor, scheme: str, *, global_scale: float | Tensor, activation: str | None = None,
    bf16_round: bool = False, impl: str | None = None,
) -> GroupedCodes:  # fmt: skip
    """The first row_counts[g] rows of each group in blocks of 32 columns; every other row is zero codes and zero scale bytes.

    byte = exponent of f32(f32(amax * gs) / max), rounded up; m = f32(gs * 2^(127 - byte)); code = nearest(f32(v * m)).

    x: [G, R, C] float32, bfloat16 or float16, rows may be strided. row_counts: int32 or int64 [G], 0..R; rows beyond are
    never read. scheme: "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8_e4m3" (or "e3m2", ...). global_scale gs: a number, [1] or [G];
    0 gives zeros. activation: "silu_mul" (x [G, R, 2C]: silu(gate) * up) or "relu2", computed in float32 and rounded to
    x's dtype, the same bits as the operator of that name before this one. bf16_round: through bfloat16 before encoding.
    Returns (codes uint8 [R, 3C/4, G], four codes in three bytes, or [R, C, G] for E4M3; scales float8_e8m0fnu
    (32, 4, ceil(R/128), 4, ceil(C/128), G), padding zero). Byte 0 means a ZERO block here. Both are views with one group's
    bytes contiguous; narrowgate.quantize.dequantize_microscaling takes codes[:, :, g] and scales[..., g:g+1] back.
    Raises InputError: "cols must be divisible by 32, got C", counts out of range, and on the CPU a value that is not finite or
    amax * gs that overflows; a GPU saturates, and marks a block with a NaN by byte 255. Source: SPEC B16-B29.

    >>> from narrowgate.quantize import dequantize_microscaling
    >>> x = (torch.arange(64.0) / 4 - 4).view(1, 2, 32)
    >>> codes, scales = quantize_grouped(x, torch.tensor([1]), "mxfp6_e2m3", global_scale=1.0)
    >>> dequantize_microscaling(codes[:, :, 0], scales[..., 0:1], 32, 1.0, "e2m3")[:, :3]
    tensor([[-4.0000, -3.7500, -3.5000],
            [ 0.0000,  0.0000,  0.0000]])
    """
    args, kwargs = _flatten(x, row_counts, scheme, global_scale=global_scale, activation=activation, bf16_round=bf16_round)
    return GroupedCodes(*_quantize_grouped(*args, **kwargs, impl=impl))
