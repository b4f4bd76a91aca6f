"""Planted faults of the packed operators: wrong bits, wrong scales, wrong roundings."""

from __future__ import annotations

from dataclasses import replace

import torch
from planted import fault, give

from narrowgate.formats import element
from narrowgate.ops import dequantize
from narrowgate.packing import PackedTensor, Scale, pack

WIDE = {"int2": "uint2", "int4": "uint4", "int8": "uint8"}


def recoded(w, codes=None, name=None, scales=None):
    """The same tensor with other codes, read as another element, or under other scales."""
    table = None if w.codebook is None else w.codebook_values()
    return pack(
        w.codes() if codes is None else codes, name or w.element, scales=w.scales if scales is None else scales,
        zero_points=w.zero_points, offset=w.offset, codebook=table, layout=w.layout,
    )  # fmt: skip


def high_field_first(w):
    flat = w.codes().reshape(-1)
    even = flat[: len(flat) // 2 * 2].view(-1, 2).flip(1).reshape(-1)
    return recoded(w, torch.cat([even, flat[len(even) :]]).view(w.shape))


def zero_extended(w):
    return recoded(w, name=WIDE.get(w.element))


def signed_nibble(w):
    return recoded(w, name="int4") if w.element == "float4_e2m1fn" else w


def signed_index(w):
    if w.codebook is None or w.element != "index8":
        return w
    codes = w.codes().to(torch.int64)
    return recoded(w, torch.where(codes > 127, 0, codes))


def one_bias(w):
    """E2M3 read with E3M2's bias, so four times too small, and the other way round."""
    other = {"float6_e3m2fn": 4.0, "float6_e2m3fn": 0.25}.get(w.element)
    if other is None:
        return w
    factor = Scale.from_values(torch.full((1,) * len(w.shape), other), "float32", w.shape)
    return replace(w, scales=(factor, *w.scales))


def rescaled(w, change):
    """Every scale's codes changed by `change(codes)`, which keeps their shape."""

    def one(scale):
        codes = scale.codes(w.shape)
        return Scale.from_codes(change(codes), scale.element, scale.block, scale.layout)

    return replace(w, scales=tuple(one(s) for s in w.scales))


def axes_swapped(codes):
    return codes.t().reshape(codes.shape) if codes.ndim == 2 else codes


def one_for_all(codes):
    return codes.reshape(-1)[:1].expand(codes.numel()).reshape(codes.shape).contiguous() if codes.numel() else codes


def block_behind(codes):
    return codes.roll(1, -1)


READINGS = {
    "high field first": high_field_first, "zero-extended": zero_extended, "signed nibble": signed_nibble,
    "signed index": signed_index, "one bias for both": one_bias,
    "scale axes swapped": lambda w: rescaled(w, axes_swapped), "one scale for all": lambda w: rescaled(w, one_for_all),
    "scale of the block before": lambda w: rescaled(w, block_behind),
    "outer scale omitted": lambda w: replace(w, scales=w.scales[:1]),
    "outer scale twice": lambda w: replace(w, scales=(*w.scales, w.scales[-1])) if len(w.scales) > 1 else w,
    "zero point ignored": lambda w: replace(w, zero_points=None), "offset ignored": lambda w: replace(w, offset=()),
}  # fmt: skip
HAVE = {  # which readings an operator's tensors can show
    "dequantize": [*READINGS],
    "embedding": ["high field first", "scale of the block before", "one scale for all", "zero point ignored", "offset ignored"],
    "linear": ["high field first", "zero-extended", "signed nibble", "one scale for all", "scale of the block before"],
    "matmul": ["high field first", "zero-extended", "signed nibble", "scale axes swapped", "one scale for all",
               "scale of the block before", "outer scale omitted", "outer scale twice"],
    "grouped_linear": ["high field first", "zero-extended", "one scale for all", "scale of the block before"],
}  # fmt: skip


def _misread(change):
    def wrong(honest, **arguments):
        misread = {name: change(value) if isinstance(value, PackedTensor) else value for name, value in arguments.items()}
        return honest(**misread)

    return wrong


for _op, _names in HAVE.items():
    for _name in _names:
        fault(_op, _name)(_misread(READINGS[_name]))


# ---- roundings


def spread(scale, shape):
    values = scale.values(shape).double()
    for axis, block in enumerate(scale.block):
        values = values.repeat_interleave(min(block, shape[axis]), axis).narrow(axis, 0, shape[axis])
    return values


def exact(w):
    """In float64, to be rounded once: what fused multiplies and adds come to."""
    values = (
        w.codebook_values().double()[w.codes().long()]
        if w.codebook is not None
        else element(w.element).decode(w.codes()).double()
    )
    if w.zero_points is not None:
        values = values - spread(w.zero_points, w.shape)
    for scale in w.scales:
        values = values * spread(scale, w.shape)
    if w.offset:
        added = torch.ones_like(values)
        for scale in w.offset:
            added = added * spread(scale, w.shape)
        values = values + added
    return values


@fault("dequantize", "rounded once from float64")
def _(honest, w, *, dtype=torch.float32, out=None):
    return give(exact(w).to(dtype), out)


@fault("dequantize", "through bfloat16")
def _(honest, w, *, dtype=torch.float32, out=None):
    return give(honest(w).bfloat16().to(dtype), out)


@fault("dequantize", "through float16")
def _(honest, w, *, dtype=torch.float32, out=None):
    return give(honest(w).half().to(dtype), out)


@fault("dequantize", "float32 subnormals flushed")
def _(honest, w, *, dtype=torch.float32, out=None):
    y = honest(w)
    return give(torch.where(y.abs() < 2.0**-126, 0.0, y).to(dtype), out)


@fault("dequantize", "float16 subnormals flushed")
def _(honest, w, *, dtype=torch.float32, out=None):
    y = honest(w, dtype=dtype)
    return give(torch.where(y.abs() < 2.0**-14, 0.0, y) if dtype == torch.float16 else y, out)


@fault("dequantize", "the sign of zero lost")
def _(honest, w, *, dtype=torch.float32, out=None):
    return give(honest(w, dtype=dtype) + 0.0, out)


@fault("dequantize", "a NaN becomes zero")
def _(honest, w, *, dtype=torch.float32, out=None):
    return give(honest(w, dtype=dtype).nan_to_num(0.0, float("inf"), -float("inf")), out)


@fault("dequantize", "scales multiplied first")
def _(honest, w, *, dtype=torch.float32, out=None):
    if len(w.scales) < 2:
        return honest(w, dtype=dtype, **({} if out is None else {"out": out}))
    both = spread(w.scales[0], w.shape).float() * spread(w.scales[1], w.shape).float()
    folded = replace(w, scales=(Scale.from_values(both, "float32", (1,) * len(w.shape)),))
    return give(honest(folded, dtype=dtype), out)


@fault("embedding", "fused multiply-add")
def _(honest, ids, table, *, dtype=torch.float32, out=None):
    return give((exact(table).float()[ids.long()] + 0.0).to(dtype), out)


@fault("embedding", "the add of +0.0 left out")
def _(honest, ids, table, *, dtype=torch.float32, out=None):
    return give(dequantize(table, dtype=dtype)[ids.long()], out)


@fault("embedding", "the row before")
def _(honest, ids, table, *, dtype=torch.float32, out=None):
    return give(honest((ids - 1).clamp(min=0), table, dtype=dtype), out)


@fault("embedding", "an id clamped, not refused")
def _(honest, ids, table, *, dtype=torch.float32, out=None):
    return give(honest(ids.clamp(0, table.shape[0] - 1), table, dtype=dtype), out)


# ---- products


def _dense(w, dtype=torch.float32):
    return w.dequantize(dtype).float() if isinstance(w, PackedTensor) else w.to(dtype).float()


@fault("linear", "weights through bfloat16")
def _(honest, x, w, bias=None, **options):
    return honest(x, _dense(w, torch.bfloat16) if isinstance(w, PackedTensor) else w, bias, **options)


@fault("linear", "bias after the rounding")
def _(honest, x, w, bias=None, **options):
    y = honest(x, w, **options)
    return y if bias is None else (y + bias).to(y.dtype)


@fault("linear", "bias forgotten where there is nothing to sum")
def _(honest, x, w, bias=None, **options):
    return honest(x, w, bias if x.shape[-1] else None, **options)


@fault("linear", "sums in bfloat16")
def _(honest, x, w, bias=None, **options):
    y = honest(x, w, **options).bfloat16().to(x.dtype)
    return y if bias is None else (y.float() + bias.float()).to(y.dtype)


@fault("matmul", "decoded through float16")
def _(honest, a, b, **options):
    a, b = (_dense(t, torch.float16) if isinstance(t, PackedTensor) else t for t in (a, b))
    return honest(a, b, **options)


@fault("matmul", "activations through bfloat16")
def _(honest, a, b, **options):
    a, b = (t if isinstance(t, PackedTensor) else t.bfloat16().float() for t in (a, b))
    return honest(a, b, **options)


@fault("matmul", "k reversed on one side")
def _(honest, a, b, **options):
    return honest(_dense(a).flip(1), _dense(b), **options)


@fault("matmul", "the last k left out")
def _(honest, a, b, **options):
    return honest(_dense(a)[:, :-1], _dense(b)[:-1], **options)


@fault("grouped_linear", "the last expert for all")
def _(honest, x, w, group_sizes, **options):
    total = int(group_sizes.sum())
    sizes = torch.zeros_like(group_sizes)
    sizes[-1] = total
    return honest(x, w, sizes, **options)


@fault("grouped_linear", "rows past the last group computed")
def _(honest, x, w, group_sizes, **options):
    sizes = group_sizes.clone()
    sizes[-1] += x.shape[0] - int(sizes.sum())
    return honest(x, w, sizes, **options)


@fault("grouped_linear", "empty groups take a row")
def _(honest, x, w, group_sizes, **options):
    sizes = group_sizes.clamp(min=1)
    return (
        honest(x[: int(sizes.sum())], w, sizes, **options)
        if int(sizes.sum()) <= x.shape[0]
        else honest(x, w, group_sizes, **options)
    )


# ---- quantizing


def _requantized(honest, change, x, scheme, **options):
    w = honest(x, scheme, **options)
    return change(w, x)


@fault("quantize", "ties away from zero")
def _(honest, x, scheme, **options):
    def change(w, x):
        if w.element != "float4_e2m1fn":
            return w
        ratio = x.double() / spread_all(w)
        table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        middle = (table[1:] + table[:-1]) / 2
        codes = torch.bucketize(ratio.abs().nan_to_num(0.0), middle, right=True)
        return recoded(w, codes | torch.where(torch.signbit(x), 8, 0))

    return _requantized(honest, change, x, scheme, **options)


def spread_all(w):
    product = torch.ones(w.shape, dtype=torch.float64)
    for scale in w.scales:
        product = product * spread(scale, w.shape)
    return product


@fault("quantize", "floor for rceil")
def _(honest, x, scheme, *, scale_rule=None, **options):
    return honest(x, scheme, scale_rule="floor" if scheme.startswith("mx") else scale_rule, **options)


@fault("quantize", "rceil for floor")
def _(honest, x, scheme, *, scale_rule=None, **options):
    return honest(x, scheme, scale_rule=None if scheme.startswith("mx") else scale_rule, **options)


@fault("quantize", "high field first")
def _(honest, x, scheme, **options):
    return high_field_first(honest(x, scheme, **options))


@fault("quantize", "a zero block has scale byte 127")
def _(honest, x, scheme, **options):
    w = honest(x, scheme, **options)
    return rescaled(w, lambda codes: torch.where(codes == 0, 127, codes)) if scheme.startswith("mx") else w


@fault("quantize", "the sign of zero lost")
def _(honest, x, scheme, **options):
    return honest(x + 0.0, scheme, **options)


@fault("quantize", "scale rounded to nearest")
def _(honest, x, scheme, **options):
    w = honest(x, scheme, **options)
    if scheme != "int4_g32":
        return w
    s = (x.abs().amax(-1, keepdim=True) / 7).bfloat16()
    codes = (x / s.float()).round().clamp(-7, 7).to(torch.int64) & 15
    return pack(codes, "int4", scales=(Scale.from_codes(s.view(torch.int16), "bfloat16", (1, 32)),))


@fault("quantize", "small blocks vanish")
def _(honest, x, scheme, *, scale_rule=None, **options):
    return honest(x, scheme, scale_rule="nearest" if scheme == "nvfp4" else scale_rule, **options)


@fault("quantize", "NaN quantized in silence")
def _(honest, x, scheme, **options):
    return honest(x.nan_to_num(0.0, 0.0, 0.0), scheme, **options)
