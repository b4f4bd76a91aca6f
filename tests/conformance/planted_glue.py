"""Planted faults of norms, gates, elementwise steps, splits and moved rows."""

from __future__ import annotations

import torch
from planted import fault, give


def _norm(x, reduce, eps, after=False):
    x = x.double()
    square = reduce(x.square(), -1, keepdim=True)
    return x / (square.sqrt() + eps) if after else x / (square + eps).sqrt()


@fault("l2_norm", "mean for sum")
def _(honest, x, *, eps=1e-6, out=None):
    return give(_norm(x, torch.mean, eps).to(x.dtype), out)


@fault("l2_norm", "eps after the root")
def _(honest, x, *, eps=1e-6, out=None):
    return give(_norm(x, torch.sum, eps, after=True).to(x.dtype), out)


@fault("l2_norm", "max(norm, eps)")
def _(honest, x, *, eps=1e-6, out=None):
    return give((x.double() / x.double().norm(dim=-1, keepdim=True).clamp(min=eps)).to(x.dtype), out)


@fault(["l2_norm", "rms_norm"], "rounded through bfloat16")
def _(honest, x, *args, out=None, **options):
    return give(honest(x, *args, **options).bfloat16().to(x.dtype), out)


@fault("l2_norm", "squares in bfloat16")
def _(honest, x, *, eps=1e-6, out=None):
    square = (x * x).bfloat16().double().sum(-1, keepdim=True)
    return give((x.double() / (square + eps).sqrt()).to(x.dtype), out)


@fault("rms_norm", "sum for mean")
def _(honest, x, weight=None, *, eps, weight_bias=0.0, out=None):
    y = _norm(x, torch.sum, eps) * (1.0 if weight is None else weight.double() + weight_bias)
    return give(y.to(x.dtype), out)


@fault("rms_norm", "1 + w always")
def _(honest, x, weight=None, *, eps, weight_bias=0.0, out=None):
    return give(honest(x, weight, eps=eps, weight_bias=1.0), out)


@fault("rms_norm", "weight_bias ignored")
def _(honest, x, weight=None, *, eps, weight_bias=0.0, out=None):
    return give(honest(x, weight, eps=eps), out)


@fault("rms_norm", "no weight")
def _(honest, x, weight=None, *, eps, weight_bias=0.0, out=None):
    return give(honest(x, eps=eps), out)


@fault("rms_norm", "eps after the root")
def _(honest, x, weight=None, *, eps, weight_bias=0.0, out=None):
    y = _norm(x, torch.mean, eps, after=True) * (1.0 if weight is None else weight.double() + weight_bias)
    return give(y.to(x.dtype), out)


@fault("rms_norm_gated", "gate then norm")
def _(honest, x, gate, weight, *, eps, activation="silu", out=None):
    z = gate.double().reshape(x.shape)
    act = z * torch.sigmoid(z) if activation == "silu" else torch.sigmoid(z)
    return give((_norm(x.double() * act, torch.mean, eps) * weight.double()).to(x.dtype), out)


@fault("rms_norm_gated", "sigmoid for silu")
def _(honest, x, gate, weight, *, eps, activation="silu", out=None):
    return give(honest(x, gate, weight, eps=eps, activation="sigmoid"), out)


@fault("rms_norm_gated", "silu for sigmoid")
def _(honest, x, gate, weight, *, eps, activation="silu", out=None):
    return give(honest(x, gate, weight, eps=eps), out)


@fault("rms_norm_gated", "a padded gate read as if it were contiguous")
def _(honest, x, gate, weight, *, eps, activation="silu", out=None):
    flat = gate.as_strided(gate.shape, torch.empty(gate.shape, device="meta").stride())
    return give(honest(x, flat, weight, eps=eps, activation=activation), out)


@fault("rms_norm_gated", "sum for mean")
def _(honest, x, gate, weight, *, eps, activation="silu", out=None):
    y = honest(x, gate, weight, eps=eps, activation=activation)
    return give(y / x.shape[-1] ** 0.5, out)


# ---- gates


def _softplus(x):
    return torch.log1p(torch.exp(x))


@fault("gdn_decay", "softplus without its branch")
def _(honest, alpha, dt_bias, neg_a):
    return (_softplus(alpha.float() + dt_bias.float()) * neg_a.float()).float()


@fault("gdn_decay", "exp once more")
def _(honest, alpha, dt_bias, neg_a):
    return honest(alpha, dt_bias, -neg_a.float().exp())


@fault("gdn_decay", "positive")
def _(honest, alpha, dt_bias, neg_a):
    return -honest(alpha, dt_bias, neg_a)


@fault("gdn_decay", "no dt_bias")
def _(honest, alpha, dt_bias, neg_a):
    return honest(alpha, torch.zeros_like(dt_bias), neg_a)


@fault("gdn_gate", "beta rounded through b's type")
def _(honest, a, b, A_log, dt_bias):
    g, beta = honest(a, b, A_log, dt_bias)
    return g, beta.to(b.dtype).float()


@fault("gdn_gate", "softplus without its branch")
def _(honest, a, b, A_log, dt_bias):
    return -A_log.float().exp() * _softplus(a.float() + dt_bias.float()), honest(a, b, A_log, dt_bias)[1]


@fault("gdn_gate", "a and b exchanged")
def _(honest, a, b, A_log, dt_bias):
    return honest(b, a, A_log, dt_bias)


@fault("gdn_gate", "A_log not raised")
def _(honest, a, b, A_log, dt_bias):
    g, beta = honest(a, b, torch.zeros_like(A_log), dt_bias)
    return g * -A_log.float(), beta


@fault("gdn_gate", "gates read as if they were contiguous")
def _(honest, a, b, A_log, dt_bias):
    flat = [t.as_strided(t.shape, (t.shape[1], 1)) for t in (a, b)]
    return honest(*flat, A_log, dt_bias)


@fault("gdn_gate", "x rounded through a's type")
def _(honest, a, b, A_log, dt_bias):
    return honest((a.float() + dt_bias.float()).to(a.dtype), b, A_log, torch.zeros_like(dt_bias))


# ---- split and what follows the convolution


@fault("split_qkv", "v first")
def _(honest, mixed, *, num_k_heads, head_k_dim, head_v_dim):
    keys = 2 * num_k_heads * head_k_dim
    turned = torch.cat([mixed[:, mixed.shape[1] - keys :], mixed[:, : mixed.shape[1] - keys]], 1)
    return honest(turned, num_k_heads=num_k_heads, head_k_dim=head_k_dim, head_v_dim=head_v_dim)


@fault(["split_qkv", "gdn_post_conv"], "q and k exchanged")
def _(honest, **arguments):
    q, k, *rest = honest(**arguments)
    return (k, q, *rest)


@fault("split_qkv", "rounded through bfloat16")
def _(honest, mixed, **sizes):
    return tuple(t.bfloat16().to(mixed.dtype) for t in honest(mixed, **sizes))


@fault("split_qkv", "heads interleaved")
def _(honest, mixed, **sizes):
    q, k, v = honest(mixed, **sizes)
    return q.flatten(1).view(q.shape[0], q.shape[2], q.shape[1]).transpose(1, 2).contiguous(), k, v


@fault("gdn_post_conv", "q not normalized")
def _(honest, conv_out, a, b, A_log, dt_bias, *, num_k_heads, head_k_dim, head_v_dim, eps=1e-6):
    _, *rest = honest(
        conv_out, a, b, A_log, dt_bias, num_k_heads=num_k_heads, head_k_dim=head_k_dim, head_v_dim=head_v_dim, eps=eps
    )
    q = conv_out[:, : num_k_heads * head_k_dim].unflatten(1, (num_k_heads, head_k_dim)).clone()
    return (q, *rest)


@fault("gdn_post_conv", "v normalized too")
def _(honest, **arguments):
    q, k, v, g, beta = honest(**arguments)
    return q, k, (v.double() / (v.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()).to(v.dtype), g, beta


@fault("gdn_post_conv", "beta rounded through b's type")
def _(honest, b, **arguments):
    q, k, v, g, beta = honest(b=b, **arguments)
    return q, k, v, g, beta.to(b.dtype).float()


@fault("gdn_post_conv", "norm over all heads")
def _(honest, **arguments):
    q, k, v, g, beta = honest(**arguments)
    return q / max(q.shape[1], 1) ** 0.5, k, v, g, beta


# ---- rows


@fault(["gather_state", "select_rows"], "the row after")
def _(honest, **arguments):
    source = next(iter(arguments.values()))
    return honest(**{**arguments, "indices": (arguments["indices"] + 1) % source.shape[0]})


@fault("gather_state", "flags ignored")
def _(honest, cache, indices, has_initial_state=None, out=None):
    return give(honest(cache, indices), out)


@fault("gather_state", "stale rows times zero")
def _(honest, cache, indices, has_initial_state=None, out=None):
    rows = honest(cache, indices)
    if has_initial_state is not None:
        rows = rows * has_initial_state.float().view(-1, *[1] * (rows.ndim - 1))
    return give(rows, out)


@fault("gather_state", "through bfloat16")
def _(honest, cache, indices, has_initial_state=None, out=None):
    return give(honest(cache, indices, has_initial_state).bfloat16().float(), out)


@fault(["gather_state", "scatter_state", "select_rows", "copy_rows"], "-1 means the last row")
def _(honest, **arguments):
    rows = next(iter(arguments.values())).shape[0]
    return honest(**{**arguments, "indices": arguments["indices"] % rows})


@fault(["scatter_state", "copy_rows"], "rows written in order")
def _(honest, **arguments):
    return honest(**{**arguments, "indices": arguments["indices"].sort().values})


@fault("scatter_state", "cut off, not rounded")
def _(honest, cache, rows, indices):
    if cache.dtype == torch.bfloat16:
        rows = (rows.view(torch.int32) & -65536).view(torch.float32)
    return honest(cache, rows, indices)


@fault("scatter_state", "other rows rounded too")
def _(honest, cache, rows, indices):
    honest(cache, rows, indices)
    others = [i for i in range(cache.shape[0]) if i not in indices.tolist()]
    cache[others] = cache[others].nan_to_num(0.0)
    cache[others] += 0.001 * cache[others]


@fault("select_rows", "bytes read as floats")
def _(honest, x, indices, out=None):
    rows = honest(x, indices)
    return give(rows.float().half().to(x.dtype) if x.is_floating_point() else rows, out)


@fault("copy_rows", "whole rows of a strided destination")
def _(honest, dst, src, indices):
    honest(dst, src, indices)
    if dst.stride(0) > dst.shape[1] and dst.element_size() == 2:
        gap = dst.as_strided((dst.shape[0] - 1, 1), (dst.stride(0), 1), dst.storage_offset() + dst.shape[1])
        gap.zero_()


@fault("copy_rows", "a row written twice in silence")
def _(honest, dst, src, indices):
    for row, index in zip(src, indices.tolist(), strict=False):
        dst[index] = row


# ---- elementwise


@fault("silu", "sigmoid")
def _(honest, x, out=None):
    return give(torch.sigmoid(x.float()).to(x.dtype), out)


@fault("silu", "the approximate exp of a GPU")
def _(honest, x, out=None):
    f = x.float()
    return give((f / (1 + torch.exp2((-f * 1.44269).float()))).to(x.dtype), out)


@fault("silu_mul", "up first, then gate")
def _(honest, x, out=None):
    gate, up = x.chunk(2, -1)
    return give(honest(torch.cat([up, gate], -1)), out)


@fault("silu_mul", "silu rounded through x's type")
def _(honest, x, out=None):
    gate, up = x.float().chunk(2, -1)
    act = (gate.double() * torch.sigmoid(gate.double())).float().to(torch.bfloat16).float()
    return give((act * up).to(x.dtype), out)


@fault("silu_mul", "gate and up interleaved")
def _(honest, x, out=None):
    return give(honest(torch.cat([x[..., ::2], x[..., 1::2]], -1)), out)


@fault("relu2", "not squared")
def _(honest, x, out=None):
    return give(x.relu(), out)


@fault("relu2", "negatives squared too")
def _(honest, x, out=None):
    return give(x.float().square().to(x.dtype), out)


@fault("relu2", "squared twice rounded")
def _(honest, x, out=None):
    return give((x.float().relu().square().bfloat16().float()).to(x.dtype), out)


@fault("scale", "divided")
def _(honest, x, s, out=None):
    return give((x.float() / (1 / s)).to(x.dtype), out)


@fault("scale", "in float64")
def _(honest, x, s, out=None):
    return give((x.double() * s).to(x.dtype), out)


@fault("convert", "a NaN rounded as a number")
def _(honest, x, dtype, out=None):
    if dtype != torch.bfloat16 or x.dtype != torch.float32:
        return honest(x, dtype, out)
    u = x.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return give((((u + 0x7FFF + ((u >> 16) & 1)) >> 16) & 0xFFFF).to(torch.uint16).view(torch.bfloat16), out)


@fault("convert", "cut off")
def _(honest, x, dtype, out=None):
    if dtype != torch.bfloat16 or x.dtype != torch.float32:
        return honest(x, dtype, out)
    return give((x.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16), out)


@fault("convert", "ties away from zero")
def _(honest, x, dtype, out=None):
    if dtype != torch.bfloat16 or x.dtype != torch.float32:
        return honest(x, dtype, out)
    u = x.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    away = (((u + 0x8000) >> 16) & 0xFFFF).to(torch.uint16).view(torch.bfloat16)
    return give(torch.where(x.isnan(), honest(x, dtype), away), out)


@fault("convert", "float16 by way of bfloat16")
def _(honest, x, dtype, out=None):
    return give(honest(x.bfloat16() if dtype == torch.float16 else x, dtype), out)
