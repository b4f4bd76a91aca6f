"""Planted faults of the gated delta rule and of the causal convolution, in every form.

`rule` and `conv` are small implementations that do right unless told to be `wrong`; a test holds them to the cases too, so
that what is caught is the fault and not the implementation."""

from __future__ import annotations

import torch
from planted import fault, give


def token(S, q, k, v, g, beta, scale, wrong=""):
    """One token, all heads: S [Hv, V, K] float32 is changed; q, k [Hk, K]; v [Hv, V]; g, beta [Hv]."""
    ratio = v.shape[0] // q.shape[0]
    tiled = wrong == "wrong GQA pairing"
    q, k = (t.float().repeat(ratio, 1) if tiled else t.float().repeat_interleave(ratio, 0) for t in (q, k))
    v, decay = v.float(), g.double().exp().float()[:, None, None]
    if wrong == "q not scaled":
        scale = 1.0
    if wrong == "k scaled too":
        k = k * scale
    if wrong == "g is no logarithm":
        decay = g[:, None, None]
    if wrong == "the decay of the first head":
        decay = decay[:1]
    if wrong == "decay after the read":
        read = (S * k[:, None]).sum(-1)
        S *= decay
    else:
        S *= decay
        read = (S * k[:, None]).sum(-1)
    early = (S * (q * scale)[:, None]).sum(-1)
    written = v if wrong == "what was read is not taken off" else v - read
    if wrong != "beta ignored":
        written = written * beta.float()[:, None]
    S += written[..., None] * k[:, None]
    return early if wrong == "output before the write" else (S * (q * scale)[:, None]).sum(-1)


def turned(S, there):
    """Transposed state: the storage [V, K] read as [K, V], and back."""
    shape = S.shape
    if there:
        return S.reshape(shape[0], shape[2], shape[1]).transpose(1, 2).contiguous()
    return S.transpose(1, 2).reshape(shape)


def sequence(S, q, k, v, g, beta, scale, wrong):
    """Tokens of one sequence; S is changed. Gives [T, Hv, V] in float32."""
    out = torch.zeros(v.shape)
    held = turned(S, True) if wrong == "transposed state" else S.clone()
    for t in range(q.shape[0]):
        if wrong == "state forgotten every 64 tokens" and t and t % 64 == 0:
            held.zero_()
        out[t] = token(held, q[t], k[t], v[t], g[t], beta[t], scale, wrong)
        if wrong == "state rounded after every token":
            held = held.bfloat16().float()
    S.copy_(turned(held, False) if wrong == "transposed state" else held)
    return out


PREFILL = (
    "wrong GQA pairing", "q not scaled", "k scaled too", "g is no logarithm", "the decay of the first head", "decay after the read",
    "output before the write", "what was read is not taken off", "beta ignored", "transposed state",
    "state forgotten every 64 tokens", "state rounded after every token", "state never written back", "a stale state used",
    "a fresh slot left stale", "the state of the sequence before", "the last token left out of the state",
    "slot 0 is no slot", "-1 is the last slot",
    "output rounded through bfloat16", "rows behind the last sequence left", "slots ignored",
)  # fmt: skip


def _prefill(wrong):
    def rule(
        honest, q, k, v, g, beta, state, cu_seqlens, *, scale, state_indices=None, has_initial_state=None, form="auto", out=None
    ):
        ends = [0, q.shape[0]] if cu_seqlens is None else cu_seqlens.tolist()
        slots = list(range(len(ends) - 1)) if state_indices is None or wrong == "slots ignored" else state_indices.tolist()
        if wrong == "-1 is the last slot":
            slots = [s % len(state) for s in slots]
        keeps = [True] * len(slots) if has_initial_state is None else has_initial_state.bool().tolist()
        result = torch.zeros(v.shape)
        if wrong == "rows behind the last sequence left":
            result.fill_(torch.nan)
            result[: ends[-1]] = 0
        before = None
        for i, slot in enumerate(slots):
            if slot < 0 or (wrong == "slot 0 is no slot" and state_indices is not None and slot == 0):
                continue
            a, b = ends[i], ends[i + 1]
            S = state[slot].clone() if keeps[i] or wrong == "a stale state used" else torch.zeros_like(state[slot])
            if wrong == "the state of the sequence before" and before is not None:
                S = before.clone()
            short = b - 1 if wrong == "the last token left out of the state" and b > a else b
            copy = S.clone()
            result[a:b] = sequence(copy, q[a:b], k[a:b], v[a:b], g[a:b], beta[a:b], scale, wrong)
            if short != b:
                sequence(S, q[a:short], k[a:short], v[a:short], g[a:short], beta[a:short], scale, wrong)
            else:
                S = copy
            if wrong == "a fresh slot left stale" and a == b:
                continue
            before = S
            if wrong != "state never written back":
                state[slot] = S
        if wrong == "output rounded through bfloat16":
            result = result.bfloat16().float()
        return give(result.to(v.dtype) if out is None else result, out)

    return rule


for _wrong in PREFILL:
    fault("gated_delta_rule", _wrong)(_prefill(_wrong))


STEP = (
    "wrong GQA pairing", "q not scaled", "k scaled too", "g is no logarithm", "decay after the read", "output before the write",
    "what was read is not taken off", "beta ignored", "transposed state", "state never written back", "slot 0 is no slot",
    "-1 is the last slot", "slots ignored", "output from the rounded state", "no slot leaves the output alone",
    "state cut off, not rounded",
)  # fmt: skip


def _kept(state, slot, S, wrong):
    if wrong == "state never written back":
        return
    if wrong == "state cut off, not rounded" and state.dtype == torch.bfloat16:
        S = (S.contiguous().view(torch.int32) & -65536).view(torch.float32)
    state[slot] = S.to(state.dtype)


def _rows(count, state_indices, state, wrong):
    slots = list(range(count)) if state_indices is None or wrong == "slots ignored" else state_indices.tolist()
    if wrong == "-1 is the last slot":
        slots = [s % len(state) for s in slots]
    if wrong == "slot 0 is no slot" and state_indices is not None:
        slots = [-1 if s == 0 else s for s in slots]
    return slots


def _one(state, slot, q, k, v, g, beta, scale, wrong):
    S = state[slot].float()
    o = sequence(S, q[None], k[None], v[None], g[None], beta[None], scale, wrong)[0]
    if wrong == "output from the rounded state":
        ratio = v.shape[0] // q.shape[0]
        o = (S.to(state.dtype).float() * (q.float() * scale).repeat_interleave(ratio, 0)[:, None]).sum(-1)
    _kept(state, slot, S, wrong)
    return o


def _step(wrong):
    def rule(honest, q, k, v, g, beta, state, *, scale, state_indices=None, out=None):
        result = torch.zeros(v.shape)
        if wrong == "no slot leaves the output alone":
            result.fill_(5.0)
        for row, slot in enumerate(_rows(q.shape[0], state_indices, state, wrong)):
            if slot >= 0:
                result[row] = _one(state, slot, q[row], k[row], v[row], g[row], beta[row], scale, wrong)
        return give(result.to(v.dtype) if out is None else result, out)

    return rule


for _wrong in STEP:
    fault("gated_delta_rule_step", _wrong)(_step(_wrong))


PACKED = (
    "beta rounded nowhere", "beta rounded twice", "q and k rounded through the activations' type", "q and k not normalized",
    "eps after the root", "softplus without its branch", "q, k, v in another order", "a and b exchanged", "A_log not raised",
    "wrong GQA pairing", "transposed state", "decay after the read", "k scaled too", "output from the rounded state",
    "slot 0 is no slot", "-1 is the last slot", "no slot leaves the output alone", "state never written back", "no dt_bias",
    "rows read as if they were contiguous",
)  # fmt: skip


def _normal(x, wrong, dtype):
    if wrong == "q and k not normalized":
        return x.float()
    square = x.float().square().sum(-1, keepdim=True)
    y = x.float() / (square.sqrt() + 1e-6) if wrong == "eps after the root" else x.float() / (square + 1e-6).sqrt()
    return y.to(dtype).float() if wrong == "q and k rounded through the activations' type" else y


def _packed(wrong):
    def rule(honest, mixed_qkv, a, b, A_log, dt_bias, state, state_indices, *, scale, round_beta=True, out=None):
        if wrong == "rows read as if they were contiguous":
            mixed_qkv, a, b = (t.as_strided(t.shape, (t.shape[1], 1)) for t in (mixed_qkv, a, b))
        if wrong == "a and b exchanged":
            a, b = b, a
        heads, values, keys = state.shape[1:]
        hk = (mixed_qkv.shape[1] - heads * values) // (2 * keys)
        if wrong == "q, k, v in another order":
            k, q, v = mixed_qkv.split([hk * keys, hk * keys, heads * values], 1)
        else:
            q, k, v = mixed_qkv.split([hk * keys, hk * keys, heads * values], 1)
        q, k = (_normal(t.unflatten(1, (hk, keys)), wrong, mixed_qkv.dtype) for t in (q, k))
        v = v.unflatten(1, (heads, values)).float()
        x = a.double() + (0 if wrong == "no dt_bias" else dt_bias.double())
        if wrong == "softplus without its branch":
            soft = torch.log1p(x.float().exp()).double()
        else:
            soft = torch.where(x > 20, x, torch.log1p(x.clamp(max=20).exp()))
        g = (-(A_log.double() if wrong == "A_log not raised" else A_log.double().exp()) * soft).float()
        beta = torch.sigmoid(b.double()).float()
        if round_beta and wrong != "beta rounded nowhere":
            beta = beta.to(b.dtype).float()
        if wrong == "beta rounded twice":
            beta = beta.bfloat16().float()
        result = torch.zeros(v.shape)
        if wrong == "no slot leaves the output alone":
            result.fill_(5.0)
        for row, slot in enumerate(_rows(len(v), state_indices, state, wrong)):
            if slot >= 0:
                result[row] = _one(state, slot, q[row], k[row], v[row], g[row], beta[row], scale, wrong)
        return give(result.to(mixed_qkv.dtype) if out is None else result, out)

    return rule


for _wrong in PACKED:
    fault("gated_delta_rule_packed_step", _wrong)(_packed(_wrong))


SPECULATIVE = (
    "start state read after the first snapshot", "start at column 0", "start at column accepted", "snapshots a column late",
    "a missing column ends the request", "only the last snapshot stored", "state rounded only at the end", "wrong GQA pairing",
    "transposed state", "decay after the read", "k scaled too", "no slot leaves the output alone", "slot 0 is no slot",
    "the start of the request before", "start slot stored too",
)  # fmt: skip


def _speculative(wrong):
    def rule(honest, q, k, v, g, beta, state, cu_seqlens, state_indices, num_accepted, *, scale, out=None):
        result = torch.zeros(v.shape)
        if wrong == "no slot leaves the output alone":
            result.fill_(5.0)
        ends = cu_seqlens.tolist()
        for i, (columns, accepted) in enumerate(zip(state_indices.tolist(), num_accepted.tolist(), strict=True)):
            a, b = ends[i], ends[i + 1]
            if a == b:
                continue  # whatever its row holds
            at = {"start at column 0": 0, "start at column accepted": min(accepted, len(columns) - 1)}.get(wrong, accepted - 1)
            start = columns[at]
            if start < 0 or (wrong == "slot 0 is no slot" and start == 0):
                continue
            S = state[start].float().clone()  # or the pool itself would be written
            if wrong == "the start of the request before" and i:
                S = state[state_indices[i - 1, accepted - 1]].float().clone()
            for j, t in enumerate(range(a, b)):
                if j and wrong == "start state read after the first snapshot" and accepted > 1:
                    S = state[start].float() if j == 1 else S
                result[t] = sequence(S, q[t : t + 1], k[t : t + 1], v[t : t + 1], g[t : t + 1], beta[t : t + 1], scale, wrong)[
                    0
                ]
                if wrong != "state rounded only at the end":
                    S = S.to(state.dtype).float()
                slot = columns[min(j + 1, len(columns) - 1)] if wrong == "snapshots a column late" else columns[j]
                if wrong == "a missing column ends the request" and slot < 0:
                    break
                if slot >= 0 and (wrong != "only the last snapshot stored" or t == b - 1):
                    state[slot] = S.to(state.dtype)
            if wrong == "start slot stored too":
                state[start] = S.to(state.dtype)
        return give(result.to(v.dtype) if out is None else result, out)

    return rule


for _wrong in SPECULATIVE:
    fault("gated_delta_rule_speculative_step", _wrong)(_speculative(_wrong))


# ---- the causal convolution


def _taps(window, weight, bias, activation, wrong):
    """window [W - 1 + n, C] -> [n, C]."""
    width = weight.shape[1]
    n = window.shape[0] - (width - 1)
    w = weight.float().flip(1) if wrong == "reversed taps" else weight.float()
    y = torch.zeros(n, window.shape[1]) + (0.0 if bias is None or wrong == "no bias" else bias.float())
    for j in range(width):
        y = y + w[:, j] * window[j : j + n]
    if activation == "silu" and wrong != "no activation":
        y = (y.double() * torch.sigmoid(y.double())).float()
    return y


CONV = (
    "reversed taps", "no bias", "no activation", "post-activation write-back", "zeros for a short sequence", "a stale state used",
    "state never written back", "slot 0 is no slot", "-1 is the last slot", "no slot gives zeros", "reads the sequence before",
    "taps taken from the end of a wide row", "rows read as if they were contiguous",
)  # fmt: skip


def _conv(wrong):
    def rule(
        honest, x, weight, bias, state, cu_seqlens=None, has_initial_state=None, *, activation="silu", state_indices=None,
        work=None, out=None,
    ):  # fmt: skip
        if wrong == "rows read as if they were contiguous":
            x = x.as_strided(x.shape, (x.shape[1], 1))
        old = weight.shape[1] - 1
        ends = [0, x.shape[0]] if cu_seqlens is None else cu_seqlens.tolist()
        keeps = [True] * (len(ends) - 1) if has_initial_state is None else has_initial_state.bool().tolist()
        y = torch.zeros_like(x) if out is None else out
        if wrong == "no slot gives zeros":
            y.zero_()
        for i, slot in enumerate(_rows(len(keeps), state_indices, state, wrong)):
            if slot < 0:
                continue
            a, b = ends[i], ends[i + 1]
            wide = wrong == "taps taken from the end of a wide row"
            row = state[slot, :, state.shape[2] - old :] if wide else state[slot, :, :old]
            before = row.float().t() if keeps[i] or wrong == "a stale state used" else torch.zeros(old, x.shape[1])
            if wrong == "reads the sequence before" and a >= old:
                before = x[a - old : a].float()
            window = torch.cat([before, x[a:b].float()])
            done = _taps(window, weight, bias, activation, wrong)
            y[a:b] = done.to(y.dtype)
            if wrong == "post-activation write-back":
                window = torch.cat([before, done])
            if wrong == "zeros for a short sequence" and b - a < old:
                window = torch.cat([torch.zeros(old, x.shape[1]), x[a:b].float()])
            if wrong != "state never written back":
                row.copy_(window[window.shape[0] - old :].t())
        return y

    return rule


def _conv_step(wrong):
    def rule(honest, x, weight, bias, state, *, activation="silu", state_indices=None, out=None):
        ends = torch.arange(x.shape[0] + 1)
        if state_indices is None:
            state_indices = torch.arange(x.shape[0])
        return _conv(wrong)(honest, x, weight, bias, state, ends, activation=activation, state_indices=state_indices, out=out)

    return rule


for _wrong in CONV:
    fault("causal_conv1d", _wrong)(_conv(_wrong))
for _wrong in CONV:
    if _wrong not in ("zeros for a short sequence", "a stale state used", "reads the sequence before"):
        fault("causal_conv1d_step", _wrong)(_conv_step(_wrong))

SPECULATIVE_CONV = (
    "offset ignored", "offset is accepted", "full-width keep", "later columns zeroed", "reversed taps", "post-activation write-back",
    "no slot gives zeros", "two taps dropped", "slot 0 is no slot",
)  # fmt: skip


def _speculative_conv(wrong):
    def rule(honest, x, weight, bias, state, cu_seqlens, state_indices, num_accepted, *, activation="silu", out=None):
        old, columns = weight.shape[1] - 1, state.shape[2]
        y = torch.zeros_like(x) if out is None else out
        if wrong == "no slot gives zeros":
            y.zero_()
        ends = cu_seqlens.tolist()
        for i, (slot, accepted) in enumerate(zip(state_indices.tolist(), num_accepted.tolist(), strict=True)):
            a, b = ends[i], ends[i + 1]
            if slot < 0 or a == b or (wrong == "slot 0 is no slot" and slot == 0):
                continue
            offset = {"offset ignored": 0, "offset is accepted": accepted}.get(wrong, accepted - 1)
            row = state[slot].float()
            padded = torch.cat([row, torch.zeros(x.shape[1], columns)], 1)
            window = torch.cat([padded[:, offset : offset + old].t(), x[a:b].float()])
            done = _taps(window, weight, bias, activation, wrong)
            y[a:b] = done.to(y.dtype)
            new = torch.cat([window[:old], done])[1:] if wrong == "post-activation write-back" else window[1:]
            if wrong == "two taps dropped":
                new = window[2:]
            if wrong == "full-width keep":
                new = torch.cat([padded[:, offset + 1 : offset + 1 + columns - (b - a)].t(), x[a:b].float()])
            if wrong == "later columns zeroed":
                state[slot] = 0
            state[slot, :, : new.shape[0]] = new.t()[:, :columns].to(state.dtype)
        return y

    return rule


for _wrong in SPECULATIVE_CONV:
    fault("causal_conv1d_speculative_step", _wrong)(_speculative_conv(_wrong))

RIGHT = {
    "gated_delta_rule": _prefill(""), "gated_delta_rule_step": _step(""), "gated_delta_rule_packed_step": _packed(""),
    "gated_delta_rule_speculative_step": _speculative(""), "causal_conv1d": _conv(""), "causal_conv1d_step": _conv_step(""),
    "causal_conv1d_speculative_step": _speculative_conv(""),
}  # fmt: skip
