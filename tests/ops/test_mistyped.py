"""An argument that is no tensor is refused by its name, in one line, as any other wrong argument."""

import pytest
import torch

import narrowgate as ng
from narrowgate import ops
from narrowgate.errors import InputError, UnsupportedError

X = torch.ones(2, 8)
CALLS = {
    "a list": (lambda: ops.l2_norm([1.0, 2.0]), "l2_norm: expected x of type Tensor, got list"),
    "nothing": (lambda: ops.rms_norm(None, eps=1e-6), "rms_norm: expected x of type Tensor, got NoneType"),
    "words for eps": (lambda: ops.l2_norm(X, eps="small"), "l2_norm: expected eps of type float, got str"),
    "a number for a weight": (lambda: ops.rms_norm(X, 3.0, eps=1e-6), "rms_norm: expected weight of type Tensor, got float"),
    "a list of ids": (lambda: ng.embedding([0, 1], X), "embedding: expected ids of type Tensor, got list"),
}


@pytest.mark.parametrize("name", CALLS)
def test_refused_by_name(name):
    call, message = CALLS[name]
    with pytest.raises(InputError) as refused:
        call()
    assert str(refused.value) == message


def test_an_out_that_requires_grad():
    with pytest.raises(UnsupportedError, match="requires no grad"):
        ops.silu(X, out=torch.zeros(2, 8, requires_grad=True))
