"""Planted faults of the grouped quantizer, and of activations quantized for a product."""

from __future__ import annotations

from dataclasses import replace

import torch
from planted import fault

from narrowgate.ops import relu2, silu_mul
from narrowgate.ops.linear.activations import quantize_rows

OP = "quantize_grouped"


def _swizzled(scales, change):
    """The scale bytes as row-major [G, rows, columns] with `change` applied, back in their own order."""
    at = scales.contiguous().view(torch.uint8)
    plain = at.permute(5, 2, 1, 0, 4, 3)  # G, row tile, row // 32 % 4, row % 32, column tile, column % 4
    shape = plain.shape
    changed = change(plain.reshape(shape[0], -1, shape[4] * 4)).reshape(shape)
    return changed.permute(3, 2, 1, 5, 4, 0).contiguous().view(torch.float8_e8m0fnu)


@fault(OP, "rows beyond quantized")
def _(honest, x, row_counts, scheme, **options):
    return honest(x.nan_to_num(1.0, 1.0, 1.0), torch.full_like(row_counts, x.shape[1]), scheme, **options)


@fault(OP, "the first group's global scale for all")
def _(honest, x, row_counts, scheme, *, global_scale, **options):
    first = global_scale.reshape(-1)[:1] if isinstance(global_scale, torch.Tensor) else global_scale
    return honest(x, row_counts, scheme, global_scale=first, **options)


@fault(OP, "scales row-major")
def _(honest, x, row_counts, scheme, **options):
    codes, scales = honest(x, row_counts, scheme, **options)
    plain = []
    _swizzled(scales, lambda rows: plain.append(rows) or rows)
    return codes, plain[0].reshape(scales.shape).contiguous().view(torch.float8_e8m0fnu)


@fault(OP, "columns of scales one tile off")
def _(honest, x, row_counts, scheme, **options):
    codes, scales = honest(x, row_counts, scheme, **options)
    return codes, _swizzled(scales, lambda rows: rows.roll(4, -1))


@fault(OP, "zero blocks have byte 127")
def _(honest, x, row_counts, scheme, **options):
    codes, scales = honest(x, row_counts, scheme, **options)
    at = scales.contiguous().view(torch.uint8)
    return codes, torch.where(at == 0, 127, at).to(torch.uint8).view(torch.float8_e8m0fnu)


@fault(OP, "bytes cast, not viewed")
def _(honest, x, row_counts, scheme, **options):
    codes, scales = honest(x, row_counts, scheme, **options)
    return codes, scales.contiguous().view(torch.uint8).float().clamp(min=2.0**-127).to(torch.float8_e8m0fnu)


@fault(OP, "never through bfloat16")
def _(honest, x, row_counts, scheme, *, bf16_round=False, **options):
    return honest(x, row_counts, scheme, **options)


@fault(OP, "always through bfloat16")
def _(honest, x, row_counts, scheme, *, bf16_round=False, **options):
    return honest(x, row_counts, scheme, bf16_round=True, **options)


@fault(OP, "codes big-endian")
def _(honest, x, row_counts, scheme, **options):
    codes, scales = honest(x, row_counts, scheme, **options)
    return (codes if "e4m3" in scheme else codes.unflatten(1, (-1, 3)).flip(2).flatten(1, 2)), scales


@fault(OP, "the activation not rounded to x's dtype")
def _(honest, x, row_counts, scheme, *, activation=None, **options):
    wide = x if activation is None else {"silu_mul": silu_mul, "relu2": relu2}[activation](x.float())
    return honest(wide, row_counts, scheme, **options)


@fault(OP, "gate and up swapped")
def _(honest, x, row_counts, scheme, *, activation=None, **options):
    swapped = torch.cat(x.chunk(2, -1)[::-1], -1) if activation == "silu_mul" else x
    return honest(swapped, row_counts, scheme, activation=activation, **options)


# ---- activations quantized for a product


@fault("linear", "NaN as zero")
def _(honest, x, w, bias=None, **options):
    return honest(x.nan_to_num(0.0) if isinstance(x, torch.Tensor) else x, w, bias, **options)


@fault("linear", "activations exact under an input scheme")
def _(honest, x, w, bias=None, *, input_scheme=None, **options):
    return honest(x, w, bias, **options)


@fault("linear", "the row's factor rounded with the sum")
def _(honest, x, w, bias=None, *, input_scheme=None, **options):
    if input_scheme is None or not input_scheme.endswith("_row"):
        return honest(x, w, bias, input_scheme=input_scheme, **options)
    packed, factor = quantize_rows(x, input_scheme)
    total = honest(packed, w, **{**options, "out_dtype": torch.bfloat16}).float() * factor.float()
    return (total if bias is None else total + bias).to(options.get("out_dtype") or x.dtype)


@fault("linear", "byte 0 as a zero block")
def _(honest, x, w, bias=None, **options):
    return honest(*(_zeroed(t) for t in (x, w)), bias, **options)


@fault("matmul", "byte 0 as a zero block")
def _(honest, a, b, **options):
    return honest(_zeroed(a), _zeroed(b), **options)


def _zeroed(t):
    if isinstance(t, torch.Tensor) or not any(s.element == "float8_e8m0fnu" for s in t.scales):
        return t
    return replace(t, scales=tuple(replace(s, element="ue8m0_zero") if s.element == "float8_e8m0fnu" else s for s in t.scales))
