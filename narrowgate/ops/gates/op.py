"""The gates of the gated delta rule: how much of the state is kept (in log space) and how much is written.

`gdn_gate` starts from a checkpoint's A_log; `gdn_decay` from -exp(A_log), the form in which GGUF stores it. Both give
float32, beta unrounded: only the packed step rounds beta (SPEC D33, D43)."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgate.dispatch import Kernel, Operator
from narrowgate.ops import checks
from narrowgate.ops.host import host_kernel

_REFERENCE = "narrowgate.ops.gates.reference"


def _gates(a: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    return torch.empty(a.shape, device=a.device), torch.empty(a.shape, device=a.device)


def _decays(alpha: Tensor, *args: object, **kwargs: object) -> Tensor:
    return torch.empty(alpha.shape, device=alpha.device)


def _check_gdn_gate(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> None:
    op = "gdn_gate"
    checks.shape(op, "a", a, None, None)
    checks.shape(op, "b", b, *a.shape)
    checks.shape(op, "A_log", A_log, a.shape[1])
    checks.shape(op, "dt_bias", dt_bias, a.shape[1])
    checks.floats(op, a=a, b=b, A_log=A_log, dt_bias=dt_bias)
    checks.device(op, a, b=b, A_log=A_log, dt_bias=dt_bias)


def _check_gdn_decay(alpha: Tensor, dt_bias: Tensor, neg_a: Tensor) -> None:
    op = "gdn_decay"
    checks.shape(op, "alpha", alpha, None, None)
    checks.shape(op, "dt_bias", dt_bias, alpha.shape[1])
    checks.shape(op, "neg_a", neg_a, alpha.shape[1])
    checks.floats(op, alpha=alpha, dt_bias=dt_bias, neg_a=neg_a)
    checks.device(op, alpha, dt_bias=dt_bias, neg_a=neg_a)


_gdn_gate = Operator(
    "gdn_gate", "Tensor a, Tensor b, Tensor A_log, Tensor dt_bias",
    f"{_REFERENCE}:gdn_gate", allocate=_gates, check=_check_gdn_gate, returns=2, has_out=False,
)  # fmt: skip
_gdn_decay = Operator(
    "gdn_decay", "Tensor alpha, Tensor dt_bias, Tensor neg_a",
    f"{_REFERENCE}:gdn_decay", allocate=_decays, check=_check_gdn_decay, has_out=False,
)  # fmt: skip

for _operator in (_gdn_gate, _gdn_decay):
    _operator.add(host_kernel(f"narrowgate.ops.gates.cpu:{_operator.name}"))
    _operator.add(Kernel("gpu", f"narrowgate.ops.gates.gpu:{_operator.name}"))


def gdn_gate(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log) * softplus(a + dt_bias), the log decay (<= 0), and beta = sigmoid(b).

    softplus(x) is x above 20, else log(1 + exp x). a, b: [T, Hv], rows may be strided; A_log, dt_bias: [Hv]; each float32,
    bfloat16 or float16. Returns (g, beta), float32 [T, Hv], beta not rounded through b's dtype. Raises InputError.
    Source: SPEC D43.

    >>> g, beta = gdn_gate(torch.tensor([[0.5]]), torch.tensor([[1.0]]), torch.zeros(1), torch.tensor([0.5]))
    >>> g, beta
    (tensor([[-1.3133]]), tensor([[0.7311]]))
    """
    return _gdn_gate(a, b, A_log, dt_bias, impl=impl)


def gdn_decay(alpha: Tensor, dt_bias: Tensor, neg_a: Tensor, *, impl: str | None = None) -> Tensor:
    """g = softplus(alpha + dt_bias) * neg_a, the log decay, where neg_a = -exp(A_log) is stored already negated.

    alpha: [T, H], rows may be strided; dt_bias, neg_a: [H]; each float32, bfloat16 or float16. Returns float32 [T, H].
    neg_a must be < 0 for g to be a decay; its values are not looked at. Raises InputError. Source: SPEC C1, C2.

    >>> gdn_decay(torch.tensor([[0.5, 100.0]]), torch.tensor([0.5, 0.0]), torch.tensor([-1.0, -0.5]))
    tensor([[ -1.3133, -50.0000]])
    """
    return _gdn_decay(alpha, dt_bias, neg_a, impl=impl)
