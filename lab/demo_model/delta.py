"""The gated delta rule over chunks, arranged for training: one small product a chunk in the sequential part.

transformers' torch form runs four products a chunk one after the other. Here each chunk's effect on the state is first folded
into S' = M S + N for all chunks at once, and the outputs are computed from the stored states afterwards. The products stay
out of autocast (TF32 on a GPU, never bfloat16). The causal convolution is four shifted products, because cuDNN's depthwise
backward is slow. The same functions of the same inputs; `train.py` compares them with transformers' before it starts."""

import torch
import torch.nn.functional as F


def chunk_delta_rule(query, key, value, g, beta, initial_state=None, output_final_state=False, chunk=64, **_):
    """query, key [B, T, Hk, K], value [B, T, Hv, V], g (log decay) and beta [B, T, Hv] -> ([B, T, Hv, V], None)."""
    if initial_state is not None or output_final_state or query.shape[1] % chunk:
        raise ValueError("chunk_delta_rule: for training only: no state, whole chunks")
    with torch.autocast(query.device.type, enabled=False):
        return _rule(query, key, value, g, beta, chunk), None


def _rule(query, key, value, g, beta, chunk):
    dtype, groups = query.dtype, value.shape[2] // key.shape[2]

    def chunks(x):  # [B, T, H, ...] -> float32 [B, H, chunks, chunk, ...]
        return x.float().unflatten(1, (-1, chunk)).movedim(3, 1)

    q, k = (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    q, k = (chunks(x.repeat_interleave(groups, 2)) for x in (q * query.shape[-1] ** -0.5, k))
    v, beta = chunks(value), chunks(beta)[..., None]
    total = chunks(g).cumsum(-1)  # log decay since the chunk's start
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    start, end = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]

    system = (k * beta) @ k.mT * decay
    solved = torch.linalg.solve_triangular(system, torch.cat([v * beta, k * beta * start], -1), upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    carried = (k * end).mT
    keep = total[..., -1].exp()[..., None, None] * torch.eye(k.shape[-1], device=q.device)
    transition, update = keep - carried @ w, carried @ u

    state = torch.zeros_like(update[:, :, 0])
    before = []
    for step, add in zip(transition.unbind(2), update.unbind(2), strict=True):
        before.append(state)
        state = step @ state + add
    states = torch.stack(before, 2)
    out = (q * start) @ states + (q @ k.mT * decay) @ (u - w @ states)
    return out.movedim(1, 3).flatten(1, 2).to(dtype)


def causal_conv1d(hidden_states, weight, bias=None, activation=None, **_):
    """hidden_states [B, C, T], weight [C, W] -> silu(causal depthwise convolution) [B, C, T]."""
    if bias is not None or activation != "silu":
        raise ValueError("causal_conv1d: for training only: SiLU, no bias")
    width, length = weight.shape[1], hidden_states.shape[2]
    padded, weight = F.pad(hidden_states, (width - 1, 0)), weight.float()
    return F.silu(sum(padded[:, :, i : i + length] * weight[:, i, None] for i in range(width))).to(hidden_states.dtype)


def rule_difference(reference, device: str) -> dict[str, float]:
    """Relative errors (Frobenius) of the output and of each gradient against another implementation, float32."""
    shapes = ((2, 192, 2, 128), (2, 192, 2, 128), (2, 192, 4, 128), (2, 192, 4), (2, 192, 4))
    inputs = [torch.randn(s, device=device) for s in shapes]
    inputs[3], inputs[4] = -0.03 * F.softplus(inputs[3]), inputs[4].sigmoid()
    results = []
    for rule in (chunk_delta_rule, reference):
        leaves = [x.clone().requires_grad_() for x in inputs]
        q, k, v, g, beta = leaves
        if rule is reference:  # transformers before 5.24 wants the heads repeated already
            q, k = q.repeat_interleave(2, 2), k.repeat_interleave(2, 2)
        out = rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
        out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    names = ("out", "dq", "dk", "dv", "dg", "dbeta")
    return {n: float((a - b).norm() / b.norm()) for n, a, b in zip(names, *results, strict=True)}


def conv_difference(reference, device: str) -> float:
    """Relative error of the convolution against another implementation, float32."""
    x, weight = torch.randn(2, 40, 77, device=device), torch.randn(40, 4, device=device)
    out, expected = (f(x, weight, None, activation="silu") for f in (causal_conv1d, reference))
    return float((out - expected).norm() / expected.norm())
