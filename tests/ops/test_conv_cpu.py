"""The CPU's convolution over whole sequences: before the activation the reference's bits, with it a chain of steps, at every width."""

import pytest
import torch

from narrowgate import ops

pytest.importorskip("numba")


@pytest.mark.parametrize("width", [4, 3])
@pytest.mark.parametrize("channels", [5, 40, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sequences_of_every_length(width, channels, dtype):
    cu = torch.tensor([0, 0, 1, 3, 6, 23, 63])  # 0, 1, 2, 3, 17 and 40 tokens: no turn of 16, one, several
    x, weight, bias = (torch.randn(*s).to(dtype) for s in ((63, channels), (channels, width), (channels,)))
    before = torch.randn(6, channels, width - 1)
    for b in (None, bias.float()):
        for fresh in (None, torch.tensor([1, 0, 1, 0, 1, 0], dtype=torch.bool)):
            states = before.clone(), before.clone()
            found, want = (
                ops.causal_conv1d(x, weight, b, state, cu, fresh, activation=None, impl=impl)
                for state, impl in zip(states, ("cpu", "reference"), strict=True)
            )
            assert torch.equal(found, want)
            assert torch.equal(*states)
        whole, steps = before[:1].clone(), before[:1].clone()
        y = ops.causal_conv1d(x, weight, b, whole, impl="cpu")
        chain = [ops.causal_conv1d_step(x[i : i + 1], weight, b, steps, impl="cpu") for i in range(63)]
        assert torch.equal(y, torch.cat(chain))
        assert torch.equal(whole, steps)
