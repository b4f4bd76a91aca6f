"""Between the convolution and the rule: rows of [q | k | v] taken apart, and that fused with the norms and gates."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.dispatch import Kernel, Operator
from narrowgate.ops import checks
from narrowgate.ops.host import host_kernel

_REFERENCE = "narrowgate.ops.post_conv.reference"


def _qkv(mixed: Tensor, *, num_k_heads: int, head_k_dim: int, head_v_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, width = mixed.shape
    heads = (width - 2 * num_k_heads * head_k_dim) // head_v_dim

    def new(h: int, d: int) -> Tensor:
        return torch.empty(tokens, h, d, dtype=mixed.dtype, device=mixed.device)

    return new(num_k_heads, head_k_dim), new(num_k_heads, head_k_dim), new(heads, head_v_dim)


def _all_five(
    conv_out: Tensor, a: Tensor, *args: object, num_k_heads: int, head_k_dim: int, head_v_dim: int, **kwargs: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v = _qkv(conv_out, num_k_heads=num_k_heads, head_k_dim=head_k_dim, head_v_dim=head_v_dim)
    return q, k, v, torch.empty(a.shape, device=a.device), torch.empty(a.shape, device=a.device)


def _check_mixed(op: str, name: str, mixed: Tensor, num_k_heads: int, head_k_dim: int, head_v_dim: int) -> int:
    """Returns Hv."""
    checks.shape(op, name, mixed, None, None)
    sizes = f"num_k_heads={num_k_heads}, head_k_dim={head_k_dim}, head_v_dim={head_v_dim}"
    checks.expect(op, min(num_k_heads, head_k_dim, head_v_dim) > 0, f"expected positive sizes, got {sizes}")
    values = mixed.shape[1] - 2 * num_k_heads * head_k_dim
    good = values >= 0 and values % head_v_dim == 0
    checks.expect(op, good, f"expected {name} rows of 2 * Hk * K + Hv * V values with {sizes}, got {mixed.shape[1]}")
    heads = values // head_v_dim
    checks.expect(op, heads % num_k_heads == 0, f"Hv must be a multiple of Hk (GQA broadcast), got {heads} and {num_k_heads}")
    checks.floats(op, **{name: mixed})
    return heads


def _check_split(mixed: Tensor, *, num_k_heads: int, head_k_dim: int, head_v_dim: int) -> None:
    _check_mixed("split_qkv", "mixed", mixed, num_k_heads, head_k_dim, head_v_dim)


def _check_post_conv(
    conv_out: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, num_k_heads: int, head_k_dim: int,
    head_v_dim: int, eps: float = 1e-6,
) -> None:  # fmt: skip
    op = "gdn_post_conv"
    heads = _check_mixed(op, "conv_out", conv_out, num_k_heads, head_k_dim, head_v_dim)
    checks.expect(op, eps >= 0, f"expected eps >= 0, got {eps}")
    checks.shape(op, "a", a, conv_out.shape[0], heads)
    checks.shape(op, "b", b, conv_out.shape[0], heads)
    checks.shape(op, "A_log", A_log, heads)
    checks.shape(op, "dt_bias", dt_bias, heads)
    checks.floats(op, a=a, b=b, A_log=A_log, dt_bias=dt_bias)
    checks.device(op, conv_out, a=a, b=b, A_log=A_log, dt_bias=dt_bias)


_split_qkv = Operator(
    "split_qkv", "Tensor mixed, *, int num_k_heads, int head_k_dim, int head_v_dim",
    f"{_REFERENCE}:split_qkv", allocate=_qkv, check=_check_split, returns=3, has_out=False,
)  # fmt: skip
_gdn_post_conv = Operator(
    "gdn_post_conv",
    "Tensor conv_out, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, *, int num_k_heads, int head_k_dim, "
    "int head_v_dim, float eps=1e-6",
    f"{_REFERENCE}:gdn_post_conv", allocate=_all_five, check=_check_post_conv, returns=5, has_out=False,
)  # fmt: skip

for _operator in (_split_qkv, _gdn_post_conv):
    _operator.add(host_kernel(f"narrowgate.ops.post_conv.cpu:{_operator.name}"))
    _operator.add(Kernel("gpu", f"narrowgate.ops.post_conv.gpu:{_operator.name}"))


def split_qkv(
    mixed: Tensor, *, num_k_heads: int, head_k_dim: int, head_v_dim: int, impl: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of [q | k | v] taken apart into contiguous q, k [T, Hk, K] and v [T, Hv, V]; copies, no arithmetic.

    mixed: [T, 2 * Hk * K + Hv * V] float32, bfloat16 or float16, rows may be strided. Hv follows from the width.
    Raises InputError. Source: SPEC D43.

    >>> q, k, v = split_qkv(torch.arange(8.0).reshape(1, 8), num_k_heads=1, head_k_dim=2, head_v_dim=2)
    >>> q, k, v.shape
    (tensor([[[0., 1.]]]), tensor([[[2., 3.]]]), torch.Size([1, 2, 2]))
    """
    return _split_qkv(mixed, num_k_heads=num_k_heads, head_k_dim=head_k_dim, head_v_dim=head_v_dim, impl=impl)


def gdn_post_conv(
    conv_out: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, num_k_heads: int, head_k_dim: int,
    head_v_dim: int, eps: float = 1e-6, impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`split_qkv`, `l2_norm` of q and of k, and `gdn_gate` in one: bit for bit what they give one after another.

    conv_out: [T, 2 * Hk * K + Hv * V]; a, b: [T, Hv]; A_log, dt_bias: [Hv]; each float32, bfloat16 or float16, rows may be
    strided. Returns q, k (normalized) and v in conv_out's dtype, and g (log decay) and beta, float32 [T, Hv].
    Raises InputError. Source: SPEC D44.

    >>> a, b = torch.tensor([[0.5]]), torch.tensor([[1.0]])
    >>> row = torch.tensor([[3.0, 4.0, 0.0, 2.0, 7.0]])
    >>> q, k, v, g, beta = gdn_post_conv(row, a, b, torch.zeros(1), a[0], num_k_heads=1, head_k_dim=2, head_v_dim=1)
    >>> q, v, g
    (tensor([[[0.6000, 0.8000]]]), tensor([[[7.]]]), tensor([[-1.3133]]))
    """
    return _gdn_post_conv(
        conv_out,
        a,
        b,
        A_log,
        dt_bias,
        num_k_heads=num_k_heads,
        head_k_dim=head_k_dim,
        head_v_dim=head_v_dim,
        eps=eps,
        impl=impl,
    )
